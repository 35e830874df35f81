"""How often `checkpoint.every: auto` saves, against the least expected time, and what it makes of earlier sessions."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.run import intervals as module
from trainer.run.intervals import Intervals, best_interval


def expected_time(interval: float, cost: float, apart: float) -> float:
    """Seconds for each second of training, when failures come at random and lose what was not saved (Daly, 2006)."""
    return apart * math.expm1((interval + cost) / apart) / interval


@pytest.mark.parametrize("cost", [0.1, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("apart", [600.0, 3600.0, 86_400.0])
def test_the_interval_takes_the_least_time(cost: float, apart: float) -> None:
    least = min((1.01**n for n in range(-300, 1000)), key=lambda each: expected_time(each, cost, apart))
    found = best_interval(cost, apart)
    assert expected_time(found, cost, apart) <= 1.003 * expected_time(least, cost, apart)
    assert best_interval(2 * apart, apart) == apart


def test_a_run_saves_at_once_then_by_its_cost_and_more_often_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found: list[float] = []
    for session in range(4):
        own = Intervals(tmp_path, ranks=8)
        assert own.is_over()
        own.saved(10.0)
        began = clock[0]
        while not own.is_over():
            clock[0] += 1.0
        found.append(clock[0] - began)
        own.saved(10.0)
        if session == 1:
            own.note("end")  # as SIGTERM and the last step do
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write('{"what": "sa')
    seen = sum(found)
    assert found[0] == math.ceil(best_interval(10, 86_400 + found[0]))
    assert found[0] > found[1] and found[1] <= found[2] < found[1] * 1.02 and found[3] < found[2]
    assert Intervals(tmp_path, ranks=8).between_failures == pytest.approx((86_400 + seen) / 4)
    assert Intervals(tmp_path / "large", ranks=16_384).between_failures == pytest.approx(50_000 * 3600 / 16_384)
