"""The times at which a run saves, and at which it ends: one rank, with a writer that only takes notes."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config.schema import CheckpointConfig
from trainer.run import keeper as module
from trainer.run import processes
from trainer.run.keeper import Keeper, RunState, late_to_leave


class Notes:
    """Stands for `CheckpointWriter`, and records its calls."""

    def __init__(self, *_: object) -> None:
        self.calls: list[Any] = []
        self.failed = False

    def save(
        self, step: int, _: object, extra: dict[str, Any], metrics: dict[str, float], carried: bytes
    ) -> None:
        assert extra["state"]["step"] == step and extra["identity"] == {"data": "rows"}
        assert carried == b""
        self.calls.append((step, metrics))

    def wait(self) -> None:
        self.calls.append("wait")
        if self.failed:
            raise OSError(28, "No space left on device")


class Run:
    """A keeper and everything it needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int = 0, **checkpoint: Any) -> None:
        self.notes, self.state = Notes(), RunState(step=step)
        monkeypatch.setattr(module, "CheckpointWriter", lambda *_: self.notes)
        monkeypatch.setattr(processes, "interrupt_now", lambda: self.notes.calls.append("left"))
        settings = SimpleNamespace(**({"every": 2, "grace_s": 60.0, "resume": "auto"} | checkpoint))
        run = SimpleNamespace(folder=Path("run"), first_step_deadline_s=1)
        self.watchdog = SimpleNamespace(called_at=None)
        config = SimpleNamespace(checkpoint=settings, run=run)
        self.keeper = Keeper(config, self.watchdog, self.state, {}, {"data": "rows"})  # type: ignore[arg-type]

    def steps(self, count: int) -> list[Any]:
        """Run this many steps; return the calls of the writer."""
        self.notes.calls.clear()
        for _ in range(count):
            self.state.step += 1
            self.keeper.step_done({"loss": float(self.state.step)})
        return self.notes.calls


def test_every_so_many_steps_and_at_the_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    assert run.steps(5) == [(2, {"loss": 2.0}), (4, {"loss": 4.0})]
    run.keeper.finish()
    run.keeper.finish()
    assert run.notes.calls[2:] == [(5, {"loss": 5.0}), "wait", "wait"]


@pytest.mark.parametrize(("resume", "saved"), [("auto", []), ("runs/other/step_4", [(4, {})])])
def test_a_finished_run_that_is_started_again_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, resume: str, saved: list[Any]
) -> None:
    run = Run(monkeypatch, step=4, resume=resume)
    run.keeper.finish()
    assert run.notes.calls == [*saved, "wait"]


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_that_is_asked_to_end_saves_after_the_step_and_ends(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    run = Run(monkeypatch, every=every)
    run.steps(2)
    run.watchdog.called_at = 0.0  # by any rank's watchdog
    assert run.steps(1) == [(3, {"loss": 3.0}), "wait", "left"]


def test_an_abandoned_step_is_saved_as_the_step_before_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.steps(3)
    run.notes.calls.clear()
    run.keeper.leave()
    assert run.notes.calls == [(3, {"loss": 3.0}), "wait", "left"]


def test_a_checkpoint_that_could_not_be_written_ends_the_step_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    run.steps(2)
    # Another rank's
    monkeypatch.setattr(module, "all_reduce_max", lambda values: values | {"failed": 1.0})
    run.notes.failed = True
    with pytest.raises(OSError, match="No space left"):
        run.steps(1)


def test_rollouts_are_given_up_after_half_of_the_grace_period() -> None:
    settings = CheckpointConfig(grace_s=60.0)
    answers = []
    for seconds in (0.0, 29.0, 31.0):
        watchdog: Any = SimpleNamespace(called_for=partial(float, seconds))
        answers.append(late_to_leave(settings, watchdog))
    assert answers == [False, False, True]
