"""Choose what layers compute again in backward (`policy.activation_checkpointing: auto`)."""

from trainer.config.machine import resolve_device
from trainer.config.placement import placement
from trainer.config.schema import TrainConfig
from trainer.estimates.memory import GIB, TIGHT, engine_parts, trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.model_structure import adds_to_products


def with_chosen_recomputation(
    config: TrainConfig, ranks: int, device_gib: float, kept: str = ""
) -> tuple[TrainConfig, str]:
    """Return the recipe with `auto` replaced, and a sentence that says by what.

    It is what the run has `kept` from an earlier session, or on a GPU the least recomputation with
    which an update on `ranks` ranks takes at most `TIGHT` of a device by the plan. On a CPU, whose
    memory is not the trainer's alone, it is the least that the other keys allow. The sentence is
    empty there, and if the recipe names a value.
    """
    policy = config.policy
    if policy.activation_checkpointing != "auto":
        return config, ""
    choices = ["full"] if policy.offload_activations else ["none", "full"]
    why = ""
    if kept:
        choices = [kept]
        why = ", as in the run's earlier sessions"
    elif resolve_device(config) == "cuda":
        model = model_sizes(config, config.model.path, config.lora)
        if policy.backend == "fsdp" and not adds_to_products(model.shapes):
            choices.insert(-1, "products")
    for layers in choices:
        chosen = policy.model_copy(update={"activation_checkpointing": layers})
        config = config.model_copy(update={"policy": chosen})
        if kept or resolve_device(config) == "cpu":
            break
        parts = trainer_parts(config, model, ranks, device_gib)
        if not placement(config).remote:
            parts += engine_parts(config, model, ranks, device_gib)
        gib = sum(part.training for part in parts) / GIB
        why = f", with which an update takes {gib:.1f} of {device_gib:.1f} GiB by the plan"
        if gib <= TIGHT * device_gib:
            break
    return config, why and f"policy.activation_checkpointing is {layers}{why}"
