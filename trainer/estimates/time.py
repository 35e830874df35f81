"""Estimated seconds of a step: a formula for each part, from data sheets and counts.

This is a model, not a measurement; its assumptions are listed below. It does not count tools and
rewards, Python between the phases, ranks that wait for the one with the longest answers, a critic,
evaluations and checkpoints. ZeRO is counted as if it were FSDP2.

Legend: w bytes of an element in the compute dtype, N ranks, S ranks that a model is sharded over.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.config.placement import engine_workers, placement, training_ranks
from trainer.config.schema import PolicyConfig, TrainConfig
from trainer.config.sync_ways import way
from trainer.estimates.gpus import Gpu
from trainer.estimates.kv_cache import engine_dtype, kv_answer_bytes
from trainer.estimates.memory import GIB, attention_elements, recomputed_layers
from trainer.estimates.model_sizes import (
    ModelSizes,
    compute_width,
    computed_prompts,
    optimizer_bytes,
    shard,
    shards_of,
    units_of,
)
from trainer.model_structure import PassSize, attended
from trainer.policy.logprobs import cuda_block_elements

MATMUL = 0.68
"""Share of the peak that large bfloat16 products reach; assumed. Entire steps of Llama 3 reach 0.38
to 0.43 on H100s (Grattafiori et al. 2024, arXiv:2407.21783, table 4).
"""

MEMORY = 0.85
"""Share of the data sheet's rate that kernels reach when they read and write in order; assumed."""

LINKS = 0.75
"""Share of the data sheet's rate that NCCL's gathers of large messages reach; assumed."""

HOST = 50e9
"""Bytes a second between host and device; PCIe 5.0 x16 has 63e9."""

HOP = 3e-6
"""Seconds from one rank of a ring to the next, however small the message is; assumed."""

NODE = 8
"""GPUs of a machine."""

DECODE_OVERHEAD = 1e-3
"""Seconds of an engine's step besides its kernels, with CUDA graphs; assumed."""

SHIFT = 1.0
"""Seconds to sleep and wake, to collect garbage and to grow the allocator's memory again;
estimated.
"""

LAUNCH = 10e-6
"""Seconds of the host's work for one kernel in eager PyTorch, which the device waits for if its
kernels are shorter. Between Python, dispatcher, autograd and driver 5 to 25 microseconds are usual;
assumed.
"""

_LOGIT_BYTES = {False: 82, True: 6.4}
"""Bytes of memory traffic per logit besides products, by whether the head is fused, counted at
temperature 1 without a gradient of the entropy: 46 or 2 in the forward pass of
`trainer.policy.logprobs`, and 36 or 4.4 in its backward pass. If it is not fused, an entropy bonus
adds 32, another temperature 24.
"""

_BLOCK_KERNELS = {False: 52, True: 22}
"""Kernels of both passes for a block of logits, counted, by whether the head is fused."""

_HOST_MEMORY = 100e9
"""Bytes a second that the CPU reads and writes for one rank's optimizer; estimated."""

_STEP_BYTES = 24
"""Bytes of memory traffic per parameter: norm and clipping 12; the optimizer reads the gradient,
and reads and writes the float32 weight. Besides, it reads and writes its state.
"""


@dataclass(frozen=True)
class Lengths:
    """The average numbers of tokens of a prompt and of an answer."""

    prompt: float
    answer: float


@dataclass(frozen=True)
class Cost:
    """The time of one part of a step."""

    name: str
    seconds: float  # seconds that it adds to the step
    hidden: float = 0.0  # seconds that overlap with other parts
    remark: str = ""  # its ingredients


@dataclass(frozen=True)
class Traffic:
    """The collectives of FSDP2 in an update, on each rank."""

    gathers: int = 0  # calls of all-gather
    gathered: int = 0  # bytes of their results
    scatters: int = 0  # calls of reduce-scatter
    scattered: int = 0  # bytes of their inputs
    reductions: int = 0  # all-reduces between replicas
    reduced: int = 0  # bytes of their inputs


def update_traffic(policy: PolicyConfig, model: ModelSizes, ranks: int, micro_batches: int) -> Traffic:
    """Return the calls and bytes of an update in which all weights are trained.

    In each micro-batch every unit is gathered for forward, with w bytes per element, and layers
    once more for backward if `policy.reshard_after_forward`; its gradient is reduced in float32.
    Between replicas, shards are added up once an update. Rows are cut into S equal chunks, so every
    message is padded to S times the first chunk. A single rank sends nothing. The all-to-alls of
    experts in parallel are not among them.
    """
    w = compute_width(policy)
    units = units_of(policy, model, ranks)
    cut = {name: shards * elements for name, (elements, shards) in units.items() if shards > 1}
    again = [name for name in cut if "." in name and policy.reshard_after_forward]
    copied = len(units) if ranks > shards_of(policy, ranks) else 0
    return Traffic(
        gathers=micro_batches * (len(cut) + len(again)),
        gathered=micro_batches * w * (sum(cut.values()) + sum(cut[name] for name in again)),
        scatters=micro_batches * len(cut),
        scattered=micro_batches * 4 * sum(cut.values()),
        reductions=copied,
        reduced=4 * sum(elements for elements, _ in units.values()) if copied else 0,
    )


def step_costs(
    config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths
) -> list[Cost]:
    """Return the times of all parts of a step in which no group is left out.

    Engines on ranks of their own need no sleep; with a lag, rollout and update overlap, and the
    longer one counts.
    """
    training = training_ranks(config, ranks)
    rollout = _rollout(config, model, engine_workers(config, ranks), gpu, lengths)
    apart = placement(config).remote
    sync = _broadcast(config, model, training, ranks, gpu) if apart else _sync(config, model, ranks, gpu)
    update = list(_update(config, model, training, gpu, lengths))
    if config.rollout.lag:
        beside = min(rollout.seconds, sum(cost.seconds for cost in update))
        rollout = replace(rollout, seconds=rollout.seconds - beside, hidden=beside)
    return [rollout, *sync, *update]


def step_flops(config: TrainConfig, model: ModelSizes, ranks: int, lengths: Lengths) -> float:
    """Return the operations of a step's updates on each rank, as MFU counts them, without
    recomputation.
    """
    amount = update_amount(config, ranks, lengths)
    passes = config.algorithm.num_iterations
    return passes * (model.flops.forward(*amount) + model.flops.backward(*amount))


def _rollout(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> Cost:
    """Return the time of a rollout: each group's prompt once (the prefix cache has the rest), then
    an engine step per token.

    It is a roofline (Williams et al. 2009, doi:10.1145/1498765.1498785): an engine step reads all
    weights and the keys and values of all running answers, or computes 2 operations for each
    parameter and answer, whichever takes longer. Lengths are uniform between 0 and twice their
    mean: slots stay filled until no prompt waits, and then empty evenly.
    """
    engine = config.engine
    w = engine_dtype(config).itemsize
    size = config.engine.tensor_parallel_size
    answers = config.batch.prompts_per_step * config.algorithm.group_size * size / ranks
    compute = MATMUL * gpu.flops
    memory = MEMORY * gpu.memory_rate
    flops = model.flops.forward(1, 1, 0) / size
    prompts = answers / config.algorithm.group_size * lengths.prompt
    prefill = prompts * flops / compute
    slots = min(answers, engine.max_num_seqs)

    def engine_step(running: float, context: float) -> float:
        held = w * model.total / size + running * kv_answer_bytes(config, model, context)
        return max(held / memory, running * flops / compute) + DECODE_OVERHEAD

    full = (answers - slots) * lengths.answer / slots
    last = int(2 * lengths.answer)
    tail = sum(engine_step(slots * (1 - at / last), lengths.prompt + at) for at in range(last))
    decode = full * engine_step(slots, lengths.prompt + lengths.answer / 2) + tail
    return Cost(
        "rollout",
        prefill + decode,
        remark=f"prompts {prefill:.1f}, then {full + last:,.0f} engine steps",
    )


def _sent_elements(config: TrainConfig, model: ModelSizes) -> int:
    """Return the elements that a sync sends: those of all weights, or of the adapters alone."""
    sent = model.adapters if config.lora.engines_apply else model.shapes
    return sum(shape.numel() for shape in sent.values())


def _sync(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu) -> Iterator[Cost]:
    """Yield the times of a sync, and of sleeping and waking, with engines on the training devices.

    Weights in the engine's dtype are gathered, written to staging, then read and written by the
    worker. A worker that reads the float32 shards itself (sync.way: pull) makes one copy.
    """
    policy = config.policy
    shards = shards_of(config.policy, ranks)
    elements = _sent_elements(config, model)
    size = engine_dtype(config).itemsize * elements
    if way(config).reads_shards:
        yield Cost(
            "sync", (4 * elements + size) / (MEMORY * gpu.memory_rate), remark=f"{size / 2**30:.1f} GiB"
        )
    elif not way(config).shares_memory:
        gather = _ring(size, shards, gpu, len(model.units))
        yield Cost(
            "sync", gather + 3 * size / (MEMORY * gpu.memory_rate), remark=f"{size / 2**30:.1f} GiB"
        )
    state = optimizer_bytes(policy, model, shards)
    weights = 4 * shard(model.trained, shards)
    moved = {"none": 0, "optimizer": state, "all": state + weights}[policy.offload]
    seconds = 2 * moved / HOST
    yield Cost(
        "sleep and wake",
        SHIFT + seconds,
        remark="by estimate" + (", and policy.offload" if moved else ""),
    )


def _broadcast(
    config: TrainConfig, model: ModelSizes, training: int, ranks: int, gpu: Gpu
) -> Iterator[Cost]:
    """Yield the time of a sync to engines on other devices.

    Weights are gathered among the ranks that train, sent through a chain of all engines, then read
    and written by the worker.
    """
    size = engine_dtype(config).itemsize * _sent_elements(config, model)
    rate = gpu.link_rate if ranks <= NODE else gpu.network_rate
    gather = _ring(size, shards_of(config.policy, training), gpu, len(model.units))
    seconds = gather + size / (LINKS * rate) + 2 * size / (MEMORY * gpu.memory_rate)
    yield Cost("sync", seconds, remark=f"{size / 2**30:.1f} GiB, by broadcast")


def _update(
    config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths
) -> Iterator[Cost]:
    """Yield the times of forward and backward over all micro-batches, of gathers and reductions,
    and of optimizer steps.
    """
    policy = config.policy
    algorithm = config.algorithm
    shards = shards_of(config.policy, ranks)
    size = update_amount(config, ranks, lengths)
    tokens, targets, *_ = size
    # Tokens that mixers of a hybrid repeat count for the mixers' share of the products
    counted_tokens = tokens + model.flops.recurrent_share * size.repeated
    passes = algorithm.num_iterations
    compute = MATMUL * gpu.flops
    memory = MEMORY * gpu.memory_rate
    recomputed = recomputed_layers(policy, model) / model.layers
    share = 0 if policy.activation_checkpointing == "products" else recomputed  # of the products
    trunk = model.flops.forward(*size._replace(targets=0))
    again = share * trunk + model.flops.forward(0, targets, 0)  # logits are recomputed, too
    products = (step_flops(config, model, ranks, lengths) + passes * again) / compute
    counted = model.kernels.forward.times(1 + recomputed) + model.kernels.backward
    logits = model.config["vocab_size"] * targets
    fused = policy.backend == "fsdp" and policy.compile is not False
    elementwise = passes * (counted.token_bytes * counted_tokens + _LOGIT_BYTES[fused] * logits) / memory
    yield Cost(
        "update: products",
        products,
        remark=f"{tokens:,.0f} tokens a rank; computed again: {share:.0%}",
    )
    yield Cost("update: elementwise", elementwise, remark="norms, activations, logits: memory traffic")
    updates = config.batch.updates_per_step
    shared = counted_tokens * policy.sequence_parallel
    micro_batches = passes * updates * math.ceil(shared / updates / config.batch.tokens_per_micro_batch)
    blocks = passes * logits / cuda_block_elements(int(gpu.memory_gib * GIB))
    launches = counted.kernels - (recomputed - share) * model.kernels.forward.products
    kernels = micro_batches * launches + blocks * _BLOCK_KERNELS[fused]
    waited = max(0.0, kernels * LAUNCH - products - elementwise)
    yield Cost(
        "update: launches",
        waited,
        kernels * LAUNCH - waited,
        f"{kernels:,.0f} kernels, started by the host",
    )
    busy = products + elementwise + waited
    if policy.offload_activations:
        # To the host in forward and back in backward, on the stream that computes
        width = compute_width(policy) * model.config["hidden_size"]
        size = recomputed_layers(policy, model) * tokens * width
        yield Cost("update: activations", passes * 2 * size / HOST, remark="inputs of recomputed layers")
    if policy.sequence_parallel > 1:
        yield _exchanges(policy, model, gpu, passes * tokens, micro_batches)
    if policy.expert_parallel > 1:
        yield _dispatches(policy, model, gpu, passes * tokens, micro_batches)
    yield from _gathers(
        policy, model, ranks, gpu, micro_batches=micro_batches, updates=updates * passes, busy=busy
    )
    trained = shard(model.trained, shards)
    on_host = policy.update_on == "host"
    moved = _STEP_BYTES * trained + 2 * optimizer_bytes(policy, model, shards)
    seconds = (
        moved / (_HOST_MEMORY if on_host else memory)
        + newton_schulz_flops(policy, model) / shards / compute
    )
    yield Cost("update: optimizer", passes * updates * seconds)
    if on_host:
        yield _host_copies(
            config, trained, micro_batches=micro_batches, updates=passes * updates, busy=busy
        )
    reference = algorithm.teacher is None and algorithm.kl_coef > 0
    scores = int(reference or algorithm.teacher is not None) + int(updates * passes > 1)
    if scores:
        yield Cost(
            "scores",
            scores * model.flops.forward(*size) / compute,
            remark="forward alone",
        )


def newton_schulz_flops(policy: PolicyConfig, model: ModelSizes) -> float:
    """Return operations of Muon's iterations on all matrices, of three products each, two of which
    have the longer side.
    """
    if policy.optimizer != "muon":
        return 0.0
    sides = [sorted(shape) for name, shape in model.trained.items() if name in model.matrices]
    iterations = policy.optimizer_options.get("ns_steps", 5)
    return float(sum(iterations * 2 * small**2 * (2 * large + small) for small, large in sides))


def _host_copies(
    config: TrainConfig, trained: float, micro_batches: int, updates: int, busy: float
) -> Cost:
    """Return the time of copies to and from the host while a rank's `trained` parameters are
    updated there.

    FSDP2 copies float32 weights in forward and in backward, and gradients back, in every
    micro-batch, beside the work on other layers. A policy that computes with the engine's weights,
    and ZeRO, copy gradients, and weights once an update, in the compute dtype.
    """
    policy = config.policy
    width = compute_width(config.policy)
    if policy.backend == "deepspeed" or way(config).shares_memory:
        return Cost("update: host copies", (micro_batches + updates) * width * trained / HOST)
    seconds = 12 * micro_batches * trained / HOST
    waited = max(0.0, seconds - busy)
    return Cost(
        "update: host copies",
        waited,
        seconds - waited,
        f"weights and gradients of {micro_batches} micro-batches",
    )


def _gathers(
    policy: PolicyConfig,
    model: ModelSizes,
    ranks: int,
    gpu: Gpu,
    micro_batches: int,
    updates: int,
    busy: float,
) -> Iterator[Cost]:
    """Yield the times of gathers and reductions, which overlap with the work on another layer; only
    the excess counts.

    The gather of the embeddings, before forward can begin, and their reduction, at the end of
    backward, do not overlap.
    """
    shards = shards_of(policy, ranks)
    w = compute_width(policy)
    if ranks == 1:
        return
    one = update_traffic(policy, model, ranks, 1)
    ends = model.rest if model.tied else model.rest - model.head
    last = 4 * ends
    if model.adapters:  # the embeddings have none
        learned = 4 * sum(shape.numel() for shape in model.adapters.values())
        last = 0
        one = replace(
            one,
            scatters=model.layers,
            scattered=learned,
            reduced=learned // shards if one.reduced else 0,
        )
    # Copies into the buffers of collectives and out of them, in which gradients become float32.
    copied = (
        micro_batches * (2 * one.gathered + (1 + w / 4) * one.scattered) / (MEMORY * gpu.memory_rate)
    )
    yield Cost("update: copies", copied, remark="gathered weights and gradients, on the device")
    gather = _ring(one.gathered, shards, gpu, one.gathers)
    scatter = _ring(one.scattered, shards, gpu, one.scatters)
    exposed = micro_batches * (_ring(w * ends, shards, gpu, 1) + _ring(last, shards, gpu, 1))
    beside = micro_batches * (gather + scatter) - exposed
    waited = max(0.0, beside - busy)
    remark = f"{one.gathered / 2**30:.1f} GiB gathered in each of {micro_batches} micro-batches"
    yield Cost("update: gathers", exposed + waited, beside - waited, remark)
    if ranks > shards:
        seconds = updates * 2 * one.reduced / (LINKS * gpu.network_rate)
        yield Cost("update: between replicas", seconds, remark="gradients, once an update")


def _exchanges(
    policy: PolicyConfig, model: ModelSizes, gpu: Gpu, tokens: float, micro_batches: int
) -> Cost:
    """Return the time of the all-to-alls between ranks that share sequences, `tokens` on each;
    nothing overlaps with them.

    A layer has two in forward, two in backward, and two more if it is recomputed. A rank keeps its
    own part.
    """
    ways = policy.sequence_parallel
    (queries, keys_values) = attention_elements(policy, model)
    passes = 2 * model.layers + recomputed_layers(policy, model)
    size = passes * tokens * compute_width(policy) * (2 * queries + keys_values) * (ways - 1) / ways
    return _all_to_all("update: exchanges", size, 2 * passes * micro_batches, ways, gpu)


def _dispatches(
    policy: PolicyConfig, model: ModelSizes, gpu: Gpu, tokens: float, micro_batches: int
) -> Cost:
    """Return the time of the all-to-alls that bring a rank's `tokens` to experts and back; nothing
    overlaps with them.

    A layer has two in forward, two in backward, and two more if it is recomputed; each has a row of
    hidden size for every expert of a token. Routes are taken to be even.
    """
    size = policy.expert_parallel
    recomputed = recomputed_layers(policy, model) / model.layers
    passes = (2 + recomputed) * len(model.experts)
    sent = 2 * passes * tokens * model.dispatched * compute_width(policy) * (size - 1) / size
    return _all_to_all("update: tokens to experts", sent, 2 * passes * micro_batches, size, gpu)


def _all_to_all(name: str, size: float, calls: float, ways: int, gpu: Gpu) -> Cost:
    """Return the time of `calls` exchanges among `ways` ranks, in which each sends `size` bytes to
    the others in all.
    """
    rate = gpu.link_rate if ways <= NODE else gpu.network_rate
    remark = f"{size / 2**30:.1f} GiB traded by each of {ways} ranks"
    return Cost(name, size / (LINKS * rate) + calls * HOP, remark=remark)


def _ring(size: float, ranks: int, gpu: Gpu, calls: int) -> float:
    """Return seconds to gather or reduce `size` bytes in a ring, where each rank passes on
    everything except its own part.

    Between machines every GPU's network card carries a ring, so a machine's rate is the sum over
    its cards, at most the rate of its internal links
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    if ranks == 1:
        return 0.0
    rate = gpu.link_rate if ranks <= NODE else min(gpu.link_rate, NODE * gpu.network_rate)
    return size * (ranks - 1) / ranks / (LINKS * rate) + calls * HOP * (ranks - 1)


def update_amount(config: TrainConfig, ranks: int, lengths: Lengths) -> PassSize:
    """Return the average size of a step's updates on each rank, without images."""
    answers = config.batch.prompts_per_step * config.algorithm.group_size / ranks
    prompts = computed_prompts(config, answers, lengths.prompt)
    targets = answers * lengths.answer
    again = answers - prompts
    pairs = answers * attended([lengths.prompt + lengths.answer]) - again * attended([lengths.prompt])
    tokens = prompts * lengths.prompt + targets
    return PassSize(tokens, targets, pairs, repeated=again * lengths.prompt)
