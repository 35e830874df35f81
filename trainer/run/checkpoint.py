"""Write, verify and load checkpoints, which are either complete or invisible.

    checkpoints/step_40/
        __0_0.distcp, ..., .metadata   the parts' sharded tensors, by torch.distributed.checkpoint
        rank_0.json, ...               each rank's random states
        extra.json                     the state of the loop: step, data fingerprint, counters
        carried_0.msgpack, ...         each rank's answers that are not trained on yet, if any
        COMPLETE                       written last: the SHA-256 of all other files, in the format
                                       of `sha256sum -c`

All files are written to `step_40.tmp` and synced to disk before that folder is renamed, and the
marker is written last. So the newest folder with a marker can be loaded, whichever process is
killed at whichever moment. A different number of ranks can load it. Ranks on several machines need
a shared folder.

`verify` compares a checkpoint with its digests.
"""

import hashlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from sharding.ranks import CREW, Ranks, agreed, exchange, is_main, rank, world_size
from trainer.config.resuming import COMPLETE_MARKER
from trainer.distributed import say
from trainer.errors import UserError
from trainer.run.checkpoint_reading import METADATA, SHARDS, misfit, read_metadata, read_tensors
from trainer.run.records import PRIVATE, write_whole

_EXTRA = "extra.json"
_FILES = re.compile(rf"{SHARDS}|{re.escape(METADATA)}|rank_\d+\.json|extra\.json|carried_\d+\.msgpack")
CARRIED_FILES = "carried_*.msgpack"
_COUNT_LIMIT = 1 << 24  # the largest number of steps and of ranks in a checkpoint
_REASON_LIMIT = 160  # characters of an error that are quoted in a sentence

# The trained parts of a checkpoint by name: the policy and perhaps a critic
Parts = Mapping[str, Stateful]


class Damaged(UserError):
    """A checkpoint is incomplete or differs from what was written; the message names it and the
    file.
    """


@dataclass(frozen=True)
class Snapshot:
    """A run's state between two steps: this rank's share of a checkpoint."""

    step: int
    # The tensors of the parts' `state_dict`, by dotted paths that begin with a part's name
    tensors: dict[str, Tensor]
    random_states: dict[str, Any]  # this rank's random states
    extra: dict[str, Any]  # JSON, equal on all ranks
    carried: bytes = b""  # this rank's answers that are not trained on yet; see `trainer.rollouts.round`

    @classmethod
    def take(cls, step: int, parts: Parts, extra: dict[str, Any], carried: bytes = b"") -> Self:
        """Take a snapshot of the run as it is now; its tensors are the live ones until `on_host`.
        Collective.
        """
        tensors = dict(_flat({name: part.state_dict() for name, part in parts.items()}))
        extra = extra | {"step": step, "world_size": world_size()}
        return cls(step, tensors, random_states(), extra, carried)

    def on_host(self) -> Self:
        """Return a snapshot with copies of the tensors in host memory, so that training can
        continue.
        """
        return replace(self, tensors={name: _host_copy(tensor) for name, tensor in self.tensors.items()})


def save(folder: Path, step: int, parts: Parts, extra: dict[str, Any]) -> Path:
    """Write `folder`/step_N and return its path. Collective.

    `extra` is JSON, to which the step and the number of ranks are added.
    """
    return write(folder, Snapshot.take(step, parts, extra))


def write(folder: Path, snapshot: Snapshot, among: Ranks = CREW) -> Path:
    """Write a snapshot to `folder`/step_N and return that path. Collective among these ranks.

    An error on any rank, such as a full disk, is raised on all ranks and leaves earlier checkpoints
    unchanged.
    """
    final = folder / f"step_{snapshot.step}"
    temporary = folder / f"step_{snapshot.step}.tmp"
    with agreed("checkpoint (folder)", among=among):
        if is_main():
            _clear(temporary)
            temporary.mkdir(parents=True)
    with agreed("checkpoint (write)", among=among):
        if not temporary.is_dir():
            remedy = "set run.output_dir to a folder that is"
            raise UserError(f"{folder} is not shared between the machines of this run; {remedy}")
        try:
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            alone = not dist.is_initialized()
            dcp.save(snapshot.tensors, storage_writer=writer, process_group=among.channel, no_dist=alone)
        except CheckpointException as failed:
            # A BaseException (torch/distributed/checkpoint/api.py) few handlers see
            who, (error, _) = next(iter(failed.failures.items()))
            raise RuntimeError(f"rank {who}: {type(error).__name__}: {error}") from failed
        write_whole(temporary / f"rank_{rank()}.json", json.dumps(snapshot.random_states))
        if is_main():
            write_whole(temporary / _EXTRA, json.dumps(snapshot.extra), PRIVATE)
        names = [path.name for path in temporary.glob(f"__{rank()}_*")] + [f"rank_{rank()}.json"]
        if snapshot.carried:
            names.append(CARRIED_FILES.replace("*", str(rank())))
            write_whole(temporary / names[-1], snapshot.carried)
        lines = "".join(_digest_line(temporary, name) for name in names + is_main() * [METADATA, _EXTRA])
    digests = "".join(exchange(lines, among=among))
    with agreed("checkpoint (publish)", among=among):
        if is_main():
            _publish(temporary, final, digests)
    return final


def verify(path: Path) -> dict[str, Any]:
    """Compare a checkpoint with its digests, each rank a share of the files, and return its
    `extra`. Collective.

    Raises Damaged, with the same message on all ranks.
    """
    extra: dict[str, Any] = {}
    with _raised_on_all(Damaged, f"checkpoint {path} is damaged"):
        extra = read_extra(path)
        digests = _read_digests(path)
        needed = [METADATA, *(f"rank_{number}.json" for number in range(extra["world_size"]))]
        names = sorted(
            {entry.name for entry in path.iterdir() if _FILES.fullmatch(entry.name)}.union(
                digests, needed
            )
        )
        if unlisted := set(names) - digests.keys():
            raise ValueError(f"{COMPLETE_MARKER} has no digest of {min(unlisted)}")
        for name in names[rank() :: world_size()]:
            _check_digest(path, name, digests)
        read_metadata(path)
    return extra


def load(path: Path, parts: Parts) -> dict[str, Any]:
    """Load a checkpoint into the parts, restore this rank's random states, and return `extra`.
    Collective.

    Digests are not compared; see `verify`. Random states are restored only if the number of ranks
    is that of the saved run. Raises UserError, with the same message on all ranks, if the
    checkpoint is incomplete, belongs to another model, or cannot be read.
    """
    extra: dict[str, Any] = {}
    with _raised_on_all(Damaged, f"checkpoint {path} cannot be read"):
        extra = read_extra(path)
    state = {name: part.state_dict() for name, part in parts.items()}
    with _raised_on_all(UserError, f"checkpoint {path} cannot be loaded"):
        tensors = dict(_flat(state))
        metadata = read_metadata(path)
        if difference := misfit(metadata, tensors):
            raise UserError(f"checkpoint {path} does not fit this model: {difference}")
        read_tensors(path, metadata, tensors)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    with _raised_on_all(UserError, f"checkpoint {path} cannot be loaded"):
        if extra["world_size"] == world_size():
            name = f"rank_{rank()}.json"
            restore_random_states(_read_json(path / name), name)
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """Read the `extra` that a checkpoint was saved with. Raises Damaged if the checkpoint is
    incomplete or damaged.
    """
    if not is_complete(path):
        newest = latest_complete(path.parent)
        remedy = "there is no complete one beside it"
        if newest:
            remedy = f"the newest complete one there is {newest}"
        raise Damaged(f"checkpoint {path} does not exist or was not finished; {remedy}")
    try:
        _check_digest(path, _EXTRA, _read_digests(path))
        extra = _read_json(path / _EXTRA)
        counts: list[Any] = [None]
        if isinstance(extra, dict):
            counts = [extra.get("step"), extra.get("world_size")]
        if not all(type(count) is int and 0 <= count < _COUNT_LIMIT for count in counts):
            raise ValueError(f"{_EXTRA} does not have the step and the number of ranks")
    except (OSError, ValueError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {_phrase(error)}") from error
    return extra


def all_complete(folder: Path) -> list[Path]:
    """List the complete checkpoints that rank 0 finds, the newest first. Collective."""
    names = [path.name for path in _complete(folder)]
    return [folder / name for name in exchange(names)[0]]


def latest_complete(folder: Path) -> Path | None:
    """Return the complete checkpoint with the largest step, or None."""
    return next(iter(_complete(folder)), None)


def prune(folder: Path, keep: int, keep_best: int = 0, metric: str = "") -> None:
    """Delete all complete checkpoints except the newest `keep` and the best `keep_best`; the newest
    one always stays.

    The best have the largest `metric`, or the smallest if its name begins with "-". A checkpoint
    without it, or with NaN, is never among them; of equal ones the newer is better. Only rank 0
    deletes.
    """
    if not is_main():
        return
    paths = _complete(folder)
    merits = {}
    for path in paths if keep_best else ():
        merit = _merit(path, metric)
        if merit is not None:
            merits[path] = merit
    best = sorted(merits, key=lambda path: -merits[path])[:keep_best]
    for path in set(paths[max(keep, 1) :]) - set(best):
        _delete(path)


def drop_later(folder: Path, step: int) -> None:
    """Delete checkpoints of steps after `step`, which exist if a run has started over or resumed
    from an older one.

    Otherwise they would remain the newest, and the next start would resume from them. Only rank 0
    deletes.
    """
    if is_main():
        for path in _complete(folder):
            if int(path.name.removeprefix("step_")) > step:
                _delete(path)


def remove_unfinished(folder: Path) -> None:
    """Delete folders without a COMPLETE marker, which a killed run has left, and print a line for
    each.

    Links stay: the user made them, and their targets may be unavailable only for now. Only rank 0
    deletes.
    """
    if is_main() and folder.is_dir():
        for path in sorted(folder.iterdir()):
            unfinished = re.fullmatch(r"step_\d+(\.tmp|\.old\.tmp)?", path.name) and not is_complete(
                path
            )
            if unfinished and not path.is_symlink():
                say(f"removing {path}, which a killed run has left unfinished")
                shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    """List the complete checkpoints in a folder, the newest first."""
    paths = filter(is_complete, folder.glob("step_*"))
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def is_complete(path: Path) -> bool:
    """Return True for the folder of a complete checkpoint."""
    return re.fullmatch(r"step_\d+", path.name) is not None and (path / COMPLETE_MARKER).is_file()


def _delete(path: Path) -> None:
    """Delete a checkpoint; if it is a link, only the link."""
    if not path.is_symlink():
        (path / COMPLETE_MARKER).unlink()  # first, so that a half-deleted folder does not look complete
    _clear(path, ignore_errors=False)


def _clear(path: Path, ignore_errors: bool = True) -> None:
    """Delete a folder, or a link to a folder."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors)


def _merit(path: Path, metric: str) -> float | None:
    """Return the value by which checkpoints are ranked, where larger is better; None if it has
    none.
    """
    try:
        metrics = read_extra(path).get("metrics")
    except Damaged:
        return None
    value = metrics.get(metric.removeprefix("-")) if isinstance(metrics, dict) else None
    if not isinstance(value, float | int) or math.isnan(value):
        return None
    return -value if metric.startswith("-") else value


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries with dotted paths, which
    torch.distributed.checkpoint uses as names.
    """
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        else:
            raise TypeError(
                f"{prefix}{key} is a {type(value).__name__}, but a checkpoint can only contain tensors"
            )


def _host_copy(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        # from_local (torch/distributed/tensor/_api.py) would move it to the mesh's device
        return DTensor(
            tensor.to_local().detach().to("cpu", copy=True), tensor._spec, requires_grad=False
        )
    return tensor.detach().to("cpu", copy=True)


def _publish(temporary: Path, final: Path, digests: str) -> None:
    """Rename a folder, whose files are on disk already, to its final name, and then mark it as
    complete.
    """
    replaced = final.with_name(f"{final.name}.old.tmp")
    _clear(replaced)
    if os.path.lexists(final):
        # The run has started over; a folder cannot be renamed onto a non-empty one
        final.rename(replaced)
    _sync(temporary)
    temporary.rename(final)
    _sync(final.parent)
    write_whole(final / COMPLETE_MARKER, digests)
    _sync(final)
    _clear(replaced)


def _sync(folder: Path) -> None:
    """Sync a folder's entries to disk: a synced file would still be lost if its name were not on
    disk.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_line(folder: Path, name: str) -> str:
    """Return the line that `sha256sum --binary` prints for a file."""
    with (folder / name).open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()} *{name}\n"


def _read_digests(path: Path) -> dict[str, str]:
    """Read the marker's lines by file name."""
    lines = (path / COMPLETE_MARKER).read_bytes().splitlines(keepends=True)
    digests = {line[66:-1].decode(errors="replace"): line.decode(errors="replace") for line in lines}
    if bad := next((name for name in digests if not _FILES.fullmatch(name)), None):
        raise ValueError(f"{COMPLETE_MARKER} is not what was written, at {bad[:40]!r}")
    return digests


def _check_digest(path: Path, name: str, digests: dict[str, str]) -> None:
    if _digest_line(path, name) != digests.get(name):
        raise ValueError(f"{name} is not what was written (SHA-256)")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON") from error


@contextmanager
def _raised_on_all(kind: type[UserError], beginning: str) -> Iterator[None]:
    """Raise an error in the block on any rank as `kind` on all ranks, with the sentence of the
    first failed rank.
    """
    problem = ""
    cause = None
    try:
        yield
    except Exception as error:
        problem = str(error) if isinstance(error, UserError) else f"{beginning}: {_phrase(error)}"
        cause = error
    if sentence := next(filter(None, exchange(problem.encode(errors="replace").decode())), ""):
        raise kind(sentence) from cause


def _phrase(error: Exception) -> str:
    """Describe an error in a few words: the file and the reason, or the first sentence of its
    message.
    """
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    text = re.split(r"\n|\. ", str(error), maxsplit=1)[0][:_REASON_LIMIT]
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def random_states() -> dict[str, Any]:
    """Return the random states of Python, NumPy, torch and this rank's CUDA device, as JSON."""
    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [[int(key) for key in keys], position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_random_states(states: dict[str, Any], name: str) -> None:
    """Restore the states that `random_states` returned. Raises ValueError, naming their origin
    `name`.
    """

    def as_tensor(digits: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)

    try:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        numpy.random.set_state(("MT19937", *states["numpy"]))
        torch.set_rng_state(as_tensor(states["torch"]))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(as_tensor(states["cuda"]))
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ValueError(f"{name} holds no random states ({type(error).__name__}: {error})") from error
