"""Rollouts by engines on ranks of their own (`engine.placement: ranks`): both ends of what is ordered and handed over.

Three ways were weighed. All ranks could run every line of the loop, which asks at each whether it is for them. An
engine could be driven request by request from a rank that trains, which takes a protocol for tools, environments and
clients. Or, as here with the fewest lines, the ranks that generate run `RLTrainer.sample` for themselves, and those
that train run it again with what the others' engines have sampled, as if it were their own: dynamic sampling,
evaluation, statistics and learning know nothing of it.

With `rollout.lag: 1` the answers of the next step are ordered before the policy learns from those of this one, and are
fetched when it has. They belong to the checkpoint then, since the weights that sampled them are gone.

Where answers are cut, those that are unfinished stay with the engines. At the end of each step the ranks that train are
told which groups are complete, and get what a checkpoint keeps of the others.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from generation.engine.engine import Leader
from generation.engine.lifecycle import EngineStateError
from generation.engine.sampling import NotFiniteError
from generation.rollouts.episode import RolloutSettings
from generation.trajectory import Trajectory, array, plain
from sharding.apart.crews import EnginesApart
from sharding.ranks import EVERYBODY, agree, agreed, all_to_all_bytes, is_main, rank, world_size
from trainer.carried import SlicedRollouts, joined_groups, packed_groups, read_groups, read_ready
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.learning.answers import Answer, gather_answers
from trainer.rollouts import Rollouts, Source, StepAbandoned, Terms

T = TypeVar("T")

GIVEN_UP = "given up"


@dataclass
class Handed:
    """What one rank has of an order. Of plain types: it travels, and checkpoints keep it.

    Attributes:
        word: why there is nothing to learn from, without an error; nothing else is told then.
        version: of the weights that the order was carried out with.
        rounds: of each round of sampling, or of each held-out dataset, its trajectories.
        taken: where answers are cut, of each round the places of its groups, and the position of the next prompt.
        figures: of a step in which answers are cut; see `SlicedRollouts.figures`.
        present: see `SlicedRollouts.untrained`.
        groups: of each engine those that go on, as `SlicedRollouts.carried` has them.
    """

    word: str = ""
    version: int = -1
    rounds: list[list[Trajectory]] = field(default_factory=list)
    taken: list[tuple[list[int], int]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    present: list[Trajectory] = field(default_factory=list)
    groups: list[bytes] = field(default_factory=list)

    def bare(self) -> "Handed":
        """The same without answers."""
        return replace(self, rounds=[[] for _ in self.rounds], present=[], groups=[])


def together(parts: list[Handed]) -> Handed:
    """What several ranks have of one order."""
    if word := next((part.word for part in parts if part.word), ""):
        return Handed(word)
    return replace(
        parts[0],
        rounds=[[*chain(*own)] for own in zip(*(part.rounds for part in parts), strict=True)],
        present=[*chain(*(part.present for part in parts))],
        groups=[*chain(*(part.groups for part in parts))],
    )


class OwnRounds(Rollouts):
    """Rollouts on a rank that only generates, which keep what its engine has sampled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept = Handed()

    def handed(self, version: int) -> Handed:
        """What this rank has of an order that was carried out with weights of this version."""
        kept, self._kept = self._kept, Handed()
        return replace(kept, version=version)

    def _gathered(self, own: list[Trajectory], terms: Terms, version: int | None) -> list[Answer]:
        self._kept.rounds.append(own)
        return super()._gathered(own, terms, version)


class OwnSlices(OwnRounds, SlicedRollouts):
    """The same where answers are cut."""

    def take(
        self, source: Source, position: int, count: int, settings: RolloutSettings, terms: Terms
    ) -> tuple[list[Prompt], list[Answer], int]:
        """See `Rollouts`."""
        result = super().take(source, position, count, settings, terms)
        self._kept.taken.append((self._taken, result[2]))
        return result

    def handed(self, version: int) -> Handed:
        """See `OwnRounds`. An evaluation changes nothing of the answers that go on."""
        handed = super().handed(version)
        if handed.taken:
            handed.figures, handed.present, handed.groups = self.figures(), self._present(), [self.carried()]
        return handed


def hand_over(training: int, handed: Handed, error: Exception | None) -> None:
    """On a rank that generates, after an order: its answers go to one of the `training` ranks that train, and all else
    to each of them. Collective among all ranks. Raises RemoteError on all ranks where one has an error.
    """
    agree(error, "generating", among=EVERYBODY)
    packed = [msgspec.msgpack.encode(each, enc_hook=plain) for each in (handed, handed.bare())]
    mine, ranks = rank(EVERYBODY) % training, range(world_size(EVERYBODY))
    all_to_all_bytes([packed[who != mine] if who < training else b"" for who in ranks], among=EVERYBODY)


def take_over() -> Handed:
    """On a rank that trains: what comes here of `hand_over`, of all engines together."""
    agree(None, "generating", among=EVERYBODY)
    told = [came for came in all_to_all_bytes([b""] * world_size(EVERYBODY), among=EVERYBODY) if came]
    return together([msgspec.msgpack.decode(came, type=Handed, dec_hook=array) for came in told])


class RolloutsApart(Rollouts):
    """Rollouts on a rank that trains: what engines of other ranks have sampled, as if it had been sampled here."""

    def __init__(
        self, config: TrainConfig, sharding: EnginesApart, *arguments: Any, start: Path | None = None, **options: Any
    ) -> None:
        """`start` is the checkpoint that the run resumes from; the rest goes to `Rollouts`."""
        super().__init__(*arguments, **options)
        self._config, self._apart, self._position = config, sharding, 0
        self._ages = config.rollout.lag > 0
        self._ordered: tuple[int, int] | None = None  # the step of which answers are under way, and their version
        # By step, from 1, or by evaluation, below 0.
        self._ready: dict[int, Handed] = {} if start is None else read_handed(start)
        self._groups: list[bytes] = []  # that go on, as the engines had them after the latest step that was fetched

    def take(
        self, source: Source, position: int, count: int, settings: RolloutSettings, terms: Terms
    ) -> tuple[list[Prompt], list[Answer], int]:
        """See `Rollouts`. With a lag, the next step's are ordered when this one's shift is over."""
        self._position = position
        taken = super().take(source, position, count, settings, terms)
        self._order_ahead(settings.step, taken[2])
        return taken

    def carried(self) -> bytes:
        """The answers of the next step, where they are sampled by now, and the groups that go on. Collective."""
        self._fetch()
        if not self._ready and not self._groups:
            return b""
        ready = msgspec.msgpack.encode(self._ready, enc_hook=plain) if self._ready else b""
        return packed_groups(joined_groups(self._groups), ready)

    def _on_leaders(self, work: Callable[[Leader], Coroutine[Any, Any, T]], terms: Terms, step: int) -> T | None:
        """The next round of the step, or of the evaluation; `work` is done elsewhere."""
        return self._next_round(step)[0]  # type: ignore[return-value]  # what `Rollouts.run` asks for

    def _next_round(self, step: int) -> tuple[list[Trajectory], Handed]:
        """The trajectories of the next round that come to this rank, and what they are part of."""
        self._fetch()  # with a lag it is this step's, unless a checkpoint has had it fetched
        if step not in self._ready:
            self._order(step, self._position)
            self._fetch()
        handed = self._ready[step]
        own = handed.rounds.pop(0)
        if not handed.rounds:
            del self._ready[step]
        return own, handed

    def _order_ahead(self, step: int, position: int) -> None:
        """With a lag, have the answers of the step after this one ordered when its shift is over."""
        if self._config.rollout.lag and step < self._config.run.steps:
            self._apart.then = partial(self._order, step + 1, position)

    def _order(self, step: int, position: int) -> None:
        """Have the engines sample the answers of a step, the next prompt of which is at `position`, or evaluate."""
        self._fetch()
        version = self._apart.begin("sample" if step > 0 else "evaluate", step=step, prompts=position)
        self._ordered = step, version

    def _fetch(self) -> None:
        """Wait for what is under way. Collective. Raises as `Rollouts.run`; EngineStateError for other weights."""
        if self._ordered is None:
            return
        (step, version), self._ordered = self._ordered, None
        handed = take_over()
        if handed.word == GIVEN_UP:
            raise StepAbandoned(f"the rollouts of step {step} were given up")
        if handed.word:
            raise NotFiniteError(handed.word)
        with agreed("checking the versions of answers"):
            check_version(handed, step, version, self._config.rollout.lag)
        if handed.taken:
            self._groups, handed.groups = handed.groups, []
        self._ready[step] = handed


class SlicesApart(RolloutsApart):
    """The same where answers are cut."""

    def __init__(self, *arguments: Any, start: Path | None = None, **options: Any) -> None:
        super().__init__(*arguments, start=start, **options)
        if start is not None and is_main():
            self._groups = [packed_groups(read_groups(start))]
        self._figures: dict[str, float] = {}
        self._present: list[Trajectory] = []
        self._version = -1

    def take(
        self, source: Source, position: int, count: int, settings: RolloutSettings, terms: Terms
    ) -> tuple[list[Prompt], list[Answer], int]:
        """The prompts of the groups that are complete, and the answers to them; see `SlicedRollouts.take`."""
        self._position = position
        own, handed = self._next_round(settings.step)
        places, position = handed.taken.pop(0)
        self._version, self._present, self._figures = settings.policy_version, handed.present, handed.figures
        if handed.version != settings.policy_version:  # then all tokens are of earlier weights
            lag = self._config.rollout.lag
            older = {key: handed.figures[key] + lag for key in ("stale/age_mean", "stale/age_max")}
            self._figures = handed.figures | {"stale/share": 1.0} | older
        self._order_ahead(settings.step, position)
        prompts = [source(place, 1)[0] for place in places]
        answers = self._gathered(own, terms, settings.policy_version)
        return prompts, self._checked(answers, prompts, terms.lengths), position

    def figures(self) -> dict[str, float]:
        """See `SlicedRollouts`."""
        return self._figures

    def untrained(self) -> list[Answer]:
        """See `SlicedRollouts`. With a lag engines have none of the present version, but in the first step."""
        present = [t for t in self._present if t.weight_version == self._version]
        return gather_answers(present, version=self._version)


def check_version(handed: Handed, step: int, version: int, lag: int) -> None:
    """Raise EngineStateError, naming both, where other weights have sampled than those of the only version that step
    and lag prescribe, or, where answers are cut, later ones.
    """
    sampled = {own for each in handed.rounds for t in each for own, _ in t.versions}
    for other in sampled - {version}:
        if other > version or not handed.taken:
            raise EngineStateError(
                f"weights of version {other} have sampled answers of step {step}, which at rollout.lag = {lag} are "
                f"those of version {version}"
            )


def read_handed(checkpoint: Path) -> dict[int, Handed]:
    """What a checkpoint has of the next step: on rank 0 the answers of all ranks, on others as many empty rounds."""
    kept = [msgspec.msgpack.decode(ready, type=dict[int, Handed], dec_hook=array) for ready in read_ready(checkpoint)]
    found = {step: together([each[step] for each in kept]) for step in (kept[0] if kept else ())}
    return found if is_main() else {step: handed.bare() for step, handed in found.items()}
