"""Small exchanges between ranks, which never unpickle what came over a socket.

Where some ranks train and others generate (`engine.apart`), they are two crews, and everything here is among those of
this rank's own; inside `all_crews` it is among all ranks of the run. Sentences always have a rank's number in the run.

Everything here runs on CPU tensors over gloo, on GPU machines too, so that a control message never waits behind a
kernel and a broken peer shows up as a connection error at once.
"""

import math
import operator
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
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


def settle(own: Any, merge: Callable[[Any, Any], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What `merge` makes of every rank's own, on every rank: plain types, which travel as msgpack. Collective.

    `merge(lower, higher)` takes what two runs of neighbouring ranks have come to, is bracketed alike on all ranks, and
    must not raise. Each rank swaps what it knows with those whose numbers differ from its own in one bit, bit after
    bit: log2(ranks) messages each way. Where the number of ranks is no power of two, the first ones are paired to make
    it one, and the even one of a pair speaks for both: two messages more. `group` is another group of all ranks, for a
    thread whose exchanges must not mix with the main thread's.

    Raises RuntimeError where a connection breaks, also on ranks that do not use that one: they are told.
    """
    me, steps = rank(), world_size().bit_length() - 1
    pairs = world_size() - (1 << steps)
    paired, speaks = me < 2 * pairs, me >= 2 * pairs or me % 2 == 0
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(["", own]))  # what has broken, and what is known

    def join(whom: int) -> list[Any]:
        heard = _swap(told, whom, group)
        (lost, lower), (lost_too, higher) = (told, heard) if me < whom else (heard, told)
        broken = lost or lost_too
        return [broken, None if broken else merge(lower, higher)]

    if paired:
        told = join(me ^ 1)
    if speaks:
        place = me // 2 if paired else me - pairs
        for other in (place ^ 1 << bit for bit in range(steps)):
            told = join(2 * other if other < pairs else other + pairs)
    if paired:
        heard = _swap(told, me ^ 1, group)
        told = told if speaks else heard
    broken, known = told
    if broken:
        raise RuntimeError(broken)
    return known


_SHORT = 1024  # bytes, of which four tell how many there are: what is longer takes a second message


def _framed(message: bytes) -> list[torch.Tensor]:
    framed = bytearray(struct.pack("<I", len(message)) + message).ljust(_SHORT, b"\0")
    parts = torch.frombuffer(framed, dtype=torch.uint8).split([_SHORT, len(framed) - _SHORT])
    return [part for part in parts if len(part)]


def _swap(told: list[Any], whom: int, group: dist.ProcessGroup | None) -> list[Any]:
    """What that rank tells this one, and is told at the same time; or how the connection broke, and nothing."""
    channel: Any = group or _inside.get() or dist.group.WORLD
    try:
        first = torch.empty(_SHORT, dtype=torch.uint8)
        works = [channel.recv([first], whom, 0)]  # before sending: gloo sends what the other end is ready for
        works += [channel.send([part], whom, 0) for part in _framed(msgspec.msgpack.encode(told))]
        works[0].wait()
        heard = first.numpy().tobytes()
        (length,) = struct.unpack_from("<I", heard)
        if length + 4 > _SHORT:
            rest = torch.empty(length + 4 - _SHORT, dtype=torch.uint8)
            channel.recv([rest], whom, 0).wait()
            heard += rest.numpy().tobytes()
        for work in works[1:]:
            work.wait()
    except RuntimeError as error:
        return [str(error), None]
    found: list[Any] = msgspec.msgpack.decode(heard[4 : 4 + length])
    return found


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
    """Every rank's payload, in rank order, on every rank, each straight from its rank. Every rank must call it."""
    return all_to_all_bytes([payload] * world_size())


def sum_counts(counts: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of an int64 tensor on the CPU, in place; what a rank receives does not grow with them."""
    if world_size() > 1:
        dist.all_reduce(counts)
    return counts


def exchange(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's, in rank order: plain types, see `settle`. Collective."""
    found: list[Any] = settle([own], operator.add, group=group)
    return found


def agree(error: BaseException | None, phase: str, group: dist.ProcessGroup | None = None) -> None:
    """Every rank says whether `phase` went well for it; if any did not, all raise `RemoteError` naming each culprit.

    A rank that failed passes its exception, which becomes the cause of the `RemoteError` there. A rank whose process
    has ended is noticed by its closed connection, and named by those on its machine; a rank that hangs is noticed by
    the process group's timeout.
    """
    words = "" if error is None else f"{type(error).__name__}: {error}"
    short = words[:_MESSAGE_LIMIT].encode(errors="replace").decode()
    try:
        failures = settle([f"rank {in_run(rank())}: {short}"] * bool(words), operator.add, group=group)
    except RuntimeError as broken:
        own = f"; its own error was {words}" if words else ""
        whom = dead_ranks() or "another rank"
        message = f"rank {in_run(rank())} lost contact with {whom} at the end of phase {phase}: {broken}{own}"
        raise RemoteError(message) from (error or broken)
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
        state = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
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
    return {key: sum(column) for key, column in _columns(values, operator.add).items()}


def all_reduce_max(values: dict[str, float]) -> dict[str, float]:
    """The largest over ranks of each value; NaN wherever one rank has NaN. Keys must be the same on all ranks."""
    return {key: largest for key, (largest,) in _columns(values, lambda a, b: [list(map(_larger, *a, *b))]).items()}


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


_Rows = list[list[float]]  # values in the order of their sorted keys


def _columns(values: dict[str, float], join: Callable[[_Rows, _Rows], _Rows]) -> dict[str, tuple[float, ...]]:
    """For each key, what is left of all ranks' values, in rank order, where `join` takes two runs of neighbours'."""

    def merge(lower: Any, higher: Any) -> Any:
        who, keys, rows, wrong = lower
        other, others, more, wrong_there = higher
        if not (wrong := wrong or wrong_there) and keys != others:
            different = sorted(set(keys) ^ set(others))
            wrong = f"ranks {who} and {other} reduce different values; only one of them has {different}"
        return [who, keys, [] if wrong else join(rows, more), wrong]

    keys = sorted(values)
    *_, rows, wrong = settle([in_run(rank()), keys, [[float(values[key]) for key in keys]], ""], merge)
    if wrong:
        raise RuntimeError(wrong)
    columns = dict(zip(keys, zip(*rows, strict=True), strict=True))
    return {key: columns[key] for key in values}
