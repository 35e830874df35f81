"""Rollouts that are given up, since there is too little time left before the run has to end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from generation.engine.engine import Leader
from generation.engine.thread import EngineThread
from generation.rollouts.episodes import RolloutSettings
from trainer.rollouts.pool import Pool, StepAbandoned, Terms, unless


async def endless(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


def test_work_is_cancelled_when_it_is_given_up() -> None:
    ended: list[str] = []
    assert asyncio.run(unless(lambda: True, endless(ended))) is None
    looks = iter([False, False, True])
    assert asyncio.run(unless(lambda: next(looks), endless(ended))) is None
    assert ended == ["cancelled"]  # the first had not begun


def test_work_that_is_done_gives_its_result_or_its_error() -> None:
    async def answer(value: int) -> int:
        await asyncio.sleep(0)
        return 6 // value

    assert asyncio.run(unless(lambda: False, answer(2))) == 3
    with pytest.raises(ZeroDivisionError):
        asyncio.run(unless(lambda: False, answer(0)))


def test_a_step_is_abandoned_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = EngineThread()
    leader: Any = Leader(SimpleNamespace(not_finite=None), thread)  # type: ignore[arg-type]
    pool = Pool(leader, None, None, HashStore(), SimpleNamespace())  # type: ignore[arg-type]
    ended: list[str] = []
    monkeypatch.setattr(pool, "_sample", lambda *_: endless(ended))
    settings = RolloutSettings(1, None, 0, 0, step=7)  # type: ignore[arg-type]
    looks = iter([False, True])
    with pytest.raises(StepAbandoned, match="the rollouts of step 7 were given up"):
        pool.run([], settings, Terms(120, lambda: next(looks)))
    assert ended == ["cancelled"]
    thread.close()
