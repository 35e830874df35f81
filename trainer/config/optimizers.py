"""Checks of the keys of the optimizer, without torch."""

from collections.abc import Iterator

from trainer.config.schema import PolicyConfig


def check_optimizer(policy: PolicyConfig) -> Iterator[str]:
    """Checks the optimizer's keys; `trainer.policy.optimizers.try_optimizer` later tries its class."""
    named, options = f"policy.optimizer is {policy.optimizer}", policy.optimizer_options
    if policy.optimizer == "adamw":
        if options:
            yield f"policy.optimizer_options is set, but {named}, whose keys are policy.betas and eps: leave it out"
        return
    if policy.backend != "fsdp":
        yield f"{named}, but DeepSpeed's ZeRO is for adamw here: set policy.backend to fsdp, or leave it out"
    if policy.update_on == "host":
        yield f"{named}, which is not for policy.update_on: host: set that to device, or leave it out"
    if policy.expert_parallel > 1:
        yield f"{named}, which is untried with policy.expert_parallel: leave one of them out"
    for key in sorted(options.keys() & {"params", "lr", "weight_decay"}):
        yield f"policy.optimizer_options has {key}, which policy.lr and policy.weight_decay decide: leave it out"
    for key in ("betas", "eps") if ":" in policy.optimizer else ():
        if getattr(policy, key) != PolicyConfig.model_fields[key].default:
            yield f"policy.{key} is set, but {named}: put what it takes into policy.optimizer_options instead"
