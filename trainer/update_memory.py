"""What an update needs on a rank's device for a while, beside what it keeps: the largest of a few moments of backward.

Compared with `torch.distributed._tools.FSDPMemTracker`, which follows the same update on tensors without data.
"""

from dataclasses import dataclass

from trainer.config import PolicyConfig, TrainConfig
from trainer.config_checks import resolve_device
from trainer.generate import kv_elements
from trainer.logprobs import CPU_ELEMENTS, MIN_CHUNK, cuda_chunk_elements
from trainer.model_sizes import ModelSizes, answers_per_update, compute_width, longest, shards_of

_FLOAT32 = 4  # bytes

ZERO_LIVE, ZERO_BUCKET = 10**9, 5 * 10**8
"""DeepSpeed's defaults, in elements (deepspeed/runtime/zero/config.py): weights that ZeRO-3 gathers ahead or keeps, and
the size of each buffer in which gradients are collected."""


@dataclass(frozen=True)
class Moment:
    """A moment of backward, in bytes.

    Attributes:
        weights: gathered ones, and gathers under way.
        gradients: whole ones, and what reductions were given.
        activations: kept for backward, computed again, and their gradients.
        logits: of a chunk of targets, and the head's gradient as it is summed.
    """

    name: str
    weights: float
    gradients: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.activations + self.logits


def largest_moment(
    config: TrainConfig, policy: PolicyConfig, model: ModelSizes, ranks: int, device_gib: float, whole: bool
) -> Moment:
    """The moment of an update that needs the most. With w bytes an element in the compute dtype these are looked at:

    - the output head's backward: its gradient is summed in float32 beside three tables of a chunk's logits, two of
      float32 and one of w bytes (`trainer.logprobs`), or is cast at the end; the last layer is being gathered;
    - the last layer's: what it computed is there once more, with gradients of its MLP, while reductions have the head's
      or a layer's gradients in float32, and the next layer is gathered;
    - the embeddings' at the end: their gradient, and its float32 copy for the reduction.

    A single rank gathers nothing ahead, but casts and copies like several
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).

    Args:
        whole: there are whole weights to compute with already, and no gathers.
    """
    w, trains = compute_width(policy), not model.adapters
    tokens = micro_batch_tokens(config, ranks)
    kept, last_norm, working = (tokens * each for each in _activation_bytes(config, policy, model))
    embedding = model.rest if model.tied else model.rest - model.head  # the unit that stays until the end
    ahead = w * model.layer if shards_of(policy, ranks) > 1 else 0
    before, within = w * model.rest + ahead, w * (embedding + model.layer) + ahead
    if whole or not policy.reshard_after_forward:
        before = within = 0 if whole else w * model.total
    elif policy.backend == "deepspeed":
        before = within = w * min(model.total, max(ZERO_LIVE, model.rest + model.layer))
    tables = (2 * _FLOAT32 + w) * _chunk(config, model, device_gib)
    head = _FLOAT32 * model.head + max(tables, w * model.head) if trains else tables
    reduced: float = _FLOAT32 * max(model.layer, 0 if model.tied else model.head) + (
        w * model.head if model.tied else 0
    )
    last: float = (w + _FLOAT32) * embedding
    buckets = _zero_buckets(policy, w)
    if not trains:
        reduced = last = 0
    elif policy.backend == "deepspeed":  # float32 copies are in its buckets
        reduced, last = buckets + w * max(model.layer, model.head), buckets + w * embedding
    return max(
        Moment("output head", before, buckets, kept + last_norm, head if model.head else 0),
        Moment("last layer", within, reduced, kept + working, 0),
        Moment("embeddings", min(within, w * embedding), last, 0, 0),
        key=lambda moment: moment.total,
    )


def micro_batch_tokens(config: TrainConfig, ranks: int) -> int:
    """Of the largest micro-batch."""
    share = answers_per_update(config, ranks)
    return min(max(config.batch.tokens_per_micro_batch, longest(config)), share * longest(config))


def layer_bytes(policy: PolicyConfig, model: ModelSizes) -> float:
    """What a layer with a gated MLP keeps of a token for backward, uncompiled, with w bytes an element.

    A norm keeps its input in float32, what it makes of that, and its result; attention queries, keys, values, result
    and a float32 logarithm for each head; the MLP four tensors of its width. As Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.1, count for another kind of layer.
    """
    w, heads = compute_width(policy), model.config["num_attention_heads"]
    queries = heads * (model.config.get("head_dim") or model.config["hidden_size"] // heads)
    attention = w * (2 * queries + kv_elements(model.config) / model.layers) + _FLOAT32 * heads
    return (_FLOAT32 + 2 * w) * model.normed + attention + 4 * w * model.width


def recomputed_layers(policy: PolicyConfig, model: ModelSizes) -> int:
    """Layers that keep their input alone."""
    return {"none": 0, "every_second": (model.layers + 1) // 2, "full": model.layers}[policy.activation_checkpointing]


def _activation_bytes(config: TrainConfig, policy: PolicyConfig, model: ModelSizes) -> tuple[float, float, float]:
    """For each token: what layers keep for backward, what the head's part does, and what a layer at work needs then.

    That is `layer_bytes` again where it is computed again, and gradients of its MLP: two of its width, two of the
    hidden size. The head's part is the last norm and hidden states of targets, of which there are at most as many as
    sampled tokens.
    """
    w, hidden, layer = compute_width(policy), model.config["hidden_size"], layer_bytes(policy, model)
    again = recomputed_layers(policy, model)
    kept = again * w * hidden + (model.layers - again) * layer
    last_again = policy.activation_checkpointing == "full" or again > model.layers - again  # of two, the first is
    working = (layer if last_again else 0) + w * (2 * model.width + 2 * hidden)
    targets = w * hidden * config.sampling.max_tokens / longest(config)
    return kept, (_FLOAT32 + w) * hidden + targets, working


def _chunk(config: TrainConfig, model: ModelSizes, device_gib: float) -> int:
    """Logits that are computed at a time."""
    most = cuda_chunk_elements(int(device_gib * 2**30)) if resolve_device(config) == "cuda" else CPU_ELEMENTS
    return max(most, MIN_CHUNK * model.config["vocab_size"])


def _zero_buckets(policy: PolicyConfig, w: int) -> float:
    """Of gradients under ZeRO-1 and 2, by turns (`setup_buckets` in deepspeed/runtime/zero/stage_1_and_2.py)."""
    return 2 * w * ZERO_BUCKET if policy.backend == "deepspeed" and policy.zero_stage < 3 else 0
