"""Answers sampled in slices of a fixed number of tokens, which wait at a gate between slices, outside of vLLM.

A slice is an ordinary request with a smaller `max_tokens`; the next one asks for the prompt and all tokens so far. An
answer is cut by its own tokens alone, never by the clock. With noise that is keyed by position
(`EngineSettings.keyed_noise`) the same tokens are sampled however often it is cut; other weights may take over in
between. Nothing here is for threads: it runs on the engine's event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from generation.exact_ids import Generation
from generation.trajectory import checked_versions, merged_versions


@dataclass
class Unfinished:
    """An unfinished answer, with everything that any engine needs to continue it.

    Attributes:
        seed: of its requests.
        budget: the tokens that the whole answer may have.
        logprobs: of `token_ids`, each under the version that sampled it.
        versions: as of `Trajectory`, counted from the first of `token_ids`; empty where there are none yet.
        opening: the opening of the gate in which it grew last.
    """

    prompt_ids: list[int]
    seed: int
    budget: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    opening: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        place = f"an unfinished answer to a prompt of {len(self.prompt_ids)} tokens"
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{place}: {len(self.token_ids)} tokens, but {len(self.logprobs)} log-probabilities")
        if len(self.token_ids) >= self.budget:
            raise ValueError(f"{place} has {len(self.token_ids)} of {self.budget} tokens: it is finished")
        if self.token_ids or self.versions:
            self.versions = checked_versions(self.versions, len(self.token_ids), place)

    @property
    def left(self) -> int:
        """The number of tokens that the answer may still get."""
        return self.budget - len(self.token_ids)

    def add(self, part: Generation) -> None:
        """Appends one slice."""
        if part.token_ids:
            self.versions = merged_versions([*self.versions, (part.weight_version, len(self.token_ids))])
        self.token_ids = self.token_ids + part.token_ids
        self.logprobs = self.logprobs + part.logprobs

    def finished(self, reason: str) -> Generation:
        """Returns the complete answer, as if it had been one request."""
        return Generation(self.token_ids, self.logprobs, reason, prompt_ids=self.prompt_ids, versions=[*self.versions])


class Slices:
    """The gate: while it is open, each answer may grow by `tokens`, and waits then until it is opened again.

    Attributes:
        version: of the weights that answers go on with; None while the gate is closed.
        opening: how often it has been opened.
    """

    def __init__(self, tokens: int) -> None:
        """Creates a closed gate. Raises ValueError unless a slice has at least one token."""
        if tokens < 1:
            raise ValueError(f"slice_tokens must be at least 1, not {tokens}")
        self.tokens = tokens
        self.version: int | None = None
        self.opening = 0
        self._episodes: dict[Turnstile, None] = {}  # in the order in which they began
        self._busy: set[Turnstile] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, version: int) -> None:
        """Lets every parked answer go on for one slice, with weights of `version`, and new answers begin."""
        self.version = version
        self.opening += 1
        for turnstile in self._episodes:
            turnstile.release()

    def close(self) -> None:
        """Closes the gate. Running requests are not interrupted: `settled` waits for them."""
        self.version = None

    @contextmanager
    def episode(self, room: asyncio.Semaphore | None = None) -> "Iterator[Turnstile]":
        """Around all of an episode, which is counted from here on; its place in `room` is free while it is parked."""
        turnstile = Turnstile(self, room)
        self._episodes[turnstile] = None
        self.note(turnstile)
        try:
            yield turnstile
        finally:
            del self._episodes[turnstile]
            self.note(turnstile)

    async def settled(self) -> None:
        """Wait until every episode is over or parked. One that runs a tool, or its own code, is waited for.

        Of an episode with several requests at once all have to be over or parked; what it does beside parked ones is
        waited for where it says so (`Turnstile.away`), and is not seen otherwise.
        """
        while self._busy:
            await self._idle.wait()

    @property
    def parked(self) -> int:
        """The number of episodes that wait at the gate."""
        return len(self._episodes) - len(self._busy)

    @property
    def elsewhere(self) -> int:
        """Episodes that neither wait at the gate nor are being sampled: they are in tools, in their own code, or being
        scored. For any thread.
        """
        return sum(not turnstile.running for turnstile in list(self._busy))

    def note(self, turnstile: "Turnstile") -> None:
        """Count an episode anew, which has begun or ended, has parked or gone on."""
        if turnstile in self._episodes and not turnstile.parked:
            self._busy.add(turnstile)
        else:
            self._busy.discard(turnstile)
        if self._busy:
            self._idle.clear()
        else:
            self._idle.set()


class Turnstile:
    """One episode's way through the gate, made by `Slices.episode`. Its requests may run at the same time.

    `running` is how many of them the engine is sampling.
    """

    def __init__(self, slices: Slices, room: asyncio.Semaphore | None) -> None:
        self.slices = slices
        self.running = 0
        self._away = 0
        self._room = room
        self._has_room = True
        self._waiting: dict[asyncio.Future[None], Unfinished] = {}
        self._parked_before, self._parked_since = 0.0, 0.0  # seconds, and the time where it is parked now

    @property
    def parked(self) -> bool:
        """True if all unfinished requests of the episode wait at the gate, and it waits for nothing else."""
        return not self.running and not self._away and any(not waiter.done() for waiter in self._waiting)

    @property
    def unfinished(self) -> Unfinished | None:
        """A copy of the answer that is parked, where it is the only one."""
        return replace(next(iter(self._waiting.values()))) if self.parked and len(self._waiting) == 1 else None

    @property
    def parked_s(self) -> float:
        """Seconds for which the episode has been parked so far."""
        return self._parked_before + (time.monotonic() - self._parked_since if self._parked_since else 0.0)

    def release(self) -> None:
        """Let all that wait go on."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._note()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Around a wait for a tool, say: the episode is not parked meanwhile, whatever else of it waits at the gate."""
        self._away += 1
        self._note()
        try:
            yield
        finally:
            self._away -= 1
            self._note()

    @asynccontextmanager
    async def slice(self, answer: Unfinished) -> AsyncIterator[tuple[int, int]]:
        """Around one slice of an answer: waits until it may grow, and gives the version of the weights and the number
        of tokens to ask for.
        """
        while (version := self.slices.version) is None or answer.opening == self.slices.opening:
            await self._park(answer)
        answer.opening = self.slices.opening
        self.running += 1
        self._note()
        try:
            yield version, min(self.slices.tokens, answer.left)
        finally:
            self.running -= 1
            self._note()

    async def _park(self, answer: Unfinished) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = answer
        self._note()
        try:
            await waiter
        finally:
            del self._waiting[waiter]
            self._note()
            if self._room is not None and not self._has_room:
                self._has_room = True
                await self._room.acquire()

    def _note(self) -> None:
        """Tell the gate, count the time, and give the place in the engine to another while it is not needed."""
        parked = self.parked
        if parked and not self._parked_since:
            self._parked_since = time.monotonic()
            if self._room is not None and self._has_room:
                self._has_room = False
                self._room.release()
        elif not parked:
            self._parked_before, self._parked_since = self.parked_s, 0.0
        self.slices.note(self)
