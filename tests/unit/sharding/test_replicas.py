"""Replicas that come and go, without Ray: whom requests and weights reach, and what two ranks say to each other."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from generation.engine import ray_replicas as engine_replicas
from generation.engine.engine import Leader, WorkerError
from generation.engine.ray_replicas import ReplicaDied, ReplicatedEngine
from generation.engine.settings import EngineSettings
from generation.engine.thread import EngineThread
from sharding.ranks import RemoteError
from sharding.remote import orders
from sharding.remote.orders import RemoteEngines, Trainers
from sharding.report import SyncReport, SyncSettings
from sharding.send.source import FsdpWeightSource


class Params:
    """The part of `SamplingParams` that a request uses; importing vLLM would change the state for later tests."""

    class Kind(Enum):
        DELTA, FINAL_ONLY = range(2)

    output_kind = Kind.DELTA

    def clone(self) -> "Params":
        return Params()


SETTINGS = SyncSettings(verify="full", timeout=20.0)
RECEIVE = "update_weights_from_collective"


class FakeReplica:
    """Stands for a `Replica`; `dying` names the call in which one dies, `wrong` the call that reports an error."""

    dying: ClassVar[dict[str, str]] = {}
    wrong: ClassVar[dict[str, str]] = {}

    def __init__(self, settings: EngineSettings, name: str) -> None:
        self.name, self.requests, self.dead = name, 0, False
        self.answered: list[dict[str, Any]] = []
        self.placed, self.started = (
            asyncio.ensure_future(self.call(m)) for m in ("__ray_ready__", "start")
        )

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        what = args[0] if method in ("ask_workers", "receive") else method
        if self.dead or self.dying.get(self.name) == what:
            self.dead = True
            raise ReplicaDied(f"{self.name} in {what}")
        if self.wrong.get(self.name) == what:
            raise WorkerError("a weight is missing")
        if method == "request":
            assert args[1].output_kind is Params.Kind.FINAL_ONLY
            self.answered.append(args[0])
            return SimpleNamespace(outputs=[], by=self.name, version=kwargs["policy_version"])
        return {"death": "", "receive": [{"adapter": None}]}.get(method)

    def kill(self) -> None:
        self.dead = True


class Sender:
    """Stands for a `CollectiveSender`: it records each session and the number of workers that it sends to."""

    sent: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, workers: int, host: str, session: int = 0) -> None:
        self.ip, self.port, self.world_size, self.session = host, 1, 1 + workers, session

    def connect(self, calls: list[Any]) -> None:
        if any(call.exception() for call in calls):
            raise RemoteError("connecting the engines")

    def send(self, version: int, calls: list[Any]) -> SyncReport:
        self.session += 1
        self.sent.append((self.world_size - 1, self.session))
        if any(call.exception() for call in calls):
            raise RemoteError("sending weights")
        return SyncReport(version)

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicatedEngine]:
    """Return two replicas, of which one may die."""
    monkeypatch.setattr(engine_replicas, "Replica", FakeReplica)
    monkeypatch.setattr(orders, "cluster_address", str)
    FakeReplica.dying, FakeReplica.wrong, Sender.sent = {}, {}, []
    return ReplicatedEngine(EngineSettings("no model", max_model_len=64), count=2, restarts=1)


@pytest.fixture
def leader(engine: ReplicatedEngine) -> Iterator[Leader]:
    leader = Leader(engine, EngineThread())
    leader.thread.run(engine.start(), 20, "starting")
    yield leader
    leader.thread.close()


def updates(leader: Leader, count: int) -> list[Future[Any]]:
    """Run so many updates, at both ends."""
    store = dist.HashStore()
    source = FsdpWeightSource([("embed", torch.zeros(5, 2))], torch.float32)
    train = RemoteEngines(source, torch.device("cpu"), SETTINGS, range(1, 2), store)
    train._new_sender = Sender  # type: ignore[assignment]
    generate = Trainers(leader, store, 1, SETTINGS)

    def send() -> None:
        for version in range(count):
            train._bring(version)
            train._tell("probe", probe=None)

    ends = [send, lambda: [generate.receive(version) for version in range(count)]]
    with ThreadPoolExecutor(2) as pool:
        return [pool.submit(end) for end in ends]


@pytest.mark.parametrize("call", ["init_collective", RECEIVE])
def test_an_update_starts_again_with_the_engines_left_and_those_newly_started(
    leader: Leader, engine: ReplicatedEngine, call: str
) -> None:
    FakeReplica.dying = {"engine 0": call}
    for end in updates(leader, 2):
        end.result()
    assert {member.name for member in engine.members} == {"engine 1", "engine 2"}
    # A number is never used twice, by whichever group: vLLM keeps adapters by their number.
    expected = [(2, 1), (2, 2)] if call == "init_collective" else [(2, 1), (2, 2), (2, 3)]
    assert [(workers, session) for workers, session in Sender.sent] == expected
    assert engine.state.version == 1


def test_an_error_of_a_living_worker_is_raised_on_both_ranks(leader: Leader) -> None:
    FakeReplica.wrong = {"engine 1": RECEIVE}
    train, generate = updates(leader, 1)
    assert isinstance(train.exception(), RemoteError)
    with pytest.raises(WorkerError, match="a weight is missing"):
        generate.result()


def test_requests_of_a_replica_that_dies_are_answered_once_by_another(
    leader: Leader, engine: ReplicatedEngine
) -> None:
    for end in updates(leader, 1):
        end.result()
    FakeReplica.dying = {"engine 1": "request"}

    params: Any = Params()

    async def ask(number: int) -> Any:
        prompt = {"prompt_token_ids": [number]}
        return [output async for output in engine.submit(prompt, params, str(number))]

    async def ask_all() -> list[Any]:
        return [output for [output] in await asyncio.gather(*(ask(number) for number in range(8)))]

    answers = leader.thread.run(ask_all(), 20, "asking")
    assert {answer.by for answer in answers} == {"engine 0"} and {
        answer.version for answer in answers
    } == {0}
    [left] = engine.members
    asked = [prompt["prompt_token_ids"][0] for prompt in left.answered]  # type: ignore[attr-defined]
    assert sorted(asked) == list(range(8)) and left.requests == 0
    assert leader.thread.run(engine.join(), 20, "joining") and len(engine.members) == 2


def test_one_death_more_than_engine_restarts_ends_it(leader: Leader) -> None:
    FakeReplica.dying = {"engine 0": RECEIVE, "engine 1": RECEIVE}
    for end in updates(leader, 1):
        with pytest.raises(
            RuntimeError, match=r"2 replicas have died within an hour, more than engine\.restarts=1"
        ):
            end.result()
