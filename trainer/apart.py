"""Rollouts by engines on ranks of their own (`engine.apart`): both ends of what is ordered and handed over.

Three ways were weighed. All ranks could run every line of the loop, which asks at each whether it is for them. An
engine could be driven request by request from a rank that trains, which takes a protocol for tools, environments and
clients. Or, as here with the fewest lines, the ranks that generate run `RLTrainer.sample` for themselves, and those
that train run it again with what the others' engines have sampled, as if it were their own: dynamic sampling,
evaluation, statistics and learning know nothing of it.

With `rollout.lag: 1` the answers of the next step are ordered before the policy learns from those of this one, and are
fetched when it has. They belong to the checkpoint then, since the weights that sampled them are gone.
"""

from collections.abc import Callable, Coroutine
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
from sharding.ranks import agree, agreed, all_crews, all_to_all_bytes, is_main, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.learning.answers import Answer
from trainer.rollouts import Rollouts, Source, StepAbandoned, Terms
from trainer.run.checkpoint import CARRIED_FILES

T = TypeVar("T")
Rounds = list[list[Trajectory]]
"""What one rank has of an order: of each round of sampling, or of each held-out dataset, its trajectories."""

GIVEN_UP = "given up"


class OwnRounds(Rollouts):
    """Rollouts on a rank that only generates, which keep what its engine has sampled.
    `rounds`: since they were taken last.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rounds: Rounds = []

    def _on_leaders(self, work: Callable[[Leader], Coroutine[Any, Any, T]], terms: Terms, step: int) -> T | None:
        own = super()._on_leaders(work, terms, step)
        self.rounds.append(list(own) if isinstance(own, list) else [])
        return own


def hand_over(training: int, rounds: Rounds, word: str, error: Exception | None) -> None:
    """On a rank that generates, after an order: its rounds go to one of the `training` ranks that train. Collective
    among all ranks. `word`: why there is nothing to learn from, without an error. Raises RemoteError on all ranks where
    one has an error.
    """
    with all_crews():
        agree(error, "generating")
        bare: Rounds = [[] for _ in rounds]
        packed = [msgspec.msgpack.encode((word, each), enc_hook=plain) for each in (rounds, bare)]
        mine = rank() % training
        all_to_all_bytes([packed[who != mine] if who < training else b"" for who in range(world_size())])


def take_over() -> tuple[str, Rounds]:
    """On a rank that trains: the word of `hand_over`, and the rounds that come here, of all engines together."""
    with all_crews():
        agree(None, "generating")
        told = [came for came in all_to_all_bytes([b""] * world_size()) if came]
    found = [msgspec.msgpack.decode(came, type=tuple[str, Rounds], dec_hook=array) for came in told]
    word = next((word for word, _ in found if word), "")
    return word, [[*chain(*parts)] for parts in zip(*(rounds for _, rounds in found), strict=not word)]


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
        self._ready: dict[int, Rounds] = {}  # by step, from 1, or by evaluation, below 0
        if start is not None and config.rollout.lag:
            self._ready = read_rounds(start)

    def take(
        self, source: Source, position: int, count: int, settings: RolloutSettings, terms: Terms
    ) -> tuple[list[Prompt], list[Answer], int]:
        """See `Rollouts`. With a lag, the next step's are ordered when this one's shift is over."""
        self._position = position
        taken = super().take(source, position, count, settings, terms)
        if self._config.rollout.lag and settings.step < self._config.run.steps:
            self._apart.then = partial(self._order, settings.step + 1, taken[2])
        return taken

    def carried(self) -> bytes:
        """The answers of the next step, where they are sampled by now: see `read_rounds`. Collective."""
        self._fetch()
        return msgspec.msgpack.encode(self._ready, enc_hook=plain) if self._ready else b""

    def _on_leaders(self, work: Callable[[Leader], Coroutine[Any, Any, T]], terms: Terms, step: int) -> T | None:
        """The next round of the step, or of the evaluation; `work` is done elsewhere."""
        self._fetch()  # with a lag it is this step's, unless a checkpoint has had it fetched
        if step not in self._ready:
            self._order(step, self._position)
            self._fetch()
        own = self._ready[step].pop(0)
        if not self._ready[step]:
            del self._ready[step]
        return own  # type: ignore[return-value]  # what `Rollouts.run` asks for

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
        word, rounds = take_over()
        if word == GIVEN_UP:
            raise StepAbandoned(f"the rollouts of step {step} were given up")
        if word:
            raise NotFiniteError(word)
        with agreed("checking the versions of answers"):
            check_version(rounds, step, version, self._config.rollout.lag)
        self._ready[step] = rounds


def check_version(rounds: Rounds, step: int, version: int, lag: int) -> None:
    """Raise EngineStateError, naming both, where other weights have sampled than those of the only version that step
    and lag prescribe.
    """
    for other in {own for each in rounds for t in each for own, _ in t.versions} - {version}:
        raise EngineStateError(
            f"weights of version {other} have sampled answers of step {step}, which at rollout.lag = {lag} are those "
            f"of version {version}"
        )


def read_rounds(checkpoint: Path) -> dict[int, Rounds]:
    """The answers of the next step that a checkpoint has: on rank 0 all of them, whichever rank had them, and as many
    empty rounds on the others.
    """
    found: dict[int, Rounds] = {}
    for file in sorted(checkpoint.glob(CARRIED_FILES)):
        for step, rounds in msgspec.msgpack.decode(
            file.read_bytes(), type=dict[int, Rounds], dec_hook=array, strict=False
        ).items():
            whole = found.setdefault(step, [[] for _ in rounds])
            for into, own in zip(whole, rounds if is_main() else [], strict=False):
                into += own
    return found
