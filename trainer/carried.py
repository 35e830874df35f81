"""Rollouts in slices: nobody waits for the longest answer, and none is lost.

An answer grows by `rollout.slice_tokens` at a time. A step begins as many new prompts as the last one was trained on,
so that those of `rollout.ahead` steps more are always in flight. All engines run a slice, then another, until enough
groups are complete: the oldest of these are trained, and all others go on in the next step, under its weights. Each
rank knows which groups are in flight, where, and which are complete; their tokens are on the leader that samples them.
"""

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from generation.engine.engine import Leader
from generation.engine.slices import Slices
from generation.rollouts.carried import Beginning, CarriedEpisodes, CarriedGroup
from generation.rollouts.episode import RolloutSettings, one_shot
from generation.trajectory import Trajectory, array, plain
from sharding.ranks import agreed, exchange, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.config.slices import prompts_ahead
from trainer.data import Prompt
from trainer.distributed import say
from trainer.learning.answers import Answer, gather_answers
from trainer.rollouts import Rollouts, Source, Terms, starting_order
from trainer.run.checkpoint import CARRIED_FILES

_STOP_SECONDS = 15.0
_MEASURED = 4  # answers of an engine that the gap is measured on in a step that trains none of the present version


@dataclass
class _Flight:
    """A group in flight, as every rank knows it."""

    prompt: Prompt
    engine: int  # the number of the one that has its episodes
    born: int
    complete: bool = False


class SlicedRollouts(Rollouts):
    """Rollouts whose answers may be finished in a later step than they began in."""

    def __init__(self, config: TrainConfig, *arguments: Any, start: Path | None = None, **options: Any) -> None:
        """`start` is the checkpoint that the run resumes from; the rest goes to `Rollouts`."""
        super().__init__(*arguments, **options)
        self._config = config
        self._flights: dict[int, _Flight] = {}  # by the prompt's place in the sequence that training sees
        self._pool: CarriedEpisodes | None = None
        self._step, self._version, self._preemptions = 0, 0, 0
        self._figures: dict[str, float] = {}
        self._taken: list[int] = []  # the places of the groups that were taken last
        self._number = rank() * self._engines // world_size()  # of this rank's engine
        # The groups of a checkpoint until they go on, and those of the last step's end, for `take_back`.
        self._resumed: list[CarriedGroup] = []
        self._before: list[CarriedGroup] = []
        if self._leader is not None:
            self._pool = self._new_pool(self._leader)
            self._resumed = [] if start is None else read_groups(start)[self._number :: self._engines]

    def _new_pool(self, leader: Leader) -> CarriedEpisodes:
        config, function = self._config, self._level.function
        assert config.rollout.slice_tokens is not None and function is not None
        slices, size = Slices(config.rollout.slice_tokens), config.algorithm.group_size
        return CarriedEpisodes(leader.engine, slices, function, self._tokenizer, size)

    def take_back(self, step: int) -> None:
        """See `Rollouts`. The groups are again those that the last step has left, and go on as from a checkpoint."""
        super().take_back(step)
        if step != self._step:
            return
        with agreed("ending the carried episodes"):
            if self._leader is not None and self._pool is not None:
                self._leader.thread.run(self._pool.stop(), _STOP_SECONDS, "ending the carried episodes")
                self._pool, self._resumed = self._new_pool(self._leader), self._before
        self._step, self._flights = step - 1, {}
        self._preemptions = sum(exchange(0 if self._leader is None else self._leader.engine.preemptions))

    def take(
        self,
        source: Source,
        position: int,
        count: int,
        settings: RolloutSettings,
        terms: Terms,
    ) -> tuple[list[Prompt], list[Answer], int]:
        """The prompts of the `count` oldest groups that are complete after as few slices as it takes; see `Rollouts`.

        Seeds do not depend on when a prompt begins: the one at place n, from 0, is sampled as one of the step
        n // batch.prompts_per_step + 1, in which it would be without slices.
        """
        self.finished = 0
        if settings.step != self._step:
            self._begin_step(settings.step)
        resumed = self._resume(source)
        fresh = max(0, count + prompts_ahead(self._config) - len(self._flights))
        groups = resumed + self._deal(source(position, fresh), position, terms.lengths)
        beginnings = [self._beginning(group, settings) for group in groups]

        def slice(leader: Leader) -> Coroutine[Any, Any, list[int]]:
            """One more slice for all that are under way, and the first for those that begin."""
            assert self._pool is not None
            return self._pool.slice(settings.policy_version, beginnings)

        slices, unfinished, preemptions = 0, 0, 0
        while not slices or sum(flight.complete for flight in self._flights.values()) < count:
            complete = self._on_leaders(slice, terms, settings.step)
            under_way = 0 if self._pool is None else self._pool.unfinished
            preempted = 0 if self._leader is None else self._leader.engine.preemptions
            told = exchange([complete or [], under_way, preempted])
            for place in (place for places, _, _ in told for place in places):
                self._flights[place].complete = True
            beginnings, slices = [], slices + 1
            unfinished, preemptions = sum(each for _, each, _ in told), sum(each for _, _, each in told)
        places = sorted(place for place, flight in self._flights.items() if flight.complete)[:count]
        flights = [self._flights.pop(place) for place in places]
        self._taken, self._version = places, settings.policy_version
        answers = self._gathered(self._trajectories(places), terms, self._version)
        self._steps_old += [settings.step - flight.born for flight in flights]
        self._tokens += [(answer.old, answer.sampled) for answer in answers]
        old, sampled = (sum(numbers) for numbers in zip(*self._tokens, strict=True))
        self._figures = {
            "stale/share": old / max(sampled, 1),
            "stale/age_mean": sum(self._steps_old) / len(self._steps_old),
            "stale/age_max": float(max(self._steps_old)),
            "carry/answers": float(unfinished),
            "carry/groups_waiting": float(sum(flight.complete for flight in self._flights.values())),
            "carry/slices": self._figures.get("carry/slices", 0.0) + slices,
            "carry/preemptions": self._figures.get("carry/preemptions", 0.0) + preemptions - self._preemptions,
        }
        self._preemptions = preemptions
        prompts = [flight.prompt for flight in flights]
        return prompts, self._checked(answers, prompts, terms.lengths), position + fresh

    def figures(self) -> dict[str, float]:
        """Of the step's answers stale/share, of the tokens those that earlier versions sampled; stale/age_mean and
        stale/age_max, how many steps ago they began. At its end carry/answers, not finished, and carry/groups_waiting,
        complete. carry/slices, and carry/preemptions, for want of room in an engine's KV cache, are of the step.
        """
        return self._figures

    def waits_for(self) -> str:
        """Episodes of this rank's engine that the end of the slice waits for, though the engine has nothing to do."""
        count = 0 if self._pool is None else self._pool.elsewhere
        return f"{count} episode{'s' * (count > 1)} in tools or reward functions" if count else ""

    def carried(self) -> bytes:
        """The groups that this rank's engine had when the last step was done; see `CarriedGroup`."""
        if self._pool is None:
            return b""
        return packed_groups(self._now())

    def untrained(self) -> list[Answer]:
        """Of each engine some answers that wait or are unfinished and have tokens of the present version."""
        return gather_answers(self._present(), version=self._version)

    def _present(self) -> list[Trajectory]:
        """This engine's part of `untrained`."""
        found: list[Trajectory] = []
        # An unfinished answer has no routes yet, if it is to have an engine's; where there may be images, those of the
        # turns before it are the episode's own.
        whole = self._level.image_rules is None or self._level.function is one_shot
        whole &= self._config.model.routes != "engine"
        for place, sample, so_far in self._pool.parked() if self._pool is not None and whole else ():
            tokens = so_far.token_ids, [1] * len(so_far.token_ids), so_far.logprobs
            prompt = self._flights[place].prompt
            images: Any = {"images": tuple(i.read() for i in prompt.images), "image_spans": prompt.image_spans}
            found.append(Trajectory(place, sample, so_far.prompt_ids, *tokens, versions=so_far.versions, **images))
        found += [t for group in self._now() for done in group.done.values() for t in done if not t.error]
        present = [t for t in found if t.weight_version == self._version and any(t.loss_mask)]
        return present[:_MEASURED]

    def close(self) -> None:
        """End the episodes under way, too."""
        if self._leader is not None and self._pool is not None:
            self._leader.thread.run(self._pool.stop(), _STOP_SECONDS, "ending the carried episodes")
        super().close()

    def _now(self) -> list[CarriedGroup]:
        """This engine's groups, those that have not gone on yet included."""
        return [] if self._pool is None else self._resumed + self._pool.kept()

    def _begin_step(self, step: int) -> None:
        self._step, self._figures = step, {}
        self._steps_old: list[int] = []
        self._tokens: list[tuple[int, int]] = []
        # Copies, since groups that go on change.
        self._before = [
            replace(group, done=dict(group.done), unfinished={n: replace(u) for n, u in group.unfinished.items()})
            for group in self._now()
        ]

    def _resume(self, source: Source) -> list[CarriedGroup]:
        """The groups of this engine's share of a checkpoint, which are to go on. Collective, the first time."""
        if self._flights:
            return []
        groups, self._resumed, size = self._resumed, [], self._config.algorithm.group_size
        for group in groups:  # whose run may have had larger ones
            group.done = {sample: done for sample, done in group.done.items() if sample < size}
            group.unfinished = {sample: answer for sample, answer in group.unfinished.items() if sample < size}
        anew = sum(size - len(group.done) - len(group.unfinished) for group in groups)
        told = exchange([self._number, anew, [[group.place, group.born] for group in groups]])
        for engine, _, places in told:
            for place, born in places:
                self._flights[place] = _Flight(source(place, 1)[0], engine, born)
        if anew := sum(each for _, each, _ in told):
            say(f"{anew} episodes that had not finished begin anew")
        return groups

    def _deal(self, prompts: list[Prompt], position: int, lengths: dict[int, int] | None) -> list[CarriedGroup]:
        """Deal new prompts out, each to the engine with the fewest groups under way; returns this engine's."""
        loads = [0] * self._engines
        for flight in self._flights.values():
            loads[flight.engine] += not flight.complete
        for place, prompt in enumerate(prompts, position):
            engine = loads.index(min(loads))
            loads[engine] += 1
            self._flights[place] = _Flight(prompt, engine, self._step)
        places = [position + index for index in starting_order(prompts, lengths)]
        own = [place for place in places if self._pool is not None and self._flights[place].engine == self._number]
        return [CarriedGroup(place, self._step) for place in own]

    def _beginning(self, group: CarriedGroup, settings: RolloutSettings) -> Beginning:
        prompt = self._flights[group.place].prompt
        steps, index = divmod(group.place, self._config.batch.prompts_per_step)
        messages = self._level.messages([prompt])

        async def score(trajectory: Trajectory) -> None:
            """By the reward functions."""
            await self._score(trajectory, prompt)

        return Beginning(
            group,
            replace(settings, seed=self._config.run.seed, step=steps + 1),
            index,
            prompt.token_ids,
            prompt.row,
            None if messages is None else messages[0],
            score,
            self._setup([prompt]).seen(0),
        )

    def _trajectories(self, places: list[int]) -> list[Trajectory]:
        """Of the groups in these places those that this engine has, with their number among them; they leave it."""
        found: list[Trajectory] = []
        for index, place in enumerate(places):
            group = None if self._pool is None else self._pool.groups.pop(place, None)
            for trajectory in (t for done in group.done.values() for t in done) if group is not None else ():
                trajectory.prompt_index = index
                found.append(trajectory)
        return found


@dataclass
class _More:
    """Groups, and the images of their answers by digest, which are empty in them.

    Attributes:
        ready: what engines apart have sampled ahead; see `trainer.apart`.
    """

    groups: list[CarriedGroup]
    images: dict[str, bytes]
    ready: bytes = b""


def packed_groups(groups: list[CarriedGroup], ready: bytes = b"") -> bytes:
    """As a checkpoint has them; `ready`: see `read_ready`."""
    images = {image.digest: image.data for t in _done(groups) for image in t.images}

    def bare(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, images=tuple(replace(image, data=b"") for image in trajectory.images))

    if not images and not ready:
        return msgspec.msgpack.encode(groups, enc_hook=plain)
    done = [{sample: [*map(bare, own)] for sample, own in group.done.items()} for group in groups]
    stripped = [replace(group, done=own) for group, own in zip(groups, done, strict=True)]
    return msgspec.msgpack.encode(_More(stripped, images, ready), enc_hook=plain)


def _done(groups: list[CarriedGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for own in group.done.values() for trajectory in own]


def read_groups(checkpoint: Path) -> list[CarriedGroup]:
    """All groups that a checkpoint has, whichever engine had them, the oldest first."""
    return joined_groups([file.read_bytes() for file in checkpoint.glob(CARRIED_FILES)])


def joined_groups(packed: list[bytes]) -> list[CarriedGroup]:
    """All groups of several engines, the oldest first."""
    groups: list[CarriedGroup] = []
    for found in map(_unpacked, packed):
        for t in _done(found.groups):
            t.images = tuple(replace(image, data=found.images[image.digest]) for image in t.images)
        groups += found.groups
    return sorted(groups, key=lambda group: group.place)


def read_ready(checkpoint: Path) -> list[bytes]:
    """What the ranks that train had of engines apart, in the order of the ranks; nothing where that was nothing."""
    files = sorted(checkpoint.glob(CARRIED_FILES))
    return [ready for file in files if (ready := _unpacked(file.read_bytes()).ready)]


def _unpacked(packed: bytes) -> _More:
    found = msgspec.msgpack.decode(packed, type=list[CarriedGroup] | _More, dec_hook=array)
    return found if isinstance(found, _More) else _More(found, {})
