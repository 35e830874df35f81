"""Rollouts in slices, in which a step does not wait for the longest answers and discards none.

An answer grows by `rollout.slice_tokens` at a time. A step begins as many new prompts as the last
step was trained on, so that the prompts of `rollout.ahead` further steps are always in flight. All
engines run slice after slice until enough groups are complete. The step trains on the oldest of
these; the others continue in the next step, with its weights. All ranks know the groups in flight,
their engines, and which groups are complete; the tokens are on the leader that samples them.
"""

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

from generation.engine.engine import Leader
from generation.engine.slices import Slices
from generation.rollouts.episode import RolloutSettings, one_shot
from generation.rollouts.episodes import Beginning, CarriedEpisodes, CarriedGroup
from generation.trajectory import Trajectory
from sharding.ranks import agreed, exchange, rank, world_size
from trainer.config.answer_age import prompts_ahead
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.distributed import say
from trainer.errors import counted
from trainer.learning.answers import gather_answers
from trainer.rollouts.pool import Pool, Terms
from trainer.rollouts.round import Round, read_groups, sampled_round

_STOP_SECONDS = 15.0
# Answers of an engine on which the gap is measured in a step that trains none of the present
# version
_MEASURED = 4


@dataclass
class _Flight:
    """A group in flight, equal on all ranks."""

    prompt: Prompt
    engine: int  # number of the engine that runs its episodes
    born: int  # the step in which it began
    complete: bool = False


class CarriedPool:
    """The groups in flight on all engines, which may finish in a later step than the one they began
    in.
    """

    def __init__(self, config: TrainConfig, pool: Pool, start: Path | None = None) -> None:
        """Begin without groups in flight. `pool` has the engines and the prompts; `start` is the
        checkpoint that the run resumes from.
        """
        assert pool.prompts is not None
        self._config = config
        self._engines = pool
        self._prompts = pool.prompts
        self._flights: dict[int, _Flight] = {}  # by the prompt's position in training's sequence
        self._episodes: CarriedEpisodes | None = None
        self._step = 0
        self.version = 0
        self._preemptions = 0
        self._metrics: dict[str, float] = {}
        # For each group taken in this step, the number of steps since it began
        self._steps_old: list[int] = []
        # For each answer of this step, tokens of earlier versions, and all
        self._tokens: list[tuple[int, int]] = []
        self._number = rank() * pool.engines // world_size()  # number of this rank's engine
        # Groups of a checkpoint that have not resumed yet; and the groups at the end of the last
        # step, for `take_back`.
        self._resumed: list[CarriedGroup] = []
        self._before: list[CarriedGroup] = []
        if pool.leader is not None:
            self._episodes = self._new_episodes(pool.leader)
            self._resumed = [] if start is None else read_groups(start)[self._number :: pool.engines]

    def _new_episodes(self, leader: Leader) -> CarriedEpisodes:
        config = self._config
        function = self._engines.level.function
        assert config.rollout.slice_tokens is not None and function is not None
        slices = Slices(config.rollout.slice_tokens)
        size = config.algorithm.group_size
        return CarriedEpisodes(leader.engine, slices, function, self._engines.tokenizer, size)

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, if there was one. Collective.

        The groups are again those at the end of the last step, and resume as from a checkpoint.
        """
        self._engines.take_back(step)
        if step != self._step:
            return
        with agreed("ending the carried episodes"):
            self._end_episodes()
            if self._engines.leader is not None:
                self._episodes = self._new_episodes(self._engines.leader)
                self._resumed = self._before
        self._step = step - 1
        self._flights = {}
        self._preemptions = sum(exchange(self._preempted()))

    def take(self, position: int, count: int, settings: RolloutSettings, terms: Terms) -> Round:
        """Sample until `count` groups are complete, in as few slices as possible, and return the
        oldest of these.

        Collective; raises as `Pool.run`. The next prompt to begin is at `position`. Seeds do not
        depend on the step in which a prompt begins: the prompt at position n, from 0, has the seed
        of step n // batch.prompts_per_step + 1, to which it would belong without slices.
        """
        self._engines.begin_round()
        if settings.step != self._step:
            self._step = settings.step
            self._metrics = {}
            self._steps_old = []
            self._tokens = []
            # Copies, since resumed groups change.
            before = []
            for group in self.groups():
                unfinished = {sample: replace(answer) for sample, answer in group.unfinished.items()}
                before.append(replace(group, done=dict(group.done), unfinished=unfinished))
            self._before = before
        resumed = self._resume()
        fresh = max(0, count + prompts_ahead(self._config) - len(self._flights))
        groups = resumed + self._deal(self._prompts(position, fresh), position)
        beginnings = [self._beginning(group, settings) for group in groups]
        counts = self._grow(beginnings, count, settings, terms)
        complete = [position for position, flight in self._flights.items() if flight.complete]
        positions = sorted(complete)[:count]
        flights = [self._flights.pop(position) for position in positions]
        self.version = settings.policy_version
        answers = gather_answers(self._trajectories(positions), terms.details, self.version)
        self._steps_old += [settings.step - flight.born for flight in flights]
        self._tokens += [(answer.old, answer.sampled) for answer in answers]
        self._count(*counts)
        self._engines.check(answers)
        taken = sampled_round(answers, settings.step, self.version, positions, position + fresh)
        taken.figures = dict(self._metrics)
        return taken

    def _grow(
        self, beginnings: list[Beginning], count: int, settings: RolloutSettings, terms: Terms
    ) -> tuple[int, int, int]:
        """Grow episodes slice by slice until `count` groups are complete. Collective.

        Returns the number of slices, the number of unfinished episodes on all engines, and all
        engines' preemptions since their start.
        """
        slices = 0
        unfinished = 0
        preemptions = 0
        while not slices or sum(flight.complete for flight in self._flights.values()) < count:

            def slice(
                leader: Leader, beginnings: list[Beginning] = beginnings
            ) -> Coroutine[None, None, list[int]]:
                """Run one more slice of all episodes under way, and the first slice of those that
                begin.
                """
                assert self._episodes is not None
                return self._episodes.slice(settings.policy_version, beginnings)

            complete = self._engines.on_leaders(slice, terms, settings.step)
            under_way = 0 if self._episodes is None else self._episodes.unfinished
            engines = exchange([complete or [], under_way, self._preempted()])
            for positions, _, _ in engines:
                for position in positions:
                    self._flights[position].complete = True
            beginnings = []
            slices = slices + 1
            unfinished = sum(count for _, count, _ in engines)
            preemptions = sum(count for _, _, count in engines)
        return slices, unfinished, preemptions

    def _count(self, slices: int, unfinished: int, preemptions: int) -> None:
        """Update the metrics of the step.

        - stale/share: the share of the answers' tokens that earlier versions sampled
        - stale/age_mean, stale/age_max: steps since the step's groups began
        - carry/answers: unfinished answers at the end of the step
        - carry/groups_waiting: complete groups that are not trained in this step
        - carry/slices: slices run in this step
        - carry/preemptions: requests preempted in this step because a KV cache was full
        """
        old, sampled = (sum(numbers) for numbers in zip(*self._tokens, strict=True))
        waiting = sum(flight.complete for flight in self._flights.values())
        earlier = self._metrics.get("carry/preemptions", 0.0)
        self._metrics = {
            "stale/share": old / max(sampled, 1),
            "stale/age_mean": sum(self._steps_old) / len(self._steps_old),
            "stale/age_max": float(max(self._steps_old)),
            "carry/answers": float(unfinished),
            "carry/groups_waiting": float(waiting),
            "carry/slices": self._metrics.get("carry/slices", 0.0) + slices,
            "carry/preemptions": earlier + preemptions - self._preemptions,
        }
        self._preemptions = preemptions

    def _preempted(self) -> int:
        return 0 if self._engines.leader is None else self._engines.leader.engine.preemptions

    def waits_for(self) -> str:
        """Describe this engine's episodes that hold up the slice while the engine itself is idle;
        "" for none.
        """
        count = 0 if self._episodes is None else self._episodes.elsewhere
        return f"{counted(count, 'episode')} in tools or reward functions" if count else ""

    def groups(self) -> list[CarriedGroup]:
        """Return this engine's groups, including groups of a checkpoint that have not resumed; call
        between slices.
        """
        return [] if self._episodes is None else self._resumed + self._episodes.kept()

    def present(self) -> list[Trajectory]:
        """Return a few of this engine's waiting or unfinished answers that have tokens of the
        present version.
        """
        candidates: list[Trajectory] = []
        # An unfinished answer has no routes yet, if routes come from the engine. In episodes of
        # several turns, images of earlier turns are known to the episode only.
        level = self._engines.level
        readable = level.image_rules is None or level.function is one_shot
        readable &= self._config.model.routes != "engine"
        for position, sample, so_far in (
            self._episodes.parked() if self._episodes is not None and readable else ()
        ):
            prompt = self._flights[position].prompt
            token_ids = so_far.token_ids
            versions = so_far.versions
            mask = [1] * len(token_ids)
            parked = Trajectory(
                position, sample, so_far.prompt_ids, token_ids, mask, so_far.logprobs, versions=versions
            )
            parked.images = tuple(image.read() for image in prompt.images)
            parked.image_spans = prompt.image_spans
            candidates.append(parked)
        for group in self.groups():
            for done in group.done.values():
                candidates += [trajectory for trajectory in done if not trajectory.error]
        present = [t for t in candidates if t.weight_version == self.version and any(t.loss_mask)]
        return present[:_MEASURED]

    def close(self) -> None:
        """End the episodes under way, their servers and processes. Call it before the engine
        stops.
        """
        self._end_episodes()
        self._engines.close()

    def _end_episodes(self) -> None:
        """End the episodes under way on this rank's engine."""
        if self._engines.leader is not None and self._episodes is not None:
            self._engines.leader.thread.run(
                self._episodes.stop(), _STOP_SECONDS, "ending the carried episodes"
            )

    def _resume(self) -> list[CarriedGroup]:
        """Return this engine's share of a checkpoint's groups, which are to resume. Collective, the
        first time.
        """
        if self._flights:
            return []
        groups = self._resumed
        self._resumed = []
        size = self._config.algorithm.group_size
        for group in groups:  # the checkpoint may have had a larger group size
            group.done = {sample: done for sample, done in group.done.items() if sample < size}
            group.unfinished = {
                sample: answer for sample, answer in group.unfinished.items() if sample < size
            }
        restarted = sum(size - len(group.done) - len(group.unfinished) for group in groups)
        engines = exchange([self._number, restarted, [[group.place, group.born] for group in groups]])
        for engine, _, positions in engines:
            for position, born in positions:
                self._flights[position] = _Flight(self._prompts(position, 1)[0], engine, born)
        if restarted := sum(count for _, count, _ in engines):
            say(f"{restarted} unfinished episodes start again from their prompts")
        return groups

    def _deal(self, prompts: list[Prompt], first: int) -> list[CarriedGroup]:
        """Assign each new prompt to the engine with the fewest unfinished groups; return this
        engine's new groups.
        """
        loads = [0] * self._engines.engines
        for flight in self._flights.values():
            loads[flight.engine] += not flight.complete
        groups = []
        for position, prompt in enumerate(prompts, first):
            engine = loads.index(min(loads))
            loads[engine] += 1
            self._flights[position] = _Flight(prompt, engine, self._step)
            if self._episodes is not None and engine == self._number:
                groups.append(CarriedGroup(position, self._step))
        return groups

    def _beginning(self, group: CarriedGroup, settings: RolloutSettings) -> Beginning:
        prompt = self._flights[group.place].prompt
        engines = self._engines
        steps, index = divmod(group.place, self._config.batch.prompts_per_step)
        messages = engines.level.messages([prompt])

        async def score(trajectory: Trajectory) -> None:
            """Score a trajectory by the reward functions."""
            await engines.score(trajectory, prompt)

        group_settings = replace(settings, seed=self._config.run.seed, step=steps + 1)
        images = engines.setup([prompt]).image_arguments(0)
        conversation = None if messages is None else messages[0]
        return Beginning(
            group, group_settings, index, prompt.token_ids, prompt.row, conversation, score, images
        )

    def _trajectories(self, positions: list[int]) -> list[Trajectory]:
        """Remove the groups at these positions from this engine, and return their trajectories.

        A trajectory's prompt index is the index of its position in `positions`.
        """
        trajectories: list[Trajectory] = []
        for index, position in enumerate(positions):
            group = None if self._episodes is None else self._episodes.groups.pop(position, None)
            if group is None:
                continue
            for done in group.done.values():
                for trajectory in done:
                    trajectory.prompt_index = index
                    trajectories.append(trajectory)
        return trajectories
