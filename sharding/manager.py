"""The sharding manager: a context manager around generation that sends the policy's weights to the
engine, and gives the trainer its memory back.

A shift makes room, wakes the engine's memory for weights, updates them (`sharding.update`) and
wakes the KV cache. All ranks enter the same collectives; a failure of one is raised on all.
"""

import gc
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from generation.engine.engine import Engine, Leader, WorkerError
from generation.engine.lifecycle import Memory
from sharding.ranks import agreed, exchange, rank
from sharding.report import AdapterFormat, SyncReport, SyncSettings
from sharding.send.source import ShardedSource
from sharding.tenants import Tenant, VersionedPolicy
from sharding.transports.base import Transport
from sharding.transports.staged import Staged
from sharding.update import ABORT_SECONDS, Update
from sharding.verify import check_probe
from sharding.wire.channel import Listener, SyncError
from sharding.wire.staging import device_id, return_free_pages
from sharding.workers import Link, Workers, futures, raise_if_failed


class ShardingManager:
    """The weights and the memory of a group of engines. In a shift the engines have the policy's
    weights; otherwise they sleep, and the trainer has the memory.

    Every rank constructs one and connects it; only leaders pass a `leader`:

        manager = ShardingManager(source, device, settings, folder, leader=leader)
        manager.connect()
        with manager.generation_shift(policy):    # optimizer out, weights in, KV cache mapped
            answers = sample(prompts)
        # The engine sleeps again, and the trainer has its memory back

    `report` describes the latest sync.
    """

    def __init__(
        self,
        source: ShardedSource,
        device: torch.device,
        settings: SyncSettings,
        folder: Path,
        tensor_parallel_size: int = 1,
        leader: Leader | None = None,
        adapter: AdapterFormat | None = None,
        way: Transport | None = None,
    ) -> None:
        """Listen for the workers. `way` is the transport of the weights, by default that through
        staging buffers.
        """
        self._device = device
        self._timeout = settings.timeout
        self._group_size = tensor_parallel_size
        self._leader = leader
        self._adapter = adapter
        self._device_id = device_id(device, rank() % tensor_parallel_size)
        self._folder = folder
        self._connections = itertools.count()
        self._channel = self._listen()
        on_cuda = device.type == "cuda"
        self._update = Update(source, way or Staged(device), settings, adapter, keep_buffers=not on_cuda)
        self._transport = self._update.transport
        self._session = 0
        self._broken = False
        self._tenants: list[Tenant] = []
        self.report = SyncReport(version=-1)

    def _listen(self) -> Listener:
        """Listen at an address that was never used before, so that messages of an earlier worker
        cannot arrive.
        """
        return Listener(self._folder, f"weights-{rank()}-{next(self._connections)}")

    def endpoints(self) -> list[dict[str, list[str]]]:
        """Return for each engine group the addresses and secrets of its ranks, by device.
        Collective.
        """
        mine = {
            "device_id": self._device_id,
            "endpoint": self._channel.endpoint,
            "secret": self._channel.secret,
        }
        ranks = exchange(mine)
        size = self._group_size
        addresses = []
        for first in range(0, len(ranks), size):
            group = ranks[first : first + size]
            addresses.append({r["device_id"]: [r["endpoint"], r["secret"]] for r in group})
        return addresses

    def connect(self, calls: Sequence[Any] = ()) -> None:
        """Pair every rank with the worker on its device. Collective; engines must be running.
        `calls`: the running `connect_ipc(endpoints)` of engines without a leader, on the rank that
        holds them.
        """
        endpoints = self.endpoints()[rank() // self._group_size]
        reader = self._transport.reader
        self._lead(
            "connecting workers",
            lambda engine: engine.call_workers("hotbunk_connect", endpoints, reader),
        )
        with agreed("connecting workers"):
            for call in futures(calls):
                call.result(self._timeout)
        with agreed("connecting workers"):
            self._channel.accept(self._timeout, self._device_id)
        self._connect_transport()

    def _connect_transport(self) -> None:
        self._transport.connect(None if self._leader is None else self._call)
        self._broken = False

    def _call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Start a method of the extension on all workers of the leader's engine; the future has
        their outcomes.
        """
        assert self._leader is not None
        return self._leader.thread.submit(self._leader.engine.ask_workers(method, *arguments))

    @contextmanager
    def generation_shift(self, policy: VersionedPolicy, *tenants: Tenant) -> Iterator[None]:
        """Wake the engines at `policy.version` for the block, then put them to sleep and restore
        the trainer's memory. If the block raises, the engines are left awake, since the ranks may
        be out of step: the caller calls `sleep` if the run goes on.
        """
        self.wake(policy, *tenants)
        yield
        self.sleep()

    def wake(self, policy: VersionedPolicy, *tenants: Tenant) -> None:
        """Allocate the engines' weights, update them to `policy.version`, verify them, and then
        allocate the KV cache.
        """
        self.report = SyncReport(policy.version)
        self._tenants = [policy, *tenants]

        # Make room for the engine's weights. The policy's own stay, since they are about to be
        # sent.
        self._make_room(policy, weights=False)
        self._make_room(*tenants, weights=True)
        with self._timed("wake"):
            self._lead("waking the weights", lambda engine: engine.wake(["weights"]))

        # Update the weights, and verify them by digests and loaders. If neither is possible, draw a
        # probe now, while the policy's weights are there to score it.
        with self._timed("sync"):
            self._sync()
        probe = None
        if self._update.verification.undecided:
            with self._timed("verify"):
                probe = self._update.probe(policy)

        # The engine has the weights, so the policy's own memory can go: make room for the KV cache.
        self._make_room(policy, weights=True)
        with self._timed("wake"):
            self._lead("waking the KV cache", lambda engine: engine.wake(["kv_cache"]))

        # The engine scores the probe last, since it needs a KV cache.
        if probe is not None:
            with self._timed("verify"), agreed("probing the engine"):
                if self._leader is not None:
                    check_probe(self._leader, probe, self._timeout)
            self.report.verified = "probe"

    def sleep(self) -> None:
        """Put the engines to sleep, and restore the trainer's memory. Base weights that no sync
        sends stay in host memory, and weights shared with the trainer stay where they are.
        """
        # First the engines, whose memory the trainer takes.
        with self._timed("sleep"):
            self._sleep_engines()
        with self._timed("onload"):
            for tenant in self._tenants:
                tenant.restore()

    def _sleep_engines(self) -> None:
        """Put the engines that are awake, or half awake, to sleep."""
        # Level 2 drops the weights, since the next sync sends all of them. Level 1 keeps them, for
        # adapters and shared memory.
        level = 2 if self._adapter is None and not self._transport.shares else 1

        async def sleep(engine: Engine) -> None:
            if engine.state.memory in (Memory.AWAKE, Memory.WEIGHTS):
                await engine.sleep(level)

        self._lead("putting the engine to sleep", sleep)

    def restart(self, start: Callable[[], None], *tenants: Tenant) -> None:
        """Start engines again after a failure that has ended them. `start` starts those of this
        rank; afterwards all engines sleep.

        Collective. The trainer's memory is released meanwhile, as in a shift: a new engine measures
        free memory, and asserts that none is freed while it starts
        (https://github.com/vllm-project/vllm/issues/56830). All ranks and workers are paired anew,
        and staging memory is exported anew; a new worker records its loaders anew.
        """
        # Workers of the dead engine will not answer. Engines that are alive go to sleep.
        self._transport.abort("an engine has ended")
        self._tenants = [*tenants]
        self._sleep_engines()
        # A new engine starts where the trainer's memory was.
        self._make_room(*tenants, weights=True)
        with agreed("starting the engine again"):
            start()
        self.sleep()
        # Its workers are new processes, so every rank is paired again.
        self._channel.close()
        self._channel = self._listen()
        self.connect()

    def _make_room(self, *tenants: Tenant, weights: bool) -> None:
        """Release the tenants' memory, together with the blocks that torch keeps for later."""
        with self._timed("offload"):
            self.report.offloaded += sum(tenant.release(weights) for tenant in tenants)
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            else:
                return_free_pages()

    def close(self) -> None:
        """Release sockets and staging memory of this rank."""
        self._transport.abort("the run ends")
        self._channel.close()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.report.seconds[phase] = self.report.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _lead(self, phase: str, action: Callable[[Engine], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine on the thread of each leader's engine. All ranks wait for all leaders."""
        with agreed(phase):
            if self._leader is not None:
                self._leader.thread.run(action(self._leader.engine), self._timeout, phase)

    def send(self, version: int, calls: Sequence[Any] = ()) -> SyncReport:
        """Update engines without a leader to `version`, and verify their weights. The memory of
        their weights must be awake. Collective. `calls`: the engines' calls of
        `update_weights_via_ipc_zmq`, already under way, on the rank that has made them. Raises
        RemoteError: on all ranks, naming the worker and the weight. The engines hold no version
        until the next complete update.
        """
        self.report = SyncReport(version)
        running = futures(calls)
        kind = ""
        waiting_for = f"word from the worker on {self._device_id} that it takes weights"
        with agreed("starting the update"):
            while kind != "ready":  # before it there may be the end of an update that broke off
                message = self._channel.receive(
                    self._timeout, waiting_for, lambda: raise_if_failed(running)
                )
                kind = message["kind"]
        with self._timed("sync"):
            self._sync(running)
        return self.report

    def _sync(self, calls: "list[Future[Any]] | None" = None) -> None:
        """Update the workers to the version of the report. `calls`: the engines' calls that receive
        the update; None: the leader starts one.
        """
        # After an update that broke off, transport and workers are connected again.
        if self._broken:
            self._connect_transport()
        self._session += 1
        running = calls or []
        with agreed("starting the update"):
            # From here on the engine holds no version, and its workers wait for messages.
            if self._leader is not None and calls is None:
                engine = self._leader.engine
                method = "update_weights_via_ipc_zmq"
                update = engine.receive(
                    method, self._session, self._timeout, version=self.report.version
                )
                running = [self._leader.thread.submit(update)]
        # The update itself. If it fails, the engine stays without a version.
        link = Link(
            self._channel, self._session, self._timeout, lambda: _raise_if_dead(running), self._device_id
        )
        try:
            results = self._update.run(self.report, Workers(link), session=self._session, calls=running)
        except BaseException:
            self._give_up(running)
            raise
        if self._leader is not None:
            self._note_outcomes(*results)

    def _give_up(self, calls: "list[Future[Any]]") -> None:
        """Leave the engine without a version until the next complete update."""
        self._broken = True
        wait(calls, ABORT_SECONDS)
        for call in calls:
            call.cancel()
        if self._leader is not None:
            self._leader.engine.state.fail_sync()

    def _note_outcomes(self, outcomes: list[dict[str, Any]]) -> None:
        """Note in the report which weights this engine's workers cannot replay, and which they
        leave out.
        """
        self.report.unreplayable = None
        for outcome in outcomes:
            if (reasons := outcome.get("unreplayable")) is not None:
                self.report.unreplayable = (self.report.unreplayable or {}) | reasons
        left_out = [set(outcome.get("left_out", [])) for outcome in outcomes]
        self.report.left_out = sorted(set.intersection(*left_out)) if left_out else []


def _raise_if_dead(calls: "list[Future[Any]]") -> None:
    """Raise SyncError if a call has ended early, which means that the engine, or its worker, is
    gone.
    """
    for error in (call.exception() for call in calls if call.done()):
        if error is not None and not isinstance(error, WorkerError):
            # A worker reports its own errors to its rank
            raise SyncError(
                f"the engine ended during a weight update: {type(error).__name__}: {error}"
            ) from error
