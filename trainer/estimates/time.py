"""Estimated seconds of a step: each part by a formula, from data sheets and counts.

A model, and no measurement: what was assumed is written below. Not counted: tools and rewards, Python between the
phases, ranks that wait for the one with the longest answers, a critic, evaluations, checkpoints. ZeRO is counted as if
it were FSDP2.

Legend: w bytes of an element in the compute dtype, N ranks, S ranks that a model is cut over.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.config.placement import engine_workers, placement, training_ranks
from trainer.config.schema import PolicyConfig, TrainConfig
from trainer.estimates.gpus import Gpu
from trainer.estimates.memory import attention_elements, engine_dtype, kv_token_bytes, layer_bytes, recomputed_layers
from trainer.estimates.model_sizes import ModelSizes, compute_width, shard, shards_of
from trainer.model_structure import attended

MATMUL = 0.68
"""Of the peak, in large bfloat16 products; assumed. Whole steps of Llama 3 come to 0.38 to 0.43 on H100s (Grattafiori
et al. 2024, arXiv:2407.21783, table 4)."""

MEMORY = 0.85
"""Of the data sheet's rate, in kernels that read and write in order; assumed."""

LINKS = 0.75
"""Of the data sheet's rate, in NCCL's gathers of large messages; assumed."""

HOST = 50e9
"""Bytes a second between host and device; PCIe 5.0 x16 has 63e9."""

HOP = 3e-6
"""Seconds from one rank of a ring to the next, however small the message; assumed."""

NODE = 8
"""GPUs of a machine."""

DECODE_OVERHEAD = 1e-3
"""Seconds of an engine's step beside its kernels, with CUDA graphs; assumed."""

SHIFT = 1.0
"""Seconds to sleep and to wake, to collect garbage and to grow the allocator's memory again; by estimate."""

_ELEMENTWISE = 8
"""How often an activation that is kept crosses the memory: written and read in forward, the same when it is computed
again, and in backward read, with its gradient written and read, and added up."""

_LOGIT_BYTES = 48
"""Of memory traffic for each logit: forward writes and reads it in bfloat16 and float32, for normaliser, choice and
entropy; backward does so again, and writes and reads its gradient (`trainer.policy.logprobs`)."""

_ADAM_BYTES = 40
"""Of memory traffic for each parameter: norm and clipping 12, AdamW reads four float32 numbers and writes three."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of an answer, on average."""

    prompt: float
    answer: float


@dataclass(frozen=True)
class Cost:
    """A part of a step."""

    name: str
    seconds: float  # that the step is longer for it
    hidden: float = 0.0  # seconds of it that pass beside others
    remark: str = ""  # what it is made of


@dataclass(frozen=True)
class Traffic:
    """Collectives of FSDP2 in an update, on each rank."""

    gathers: int = 0  # calls of all-gather
    gathered: int = 0  # bytes of their results
    scatters: int = 0  # calls of reduce-scatter
    scattered: int = 0  # bytes of their inputs
    reductions: int = 0  # all-reduces between replicas
    reduced: int = 0  # bytes of their inputs


def update_traffic(policy: PolicyConfig, model: ModelSizes, ranks: int, micro_batches: int) -> Traffic:
    """The calls and bytes of an update in which all weights learn.

    In each micro-batch every unit is gathered for forward, in w bytes an element, and a layer once more for backward if
    `policy.reshard_after_forward`; and reduced, in float32. Between replicas shards are added up once an update. Rows
    are cut in S equal chunks, so what travels is padded to S times the first. A single rank sends nothing.
    """
    shards, w = shards_of(policy, ranks), compute_width(policy)
    own = {name: sum(math.ceil(s[0] / shards) * math.prod(s[1:]) for s in unit) for name, unit in model.units.items()}
    again = [name for name in own if "." in name and policy.reshard_after_forward]
    cut = micro_batches if shards > 1 else 0
    copied = len(own) if ranks > shards else 0
    return Traffic(
        gathers=cut * (len(own) + len(again)),
        gathered=cut * w * shards * (sum(own.values()) + sum(own[name] for name in again)),
        scatters=cut * len(own),
        scattered=cut * 4 * shards * sum(own.values()),
        reductions=copied,
        reduced=4 * sum(own.values()) if copied else 0,
    )


def step_costs(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> list[Cost]:
    """All parts of a step in which no group is left out.

    Engines apart need no sleep; with a lag, rollout and update go on beside each other, and the longer one counts.
    """
    training = training_ranks(config, ranks)
    rollout = _rollout(config, model, engine_workers(config, ranks), gpu, lengths)
    apart = placement(config).apart
    sync = _broadcast(config, model, training, ranks, gpu) if apart else _sync(config, model, ranks, gpu)
    update = list(_update(config, model, training, gpu, lengths))
    if config.rollout.lag:
        beside = min(rollout.seconds, sum(cost.seconds for cost in update))
        rollout = replace(rollout, seconds=rollout.seconds - beside, hidden=beside)
    return [rollout, *sync, *update]


def step_flops(config: TrainConfig, model: ModelSizes, ranks: int, lengths: Lengths) -> float:
    """Operations of a step's updates on each rank, as MFU counts them: forward and backward, nothing twice."""
    amount = _amount(config, ranks, lengths)
    passes = config.algorithm.num_iterations
    return passes * (model.flops.forward(*amount) + model.flops.backward(*amount))


def _rollout(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> Cost:
    """Prompts once for each group (the prefix cache has the others), then one engine step a token.

    An engine step reads all weights and the keys and values of all answers under way, or computes 2 operations for
    each parameter and answer, whichever takes longer. Lengths are even between 0 and twice their mean: slots stay
    filled until no prompt waits, and then empty evenly. A roofline (Williams et al. 2009, doi:10.1145/1498765.1498785).
    """
    engine, w, size = config.engine, engine_dtype(config).itemsize, config.engine.tensor_parallel_size
    answers = config.batch.prompts_per_step * config.algorithm.group_size * size / ranks
    compute, memory = MATMUL * gpu.flops, MEMORY * gpu.memory_rate
    flops = model.flops.forward(1, 1, 0) / size
    prompts = answers / config.algorithm.group_size * lengths.prompt
    prefill = prompts * flops / compute
    slots = min(answers, engine.max_num_seqs)

    def engine_step(running: float, context: float) -> float:
        held = w * model.total / size + running * context * kv_token_bytes(config, model)
        return max(held / memory, running * flops / compute) + DECODE_OVERHEAD

    full = (answers - slots) * lengths.answer / slots
    last = int(2 * lengths.answer)
    tail = sum(engine_step(slots * (1 - at / last), lengths.prompt + at) for at in range(last))
    decode = full * engine_step(slots, lengths.prompt + lengths.answer / 2) + tail
    return Cost("rollout", prefill + decode, remark=f"prompts {prefill:.1f}, then {full + last:,.0f} engine steps")


def _sent_elements(config: TrainConfig, model: ModelSizes) -> int:
    """Elements that an update brings: those of all weights, or of the adapters alone."""
    return sum(shape.numel() for shape in (model.adapters if config.lora.engines_apply else model.shapes).values())


def _sync(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu) -> Iterator[Cost]:
    """Weights in the engine's dtype: gathered, written to staging, read and written by the worker; and the shift. Where
    the worker reads the masters themselves, float32, it is one copy.
    """
    policy, shards = config.policy, shards_of(config.policy, ranks)
    elements = _sent_elements(config, model)
    size = engine_dtype(config).itemsize * elements
    if config.sync.way == "pull":
        yield Cost("sync", (4 * elements + size) / (MEMORY * gpu.memory_rate), remark=f"{size / 2**30:.1f} GiB")
    elif config.sync.way != "zero_copy":
        gather = _ring(size, shards, gpu, len(model.units))
        yield Cost("sync", gather + 3 * size / (MEMORY * gpu.memory_rate), remark=f"{size / 2**30:.1f} GiB")
    moved = {"none": 0, "optimizer": 8, "all": 12}[policy.offload] * sum(s.numel() for s in model.trained.values())
    seconds = 2 * moved / shards / HOST
    yield Cost("sleep and wake", SHIFT + seconds, remark="by estimate" + (", and policy.offload" if moved else ""))


def _broadcast(config: TrainConfig, model: ModelSizes, training: int, ranks: int, gpu: Gpu) -> Iterator[Cost]:
    """Weights to engines apart: gathered among the ranks that train, then sent through a chain of all engines; read and
    written by the worker.
    """
    size = engine_dtype(config).itemsize * _sent_elements(config, model)
    rate = gpu.link_rate if ranks <= NODE else gpu.network_rate
    gather = _ring(size, shards_of(config.policy, training), gpu, len(model.units))
    seconds = gather + size / (LINKS * rate) + 2 * size / (MEMORY * gpu.memory_rate)
    yield Cost("sync", seconds, remark=f"{size / 2**30:.1f} GiB, by broadcast")


def _update(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> Iterator[Cost]:
    """Forward and backward of all micro-batches, what they gather and reduce, and the optimizer's steps."""
    policy, algorithm, shards = config.policy, config.algorithm, shards_of(config.policy, ranks)
    tokens, targets, pairs = _amount(config, ranks, lengths)
    passes, compute, memory = algorithm.num_iterations, MATMUL * gpu.flops, MEMORY * gpu.memory_rate
    share = recomputed_layers(policy, model) / model.layers
    trunk = model.flops.forward(tokens, 0, pairs)
    again = share * trunk + model.flops.forward(0, targets, 0)  # of the logits, too
    products = (step_flops(config, model, ranks, lengths) + passes * again) / compute
    traffic = (_ELEMENTWISE - 2 * (1 - share)) * layer_bytes(policy, model) * model.layers * tokens
    others = passes * (traffic + _LOGIT_BYTES * model.config["vocab_size"] * targets) / memory
    yield Cost("update: products", products, remark=f"{tokens:,.0f} tokens a rank; recomputed layers: {share:.0%}")
    yield Cost("update: elementwise", others, remark="norms, activations, logits: memory traffic")
    updates = config.batch.updates_per_step
    shared = tokens * policy.sequence_parallel
    micro_batches = passes * updates * math.ceil(shared / updates / config.batch.tokens_per_micro_batch)
    busy = products + others
    if policy.sequence_parallel > 1:
        yield _exchanges(policy, model, gpu, passes * tokens, micro_batches)
    yield from _gathers(policy, model, ranks, gpu, micro_batches=micro_batches, updates=updates * passes, busy=busy)
    trained = shard(model.trained, shards)
    yield Cost("update: optimizer", passes * updates * _ADAM_BYTES * trained / memory)
    reference = algorithm.teacher is None and algorithm.kl_coef > 0
    scores = int(reference or algorithm.teacher is not None) + int(updates * passes > 1)
    if scores:
        yield Cost("scores", scores * model.flops.forward(tokens, targets, pairs) / compute, remark="forward alone")


def _gathers(
    policy: PolicyConfig, model: ModelSizes, ranks: int, gpu: Gpu, micro_batches: int, updates: int, busy: float
) -> Iterator[Cost]:
    """Gathers and reductions, layer by layer beside the work on another layer; only the time beyond that work counts.

    So are the embeddings, without which forward cannot begin, and their reduction, after which backward is over.
    """
    shards, w = shards_of(policy, ranks), compute_width(policy)
    if ranks == 1:
        return
    one = update_traffic(policy, model, ranks, 1)
    ends = model.rest if model.tied else model.rest - model.head
    last = 4 * ends
    if model.adapters:  # of which there are none in the embeddings
        learned, last = 4 * sum(shape.numel() for shape in model.adapters.values()), 0
        one = replace(one, scatters=model.layers, scattered=learned, reduced=learned // shards if one.reduced else 0)
    # Into the buffers of collectives and out of them; gradients become float32 on the way.
    copied = micro_batches * (2 * one.gathered + (1 + w / 4) * one.scattered) / (MEMORY * gpu.memory_rate)
    yield Cost("update: copies", copied, remark="gathered weights and gradients, on the device")
    gather, scatter = _ring(one.gathered, shards, gpu, one.gathers), _ring(one.scattered, shards, gpu, one.scatters)
    exposed = micro_batches * (_ring(w * ends, shards, gpu, 1) + _ring(last, shards, gpu, 1))
    beside = micro_batches * (gather + scatter) - exposed
    waited = max(0.0, beside - busy)
    remark = f"{one.gathered / 2**30:.1f} GiB gathered in each of {micro_batches} micro-batches"
    yield Cost("update: gathers", exposed + waited, beside - waited, remark)
    if ranks > shards:
        seconds = updates * 2 * one.reduced / (LINKS * gpu.network_rate)
        yield Cost("update: between replicas", seconds, remark="gradients, once an update")


def _exchanges(policy: PolicyConfig, model: ModelSizes, gpu: Gpu, tokens: float, micro_batches: int) -> Cost:
    """The all-to-alls of ranks that share sequences, with `tokens` each; there is no work beside them.

    Two in a layer's forward, two in its backward, and two where it is computed again. A rank keeps its own part.
    """
    ways, (queries, keys_values) = policy.sequence_parallel, attention_elements(policy, model)
    passes = 2 * model.layers + recomputed_layers(policy, model)
    size = passes * tokens * compute_width(policy) * (2 * queries + keys_values) * (ways - 1) / ways
    rate = gpu.link_rate if ways <= NODE else gpu.network_rate
    remark = f"{size / 2**30:.1f} GiB traded by each of {ways} ranks"
    return Cost("update: exchanges", size / (LINKS * rate) + 2 * passes * micro_batches * HOP, remark=remark)


def _ring(size: float, ranks: int, gpu: Gpu, calls: int) -> float:
    """Seconds to gather `size` bytes in a ring, or to reduce them: each rank passes on all but its own part.

    Between machines every GPU's network card carries a ring, so a machine has the rates of all of its cards together,
    at most that of the links within (NCCL; nccl-tests/doc/PERFORMANCE.md).
    """
    if ranks == 1:
        return 0.0
    rate = gpu.link_rate if ranks <= NODE else min(gpu.link_rate, NODE * gpu.network_rate)
    return size * (ranks - 1) / ranks / (LINKS * rate) + calls * HOP * (ranks - 1)


def _amount(config: TrainConfig, ranks: int, lengths: Lengths) -> tuple[float, float, float]:
    """Tokens, targets and attended pairs of a step on each rank, on average."""
    answers = config.batch.prompts_per_step * config.algorithm.group_size / ranks
    length = lengths.prompt + lengths.answer
    return answers * length, answers * lengths.answer, answers * attended([length])
