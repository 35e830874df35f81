"""Checkpoints that are complete or invisible (invariant 10, P20).

    checkpoints/step_40/
        __0_0.distcp, ..., .metadata     the parts' sharded tensors, by torch.distributed.checkpoint
        rank_0.json, ...                 each rank's random states
        extra.json                       the loop's own: step, data fingerprint, counters
        COMPLETE                         written last

All of it is written to `step_40.tmp` and synced to disk before that is renamed, and the marker comes last: whatever is
killed at whatever moment, the newest folder with a marker can be resumed from. Another number of ranks may load it.
Several machines need a folder they share.
"""

import copy
import json
import math
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from trainer.distributed import agreed, is_main, rank, world_size
from trainer.errors import UserError

_MARKER = "COMPLETE"

Parts = Mapping[str, Stateful]
"""What a checkpoint keeps, by name: the policy, and whatever else learns."""


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps: all that a checkpoint keeps of it on this rank.

    Attributes:
        tensors: the `state_dict` of each part, by the part's name.
        random_states: this rank's.
        extra: JSON, the same on all ranks.
    """

    step: int
    tensors: dict[str, Any]
    random_states: dict[str, Any]
    extra: dict[str, Any]

    @classmethod
    def take(cls, step: int, parts: Parts, extra: dict[str, Any]) -> Self:
        """The run as it is now; its tensors are the live ones until `on_host`. Collective."""
        tensors = {name: part.state_dict() for name, part in parts.items()}
        return cls(step, tensors, _random_states(), extra | {"step": step, "world_size": world_size()})

    def on_host(self) -> Self:
        """With copies of the tensors in host memory, so that training can go on."""
        return replace(self, tensors=_host_copy(self.tensors))


def save(folder: Path, step: int, parts: Parts, extra: dict[str, Any]) -> Path:
    """Write `folder`/step_N and return it. Collective. `extra` is JSON; the step and the number of ranks are added."""
    return write(folder, Snapshot.take(step, parts, extra))


def write(folder: Path, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
    """Write a snapshot to `folder`/step_N and return that. Collective, over `group` (None: the default one).

    An error on any rank (a full disk) is raised on all, and leaves the earlier checkpoints as they are.
    """
    final = folder / f"step_{snapshot.step}"
    temporary = folder / f"step_{snapshot.step}.tmp"
    with agreed("checkpoint (folder)", group):
        if is_main():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with agreed("checkpoint (write)", group):
        if not temporary.is_dir():
            raise UserError(
                f"{folder} is not shared between the machines of this run; set run.output_dir to a folder that is"
            )
        _write_shards(temporary, snapshot.tensors, group)
        _write(temporary / f"rank_{rank()}.json", json.dumps(snapshot.random_states))
        if is_main():
            _write(temporary / "extra.json", json.dumps(snapshot.extra))
    with agreed("checkpoint (publish)", group):
        if is_main():
            _publish(temporary, final)
    return final


def load(path: Path, parts: Parts) -> dict[str, Any]:
    """Load a checkpoint into the parts, restore this rank's random states, return `extra`. Collective.

    Raises UserError when the checkpoint is incomplete or belongs to another model. Random states are restored only if
    there are as many ranks as when it was saved.
    """
    extra = read_extra(path)
    state = {name: part.state_dict() for name, part in parts.items()}
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())
    except CheckpointException as failed:
        raise UserError(f"checkpoint {path} does not fit this model: {_reason(failed)}") from failed
    for name, part in parts.items():
        part.load_state_dict(state[name])
    if extra["world_size"] == world_size():
        _restore_random_states(json.loads((path / f"rank_{rank()}.json").read_text()))
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """The `extra` that a checkpoint was saved with. Raises UserError when the checkpoint is incomplete."""
    if not _is_complete(path):
        newest = latest_complete(path.parent)
        remedy = f"the newest complete one there is {newest}" if newest else "there is no complete one beside it"
        raise UserError(f"checkpoint {path} does not exist or was not finished; {remedy}")
    return json.loads((path / "extra.json").read_text())


def latest_complete(folder: Path) -> Path | None:
    """The complete checkpoint with the largest step, or None."""
    return max(_complete(folder), key=_step, default=None)


def prune(folder: Path, keep: int, keep_best: int = 0, metric: str = "") -> None:
    """Delete all complete checkpoints but the newest `keep` and the best `keep_best`; the newest always stays.

    The best have the largest `metric` of those they were saved with, or with a "-" before its name the smallest. Where
    it is missing or NaN a checkpoint is not among them; of equals the newer is better. Rank 0 does it.
    """
    if not is_main():
        return
    paths = sorted(_complete(folder), key=_step, reverse=True)
    merits = {path: merit for path in paths if keep_best and (merit := _merit(path, metric)) is not None}
    best = sorted(merits, key=lambda path: -merits[path])[:keep_best]
    for path in set(paths[max(keep, 1) :]) - set(best):
        _delete(path)


def drop_later(folder: Path, step: int) -> None:
    """Delete checkpoints of steps after `step`: a run that starts over, or goes on from an older one, has left them.

    Otherwise they would be the newest for ever, and the next start would go on from them. Rank 0 does it.
    """
    if is_main():
        for path in _complete(folder):
            if _step(path) > step:
                _delete(path)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed run left half written. Rank 0 does it, before the first save."""
    if is_main() and folder.is_dir():
        for path in folder.iterdir():
            if re.fullmatch(r"step_\d+(\.tmp|\.old\.tmp)?", path.name) and not _is_complete(path):
                shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step_*") if _is_complete(path)]


def _is_complete(path: Path) -> bool:
    return re.fullmatch(r"step_\d+", path.name) is not None and (path / _MARKER).is_file()


def _delete(path: Path) -> None:
    (path / _MARKER).unlink()  # first, so that what is half deleted does not look complete
    shutil.rmtree(path)


def _merit(path: Path, metric: str) -> float | None:
    """By how much a checkpoint is better than others; None: it is not known."""
    value = read_extra(path).get("metrics", {}).get(metric.removeprefix("-"))
    if value is None or math.isnan(value):
        return None
    return -value if metric.startswith("-") else value


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _host_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _host_copy(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):  # from_local would bring the copy back to the mesh's device
        return DTensor(value.to_local().detach().to("cpu", copy=True), value._spec, requires_grad=False)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _write_shards(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    try:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as failed:  # a BaseException, which no handler of ordinary errors would see
        raise RuntimeError(_reason(failed)) from failed


def _reason(failed: CheckpointException) -> str:
    who, (error, _) = next(iter(failed.failures.items()))
    return f"rank {who}: {type(error).__name__}: {error}"


def _publish(temporary: Path, final: Path) -> None:
    """Make the folder visible under its name, then complete; everything in it is on disk by then."""
    replaced = final.with_name(f"{final.name}.old.tmp")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # a run that started over; a folder cannot be renamed onto one that is not empty
        final.rename(replaced)
    _sync(temporary)
    temporary.rename(final)
    _sync(final.parent)
    _write(final / _MARKER, "")
    _sync(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Bring a folder's entries to disk: a synced file is lost all the same if its name is not there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_states() -> dict[str, Any]:
    """Of Python, NumPy, torch and this rank's CUDA device, as JSON."""
    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [[int(key) for key in keys], position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(("MT19937", *states["numpy"]))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]))


def _bytes_tensor(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
