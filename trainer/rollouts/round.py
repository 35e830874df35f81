"""A round of sampling, in the form in which it is sent between ranks and stored in the journal and
in checkpoints.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import msgspec

from generation.engine.lifecycle import EngineStateError
from generation.images import Image
from generation.rollouts.episodes import CarriedGroup
from generation.trajectory import Trajectory, array, plain
from sharding.ranks import is_main
from trainer.learning.answers import Answer, gather_answers
from trainer.run.checkpoint import CARRIED_FILES

GIVEN_UP = "given up"
"""The word of a round that was abandoned because the run was asked to end."""


@dataclass(frozen=True)
class Order:
    """A request for a step's answers or, if `step` is negative, for answers to all held-out
    prompts.

    Attributes:
        step: number of the step, from 1; for an evaluation, -1 minus the number of steps done.
        version: version of the policy's weights to sample with.
        position: position of the next prompt in the training sequence.
    """

    step: int
    version: int
    position: int

    @property
    def evaluates(self) -> bool:
        """True if the order is for answers to held-out prompts."""
        return self.step < 0


@dataclass
class Round:
    """A round of a step or of one held-out dataset: the part of one rank, or of several ranks
    joined.

    Attributes: step: the order's step; 0 in a checkpoint for parked groups and random states, which
        belong to no step. version: version of the weights that the round was ordered with. word:
        the reason why there are no answers, if this is not an error; otherwise "". If set, nothing
        else is. trajectories: trajectories of the rank, by prompt and sample. places: positions of
        the groups' prompts in the training sequence, by prompt index. position: position of the
        next prompt in that sequence. figures: metrics of the step if answers grow in slices; see
        `CarriedPool`. untrained: trajectories to measure the gap on if the round has none of the
        present version. groups: groups that continue in the next step, if answers grow in slices.
        random_states: random states of the sampling ranks after the round, as JSON, by their number
        in the run. key: the journal's key, which has to match for the round to be replayed.
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
        self._answers: list[Answer] | None = None  # a cache, which is neither sent nor stored

    def answers(self, details: bool = False, version: int | None = None) -> list[Answer]:
        """Return the answers of all ranks of this crew; see `gather_answers`. The first call is
        collective.
        """
        if self._answers is None:
            self._answers = gather_answers(self.trajectories, details, version)
        return self._answers

    def bare(self) -> "Round":
        """Return a copy without trajectories and groups."""
        return replace(self, trajectories=[], untrained=[], groups=[])


def sampled_round(
    answers: list[Answer], step: int, version: int, positions: Sequence[int], position: int
) -> Round:
    """Build a round from the answers of all ranks; it stores this rank's trajectories."""
    trajectories = [answer.trajectory for answer in answers if answer.trajectory is not None]
    sampled = Round(step, version, trajectories=trajectories, places=list(positions), position=position)
    sampled._answers = answers
    return sampled


def together(parts: Sequence[list[Round]]) -> list[Round]:
    """Join the parts of an order's rounds that several ranks have. If a part has a word, returns
    that round only.
    """
    if spoken := next((rounds[0] for rounds in parts if rounds and rounds[0].word), None):
        return [spoken]
    joined = []
    for same in zip(*parts, strict=True):
        whole = replace(same[0], trajectories=[], untrained=[], groups=[], random_states={})
        for part in same:
            whole.trajectories += part.trajectories
            whole.untrained += part.untrained
            whole.groups += part.groups
            whole.random_states |= part.random_states
        joined.append(whole)
    return joined


def check_version(rounds: Sequence[Round], version: int, lag: int, cut: bool) -> None:
    """Raise EngineStateError, naming both versions, if a token was sampled by another version than
    `version`.

    That is the version that the step and its lag prescribe. If answers are `cut` into slices,
    earlier versions are permitted.
    """
    sampled: set[int] = set()
    for one_round in rounds:
        for trajectory in one_round.trajectories:
            sampled |= {number for number, _ in trajectory.versions}
    for other in sampled - {version}:
        if other > version or not cut:
            raise EngineStateError(
                f"weights of version {other} have sampled answers of step {rounds[0].step}, which at "
                f"rollout.lag = {lag} needs version {version}"
            )


def _with_files(rounds: Iterable[Round], file_of: Callable[[Image], bytes]) -> list[Round]:
    """Copy the rounds and their groups, and set the data of each image to what `file_of` returns
    for it.
    """

    def changed(trajectories: list[Trajectory]) -> list[Trajectory]:
        copies = []
        for trajectory in trajectories:
            images = tuple(replace(image, data=file_of(image)) for image in trajectory.images)
            copies.append(replace(trajectory, images=images) if images else trajectory)
        return copies

    new = []
    for old in rounds:
        trajectories = changed(old.trajectories)
        untrained = changed(old.untrained)
        groups = []
        for group in old.groups:
            done = {sample: changed(answers) for sample, answers in group.done.items()}
            groups.append(replace(group, done=done))
        new.append(replace(old, trajectories=trajectories, untrained=untrained, groups=groups))
    return new


def packed(rounds: Sequence[Round]) -> bytes:
    """Pack rounds as msgpack, with each image's file stored once."""
    images: dict[str, bytes] = {}

    def taken_out(image: Image) -> bytes:
        images[image.digest] = image.data
        return b""

    return msgspec.msgpack.encode((_with_files(rounds, taken_out), images), enc_hook=plain)


def unpacked(data: bytes) -> list[Round]:
    """Unpack the rounds that `packed` packed. Raises msgspec.DecodeError, a ValueError."""
    rounds, images = msgspec.msgpack.decode(
        data, type=tuple[list[Round], dict[str, bytes]], dec_hook=array
    )
    return _with_files(rounds, lambda image: images[image.digest])


def read_rounds(checkpoint: Path) -> list[list[Round]]:
    """Read the rounds that each rank has stored in a checkpoint, in the order of the files'
    names.
    """
    return [unpacked(file.read_bytes()) for file in sorted(checkpoint.glob(CARRIED_FILES))]


def read_groups(checkpoint: Path) -> list[CarriedGroup]:
    """Read all engines' groups from a checkpoint, the oldest first."""
    rounds = chain.from_iterable(read_rounds(checkpoint))
    return in_order(group for one_round in rounds for group in one_round.groups)


def in_order(groups: Iterable[CarriedGroup]) -> list[CarriedGroup]:
    """Sort groups, the oldest first."""
    return sorted(groups, key=lambda group: group.place)


def read_ready(checkpoint: Path) -> dict[int, list[Round]]:
    """Read the rounds of later steps from a checkpoint, by step: with all answers on rank 0, bare
    on other ranks.
    """
    ranks = []
    for rounds in read_rounds(checkpoint):
        if later := [part for part in rounds if part.step]:
            ranks.append(later)
    ready: dict[int, list[Round]] = {}
    for step in dict.fromkeys(part.step for part in chain.from_iterable(ranks)):
        parts = []
        for rounds in ranks:
            parts.append([part for part in rounds if part.step == step])
        joined = together(parts)
        ready[step] = joined if is_main() else [one_round.bare() for one_round in joined]
    return ready


def read_random_states(checkpoint: Path) -> dict[int, str]:
    """Read the random states of generating ranks from a checkpoint, by their number in the run."""
    rounds = chain.from_iterable(read_rounds(checkpoint))
    return {number: state for stored in rounds for number, state in stored.random_states.items()}
