"""The start of every rank, whether it trains or only generates: inputs, rewards, the run's state,
an engine.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from sharding.ranks import EVERYBODY, agreed, exchange, is_main, world_size
from trainer.chat_template import EndTokens, end_tokens, unread_keys
from trainer.config.machine import float32_products, resolve_device
from trainer.config.placement import engine_workers, placement, training_ranks
from trainer.config.schema import DataConfig, TrainConfig
from trainer.config.sync_ways import local_ranks, with_chosen_way
from trainer.data import PromptDataset, check_token_ids, load_prompts, load_tokenizer
from trainer.data.summary import prompt_lines
from trainer.engines import fetch_model, processor_arguments, rank_device, start_server, stop_engine
from trainer.estimates.memory import GIB
from trainer.estimates.recomputation import with_chosen_recomputation
from trainer.evaluation import load_held_outs
from trainer.model_checks import check_budget, check_model, check_teacher
from trainer.restarts import EngineRestarts
from trainer.rewards.reward_pool import RewardPool
from trainer.rewards.trial import check_rewards
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.local import HeldOut
from trainer.run.keeper import Identity, RunState, find_checkpoint, run_identity
from trainer.run.screen import Progress
from trainer.run.watchdog import Watchdog

_ASK_SECONDS = 60.0


@dataclass
class Start:
    """The inputs of a started rank, and its engine, if it leads one.

    Attributes:
        config: the recipe, in which a chosen way of syncing weights has replaced `auto`, and the
            checkpoint's size of the KV cache null.
        level: runs episodes, which turn a prompt into trajectories.
        prompts: the prompts to train on.
        held_outs: the datasets of an evaluation; empty if the recipe has no evaluation.
        sampling: the sampling settings of training.
        ends: the tokens that end an answer.
        identity: the run's identity, which is compared with a checkpoint's.
        checkpoint: the checkpoint that the run resumes from, if any.
        state: the run's state besides the policy; checkpoints keep both.
        sharing_required: True if the recipe asks for common beginnings by name, and not by `auto`.
        leader: this rank's engine, if it leads one.
    """

    config: TrainConfig
    screen: Progress
    tokenizer: PreTrainedTokenizerBase
    level: RolloutLevel
    rewards: RewardPool
    prompts: PromptDataset
    held_outs: list[HeldOut]
    sampling: SamplingSettings
    ends: EndTokens
    identity: Identity
    checkpoint: Path | None
    state: RunState
    restarts: EngineRestarts
    sharing_required: bool = False
    leader: Leader | None = None

    @property
    def carried(self) -> Path | None:
        """The checkpoint with answers to continue from; None if it belongs to other data, whose
        prompts differ.
        """
        return self.checkpoint if self.state.prompts else None


def begin(
    config: TrainConfig, watchdog: Watchdog, resources: ExitStack, doing: Callable[[], str]
) -> Start:
    """Load this rank's inputs and start its engine. Collective among all ranks of the run.

    Starts with what is cheap and likely to fail. Models are built without weights first. Raises
    UserError.

    Args:
        resources: closes everything when the run ends, however it ends.
        doing: returns this rank's phase, for the screen.
    """
    sharing_required = config.batch.share_prefixes is True  # before `check_model` replaces `auto`
    config, way = with_chosen_way(config, world_size(), local_ranks(os.environ, world_size()))
    screen = Progress(config.run.steps, enabled=is_main())
    if way:
        screen.note(way)
    resources.enter_context(screen.follow(doing))
    device = rank_device(config)
    if resolve_device(config) == "cuda":
        screen.note(f"float32 products: {float32_products(os.environ)}")
    processor_arguments(config, resolve_device(config) == "cuda")
    tokenizer = load_tokenizer(config.model)
    config = check_model(config)
    check_budget(config, device, world_size(EVERYBODY))
    check_teacher(config, tokenizer)
    level = RolloutLevel(config, tokenizer, start_server)
    rewards = RewardPool(config.reward)
    level.data = rewards.columns(level.data)
    prompts = load_prompts(level.data, tokenizer, level.image_rules)
    screen.note(
        f"{len(prompts)} prompts from {config.data.path}, {prompts.dropped} too long and left out"
    )
    for remark in prompts.remarks:
        screen.note(remark)
    identity = run_identity(config, prompts.fingerprint, tokenizer)
    checkpoint, state = find_checkpoint(config, identity)
    config = with_settled_recomputation(config, state, screen.note)
    config = with_kept_cache(config, state, screen.note)
    ends = settle_ends(config, tokenizer, level.data, state, resumes=checkpoint is not None)
    for line in (*unread_keys(tokenizer, level.data), *ends.remarks):
        screen.note(line)
    held_outs = load_held_outs(config, level, tokenizer, ends.ids) if config.eval.every else []
    if is_main():
        for line in prompt_lines(
            prompts, {held_out.name: held_out.prompts for held_out in held_outs}, tokenizer
        ):
            screen.note(line)
    datasets = {config.data.path: prompts}
    datasets |= {f"eval.datasets.{held_out.name}": held_out.prompts for held_out in held_outs}
    check_token_ids(datasets, tokenizer, config.model)
    with agreed("trying the rewards", among=EVERYBODY):
        if is_main():
            for line in check_rewards(
                rewards, datasets, tokenizer, config.run.seed, config.reward.timeout_s
            ):
                screen.note(line)
    sampling = SamplingSettings(**config.sampling.model_dump() | {"stop_token_ids": ends.ids})
    start = Start(
        config=config,
        screen=screen,
        tokenizer=tokenizer,
        level=level,
        rewards=rewards,
        prompts=prompts,
        held_outs=held_outs,
        sampling=sampling,
        ends=ends,
        identity=identity,
        checkpoint=checkpoint,
        state=state,
        restarts=EngineRestarts(config, device, watchdog),
        sharing_required=sharing_required,
    )
    start_engine(start, resources)
    return start


def settle_ends(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    state: RunState,
    *,
    resumes: bool,
) -> EndTokens:
    """Return the tokens that end the run's answers, and keep them in `state`.

    A run that resumes goes on with those of its checkpoint, unless the recipe names others. `data`
    is the recipe's section with the tools' schemas.
    """
    chosen = config.sampling.stop_token_ids
    ends = end_tokens(config.model.path, tokenizer, data, chosen)
    if resumes and chosen is None:
        ends = ends.resumed(state.stop_token_ids, tokenizer)
    state.stop_token_ids = list(ends.added)
    return ends


def with_settled_recomputation(
    config: TrainConfig, state: RunState, note: Callable[[str], None]
) -> TrainConfig:
    """Return the recipe with `policy.activation_checkpointing: auto` replaced by what the run has
    had so far, or else by what fits, which `state` keeps. Collective among all ranks of the run.
    """
    gib = 0.0
    if resolve_device(config) == "cuda":
        gib = min(exchange(torch.cuda.mem_get_info()[1], among=EVERYBODY)) / GIB
    ranks = training_ranks(config, world_size(EVERYBODY))
    config, why = with_chosen_recomputation(config, ranks, gib, state.recomputation)
    if why:
        note(why)
    state.recomputation = config.policy.activation_checkpointing
    return config


def start_engine(start: Start, resources: ExitStack) -> None:
    """Start this rank's engine and its reward workers, if it leads one. Collective among all ranks
    of the run.

    Call it before the policy is built: vLLM measures free memory while it starts, and asserts that
    none is freed (https://github.com/vllm-project/vllm/issues/56830). The engine is asleep
    afterwards, as its KV cache and what the trainer is about to build may not fit together.
    """
    config = start.config
    count = engine_workers(config, world_size()) // config.engine.tensor_parallel_size
    start.screen.note(f"starting {count} engine(s) for {config.model.path}")
    with agreed("fetching the model", among=EVERYBODY):
        fetch_model(config)
    start.leader = start.restarts.first_start()
    resources.callback(stop_engine, start.leader)
    if start.leader is not None and not start.leader.engine.caches_prefixes:
        start.screen.note(
            "the engine caches no prefixes of prompts: vLLM keeps no states of recurrent layers on CPU"
        )
    keep_cache_size(start)
    if start.leader is not None:
        resources.enter_context(start.rewards)


def with_kept_cache(config: TrainConfig, state: RunState, note: Callable[[str], None]) -> TrainConfig:
    """Return the recipe with the size that the run's KV cache has had so far, if
    `engine.kv_cache_gib` is null and what decides the size is as it was.

    Otherwise another release of vLLM would measure again, and come to another size. Collective
    among all ranks of the run.
    """
    cache = state.kv_cache
    if not cache or not _is_measured(config) or cache != cache | _measured_with(config):
        return config
    gib = cache["bytes"] / 2**30
    note(f"KV cache: {gib:.2f} GiB for each worker of an engine, as in the run's earlier sessions")
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kv_cache_gib": gib})})


def keep_cache_size(start: Start) -> None:
    """Keep in the run's state the size of the engines' KV caches, the smallest of all, if vLLM has
    measured it. Collective among all ranks.
    """
    if not _is_measured(start.config):
        return
    size = None
    with agreed("asking for the size of the KV cache", among=EVERYBODY):
        if start.leader is not None:
            sizes = start.leader.engine.call_workers("hotbunk_kv_cache_bytes")
            size = max(start.leader.thread.run(sizes, _ASK_SECONDS, "asking the engine"))
    measured = [size for size in exchange(size, among=EVERYBODY) if size is not None]
    start.state.kv_cache = {"bytes": min(measured), **_measured_with(start.config)}


def _is_measured(config: TrainConfig) -> bool:
    """Return whether vLLM sizes the KV cache of the run's engines by the memory that it finds.

    The size of actors is not kept, since they start at any time.
    """
    return config.engine.kv_cache_gib is None and not placement(config).actors


def _measured_with(config: TrainConfig) -> dict[str, float]:
    """Return what decides the size of a KV cache, besides the model and the release of vLLM.
    Collective among all ranks.
    """
    engine = config.engine
    cuda = resolve_device(config) == "cuda"
    memory = torch.cuda.mem_get_info()[1] if cuda else psutil.virtual_memory().total
    return {
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "device_bytes": min(exchange(memory, among=EVERYBODY)),
    }
