"""Puts the parts of a run together: its ranks, policies and sharding manager."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from generation.engine.engine import Engine, Leader
from generation.importing import load
from generation.rollouts.client import CapturingServer
from sharding.apart.broadcast import Broadcast
from sharding.apart.crews import EnginesApart, TrainersApart
from sharding.apart.replicas import ReplicasApart, TrainersOfReplicas
from sharding.apart.storage import Storage
from sharding.manager import ShardingManager, SyncSettings
from sharding.ranks import EVERYBODY, rank, world_size
from sharding.send.pull import Pull
from sharding.send.source import FsdpWeightSource, MergingWeightSource, ShardedSource, one_piece
from sharding.send.ways import Staged, Way, ZeroCopy
from sharding.wire.group import own_address
from trainer.apart import OwnRounds, OwnSlices, RolloutsApart, SlicesApart
from trainer.carried import SlicedRollouts
from trainer.config.machine import resolve_device
from trainer.config.placement import generating_ranks, placement, training_ranks
from trainer.config.schema import ModelConfig, TrainConfig
from trainer.data import load_tokenizer
from trainer.distributed import destroy_process_group, init_process_group, say, store
from trainer.errors import UserError
from trainer.estimates.budget import over_budget
from trainer.estimates.memory import GIB
from trainer.estimates.model_sizes import model_sizes
from trainer.kept import KeptRollouts
from trainer.learning.learner import updates_asked
from trainer.policy import FrozenPolicy, InPlacePolicy, Policy, Scorer, make_policy
from trainer.policy.attention import require_packing, require_sharing
from trainer.policy.critic import Critic, make_critic
from trainer.policy.hf_format import build_meta_model, checkpoint_views, freeze
from trainer.policy.lora import BaseOfPolicy, adapter_format, add_adapters, factors, is_adapter, low_rank, peft_name
from trainer.policy.routing import asked_routers
from trainer.rewards.pool import RewardPool
from trainer.rollouts import RolloutLevel, Rollouts
from trainer.run import processes
from trainer.run.checkpoint import CARRIED_FILES
from trainer.run.keeper import Identity
from trainer.run.lock import RunLock
from trainer.run.watchdog import Watchdog


async def start_server(engine: Engine, **settings: Any) -> CapturingServer:
    """The server that clients of rollouts talk to (level 6); `settings` are those of `ServerSettings`."""
    from generation.server import OpenAIServer, ServerSettings  # with vLLM's web framework, for level 6 only

    return await OpenAIServer.start(engine, ServerSettings(**settings))


@contextmanager
def joined(config: TrainConfig, timeout: float, lock: RunLock | None) -> Iterator[Watchdog]:
    """Among the ranks, with signal handlers and a watchdog; at the end all leave together.

    A collective may take `timeout` seconds; `lock` is that of the run's folder, which rank 0 has taken.
    """
    init_process_group(timeout, resolve_device(config), generating_ranks(config), not placement(config).actors)
    number, ranks = rank(EVERYBODY), world_size(EVERYBODY)
    if lock is not None:
        lock.share(number, ranks)
    far = int(os.environ.get("GROUP_RANK", "0")) > 0  # the first node's launcher holds the store
    with Watchdog(store(), number, ranks, far=far) as watchdog:
        processes.install_signal_handlers(watchdog.current_phase)
        yield watchdog
    destroy_process_group()


def rank_device(config: TrainConfig) -> torch.device:
    """The device this rank trains on, or its engine is on."""
    generates = rank(EVERYBODY) >= training_ranks(config, world_size(EVERYBODY))
    has_none = placement(config).actors and generates
    if resolve_device(config) == "cpu" or has_none:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_teacher(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless the teacher, if there is one, has the same tokens under the same ids."""
    teacher = config.algorithm.teacher
    if teacher is not None:
        own = load_tokenizer(ModelConfig(path=teacher, trust_remote_code=config.model.trust_remote_code))
        if own.get_vocab() != tokenizer.get_vocab():
            raise UserError(f"algorithm.teacher: {teacher} has another tokenizer than {config.model.path}")


def check_model(config: TrainConfig) -> None:
    """Raise UserError unless Transformers can build the model, and PEFT its adapters; tried without their weights.

    And unless sequences can be packed and shared in it as the recipe asks for, its routers take the routes of the
    recipe, and a way of weights that it names can be imported.
    """
    if ":" in config.sync.way:
        try:
            load(config.sync.way)
        except ValueError as error:
            raise UserError(f"sync.way: {error}") from error
    path, dtype = config.model.path, getattr(torch, config.policy.dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_meta_model(Path(path), config.model, dtype, torch.device("cpu"))
            if config.lora.rank:
                add_adapters(model, config.lora, dtype, "meta")
            freeze(model, config.policy.freeze)
            asked_routers(model, config.model.routes)
    except UserError:
        raise
    except Exception as error:  # whatever the model's own code makes of its config.json
        if "does not support an attention implementation" in str(error):
            refused = f"{path} knows no {config.model.attn_implementation}"
            raise UserError(
                f"model.attn_implementation: {refused}: set it to eager, and batch.packing to false"
            ) from error
        keys = "model.path" + (" and lora.target_modules" if config.lora.rank else "")
        raise UserError(f"{keys}: {path} cannot be built: {type(error).__name__}: {error}") from error
    if config.batch.packing:
        require_packing(model)
    if config.policy.sequence_parallel > 1:
        require_sharing(model)


def check_budget(config: TrainConfig) -> None:
    """Raise UserError, with the numbers, unless trainer and engine fit on this rank's GPU together."""
    if rank_device(config).type == "cuda":
        sizes, total = model_sizes(config, config.model.path, config.lora), torch.cuda.mem_get_info()[1] / GIB
        ranks = training_ranks(config, world_size(EVERYBODY))
        if problems := list(over_budget(config, sizes, ranks, total)):
            raise UserError(*problems)


def build_models(config: TrainConfig, device: torch.device) -> tuple[Policy, Scorer | None, Critic | None]:
    """The policy; a frozen reference, where KL or a teacher is asked for; a critic with a trunk of its own.

    The latter two are always on FSDP2. The reference is what the policy starts from, its base where it has adapters, or
    the teacher.
    """
    algorithm, in_place = config.algorithm, config.sync.way == "zero_copy"
    updates = config.run.steps * updates_asked(config)
    values = algorithm.advantage_record.takes("values")
    head = values and config.critic.shared
    policy = make_policy(config.model, config.policy, device, updates, config.lora, value_head=head, in_place=in_place)
    reference: Scorer | None = None
    if config.lora.rank and algorithm.kl_coef and not algorithm.teacher:
        reference = BaseOfPolicy(policy)
    elif algorithm.kl_coef or algorithm.teacher:
        model = config.model.model_copy(update={"path": algorithm.teacher} if algorithm.teacher else {})
        reference = FrozenPolicy(model, config.policy, device)
    critic = make_critic(config, device, updates) if values and not config.critic.shared else None
    return policy, reference, critic


def build_rollouts(
    config: TrainConfig,
    leader: Leader | None,
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardPool,
    level: RolloutLevel,
    start: Path | None,
    identity: Identity,
    sharding: ShardingManager | EnginesApart | None = None,
) -> Rollouts:
    """The rollouts of this rank; `start` is the checkpoint that the run, of that identity, resumes from, if it does.
    `sharding`: what brings the engines this rank's policy, if it has one.
    """
    size = placement(config).engine_ranks(config.engine)
    options: dict[str, Any] = {"engines": world_size() // size}
    options["max_error_rate"] = config.rollout.max_error_rate
    if placement(config).apart:
        own, cut = (leader, tokenizer, rewards, store(), level), config.rollout.slice_tokens is not None
        if isinstance(sharding, EnginesApart):
            kind = SlicesApart if cut else RolloutsApart
            return kind(config, sharding, *own, start=start, **options)
        return OwnSlices(config, *own, start=start, **options) if cut else OwnRounds(*own, **options)
    if config.rollout.slice_tokens is None:
        if start is not None and any(start.glob(CARRIED_FILES)):
            say(f"{start} has unfinished answers, which are left out, since rollout.slice_tokens is null now")
        if config.checkpoint.rollouts:
            return KeptRollouts(config, identity, leader, tokenizer, rewards, store(), level, **options)
        return Rollouts(leader, tokenizer, rewards, store(), level, **options)
    return SlicedRollouts(config, leader, tokenizer, rewards, store(), level, start=start, **options)


def build_sharding(config: TrainConfig, policy: Policy, leader: Leader | None) -> ShardingManager | EnginesApart:
    """The weight path from the policy to the engine, in the engine's dtype and under the checkpoint's names."""
    dtype = getattr(torch, config.engine.dtype or config.policy.dtype)
    adapters = config.lora.engines_apply
    source = adapter_source(policy, dtype) if adapters else weight_source(policy, dtype)
    adapter = adapter_format(policy.model, config.lora) if adapters else None
    if placement(config).apart:
        ranks = world_size(EVERYBODY)
        generating = range(training_ranks(config, ranks), ranks)
        kind = ReplicasApart if placement(config).actors else EnginesApart
        return kind(source, policy.device, sync_settings(config), generating, store(), weights_host(), adapter=adapter)
    return ShardingManager(
        source,
        policy.device,
        sync_settings(config),
        processes.private_folder(),
        tensor_parallel_size=config.engine.tensor_parallel_size,
        leader=leader,
        adapter=adapter,
        way=sync_way(config, policy, source),
    )


def build_trainers(config: TrainConfig, leader: Leader | None) -> TrainersApart:
    """The same path, for a rank that only generates."""
    kind = TrainersOfReplicas if placement(config).actors else TrainersApart
    return kind(leader, store(), rank(EVERYBODY), sync_settings(config))


def sync_settings(config: TrainConfig) -> SyncSettings:
    """Of the recipe."""
    return SyncSettings(config.sync.verify, config.sync.bucket_mib << 20, config.sync.timeout_s, config.sync.replay)


def weights_host() -> str:
    """The address of this machine at which engines reach it: loopback where all ranks are here."""
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    return "127.0.0.1" if alone else own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def sync_way(config: TrainConfig, policy: Policy, source: ShardedSource) -> Way:
    """The way that sync.way names; unsettled, staged. One's own is made with the device and a wait's deadline (s)."""
    device, timeout = policy.device, config.sync.timeout_s
    match config.sync.way:
        case "staged" | "auto":
            return Staged(device)
        case "zero_copy":
            assert isinstance(policy, InPlacePolicy)
            return ZeroCopy(device, source.parameters(), policy.compute_in, timeout)
        case "pull":
            assert isinstance(source, FsdpWeightSource)
            return Pull(device, source, policy.shard_tensors(), [policy.optimizer])
        case "broadcast":
            return Broadcast(device, world_size(), timeout, weights_host())
        case "storage":
            return Storage(config.run.folder / "weights", device, timeout)
        case spec:
            return load(spec)(device, timeout)


def weight_source(policy: Policy, dtype: torch.dtype) -> ShardedSource:
    """All weights under the checkpoint's names, adapters merged."""
    weights = [(name, parameter) for name, parameter in policy.named_parameters() if not is_adapter(name)]
    return MergingWeightSource(
        weights, low_rank(policy.model), dtype, lambda name, shape: checkpoint_views(policy.model, name, shape)
    )


def adapter_source(policy: Policy, dtype: torch.dtype) -> ShardedSource:
    """The factors of the adapters under PEFT's names, by which vLLM knows them."""
    return FsdpWeightSource(
        list(factors(policy.model).items()), dtype, lambda name, shape: one_piece(peft_name(name), shape)
    )
