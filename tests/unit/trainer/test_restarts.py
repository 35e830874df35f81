"""The failures that restart engines, the ranks that restart them, and the limit on restarts. Without an engine."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generation.engine.engine import Engine
from generation.engine.lifecycle import EngineLifecycle, Memory
from generation.engine.settings import EngineSettings
from sharding.ranks import RemoteError, agreed, rank
from tests.support.learning_steps import on_ranks
from tests.support.recipes import make_config
from trainer import restarts as module
from trainer.errors import UserError
from trainer.restarts import EngineRestarts
from trainer.rollouts.pool import StepAbandoned
from trainer.run.watchdog import Watchdog


class DyingEngine:
    """A leader and its engine in one, which reports one of `deaths` each time it is asked, in order."""

    def __init__(self, deaths: list[str], starts: list[Exception | None] | None = None) -> None:
        self.deaths, self.starts, self.calls = deaths, starts or [], list[str]()
        self.is_closed, self.engine, self.thread = False, self, self
        self.state, self.settings = EngineLifecycle(), EngineSettings("none", 64)

    async def sleep(self, level: int) -> None:
        if self.deaths:
            raise RuntimeError("the engine is dead")
        self.state.sleep(keeps_weights=level == 1)
        self.calls.append(f"sleep {level}")

    async def death(self) -> str:
        return self.deaths.pop(0) if self.deaths else ""

    def run(self, coroutine: Coroutine[Any, Any, str], timeout: float, what: str) -> str:
        return asyncio.run(coroutine)

    def close(self) -> None:
        self.calls.append("close")
        self.is_closed = True

    def start_again(self, timeout: float) -> None:
        self.calls.append("start")
        if self.starts and (error := self.starts.pop(0)):
            raise error
        self.is_closed = False


class FakeManager:
    """The part of a sharding manager that restarts use."""

    def __init__(self, engine: DyingEngine | None) -> None:
        self.engine, self.tenants = engine, list[Any]()

    def restart(self, start: Any, *tenants: Any) -> None:
        self.tenants += tenants
        with agreed("starting the engine again"):
            start()

    def sleep(self) -> None:
        self.tenants.append("asleep")


class Phases:
    """Stands for the phases of a watchdog."""

    aside = Watchdog.aside
    phase = Watchdog.phase
    current_phase = Watchdog.current_phase
    called_at: float | None = None
    _device = "cpu"

    def __init__(self) -> None:
        self._phases: tuple[Any, ...] = ()

    def _arm(self) -> None:
        """Start no timer."""


def restarts(engine: DyingEngine | None, device: str = "cpu", **sections: Any) -> EngineRestarts:
    manager = EngineRestarts(make_config(**sections), torch.device(device), Phases())  # type: ignore[arg-type]
    manager._leader = engine  # type: ignore[assignment]
    manager.sharding = FakeManager(engine)  # type: ignore[assignment]
    return manager


def test_the_fourth_death_within_an_hour_ends_the_run_with_the_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = DyingEngine([f"its process {number} has ended" for number in range(6)])
    again, failure = restarts(engine), RemoteError("phase rollout failed on rank 0")
    clock = iter([0.0, 100.0, 3500.0, 3650.0, 3699.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for _ in range(4):  # the first is over an hour ago when the fourth comes
        again.after(failure, "policy")  # type: ignore[arg-type]
    assert engine.calls == ["close", "start"] * 4 and again.sharding.tenants == ["policy"] * 4  # type: ignore[attr-defined]
    with pytest.raises(
        RemoteError, match="4 engines have died within an hour, more than engine.restarts=3 allows"
    ) as caught:
        again.after(failure, "policy")  # type: ignore[arg-type]
    for number in (1, 2, 3, 4):
        assert f"the engine of rank 0: its process {number} has ended" in str(caught.value)
    assert str(failure) in str(caught.value) and "process 0" not in str(caught.value)


def test_a_failure_of_which_no_engine_has_died_ends_the_run_as_it_is() -> None:
    engine = DyingEngine([])
    failure = RemoteError("phase rollout failed on rank 0: RewardError")
    failure.__cause__ = UserError("the reward")
    with pytest.raises(RemoteError) as caught:
        restarts(engine).after(failure)
    assert caught.value is failure and isinstance(failure.__cause__, UserError) and engine.calls == []


def test_only_the_dead_engine_starts_again_and_all_ranks_go_along() -> None:
    """The engine starts twice, since the first start fails; of four ranks the first and the third lead."""

    def one() -> tuple[list[str], list[Any]]:
        deaths = {0: [], 2: ["gone", "it was not started"]}
        engine = (
            DyingEngine(deaths[rank()], [RuntimeError("killed"), None]) if rank() in deaths else None
        )
        again = restarts(engine)
        again.after(RemoteError("a failure"), "policy")  # type: ignore[arg-type]
        assert len(again._deaths) == 2
        return engine.calls if engine else [], again.sharding.tenants  # type: ignore[attr-defined]

    results = on_ranks(4, one)
    assert [calls for calls, _ in results] == [[], [], ["close", "start", "close", "start"], []]
    assert [tenants for _, tenants in results] == [["policy", "policy"]] * 4


def test_a_run_that_is_asked_to_end_starts_none_and_keeps_its_policy() -> None:
    engine = DyingEngine(["gone"])
    again = restarts(engine)
    again._watchdog.called_at = 1.0
    with pytest.raises(StepAbandoned):
        again.after(RemoteError("a failure"), "policy", may_leave=True)  # type: ignore[arg-type]
    assert engine.calls == ["close"] and again.sharding.tenants == ["asleep"]  # type: ignore[attr-defined]


def test_weights_that_were_the_dead_engine_s_end_the_run() -> None:
    engine = DyingEngine(["gone"])
    with pytest.raises(
        RemoteError, match="with sync.way: zero_copy, the policy's weights were lost with the engine"
    ):
        restarts(engine, "cuda", sync={"way": "zero_copy"}).after(RemoteError("a failure"))
    assert "start" not in engine.calls


@pytest.mark.parametrize("codes", [{"EngineCore": -9}, {"EngineCore": 1}])
def test_a_first_start_is_repeated_where_a_signal_has_ended_it(
    monkeypatch: pytest.MonkeyPatch, codes: dict[str, int]
) -> None:
    """The text is vLLM's (vllm/v1/engine/utils.py)."""
    error = RuntimeError(
        f"Engine core initialization failed. See root cause above. Failed core proc(s): {codes}"
    )
    engine = DyingEngine([])
    outcomes: list[Any] = [error, engine]

    def start(config: Any, on_cuda: bool) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(module, "start_engine", start)
    if codes["EngineCore"] < 0:
        assert restarts(None).first_start() is engine  # type: ignore[comparison-overlap]
    else:
        with pytest.raises(RemoteError, match="Failed core proc"):
            restarts(None).first_start()


@pytest.mark.parametrize(
    ("settings", "level"),
    [({}, 2), ({"lora_rank": 4}, 1), ({"shared_weights": True}, 1), ({"sleep": False}, None)],
)
def test_a_started_engine_is_asleep_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], level: int | None
) -> None:
    """At the level of all later shifts; without sleep mode nothing happens, and a second time nothing either."""
    engine = DyingEngine([])
    engine.settings = EngineSettings("none", 64, **settings)
    if level is None:
        monkeypatch.setattr(engine, "sleep", partial(Engine.sleep, engine))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "start_engine", lambda *_: engine)
    again = restarts(None)
    assert again.first_start() is again.first_start() is engine  # type: ignore[comparison-overlap]
    assert engine.calls == ([] if level is None else [f"sleep {level}"])
    assert engine.state.memory is (Memory.AWAKE if level is None else Memory.ASLEEP)


def test_an_engine_that_dies_before_it_sleeps_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DyingEngine(["its process 7 has ended"])
    monkeypatch.setattr(module, "start_engine", lambda *_: engine)
    again = restarts(None)
    assert again.first_start() is engine  # type: ignore[comparison-overlap]
    assert engine.calls == ["close", "start", "sleep 2"] and len(again._deaths) == 1


def test_a_restart_does_not_count_for_the_step_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.run import watchdog

    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    phases = Phases()
    with phases.phase("step 3", 60):  # type: ignore[misc]
        now[0] = 20.0
        with phases.aside("starting the engine again", 600):  # type: ignore[misc]
            assert [phase.name for phase in phases._phases] == ["starting the engine again"]
            now[0] = 500.0
        [step] = phases._phases
        assert now[0] - step.since == 20.0
