"""Build the parts of a run from its recipe: ranks, models, the source of answers and the weight
path.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from generation.engine.allocator import plain_segments
from generation.engine.engine import Leader
from generation.importing import load
from sharding.manager import ShardingManager
from sharding.ranks import EVERYBODY, RemoteError, is_main, rank, world_size
from sharding.remote.orders import RemoteEngines
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource, MergingWeightSource, ShardedSource, one_piece
from sharding.transports.base import Transport, as_transport
from sharding.wire.group import own_address
from trainer.config.machine import resolve_device
from trainer.config.placement import generating_ranks, placement, training_ranks
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import way
from trainer.distributed import destroy_process_group, init_process_group, say, store
from trainer.engines import rank_device
from trainer.learning.learner import Learner, updates_asked
from trainer.policy import FrozenPolicy, Policy, Scorer, make_policy
from trainer.policy.buffers import sent_buffers
from trainer.policy.critic import Critic, make_critic
from trainer.policy.hf_format import checkpoint_views
from trainer.policy.lora import BaseOfPolicy, adapter_format, factors, is_adapter, low_rank, peft_name
from trainer.rollouts.answer_source import Source
from trainer.rollouts.carried import CarriedPool
from trainer.rollouts.journal import Journal
from trainer.rollouts.local import LocalSource
from trainer.rollouts.pool import EpisodePool, Pool
from trainer.rollouts.remote import RemoteSource
from trainer.rollouts.round import Order, read_groups
from trainer.rollouts.step_batch import StepBatch
from trainer.run import checkpoint, processes
from trainer.run.keeper import Keeper, late_to_leave, make_run_tracker
from trainer.run.lock import RunLock
from trainer.run.meters import PhaseMeter, StepProfiler
from trainer.run.tracking import NullTracker
from trainer.run.watchdog import Watchdog
from trainer.start import Start


@contextmanager
def joined(config: TrainConfig, lock: RunLock | None) -> Iterator[Watchdog]:
    """Join the ranks, with signal handlers and a watchdog, for the block; afterwards all ranks
    leave together.

    `lock` is the lock of the run's folder, which rank 0 has taken and which all ranks share from
    here on.
    """
    # The watchdog keeps the deadlines of steps; collectives only have to outlast the longest of
    # them.
    longest = max(config.run.first_step_deadline_s, config.run.step_deadline_s)
    init_process_group(
        longest, resolve_device(config), generating_ranks(config), not placement(config).actors
    )
    number = rank(EVERYBODY)
    ranks = world_size(EVERYBODY)
    if lock is not None:
        lock.share(number, ranks)
    far = int(os.environ.get("GROUP_RANK", "0")) > 0  # the first node's launcher hosts the store
    device = str(rank_device(config))
    folder = config.run.folder
    with Watchdog(store(), number, ranks, far=far, device=device, folder=folder) as watchdog:
        processes.install_signal_handlers(watchdog.current_phase)
        yield watchdog
    destroy_process_group()


@dataclass
class Run:
    """The parts of a run on a training rank, besides what it started with: models, the weight path,
    answers, records.

    Attributes:
        tenants: models besides the policy that can leave GPU memory during a generation shift.
        produce: `source.produce`, or that of a journal in front of it.
    """

    policy: Policy
    tenants: list[Critic]
    learner: Learner
    sharding: ShardingManager | RemoteEngines
    source: Source
    produce: Callable[[Order], StepBatch]
    keeper: Keeper
    tracker: NullTracker
    meter: PhaseMeter
    profiler: StepProfiler


def build_run(start: Start, watchdog: Watchdog, resources: ExitStack) -> Run:
    """Build the parts of a run on a training rank, and load its checkpoint, if any. Collective.

    `resources` closes the parts in the end.
    """
    config = start.config
    device = rank_device(config)
    start.screen.note(f"loading {config.model.path} for training")
    policy, reference, critic = build_models(config, device)
    tenants = [critic] if critic is not None else []
    sharding = resources.enter_context(closing(build_sharding(config, policy, start.leader)))
    if isinstance(sharding, ShardingManager):  # remote engines are not started again
        start.restarts.sharding = sharding
        try:
            sharding.connect()
        except RemoteError as failure:
            start.restarts.after(failure, policy, *tenants)
    source = build_source(
        start, sharding, resources, give_up=partial(late_to_leave, config.checkpoint, watchdog)
    )
    produce = source.produce
    if config.checkpoint.rollouts:
        produce = Journal(source, config, start.identity).produce
    learner = Learner(
        config,
        policy,
        reference,
        start.tokenizer.pad_token_id,
        start.rewards.weights,
        critic=critic,
        untrained=source.untrained,
        shortcuts=start.state.shortcuts,
        sharing_required=start.sharing_required,
    )
    parts: checkpoint.Parts = (
        {"policy": policy} if critic is None else {"policy": policy, "critic": critic}
    )
    if start.checkpoint is not None:
        checkpoint.load(start.checkpoint, parts)
    carried = source.carried  # packs the answers that have not been trained on yet
    keeper = Keeper(config, watchdog, start.state, parts=parts, identity=start.identity, carried=carried)
    resources.enter_context(closing(keeper))
    tracker = resources.enter_context(closing(make_run_tracker(config, start.state)))
    models = [model for model in (policy, reference, critic) if model is not None]
    works = {id(model.work): model.work for model in models}  # a LoRA base shares its policy's
    return Run(
        policy=policy,
        tenants=tenants,
        learner=learner,
        sharding=sharding,
        source=source,
        produce=produce,
        keeper=keeper,
        tracker=tracker,
        meter=PhaseMeter(config, device, start.leader, watchdog, *works.values()),
        profiler=StepProfiler(
            config.run.profile, config.run.folder / "profile", device, enabled=is_main()
        ),
    )


def build_models(
    config: TrainConfig, device: torch.device
) -> tuple[Policy, Scorer | None, Critic | None]:
    """Build the policy, a frozen reference if the recipe needs one, and a critic unless it shares
    the policy's trunk.

    A reference is needed for a KL term or a teacher. It is the initial policy, the base model if
    the policy has adapters, or the teacher. Reference and critic always use FSDP2.
    """
    algorithm = config.algorithm
    in_place = way(config).shares_memory
    updates = config.run.steps * updates_asked(config)
    values = algorithm.advantage_record.takes("values")
    head = values and config.critic.shared
    with plain_segments() if way(config).reads_shards else nullcontext():
        # Engines map the weights where they are
        policy = make_policy(
            config.model, config.policy, device, updates, config.lora, value_head=head, in_place=in_place
        )
    reference: Scorer | None = None
    if config.lora.rank and algorithm.kl_coef and not algorithm.teacher:
        reference = BaseOfPolicy(policy)
    elif algorithm.kl_coef or algorithm.teacher:
        model = config.model.model_copy(update={"path": algorithm.teacher} if algorithm.teacher else {})
        reference = FrozenPolicy(model, config.policy, device)
    critic = make_critic(config, device, updates) if values and not config.critic.shared else None
    return policy, reference, critic


def build_local_source(start: Start, resources: ExitStack, give_up: Callable[[], bool]) -> LocalSource:
    """Build the source of answers of a rank in whose crew engines run. `give_up` says if a step is
    to be abandoned.
    """
    config = start.config
    engines = Pool(
        start.leader,
        start.tokenizer,
        start.rewards,
        store(),
        start.level,
        world_size() // placement(config).engine_ranks(config.engine),
        max_error_rate=config.rollout.max_error_rate,
        ends=start.ends,
        prompts=partial(start.prompts.take, seed=config.run.seed),
    )
    pool: EpisodePool = engines
    if config.rollout.slice_tokens is not None:
        pool = CarriedPool(config, engines, start.carried)
    elif start.carried is not None and read_groups(start.carried):
        say(
            f"{start.carried} has unfinished answers, which are dropped, since rollout.slice_tokens is "
            "null now"
        )
    source = LocalSource(
        config,
        engines,
        pool,
        start.prompts,
        start.sampling,
        held_outs=start.held_outs,
        give_up=give_up,
    )
    return resources.enter_context(closing(source))


def build_source(
    start: Start,
    sharding: ShardingManager | RemoteEngines,
    resources: ExitStack,
    give_up: Callable[[], bool],
) -> Source:
    """Build the source of answers of a training rank, whose weights `sharding` sends to the
    engines.
    """
    if isinstance(sharding, RemoteEngines):
        return RemoteSource(start.config, sharding, start.prompts, start.carried)
    return build_local_source(start, resources, give_up)


def build_sharding(
    config: TrainConfig, policy: Policy, leader: Leader | None, folder: Path | None = None
) -> ShardingManager | RemoteEngines:
    """Build the weight path from the policy to the engine, in the engine's dtype and under the
    checkpoint's names.

    `folder` is private, for sockets; None: the rank's own.
    """
    dtype = getattr(torch, config.engine.dtype or config.policy.dtype)
    adapters = config.lora.engines_apply
    source = adapter_source(policy, dtype) if adapters else weight_source(policy, dtype)
    adapter = adapter_format(policy.model, config.lora) if adapters else None
    settings = sync_settings(config)
    device = policy.device
    if placement(config).remote:
        ranks = world_size(EVERYBODY)
        generating = range(training_ranks(config, ranks), ranks)
        return RemoteEngines(
            source, device, settings, generating, store(), host=weights_host(), adapter=adapter
        )
    folder = folder or processes.private_folder()
    size = config.engine.tensor_parallel_size
    transport = sync_way(config, policy, source)
    return ShardingManager(
        source, device, settings, folder, size, leader, adapter=adapter, way=transport
    )


def sync_settings(config: TrainConfig) -> SyncSettings:
    """Return the recipe's settings of weight synchronisation."""
    sync = config.sync
    return SyncSettings(sync.verify, sync.bucket_mib << 20, sync.timeout_s, sync.replay, sync.delta)


def weights_host() -> str:
    """Return the address at which engines reach this machine: loopback if all ranks run on it."""
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    return (
        "127.0.0.1" if alone else own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    )


def sync_way(config: TrainConfig, policy: Policy, source: ShardedSource) -> Transport:
    """Build the transport that sync.way names.

    A user's class is called with the device and the deadline of a wait in seconds.
    """
    device = policy.device
    timeout = config.sync.timeout_s
    record = way(config)
    if record.is_users:
        return as_transport(load(config.sync.way)(device, timeout))
    transport: type[Transport] = load(record.transport)
    return transport.for_run(device, source, policy, config.run.folder, timeout)


def weight_source(policy: Policy, dtype: torch.dtype) -> ShardedSource:
    """Return the source of all weights under the checkpoint's names, with adapters merged into
    them.
    """
    weights = [
        (name, parameter) for name, parameter in policy.named_parameters() if not is_adapter(name)
    ]
    buffers, uncast = sent_buffers(policy.model)
    return MergingWeightSource(
        [*weights, *buffers],
        low_rank(policy.model),
        dtype,
        partial(checkpoint_views, policy.model),
        uncast,
    )


def adapter_source(policy: Policy, dtype: torch.dtype) -> ShardedSource:
    """Return the source of the adapters' factors under PEFT's names, which vLLM expects."""
    return FsdpWeightSource(
        list(factors(policy.model).items()), dtype, lambda name, shape: one_piece(peft_name(name), shape)
    )
