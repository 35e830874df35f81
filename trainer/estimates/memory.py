"""The memory that a rank's device needs, calculated from a recipe and the model's config.json.

Weights, optimizer state, staging and KV cache are exact under FSDP2, for the rank that has the
most, and nearly exact under ZeRO. The memory of forward and backward is the maximum over a few
moments of an update. It is right to a few per cent, compared with
`torch.distributed._tools.FSDPMemTracker`, which follows the same update on tensors without data.
The memory that CUDA, NCCL and a sleeping engine keep is an estimate; the allocator's fragments are
not counted.

Legend: w is the number of bytes of an element in the compute dtype.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from generation.engine.settings import head_widths
from sharding.send.buckets import BucketPlan
from sharding.wire.manifest import Piece, SourceParameter
from sharding.wire.staging import BUFFERS
from trainer.config.answer_age import prompts_ahead
from trainer.config.machine import resolve_device
from trainer.config.model_file import REPROCESSED
from trainer.config.placement import engine_workers, placement
from trainer.config.schema import PolicyConfig, TrainConfig
from trainer.config.sync_ways import way
from trainer.estimates.kv_cache import engine_dtype, kv_answer_bytes
from trainer.estimates.model_sizes import (
    ModelSizes,
    answers_per_update,
    compute_width,
    computed_prompts,
    longest,
    model_sizes,
    optimizer_bytes,
    shard,
    shards_of,
)
from trainer.policy.logprobs import CPU_ELEMENTS, block_shape, cuda_block_elements
from trainer.policy.module import AutoValueModel

GIB = 2**30
_FLOAT32 = 4  # bytes of an element of float32 weights, and of gradient sums

ZERO_LIVE, ZERO_BUCKET = 10**9, 5 * 10**8
"""DeepSpeed's defaults, in elements (deepspeed/runtime/zero/config.py): weights that ZeRO-3 gathers
ahead or keeps, and the size of each buffer in which gradients are collected.
"""

_CONTEXT, _COMMUNICATOR, _GRAPHS = 0.5 * GIB, 0.5 * GIB, 2.5 * GIB
"""Usual sizes, not measured here, of a process on a CUDA device, of a group of ranks in NCCL, and
of an engine's CUDA graphs with their workspaces.
"""

MARGIN = 1.05
"""The factor by which the sum may exceed the device's memory, since the sum is right to a few per
cent.
"""

COLUMNS = {
    "starting": "while the run starts",
    "generating": "while answers are generated",
    "training": "while the policy is updated",
}
"""The columns of `MemoryPart`, in the order of a run, in words."""

TIGHT = 0.95
"""The share of a device above which a plan that fits is said to be tight."""


_NAMED = 4  # number of largest parts that a sentence names


@dataclass(frozen=True)
class MemoryPart:
    """A part of one rank's device memory, in bytes: while answers are generated, and while the
    policy is updated.

    `starting` is the part's size while the run starts: from when models are built, while the engine
    sleeps, to the end of the first sync, which fills the engine's weights and precedes the KV
    cache. Before that the engine starts alone, which takes less than generating.
    """

    name: str
    generating: float
    training: float
    remark: str = ""
    starting: float = 0


@dataclass(frozen=True)
class _Learner:
    """A model that is trained; `unsharded`: full weights to compute with exist between updates."""

    name: str
    policy: PolicyConfig
    model: ModelSizes
    unsharded: bool


@dataclass(frozen=True)
class _Moment:
    """The memory at one moment of backward, in bytes."""

    name: str
    weights: float  # gathered weights, and gathers in progress
    gradients: float  # unsharded gradients, and the inputs of reductions
    activations: float  # activations kept for backward or recomputed, and their gradients
    logits: float  # a block of logits, and the gradients of the head and of its input

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.weights + self.gradients + self.activations + self.logits


def trainer_parts(
    config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float
) -> list[MemoryPart]:
    """Return the memory of the policy and the models beside it, on a rank whose device has
    `device_gib`.
    """
    policy = config.policy
    algorithm = config.algorithm
    unsharded = way(config).shares_memory or (policy.backend == "deepspeed" and policy.zero_stage < 3)
    learners = [_Learner("policy", policy, model, unsharded)]
    parts = _kept_parts(config, learners[0], ranks)
    if algorithm.teacher:
        parts.append(_frozen_part("teacher", config, model_sizes(config, algorithm.teacher), ranks))
    elif algorithm.kl_coef and not config.lora.rank:  # with adapters, the base model is the reference
        parts.append(_frozen_part("reference", config, model, ranks))
    if algorithm.advantage_record.takes("values") and not config.critic.shared:
        path = config.critic.path or config.model.path
        critic = model_sizes(config, path, kind=AutoValueModel, num_labels=1)
        learners.append(
            _Learner("critic", policy.model_copy(update={"backend": "fsdp"}), critic, unsharded=False)
        )
        parts += _kept_parts(config, learners[1], ranks)
    if resolve_device(config) == "cuda":
        hybrid = policy.shard_size not in (None, ranks)
        models = len(learners) + bool(algorithm.kl_coef or algorithm.teacher)
        size = _CONTEXT
        if ranks > 1:
            size += _COMMUNICATOR * models * (2 if hybrid else 1)
        parts.append(MemoryPart("CUDA and NCCL", size, size, "by estimate", starting=size))
    # Policy and critic are updated one after the other.
    moments = [_largest_moment(config, learner, ranks, device_gib) for learner in learners]
    most = max(moments, key=lambda moment: moment.total)
    remark = f"in backward, at its largest: {most.name}"
    passing = [
        MemoryPart("gathered weights", 0, most.weights, remark),
        MemoryPart("gradients on their way", 0, most.gradients, remark),
        MemoryPart("activations", 0, most.activations, remark),
        MemoryPart(
            "logits", 0, most.logits, "a block of them, and the gradients of the head and of its input"
        ),
    ]
    return [*parts, *(part for part in passing if part.training)]


def engine_parts(
    config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float
) -> list[MemoryPart]:
    """Return the memory of the engine on each of its ranks, and of the staging buffers for its
    weights.
    """
    engine = config.engine
    weights = engine_dtype(config).itemsize * model.total / engine.tensor_parallel_size
    kv_cache = max(0.0, engine.gpu_memory_utilization * device_gib * GIB - weights)
    if engine.kv_cache_gib is not None:
        kv_cache = engine.kv_cache_gib * GIB
    tokens = int(kv_cache * engine.max_model_len // kv_answer_bytes(config, model, engine.max_model_len))
    fitting = f"{tokens:,} tokens: {tokens // engine.max_model_len} answers of {engine.max_model_len}"
    if config.rollout.slice_tokens is not None:
        # Answers beyond those that fit are preempted and computed again
        answers = (config.batch.prompts_per_step + prompts_ahead(config)) * config.algorithm.group_size
        share = math.ceil(answers * engine.tensor_parallel_size / engine_workers(config, ranks))
        fitting += f"; at most {min(share, engine.max_num_seqs)} run at a time"
    asleep = 0 if engine.sleep else 1
    first, later = (staging_bytes(config, model, ranks, cut) for cut in (False, True))
    staging_remark = "during a sync" + (f", {first / GIB:.2f} the first time" if first > later else "")
    held, held_asleep = _engine_process_bytes(config)
    # Each rank casts its shards of a bucket before they are gathered.
    casts = first / BUFFERS / shards_of(config.policy, ranks)
    weights_asleep = weights if way(config).shares_memory else asleep * weights
    kv_asleep = asleep * kv_cache
    held_remark = f"by estimate; {held_asleep / GIB:.1f} while it sleeps" if held else ""
    return [
        MemoryPart("engine: weights", weights, weights_asleep, starting=weights),
        MemoryPart("engine: KV cache", kv_cache, kv_asleep, fitting, starting=kv_asleep),
        MemoryPart("engine: CUDA, graphs, NCCL", held, held_asleep, held_remark, starting=held),
        MemoryPart("staging buffers", later, 0, staging_remark, starting=first + casts),
    ]


def _engine_process_bytes(config: TrainConfig) -> tuple[float, float]:
    """Return bytes that an engine's process has on its device besides weights and KV cache: awake,
    and while it sleeps.
    """
    engine = config.engine
    if resolve_device(config) == "cpu":
        return 0, 0
    freed = graph_bytes(config)
    if engine.tensor_parallel_size > 1:
        freed += _COMMUNICATOR
    awake = _CONTEXT + freed
    return awake, _CONTEXT if engine.sleep and engine.deep_sleep else awake


def graph_bytes(config: TrainConfig) -> float:
    """Return bytes of an engine's CUDA graphs on each of its ranks, by estimate."""
    eager = config.engine.enforce_eager or resolve_device(config) == "cpu"
    return 0 if eager else _GRAPHS


def over_budget(
    config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float, share: float = MARGIN
) -> Iterator[str]:
    """Yield a sentence, with the largest parts and what makes them smaller, for each column that
    does not fit.

    A column fits if its sum is at most `share` of the device's memory. `ranks` is the number of
    ranks that train.
    """
    trainer = trainer_parts(config, model, ranks, device_gib)
    engine = engine_parts(config, model, ranks, device_gib)
    crews = [trainer, engine] if placement(config).remote else [[*trainer, *engine]]
    for parts in crews:
        for column, when in COLUMNS.items():
            sizes = {part.name: getattr(part, column) / GIB for part in parts}
            total = sum(sizes.values())
            if total <= share * device_gib:
                continue
            by_size = sorted(sizes, key=lambda name: -sizes[name])
            largest = [name for name in by_size[:_NAMED] if sizes[name]]
            named = ", ".join(f"{name} {sizes[name]:.1f}" for name in largest)
            remedies = ", ".join(dict.fromkeys(_remedies(config, column, largest)))
            yield (
                f"{when} a rank needs {total:.1f} GiB, and its device has {device_gib:.1f} ({named}): "
                f"{remedies}, or use more ranks; hotbunk plan shows all parts"
            )


def _remedies(config: TrainConfig, column: str, largest: Sequence[str]) -> Iterator[str]:
    """Yield what makes the largest parts of a column smaller and is not set yet, for the largest
    part first.
    """
    policy = config.policy
    engine = config.engine
    state = []
    if policy.offload == "none" and policy.update_on == "device" and column != "training":
        state.append("set policy.offload: all")
    if policy.update_on == "device":
        state.append("set policy.update_on: host")
    if not config.lora.rank:
        state.append("set lora.rank")
    activations = ["lower batch.tokens_per_micro_batch"]
    if policy.activation_checkpointing != "full":
        activations.insert(0, "set policy.activation_checkpointing: full")
    if column != "generating":
        cache = "set engine.sleep: true"
    elif engine.kv_cache_gib is None:
        cache = "lower engine.gpu_memory_utilization"
    else:
        cache = "lower engine.kv_cache_gib"
    remedies = {
        "float32 weights": state,
        "optimizer state": state,
        "gradients": state,
        "weights to compute with": state,
        "weights": ["raise engine.tensor_parallel_size"],
        "KV cache": [cache],
        "activations": activations,
        "logits": activations[-1:],
        "staging buffers": ["lower sync.bucket_mib"],
    }
    for name in largest:
        yield from remedies.get(name.rpartition(": ")[2], [])


def staging_bytes(config: TrainConfig, model: ModelSizes, ranks: int, cut: bool) -> int:
    """Return bytes of the two staging buffers, counted twice if trainer and engine cannot share
    them.

    A buffer is as large as the largest bucket of weights that are sent. With `cut`, weights larger
    than a bucket are sent in parts if possible, as in all syncs except the first, and `sync.delta`
    takes one more buffer on either side, for what a bucket was before.
    """
    width = engine_dtype(config).itemsize
    shards = shards_of(config.policy, ranks)
    sent = model.adapters if config.lora.engines_apply else model.shapes
    parameters = [
        SourceParameter(
            name, shards * shard({name: shape}, shards) * width, (Piece(name, "uint8", (), 0),), shards
        )
        for name, shape in sent.items()
    ]
    device = resolve_device(config)
    packed = device == "cpu" and not config.engine.plain_cpu_weights
    uncut = []
    for name in sent:
        if packed or any(part in name for part in REPROCESSED[device]):
            uncut.append(name)
    record = way(config)
    if cut and record.reads_shards:
        parameters = [parameter for parameter in parameters if parameter.name in uncut]
    replayed = uncut if cut and config.sync.replay and not record.through_files else None
    plan = BucketPlan(parameters, config.sync.bucket_mib << 20, replayed)
    remote = placement(config).remote or record.through_files  # the worker then has buffers of its own
    buffers = BUFFERS
    if cut and config.sync.delta:
        buffers += 1
    return buffers * plan.capacity * (2 if remote else 1)


def layer_bytes(policy: PolicyConfig, model: ModelSizes) -> float:
    """Return bytes that a layer with a gated MLP keeps for backward per token, uncompiled, with w
    bytes per element.

    A norm keeps its input in float32, the normalised input, and its result; attention keeps
    queries, keys, values, the result and a float32 logarithm for each head; the MLP keeps four
    tensors of its width, and a mixture also the inputs and the results of a token's experts.
    Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, count another kind of layer in this
    way.
    """
    w = compute_width(policy)
    (queries, keys_values) = attention_elements(policy, model)
    attention = w * (2 * queries + keys_values) + _FLOAT32 * model.config["num_attention_heads"]
    return (_FLOAT32 + 2 * w) * model.normed + attention + w * (4 * model.width + 2 * model.dispatched)


def attention_elements(policy: PolicyConfig, model: ModelSizes) -> tuple[int, int]:
    """Return elements of a token's queries, and of its keys and values, in a layer.

    Heads of keys and values are repeated until the ranks that share a sequence divide their number.
    """
    heads = model.config["num_attention_heads"]
    (key_width, value_width) = head_widths(model.config)
    kv_heads = model.config.get("num_key_value_heads") or heads
    return heads * key_width, math.lcm(kv_heads, policy.sequence_parallel) * (key_width + value_width)


def product_bytes(policy: PolicyConfig, model: ModelSizes) -> float:
    """Return bytes per token of results that a layer keeps if all but products is recomputed.

    They are queries, keys and values, attention's result with a float32 logarithm for each head,
    the result of its last matrix, two tensors of the MLP's width, and the MLP's (experts') results.
    """
    (queries, keys_values) = attention_elements(policy, model)
    hidden = model.config["hidden_size"]
    elements = 2 * (queries + model.width) + keys_values + hidden + max(hidden, model.dispatched)
    return compute_width(policy) * elements + _FLOAT32 * model.config["num_attention_heads"]


def recomputed_layers(policy: PolicyConfig, model: ModelSizes) -> int:
    """Return the number of layers that keep their input, and recompute their activations, with or
    without products.
    """
    return {
        "auto": 0,  # on a CPU
        "none": 0,
        "products": model.layers,
        "every_second": (model.layers + 1) // 2,
        "full": model.layers,
    }[policy.activation_checkpointing]


def _kept_parts(config: TrainConfig, learner: _Learner, ranks: int) -> list[MemoryPart]:
    name = learner.name
    policy = learner.policy
    model = learner.model
    width = compute_width(policy)
    shards = shards_of(policy, ranks)
    trained = shard(model.trained, shards)
    deepspeed = policy.backend == "deepspeed"
    stage = policy.zero_stage
    # On a CPU, the host's memory is the device's.
    put_away = (
        ("none", "optimizer", "all").index(policy.offload) if resolve_device(config) == "cuda" else 0
    )
    on_host = updates_on_host(config)
    on_device = 0 if on_host else trained
    # The policy computes with the engine's weights
    in_place = way(config).shares_memory and name == "policy"
    # Models under FSDP2 are built where they are while engines are awake; the first sync needs the
    # policy's weights.
    built_away = put_away and not deepspeed and not in_place
    built_weights = 0 if built_away and name != "policy" else 1
    parts = []
    if deepspeed or (model.adapters and not on_host):
        kept = width * (model.total if deepspeed and stage < 3 else shard(model.shapes, shards))
        generating = 0 if put_away == 2 else kept
        compute = f"{name}: weights to compute with"
        parts.append(MemoryPart(compute, generating, kept, starting=built_weights * kept))
    elif in_place:
        remark = "the policy's own, until the first sync ends"
        parts.append(
            MemoryPart(f"{name}: weights to compute with", 0, 0, remark, starting=width * model.total)
        )
    stays = 0 if put_away == 2 or (deepspeed and put_away) else 1
    masters = 0 if in_place and width == _FLOAT32 else _FLOAT32 * on_device
    moments = 0 if on_host else optimizer_bytes(policy, model, shards)
    gradients = trained if deepspeed else on_device
    if deepspeed and stage == 1:
        gradients = sum(shape.numel() for shape in model.trained.values())
    # ZeRO-3 allocates both of its gradient buffers once (`IPGBucketZ3` and
    # `grad_partitions_flat_buffer` in deepspeed/runtime/zero/stage3.py).
    if deepspeed and stage == 3:
        bucket = _FLOAT32 * ZERO_BUCKET
        parts.append(MemoryPart(f"{name}: bucket of gradients", bucket, bucket, starting=bucket))
    lasting = _FLOAT32 * trained if deepspeed and stage == 3 else 0
    return [
        *parts,
        MemoryPart(
            f"{name}: float32 weights", stays * masters, masters, starting=built_weights * masters
        ),
        MemoryPart(
            f"{name}: optimizer state",
            0 if put_away else moments,
            moments,
            starting=0 if built_away else moments,
        ),
        MemoryPart(
            f"{name}: gradients", 0 if put_away else lasting, _FLOAT32 * gradients, starting=lasting
        ),
    ]


def updates_on_host(config: TrainConfig) -> bool:
    """Return whether the optimizer's state is in memory apart from the device's."""
    return config.policy.update_on == "host" and resolve_device(config) == "cuda"


def _frozen_part(name: str, config: TrainConfig, model: ModelSizes, ranks: int) -> MemoryPart:
    held = compute_width(config.policy) * shard(model.shapes, shards_of(config.policy, ranks))
    away = config.policy.offload_reference is not False and resolve_device(config) == "cuda"
    stays = 0 if away else held
    return MemoryPart(f"{name}: weights", stays, held, "while it scores" if away else "", starting=stays)


def _largest_moment(config: TrainConfig, learner: _Learner, ranks: int, device_gib: float) -> _Moment:
    """Return the moment of an update's backward that needs the most memory, out of three:

    - output head: its gradient and that of its input, summed in float32 for a block of columns and
      for all targets, and three tables of a block's logits, two of float32 and one of w bytes
      (`trainer.policy.logprobs`), while the last layer is gathered;
    - last layer: its results exist again, with gradients of its MLP, while reductions hold the
      head's or a layer's gradients in float32, and the next layer is gathered;
    - embeddings, at the end: their gradient, and its float32 copy for the reduction.

    A single rank gathers nothing ahead, but casts and copies like several
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    policy = learner.policy
    model = learner.model
    w = compute_width(policy)
    trains = not model.adapters
    deepspeed = policy.backend == "deepspeed"
    targets, kept, last_norm, working = activation_bytes(config, policy, model, ranks)
    # This unit stays gathered until the end
    embedding = model.rest if model.tied else model.rest - model.head
    # A unit of their own, of which a rank has a part
    split = model.split if policy.expert_parallel > 1 else 0
    dense = model.layer - split
    experts = split // policy.expert_parallel
    ahead: float = w * dense if shards_of(policy, ranks) > 1 else 0
    if updates_on_host(config) and not deepspeed:
        # float32 shards are copied to the device before they are cast
        ahead += _FLOAT32 * model.layer / shards_of(policy, ranks)
    before = w * model.rest + ahead
    within = w * (embedding + dense + experts) + ahead
    if learner.unsharded or not policy.reshard_after_forward:
        gathered = model.total - len(model.experts) * (split - experts)
        before = within = 0 if learner.unsharded else w * gathered
    elif deepspeed:
        before = within = w * min(model.total, max(ZERO_LIVE, model.rest + model.layer))
    logits = (
        cuda_block_elements(int(device_gib * GIB)) if resolve_device(config) == "cuda" else CPU_ELEMENTS
    )
    rows, columns = block_shape(logits, model.config["vocab_size"])
    hidden = model.config["hidden_size"]
    head = (2 * _FLOAT32 + w) * min(rows, targets) * columns + (_FLOAT32 + w) * targets * hidden
    if trains:
        head += w * model.head + _FLOAT32 * columns * hidden
    # ZeRO-1 and 2 collect gradients in two alternating buffers (`setup_buckets` in
    # deepspeed/runtime/zero/stage_1_and_2.py), which also hold the float32 copies.
    buckets: float = 2 * w * ZERO_BUCKET if deepspeed and policy.zero_stage < 3 else 0
    reduced: float = 0
    last: float = 0
    if trains and deepspeed:
        reduced = buckets + w * max(model.layer, model.head)
        last = buckets + w * embedding
    elif trains:
        largest = max(dense, experts, 0 if model.tied else model.head)
        reduced = _FLOAT32 * largest + (w * model.head if model.tied else 0)
        last = (w + _FLOAT32) * embedding
    return max(
        _Moment("output head", before, buckets, kept + last_norm, head if model.head else 0),
        _Moment("last layer", within, reduced, kept + working, 0),
        _Moment("embeddings", min(within, w * embedding), last, 0, 0),
        key=lambda moment: moment.total,
    )


def activation_bytes(
    config: TrainConfig, policy: PolicyConfig, model: ModelSizes, ranks: int
) -> tuple[float, float, float, float]:
    """Return the largest micro-batch's targets, and the bytes that its layers, its head, and one
    layer's backward need.

    A layer's backward needs `layer_bytes` once more if the layer is recomputed, and gradients of
    its MLP: two of the MLP's width, two of the hidden size, and in a mixture two of what its
    experts get. The head keeps the last norm and the hidden states of targets, at most as many as
    sampled tokens. Each of the ranks that share a micro-batch has a part of its tokens, and in
    attention's backward holds queries, keys and values twice: as they are sent, and as they are
    received.
    """
    share = answers_per_update(config, ranks)
    # A prompt may consist of images, whose tokens count for more.
    ways = policy.sequence_parallel  # each of the ranks that share has all images
    row = longest(config) + math.ceil(ways * model.flops.image_token * config.data.max_prompt_tokens)
    largest = max(config.batch.tokens_per_micro_batch, row)
    prompts = math.ceil(computed_prompts(config, share, config.data.max_prompt_tokens))
    every = share * row - (share - prompts) * (row - config.sampling.max_tokens)
    copies = share * row / every - 1  # tokens of whole sequences, for each that is computed, besides it
    # What mixers of a hybrid compute again counts in the budget
    again_in_mixers = model.flops.recurrent_share * copies
    tokens = min(largest / (1 + again_in_mixers), every) / ways
    w = compute_width(policy)
    hidden = model.config["hidden_size"]
    layer = layer_bytes(policy, model) * (1 + again_in_mixers)
    # Attention copies the keys and values that answers have in common for each of them.
    layer += w * attention_elements(policy, model)[1] * copies
    again = recomputed_layers(policy, model)
    away = policy.offload_activations and resolve_device(config) == "cuda"
    inputs_kept = 0 if away else again
    kept = inputs_kept * w * hidden + (model.layers - again) * layer
    # With every_second, the first of each two layers is recomputed.
    last_again = again > model.layers - again
    working = layer if last_again else 0
    if policy.activation_checkpointing == "products":
        results = product_bytes(policy, model) * (1 + again_in_mixers)
        kept += model.layers * results
        working -= results
    working += w * 2 * (model.width + hidden + model.dispatched)
    if ways > 1:
        working += 2 * w * sum(attention_elements(policy, model))
    once = prompts * config.data.max_prompt_tokens + share * config.sampling.max_tokens
    targets = tokens * share * config.sampling.max_tokens / once
    return targets, tokens * kept, (tokens * (_FLOAT32 + w) + targets * w) * hidden, tokens * working
