"""Rollouts whose answers stay on disk until a checkpoint has what was learned from them (`checkpoint.rollouts`).

A run that dies in an update has sampled in vain, and with a checkpoint every hundred steps it has done so up to a
hundred times. Here every rank writes what its engine has sampled before anything is learned from it. When the run is
started again, its steps learn from the same answers, in the same order, up to the first that is not there: from then on
everything is sampled. Updates are computed anew, so on CPU the run ends bit for bit as if it had not died.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from generation.rollouts.episode import RolloutSettings
from generation.trajectory import Trajectory, array, plain
from sharding.ranks import agreed, exchange, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.distributed import say
from trainer.learning.answers import Answer, gather_answers
from trainer.rollouts import Rollouts, Source, Terms
from trainer.run.checkpoint import latest_complete, random_states, restore_random_states
from trainer.run.records import patiently, write_whole

_NAME = re.compile(r"(\d+)-(\d+)\.rank_\d+")  # of step and round
_DO_NOT_MATTER = ("run", "tracking", "checkpoint", "eval")  # sections that may differ, run.seed being in the identity


class _Round(msgspec.Struct):
    """What one rank has sampled in one round of a step."""

    key: str  # of all that decides it
    version: int
    random_states: str  # behind it
    trajectories: list[Trajectory]


class KeptRollouts(Rollouts):
    """See `Rollouts`."""

    def __init__(self, config: TrainConfig, identity: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """`identity` is the run's. What other runs have left in the folder is not used, nor are a run's own answers
        where it does not resume from its own checkpoints.
        """
        super().__init__(*arguments, **options)
        self._folder, self._checkpoints = config.run.folder / "answers", config.run.folder / "checkpoints"
        self._patience = config.checkpoint.patience_s
        matter = {name: keys for name, keys in config.recorded().items() if name not in _DO_NOT_MATTER}
        text = json.dumps([matter, identity, world_size()], sort_keys=True)
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._step = self._round = self._reused = 0
        if config.checkpoint.resume != "auto":
            self._drop(lambda step, number: True)

    def take_back(self, step: int) -> None:
        """See `Rollouts`. Rounds that are complete are kept, as after a restart of the run."""
        super().take_back(step)
        self._step, self._round = step, 0

    def take(
        self,
        source: Source,
        position: int,
        count: int,
        settings: RolloutSettings,
        terms: Terms,
    ) -> tuple[list[Prompt], list[Answer], int]:
        """See `Rollouts`."""
        if settings.step != self._step:
            self._step, self._round = settings.step, 0
        self._round += 1
        kept = self._read(settings.policy_version)
        if all(exchange(kept is not None)):
            assert kept is not None
            restore_random_states(json.loads(kept.random_states), self._file().name)
            prompts = source(position, count)
            answers = self._checked(gather_answers(kept.trajectories, terms.details), prompts, terms.lengths)
            self._reused += len(answers)
            return prompts, answers, position + count
        if self._reused:
            say(f"{self._reused} answers were kept; sampling goes on in step {self._step}")
            self._reused = 0
        step, number = self._step, self._round
        self._drop(lambda of, nth: (of, nth) >= (step, number))  # of another policy, from here on
        result = super().take(source, position, count, settings, terms)
        self._write(settings.policy_version, [a.trajectory for a in result[1] if a.trajectory is not None])
        return result

    def _file(self) -> Path:
        return self._folder / f"{self._step}-{self._round}.rank_{rank()}"

    def _read(self, version: int) -> _Round | None:
        """This rank's part of the round, if it was kept whole, by the same run and policy."""
        try:
            found = msgspec.msgpack.decode(self._file().read_bytes(), type=_Round, dec_hook=array)
        except (OSError, ValueError, msgspec.DecodeError):
            return None
        return found if (found.key, found.version) == (self._key, version) else None

    def _write(self, version: int, own: list[Trajectory]) -> None:
        """Keep this rank's part of the round, and drop what checkpoints have. Collective."""
        packed = msgspec.msgpack.encode(_Round(self._key, version, json.dumps(random_states()), own), enc_hook=plain)
        with agreed("keeping the answers"):
            self._folder.mkdir(parents=True, exist_ok=True)
            patiently(partial(write_whole, self._file(), packed), f"the answers of step {self._step}", self._patience)
            newest = latest_complete(self._checkpoints)
            saved = int(newest.name.removeprefix("step_")) if newest is not None else 0
            self._drop(lambda step, number: step <= saved)

    def _drop(self, unneeded: Callable[[int, int], bool]) -> None:
        """Delete this rank's rounds of which `unneeded(step, round)` is true."""
        for file in self._folder.glob(f"*.rank_{rank()}"):
            if (name := _NAME.fullmatch(file.name)) and unneeded(int(name[1]), int(name[2])):
                file.unlink(missing_ok=True)
