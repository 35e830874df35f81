"""The parts of vLLM that are private or change between releases: 0.32, whose builds for CPU and CUDA have the same
Python sources. `scripts/try_vllm.sh VERSION` says what another release breaks.

Everything an engine's processes read from the environment is set around its start only, and taken back afterwards: the
trainer's own process must not notice (it would otherwise lose torch.compile, or its NCCL settings). Of what importing
vLLM changes in this process only its patches of Inductor remain (`vllm.env_override`).

docs/vllm-notes.md lists what is relied on here, with upstream's issues and files.
"""

import asyncio
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from generation.engine.cpu_kernels import hidden_instructions, kernel_environment
from generation.engine.devices import full_uuids
from generation.engine.settings import LORA_RANKS, VLLM_NAMES, EngineSettings, check_routes, check_worker_classes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# A vLLM process that inherits these joins the trainer's process group, or waits for a store that no process serves
# (https://github.com/pytorch/pytorch/pull/192113).
_TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


# "Triton not available" in every process on a CPU, when vLLM registers its kernels (vllm/kernels/triton/activation.py).
_TRITON_LOG = "torch._library.triton"
# The same beside a torch that brings Triton, said before vLLM's own logging is set up (vllm/triton_utils/importing.py).
_VLLM_TRITON_LOG = "vllm.triton_utils.importing"


def _quiet_environment() -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    env |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # dozens of lines of no use here
    return env | {"TORCH_LOGS": ",".join(filter(None, (os.environ.get("TORCH_LOGS"), f"-{_TRITON_LOG}")))}


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Variables that the engine's processes start with."""
    env = _quiet_environment()
    env["GLOO_SOCKET_IFNAME"] = "lo"  # an engine is on one machine, whatever the trainer is on
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # nothing is unpickled that came over a socket
    if settings.images:
        env["HOTBUNK_IMAGES"] = "1"  # hotbunk_torchvision.py: vLLM looks at models in a process of its own
    if not settings.on_cpu:
        visible, indices = os.environ.get("CUDA_VISIBLE_DEVICES"), settings.device_indices  # this process's own
        names = full_uuids([visible.split(",")[i].strip() for i in indices]) if visible else list(map(str, indices))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        return env | _CUDA_ENVIRONMENT | _apart_from_other_ranks()
    env["OMP_NUM_THREADS"] = str(settings.cpu_threads)
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, settings.cpu_cores)) or "nobind"
    env |= kernel_environment(plain=settings.plain_cpu_weights)
    # It keeps compiled products by their shape, some 30 KiB each. A batch of every size would fill its own 1024, over
    # hundreds of steps (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html).
    env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if settings.tensor_parallel_size == 1:
        # Lets the CPU platform run its worker inside the engine process (vllm/platforms/cpu.py).
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.enforce_eager:
        # Else the first request compiles `batched_count_greater_than` (vllm/v1/sample/ops/logprobs.py).
        env["TORCH_COMPILE_DISABLE"] = "1"
    return env


_CUDA_ENVIRONMENT = {
    # vLLM forks unless this process has initialised CUDA itself; a child of a process that has so much as counted
    # devices cannot use CUDA any more (https://github.com/pytorch/pytorch/issues/40403).
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Only for requests without a seed and without log-probabilities, of which there are none; it compiles with nvcc
    # (vllm/v1/sample/ops/topk_topp_sampler.py).
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Under WSL 2 alone: the model runner has buffers in page-locked memory and does not start without them
    # (https://docs.vllm.ai/en/latest/configuration/env_vars/).
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "1",
}


def _apart_from_other_ranks() -> dict[str, str]:
    """Variables that keep engines apart that start in the same second.

    vLLM looks for a free port and binds it later (https://github.com/vllm-project/vllm/issues/39015); started from a
    range of this process's own, below the system's, no two look at the same one. Some files of its compilation cache it
    writes in place (vllm/compilation/backends.py).
    """
    apart = {"VLLM_PORT": str(10_000 + os.getpid() % 1_400 * 16)}
    if local_rank := int(os.environ.get("LOCAL_RANK", "0")):
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = os.environ.get("VLLM_CACHE_ROOT") or f"{cache}/vllm"
        apart["VLLM_CACHE_ROOT"] = f"{os.path.expanduser(root)}/local_rank_{local_rank}"
    return apart


@contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    """torchrun's variables hidden, and these changed; restored on exit."""
    import torch

    for name in (_TRITON_LOG, _VLLM_TRITON_LOG):
        logging.getLogger(name).setLevel(logging.ERROR)
    before, cudnn_attention = dict(os.environ), torch.backends.cuda.cudnn_sdp_enabled()
    os.environ.update(changed)
    for name in [name for name in os.environ if name in _TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)  # vllm/platforms/cuda.py switches it off
        # Only what has changed: an engine that starts again has other threads beside it, which read the environment.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name in (name for name, value in before.items() if os.environ.get(name) != value):
            os.environ[name] = before[name]


def started_with(settings: EngineSettings) -> AbstractContextManager[None]:
    """The environment an engine is started in: torchrun's variables hidden, the engine's own set; restored on exit."""
    return _environment(engine_environment(settings))


def fork_engines() -> Callable[[], None]:
    """From now on engines on CPU are forked from what this process has imported, until what this returns is called.

    Call it before there are other threads, and a process group. Without vLLM's build for CPUs nothing is done. How and
    why is in `generation.engine.forkserver`, which nothing else imports, and nothing on a GPU.
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
    """Keyword arguments of `AsyncEngineArgs`; what would change what is sampled is never left to a default."""
    arguments: dict[str, Any] = {name: getattr(settings, field) for name, field in VLLM_NAMES.items()} | {
        "tokenizer": settings.tokenizer or settings.model,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": settings.worker_extension or "",
        # The CPU platform refuses it (vllm/platforms/interface.py); the worker extension sleeps instead.
        "enable_sleep_mode": settings.sleep and not settings.on_cpu,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
    }
    if settings.on_cpu:
        # A prompt that is cut in two asks its seeded generator for an offset, which CPU generators do not have, and the
        # engine dies (https://github.com/vllm-project/vllm/pull/10097, and in 0.32 `_bookkeeping_sync` of
        # vllm/v1/worker/gpu_model_runner.py); so prompts are never cut, and a step can hold the longest one.
        tokens = max(2048, settings.max_model_len, settings.max_num_seqs)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
    else:
        # vLLM's own choice for an AsyncLLM is 2048 (vllm/engine/arg_utils.py, get_batch_defaults), of which every
        # sequence that is being decoded takes one.
        arguments["max_num_batched_tokens"] = max(8192, settings.max_num_seqs)
    if settings.worker_class is None:
        arguments["worker_cls"] = "generation.engine.cpu_worker.CPUWorker" if settings.on_cpu else "auto"
    if settings.lora_rank:
        room = next(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
    if settings.images:
        # generation/engine/image_inputs.py keeps processed images: vLLM's cache has a copy in the core that must see
        # the same images in the same order.
        arguments |= {"limit_mm_per_prompt": {"image": settings.images, "video": 0}, "mm_processor_cache_gb": 0}
    arguments |= settings.extra
    if settings.routes and not settings.on_cpu:  # on CPU the worker extension has them told
        arguments["enable_return_routed_experts"] = True
    if settings.fp32_head:
        arguments["hf_overrides"] = dict(arguments.get("hf_overrides") or {}) | {"head_dtype": "float32"}
    return arguments


def start_async_llm(settings: EngineSettings, stat_loggers: list[Any] | None = None) -> "AsyncLLM":
    """Start an `AsyncLLM`, whose engine core and workers are children of this process; blocks until it can generate.

    `stat_loggers` are called after every step, such as `step_logger`. Raises ImportError where this vLLM is not
    one of those supported, ValueError where it is built for the other kind of device, a class for its workers is not
    there, or an entry of `settings.extra` is not an engine argument.
    """
    with started_with(settings):
        config = _checked_config(settings)
        from vllm.v1.engine.async_llm import AsyncLLM

        quiet = engine_arguments(settings)["disable_log_stats"]
        return AsyncLLM.from_vllm_config(config, stat_loggers=stat_loggers, disable_log_stats=quiet)


def _checked_config(settings: EngineSettings) -> "VllmConfig":
    """vLLM's configuration for these settings; raises as `start_async_llm`, inside whose environment it is called."""
    check_version()
    check_build(settings)
    check_worker_classes(settings)
    check_routes(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = engine_arguments(settings)
    names = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(set(arguments) - names):
        import vllm

        raise ValueError(f"engine.extra: vLLM {vllm.__version__} has no engine argument {', '.join(unknown)}")
    import torch

    preloaded = os.environ.get("LD_PRELOAD", "")
    with hidden_instructions(settings.plain_cpu_weights) if settings.on_cpu else nullcontext():
        config = AsyncEngineArgs(**arguments).create_engine_config()
    if {" ", ":"} & {*torch.__file__}:  # vllm/platforms/cpu.py has added torch's libgomp, whose path ld.so would split
        os.environ["LD_PRELOAD"] = preloaded
    if settings.keyed_noise:
        check_keyed_noise(settings, config)
    return config


def frontend(settings: EngineSettings) -> "AsyncLLM":
    """An `AsyncLLM` without an engine: all that vLLM's server asks of it but answers, for engines in other processes.

    Of `AsyncLLM.__init__` (vllm/v1/engine/async_llm.py) what comes before the engine core. Raises as `start_async_llm`.
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
    """Stop an engine's processes; first its output task (vllm/v1/engine/async_llm.py, _run_output_handler), which
    would report the stop as the engine's death.
    """
    if (handler := engine.output_handler) is not None:
        handler.get_loop().call_soon_threadsafe(handler.cancel)
    engine.shutdown()


def engine_processes(engine: "AsyncLLM") -> list[psutil.Process]:
    """The engine core and its workers, without what Python and torch start for their own use."""
    processes: list[psutil.Process] = []
    for started in getattr(engine.engine_core.resources.engine_manager, "processes", ()):
        with suppress(psutil.NoSuchProcess):  # it has ended at once
            processes.append(core := psutil.Process(started.pid))
            for child in core.children(recursive=True):
                line = " ".join(child.cmdline())
                processes += [child] if "resource_tracker" not in line and "compile_worker" not in line else []
    return processes


def killed_at_start(error: BaseException | None) -> bool:
    """True if an engine did not start because its core was ended by a signal, rather than by an error of its own
    (vllm/v1/engine/utils.py, wait_for_engine_startup).
    """
    return bool(re.search(r"Failed core proc\(s\): \{[^}]*: -\d+", str(error)))


def worker_memory() -> set[Path]:
    """Shared memory through which the CPU workers of this process's engines exchange tensors, and get their calls.

    vLLM's workers remove theirs at an orderly end (vllm/distributed/device_communicators/cpu_communicator.py). When
    they are killed it stays: no resource tracker knows of it. That of calls (160 MiB an engine,
    vllm/distributed/device_communicators/shm_broadcast.py) stays until this process ends, even at an orderly end.
    """
    files: set[Path] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{process.pid}/maps").read_text("utf-8", "replace").splitlines()
            files |= {Path(line.split()[5]) for line in lines if re.search("/dev/shm/(vllm_dist|psm)_", line)}
    return files


def adapter_request(number: int | None) -> "LoRARequest | None":
    """vLLM's name for the adapter of this number, which the workers hold already; None: no adapter.

    vLLM would look at the path for an adapter that they do not hold. Its prefix cache is keyed by name and path
    (vllm/v1/core/kv_cache_utils.py, _gen_lora_extra_hash_keys).
    """
    if number is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-{number}", number, f"/sent by the trainer/{number}")


def request_errors() -> tuple[type[Exception], ...]:
    """The errors of vLLM for one bad or failed request; a dead engine raises something else, and ends the run."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineGenerateError

    return (ValueError, EngineGenerateError, VLLMClientError)


async def log_throughput(engine: "AsyncLLM") -> None:
    """Until cancelled, let vLLM log its statistics every VLLM_LOG_STATS_INTERVAL seconds, as its server does."""
    from vllm import envs

    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        await engine.do_log_stats()


def step_logger(note: Callable[[Any, Any], None]) -> type:
    """A logger for `start_async_llm` that hands on vLLM's statistics of the scheduler and of the iteration after every
    step; either may be None.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger


SUPPORTED = ((0, 32), (0, 33))
"""The oldest release of vLLM that is taken, and the first that is not."""


def check_version(version: str | None = None) -> None:
    """Raise ImportError, naming the supported range, unless a vLLM of that range is installed.

    `version` is the installed one's if None. A development build, or one that tells no version, is taken as it is, and
    with HOTBUNK_ANY_VLLM=1, which scripts/try_vllm.sh sets, any release.
    """
    (_, oldest), (_, newer) = SUPPORTED
    wanted = f"vLLM 0.{oldest} is needed (>=0.{oldest},<0.{newer}): install it with bash scripts/setup.sh"
    if version is None:
        if find_spec("vllm") is None:
            raise ImportError(f"vllm is not installed. {wanted}, or pip install 'vllm>=0.{oldest},<0.{newer}'")
        import vllm

        version = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if match is None or "dev" in str(version) or os.environ.get("HOTBUNK_ANY_VLLM") == "1":
        return
    if not SUPPORTED[0] <= (int(match[1]), int(match[2])) < SUPPORTED[1]:
        raise ImportError(f"vLLM {version} is installed, but {wanted}; scripts/try_vllm.sh tries another release")


def check_build(settings: EngineSettings) -> None:
    """Raise ValueError where the installed vLLM is built for the other kind of device than the engine is to run on."""
    from vllm.platforms import current_platform

    if settings.on_cpu and not current_platform.is_cpu():
        raise ValueError(
            "this engine was given no CUDA devices, but the installed vLLM is built for CUDA and runs on no CPU: "
            "name devices (device_indices), or install the build for CPUs with HOTBUNK_DEVICE=cpu bash scripts/setup.sh"
        )
    if not settings.on_cpu and current_platform.is_cpu():
        raise ValueError(
            f"this engine was given CUDA devices {list(settings.device_indices)}, but the installed vLLM is built for "
            "CPUs: install the build for CUDA with HOTBUNK_DEVICE=cuda bash scripts/setup.sh, or set run.device to cpu"
        )


def check_keyed_noise(settings: EngineSettings, config: Any) -> None:
    """Raise ValueError where what is sampled at a position could depend on more than the request's seed.

    Model runner V2 keys its noise by seed and position (vllm/v1/worker/gpu/sample/gumbel.py). V1 draws it from a
    generator, one draw after the other; on CPU the worker extension mends that.
    """
    if config.speculative_config is not None:
        reason = "what is drafted depends on where they are cut; leave it out"
        raise ValueError(f"engine.extra: speculative_config is set, but answers are carried over steps: {reason}")
    if not settings.on_cpu and not config.use_v2_model_runner:
        raise ValueError(
            "answers are carried over steps, which needs vLLM's model runner V2 on CUDA, and this engine would use V1: "
            "unset VLLM_USE_V2_MODEL_RUNNER, and leave out what V2 does not support"
        )
    if settings.on_cpu and settings.worker_extension is None:
        raise ValueError("on CPU noise is keyed by the worker extension: set it to sharding.WORKER_EXTENSION")
