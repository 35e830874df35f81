"""Run episodes whose answers grow slice by slice on an engine's loop, driven from the test's thread."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Self, TypeVar

from generation.engine.engine import Leader
from generation.engine.slices import Slices, Turnstile

T = TypeVar("T")
Episode = Callable[[Turnstile], Awaitable[T]]


class Episodes(Generic[T]):
    """Episodes that wait at a closed gate; a context manager that ends unfinished ones."""

    def __init__(self, leader: Leader, tokens: int, episodes: Sequence[Episode[T]]) -> None:
        self.thread, self.slices = leader.thread, Slices(tokens)
        self.turnstiles: list[Turnstile] = []
        self._episodes = episodes
        self._tasks: list[asyncio.Task[T]] = []

    def __enter__(self) -> Self:
        self.thread.run(self._begin(), 60, "the beginning of episodes")
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.run(self._end(), 60, "the end of episodes")

    def one_slice(self, version: int = 0) -> int:
        """Open the gate until all episodes are over or parked; return the number of parked ones."""
        return self.thread.run(self._one_slice(version), 120, "a slice")

    def results(self, version: int = 0) -> list[T]:
        """Open the gate until all episodes are over; return their results."""
        while self.one_slice(version):
            pass
        return [task.result() for task in self._tasks]

    async def _begin(self) -> None:
        self._tasks = [asyncio.ensure_future(self._one(episode)) for episode in self._episodes]
        await self.slices.settled()
        await asyncio.sleep(0)

    async def _one(self, episode: Episode[T]) -> T:
        with self.slices.episode() as turnstile:
            self.turnstiles.append(turnstile)
            return await episode(turnstile)

    async def _one_slice(self, version: int) -> int:
        self.slices.open(version)
        await self.slices.settled()
        self.slices.close()
        return self.slices.parked

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
