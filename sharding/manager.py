"""The sharding manager: a context manager around generation that brings the policy's weights and takes the memory back.

Every rank enters the same collectives, whatever happens to its own worker: a rank whose worker failed continues to
gather without sending, and the failure is raised on all ranks together at the next agreement.
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
from sharding.ranks import RemoteError, agree, agreed, dead_ranks, exchange, rank
from sharding.send.probe import Probe, Tenant, VersionedPolicy, compare_with, draw_probe, vocabulary_of
from sharding.send.pull import Pull
from sharding.send.push import (
    AdapterFormat,
    DigestCheck,
    Link,
    SyncReport,
    SyncSettings,
    announce,
    different_weights,
    futures,
    push,
    raise_if_failed,
)
from sharding.send.source import ShardedSource
from sharding.send.ways import BucketPlan, Staged, Way
from sharding.wire.channel import Listener, SyncError
from sharding.wire.manifest import first_names
from sharding.wire.staging import BUFFERS, device_id, return_free_pages, wait_for_writes

ABORT_SECONDS = 5.0
"""Longest wait for workers to leave an update that failed; they answer at once, unless they hang."""


class ShardingManager:
    """Keeps the engine group's weights at the policy's version, and its memory out of the trainer's way.
    Construct and `connect` it on every rank; only leaders pass a `leader`.
    `report`: on the latest sync.
    `staging_opened`, `staging_closed`: how often this rank's worker has mapped staging memory and let it go.
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
        way: Way | None = None,
    ) -> None:
        """`way`: how the bytes of weights get to the workers; through staging buffers by default."""
        self._source, self._device, self._settings = source, device, settings
        self._group_size, self._leader, self._adapter = tensor_parallel_size, leader, adapter
        self._parameters = source.parameters()
        self._plan = BucketPlan(self._parameters, settings.bucket_bytes)
        self._device_id = device_id(device, rank() % tensor_parallel_size)
        self._folder, self._connections = folder, itertools.count()
        self._channel = self._listen()
        self._way = way or Staged(device)
        self._session = 0
        self._stamps = itertools.count(1)
        self._plain = self._records = self._broken = False
        self._tenants: list[Tenant] = []
        self.report = SyncReport(version=-1)
        self.staging_opened = self.staging_closed = 0

    def _listen(self) -> Listener:
        """At an address of its own each time: what an earlier worker has sent, or sends yet, is not for this one."""
        return Listener(self._folder, f"weights-{rank()}-{next(self._connections)}")

    def endpoints(self) -> list[dict[str, list[str]]]:
        """Addresses and secrets of the ranks, by device, for each engine group. Collective."""
        mine = {"device_id": self._device_id, "endpoint": self._channel.endpoint, "secret": self._channel.secret}
        ranks, size = exchange(mine), self._group_size
        groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        return [{r["device_id"]: [r["endpoint"], r["secret"]] for r in group} for group in groups]

    def connect(self, calls: Sequence[Any] = ()) -> None:
        """Pair every rank with the worker on its device. Collective; engines must be running.
        `calls`: of engines without a leader, on the rank that holds them: those of their `connect_ipc(endpoints)`.
        """
        connect = ("hotbunk_connect", self.endpoints()[rank() // self._group_size], self._way.reader)
        self._lead("connecting workers", lambda engine: engine.call_workers(*connect))
        with agreed("connecting workers"):
            for call in futures(calls):
                call.result(self._settings.timeout)
        with agreed("connecting workers"):
            self._channel.accept(self._settings.timeout, self._device_id)
        self._connect_way()

    def _connect_way(self) -> None:
        self._way.connect(None if self._leader is None else self._call)
        self._broken = False

    def _call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Leaders: start a method of the extension on all workers of the engine; their outcomes, or its error."""
        assert self._leader is not None
        return self._leader.thread.submit(self._leader.engine.ask_workers(method, *arguments))

    @contextmanager
    def generation_shift(self, policy: VersionedPolicy, *others: Tenant) -> Iterator[None]:
        """Inside, the engines are awake at `policy.version`; afterwards they sleep and the memory is the trainer's.
        When the body raises, nothing more is asked of the engines: the ranks may be out of step, and the run ends.
        """
        self.wake(policy, *others)
        yield
        self.sleep()

    def wake(self, policy: VersionedPolicy, *others: Tenant) -> None:
        """Weights mapped, brought to `policy.version` and verified, then the KV cache mapped: in this order.
        The trainer makes room first, and the policy's own weights go once the engine has them.
        """
        self.report = SyncReport(policy.version)
        self._tenants = [policy, *others]
        self._make_room(policy, weights=False)
        self._make_room(*others, weights=True)
        with self._timed("wake"):
            self._lead("waking the weights", lambda engine: engine.wake(["weights"]))
        with self._timed("sync"):
            self._sync(policy.version)
        probe = self._probe(policy)
        self._make_room(policy, weights=True)
        with self._timed("wake"):
            self._lead("waking the KV cache", lambda engine: engine.wake(["kv_cache"]))
        if probe is not None:
            with self._timed("verify"), agreed("probing the engine"):
                if self._leader is not None:
                    compare_with(self._leader, probe, self._settings.timeout)
            self.report.verified = "probe"

    def sleep(self) -> None:
        """Engines asleep, their memory given back, and what the trainer had put away in its place.
        A base that no sync brings is kept in the host's memory, and shared weights where they are.
        """
        with self._timed("sleep"):
            self._sleep_engines()
        with self._timed("onload"):
            for tenant in self._tenants:
                tenant.restore()

    def _sleep_engines(self) -> None:
        """Those that are awake, or half awake."""
        level = 2 if self._adapter is None and not self._way.shares else 1

        async def sleep(engine: Engine) -> None:
            if engine.state.memory in (Memory.AWAKE, Memory.WEIGHTS):
                await engine.sleep(level)

        self._lead("putting the engine to sleep", sleep)

    def restart(self, start: Callable[[], None], *tenants: Tenant) -> None:
        """After a failure that has ended engines, which are closed: `start` starts those of this rank; then all sleep.

        Collective. The trainer's memory is put away meanwhile, as in a shift: a new engine measures what is free, and
        asserts that none is freed while it starts (https://github.com/vllm-project/vllm/issues/56830). All ranks and
        workers are paired anew, and staging memory is exported anew; a new worker records its loaders anew.
        """
        self._way.abort("an engine has ended")
        self._tenants = [*tenants]
        self._sleep_engines()
        self._make_room(*tenants, weights=True)
        with agreed("starting the engine again"):
            start()
        self.sleep()
        self._channel.close()
        self._channel = self._listen()
        self.connect()

    def _make_room(self, *tenants: Tenant, weights: bool) -> None:
        """Have the trainer's memory given back, and with it the blocks that torch keeps for later."""
        with self._timed("offload"):
            self.report.offloaded += sum(tenant.release(weights) for tenant in tenants)
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            else:
                return_free_pages()

    def close(self) -> None:
        """Release sockets and staging memory of this rank."""
        self._way.abort("the run ends")
        self._channel.close()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.report.seconds[phase] = self.report.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _lead(self, phase: str, action: Callable[[Engine], Coroutine[Any, Any, Any]]) -> None:
        """Let leaders run a coroutine on their engine's thread; all ranks wait for all leaders."""
        with agreed(phase):
            if self._leader is not None:
                self._leader.thread.run(action(self._leader.engine), self._settings.timeout, phase)

    def send(self, version: int, calls: Sequence[Any] = ()) -> SyncReport:
        """Bring engines without a leader to `version`, and verify it, once their weights' memory is awake. Collective.
        `calls`: on the rank that holds them, those of their `update_weights_via_ipc_zmq`, which run already.
        Raises RemoteError: on all ranks, naming the worker and the weight. The engines hold no version until the next
        complete update.
        """
        self.report, running, kind = SyncReport(version), futures(calls), ""
        waiting_for = f"word from the worker on {self._device_id} that it takes weights"
        with agreed("starting the update"):
            while kind != "ready":  # before it there may be the end of an update that broke off
                message = self._channel.receive(self._settings.timeout, waiting_for, lambda: raise_if_failed(running))
                kind = message["kind"]
        with self._timed("sync"):
            self._sync(version, running)
        return self.report

    def _sync(self, version: int, calls: "list[Future[Any]] | None" = None) -> None:
        """`calls`: those that take the update, where the leader is not to start one."""
        if self._broken:
            self._connect_way()
        self._session += 1
        running = calls or []
        with agreed("starting the update"):  # from here on the engine holds no version, and its workers wait
            if self._leader is not None and calls is None:
                running = [self._leader.thread.submit(self._receive(self._leader.engine, version))]
        timeout = self._settings.timeout
        link = Link(self._channel, self._session, timeout, lambda: _raise_if_dead(running), self._device_id)
        try:
            check = DigestCheck(self._source, self._parameters, self._settings.verify, version)
            different = self._send(link, version, check)
            self._verify(link, check, different)
            self._finish(link, running)
        except BaseException as error:
            self._fail(link, running)
            if isinstance(error, RuntimeError) and not isinstance(error, RemoteError) and (whom := dead_ranks()):
                raise RemoteError(f"rank {rank()} lost contact with {whom} during a weight update: {error}") from error
            raise

    async def _receive(self, engine: Engine, version: int) -> list[dict[str, Any]]:
        """On the leader's engine: one update. When it ends well, the engine holds `version`."""
        session, timeout = self._session, self._settings.timeout
        return await engine.receive("update_weights_via_ipc_zmq", session, timeout, version=version)

    def _send(self, link: Link, version: int, check: DigestCheck) -> list[str]:
        """Returns the weights that a worker does not hold as the ranks do."""
        # The session is a number that no adapter had before, so nothing cached by number or name can be an old one's.
        adapter = None if self._adapter is None else {"number": self._session, "config": self._adapter.config}
        answer = announce(link, self._parameters, version, self._settings.replay, adapter, check.request)
        self._plain, self._records = bool(answer.get("plain")), bool(answer.get("records"))
        pulls: Pull | None = None
        if self._way.in_place:
            wait_for_writes(self._device)  # the worker reads the memory at once
            link.ask("in_place")
        else:
            pulls = self._begin(version, [] if link.error else answer.get("whole"), link.error is None)
            self._push(link, "bucket", self._plan)
            if pulls is not None:
                staged = {parameter.name for parameter in self._plan.parameters}
                link.post("pull", **pulls.message(self._session, staged))
        link.post("finish")
        check.expect(answer.get("views", {}))  # while the worker finishes
        if pulls is not None:
            link.collect()
        different = check.different(link.collect().get("digests", {}))
        agree(link.error, "sending weights")
        return different

    def _begin(self, version: int, whole: list[str] | None, read: bool) -> Pull | None:
        """Two buffers of at most a bucket, except for weights that some worker's loaders need whole. Collective.
        `whole`: those weights, as this rank's worker has it; None: all.
        `read`: this rank's worker will open the buffers.

        Returns the way by which workers get the parameters that are not in `_plan`, if there is one.
        """
        bound, travelling = self._settings.bucket_bytes, self._parameters
        pulls = self._way if isinstance(self._way, Pull) else None
        if pulls is not None:
            with agreed("exporting the shards"):
                pulls.allow(self._session)
        if pulls is not None or (self._way.cuts and any(p.nbytes > bound for p in travelling)):  # alike on all ranks
            asked = exchange(whole)
            needed = None if None in asked else set().union(*asked)
            if pulls is not None and needed is not None:
                travelling = pulls.others(travelling, needed)
            self._plan = BucketPlan(travelling, bound, needed)
            pulls = None if needed is None else pulls
        with agreed("allocating the staging memory"):
            self._way.begin(version, self._plan, read)
        return pulls

    def _push(self, link: Link, kind: str, plan: BucketPlan) -> list[dict[str, Any]]:
        self.report.nbytes += plan.nbytes
        return push(self._source, plan, self._way, link, kind, self._stamps)

    def _verify(self, link: Link, check: DigestCheck, different: list[str]) -> None:
        """Report what digests found. Weights that workers leave to their loaders are sent again, for those to compare,
        unless they are re-processed: that takes the probe.
        """
        if self._settings.verify == "off":
            return
        if check.undigested and self._plain:
            plan = BucketPlan(check.undigested, self._plan.capacity)  # they may be packed otherwise than among all
            different = different + different_weights(self._push(link, "compare", plan))
        if different and link.error is None:
            link.error = SyncError(
                f"the worker on {self._device_id} does not hold what was sent: {first_names(different)} differ"
            )
        agree(link.error, "verifying weights")
        self.report.verified = self._settings.verify if self._plain else ""

    def _finish(self, link: Link, calls: "list[Future[Any]]") -> None:
        self.report.staging_bytes = 0 if self._way.in_place else BUFFERS * self._plan.capacity
        fewer = isinstance(self._way, Pull) or self._plan.capacity > self._settings.bucket_bytes
        less = self._way.shares or (self._records and fewer)
        # On CUDA the KV cache needs it; on CPU fresh pages cost more than kept ones, unless less will do from now on.
        release = self._device.type == "cuda" or less
        answer = link.ask("end", close=release)
        link.ended = True
        self.staging_opened, self.staging_closed = answer.get("opened", 0), answer.get("closed", 0)
        self.report.messages = link.messages
        agree(link.error, "ending the update")
        with agreed("finishing the update"):
            results = [call.result(self._settings.timeout) for call in calls]
            self._way.finish(release)
            if self._leader is not None:
                (outcomes,) = results
                known = [weights for outcome in outcomes if (weights := outcome.get("unreplayable")) is not None]
                together = {name: why for weights in known for name, why in weights.items()}
                self.report.unreplayable = together if known else None
                found = [set(outcome.get("left_out", [])) for outcome in outcomes]
                self.report.left_out = sorted(set.intersection(*found)) if found else []

    def _fail(self, link: Link, calls: "list[Future[Any]]") -> None:
        """Get the workers out of their receive loops; the engine stays without a version until a complete sync."""
        link.abort()
        wait(calls, ABORT_SECONDS)
        for call in calls:
            call.cancel()
        if self._leader is not None:
            self._leader.engine.state.fail_sync()
        self._way.abort(str(link.error or "another rank failed"))
        self._broken = True

    def _probe(self, policy: VersionedPolicy) -> Probe | None:
        """Where the engine keeps its weights in a layout of its own, and they are to be verified."""
        if self._settings.verify == "off" or self._plain:
            return None
        with self._timed("verify"):
            vocabulary = vocabulary_of(self._parameters) if self._adapter is None else self._adapter.vocabulary
            return draw_probe(policy, vocabulary)


def _raise_if_dead(calls: "list[Future[Any]]") -> None:
    """Called while waiting for a worker: a call that ended early means that the engine, or its worker, is gone."""
    for error in (call.exception() for call in calls if call.done()):
        if error is not None and not isinstance(error, WorkerError):  # what a worker complains of, it tells its rank
            raise SyncError(f"the engine ended during a weight update: {type(error).__name__}: {error}") from error
