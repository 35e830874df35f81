"""Small exchanges between ranks, which never unpickle what came over a socket.

Where some ranks train and others generate (`engine.apart`), they are two crews, and everything here is among those of
this rank's own; inside `all_crews` it is among all ranks of the run. Sentences always have a rank's number in the run.

Everything here runs on CPU tensors over gloo, on GPU machines too, so that a control message never waits behind a
kernel and a broken peer shows up as a connection error at once.
"""

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

_MESSAGE_LIMIT = 4000  # characters of an error message that travel to the other ranks
_ENDING_SECONDS = 3.0  # a process that dies closes its connections a little before it counts as ended
_processes: list[tuple[str, int]] = []  # of each rank: the machine, see `machine`, and the process's number there


_first = 0  # the number in the run of this crew's first rank
_everybody: Any = None  # a dist.ProcessGroupGloo of all ranks of the run, where there are crews; its stub lacks methods
_inside: ContextVar[Any] = ContextVar("all_crews", default=None)  # a thread's own


class RemoteError(RuntimeError):
    """A phase failed on at least one rank, or a rank is gone. Raised on every rank that is left."""


def divide(first: int, everybody: dist.ProcessGroupGloo | None) -> None:
    """This rank is in a crew, which has a default process group of its own and begins at rank `first` of the run;
    `everybody` joins all ranks of it, by gloo. None: there are no crews.
    """
    global _first, _everybody
    _first, _everybody = first, everybody


@contextmanager
def all_crews() -> Iterator[None]:
    """Inside, on this thread, numbers and exchanges of ranks are those of all of the run."""
    token = _inside.set(_everybody)
    try:
        yield
    finally:
        _inside.reset(token)


def in_run(number: int) -> int:
    """The number in the run of a rank that has `number` in what exchanges are among."""
    return number if _inside.get() is not None else _first + number


def rank() -> int:
    """This process's number, from 0; 0 before and without a process group."""
    if (everybody := _inside.get()) is not None:
        return everybody.rank()
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 before and without a process group."""
    if (everybody := _inside.get()) is not None:
        return everybody.size()
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True on rank 0 of the run, which writes files and prints."""
    return in_run(rank()) == 0


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's payload, in rank order, on every rank. Lengths may differ and may be 0. Every rank must call it.
    `group` is another group of all ranks, for a thread whose exchanges must not mix with the main thread's.
    """
    if world_size() == 1:
        return [payload]
    lengths = _gather(torch.tensor([len(payload)], dtype=torch.int64), group)
    counts = [int(length) for length in lengths]
    if not any(counts):  # known to all ranks alike, so none is left waiting in the second gather
        return [b""] * len(counts)
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [row[:count].numpy().tobytes() for row, count in zip(_gather(padded, group), counts, strict=True)]


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    if group is None and (everybody := _inside.get()) is not None:
        everybody.allgather([parts], [tensor]).wait()
    else:
        dist.all_gather(parts, tensor, group=group)
    return parts


def all_to_all_bytes(payloads: list[bytes]) -> list[bytes]:
    """From every rank, in rank order, what it has for this one; `payloads` has one for each. Every rank must call it.
    Nothing is padded: a rank receives the bytes that are meant for it, and a number from each.
    """
    if world_size() == 1:
        return payloads
    sizes, coming = torch.tensor([len(payload) for payload in payloads]), torch.empty(world_size(), dtype=torch.int64)
    _all_to_all(coming, sizes, [], [])
    joined = bytearray().join(payloads)
    outgoing = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    incoming = torch.empty(int(coming.sum()), dtype=torch.uint8)
    _all_to_all(incoming, outgoing, coming.tolist(), sizes.tolist())
    return [part.numpy().tobytes() for part in incoming.split(coming.tolist())]


def _all_to_all(incoming: torch.Tensor, outgoing: torch.Tensor, coming: list[int], going: list[int]) -> None:
    """In parts of so many elements, or equal ones where nothing is said."""
    if (everybody := _inside.get()) is not None:
        everybody.alltoall_base(incoming, outgoing, coming, going).wait()
    else:
        dist.all_to_all_single(incoming, outgoing, coming or None, going or None)


def send_to_all(payload: bytes) -> list[bytes]:
    """As `all_gather_bytes`, without padding, for payloads of very different sizes. Every rank must call it."""
    return all_to_all_bytes([payload] * world_size())


def sum_counts(counts: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of an int64 tensor on the CPU, in place; what a rank receives does not grow with them."""
    if world_size() > 1:
        dist.all_reduce(counts)
    return counts


def exchange(own: Any) -> list[Any]:
    """Every rank's, in rank order: plain types, which travel as msgpack. Collective."""
    return [msgspec.msgpack.decode(packed) for packed in all_gather_bytes(msgspec.msgpack.encode(own))]


def agree(error: BaseException | None, phase: str, group: dist.ProcessGroup | None = None) -> None:
    """Every rank says whether `phase` went well for it; if any did not, all raise `RemoteError` naming each culprit.

    A rank that failed passes its exception, which becomes the cause of the `RemoteError` there. A rank whose process
    has ended is noticed by its closed connection, and named by those on its machine; a rank that hangs is noticed by
    the process group's timeout.
    """
    payload = b"" if error is None else f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT].encode()
    try:
        answers = all_gather_bytes(payload, group)
    except RuntimeError as broken:
        own = f"; its own error was {type(error).__name__}: {error}" if error is not None else ""
        whom = dead_ranks() or "another rank"
        message = f"rank {in_run(rank())} lost contact with {whom} at the end of phase {phase}: {broken}{own}"
        raise RemoteError(message) from (error or broken)
    told = [(in_run(who), answer.decode(errors="replace")) for who, answer in enumerate(answers) if answer]
    failures = [f"rank {who}: {words}" for who, words in told]
    if failures:
        raise RemoteError(f"phase {phase} failed on " + "; ".join(failures)) from error


def introduce() -> None:
    """Have every rank know the others' processes, for `dead_ranks` to look after them. Every rank must call it."""
    _processes[:] = [(machine, pid) for machine, pid in exchange([machine(), os.getpid()])]


def dead_ranks() -> str:
    """After a broken exchange: which ranks of this machine have ended, to go into a sentence; "" for none of them."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while not (ended := _ended_ranks()) and world_size() > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    return " and ".join(f"rank {who}, whose process {pid} has ended," for who, pid in ended)


def _ended_ranks() -> list[tuple[int, int]]:
    here = machine()
    return [(who, pid) for who, (machine, pid) in enumerate(_processes) if machine == here and _has_ended(pid)]


def machine() -> str:
    """The same for all processes that see each other under the same numbers."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"  # ended, and its parent has not waited for it


@contextmanager
def agreed(phase: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block, then `agree` on how it went. An interruption passes straight through."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(error, phase, group)


def all_reduce_sum(values: dict[str, float]) -> dict[str, float]:
    """The sum over ranks of each value, added in rank order: bit-equal on all ranks and in every run.
    Raises RuntimeError, on all ranks, when their keys differ.
    """
    return {key: sum(column) for key, column in _columns(values).items()}


def all_reduce_max(values: dict[str, float]) -> dict[str, float]:
    """The largest over ranks of each value; NaN wherever one rank has NaN. Keys must be the same on all ranks."""
    columns = _columns(values)
    return {key: math.nan if any(map(math.isnan, column)) else max(column) for key, column in columns.items()}


def _columns(values: dict[str, float]) -> dict[str, list[float]]:
    """For each key, every rank's value in rank order."""
    rows: list[dict[str, float]] = exchange({key: float(value) for key, value in values.items()})
    for who, row in enumerate(rows):
        if different := sorted(row.keys() ^ rows[0].keys()):
            raise RuntimeError(f"ranks 0 and {who} reduce different values; only one of them has {different}")
    return {key: [row[key] for row in rows] for key in values}
