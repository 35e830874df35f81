"""Settings of the engines of an `AsyncVLLM`, from vLLM's own argument names."""

import dataclasses
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from generation.engine.settings import EngineSettings, cpu_places

TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"
"""Environment variable: seconds that all engines of a service together may take to start; 300 without it."""


def require_vllm() -> None:
    """Raise `ImportError` with the remedy where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ImportError("vllm is not installed. Please install it with `pip install vllm`.")


def start_timeout() -> float:
    """Seconds that a service may take to start; ValueError unless the variable holds a positive number."""
    text = os.environ.get(TIMEOUT_VARIABLE, "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds, not {text!r}")
    return seconds


def gpus_per_replica(engine_args: Any) -> int:
    """Devices of one engine: tensor × data × pipeline parallel size, each 1 where `engine_args` does not say."""
    extra = getattr(engine_args, "extra", {})
    names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    sizes = [getattr(engine_args, name, None) or extra.get(name) or 1 for name in names]
    return sizes[0] * sizes[1] * sizes[2]


def as_settings(engine_args: Any) -> EngineSettings:
    """`EngineSettings` as they are, or those of an `AsyncEngineArgs`, of which only what differs from vLLM's defaults
    is taken. `engine_args` is not changed. Raises ValueError for an argument that a service cannot honour.
    """
    if isinstance(engine_args, EngineSettings):
        settings = dataclasses.replace(engine_args, sleep=False)
    else:
        plain = type(engine_args)(model=engine_args.model)
        given = {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)}
        settings = from_arguments({n: v for n, v in given.items() if n == "model" or v != getattr(plain, n)})
    if settings.extra.get("data_parallel_size", 1) > 1:
        raise ValueError("data_parallel_size: a service's replicas are its data parallelism; set num_replicas instead")
    return settings


def from_arguments(arguments: Mapping[str, Any]) -> EngineSettings:
    """Settings from vLLM's engine arguments, by vLLM's names; ValueError for one that a service cannot honour."""
    if "worker_extension_cls" in arguments:
        raise ValueError("worker_extension_cls is the service's own, which carriers=sharding sets: leave it out")
    given = {name: value for name, value in arguments.items() if value is not None}
    if given.get("pipeline_parallel_size", 1) > 1:
        given.setdefault("distributed_executor_backend", "mp")
    if "max_model_len" not in given:
        from transformers import AutoConfig

        trust = given.get("trust_remote_code", False)
        config = AutoConfig.from_pretrained(given["model"], trust_remote_code=trust).get_text_config()
        given["max_model_len"] = int(config.max_position_embeddings)
    # vLLM's own defaults; those of `EngineSettings` are for engines that share a device.
    defaults = {"dtype": "auto", "enforce_eager": False, "max_num_seqs": 256, "gpu_memory_utilization": 0.9}
    return EngineSettings.from_vllm(defaults | given, sleep=False)


def resolve(
    model_name: str,
    num_devices: int | None = None,
    compile: bool = True,
    enable_fp32_output: bool = False,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    **engine_args: Any,
) -> EngineSettings:
    """Settings that `make_async_vllm_engine` starts engines with; ValueError for sizes that contradict each other."""
    if num_devices is not None and tensor_parallel_size not in (None, num_devices):
        raise ValueError(f"tensor_parallel_size must be set to {num_devices}")
    arguments: dict[str, Any] = {"enforce_eager": not compile} if "compilation_config" not in engine_args else {}
    arguments |= engine_args
    arguments |= {"model": model_name, "tensor_parallel_size": tensor_parallel_size or num_devices or 1}
    arguments |= {"data_parallel_size": data_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
    return dataclasses.replace(from_arguments(arguments), fp32_head=enable_fp32_output)


def of_replicas(settings: EngineSettings, num_replicas: int, gpus: int, shared: bool) -> list[EngineSettings]:
    """Settings of each replica, with its own devices; ValueError where more are needed than there are.

    Args:
        settings: their `device_indices`, if there are any, are dealt out, and all must be used.
        gpus: devices there are to deal out where `settings` names none, from the last one on, since the caller's own
            is mostly the first, and NCCL cannot bring weights from a device to itself; 0 for the CPU.
        shared: replicas are processes of one machine. Otherwise each has devices of its own, numbered from 0.
    """
    size = gpus_per_replica(settings)
    spare = max(0, gpus - size * num_replicas)
    devices = settings.device_indices or tuple(range(spare, gpus))
    if not devices:
        bound = settings.cpu_cores or cpu_places(range(size), size)["cpu_cores"]
        return [dataclasses.replace(settings, cpu_cores=bound)] * num_replicas
    if len(devices) < size * num_replicas or (settings.device_indices and len(devices) > size * num_replicas):
        raise ValueError(
            f"{num_replicas} replicas of {size} devices each need {num_replicas * size} devices, not {len(devices)}"
        )
    own = [tuple(range(size)) if not shared else devices[i * size : (i + 1) * size] for i in range(num_replicas)]
    return [dataclasses.replace(settings, device_indices=indices) for indices in own]
