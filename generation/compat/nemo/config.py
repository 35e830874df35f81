"""`VllmConfig`, the dictionary that describes engines and sampling, and its conversion to settings.

Every key is either used or refused with a sentence; none is ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import psutil

from generation.compat.nemo.batch import ColocatedConfig, GenerationConfig
from generation.engine.devices import device_count
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings, cpu_binding, kv_elements

MAX_NUM_SEQS = 64
"""The default of `max_num_seqs`, the number of sequences that an engine works on at once."""


class VllmSpecificArgs(TypedDict):
    """The keys of `vllm_cfg`, which only vLLM engines have."""

    max_model_len: int  # tokens, prompt and response together
    tensor_parallel_size: NotRequired[int]
    pipeline_parallel_size: NotRequired[int]
    expert_parallel_size: NotRequired[int]  # 1, or tensor_parallel_size
    # Share of the device's memory; on CPU, of the free memory
    gpu_memory_utilization: NotRequired[float]
    precision: NotRequired[str]  # "float32" or "bfloat16"; by default bfloat16 on CUDA, float32 on CPU
    kv_cache_dtype: NotRequired[str]
    kv_cache_memory_bytes: NotRequired[int]  # on each device
    # "auto" reads the checkpoint; "dummy" starts without weights, which an update brings
    load_format: NotRequired[str]
    skip_tokenizer_init: NotRequired[bool]  # token ids only: no texts and no stop strings
    enforce_eager: NotRequired[bool]
    max_num_seqs: NotRequired[int]
    trust_remote_code: NotRequired[bool]
    # Either value: every engine serves the blocking and the asynchronous methods
    async_engine: NotRequired[bool]
    expose_http_server: NotRequired[bool]  # the OpenAI-compatible API, on the loopback interface
    num_replicas: NotRequired[int]  # the number of engines, each with tensor_parallel_size devices
    # "local": engines are child processes; "ray": each is an actor, which Ray places
    backend: NotRequired[str]
    seed: NotRequired[int]  # together with a request's place in the batch, decides its samples


_OWN = {
    "async_engine",
    "backend",
    "expose_http_server",
    "num_replicas",
    "precision",
    "expert_parallel_size",
}
"""Keys of `vllm_cfg` that are not vLLM's names of engine arguments."""


class VllmConfig(GenerationConfig):
    """A `GenerationConfig` for vLLM."""

    vllm_cfg: VllmSpecificArgs
    # Further engine arguments, by vLLM's names. Weight updates and memory reports need
    # worker_extension_cls: sharding.WORKER_EXTENSION.
    vllm_kwargs: NotRequired[dict[str, Any]]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError naming a key of a `VllmConfig` that is missing, unknown, or out of its
    range.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a VllmConfig, which is a dictionary, not {type(config).__name__}"
        )
    _check_keys("generation", config, VllmConfig)
    _check_keys("generation.vllm_cfg", config["vllm_cfg"], VllmSpecificArgs)
    shared = config.get("colocated") or ColocatedConfig(enabled=False)
    _check_keys("generation.colocated", shared, ColocatedConfig)
    top_k = config.get("top_k")
    top_p = config.get("top_p", 1.0)
    stop = config.get("stop_strings")
    rules = {
        "model_name": (
            isinstance(config["model_name"], str | Path),
            "a folder or a name of the Hugging Face hub",
        ),
        "backend": (config["backend"] == "vllm", "'vllm'"),
        "max_new_tokens": (config["max_new_tokens"] >= 1, "at least 1"),
        "temperature": (config["temperature"] >= 0, "0, which is greedy, or more"),
        "top_p": (0 < top_p <= 1, "more than 0, and 1 at most"),
        "top_k": (
            top_k is None or top_k == -1 or top_k >= 1,
            "at least 1, or -1 or None for all tokens",
        ),
        "stop_strings": (not isinstance(stop, str), "a list of strings"),
    }
    counted = (
        "left out: an engine takes tensor_parallel_size devices, and vllm_cfg.num_replicas says how "
        "many engines"
    )
    _check(
        shared,
        "generation.colocated",
        {"resources": (not any((shared.get("resources") or {}).values()), counted)},
    )
    _check(config, "generation", rules)
    engine: Mapping[str, Any] = config["vllm_cfg"]
    size = engine.get("tensor_parallel_size", 1)
    share = engine.get("gpu_memory_utilization", 1.0)
    counts = ("max_model_len", "tensor_parallel_size", "num_replicas", "max_num_seqs")
    one_stage = "1, since weights reach tensor parallel workers only: raise tensor_parallel_size instead"
    experts = engine.get("expert_parallel_size", 1) in (1, size)
    extension = (config.get("vllm_kwargs") or {}).get("worker_extension_cls")
    updates = (
        "auto, or vllm_kwargs.worker_extension_cls sharding.WORKER_EXTENSION: no update could bring "
        "weights"
    )
    rules = {key: (engine.get(key, 1) >= 1, "at least 1") for key in counts} | {
        "pipeline_parallel_size": (engine.get("pipeline_parallel_size", 1) == 1, one_stage),
        "expert_parallel_size": (experts, f"1, or {size} as tensor_parallel_size"),
        "gpu_memory_utilization": (0 < share <= 1, "more than 0, and 1 at most"),
        "backend": (engine.get("backend", "local") in ("local", "ray"), "local or ray"),
        "precision": (
            engine.get("precision", "float32") in ("float32", "bfloat16"),
            "float32 or bfloat16",
        ),
        "load_format": (engine.get("load_format") != "dummy" or extension is not None, updates),
    }
    _check(engine, "generation.vllm_cfg", rules)


def _check_keys(where: str, section: Mapping[str, Any], spec: Any) -> None:
    # NeMo RL writes `_pad_token_id` into a configuration for its own use.
    if unknown := sorted(set(section) - set(spec.__annotations__) - {"_pad_token_id"}):
        raise ValueError(
            f"{where} has no key {', '.join(unknown)}; it has {', '.join(sorted(spec.__annotations__))}"
        )
    if missing := sorted(spec.__required_keys__ - set(section)):
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def _check(section: Mapping[str, Any], where: str, rules: Mapping[str, tuple[bool, str]]) -> None:
    for key, (fits, wanted) in rules.items():
        if not fits:
            raise ValueError(f"{where}.{key} is {section.get(key)!r}: it must be {wanted}")


def configure_generation_config(config: VllmConfig, tokenizer: Any, is_eval: bool = False) -> VllmConfig:
    """Return a copy in which missing keys are filled in: from the tokenizer, padding and the ids
    that end a response.

    Without `load_format`, training starts without weights, which the first update brings, and
    evaluation reads the checkpoint. The engine loads a tokenizer only for texts, stop strings or
    the server.
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
    """Return the sampling settings of a configuration. Raises ValueError as `check_config` does."""
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
    config: Mapping[str, Any], bundle_indices: Sequence[int] | None = None, seed: int | None = None
) -> EngineSettings:
    """Return the settings of one replica's engine. Raises ValueError for devices that it cannot
    have.

    `bundle_indices` are indices of the CUDA devices that this process sees, by default the first
    ones. On a machine without CUDA devices they are cores, to which workers are bound if there are
    several.
    """
    check_config(config)
    engine: Mapping[str, Any] = config["vllm_cfg"]
    size = engine.get("tensor_parallel_size", 1)
    devices = device_count()
    bundle = tuple(range(size) if bundle_indices is None else bundle_indices)
    on_cpu = devices == 0
    if len(bundle) != size:
        raise ValueError(
            f"bundle_indices {[*bundle]}: an engine with tensor_parallel_size {size} needs {size} of "
            "them"
        )
    if any(index < 0 or (index >= devices and not on_cpu) for index in bundle):
        raise ValueError(f"bundle_indices {[*bundle]}: the devices here are 0 to {devices - 1}")
    arguments: dict[str, Any] = {
        "model": config["model_name"],
        "dtype": engine.get("precision", "float32" if on_cpu else "bfloat16"),
        "max_num_seqs": MAX_NUM_SEQS,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": on_cpu,
        **{key: value for key, value in engine.items() if key not in _OWN},
        **(config.get("vllm_kwargs") or {}),
    }
    if engine.get("expert_parallel_size", 1) > 1:
        arguments["enable_expert_parallel"] = True
    if seed is not None:
        arguments["seed"] = seed
    if on_cpu and arguments.get("kv_cache_memory_bytes") is None:
        arguments["kv_cache_memory_bytes"] = _cpu_kv_cache_bytes(config)
    settings = EngineSettings.from_vllm(
        arguments, sleep=colocated(config), device_indices=() if on_cpu else bundle
    )
    return replace(settings, **cpu_binding(bundle, size * replicas(config))) if on_cpu else settings


def _cpu_kv_cache_bytes(config: Mapping[str, Any]) -> int:
    """Return the size of a KV cache for `max_num_seqs` of the longest sequences in float32, within
    the free memory.

    By default vLLM takes a share of all memory, even if it is in use, and needs minutes to divide
    that into blocks.
    """
    from transformers import AutoConfig

    engine = config["vllm_cfg"]
    trust = engine.get("trust_remote_code", False)
    try:
        model = AutoConfig.from_pretrained(
            config["model_name"], trust_remote_code=trust
        ).get_text_config()
    except OSError as error:
        raise ValueError(
            f"generation.model_name is {config['model_name']!r}: there is no such model here"
        ) from error
    free = psutil.virtual_memory().available * engine.get("gpu_memory_utilization", 0.9)
    # Pages that no request has used take no memory
    room = min(4 << 30, int(free / 2 / replicas(config)))
    # vLLM rounds up to blocks
    tokens = (engine["max_model_len"] + 32) * engine.get("max_num_seqs", MAX_NUM_SEQS)
    return min(room, tokens * 4 * kv_elements(model.to_dict()))


def colocated(config: Mapping[str, Any]) -> bool:
    """Return True if the engine shares its devices with a trainer, and sleeps while the trainer
    works.
    """
    return bool((config.get("colocated") or {}).get("enabled", False))


def replicas(config: Mapping[str, Any]) -> int:
    """Return the number of engines."""
    return int(config["vllm_cfg"].get("num_replicas", 1))


def on_ray(config: Mapping[str, Any]) -> bool:
    """Return True if engines are Ray actors."""
    return config["vllm_cfg"].get("backend", "local") == "ray"


def counted_gpus(config: Mapping[str, Any], fraction_of_gpus: float) -> float:
    """Return the GPUs that Ray counts for an engine. Raises ValueError for a fraction without Ray,
    or of many GPUs.
    """
    size = config["vllm_cfg"].get("tensor_parallel_size", 1)
    if fraction_of_gpus != 1.0 and not on_ray(config):
        remedy = (
            "since the share of memory is vllm_cfg.gpu_memory_utilization, or set vllm_cfg.backend to "
            "ray"
        )
        counts = f"fraction_of_gpus is {fraction_of_gpus}, but only Ray counts shares of GPUs"
        raise ValueError(f"{counts}: leave it at 1.0, {remedy}")
    if not 0 < fraction_of_gpus <= 1 or (size > 1 and fraction_of_gpus != 1.0):
        one = "1.0, since an engine of several GPUs gets whole GPUs from Ray"
        share = "more than 0, and 1 at most"
        raise ValueError(
            f"fraction_of_gpus is {fraction_of_gpus}: it must be {one if size > 1 else share}"
        )
    return size * fraction_of_gpus


def has_tokenizer(config: Mapping[str, Any]) -> bool:
    """Return True if engines have a tokenizer, and so can work with texts and stop strings."""
    return not {**config["vllm_cfg"], **(config.get("vllm_kwargs") or {})}.get("skip_tokenizer_init")
