"""Eight engines share a step's prompts evenly, however far one is ahead of the others, unless it is done sooner."""

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.thread import EngineThread
from generation.exact_ids import Generation
from generation.rollouts.episode import one_shot
from generation.rollouts.episodes import RolloutSettings
from trainer.data import Prompt
from trainer.rollouts.pool import Pool, Terms

ENGINES, GROUP = 8, 8
SKEW, LATENCY = 0.005, 0.0002


class SlowStore:
    """The store of the ranks as rollouts use it, 200 µs away. `claimed` is set when nothing is left to claim."""

    def __init__(self, count: int) -> None:
        self._lock, self._next, self._count = threading.Lock(), 0, count
        self.claimed = threading.Event()

    def add(self, key: str, amount: int) -> int:
        time.sleep(LATENCY)
        with self._lock:
            self._next += amount
            if self._next >= self._count:
                self.claimed.set()
            return self._next

    def check(self, keys: list[str]) -> bool:
        return False  # no engine has failed


class ClaimingEngine:
    """An engine that answers at once, or, if it waits, when nothing is left to claim."""

    def __init__(self, store: SlowStore, waits: bool) -> None:
        self.settings, self.not_finite = SimpleNamespace(max_num_seqs=512, max_model_len=64), None
        self.state = SimpleNamespace(check_can_generate=lambda version: None)
        self._store, self._waits = store, waits

    async def complete(self, prompt_ids: list[int], *_: Any, **__: Any) -> Generation:
        if self._waits:
            assert await asyncio.to_thread(self._store.claimed.wait, 60)
        return Generation([7], [-1.0], "stop")


def claimed_by_engine(prompts: int, waiting: list[bool], late: bool = False) -> list[int]:
    """Return the number of prompts of a step that each of eight engines takes, each on its own event loop.

    `late`: the last engine begins when nothing is left.
    """
    store = SlowStore(prompts)
    plan = SimpleNamespace(function=one_shot, messages=lambda prompts: None, image_rules=None)
    tokenizer, rewards = (
        SimpleNamespace(decode=lambda *_, **__: ""),
        SimpleNamespace(labels=[], take_counts=dict, check_error_rate=lambda counts: None),
    )
    asked = [Prompt(index, (3, 4), {}) for index in range(prompts)]

    def take(number: int) -> int:
        thread = EngineThread()
        leader = Leader(ClaimingEngine(store, waiting[number]), thread)  # type: ignore[arg-type]
        pool = Pool(leader, tokenizer, rewards, store, plan, ENGINES)  # type: ignore[arg-type]
        if late and number == ENGINES - 1:
            assert store.claimed.wait(60)
        time.sleep(number * SKEW)
        done = pool.run(asked, RolloutSettings(GROUP, SamplingSettings(1), 0, 0, 1), Terms(60))
        thread.close()
        samples = Counter(trajectory.prompt_index for trajectory in done)
        assert set(samples.values()) == {GROUP} or not samples
        return len(samples)

    with ThreadPoolExecutor(ENGINES) as pool:
        return list(pool.map(take, range(ENGINES)))


@pytest.mark.parametrize("prompts", [256, 61, 8])
def test_an_engine_takes_no_more_than_its_share_while_nothing_is_finished(prompts: int) -> None:
    taken = claimed_by_engine(prompts, [True] * ENGINES)
    assert sum(taken) == prompts
    assert max(taken) * GROUP <= prompts * GROUP / ENGINES + GROUP


def test_an_engine_that_has_finished_its_share_takes_more() -> None:
    taken = claimed_by_engine(64, [False] + [True] * (ENGINES - 1), late=True)
    assert sum(taken) == 64 and taken[-1] == 0
    assert taken[0] >= 16 > 8 >= max(taken[1:])
