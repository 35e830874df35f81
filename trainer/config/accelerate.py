"""An Accelerate YAML file, as people have it for TRL and others, in the keys of `policy`.

Keys of the launcher (how many processes, where they meet) are for whatever starts the ranks. Every other key is
translated, or refused by the name of the key that takes its place. Accelerate itself is not imported.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import UserError, shown

_LAUNCHER = (
    "compute_environment", "debug", "enable_cpu_affinity", "gpu_ids", "machine_rank", "main_process_ip",
    "main_process_port", "main_training_function", "num_machines", "num_processes", "rdzv_backend", "same_network",
    "use_cpu",
)  # fmt: skip
_NO_MATTER = {  # here it is so anyway, or it makes no difference to what is computed
    "fsdp_config": (
        "fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_cpu_ram_efficient_loading", "fsdp_forward_prefetch",
        "fsdp_state_dict_type", "fsdp_sync_module_states", "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_use_orig_params", "fsdp_version",
    ),
    "deepspeed_config": ("deepspeed_multinode_launcher", "zero3_init_flag", "zero3_save_16bit_model"),
}  # fmt: skip
_OFF = ("no", "none", "false", "", "auto", "{}", "[]")  # values by which a key asks for nothing
_INSTEAD = {
    "fsdp_offload_params": "policy.offload moves weights and optimizer state to the host between shifts",
    "offload_param_device": "policy.offload moves weights and optimizer state to the host between shifts",
    "gradient_accumulation_steps": "batch.updates_per_step and batch.tokens_per_micro_batch decide that",
    "deepspeed_config_file": "the keys of policy decide what would be in it",
    "dynamo_config": "policy.compile is for that",
    "fp8_config": "policy.dtype is float32 or bfloat16",
    "parallelism_config": "policy.shard_size and engine.tensor_parallel_size are for that",
    "downcast_bf16": "policy.dtype decides that",
}
_DTYPES = {"no": "float32", "bf16": "bfloat16"}
_BACKENDS = {"NO": "fsdp", "MULTI_GPU": "fsdp", "MULTI_CPU": "fsdp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_RESHARD = {"true": True, "full_shard": True, "false": False, "shard_grad_op": False}


def policy_keys(path: Path) -> dict[str, Any]:
    """The keys of `policy` that the file comes to. Raises UserError with a sentence for each key that has none."""
    try:
        loaded = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"policy.accelerate_config: {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"policy.accelerate_config: {path} is not a mapping of keys, as `accelerate config` writes it")
    found: dict[str, Any] = {}
    refused: list[str] = []
    for key, value in _flat(loaded):
        translated = _translated(key, value)
        if isinstance(translated, str):
            refused.append(f"policy.accelerate_config: {path} has {key}: {shown(value)}, {translated}")
        else:
            found |= translated
    if refused:
        raise UserError(*refused)
    return found


def _flat(loaded: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys that mean something to the policy, with those of the section for its kind of sharding."""
    unused = {"FSDP": "deepspeed_config", "DEEPSPEED": "fsdp_config"}.get(str(loaded.get("distributed_type")))
    for key, value in loaded.items():
        if key in _NO_MATTER and isinstance(value, dict):
            if key != unused:
                yield from ((inner, each) for inner, each in value.items() if inner not in _NO_MATTER[key])
        elif key not in _LAUNCHER and not str(key).startswith("tpu_"):
            yield str(key), value


def _translated(key: str, value: Any) -> dict[str, Any] | str:
    """What a key comes to; or the rest of a sentence that refuses it."""
    word = str(value).strip().lower()
    match key:
        case "distributed_type":
            backend = _BACKENDS.get(str(value))
            return {"backend": backend} if backend else f"but policy.backend knows {', '.join(_BACKENDS)} only"
        case "mixed_precision":
            return (
                {"dtype": _DTYPES[word]} if word in _DTYPES else "but policy.dtype is float32 (no) or bfloat16 (bf16)"
            )
        case "fsdp_reshard_after_forward" | "fsdp_sharding_strategy":
            if word in _RESHARD:
                return {"reshard_after_forward": _RESHARD[word]}
            return "but policy.reshard_after_forward is true or false; copies on each machine are policy.shard_size's"
        case "fsdp_activation_checkpointing":
            return {"activation_checkpointing": "full" if word == "true" else "none"}
        case "zero_stage":
            return {"zero_stage": value} if value in (1, 2, 3) else "but policy.zero_stage is 1, 2 or 3"
        case "offload_optimizer_device":
            if word in ("none", "cpu"):
                return {"offload_optimizer": word == "cpu"}
            return "but policy.offload_optimizer puts it in the host's memory (cpu) or leaves it (none)"
        case "gradient_clipping":
            return {"max_grad_norm": value} if word not in _OFF else {}
        case "gradient_accumulation_steps" if value == 1:
            return {}
        case _ if word in _OFF or value is None:
            return {}
    return f"but {_INSTEAD[key]}: leave it out" if key in _INSTEAD else "which has no counterpart here: leave it out"
