"""Orders and weights from the ranks that train to ranks that only generate, or hold replicas that
generate.

Rank 0 announces each order through the run's store, and the weights follow by broadcast
(`sharding.remote.broadcast`). The sequence of orders is a function of the step: nothing is queued,
and nothing depends on which rank is faster.

Before each update the engines' ranks report whether workers have come or gone. If so, all workers
join a new group. If a replica is lost while weights travel, the update begins again with the
remaining ones.
"""

import math
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from generation.engine.engine import Engine, Leader
from generation.engine.ray_cluster import cluster_address
from generation.engine.ray_replicas import ReplicatedEngine
from sharding.ranks import RemoteError, agreed, exchange, is_main, rank
from sharding.remote.broadcast import TRAIN_WORLD_SIZE, CollectiveSender
from sharding.report import AdapterFormat, SyncReport, SyncSettings
from sharding.send.source import WeightSource
from sharding.tenants import Tenant, VersionedPolicy
from sharding.verify import check_probe
from sharding.wire.channel import SyncError
from sharding.wire.group import GroupStore, StoreChannel, own_address


def _line(store: dist.Store, number: int, outwards: bool) -> StoreChannel:
    """Return one end of the conversation between rank 0 and rank `number` of the run."""
    there = f"apart/to/{number}"
    back = f"apart/from/{number}"
    boxes = (there, back) if outwards else (back, there)
    return StoreChannel(GroupStore(store, "the run's store"), *boxes)


class PendingCall:
    """A call under way of an engine on another rank, with the methods of a future that
    `CollectiveSender` uses.
    """

    def __init__(self, line: StoreChannel, number: int, timeout: float) -> None:
        """Wait at `line` for the end of the call on the rank with this `number` in the run, for at
        most `timeout` seconds.
        """
        self._line = line
        self._number = number
        self._timeout = timeout
        self._end: dict[str, Any] | None = None

    def done(self) -> bool:
        """Return True if the rank has reported the end of the call."""
        return self._end is not None or self._line.waiting()

    def exception(self) -> Exception | None:
        """Wait for the end of the call, and return the rank's error as a SyncError, or None. Raises
        TimeoutError if the rank does not report in time.
        """
        self._end = self._end or self._line.receive(
            self._timeout, f"answer of rank {self._number}, which generates"
        )
        error = self._end.get("error")
        return SyncError(f"rank {self._number}, which generates: {error}") if error else None

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end of the call. Raises SyncError if it has failed on the rank."""
        if error := self.exception():
            raise error


class RemoteEngines:
    """The engines of other ranks. Ranks that train use it where they would use a `ShardingManager`
    for engines of their own:

        engines = RemoteEngines(source, device, settings, ranks, store)
        with engines.generation_shift(policy):
            version = engines.begin("sample", ...)  # the order, then the weights, verified
            ...  # receives the answers
        engines.close()

    Attributes: report: about the latest update; a shift may have none. then: called once when the
        shift is over and nothing has failed, before the policy changes.
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        settings: SyncSettings,
        ranks: range,
        store: dist.Store,
        host: str = "127.0.0.1",
        adapter: AdapterFormat | None = None,
    ) -> None:
        """Prepare to send weights to the engines on `ranks`, which are the numbers in the run of
        those that do not train. Rank 0 listens on `host` for their workers. `adapter`: the format,
        if the weights of `source` are the factors of an adapter.
        """
        self._timeout = settings.timeout
        self._ranks = ranks
        self._host = host
        self._lines = [_line(store, number, outwards=True) for number in ranks] if is_main() else []
        self._new_sender = partial(CollectiveSender, source, device, settings, adapter=adapter)
        self._sender: CollectiveSender | None = None
        self._policy: VersionedPolicy | None = None
        self.report = SyncReport(version=-1)
        self.then: Callable[[], None] | None = None

    @contextmanager
    def generation_shift(self, policy: VersionedPolicy, *tenants: Tenant) -> Iterator[None]:
        """Keep the policy for the block, in which `begin` sends its weights. No memory is moved."""
        self._policy = policy
        self.report = SyncReport(policy.version, unpatched=self.report.unpatched)
        yield
        self.sleep()

    def begin(self, kind: str, **order: Any) -> int:
        """Give the engines an order, send them the policy's weights, and verify these. Return the
        version of the weights: an engine carries out the order with this version only. Collective
        among training ranks.
        """
        policy = self._policy
        assert policy is not None
        # The order comes first, since it announces the version of the weights that follow.
        self._tell(kind, version=policy.version, **order)
        report = self._bring(policy.version)
        # A note stays until an update has another.
        report.unpatched = report.unpatched or self.report.unpatched
        self.report = report
        # The engines wait for a probe, or for None, before they carry out the order.
        assert self._sender is not None
        probe = self._sender.probe(policy)
        if probe is not None:
            report.verified = "probe"
        self._tell("probe", probe=probe)
        return policy.version

    def _tell(self, kind: str, **fields: Any) -> None:
        for line in self._lines:
            line.send(kind, **fields)

    def _bring(self, version: int) -> SyncReport:
        """Update all engines to `version`. Repeat it if replicas were lost and others are left."""
        while True:
            # Workers that have joined or gone need a new group before the update.
            members = self._hear("members")
            try:
                sender = self._sender
                if any(member["joined"] for member in members):
                    sender = self._gather(members)
                assert sender is not None
                return sender.send(version, self._calls())
            except RemoteError:
                if not (members[0]["replaceable"] and self._hear("settled")[0]["again"]):
                    raise

    def _gather(self, members: list[dict[str, Any]]) -> CollectiveSender:
        """Form a new group of rank 0 and all workers. Sessions continue to count: vLLM keeps
        adapters by these numbers.
        """
        session = 0
        if self._sender is not None:
            self._sender.close()
            session = self._sender.session
        far, _, port = members[0]["reached_from"].rpartition(":")
        host = own_address(far, int(port)) if far else self._host
        workers = sum(member["workers"] for member in members)
        sender = self._sender = self._new_sender(workers=workers, host=host, session=session)
        self._tell("group", address=[sender.ip, sender.port, sender.world_size])
        joining = self._calls()
        sender.connect(joining)
        with agreed("joining the weights group"):
            for call in joining:
                call.result()
        return sender

    def _calls(self) -> list[Any]:
        """Return the pending calls of all engines for their next request."""
        return [
            PendingCall(line, n, self._timeout)
            for line, n in zip(self._lines, self._ranks, strict=False)
        ]

    def _hear(self, kind: str) -> list[dict[str, Any]]:
        """Return the next message of this kind from each line, skipping those of a failed update.
        Collective.
        """
        messages: list[dict[str, Any]] = []
        with agreed("hearing of the engines"):
            for line in self._lines:
                while (message := line.receive(math.inf, f"word of {kind}"))["kind"] != kind:
                    pass
                if error := message.get("error"):
                    raise SyncError(error)
                messages.append(message)
        return exchange(messages)[0]  # type: ignore[no-any-return]

    def sleep(self) -> None:
        """End the shift. Engines on other devices stay awake."""
        then = self.then
        self.then = None
        if then is not None:
            then()

    def close(self) -> None:
        """Release the ranks that generate; never raises."""
        with suppress(SyncError):  # the store has gone, and with it they
            self._tell("end", failed=sys.exception() is not None)
        if self._sender is not None:
            self._sender.close()


class Trainers:
    """A generating rank's end of the conversation with rank 0 of those that train:

    trainers = Trainers(leader, store, number, settings)
    while (order := trainers.hear())["kind"] != "end":
        trainers.receive(order["version"])
        ...  # carries out the order
    """

    def __init__(
        self, leader: Leader | None, store: dist.Store, number: int, settings: SyncSettings
    ) -> None:
        """Take this rank's `number` in the run."""
        self._leader = leader
        self._timeout = settings.timeout
        self._line = _line(store, number, outwards=False)
        engine = None if leader is None else leader.engine
        self._replicas = engine if isinstance(engine, ReplicatedEngine) else None
        self._joined = False

    def hear(self) -> dict[str, Any]:
        """Return the next order: its `kind`, the `version` of the weights that follow, and the
        fields given to `begin`.
        """
        return self._line.receive(math.inf, "order of the ranks that train")

    def receive(self, version: int) -> None:
        """Bring the engine to exactly this version of the weights, or raise."""
        while not self._take(version):
            pass
        probe = self._line.receive(self._timeout, "probe of the weights")["probe"]
        if probe is not None and self._leader is not None:
            check_probe(self._leader, probe, self._timeout)

    def _take(self, version: int) -> bool:
        """Receive one update, before which new workers join a group. Return False if it has to
        begin again with other replicas.
        """
        method = "update_weights_from_collective"
        timeout = self._timeout
        with self._telling("members") as members:
            members |= self._members()
        try:
            if members["joined"]:
                address = self._line.receive(timeout, "place of the weights group")["address"]
                self._do("joining the weights group", lambda engine: self._join(engine, address))
            self._do(
                "receiving weights", lambda engine: engine.receive(method, timeout, version=version)
            )
        except Exception:
            if self._replicas is None or self._leader is None:
                raise
            with self._telling("settled") as end:
                end["again"] = self._leader.thread.run(
                    self._replicas.settle(), timeout, "looking after the replicas"
                )
            if not end["again"]:
                raise
            return False
        return True

    def _members(self) -> dict[str, Any]:
        """Describe the workers of this rank: whether some have `joined` or gone since the last
        call, how many `workers` there are, whether its engines are `replaceable`, and
        `reached_from`, an address that all of them can reach.
        """
        if self._replicas is None or self._leader is None:
            joined = not self._joined
            self._joined = True
            return {"joined": joined, "workers": 1, "replaceable": False, "reached_from": ""}
        joined = self._leader.thread.submit(self._replicas.join()).result()
        workers = len(self._replicas.members) * self._replicas.settings.tensor_parallel_size
        return {
            "joined": joined,
            "workers": workers,
            "replaceable": True,
            "reached_from": cluster_address(),
        }

    def _join(self, engine: Engine, address: list[Any]) -> Coroutine[Any, Any, Any]:
        ip, port, world_size = address
        if self._replicas is not None:
            return self._replicas.join_group(ip, port, world_size, TRAIN_WORLD_SIZE, self._timeout)
        return engine.ask_workers(
            "init_collective", rank(), ip, port, world_size, TRAIN_WORLD_SIZE, self._timeout
        )

    def _do(self, what: str, action: Callable[[Engine], Coroutine[Any, Any, Any]]) -> None:
        """Run an action on the engine, and report its end, or its error, to rank 0, which waits for
        it.
        """
        with self._telling("done"):
            if self._leader is not None:
                self._leader.thread.run(action(self._leader.engine), self._timeout, what)

    @contextmanager
    def _telling(self, kind: str) -> Iterator[dict[str, Any]]:
        """Send rank 0 the message that the block fills, or the block's error."""
        message: dict[str, Any] = {}
        try:
            yield message
        except Exception as error:
            self._line.send(kind, error=f"{type(error).__name__}: {error}")
            raise
        self._line.send(kind, **message)
