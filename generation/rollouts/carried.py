"""Episodes of one engine that outlive a shift: where a slice of tokens ends they park, and go on in the next shift.

Which of them have ended after a slice depends on their own tokens alone, so it is the same on any number of engines.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from generation.engine.engine import Engine
from generation.engine.slices import Slices, Turnstile, Unfinished
from generation.rollouts.episode import PolicyLLM, RolloutFunction, RolloutSettings, one_shot
from generation.rollouts.run import OnSample, lost_episode, scored_episode
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class CarriedGroup:
    """The episodes of one prompt, from their begin until they are trained. Plain types: checkpoints keep it.

    Attributes:
        place: of its prompt in the sequence that training sees; the lower, the older.
        born: the step in which it began.
        done: by sample the trajectories of the episodes that have ended, scored.
        unfinished: by sample the answers that are parked, where an episode is nothing but one answer.
    """

    place: int
    born: int
    done: dict[int, list[Trajectory]] = field(default_factory=dict)
    unfinished: dict[int, Unfinished] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """All that is needed to begin, or to go on with, a group. `prompt_index` and `settings` decide its seeds."""

    group: CarriedGroup
    settings: RolloutSettings
    prompt_index: int
    prompt_ids: Sequence[int]
    row: Mapping[str, Any]
    messages: list[dict[str, Any]] | None
    on_sample: OnSample
    seen: Mapping[str, Any] = field(default_factory=dict)  # what `EpisodeSetup.seen` gives


class CarriedEpisodes:
    """All groups of one engine that are not trained yet. On the engine's event loop, except what does not wait.

    Attributes:
        groups: by place.
    """

    def __init__(
        self,
        engine: Engine,
        slices: Slices,
        function: RolloutFunction,
        tokenizer: "PreTrainedTokenizerBase",
        group_size: int,
    ) -> None:
        self.groups: dict[int, CarriedGroup] = {}
        self._engine, self._slices, self._function, self._tokenizer = engine, slices, function, tokenizer
        self._size = group_size
        self._room = asyncio.Semaphore(engine.settings.max_num_seqs + group_size)  # see `rollout`
        self._turnstiles: dict[tuple[int, int], Turnstile] = {}  # of episodes under way, by place and sample
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._stopped = False

    @property
    def unfinished(self) -> int:
        """Episodes under way."""
        return len(self._turnstiles)

    @property
    def elsewhere(self) -> int:
        """Those of them that are in tools, in their own code, or being scored. For any thread."""
        return self._slices.elsewhere

    def complete(self) -> list[int]:
        """The places of groups whose episodes have all ended."""
        return [place for place, group in self.groups.items() if len(group.done) == self._size]

    async def slice(self, version: int, new: Sequence[Beginning]) -> list[int]:
        """Let every episode under way grow by a slice, the oldest first, and then begin new groups in the order given.

        Returns `complete()` when every episode has ended or is parked. The engine's failure, and an error that
        `on_sample` raises, end all episodes.
        """
        self._engine.state.check_can_generate(version)
        grown, failed = asyncio.ensure_future(self._grow(version, new)), asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({grown, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return grown.result()
        except BaseException:
            await self.stop()
            raise
        finally:
            self._slices.close()
            for task in (grown, failed):
                task.cancel()
            await asyncio.gather(grown, failed, return_exceptions=True)

    async def _grow(self, version: int, new: Sequence[Beginning]) -> list[int]:
        self._slices.open(version)
        await asyncio.sleep(0)  # those that were parked take their places first
        for beginning in new:
            self.groups[beginning.group.place] = beginning.group
            for sample in range(self._size):
                if sample not in beginning.group.done:
                    await self._room.acquire()
                    self._begin(beginning, sample)
        await self._slices.settled()
        return self.complete()

    def _begin(self, beginning: Beginning, sample: int) -> None:
        group, counted = beginning.group, ExitStack()
        turnstile = counted.enter_context(self._slices.episode(self._room))
        llm = PolicyLLM(
            self._engine,
            self._tokenizer,
            beginning.settings,
            beginning.prompt_index,
            sample,
            beginning.prompt_ids,
            beginning.messages,
            self._room,
            turnstile=turnstile,
            unfinished=group.unfinished.pop(sample, None),
            **beginning.seen,
        )

        async def run() -> None:
            """The whole episode, over as many steps as it takes."""
            row, on_sample = dict(beginning.row), beginning.on_sample
            group.done[sample] = await scored_episode(self._function, llm, row, on_sample, self._room)

        def ended(task: asyncio.Task[None]) -> None:
            """Its end is seen: one that was cancelled by its own code is lost, an error is everybody's."""
            self._tasks.discard(task)
            del self._turnstiles[group.place, sample]
            if self._stopped:
                task.cancelled() or task.exception()  # seen
            elif task.cancelled():
                group.done[sample] = [lost_episode(llm)]
            elif (error := task.exception()) is not None:
                self._failure = self._failure or error
                self._failed.set()
            counted.close()

        self._turnstiles[group.place, sample] = turnstile
        self._tasks.add(task := asyncio.ensure_future(run()))
        task.add_done_callback(ended)

    def parked(self) -> list[tuple[int, int, Unfinished]]:
        """Place, sample and answer of each episode that is parked with a single one; at other levels than the first its
        prompt holds the turns before.
        """
        places = self._turnstiles.items()
        return [(*at, answer) for at, turnstile in places if (answer := turnstile.unfinished) is not None]

    def kept(self) -> list[CarriedGroup]:
        """The groups as they are now, between two slices, for a checkpoint; later slices do not change the copies."""
        copies = {place: replace(group, done=dict(group.done), unfinished={}) for place, group in self.groups.items()}
        for place, sample, answer in self.parked() if self._function is one_shot else ():
            copies[place].unfinished[sample] = replace(answer, opening=0)
        return [copies[place] for place in sorted(copies)]

    async def stop(self) -> None:
        """End all episodes under way."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
