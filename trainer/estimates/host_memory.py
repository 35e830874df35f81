"""The host memory that a recipe takes in place of a device's, calculated as
`trainer.estimates.memory` does.
"""

from trainer.config.machine import resolve_device
from trainer.config.schema import TrainConfig
from trainer.estimates.memory import (
    MemoryPart,
    activation_bytes,
    engine_dtype,
    graph_bytes,
    updates_on_host,
)
from trainer.estimates.model_sizes import (
    ModelSizes,
    compute_width,
    model_sizes,
    optimizer_bytes,
    shard,
    shards_of,
)
from trainer.policy.module import AutoValueModel

_FLOAT32 = 4  # bytes


def host_part(config: TrainConfig, model: ModelSizes, ranks: int) -> MemoryPart:
    """Return the bytes of a rank with a CUDA device that wait in host memory, without the rounding
    up of page-locked memory.

    They are what `policy.update_on: host`, `policy.offload`, `policy.offload_activations` and
    `policy.offload_reference` keep there, and what vLLM sets aside while an engine sleeps: the
    weights under adapters, and CUDA graphs with `engine.deep_sleep`.
    """
    generating = training = 0.0
    if resolve_device(config) == "cuda":
        policy = config.policy
        algorithm = config.algorithm
        engine = config.engine
        for learner in _learners(config, model):
            shards = shards_of(policy, ranks)
            width = compute_width(policy)
            trained = _FLOAT32 * shard(learner.trained, shards)
            frozen = width * shard(learner.shapes, shards) if learner.adapters else 0
            on_host = 4 * trained + frozen if updates_on_host(config) else 0  # gradients, too
            training += on_host
            state = optimizer_bytes(policy, learner, shards)
            moved = {"none": 0, "optimizer": state, "all": state + trained + frozen}[policy.offload]
            generating += on_host or moved
        scores = algorithm.teacher or (algorithm.kl_coef and not config.lora.rank)
        if scores and policy.offload_reference is not False:
            frozen_model = model_sizes(config, algorithm.teacher) if algorithm.teacher else model
            kept = compute_width(policy) * shard(frozen_model.shapes, shards_of(policy, ranks))
            generating = generating + kept
            training = training + kept
        if config.lora.engines_apply and engine.sleep:
            training += engine_dtype(config).itemsize * model.total / engine.tensor_parallel_size
        if engine.sleep and engine.deep_sleep:
            training += graph_bytes(config)
        if policy.offload_activations:
            unmoved = policy.model_copy(update={"offload_activations": False})
            staying, total = (
                activation_bytes(config, keys, model, ranks)[1] for keys in (policy, unmoved)
            )
            training += total - staying
    return MemoryPart(
        "host memory", generating, training, "of each rank, in place of its device's", generating
    )


def _learners(config: TrainConfig, model: ModelSizes) -> list[ModelSizes]:
    """Return the policy, and its critic if that is a model of its own."""
    if not config.algorithm.advantage_record.takes("values") or config.critic.shared:
        return [model]
    return [
        model,
        model_sizes(config, config.critic.path or config.model.path, kind=AutoValueModel, num_labels=1),
    ]
