"""A round of sampling, as it travels between ranks, goes into the journal of answers and into checkpoints."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec

from generation.engine.lifecycle import EngineStateError
from generation.images import Image
from generation.rollouts.episodes import CarriedGroup
from generation.trajectory import Trajectory, array, plain
from sharding.ranks import is_main
from trainer.learning.answers import Answer, gather_answers
from trainer.run.checkpoint import CARRIED_FILES

GIVEN_UP = "given up"
"""The word of a round that was given up since the run is asked to end."""


@dataclass(frozen=True)
class Order:
    """A request for the answers that a step is trained on, or, where `step` is below 0, for those to all held-out
    prompts.

    Attributes:
        step: number of the step, from 1; -1 less the number of steps done, for an evaluation.
        version: of the policy's weights.
        position: of the next prompt in the sequence that training sees.
    """

    step: int
    version: int
    position: int

    @property
    def evaluates(self) -> bool:
        """True for an order of held-out answers."""
        return self.step < 0


@dataclass
class Round:
    """The part that one rank, or several together, have of a round of a step, or of one held-out dataset.

    Attributes:
        step: see `Order`; 0 in a checkpoint, for what is not of a step: parked groups and random states.
        version: of the weights that the round was ordered with.
        word: why there is nothing to learn from, without an error; "" otherwise. With it, nothing else is set.
        trajectories: of this rank, by prompt and sample.
        places: places of its groups in the sequence of prompts that training sees, by prompt index.
        position: of the next prompt in that sequence.
        figures: of the step where answers are cut; see `CarriedGroups.figures`.
        untrained: trajectories for the gap where the round has none of the present version; see `Source.untrained`.
        groups: those that go on in the next step, where answers are cut.
        random_states: of the ranks that sampled it, after it, as JSON, by their number in the run.
        key: what decides it, in the journal.
    """

    step: int = 0
    version: int = -1
    word: str = ""
    trajectories: list[Trajectory] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    position: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    untrained: list[Trajectory] = field(default_factory=list)
    groups: list[CarriedGroup] = field(default_factory=list)
    random_states: dict[int, str] = field(default_factory=dict)
    key: str = ""

    def __post_init__(self) -> None:
        self._answers: list[Answer] | None = None  # it does not travel

    def answers(self, details: bool = False, version: int | None = None) -> list[Answer]:
        """The answers of all ranks of this crew; see `gather_answers`. Collective, the first time."""
        if self._answers is None:
            self._answers = gather_answers(self.trajectories, details, version)
        return self._answers

    def bare(self) -> "Round":
        """The same without anything that was sampled."""
        return replace(self, trajectories=[], untrained=[], groups=[])


def sampled_round(answers: list[Answer], step: int, version: int, places: Sequence[int], position: int) -> Round:
    """The round of these answers of all ranks, of which this rank's trajectories go with it."""
    trajectories = [answer.trajectory for answer in answers if answer.trajectory is not None]
    found = Round(step, version, trajectories=trajectories, places=list(places), position=position)
    found._answers = answers
    return found


class Source(Protocol):
    """The origin of a training rank's answers. Every rank of its crew makes the same calls.

    `trainer.rollouts.sampling.Sampling` samples them on this rank's engine, and `trainer.rollouts.apart.Apart` orders
    them of engines on other ranks. `trainer.rollouts.journal.Journal` keeps those of either on disk.
    """

    @property
    def finished(self) -> int:
        """Answers of the present round that this rank's engine has finished. For any thread."""

    def produce(self, order: Order) -> list[Round]:
        """The rounds of a step, or of an evaluation one for each dataset. Collective.

        Raises:
            RemoteError: on all ranks, when an engine failed on one. The order can be repeated.
            StepAbandoned: on all ranks, when the run is asked to end.
            NotFiniteError: on all ranks, when an engine sampled a log-probability that is not finite.
        """

    def replayed(self, rounds: list[Round], ahead: bool) -> None:
        """Go on as if these rounds of a step had been produced. `ahead`: those of the next step will be asked for."""

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, if an engine's death or SIGTERM has ended one. Collective."""

    def carried(self) -> bytes:
        """Pack what a checkpoint keeps of this rank's answers. Collective."""

    def untrained(self) -> list[Answer]:
        """Give some answers with tokens of the present version that are not trained in this step. Collective."""

    def waits_for(self) -> str:
        """Say what keeps a rollout that takes long; "" where that is not known. For any thread."""


def together(parts: Sequence[list[Round]]) -> list[Round]:
    """The rounds of one order, of which several ranks have parts. Where one has a word, that is the only round."""
    if spoken := next((rounds[0] for rounds in parts if rounds and rounds[0].word), None):
        return [spoken]
    return [
        replace(
            same[0],
            trajectories=[*chain.from_iterable(part.trajectories for part in same)],
            untrained=[*chain.from_iterable(part.untrained for part in same)],
            groups=[*chain.from_iterable(part.groups for part in same)],
            random_states={number: state for part in same for number, state in part.random_states.items()},
        )
        for same in zip(*parts, strict=True)
    ]


def check_version(rounds: Sequence[Round], version: int, lag: int, cut: bool) -> None:
    """Raise EngineStateError, naming both, where a token was sampled by another version than the step and its lag
    prescribe; where answers are `cut`, by a later one.
    """
    sampled = {sampled for each in rounds for t in each.trajectories for sampled, _ in t.versions}
    for other in sampled - {version}:
        if other > version or not cut:
            raise EngineStateError(
                f"weights of version {other} have sampled answers of step {rounds[0].step}, which at rollout.lag = "
                f"{lag} are those of version {version}"
            )


def _with_files(rounds: Iterable[Round], file_of: Callable[[Image], bytes]) -> list[Round]:
    """Copies of the rounds, unfinished groups included, in which `file_of` gives each image its file."""

    def changed(trajectories: list[Trajectory]) -> list[Trajectory]:
        images = [tuple(replace(image, data=file_of(image)) for image in t.images) for t in trajectories]
        return [replace(t, images=own) if own else t for t, own in zip(trajectories, images, strict=True)]

    return [
        replace(
            each,
            trajectories=changed(each.trajectories),
            untrained=changed(each.untrained),
            groups=[replace(group, done={n: changed(done) for n, done in group.done.items()}) for group in each.groups],
        )
        for each in rounds
    ]


def packed(rounds: Sequence[Round]) -> bytes:
    """The rounds as msgpack, with the file of each image once."""
    images: dict[str, bytes] = {}

    def taken_out(image: Image) -> bytes:
        images[image.digest] = image.data
        return b""

    return msgspec.msgpack.encode((_with_files(rounds, taken_out), images), enc_hook=plain)


def unpacked(data: bytes) -> list[Round]:
    """The rounds that `packed` gave. Raises msgspec.DecodeError, a ValueError."""
    rounds, images = msgspec.msgpack.decode(data, type=tuple[list[Round], dict[str, bytes]], dec_hook=array)
    return _with_files(rounds, lambda image: images[image.digest])


def read_rounds(checkpoint: Path) -> list[list[Round]]:
    """Read the rounds that each rank had carried over, in the order of their files' names."""
    return [unpacked(file.read_bytes()) for file in sorted(checkpoint.glob(CARRIED_FILES))]


def read_groups(checkpoint: Path) -> list[CarriedGroup]:
    """All groups that a checkpoint has, whichever engine had them, the oldest first."""
    return in_order(group for rounds in read_rounds(checkpoint) for each in rounds for group in each.groups)


def in_order(groups: Iterable[CarriedGroup]) -> list[CarriedGroup]:
    """The groups, the oldest first."""
    return sorted(groups, key=lambda group: group.place)


def read_ready(checkpoint: Path) -> dict[int, list[Round]]:
    """The rounds that a checkpoint has of steps after it: on rank 0 with the answers of all ranks, on others bare."""
    ranks = [[each for each in rounds if each.step] for rounds in read_rounds(checkpoint)]
    found: dict[int, list[Round]] = {}
    for step in dict.fromkeys(each.step for each in chain.from_iterable(ranks)):
        found[step] = together([[each for each in rounds if each.step == step] for rounds in ranks if rounds])
    return found if is_main() else {step: [each.bare() for each in rounds] for step, rounds in found.items()}


def read_random_states(checkpoint: Path) -> dict[int, str]:
    """Read the random states of ranks that only generate, by their number in the run."""
    rounds = chain.from_iterable(read_rounds(checkpoint))
    return {number: state for each in rounds for number, state in each.random_states.items()}
