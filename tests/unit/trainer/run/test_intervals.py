"""The interval of `checkpoint.every: auto`, compared with the least expected time, and after earlier sessions."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.run import intervals as module
from trainer.run.intervals import Intervals, best_interval


def expected_time(interval: float, cost: float, apart: float) -> float:
    """Returns seconds for each second of training, when failures come at random and lose unsaved work (Daly, 2006)."""
    return apart * math.expm1((interval + cost) / apart) / interval


@pytest.mark.parametrize("cost", [0.1, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("apart", [600.0, 3600.0, 86_400.0])
def test_the_interval_takes_the_least_time(cost: float, apart: float) -> None:
    least = min((1.01**n for n in range(-300, 1000)), key=lambda seconds: expected_time(seconds, cost, apart))
    interval = best_interval(cost, apart)
    assert expected_time(interval, cost, apart) <= 1.003 * expected_time(least, cost, apart)
    assert best_interval(2 * apart, apart) == apart


def test_a_run_saves_at_once_then_by_its_cost_and_more_often_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    intervals: list[float] = []
    for session in range(4):
        schedule = Intervals(tmp_path, ranks=8)
        assert schedule.is_over()
        schedule.saved(10.0)
        began = clock[0]
        while not schedule.is_over():
            clock[0] += 1.0
        intervals.append(clock[0] - began)
        schedule.saved(10.0)
        if session == 1:
            schedule.note("end")  # as SIGTERM and the last step do
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write('{"what": "sa')
    seen = sum(intervals)
    assert intervals[0] == math.ceil(best_interval(10, 86_400 + intervals[0]))
    assert (
        intervals[0] > intervals[1]
        and intervals[1] <= intervals[2] < intervals[1] * 1.02
        and intervals[3] < intervals[2]
    )
    assert Intervals(tmp_path, ranks=8).between_failures == pytest.approx((86_400 + seen) / 4)
    assert Intervals(tmp_path / "large", ranks=16_384).between_failures == pytest.approx(50_000 * 3600 / 16_384)
