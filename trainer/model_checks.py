"""Checks of a recipe that need torch and the model's files, but not the weights."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from generation.importing import load
from trainer.config.checks import Command, models_of
from trainer.config.machine import rank_count
from trainer.config.placement import training_ranks
from trainer.config.prefix_sharing import with_chosen_prefixes
from trainer.config.schema import ModelConfig, TrainConfig
from trainer.config.sync_ways import way
from trainer.data import load_tokenizer
from trainer.distributed import say
from trainer.errors import UserError
from trainer.estimates.memory import GIB, over_budget
from trainer.estimates.model_sizes import model_sizes, shards_of
from trainer.estimates.recomputation import with_chosen_recomputation
from trainer.model_structure import freeze
from trainer.policy.attention import branching_obstacle, require_packing, require_sharing
from trainer.policy.experts import require_experts
from trainer.policy.hf_format import build_meta_model, require_tensors
from trainer.policy.lora import add_adapters, left_out, require_start
from trainer.policy.optimizer_choice import try_optimizer
from trainer.policy.routing import asked_routers


def check_teacher(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless the teacher, if there is one, have the policy's vocabulary with the
    same token ids.
    """
    teacher = config.algorithm.teacher
    if teacher is not None:
        theirs = load_tokenizer(
            ModelConfig(path=teacher, trust_remote_code=config.model.trust_remote_code)
        )
        if theirs.get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"algorithm.teacher: {teacher} has another tokenizer than {config.model.path}"
            )


def check_model(config: TrainConfig, command: Command = "train") -> TrainConfig:
    """Raise UserError unless the recipe's model can be built and supports the recipe's settings.

    Builds the model with Transformers, and its adapters with PEFT, without weights. Then checks
    that the model supports the packing, the parallelism and the routes that the recipe asks for,
    and that a custom `sync.way` can be imported.

    Returns the recipe with `batch.share_prefixes: auto` replaced by what the models allow, and says
    why if it is false.
    """
    if way(config).is_users:
        try:
            load(config.sync.way)
        except ValueError as error:
            raise UserError(f"sync.way: {error}") from error
    ranks = rank_count(os.environ)
    try_optimizer(
        config.policy,
        shards_of(config.policy, training_ranks(config, ranks) if command == "train" else ranks),
    )
    path = config.model.path
    dtype = getattr(torch, config.policy.dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_meta_model(Path(path), config.model, dtype, torch.device("cpu"))
            if any(Path(path).glob("*.safetensors")):
                require_tensors(model, Path(path))
            if config.lora.rank:
                for line in left_out(model, config.lora):
                    say(line)
                add_adapters(model, config.lora, dtype, "meta")
                if config.lora.start is not None:
                    require_start(model, Path(config.lora.start), path)
            freeze(model, config.policy.freeze)
            asked_routers(model, config.model.routes, balanced=config.algorithm.balance_coef > 0)
    except UserError:
        raise
    except Exception as error:  # the model's own code may raise anything
        if "does not support an attention implementation" in str(error):
            remedy = "set it to eager, and batch.packing to false"
            refused = f"{path} does not support {config.model.attn_implementation}: {remedy}"
            raise UserError(f"model.attn_implementation: {refused}") from error
        keys = "model.path" + (" and lora.target_modules" if config.lora.rank else "")
        raise UserError(f"{keys}: {path} {_why_not(error)}") from error
    images = config.data.max_images > 0
    if config.batch.packing:
        require_packing(model, images)
    if config.policy.sequence_parallel > 1:
        require_sharing(model, images)
    if config.policy.expert_parallel > 1:
        require_experts(model)
    classes = _branching_obstacles(config, command, model)
    if config.batch.share_prefixes is True and (obstacle := next(classes, None)):
        raise UserError(f"batch.share_prefixes is true, but {obstacle}: set it to false or auto")
    config, why = with_chosen_prefixes(config, models_of(config, command), classes)
    if why:
        say(why)
    return config


def _branching_obstacles(config: TrainConfig, command: Command, model: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why a model's class cannot share beginnings. Build those of a critic and a
    teacher here.
    """
    paths = {config.critic.path, config.algorithm.teacher} if command == "train" else set()
    images = config.data.max_images > 0
    cpu = torch.device("cpu")
    if obstacle := branching_obstacle(model, images):
        yield f"{type(model).__name__} {obstacle}"
    for path in sorted(filter(None, paths - {config.model.path})):
        try:
            with torch.random.fork_rng(devices=[]):
                other = build_meta_model(Path(path), config.model, torch.float32, cpu)
        except (UserError, ValueError):  # what loads it says why
            yield f"{path} is not built as a language model"
            continue
        if obstacle := branching_obstacle(other, images):
            yield f"{type(other).__name__} {obstacle}"


def _why_not(error: Exception) -> str:
    """Return why a model cannot be built, as a sentence without its subject."""
    text = str(error)
    if "trust_remote_code" in text:
        return "has code of its own: set model.trust_remote_code to true, or use another model"
    if "does not recognize this architecture" in text:
        kind = text.partition("model type `")[2].partition("`")[0]
        return (
            f"is of the type {kind}, which Transformers {transformers.__version__} does not have: use "
            "another model"
        )
    return f"cannot be built: {type(error).__name__}: {error}"


def check_budget(config: TrainConfig, device: torch.device, ranks: int) -> None:
    """Raise UserError, with estimated sizes, unless trainer and engine fit on one GPU in a run of
    `ranks` ranks.
    """
    if device.type == "cuda":
        sizes = model_sizes(config, config.model.path, config.lora)
        total = torch.cuda.mem_get_info()[1] / GIB
        training = training_ranks(config, ranks)
        config, _ = with_chosen_recomputation(config, training, total)
        if problems := list(over_budget(config, sizes, training, total)):
            raise UserError(*problems)
