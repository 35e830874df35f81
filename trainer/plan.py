"""`hotbunk plan`: what a recipe would do with a machine, worked out from config.json before anything is loaded.

Weights, optimizer state, staging and KV cache are exact under FSDP2, for the rank that has the most, and all but exact
under ZeRO; what forward and backward need is an estimate.
"""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from sharding.plan import BucketPlan, SourceParameter
from sharding.transport import BUFFERS
from trainer.config import PolicyConfig, TrainConfig, load_config
from trainer.config_checks import find_problems, gpu_visible, resolve_device
from trainer.errors import UserError
from trainer.generate import kv_elements
from trainer.logprobs import CHUNK_ELEMENTS, MIN_CHUNK
from trainer.memory import device_total_gib
from trainer.policy.checkpoint_names import parameter_names
from trainer.policy.loading import build_meta_model
from trainer.progress import make_console

_GIB = 2**30
_MASTER, _MOMENTS, _GRADIENT = 4, 8, 4
"""Bytes for each parameter: float32 weights, Adam's two moments, and gradients as they are summed."""


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
    """

    config: dict[str, Any]
    shapes: dict[str, torch.Size]
    layer: int
    rest: int

    @property
    def total(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def shard(self, ranks: int) -> int:
        """Elements of the first rank's shards."""
        return sum(shard_elements(shape, ranks) for shape in self.shapes.values())


def shard_elements(shape: torch.Size, ranks: int) -> int:
    """The first rank's: rows are cut in equal chunks, of which only the last are smaller."""
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:])


def main(arguments: argparse.Namespace) -> int:
    """Show the plan, then raise UserError with what stands against it, if anything does."""
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise UserError("--ranks must be at least 1")
    config = load_config(arguments.recipe, arguments.overrides)
    problems = find_problems(config, "train", os.environ | {"WORLD_SIZE": str(ranks)})
    if any(problem.startswith("model.path") for problem in problems):
        raise UserError("\n".join(problems))  # nothing can be worked out without the model's sizes
    total = arguments.device_gib or device_total_gib(resolve_device(config) == "cuda" and gpu_visible())
    console = make_console()
    console.print(batch_table(config, ranks))
    console.print(memory_table(config, ranks, total))
    if problems:
        raise UserError("\n".join(problems))
    return 0


def model_sizes(config: TrainConfig, path: str, head: type = AutoModelForCausalLM, **settings: int) -> ModelSizes:
    """Sizes of the model whose config.json is at `path`, built without data."""
    model = build_meta_model(
        Path(path), torch.float32, config.model.attn_implementation, config.model.trust_remote_code,
        torch.device("cpu"), head, **settings,
    )  # fmt: skip
    shapes = {name: parameter.shape for name, parameter in parameter_names(model).items()}
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.base_model.layers]
    rest = sum(shape.numel() for shape in shapes.values()) - sum(layers)
    return ModelSizes(model.config.get_text_config().to_dict(), shapes, max(layers), rest)


def batch_lines(config: TrainConfig, ranks: int) -> Iterator[tuple[str, str]]:
    """The arithmetic of a step."""
    batch, algorithm, engines = config.batch, config.algorithm, ranks // config.engine.tensor_parallel_size
    answers = batch.prompts_per_step * algorithm.group_size
    longest, share = _longest(config), _answers_per_update(config, ranks)
    updates = batch.updates_per_step * algorithm.num_iterations
    largest = math.ceil(share / max(1, batch.tokens_per_micro_batch // longest))
    yield "ranks", f"{ranks}, on {resolve_device(config)}"
    yield "engines", f"{engines} of {config.engine.tensor_parallel_size} rank(s)"
    yield "answers a step", f"{batch.prompts_per_step} prompts x {algorithm.group_size} = {answers}"
    yield "answers an engine", f"{math.ceil(answers / max(engines, 1))}, {config.engine.max_num_seqs} at a time"
    yield "tokens a step", f"at most {answers * longest:,}, prompts included"
    yield "updates", f"{updates} a step, {updates * config.run.steps} in {config.run.steps} steps"
    yield "answers an update and rank", f"{share}, in at most {largest} micro-batch(es)"


def trainer_parts(config: TrainConfig, model: ModelSizes, ranks: int) -> list[Part]:
    """What the policy, and what else learns or is asked beside it, takes on a rank."""
    policy, teacher = config.policy, config.algorithm.teacher
    parts = _learning_parts("policy", policy, model, ranks)
    if config.algorithm.kl_coef or teacher:
        frozen = model_sizes(config, teacher) if teacher else model
        held = getattr(torch, policy.dtype).itemsize * frozen.shard(_shards(policy, ranks))
        parts.append(Part("teacher: weights" if teacher else "reference: weights", held, held))
    if config.algorithm.advantage == "gae" and not config.critic.shared:
        critic = model_sizes(
            config, config.critic.path or config.model.path, AutoModelForSequenceClassification, num_labels=1
        )
        parts += _learning_parts("critic", policy.model_copy(update={"backend": "fsdp"}), critic, ranks)
    return [*parts, Part("activations", 0, _activation_bytes(config, model, ranks), "roughly; logits included")]


def _shards(policy: PolicyConfig, ranks: int) -> int:
    return min(policy.shard_size or ranks, ranks)


def _learning_parts(name: str, policy: PolicyConfig, model: ModelSizes, ranks: int) -> list[Part]:
    """Of a model that is trained: what it keeps, and what an update needs besides."""
    width = getattr(torch, policy.dtype).itemsize
    shard = model.shard(_shards(policy, ranks))
    masters, moments, gradients = _MASTER * shard, _MOMENTS * shard, _GRADIENT * shard
    # The rest stays gathered until backward is over; of the layers, the one at work and the next, and one's gradients.
    gathered = width * (2 * model.rest + 3 * model.layer if policy.reshard_after_forward else 2 * model.total)
    parts = []
    if policy.backend == "deepspeed":
        stage, on_device = policy.zero_stage, not policy.offload_optimizer
        kept = width * (shard if stage == 3 else model.total)
        parts.append(Part(f"{name}: weights to compute with", kept, kept, f"ZeRO-{stage}"))
        masters, moments = masters * on_device, moments * on_device
        gradients = _GRADIENT * (model.total if stage == 1 else shard)
        gathered = gathered if stage == 3 else 0
    parts.append(Part(f"{name}: float32 weights", masters, masters))
    parts.append(Part(f"{name}: Adam's moments", moments, moments))
    parts.append(Part(f"{name}: gradients", 0, gradients))
    return [*parts, Part(f"{name}: gathered weights", 0, gathered, "and their gradients")]


def _activation_bytes(config: TrainConfig, model: ModelSizes, ranks: int) -> float:
    """What the largest micro-batch leaves for backward.

    A layer with a gated MLP keeps its input and six more tensors of the hidden size (both normed inputs, queries, the
    attention's result and output, the sum after it), keys and values, and four of the MLP's width; with checkpointing
    only its input, and the others for one layer at a time. As Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1,
    count for another kind of layer.
    """
    layers, hidden = model.config["num_hidden_layers"], model.config["hidden_size"]
    layer = 7 * hidden + kv_elements(model.config) / layers + 4 * (model.config.get("intermediate_size") or 0)
    kept = layers * hidden + layer if config.policy.activation_checkpointing else layers * layer
    share, longest = _answers_per_update(config, ranks), _longest(config)
    tokens = min(max(config.batch.tokens_per_micro_batch, longest), share * longest)
    logits = max(CHUNK_ELEMENTS[resolve_device(config)], MIN_CHUNK * model.config["vocab_size"])
    return tokens * kept * getattr(torch, config.policy.dtype).itemsize + 3 * 4 * logits


def _longest(config: TrainConfig) -> int:
    """Tokens of a prompt with its answer."""
    return config.data.max_prompt_tokens + config.sampling.max_tokens


def _answers_per_update(config: TrainConfig, ranks: int) -> int:
    """Of the rank that has the most."""
    return math.ceil(
        config.batch.prompts_per_step * config.algorithm.group_size / config.batch.updates_per_step / ranks
    )


def engine_parts(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> list[Part]:
    """What the engine takes on each of its ranks, and the staging buffers that bring its weights."""
    engine = config.engine
    weights = _engine_dtype(config).itemsize * model.total / engine.tensor_parallel_size
    kv_cache, remark = kv_cache_bytes(config, model, weights, device_gib)
    asleep = 0 if engine.sleep else 1
    return [
        Part("engine: weights", weights, asleep * weights),
        Part("engine: KV cache", kv_cache, asleep * kv_cache, remark),
        Part("staging buffers", staging_bytes(config, model, ranks), 0, "while weights travel"),
    ]


def kv_token_bytes(config: TrainConfig, model: ModelSizes) -> int:
    """What a token leaves in the KV cache of each rank of an engine; more ranks than heads: some have the same."""
    heads = model.config.get("num_key_value_heads") or model.config["num_attention_heads"]
    held = math.ceil(heads / config.engine.tensor_parallel_size)
    return kv_elements(model.config) // heads * held * _engine_dtype(config).itemsize


def kv_cache_bytes(config: TrainConfig, model: ModelSizes, weights: float, device_gib: float) -> tuple[float, str]:
    """The KV cache of a rank, and what fits into it."""
    engine, token = config.engine, kv_token_bytes(config, model)
    size = max(0.0, engine.gpu_memory_utilization * device_gib * _GIB - weights)
    if engine.kv_cache_gib is not None:
        size = engine.kv_cache_gib * _GIB
    tokens = int(size // token)
    return size, f"{tokens:,} tokens: {tokens // engine.max_model_len} answers of {engine.max_model_len}"


def _engine_dtype(config: TrainConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.engine.dtype or config.policy.dtype)
    return dtype


def staging_bytes(config: TrainConfig, model: ModelSizes, ranks: int) -> int:
    """Both buffers: each as large as the largest bucket."""
    width, shards = _engine_dtype(config).itemsize, _shards(config.policy, ranks)
    parameters = [
        SourceParameter(name, shards * shard_elements(shape, shards) * width, ())
        for name, shape in model.shapes.items()
    ]
    return BUFFERS * BucketPlan(parameters, config.sync.bucket_mib << 20).capacity


def batch_table(config: TrainConfig, ranks: int) -> RenderableType:
    """`batch_lines` for the screen."""
    table = Table(title=f"{config.run.name}: {config.model.path}", title_justify="left", show_header=False)
    for line in batch_lines(config, ranks):
        table.add_row(*line)
    return table


def memory_table(config: TrainConfig, ranks: int, device_gib: float) -> RenderableType:
    """All parts and their sums, which a CPU's ranks share and a CUDA device has to itself."""
    model = model_sizes(config, config.model.path)
    parts = [*trainer_parts(config, model, ranks), *engine_parts(config, model, ranks, device_gib)]
    sums = [sum(p.generating for p in parts), sum(p.training for p in parts)]
    shared = ranks if resolve_device(config) == "cpu" else 1
    table = Table(title=f"GiB of a rank; {model.total:,} parameters", title_justify="left", header_style="bold")
    table.add_column("")
    for title in ("generating", "training"):
        table.add_column(title, justify="right")
    table.add_column("")
    for part in parts:
        table.add_row(part.name, _gib(part.generating), _gib(part.training), part.remark)
    table.add_section()
    of = f"of {device_gib:.1f} GiB"
    table.add_row("sum", *(_gib(value) for value in sums), of if shared == 1 else f"times {ranks} ranks, {of}")
    return table


def _gib(size: float) -> str:
    return f"{size / _GIB:.3f}" if size else ""
