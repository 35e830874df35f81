"""Rollouts in slices: nobody waits for the longest answer, and none is lost.

An answer grows by `rollout.slice_tokens` at a time. A step begins as many new prompts as the last one was trained on,
so that those of `rollout.ahead` steps more are always in flight. All engines run a slice, then another, until enough
groups are complete: the oldest of these are trained, and all others go on in the next step, under its weights. Each
rank knows which groups are in flight, where, and which are complete; their tokens are on the leader that samples them.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

from generation.engine.engine import Leader
from generation.engine.slices import Slices
from generation.rollouts.episode import RolloutSettings, one_shot
from generation.rollouts.episodes import Beginning, CarriedEpisodes, CarriedGroup
from generation.trajectory import Trajectory
from sharding.ranks import agreed, exchange, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.config.slices import prompts_ahead
from trainer.data import Prompt
from trainer.distributed import say
from trainer.learning.answers import gather_answers
from trainer.rollouts.pool import Pool, Terms, starting_order
from trainer.rollouts.round import Round, read_groups, sampled_round

_STOP_SECONDS = 15.0
_MEASURED = 4  # answers of an engine that the gap is measured on in a step that trains none of the present version

Prompts = Callable[[int, int], list[Prompt]]
"""Gives as many prompts to train on as asked for, from a position on."""


@dataclass
class _Flight:
    """A group in flight, as every rank knows it."""

    prompt: Prompt
    engine: int  # the number of the one that has its episodes
    born: int
    complete: bool = False


class CarriedPool:
    """The groups of all engines that may be finished in a later step than they began in."""

    def __init__(self, config: TrainConfig, pool: Pool, prompts: Prompts, start: Path | None = None) -> None:
        """`pool`: the engines. `start`: the checkpoint that the run resumes from."""
        self._config, self._engines, self._prompts = config, pool, prompts
        self._flights: dict[int, _Flight] = {}  # by the prompt's place in the sequence that training sees
        self._episodes: CarriedEpisodes | None = None
        self._step, self.version, self._preemptions = 0, 0, 0
        self._figures: dict[str, float] = {}
        self._steps_old: list[int] = []  # of the groups that were taken in this step, since when they were in flight
        self._tokens: list[tuple[int, int]] = []  # of the answers of the step: tokens of earlier versions, and all
        self._number = rank() * pool.engines // world_size()  # of this rank's engine
        # The groups of a checkpoint until they go on, and those of the last step's end, for `take_back`.
        self._resumed: list[CarriedGroup] = []
        self._before: list[CarriedGroup] = []
        if pool.leader is not None:
            self._episodes = self._new_episodes(pool.leader)
            self._resumed = [] if start is None else read_groups(start)[self._number :: pool.engines]

    def _new_episodes(self, leader: Leader) -> CarriedEpisodes:
        config, function = self._config, self._engines.level.function
        assert config.rollout.slice_tokens is not None and function is not None
        slices, size = Slices(config.rollout.slice_tokens), config.algorithm.group_size
        return CarriedEpisodes(leader.engine, slices, function, self._engines.tokenizer, size)

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, if there was one. The groups are again those that the last step has left, and
        go on as from a checkpoint. Collective.
        """
        if step != self._step:
            return
        with agreed("ending the carried episodes"):
            self.close()
            if self._engines.leader is not None:
                self._episodes, self._resumed = self._new_episodes(self._engines.leader), self._before
        self._step, self._flights = step - 1, {}
        self._preemptions = sum(exchange(self._preempted()))

    def take(self, position: int, count: int, settings: RolloutSettings, terms: Terms) -> Round:
        """Sample until `count` groups are complete, in as few slices as it takes, and return the oldest of these;
        raises as `Pool.run`. Collective. The next prompt to begin is at `position`.

        Seeds do not depend on when a prompt begins: the one at place n, from 0, is sampled as one of the step
        n // batch.prompts_per_step + 1, in which it would be without slices.
        """
        self._engines.begin_round()
        if settings.step != self._step:
            self._step, self._figures, self._steps_old, self._tokens = settings.step, {}, [], []
            # Copies, since groups that go on change.
            self._before = [
                replace(group, done=dict(group.done), unfinished={n: replace(u) for n, u in group.unfinished.items()})
                for group in self.groups()
            ]
        resumed = self._resume()
        fresh = max(0, count + prompts_ahead(self._config) - len(self._flights))
        groups = resumed + self._deal(self._prompts(position, fresh), position, terms.lengths)
        counts = self._grow([self._beginning(group, settings) for group in groups], count, settings, terms)
        places = sorted(place for place, flight in self._flights.items() if flight.complete)[:count]
        flights = [self._flights.pop(place) for place in places]
        self.version = settings.policy_version
        answers = gather_answers(self._trajectories(places), terms.details, self.version)
        self._steps_old += [settings.step - flight.born for flight in flights]
        self._tokens += [(answer.old, answer.sampled) for answer in answers]
        self._count(*counts)
        self._engines.check(answers, [flight.prompt for flight in flights], terms.lengths)
        found = sampled_round(answers, settings.step, self.version, places, position + fresh)
        found.figures = dict(self._figures)
        return found

    def _grow(
        self, beginnings: list[Beginning], count: int, settings: RolloutSettings, terms: Terms
    ) -> tuple[int, int, int]:
        """Grow episodes slice by slice until `count` groups are complete. Collective. Returns the slices that it
        took, and of all engines the episodes under way and the preemptions since their start.
        """
        slices, unfinished, preemptions = 0, 0, 0
        while not slices or sum(flight.complete for flight in self._flights.values()) < count:

            def slice(leader: Leader, beginnings: list[Beginning] = beginnings) -> Coroutine[None, None, list[int]]:
                """Run one more slice of all that are under way, and the first of those that begin."""
                assert self._episodes is not None
                return self._episodes.slice(settings.policy_version, beginnings)

            complete = self._engines.on_leaders(slice, terms, settings.step)
            under_way = 0 if self._episodes is None else self._episodes.unfinished
            engines = exchange([complete or [], under_way, self._preempted()])
            for place in (place for places, _, _ in engines for place in places):
                self._flights[place].complete = True
            beginnings, slices = [], slices + 1
            unfinished, preemptions = sum(count for _, count, _ in engines), sum(count for _, _, count in engines)
        return slices, unfinished, preemptions

    def _count(self, slices: int, unfinished: int, preemptions: int) -> None:
        """Figures of the step so far. stale/share: of the answers' tokens, those of earlier versions. stale/age_mean,
        stale/age_max: steps since they began. carry/answers, carry/groups_waiting: not finished, and complete groups
        that are not trained, at its end. carry/slices, and carry/preemptions for want of room in a KV cache: in it.
        """
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

    def _preempted(self) -> int:
        return 0 if self._engines.leader is None else self._engines.leader.engine.preemptions

    def waits_for(self) -> str:
        """Episodes of this rank's engine that the end of the slice waits for, though the engine has nothing to do."""
        count = 0 if self._episodes is None else self._episodes.elsewhere
        return f"{count} episode{'s' * (count > 1)} in tools or reward functions" if count else ""

    def groups(self) -> list[CarriedGroup]:
        """This engine's groups, those of a checkpoint that have not gone on yet included; between two slices."""
        return [] if self._episodes is None else self._resumed + self._episodes.kept()

    def present(self) -> list[Trajectory]:
        """A few of this engine's answers that wait or are unfinished and have tokens of the present version."""
        found: list[Trajectory] = []
        # An unfinished answer has no routes yet, if it is to have an engine's; where there may be images, those of the
        # turns before it are the episode's own.
        level = self._engines.level
        readable = level.image_rules is None or level.function is one_shot
        readable &= self._config.model.routes != "engine"
        for place, sample, so_far in self._episodes.parked() if self._episodes is not None and readable else ():
            prompt, told, versions = self._flights[place].prompt, so_far.token_ids, so_far.versions
            mask = [1] * len(told)
            parked = Trajectory(place, sample, so_far.prompt_ids, told, mask, so_far.logprobs, versions=versions)
            parked.images, parked.image_spans = tuple(image.read() for image in prompt.images), prompt.image_spans
            found.append(parked)
        found += [t for group in self.groups() for done in group.done.values() for t in done if not t.error]
        present = [t for t in found if t.weight_version == self.version and any(t.loss_mask)]
        return present[:_MEASURED]

    def close(self) -> None:
        """End the episodes under way."""
        if self._engines.leader is not None and self._episodes is not None:
            self._engines.leader.thread.run(self._episodes.stop(), _STOP_SECONDS, "ending the carried episodes")

    def _resume(self) -> list[CarriedGroup]:
        """The groups of this engine's share of a checkpoint, which are to go on. Collective, the first time."""
        if self._flights:
            return []
        groups, self._resumed, size = self._resumed, [], self._config.algorithm.group_size
        for group in groups:  # whose run may have had larger ones
            group.done = {sample: done for sample, done in group.done.items() if sample < size}
            group.unfinished = {sample: answer for sample, answer in group.unfinished.items() if sample < size}
        anew = sum(size - len(group.done) - len(group.unfinished) for group in groups)
        engines = exchange([self._number, anew, [[group.place, group.born] for group in groups]])
        for engine, _, places in engines:
            for place, born in places:
                self._flights[place] = _Flight(self._prompts(place, 1)[0], engine, born)
        if anew := sum(count for _, count, _ in engines):
            say(f"{anew} episodes that had not finished begin anew")
        return groups

    def _deal(self, prompts: list[Prompt], position: int, lengths: dict[int, int] | None) -> list[CarriedGroup]:
        """Deal new prompts out, each to the engine with the fewest groups under way; returns this engine's."""
        loads = [0] * self._engines.engines
        for flight in self._flights.values():
            loads[flight.engine] += not flight.complete
        for place, prompt in enumerate(prompts, position):
            engine = loads.index(min(loads))
            loads[engine] += 1
            self._flights[place] = _Flight(prompt, engine, self._step)
        places = [position + index for index in starting_order(prompts, lengths)]
        mine = [p for p in places if self._episodes is not None and self._flights[p].engine == self._number]
        return [CarriedGroup(place, self._step) for place in mine]

    def _beginning(self, group: CarriedGroup, settings: RolloutSettings) -> Beginning:
        prompt, engines = self._flights[group.place].prompt, self._engines
        steps, index = divmod(group.place, self._config.batch.prompts_per_step)
        messages = engines.level.messages([prompt])

        async def score(trajectory: Trajectory) -> None:
            """Score by the reward functions."""
            await engines.score(trajectory, prompt)

        own = replace(settings, seed=self._config.run.seed, step=steps + 1)
        seen = engines.setup([prompt]).seen(0)
        said = None if messages is None else messages[0]
        return Beginning(group, own, index, prompt.token_ids, prompt.row, said, score, seen)

    def _trajectories(self, places: list[int]) -> list[Trajectory]:
        """Take out this engine's trajectories of the groups in these places, numbered by their places' order."""
        found: list[Trajectory] = []
        for index, place in enumerate(places):
            group = None if self._episodes is None else self._episodes.groups.pop(place, None)
            for trajectory in (t for done in group.done.values() for t in done) if group is not None else ():
                trajectory.prompt_index = index
                found.append(trajectory)
        return found
