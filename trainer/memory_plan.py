"""What a rank's device has to hold, worked out from a recipe and the model's config.json.

Weights, optimizer state, staging and KV cache are exact under FSDP2, for the rank that has the most, and all but exact
under ZeRO; what forward and backward need is so to a few per cent (`trainer.update_memory`). What CUDA, NCCL and a
sleeping engine keep is an estimate, and the allocator's fragments are not counted.
"""

import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification

from sharding.plan import BucketPlan, Piece, SourceParameter
from sharding.transport import BUFFERS
from trainer.config import PolicyConfig, TrainConfig
from trainer.config_checks import resolve_device
from trainer.generate import kv_elements
from trainer.model_sizes import ModelSizes, compute_width, model_sizes, shard, shards_of
from trainer.update_memory import ZERO_BUCKET, largest_moment

GIB = 2**30
_MASTER, _MOMENTS, _GRADIENT = 4, 8, 4
"""Bytes for each parameter: float32 weights, Adam's two moments, and gradients as they are summed."""

REPROCESSED = (".experts.", ".kv_b_proj.")
"""In the names of weights that engines do not keep as they are loaded: experts are shuffled, MLA keeps products."""

_CONTEXT, _COMMUNICATOR, _GRAPHS = 0.5 * GIB, 0.5 * GIB, 2.5 * GIB
"""Of a process on a CUDA device, of a group of ranks in NCCL, and of an engine's CUDA graphs with their workspaces: by
what is usual, and not measured here."""


Learner = tuple[PolicyConfig, ModelSizes, bool]
"""A model that learns, and whether there are whole weights to compute with between updates."""


@dataclass(frozen=True)
class Part:
    """Memory of one rank's device, in bytes: while answers are generated, and while the policy is updated."""

    name: str
    generating: float
    training: float
    remark: str = ""


def trainer_parts(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> list[Part]:
    """What the policy, and what else learns or is asked beside it, takes on a rank whose device has `device_gib`."""
    policy, algorithm = config.policy, config.algorithm
    parts = _learning_parts("policy", config, policy, model, ranks)
    whole = config.sync.zero_copy or (policy.backend == "deepspeed" and policy.zero_stage < 3)
    learners: list[Learner] = [(policy, model, whole)]
    if algorithm.teacher:
        parts.append(_frozen_part("teacher", config, model_sizes(config, algorithm.teacher), ranks))
    elif algorithm.kl_coef and not config.lora.rank:  # the base of adapters is its own reference
        parts.append(_frozen_part("reference", config, model, ranks))
    if algorithm.advantage == "gae" and not config.critic.shared:
        path = config.critic.path or config.model.path
        critic = model_sizes(config, path, kind=AutoModelForSequenceClassification, num_labels=1)
        policy = policy.model_copy(update={"backend": "fsdp"})
        parts += _learning_parts("critic", config, policy, critic, ranks)
        learners.append((policy, critic, False))
    return [*parts, *_process_parts(config, ranks, learners), *_passing_parts(config, ranks, device_gib, learners)]


def _passing_parts(config: TrainConfig, ranks: int, device_gib: float, learners: list[Learner]) -> list[Part]:
    """What the largest moment of an update needs; policy and critic learn one after the other."""
    moments = [largest_moment(config, policy, model, ranks, device_gib, whole) for policy, model, whole in learners]
    most = max(moments, key=lambda moment: moment.total)
    remark = f"in backward, at its largest: {most.name}"
    parts = [
        Part("gathered weights", 0, most.weights, remark),
        Part("gradients on their way", 0, most.gradients, remark),
        Part("activations", 0, most.activations, remark),
        Part("logits", 0, most.logits, "of a chunk of targets, and the head's gradient"),
    ]
    return [part for part in parts if part.training]


def _process_parts(config: TrainConfig, ranks: int, learners: list[Learner]) -> list[Part]:
    """What CUDA and NCCL keep for the trainer; on a CPU there is neither."""
    if resolve_device(config) == "cpu":
        return []
    hybrid = config.policy.shard_size not in (None, ranks)
    models = len(learners) + bool(config.algorithm.kl_coef or config.algorithm.teacher)
    size = _CONTEXT + (_COMMUNICATOR * models * (2 if hybrid else 1) if ranks > 1 else 0)
    return [Part("CUDA and NCCL", size, size, "by estimate")]


def engine_parts(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> list[Part]:
    """What the engine takes on each of its ranks, and the staging buffers that bring its weights."""
    engine = config.engine
    weights = engine_dtype(config).itemsize * model.total / engine.tensor_parallel_size
    kv_cache, remark = kv_cache_bytes(config, model, weights, device_gib)
    asleep = 0 if engine.sleep else 1
    first, later = (staging_bytes(config, model, ranks, cut) for cut in (False, True))
    staging_remark = "while weights travel" + (f", {first / GIB:.2f} the first time" if first > later else "")
    held = _CONTEXT + (0 if engine.enforce_eager else _GRAPHS) if resolve_device(config) == "cuda" else 0
    return [
        Part("engine: weights", weights, weights if config.sync.zero_copy else asleep * weights),
        Part("engine: KV cache", kv_cache, asleep * kv_cache, remark),
        Part("engine: CUDA and its graphs", held, held, "by estimate; also while it sleeps" if held else ""),
        Part("staging buffers", later, 0, staging_remark),
    ]


def kv_token_bytes(config: TrainConfig, model: ModelSizes) -> int:
    """What a token leaves in the KV cache of each rank of an engine; more ranks than heads: some have the same."""
    heads = model.config.get("num_key_value_heads") or model.config["num_attention_heads"]
    held = math.ceil(heads / config.engine.tensor_parallel_size)
    return kv_elements(model.config) // heads * held * engine_dtype(config).itemsize


def kv_cache_bytes(config: TrainConfig, model: ModelSizes, weights: float, device_gib: float) -> tuple[float, str]:
    """The KV cache of a rank, and what fits into it."""
    engine, token = config.engine, kv_token_bytes(config, model)
    size = max(0.0, engine.gpu_memory_utilization * device_gib * GIB - weights)
    if engine.kv_cache_gib is not None:
        size = engine.kv_cache_gib * GIB
    tokens = int(size // token)
    return size, f"{tokens:,} tokens: {tokens // engine.max_model_len} answers of {engine.max_model_len}"


def staging_bytes(config: TrainConfig, model: ModelSizes, ranks: int, cut: bool) -> int:
    """Both buffers: each as large as the largest bucket of what travels.

    Args:
        cut: weights larger than a bucket travel in parts if they may, as in all updates but the first.
    """
    width, shards = engine_dtype(config).itemsize, shards_of(config.policy, ranks)
    travels = model.adapters if config.lora.engines_apply else model.shapes
    parameters = [
        SourceParameter(name, shards * shard({name: shape}, shards) * width, (Piece(name, "uint8", (), 0),), shards)
        for name, shape in travels.items()
    ]
    packed = resolve_device(config) == "cpu" and not config.engine.plain_cpu_weights
    whole = [name for name in travels if packed or any(part in name for part in REPROCESSED)]
    plan = BucketPlan(parameters, config.sync.bucket_mib << 20, whole if cut and config.sync.replay else None)
    return BUFFERS * plan.capacity


def _learning_parts(name: str, config: TrainConfig, policy: PolicyConfig, model: ModelSizes, ranks: int) -> list[Part]:
    """Of a model that is trained: what it keeps, and what an update needs besides."""
    width, shards = compute_width(policy), shards_of(policy, ranks)
    trained = shard(model.trained, shards)
    deepspeed, stage = policy.backend == "deepspeed", policy.zero_stage
    on_device = 0 if deepspeed and policy.offload_optimizer else trained
    # On a CPU, the host's memory is the device's.
    put_away = ("none", "optimizer", "all").index(policy.offload) if resolve_device(config) == "cuda" else 0
    parts = []
    if deepspeed or model.adapters:
        kept = width * (model.total if deepspeed and stage < 3 else shard(model.shapes, shards))
        parts.append(Part(f"{name}: weights to compute with", 0 if put_away == 2 else kept, kept))
    whole = sum(shape.numel() for shape in model.trained.values())
    stays = 0 if put_away == 2 or (deepspeed and put_away) else 1
    in_place = config.sync.zero_copy and name == "policy"  # it computes with weights that are the engine's
    masters = 0 if in_place and width == _MASTER else _MASTER * on_device
    if deepspeed and stage == 3:  # made once (`IPGBucketZ3` in deepspeed/runtime/zero/stage3.py)
        parts.append(Part(f"{name}: bucket of gradients", _GRADIENT * ZERO_BUCKET, _GRADIENT * ZERO_BUCKET))
    return [
        *parts,
        Part(f"{name}: float32 weights", stays * masters, masters),
        Part(f"{name}: Adam's moments", 0 if put_away else _MOMENTS * on_device, _MOMENTS * on_device),
        # ZeRO-3 makes its buffer once (`grad_partitions_flat_buffer` in the same file).
        Part(
            f"{name}: gradients",
            _GRADIENT * trained if deepspeed and stage == 3 and not put_away else 0,
            _GRADIENT * (whole if deepspeed and stage == 1 else trained),
        ),
    ]


def _frozen_part(name: str, config: TrainConfig, model: ModelSizes, ranks: int) -> Part:
    """Of a model that only scores."""
    held = compute_width(config.policy) * shard(model.shapes, shards_of(config.policy, ranks))
    away = config.policy.offload_reference is not False and resolve_device(config) == "cuda"
    return Part(f"{name}: weights", 0 if away else held, held, "while it scores" if away else "")


def engine_dtype(config: TrainConfig) -> torch.dtype:
    """Of an engine's weights and of its keys and values."""
    dtype: torch.dtype = getattr(torch, config.engine.dtype or config.policy.dtype)
    return dtype
