"""Translates an Accelerate YAML file, such as those written for TRL, into the keys of `policy`.

Keys of Accelerate's launcher (the number of processes, their addresses) are ignored. Every other
key is either translated or refused with the name of the key that takes its place. Accelerate's own
loader and plugins read the file, so that defaults and spellings are Accelerate's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generation.yaml_files import load_mapping
from trainer.errors import UserError, quoted

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

_LAUNCHER = (
    "compute_environment",
    "debug",
    "enable_cpu_affinity",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "num_machines",
    "num_processes",
    "rdzv_backend",
    "same_network",
    "use_cpu",
)
_IGNORED = {  # keys whose effect Hotbunk has anyway, or that do not change results
    "fsdp_config": (
        "fsdp_auto_wrap_policy",
        "fsdp_backward_prefetch",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_forward_prefetch",
        "fsdp_state_dict_type",
        "fsdp_sync_module_states",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_use_orig_params",
        "fsdp_version",
    ),
    "deepspeed_config": ("deepspeed_multinode_launcher", "zero3_init_flag", "zero3_save_16bit_model"),
}
_OFF = ("no", "none", "false", "", "auto", "{}", "[]")  # values by which a key asks for nothing
_COUNTERPARTS = {  # keys that are refused, and what to use instead
    "offload_param_device": (
        "policy.offload moves weights and optimizer state to the host between shifts"
    ),
    "gradient_accumulation_steps": "batch.updates_per_step and batch.tokens_per_micro_batch decide it",
    "deepspeed_config_file": "the keys of policy replace that file",
    "dynamo_config": "policy.compile is for that",
    "fp8_config": "policy.dtype is float32 or bfloat16",
    "parallelism_config": "policy.shard_size and engine.tensor_parallel_size are for that",
    "downcast_bf16": "policy.dtype decides it",
}
_TRANSLATED = (
    "activation_checkpointing",
    "distributed_type",
    "fsdp_activation_checkpointing",
    "fsdp_offload_params",
    "fsdp_reshard_after_forward",
    "fsdp_sharding_strategy",
    "gradient_clipping",
    "mixed_precision",
    "offload_optimizer_device",
    "zero_stage",
)
_DTYPES = {"no": "float32", "bf16": "bfloat16"}
_BACKENDS = {
    "NO": "fsdp",
    "MULTI_GPU": "fsdp",
    "MULTI_CPU": "fsdp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}
_RESHARD = {True: True, "FULL_SHARD": True, False: False, "SHARD_GRAD_OP": False}


def policy_keys(path: Path) -> dict[str, Any]:
    """Return the keys of `policy` for the file at `path`. Raises UserError with a sentence for each
    untranslatable key.
    """
    if not path.is_file():
        raise UserError(
            f"policy.accelerate_config: {path} is not a file: name one that `accelerate config` writes"
        )
    try:
        loaded = load_mapping(path)
    except ValueError as error:
        raise UserError(f"policy.accelerate_config: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(
            f"policy.accelerate_config: {path} has lists or mappings nested too deep"
        ) from error
    prefix = f"policy.accelerate_config: {path} has"
    obstacles = [(key, value, _obstacle(key, value)) for key, value in _flat(loaded)]
    if any(reason for _, _, reason in obstacles):
        raise UserError(
            *(f"{prefix} {key}: {quoted(value)}, {reason}" for key, value, reason in obstacles if reason)
        )
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        return _translated(load_config_from_file(str(path)))
    except Exception as error:  # Accelerate's classes raise anything for values of other types
        raise UserError(
            f"{prefix} a value that cannot be used: {' '.join(str(error).split())}"
        ) from error


def _flat(loaded: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that concern the policy, including those of the section for its kind of
    sharding.
    """
    unused = {"FSDP": "deepspeed_config", "DEEPSPEED": "fsdp_config"}.get(
        str(loaded.get("distributed_type"))
    )
    for key, value in loaded.items():
        if key in _IGNORED and isinstance(value, dict):
            if key != unused:
                yield from (
                    (inner, setting) for inner, setting in value.items() if inner not in _IGNORED[key]
                )
        elif key not in _LAUNCHER and not str(key).startswith("tpu_"):
            yield str(key), value


def _obstacle(key: str, value: Any) -> str:
    """Return the end of a sentence that refuses a key which is not translated; empty if the key
    asks for nothing.
    """
    if key == "distributed_type" and value not in [*_BACKENDS]:
        return f"which should be one of {', '.join(_BACKENDS)}"
    if key in _TRANSLATED and isinstance(value, list | dict):
        return "which should be a single value"
    if key in _TRANSLATED or value is None or str(value).strip().lower() in _OFF:
        return ""
    if key == "gradient_accumulation_steps" and value == 1:
        return ""
    if key in _COUNTERPARTS:
        return f"but {_COUNTERPARTS[key]}: leave it out"
    return "which has no counterpart here: leave it out"


def _translated(config: "ClusterConfig") -> dict[str, Any]:
    """Return the keys of `policy` for Accelerate's configuration. Raises ValueError for values that
    it cannot express.
    """
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    kind = str(config.distributed_type.value)
    precision = config.mixed_precision
    keys: dict[str, Any] = {"backend": _BACKENDS[kind]}
    if precision is not None:
        if str(precision) not in _DTYPES:
            raise ValueError(
                f"mixed_precision is {precision}, but policy.dtype is float32 (no) or bfloat16 (bf16)"
            )
        keys["dtype"] = _DTYPES[str(precision)]
    if kind == "FSDP":
        section = config.fsdp_config
        number = section.get("fsdp_sharding_strategy")  # or a name
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=section.get("fsdp_version"),
            sharding_strategy=None if number is None else str(number),
            reshard_after_forward=section.get("fsdp_reshard_after_forward"),
            activation_checkpointing=section.get("fsdp_activation_checkpointing"),
        )
        strategy: Any = (
            fsdp.sharding_strategy if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward
        )
        if (name := getattr(strategy, "name", strategy)) not in _RESHARD:
            raise ValueError(
                f"fsdp_sharding_strategy is {name}, but policy.reshard_after_forward is true or false; "
                "for a copy on each machine set policy.shard_size"
            )
        keys["reshard_after_forward"] = _RESHARD[name]
        keys["activation_checkpointing"] = "full" if fsdp.activation_checkpointing else "none"
        keys["update_on"] = (
            "host" if str(section.get("fsdp_offload_params")).lower() == "true" else "device"
        )
    if kind == "DEEPSPEED":
        section = config.deepspeed_config
        zero = DeepSpeedPlugin(
            zero_stage=section.get("zero_stage"),
            gradient_clipping=section.get("gradient_clipping"),
            offload_optimizer_device=section.get("offload_optimizer_device"),
        )
        if zero.zero_stage not in (1, 2, 3):
            raise ValueError(f"zero_stage is {zero.zero_stage}, but policy.zero_stage is 1, 2 or 3")
        if zero.offload_optimizer_device not in ("none", "cpu"):
            device = zero.offload_optimizer_device
            raise ValueError(
                f"offload_optimizer_device is {device}, but policy.update_on covers cpu and none"
            )
        home = "host" if zero.offload_optimizer_device == "cpu" else "device"
        keys |= {"zero_stage": zero.zero_stage, "update_on": home}
        if zero.gradient_clipping not in (None, "auto"):
            keys["max_grad_norm"] = float(zero.gradient_clipping)
    return keys
