"""`VllmConfig`, the dictionary that describes engines and sampling at once, and what it comes to here.

Every key is taken with its meaning or refused with a sentence; none is dropped.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import psutil

from generation.compat.nemo.batch import GenerationConfig
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings

CPU_KV_CACHE_BYTES = 4 << 30
"""Largest KV cache on CPU where the configuration gives no size; pages that no request has used yet cost nothing."""

MAX_NUM_SEQS = 64
"""Sequences that an engine works on at once, where the configuration does not say."""

_SPARE_TOKENS = 32  # vLLM rounds up to blocks


class VllmSpecificArgs(TypedDict):
    """What only vLLM engines have.

    Attributes:
        max_model_len: tokens, prompt and response together.
        gpu_memory_utilization: share of the device's memory that the engine may use; on CPU, of the free memory.
        precision: "float32" or "bfloat16"; by default bfloat16 on CUDA, float32 on CPU.
        load_format: "auto" reads the checkpoint; "dummy" starts without weights, and generation waits for an update.
        skip_tokenizer_init: start without a tokenizer: token ids only, no texts and no stop strings.
        kv_cache_memory_bytes: size of the KV cache on each device.
        expert_parallel_size: 1, or `tensor_parallel_size`.
        async_engine: either value: every engine here serves the blocking and the asynchronous methods.
        expose_http_server: serve the OpenAI-compatible API on the loopback interface.
        num_replicas: engines, each with `tensor_parallel_size` devices of its own.
        seed: decides, with a request's place, what is sampled.
    """

    max_model_len: int
    tensor_parallel_size: NotRequired[int]
    pipeline_parallel_size: NotRequired[int]
    expert_parallel_size: NotRequired[int]
    gpu_memory_utilization: NotRequired[float]
    precision: NotRequired[str]
    kv_cache_dtype: NotRequired[str]
    kv_cache_memory_bytes: NotRequired[int]
    load_format: NotRequired[str]
    skip_tokenizer_init: NotRequired[bool]
    enforce_eager: NotRequired[bool]
    max_num_seqs: NotRequired[int]
    trust_remote_code: NotRequired[bool]
    async_engine: NotRequired[bool]
    expose_http_server: NotRequired[bool]
    num_replicas: NotRequired[int]
    seed: NotRequired[int]


class VllmConfig(GenerationConfig):
    """A `GenerationConfig` for vLLM. `vllm_kwargs` are further engine arguments, by vLLM's own names."""

    vllm_cfg: VllmSpecificArgs
    vllm_kwargs: NotRequired[dict[str, Any]]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what is missing from a `VllmConfig`, unknown in it, or out of its range."""
    _check_keys("generation", config, VllmConfig)
    _check_keys("generation.vllm_cfg", config["vllm_cfg"], VllmSpecificArgs)
    if config["backend"] != "vllm":
        raise ValueError(f"generation.backend is {config['backend']!r}: this backend is 'vllm'")
    _check_sampling(config)
    _check_engine(config["vllm_cfg"])


def _check_keys(where: str, given: Mapping[str, Any], spec: Any) -> None:
    # `_pad_token_id` is what NeMo RL writes into a configuration for itself.
    if unknown := sorted(set(given) - set(spec.__annotations__) - {"_pad_token_id"}):
        raise ValueError(f"{where} has no key {', '.join(unknown)}; it has {', '.join(sorted(spec.__annotations__))}")
    if missing := sorted(spec.__required_keys__ - set(given)):
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def _check_sampling(config: Mapping[str, Any]) -> None:
    top_k, top_p = config.get("top_k"), config.get("top_p", 1.0)
    ranges = {
        "max_new_tokens": (config["max_new_tokens"] >= 1, "at least 1"),
        "temperature": (config["temperature"] >= 0, "0, which is greedy, or more"),
        "top_p": (0 < top_p <= 1, "more than 0, and 1 at most"),
        "top_k": (top_k is None or top_k == -1 or top_k >= 1, "at least 1, or -1 or None for all tokens"),
    }
    for key, (fits, wanted) in ranges.items():
        if not fits:
            raise ValueError(f"generation.{key} is {config.get(key)}: it must be {wanted}")
    if isinstance(config.get("stop_strings"), str):
        raise ValueError("generation.stop_strings must be a list of strings")


def _check_engine(engine: Mapping[str, Any]) -> None:
    size = engine.get("tensor_parallel_size", 1)
    for key in ("max_model_len", "tensor_parallel_size", "num_replicas", "max_num_seqs"):
        if engine.get(key, 1) < 1:
            raise ValueError(f"generation.vllm_cfg.{key} is {engine[key]}: it must be at least 1")
    if engine.get("pipeline_parallel_size", 1) != 1:
        raise ValueError(
            "generation.vllm_cfg.pipeline_parallel_size must be 1: weights reach tensor parallel workers only; "
            "raise tensor_parallel_size instead"
        )
    if engine.get("expert_parallel_size", 1) not in (1, size):
        raise ValueError(f"generation.vllm_cfg.expert_parallel_size must be 1, or {size} as tensor_parallel_size")
    if not 0 < engine.get("gpu_memory_utilization", 1.0) <= 1:
        raise ValueError("generation.vllm_cfg.gpu_memory_utilization must be more than 0, and 1 at most")
    if engine.get("precision", "float32") not in ("float32", "bfloat16"):
        raise ValueError(f"generation.vllm_cfg.precision is {engine['precision']!r}: it must be float32 or bfloat16")


def configure_generation_config(config: VllmConfig, tokenizer: Any, is_eval: bool = False) -> VllmConfig:
    """A copy in which the tokenizer has decided what was left open: padding, and what ends a response.

    Where it does not say how to load, training starts without weights, which come with the first update, and
    evaluation reads the checkpoint. The engine has a tokenizer of its own only for texts, stop strings or the server.
    """
    engine = config["vllm_cfg"]
    texts = is_eval or bool(config.get("stop_strings")) or engine.get("expose_http_server", False)
    opened = {"load_format": "auto" if is_eval else "dummy", "skip_tokenizer_init": not texts}
    configured: VllmConfig = {**config, "vllm_cfg": {**opened, **engine}}  # type: ignore[typeddict-item]
    if "pad_token_id" not in configured and tokenizer.pad_token_id is not None:
        configured["pad_token_id"] = tokenizer.pad_token_id
    if configured.get("stop_token_ids") is None:
        configured["stop_token_ids"] = [tokenizer.eos_token_id]
    return configured


def sampling_settings(config: Mapping[str, Any]) -> SamplingSettings:
    """How responses are drawn, as the configuration has it."""
    check_config(config)
    top_k = config.get("top_k")
    return SamplingSettings(
        max_tokens=config["max_new_tokens"],
        temperature=config["temperature"],
        top_p=config.get("top_p", 1.0),
        top_k=-1 if top_k is None else top_k,
        stop=list(config.get("stop_strings") or ()),
        stop_token_ids=list(config.get("stop_token_ids") or ()),
    )


def engine_settings(
    config: Mapping[str, Any], device_indices: Sequence[int] = (), seed: int | None = None
) -> EngineSettings:
    """One replica's engine: on these CUDA devices, or on CPU where there are none."""
    check_config(config)
    engine: Mapping[str, Any] = config["vllm_cfg"]
    size, on_cpu = engine.get("tensor_parallel_size", 1), not device_indices
    if device_indices and len(device_indices) != size:
        raise ValueError(f"an engine with tensor_parallel_size {size} needs {size} devices, not {len(device_indices)}")
    kv_cache_bytes = engine.get("kv_cache_memory_bytes")
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = _cpu_kv_cache_bytes(config)
    cores = sorted(os.sched_getaffinity(0))
    threads = max(1, len(cores) // (size * replicas(config)))
    return EngineSettings(
        model=config["model_name"],
        max_model_len=engine["max_model_len"],
        dtype=engine.get("precision", "float32" if on_cpu else "bfloat16"),
        tensor_parallel_size=size,
        max_num_seqs=engine.get("max_num_seqs", MAX_NUM_SEQS),
        kv_cache_bytes=kv_cache_bytes,
        gpu_memory_utilization=engine.get("gpu_memory_utilization", 0.9),
        enforce_eager=engine.get("enforce_eager", on_cpu),
        load_format=engine.get("load_format", "auto"),
        seed=engine.get("seed", 0) if seed is None else seed,
        sleep=colocated(config),
        trust_remote_code=engine.get("trust_remote_code", False),
        device_indices=tuple(device_indices),
        cpu_threads=min(threads, int(os.environ.get("OMP_NUM_THREADS") or threads)),
        cpu_cores=tuple(cores[k % len(cores)] for k in range(size)) if on_cpu and size > 1 else (),
        plain_cpu_weights=False,
        extra=_extra(config),
    )


def _cpu_kv_cache_bytes(config: Mapping[str, Any]) -> int:
    """Enough for `max_num_seqs` of the longest sequences, within what memory there is. vLLM itself would take a share
    of all memory, used or not, and minutes to cut so much of it into blocks for a small model.
    """
    engine = config["vllm_cfg"]
    free = psutil.virtual_memory().available * engine.get("gpu_memory_utilization", 0.9)
    room = min(CPU_KV_CACHE_BYTES, int(free / 2 / replicas(config)))
    longest = engine["max_model_len"] + _SPARE_TOKENS
    return min(room, longest * engine.get("max_num_seqs", MAX_NUM_SEQS) * _kv_bytes(config))


def _kv_bytes(config: Mapping[str, Any]) -> int:
    """What one token leaves in the KV cache, in float32."""
    from transformers import AutoConfig

    trust = config["vllm_cfg"].get("trust_remote_code", False)
    try:
        model = AutoConfig.from_pretrained(config["model_name"], trust_remote_code=trust).get_text_config()
    except OSError as error:
        raise ValueError(f"generation.model_name is {config['model_name']!r}: there is no such model here") from error
    heads = model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // heads
    return 2 * 4 * model.num_hidden_layers * (getattr(model, "num_key_value_heads", None) or heads) * width


def _extra(config: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments without a field in `EngineSettings`."""
    engine = config["vllm_cfg"]
    extra = {key: engine[key] for key in ("skip_tokenizer_init", "kv_cache_dtype") if key in engine}
    if engine.get("expert_parallel_size", 1) > 1:
        extra["enable_expert_parallel"] = True
    return extra | (config.get("vllm_kwargs") or {})


def pad_token_id(config: Mapping[str, Any]) -> int:
    """The id that pads rows: `pad_token_id`, `_pad_token_id` (NeMo RL's name for it), or 0."""
    given = config.get("pad_token_id", config.get("_pad_token_id"))
    return 0 if given is None else given


def colocated(config: Mapping[str, Any]) -> bool:
    """Whether the engine shares its devices with a trainer, and sleeps while that works."""
    return bool((config.get("colocated") or {}).get("enabled", False))


def replicas(config: Mapping[str, Any]) -> int:
    """How many engines."""
    return int(config["vllm_cfg"].get("num_replicas", 1))
