"""Everything that depends on parts of vLLM which are private or change between releases.

Builds of one release for CPU and CUDA have the same Python sources. `vllm_release` names the
supported releases, `vllm_differences` asks which of two forms a release has, and
`scripts/try_vllm.sh VERSION` says what another release breaks. docs/vllm-notes.md lists the
behaviour that is relied on here, with upstream's issues and files.

Variables for an engine's processes are set in the environment only while the engine starts, and are
restored afterwards, so that the trainer's own process keeps its torch.compile and its NCCL
settings. The only change that an import of vLLM leaves in this process is its patches of Inductor
(`vllm.env_override`).
"""

import asyncio
import dataclasses
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from generation import shims
from generation.engine.allocator import ALLOCATOR_VARIABLES, without_expandable_segments
from generation.engine.cpu_kernels import hidden_instructions, kernel_environment
from generation.engine.devices import full_uuids
from generation.engine.settings import (
    LORA_RANKS,
    OWN_ARGUMENTS,
    VLLM_NAMES,
    EngineSettings,
    check_routes,
    check_worker_classes,
)
from generation.engine.spawning import spawned_below
from generation.engine.start_errors import START_ERROR
from generation.engine.vllm_differences import needs_cut_prompts
from generation.engine.vllm_release import check_build, check_keyed_noise, check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# A vLLM process that inherits these joins the trainer's process group, or waits for a store that no
# process serves (https://github.com/pytorch/pytorch/pull/192113).
_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


# This logger says "Triton not available" in every process on a CPU (for
# vllm/kernels/triton/activation.py).
_TRITON_LOG = "torch._library.triton"
# This one says so beside a torch that brings Triton, before vLLM sets up logging
# (vllm/triton_utils/importing.py).
_VLLM_TRITON_LOG = "vllm.triton_utils.importing"


def _quiet_environment() -> dict[str, str]:
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    # Against dozens of useless lines
    env |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return env | {
        "TORCH_LOGS": ",".join(filter(None, (os.environ.get("TORCH_LOGS"), f"-{_TRITON_LOG}")))
    }


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment variables that the engine's processes start with."""
    env = _quiet_environment() | shims.python_path()
    env["GLOO_SOCKET_IFNAME"] = "lo"  # an engine is on one machine, even if the trainer is on several
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # nothing that came over a socket is unpickled
    if not settings.on_cpu:
        # As this process counts
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        indices = settings.device_indices
        if visible:
            devices = visible.split(",")
            names = full_uuids([devices[index].strip() for index in indices])
        else:
            names = [str(index) for index in indices]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        for variable in ALLOCATOR_VARIABLES:
            if variable in os.environ:
                env[variable] = without_expandable_segments(os.environ[variable])
        if settings.dtype == "float32":
            # Attention in float32 is Triton's (vllm/v1/attention/ops/triton_unified_attention.py),
            # whose products are rounded to TF32 by default. Triton compiles anew when the variable
            # changes.
            env["TRITON_F32_DEFAULT"] = os.environ.get("TRITON_F32_DEFAULT", "ieee")
        return env | _CUDA_ENVIRONMENT | _rank_environment()
    env["OMP_NUM_THREADS"] = str(settings.cpu_threads)
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, settings.cpu_cores)) or "nobind"
    env |= kernel_environment(plain=settings.plain_cpu_weights)
    # oneDNN caches compiled primitives by shape, some 30 KiB each. Batches of all sizes would fill
    # its default of 1024 entries over hundreds of steps
    # (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html).
    env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if settings.tensor_parallel_size == 1:
        # Lets the CPU platform run its worker inside the engine process (vllm/platforms/cpu.py).
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.enforce_eager:
        # Otherwise the first request compiles `batched_count_greater_than`
        # (vllm/v1/sample/ops/logprobs.py).
        env["TORCH_COMPILE_DISABLE"] = "1"
    return env


_CUDA_ENVIRONMENT = {
    # vLLM forks unless this process has initialised CUDA itself. But after it has merely counted
    # devices, its children cannot use CUDA (https://github.com/pytorch/pytorch/issues/40403).
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # FlashInfer's sampler compiles with nvcc, and serves only requests without a seed and
    # log-probabilities: none here (vllm/v1/sample/ops/topk_topp_sampler.py).
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Has an effect under WSL 2 only: the model runner has buffers in page-locked memory and does
    # not start without them (https://docs.vllm.ai/en/latest/configuration/env_vars/).
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "1",
}


def _rank_environment() -> dict[str, str]:
    """Return variables that keep engines of several ranks from disturbing each other while they
    start.

    vLLM looks for a free port and binds it later
    (https://github.com/vllm-project/vllm/issues/39015). Each process looks in a range of its own,
    below the system's ports, so that no two find the same port. vLLM also writes some files of its
    compilation cache in place (vllm/compilation/backends.py), so that each rank has a cache of its
    own; on several machines, which may share a home, its folder names the machine.
    """
    apart = {"VLLM_PORT": str(10_000 + os.getpid() % 1_400 * 16)}
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    several_machines = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")
    folders = [platform.node()] if several_machines else []
    if local_rank:
        folders.append(f"local_rank_{local_rank}")
    if folders:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = os.environ.get("VLLM_CACHE_ROOT") or f"{cache}/vllm"
        apart["VLLM_CACHE_ROOT"] = os.path.join(os.path.expanduser(root), *folders)
    return apart


@contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    """Hide torchrun's variables and set those of `changed`; restore the environment on exit."""
    import torch

    for name in (_TRITON_LOG, _VLLM_TRITON_LOG):
        logging.getLogger(name).setLevel(logging.ERROR)
    before = dict(os.environ)
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    os.environ.update(changed)
    for name in [name for name in os.environ if name in _TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)  # vllm/platforms/cuda.py switches it off
        # Only variables that differ: when an engine starts again, other threads read the
        # environment meanwhile.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name in (name for name, value in before.items() if os.environ.get(name) != value):
            os.environ[name] = before[name]


def started_with(settings: EngineSettings) -> AbstractContextManager[None]:
    """Return a context in whose environment an engine starts: torchrun's variables are hidden, the
    engine's are set.
    """
    return _environment(engine_environment(settings))


def fork_engines() -> Callable[[], None]:
    """Have engines on CPU forked, with this process's imports, from now on; return a function that
    ends this.

    Call it before there are other threads or a process group. It does nothing without vLLM's build
    for CPUs. `generation.engine.forkserver`, which nothing else imports, says how and why.
    """
    with _environment(_quiet_environment()), suppress(ImportError):
        check_version()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from generation.engine import forkserver

            forkserver.start()
            return forkserver.stop
    return lambda: None


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return keyword arguments of `AsyncEngineArgs`; none that changes what is sampled is left to a
    default.
    """
    # The CPU platform refuses sleep mode (vllm/platforms/interface.py); the worker extension sleeps
    # instead.
    sleeps = settings.sleep and not settings.on_cpu
    deeply = sleeps and settings.deep_sleep
    arguments: dict[str, Any] = {
        name: getattr(settings, field) for name, field in VLLM_NAMES.items()
    } | {
        "tokenizer": settings.tokenizer or settings.model,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": settings.worker_extension or "",
        "enable_sleep_mode": sleeps,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
    }
    if deeply:  # vLLM 0.31 lacks the first of these arguments
        arguments["sleep_mode_offload_cudagraph"] = True
        arguments["enable_nccl_comm_suspend"] = settings.tensor_parallel_size > 1
    if settings.on_cpu:
        # A prompt that is cut in two asks its seeded generator for an offset, which CPU generators
        # do not have, and the engine dies (https://github.com/vllm-project/vllm/pull/10097, and in
        # 0.32 `_bookkeeping_sync` of vllm/v1/worker/gpu_model_runner.py); so prompts are never cut,
        # and a step can hold the longest one.
        tokens = max(2048, settings.max_model_len, settings.max_num_seqs)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
    else:
        # vLLM's default for an AsyncLLM is 2048 tokens a step (vllm/engine/arg_utils.py,
        # get_batch_defaults), of which every sequence that is being decoded takes one.
        arguments["max_num_batched_tokens"] = max(8192, settings.max_num_seqs)
    if settings.worker_class is None:
        kind = "cpu_worker.CPUWorker" if settings.on_cpu else "cuda_worker.CudaWorker"
        arguments["worker_cls"] = f"generation.engine.{kind}"
    if settings.lora_rank:
        room = next(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
    # Ignored for models of text. At no image and no video vLLM would leave out the encoder, whose
    # weights are sent, and its start makes the largest inputs that it allows.
    # generation/engine/image_inputs.py caches processed images; vLLM's cache is off, since its copy
    # in the core would have to see the same images in the same order.
    limits = {"image": max(1, settings.images), "video": 0}
    arguments |= {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    arguments |= settings.extra
    if settings.routes and not settings.on_cpu:  # on CPU the worker extension records them
        arguments["enable_return_routed_experts"] = True
    if settings.fp32_head:
        arguments["hf_overrides"] = dict(arguments.get("hf_overrides") or {}) | {"head_dtype": "float32"}
    return arguments


def start_async_llm(
    settings: EngineSettings, folder: Path, stat_loggers: list[Any] | None = None
) -> "AsyncLLM":
    """Start an `AsyncLLM`, whose engine core and workers are below this process; blocks until it
    can generate.

    `folder` is for the engine's sockets; the guardian of a spawned core deletes it when this
    process has ended. `stat_loggers`, for example from `step_logger`, are called after every step.
    Raises ImportError where the installed vLLM is not a supported release, and ValueError where it
    is built for the other kind of device, a class for its workers is missing, an entry of
    `settings.extra` is not an engine argument, or vLLM on CPU cannot run the model.
    """
    reason = folder / "reason"
    sockets = os.environ.get("VLLM_RPC_BASE_PATH", str(folder))  # a run has one folder for all of them
    with started_with(settings):
        config = _checked_config(settings)
        from vllm.v1.engine.async_llm import AsyncLLM

        quiet = engine_arguments(settings)["disable_log_stats"]
        try:
            with (
                _environment({START_ERROR: str(reason), "VLLM_RPC_BASE_PATH": sockets}),
                spawned_below(folder),
            ):
                return AsyncLLM.from_vllm_config(
                    config, stat_loggers=stat_loggers, disable_log_stats=quiet
                )
        except RuntimeError as error:
            if not reason.exists():
                raise
            names = ", ".join(config.model_config.architectures)
            text = " ".join(reason.read_text("utf-8").split())
            reason.unlink()
            if "out of memory" in text.lower():  # which may be another process's fault, and pass
                raise RuntimeError(f"vLLM cannot start {names}: {text}") from error
            raise ValueError(
                f"vLLM cannot start {names} here ({text}): use another model or machine"
            ) from error


def _checked_config(settings: EngineSettings) -> "VllmConfig":
    """Return vLLM's configuration for these settings. Call it inside `started_with`; raises as
    `start_async_llm`.
    """
    check_version()
    check_build(settings)
    check_worker_classes(settings)
    check_routes(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = engine_arguments(settings)
    names = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(set(arguments) - names):
        import vllm

        key = OWN_ARGUMENTS.get(unknown[0]) or "engine.extra"
        raise ValueError(f"{key}: vLLM {vllm.__version__} has no engine argument {', '.join(unknown)}")
    import torch

    preloaded = os.environ.get("LD_PRELOAD", "")
    with ExitStack() as changes:
        if settings.on_cpu:
            changes.enter_context(hidden_instructions(settings.plain_cpu_weights))
            changes.enter_context(classes_inspected_here())
        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except (AssertionError, ValueError) as error:
            if not needs_cut_prompts(error):
                raise
            config = AsyncEngineArgs(
                **arguments | {"enable_prefix_caching": False}
            ).create_engine_config()
    if {" ", ":"} & {*torch.__file__}:
        # ld.so would split the path of libgomp that vllm/platforms/cpu.py has added
        os.environ["LD_PRELOAD"] = preloaded
    if settings.keyed_noise:
        check_keyed_noise(settings, config)
    return config


@contextmanager
def classes_inspected_here() -> Iterator[None]:
    """Have vLLM import a model's class in this process to see what the class supports.

    Otherwise a Python of its own does so, to keep CUDA out of this process, and imports everything
    again: about 10 s of CPU time where a class is used for the first time
    (vllm/model_executor/models/registry.py).
    """
    from vllm.model_executor.models import registry

    in_subprocess = registry._run_in_subprocess
    registry._run_in_subprocess = lambda inspect: inspect()
    try:
        yield
    finally:
        registry._run_in_subprocess = in_subprocess


def frontend(settings: EngineSettings) -> "AsyncLLM":
    """Return an `AsyncLLM` without an engine core, which gives vLLM's server everything except
    answers.

    It is for engines in other processes. Its `__init__` does the part of `AsyncLLM.__init__`
    (vllm/v1/engine/async_llm.py) that comes before the engine core. Raises as `start_async_llm`.
    """
    with started_with(settings):
        config = _checked_config(settings)
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.input_processor import InputProcessor

        class Frontend(AsyncLLM):
            errored = False  # type: ignore[assignment]
            admission_stats = None
            log_requests = log_stats = False

            def __init__(self) -> None:
                self.vllm_config = config
                self.model_config = config.model_config
                self.scheduler_config = config.scheduler_config
                self.observability_config = config.observability_config
                self.renderer = renderer_from_config(config)
                self.input_processor = InputProcessor(config, self.renderer)

            async def get_supported_tasks(self) -> tuple[str, ...]:
                return ("generate",)

            def shutdown(self, timeout: float | None = None) -> None:
                pass

        return Frontend()


def stop_async_llm(engine: "AsyncLLM") -> None:
    """Stop an engine's processes.

    Its output task (vllm/v1/engine/async_llm.py, _run_output_handler) is cancelled first, since it
    would report the stop as the engine's death.
    """
    handler = engine.output_handler
    if handler is not None and not handler.done():
        handler.get_loop().call_soon_threadsafe(handler.cancel)
    engine.shutdown()


def engine_processes(engine: "AsyncLLM") -> list[psutil.Process]:
    """Return the processes of the engine core and its workers, without the helpers that Python and
    torch start.
    """
    processes: list[psutil.Process] = []
    for started in getattr(engine.engine_core.resources.engine_manager, "processes", ()):
        with suppress(psutil.NoSuchProcess):  # it has ended at once
            processes.append(core := psutil.Process(started.pid))  # or its guardian
            for child in core.children(recursive=True):
                line = " ".join(child.cmdline())
                processes += (
                    [child] if "resource_tracker" not in line and "compile_worker" not in line else []
                )
    return processes


def killed_at_start(error: BaseException | None) -> bool:
    """Return True if an engine did not start because a signal ended its core, rather than an error
    of the core's own (vllm/v1/engine/utils.py, wait_for_engine_startup).
    """
    return bool(re.search(r"Failed core proc\(s\): \{[^}]*: -\d+", str(error)))


def worker_memory() -> set[Path]:
    """Return the files in /dev/shm through which this process's CPU workers exchange tensors and
    receive calls.

    vLLM's workers remove the files for tensors at an orderly end
    (vllm/distributed/device_communicators/cpu_communicator.py). When the workers are killed, these
    files stay: no resource tracker knows of them. The files for calls (160 MiB an engine,
    vllm/distributed/device_communicators/shm_broadcast.py) stay until this process ends, even after
    an orderly end.
    """
    files: set[Path] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{process.pid}/maps").read_text("utf-8", "replace").splitlines()
            files |= {
                Path(line.split()[5]) for line in lines if re.search("/dev/shm/(vllm_dist|psm)_", line)
            }
    return files


def adapter_request(number: int | None) -> "LoRARequest | None":
    """Return vLLM's request for the adapter of this number, which the workers hold already; None
    for no adapter.

    vLLM would read the path only for an adapter that the workers do not hold. Its prefix cache is
    keyed by name and path (vllm/v1/core/kv_cache_utils.py, _gen_lora_extra_hash_keys).
    """
    if number is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-{number}", number, f"/sent by the trainer/{number}")


def request_errors() -> tuple[type[Exception], ...]:
    """Return vLLM's errors for one bad or failed request; a dead engine raises a different one,
    which ends the run.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineGenerateError

    return (ValueError, EngineGenerateError, VLLMClientError)


async def log_throughput(engine: "AsyncLLM") -> None:
    """Until cancelled, let vLLM log its statistics every VLLM_LOG_STATS_INTERVAL seconds, as its
    server does.
    """
    from vllm import envs

    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        await engine.do_log_stats()


def step_logger(note: Callable[[Any, Any], None]) -> type:
    """Return a logger class for `start_async_llm` that calls `note` after every step with vLLM's
    statistics of the scheduler and of the iteration, either of which may be None.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger
