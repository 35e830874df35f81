"""What a rank's device has to hold, worked out from a recipe and the model's config.json.

Weights, optimizer state, staging and KV cache are exact under FSDP2, for the rank that has the most, and all but exact
under ZeRO; what forward and backward need is an estimate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from sharding.plan import BucketPlan, Piece, SourceParameter
from sharding.transport import BUFFERS
from trainer.config import LoraConfig, PolicyConfig, TrainConfig
from trainer.config_checks import resolve_device
from trainer.generate import kv_elements
from trainer.logprobs import CPU_ELEMENTS, MIN_CHUNK, cuda_chunk_elements
from trainer.policy.checkpoint_names import parameter_names
from trainer.policy.loading import build_meta_model
from trainer.policy.lora import NO_ADAPTERS, add_adapters, factors

GIB = 2**30
_MASTER, _MOMENTS, _GRADIENT = 4, 8, 4
"""Bytes for each parameter: float32 weights, Adam's two moments, and gradients as they are summed."""

REPROCESSED = (".experts.", ".kv_b_proj.")
"""In the names of weights that engines do not keep as they are loaded: experts are shuffled, MLA keeps products."""

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Part:
    """Memory of one rank's device, in bytes: while answers are generated, and while the policy is updated."""

    name: str
    generating: float
    training: float
    remark: str = ""


@dataclass(frozen=True)
class ModelSizes:
    """Elements of a model's parameters.

    Attributes:
        config: config.json with the model's own defaults filled in.
        shapes: of each parameter, tied ones once.
        layer, rest: elements of the largest decoder layer, and of all that is in none.
        adapters: shapes of the factors beside the weights; without any, the weights themselves are trained.
    """

    config: dict[str, Any]
    shapes: Shapes
    layer: int
    rest: int
    adapters: Shapes = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())


def model_sizes(
    config: TrainConfig, path: str, lora: LoraConfig = NO_ADAPTERS, kind: Any = AutoModelForCausalLM, **settings: int
) -> ModelSizes:
    """Sizes of the model whose config.json is at `path`, built without data; arguments as `build_meta_model`'s."""
    attention, remote, device = config.model.attn_implementation, config.model.trust_remote_code, torch.device("cpu")
    model = build_meta_model(Path(path), torch.float32, attention, remote, device, kind, **settings)
    shapes = {name: parameter.shape for name, parameter in parameter_names(model).items()}
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.base_model.layers]
    if lora.rank:
        add_adapters(model, lora, torch.float32, "meta")
    return ModelSizes(
        config=model.config.get_text_config().to_dict(),
        shapes=shapes,
        layer=max(layers),
        rest=sum(shape.numel() for shape in shapes.values()) - sum(layers),
        adapters={name: factor.shape for name, factor in factors(model).items()},
    )


def shard(shapes: Shapes, ranks: int) -> int:
    """Elements of the first rank's shards: rows are cut in equal chunks, of which only the last are smaller."""
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes.values())


def trainer_parts(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> list[Part]:
    """What the policy, and what else learns or is asked beside it, takes on a rank whose device has `device_gib`."""
    policy, algorithm = config.policy, config.algorithm
    parts = _learning_parts("policy", config, policy, model, ranks)
    if algorithm.teacher:
        parts.append(_frozen_part("teacher", config, model_sizes(config, algorithm.teacher), ranks))
    elif algorithm.kl_coef and not config.lora.rank:  # the base of adapters is its own reference
        parts.append(_frozen_part("reference", config, model, ranks))
    if algorithm.advantage == "gae" and not config.critic.shared:
        path = config.critic.path or config.model.path
        critic = model_sizes(config, path, kind=AutoModelForSequenceClassification, num_labels=1)
        parts += _learning_parts("critic", config, policy.model_copy(update={"backend": "fsdp"}), critic, ranks)
    activations = _activation_bytes(config, model, ranks, device_gib)
    return [*parts, Part("activations", 0, activations, "roughly; logits included")]


def engine_parts(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> list[Part]:
    """What the engine takes on each of its ranks, and the staging buffers that bring its weights."""
    engine = config.engine
    weights = _engine_dtype(config).itemsize * model.total / engine.tensor_parallel_size
    kv_cache, remark = kv_cache_bytes(config, model, weights, device_gib)
    asleep = 0 if engine.sleep else 1
    first, later = (staging_bytes(config, model, ranks, cut) for cut in (False, True))
    staging_remark = "while weights travel" + (f", {first / GIB:.2f} the first time" if first > later else "")
    return [
        Part("engine: weights", weights, weights if config.sync.zero_copy else asleep * weights),
        Part("engine: KV cache", kv_cache, asleep * kv_cache, remark),
        Part("staging buffers", later, 0, staging_remark),
    ]


def kv_token_bytes(config: TrainConfig, model: ModelSizes) -> int:
    """What a token leaves in the KV cache of each rank of an engine; more ranks than heads: some have the same."""
    heads = model.config.get("num_key_value_heads") or model.config["num_attention_heads"]
    held = math.ceil(heads / config.engine.tensor_parallel_size)
    return kv_elements(model.config) // heads * held * _engine_dtype(config).itemsize


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
    width, shards = _engine_dtype(config).itemsize, _shards(config.policy, ranks)
    travels = model.adapters if config.lora.engines_apply else model.shapes
    parameters = [
        SourceParameter(name, shards * shard({name: shape}, shards) * width, (Piece(name, "uint8", (), 0),), shards)
        for name, shape in travels.items()
    ]
    packed = resolve_device(config) == "cpu" and not config.engine.plain_cpu_weights
    whole = [name for name in travels if packed or any(part in name for part in REPROCESSED)]
    plan = BucketPlan(parameters, config.sync.bucket_mib << 20, whole if cut and config.sync.replay else None)
    return BUFFERS * plan.capacity


def longest(config: TrainConfig) -> int:
    """Tokens of a prompt with its answer."""
    return config.data.max_prompt_tokens + config.sampling.max_tokens


def answers_per_update(config: TrainConfig, ranks: int) -> int:
    """Of the largest update and the rank that has the most."""
    prompts = math.ceil(config.batch.prompts_per_step / config.batch.updates_per_step)
    return math.ceil(prompts * config.algorithm.group_size / ranks)


def _learning_parts(name: str, config: TrainConfig, policy: PolicyConfig, model: ModelSizes, ranks: int) -> list[Part]:
    """Of a model that is trained: what it keeps, and what an update needs besides."""
    width, shards = _width(policy), _shards(policy, ranks)
    trained = shard(model.adapters or model.shapes, shards)
    deepspeed, stage = policy.backend == "deepspeed", policy.zero_stage
    on_device = 0 if deepspeed and policy.offload_optimizer else trained
    # On a CPU, the host's memory is the device's.
    put_away = ("none", "optimizer", "all").index(policy.offload) if resolve_device(config) == "cuda" else 0
    parts = []
    if deepspeed or model.adapters:
        kept = width * (model.total if deepspeed and stage < 3 else shard(model.shapes, shards))
        parts.append(Part(f"{name}: weights to compute with", 0 if put_away == 2 else kept, kept))
    whole = sum(shape.numel() for shape in (model.adapters or model.shapes).values())
    stays = 0 if put_away == 2 or (deepspeed and put_away) else 1
    in_place = config.sync.zero_copy and name == "policy"  # it computes with weights that are the engine's
    whole_already = in_place or (deepspeed and stage < 3)
    masters = 0 if in_place and width == _MASTER else _MASTER * on_device
    return [
        *parts,
        Part(f"{name}: float32 weights", stays * masters, masters),
        Part(f"{name}: Adam's moments", 0 if put_away else _MOMENTS * on_device, _MOMENTS * on_device),
        # ZeRO-3 makes its buffer once (`grad_partitions_flat_buffer` in deepspeed/runtime/zero/stage3.py).
        Part(
            f"{name}: gradients",
            _GRADIENT * trained if deepspeed and stage == 3 and not put_away else 0,
            _GRADIENT * (whole if deepspeed and stage == 1 else trained),
        ),
        Part(f"{name}: gathered weights", 0, 0 if whole_already else width * _gathered(policy, model)),
    ]


def _gathered(policy: PolicyConfig, model: ModelSizes) -> int:
    """Elements that are whole at a time, gradients included.

    What is in no layer stays until backward is over; of the layers, the one at work and the next, and one's gradients.
    """
    weights = model.rest + 2 * model.layer if policy.reshard_after_forward else model.total
    return weights + (0 if model.adapters else model.rest + model.layer)


def _frozen_part(name: str, config: TrainConfig, model: ModelSizes, ranks: int) -> Part:
    """Of a model that only scores."""
    held = _width(config.policy) * shard(model.shapes, _shards(config.policy, ranks))
    away = config.policy.offload_reference is not False and resolve_device(config) == "cuda"
    return Part(f"{name}: weights", 0 if away else held, held, "while it scores" if away else "")


def _activation_bytes(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> float:
    """What the largest micro-batch leaves for backward.

    A layer with a gated MLP keeps its input and six more tensors of the hidden size (both normed inputs, queries, the
    attention's result and output, the sum after it), keys and values, and four of the MLP's width; with checkpointing
    only its input, and the others for one layer at a time. As Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1,
    count for another kind of layer.
    """
    layers, hidden = model.config["num_hidden_layers"], model.config["hidden_size"]
    layer = 7 * hidden + kv_elements(model.config) / layers + 4 * (model.config.get("intermediate_size") or 0)
    again = {"none": 0, "every_second": math.ceil(layers / 2), "full": layers}[config.policy.activation_checkpointing]
    kept = again * hidden + (layers - again) * layer + (layer if again else 0)
    share = answers_per_update(config, ranks)
    tokens = min(max(config.batch.tokens_per_micro_batch, longest(config)), share * longest(config))
    chunk = cuda_chunk_elements(int(device_gib * GIB)) if resolve_device(config) == "cuda" else CPU_ELEMENTS
    logits = max(chunk, MIN_CHUNK * model.config["vocab_size"])
    return tokens * kept * _width(config.policy) + 3 * 4 * logits


def _shards(policy: PolicyConfig, ranks: int) -> int:
    """How many ranks a model is cut over."""
    return min(policy.shard_size or ranks, ranks)


def _width(policy: PolicyConfig) -> int:
    dtype: torch.dtype = getattr(torch, policy.dtype)
    return dtype.itemsize


def _engine_dtype(config: TrainConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.engine.dtype or config.policy.dtype)
    return dtype
