"""Sample answers in slices of a fixed number of tokens. Between slices, answers wait at a gate
outside of vLLM.

A slice is an ordinary request with a smaller `max_tokens`; the prompt of the next slice is the
prompt and all tokens so far. Only the number of its tokens decides where an answer is cut, never
the clock. With noise that is keyed by position (`EngineSettings.keyed_noise`) the same tokens are
sampled however often an answer is cut. Weights may be updated between slices. Except for
`Slices.elsewhere`, nothing here is thread-safe: it runs on the engine's event loop.
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

    Attributes: seed: the seed of its requests. budget: the largest number of tokens that the whole
        answer may have. logprobs: the log-probability (nats) of each of `token_ids`, under the
        version that sampled it. versions: as in `Trajectory`, counted from the first of
        `token_ids`; empty while there are no tokens. opening: the number of the gate's opening in
        which the answer last grew.
    """

    prompt_ids: list[int]
    seed: int
    budget: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    opening: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        name = f"an unfinished answer to a prompt of {len(self.prompt_ids)} tokens"
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{name}: {len(self.token_ids)} tokens, but {len(self.logprobs)} log-probabilities"
            )
        if len(self.token_ids) >= self.budget:
            raise ValueError(f"{name} has {len(self.token_ids)} of {self.budget} tokens: it is finished")
        if self.token_ids or self.versions:
            self.versions = checked_versions(self.versions, len(self.token_ids), name)

    @property
    def left(self) -> int:
        """The number of tokens that the answer may still get."""
        return self.budget - len(self.token_ids)

    def add(self, part: Generation) -> None:
        """Append the tokens of one slice."""
        if part.token_ids:
            self.versions = merged_versions([*self.versions, (part.weight_version, len(self.token_ids))])
        self.token_ids = self.token_ids + part.token_ids
        self.logprobs = self.logprobs + part.logprobs

    def finished(self, reason: str) -> Generation:
        """Return the complete answer, as if it had been one request."""
        return Generation(
            self.token_ids, self.logprobs, reason, prompt_ids=self.prompt_ids, versions=[*self.versions]
        )


class Slices:
    """The gate: while it is open, each answer may grow by `tokens` tokens, and then waits until it
    is opened again.

    Attributes:
        version: version of the weights with which answers continue; None while the gate is closed.
        opening: the number of times that the gate has been opened.
    """

    def __init__(self, tokens: int) -> None:
        """Create a closed gate. Raises ValueError unless a slice has at least one token."""
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
        """Let every parked answer continue for one slice, with weights of `version`, and new
        answers begin.
        """
        self.version = version
        self.opening += 1
        for turnstile in self._episodes:
            turnstile.release()

    def close(self) -> None:
        """Close the gate. Running requests are not interrupted: `settled` waits for them."""
        self.version = None

    @contextmanager
    def episode(self, room: asyncio.Semaphore | None = None) -> "Iterator[Turnstile]":
        """Count an episode for the length of the block; its place in `room` is free while the
        episode is parked.
        """
        turnstile = Turnstile(self, room)
        self._episodes[turnstile] = None
        self.note(turnstile)
        try:
            yield turnstile
        finally:
            del self._episodes[turnstile]
            self.note(turnstile)

    async def settled(self) -> None:
        """Wait until every episode is over or parked, including those that run a tool or their own
        code.

        An episode with several requests at once is parked when each of them is over or parked.
        Other work that it does meanwhile is waited for only inside `Turnstile.away`.
        """
        while self._busy:
            await self._idle.wait()

    @property
    def parked(self) -> int:
        """The number of episodes that wait at the gate."""
        return len(self._episodes) - len(self._busy)

    @property
    def elsewhere(self) -> int:
        """The number of episodes that neither wait at the gate nor are sampled: they run a tool or
        their own code, or are being scored. May be read from any thread.
        """
        return sum(not turnstile.running for turnstile in list(self._busy))

    def note(self, turnstile: "Turnstile") -> None:
        """Update the counts for an episode that has begun, ended, parked or continued."""
        if turnstile in self._episodes and not turnstile.parked:
            self._busy.add(turnstile)
        else:
            self._busy.discard(turnstile)
        if self._busy:
            self._idle.clear()
        else:
            self._idle.set()


class Turnstile:
    """One episode's way through the gate, made by `Slices.episode`. The episode's requests may run
    at the same time.

    `running` is the number of these requests that the engine is sampling.
    """

    def __init__(self, slices: Slices, room: asyncio.Semaphore | None) -> None:
        self.slices = slices
        self.running = 0
        self._away = 0
        self._room = room
        self._has_room = True
        self._waiting: dict[asyncio.Future[None], Unfinished] = {}
        # Seconds; and the time of parking, 0.0 if not parked
        self._parked_before = 0.0
        self._parked_since = 0.0

    @property
    def parked(self) -> bool:
        """True if all unfinished requests of the episode wait at the gate, and the episode waits
        for nothing else.
        """
        return not self.running and not self._away and any(not waiter.done() for waiter in self._waiting)

    @property
    def unfinished(self) -> Unfinished | None:
        """A copy of the parked answer; None unless the episode is parked with exactly one
        answer.
        """
        if not self.parked or len(self._waiting) != 1:
            return None
        return replace(next(iter(self._waiting.values())))

    @property
    def parked_s(self) -> float:
        """Seconds for which the episode has been parked so far."""
        return self._parked_before + (
            time.monotonic() - self._parked_since if self._parked_since else 0.0
        )

    def release(self) -> None:
        """Let all waiting requests of the episode continue."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._note()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Keep the episode from counting as parked for the length of the block, in which it may
        wait for a tool.
        """
        self._away += 1
        self._note()
        try:
            yield
        finally:
            self._away -= 1
            self._note()

    @asynccontextmanager
    async def slice(self, answer: Unfinished) -> AsyncIterator[tuple[int, int]]:
        """Wait until an answer may grow by one slice, which the block samples; give the block the
        version of the weights and the number of tokens to ask for.
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
        """Update the gate's counts and the time parked, and free the place in `room` while the
        episode is parked.
        """
        parked = self.parked
        if parked and not self._parked_since:
            self._parked_since = time.monotonic()
            if self._room is not None and self._has_room:
                self._has_room = False
                self._room.release()
        elif not parked:
            self._parked_before = self.parked_s
            self._parked_since = 0.0
        self.slices.note(self)
