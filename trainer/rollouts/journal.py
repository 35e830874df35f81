"""A journal that keeps answers on disk until a checkpoint includes the updates from them
(`checkpoint.rollouts`).

Without it, a run that dies has to sample all steps since its last checkpoint again. With it, every
rank writes the rounds of a step to disk before the policy learns from them. When the run is started
again, its steps learn from the same answers, in the same order, until the journal ends; from then
on answers are sampled. Updates are computed again, so on CPU the run ends bit for bit as if it had
not died.
"""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sharding.ranks import EVERYBODY, agreed, exchange, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.distributed import say
from trainer.rollouts.answer_source import Source
from trainer.rollouts.round import Order, Round, packed, unpacked
from trainer.rollouts.step_batch import StepBatch
from trainer.run.checkpoint import latest_complete, random_states, restore_random_states
from trainer.run.records import patiently, write_whole

_NAME = re.compile(r"(\d+)\.rank_\d+")  # a file's name, with the number of its step
# Sections that may differ; run.seed is in the identity
_DO_NOT_MATTER = ("run", "tracking", "checkpoint", "eval")


class Journal:
    """Keeps the rounds of a source's steps on disk and replays them after a restart."""

    def __init__(self, source: Source, config: TrainConfig, identity: dict[str, Any]) -> None:
        """Open the journal of a run. Rounds of a run with another `identity` in the folder are not
        replayed.

        A run that does not resume from its own checkpoints deletes the rounds that it finds.
        """
        self._source = source
        self._folder = config.run.folder / "answers"
        self._checkpoints = config.run.folder / "checkpoints"
        self._patience = config.checkpoint.patience_s
        matter = {name: keys for name, keys in config.recorded().items() if name not in _DO_NOT_MATTER}
        text = json.dumps([matter, identity, world_size(), world_size(EVERYBODY)], sort_keys=True)
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._reused = 0
        if config.checkpoint.resume != "auto":
            self._drop(lambda step: True)

    def produce(self, order: Order) -> StepBatch:
        """Return the batch of a step, from the disk or from the source. Collective; raises as
        `Source.produce`.
        """
        rounds = self._read(order.step, self._key_of(order))
        if rounds is not None:
            restore_random_states(
                json.loads(rounds[-1].random_states[rank(EVERYBODY)]), self._file(order.step).name
            )
            following = f"{self._key}/{rounds[-1].position}/"
            ahead = self._read(order.step + 1, following) is None
            self._reused += 1
            return self._source.replayed(order, rounds, ahead=ahead)
        if self._reused:
            say(
                f"reused the kept answers of {self._reused} steps; sampling continues in step "
                f"{order.step}"
            )
            self._reused = 0
        self._drop(lambda step: step >= order.step)  # another policy has sampled these
        batch = self._source.produce(order)
        self._write(order, batch.rounds)
        return batch

    def _file(self, step: int) -> Path:
        return self._folder / f"{step}.rank_{rank()}"

    def _key_of(self, order: Order) -> str:
        return f"{self._key}/{order.position}/{order.version}/"

    def _read(self, step: int, key: str) -> list[Round] | None:
        """Read this rank's rounds of a step; None unless all ranks have intact rounds whose keys
        begin with `key`.

        Collective.
        """
        rounds: list[Round] = []
        with suppress(OSError, ValueError):
            rounds = unpacked(self._file(step).read_bytes())
        return rounds if all(exchange(bool(rounds) and rounds[0].key.startswith(key))) else None

    def _write(self, order: Order, rounds: list[Round]) -> None:
        """Write this rank's rounds of a step, and delete rounds of steps that a checkpoint
        includes. Collective.
        """
        rounds[0].key = self._key_of(order)
        rounds[-1].random_states |= {rank(EVERYBODY): json.dumps(random_states())}
        data = packed(rounds)
        with agreed("keeping the answers"):
            self._folder.mkdir(parents=True, exist_ok=True)
            write = partial(write_whole, self._file(order.step), data)
            patiently(write, f"the answers of step {order.step}", self._patience)
            newest = latest_complete(self._checkpoints)
            saved = int(newest.name.removeprefix("step_")) if newest is not None else 0
            self._drop(lambda step: step <= saved)

    def _drop(self, unneeded: Callable[[int], bool]) -> None:
        """Delete this rank's rounds of the steps for which `unneeded` is true."""
        for file in self._folder.glob(f"*.rank_{rank()}"):
            if (name := _NAME.fullmatch(file.name)) and unneeded(int(name[1])):
                file.unlink(missing_ok=True)
