"""Exchanges of small values between ranks. Nothing that arrives over a socket is unpickled.

Where some ranks train and others generate (`engine.placement`), each kind is a crew. Every function
here works `among` a group of ranks: by default `CREW`, the crew of this rank, or `EVERYBODY`, all
ranks of the run. Without crews both are the same. Error messages give a rank's number in the run.

All exchanges are of CPU tensors over gloo, on GPU machines as well. So a control message never
waits for a kernel, and a broken peer shows up as a connection error at once.
"""

import operator
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
import torch.distributed as dist

_MESSAGE_LIMIT = 4000  # characters of an error message that travel to the other ranks
_JOINED_TIMEOUT = timedelta(minutes=10)  # as torch's for NCCL; gloo's would be 30
_ENDING_SECONDS = 3.0  # a process that dies closes its connections a little before it counts as ended
# For each rank, its machine (see `machine`) and its process's number there.
_processes: list[tuple[str, int]] = []


@dataclass
class Ranks:
    """A group of ranks, of which this process is one.

    Attributes: channel: the gloo process group that joins them, a `dist.ProcessGroup`, whose stub
        lacks methods; None: torch's default group.
    """

    channel: Any = None


CREW = Ranks()
"""The ranks with this one's role: those that train, or those that only generate; all ranks where
each does both.
"""

EVERYBODY = Ranks()
"""All ranks of the run."""


class RemoteError(RuntimeError):
    """A phase failed on at least one rank, or a rank is gone. Raised on every rank that is left."""


def set_everybody(group: dist.ProcessGroupGloo | None) -> None:
    """Set the gloo group that joins all ranks of the run, once at the start, where torch's default
    group joins a crew; None: there are no crews.
    """
    EVERYBODY.channel = group


def join_over_gloo() -> None:
    """Join the ranks over gloo where torch's default group is for GPUs alone, as Accelerate's is.
    Collective.
    """
    if dist.is_initialized() and "cpu" not in dist.get_backend_config():
        group = dist.new_group(backend="gloo", timeout=_JOINED_TIMEOUT)
        CREW.channel = group
        EVERYBODY.channel = group


def rank(among: Ranks = CREW) -> int:
    """Return this process's number among the ranks of a group; 0 before and without a process
    group.
    """
    if among.channel is not None:
        return int(among.channel.rank())
    return dist.get_rank() if dist.is_initialized() else 0


def world_size(among: Ranks = CREW) -> int:
    """Return the number of ranks in a group; 1 before and without a process group."""
    if among.channel is not None:
        return int(among.channel.size())
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return True on rank 0 of the run, which writes files and prints."""
    return rank(EVERYBODY) == 0


def allreduce_objects(value: Any, merge: Callable[[Any, Any], Any], among: Ranks = CREW) -> Any:
    """Reduce small values of plain types over all ranks, by recursive doubling, as msgpack.
    Collective.

    Returns, on every rank, all ranks' values joined by `merge`. `merge(lower, higher)` joins the
    results of two neighbouring ranges of ranks. It must be associative and must not raise; it is
    bracketed in the same way on all ranks. Each rank swaps its result with the rank whose number
    differs in one bit, bit after bit: log2(ranks) messages each way. If the number of ranks is not
    a power of two, the first ranks are paired, and the even one of a pair takes part for both: two
    messages more.

    Raises RuntimeError on all ranks if a connection between any two breaks.
    """
    me = rank(among)
    steps = world_size(among).bit_length() - 1
    pairs = world_size(among) - (1 << steps)
    paired = me < 2 * pairs
    speaks = me >= 2 * pairs or me % 2 == 0
    # Which connection broke, and the result so far
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(["", value]))

    def join(peer: int) -> list[Any]:
        received = _swap(state, peer, among.channel)
        (error, lower), (other_error, higher) = (state, received) if me < peer else (received, state)
        broken = error or other_error
        return [broken, None if broken else merge(lower, higher)]

    if paired:
        state = join(me ^ 1)
    if speaks:
        position = me // 2 if paired else me - pairs
        for other in (position ^ 1 << bit for bit in range(steps)):
            state = join(2 * other if other < pairs else other + pairs)
    if paired:
        received = _swap(state, me ^ 1, among.channel)
        state = state if speaks else received
    broken, result = state
    if broken:
        raise RuntimeError(broken)
    return result


_SHORT = 1024  # bytes, of which four are the length: a longer message takes a second one


def _framed(message: bytes) -> list[torch.Tensor]:
    framed = bytearray(struct.pack("<I", len(message)) + message).ljust(_SHORT, b"\0")
    parts = torch.frombuffer(framed, dtype=torch.uint8).split([_SHORT, len(framed) - _SHORT])
    return [part for part in parts if len(part)]


def _swap(message: list[Any], peer: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Send a message to that rank and receive its own at the same time; [error, None] where the
    connection broke.
    """
    channel: Any = group or dist.group.WORLD
    try:
        first = torch.empty(_SHORT, dtype=torch.uint8)
        # Before sending: gloo sends once the other end is ready
        works = [channel.recv([first], peer, 0)]
        works += [channel.send([part], peer, 0) for part in _framed(msgspec.msgpack.encode(message))]
        works[0].wait()
        received = first.numpy().tobytes()
        (length,) = struct.unpack_from("<I", received)
        if length + 4 > _SHORT:
            rest = torch.empty(length + 4 - _SHORT, dtype=torch.uint8)
            channel.recv([rest], peer, 0).wait()
            received += rest.numpy().tobytes()
        for work in works[1:]:
            work.wait()
    except RuntimeError as error:
        return [str(error), None]
    answer: list[Any] = msgspec.msgpack.decode(received[4 : 4 + length])
    return answer


def all_to_all_bytes(payloads: list[bytes], among: Ranks = CREW) -> list[bytes]:
    """Exchange bytes: `payloads` has one for each rank; returns those for this one, in rank order.
    Collective. Nothing is padded: a rank receives the bytes that are meant for it, and a number
    from each.
    """
    size = world_size(among)
    if size == 1:
        return payloads
    sizes = torch.tensor([len(payload) for payload in payloads])
    coming = torch.empty(size, dtype=torch.int64)
    _all_to_all(coming, sizes, [1] * size, [1] * size, among)
    joined = bytearray().join(payloads)
    outgoing = (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    )
    incoming = torch.empty(int(coming.sum()), dtype=torch.uint8)
    _all_to_all(incoming, outgoing, coming.tolist(), sizes.tolist(), among)
    return [part.numpy().tobytes() for part in incoming.split(coming.tolist())]


def _all_to_all(
    incoming: torch.Tensor, outgoing: torch.Tensor, coming: list[int], going: list[int], among: Ranks
) -> None:
    """Exchange parts of `going` elements for each rank, and of `coming` elements from each."""
    if among.channel is not None:
        among.channel.alltoall_base(incoming, outgoing, coming, going).wait()
    else:
        dist.all_to_all_single(incoming, outgoing, coming, going)


def send_to_all(payload: bytes) -> list[bytes]:
    """Return every rank's payload, in rank order, each straight from its rank. Collective."""
    return all_to_all_bytes([payload] * world_size())


def sum_counts(counts: torch.Tensor) -> torch.Tensor:
    """Sum an int64 tensor on the CPU over ranks, in place, and return it. A rank receives equally
    much however many there are.
    """
    if world_size() > 1:
        dist.all_reduce(counts)
    return counts


def exchange(value: Any, among: Ranks = CREW) -> list[Any]:
    """Gather a value of plain types from every rank, in rank order: see `allreduce_objects`.
    Collective.
    """
    values: list[Any] = allreduce_objects([value], operator.add, among=among)
    return values


def agree(error: BaseException | None, phase: str, among: Ranks = CREW) -> None:
    """Raise RemoteError on all ranks, naming each culprit, unless `phase` went well on all of them.
    Collective.

    A rank that failed passes its exception, which becomes the cause of the `RemoteError` there. A
    rank whose process has ended is noticed by its closed connection, and named by those on its
    machine; a rank that hangs is noticed by the process group's timeout.
    """
    gpu = (
        isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError)
        and torch.cuda.is_initialized()
    )
    where = f" on cuda:{torch.cuda.current_device()}" if gpu else ""
    words = "" if error is None else f"{type(error).__name__}{where}: {error}"
    short = words[:_MESSAGE_LIMIT].encode(errors="replace").decode()
    number = rank(EVERYBODY)
    failure = [f"rank {number}: {short}"] if words else []
    try:
        failures = allreduce_objects(failure, operator.add, among=among)
    except RuntimeError as broken:
        before = f"; its own error was {words}" if words else ""
        culprit = dead_ranks() or "another rank"
        message = (
            f"rank {number} lost contact with {culprit} at the end of phase {phase}: {broken}{before}"
        )
        raise RemoteError(message) from (error or broken)
    if failures:
        raise RemoteError(f"phase {phase} failed on " + "; ".join(failures)) from error


def share_pids() -> None:
    """Exchange the process ids of all ranks of the run, for `dead_ranks` to look after them.
    Collective.
    """
    _processes[:] = [
        (machine, pid) for machine, pid in exchange([machine(), os.getpid()], among=EVERYBODY)
    ]


def dead_ranks() -> str:
    """Return the ranks of this machine that have ended, in words that can follow "lost contact
    with"; "" if none has. Call it after a broken exchange.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while not (ended := _ended_ranks()) and world_size() > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    return " and ".join(f"rank {who}, whose process {pid} has ended," for who, pid in ended)


def _ended_ranks() -> list[tuple[int, int]]:
    here = machine()
    return [
        (who, pid)
        for who, (machine, pid) in enumerate(_processes)
        if machine == here and _has_ended(pid)
    ]


def machine() -> str:
    """Return a name of this machine, the same for all processes that share process ids."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"  # ended, and its parent has not waited for it


@contextmanager
def agreed(phase: str, among: Ranks = CREW) -> Iterator[None]:
    """Run the block, then `agree` on its success. An interruption passes straight through."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(error, phase, among)


def all_reduce_sum(values: dict[str, float]) -> dict[str, float]:
    """Return the sum over ranks of each value, added in rank order: bit-equal on all ranks and in
    every run.
    Raises RuntimeError, on all ranks, when their keys differ.
    """
    return {key: sum(column) for key, column in _columns(values, operator.add).items()}


def all_reduce_max(values: dict[str, float]) -> dict[str, float]:
    """Return the largest over ranks of each value; NaN wherever one rank has NaN. Keys must be the
    same on all ranks.
    """
    joined = _columns(values, lambda a, b: numpy.maximum(a, b).tolist())  # NaN wherever either has it
    return {key: largest for key, (largest,) in joined.items()}


_Rows = list[list[float]]  # values in the order of their sorted keys


def _columns(
    values: dict[str, float], join: Callable[[_Rows, _Rows], _Rows]
) -> dict[str, tuple[float, ...]]:
    """Return for each key all ranks' values in rank order, after `join` has combined those of
    neighbouring ranks.
    """

    def merge(lower: Any, higher: Any) -> Any:
        who, keys, rows, wrong = lower
        other, other_keys, more, wrong_there = higher
        if not (wrong := wrong or wrong_there) and keys != other_keys:
            different = sorted(set(keys) ^ set(other_keys))
            wrong = f"ranks {who} and {other} reduce different values; only one of them has {different}"
        return [who, keys, [] if wrong else join(rows, more), wrong]

    keys = sorted(values)
    *_, rows, wrong = allreduce_objects(
        [rank(EVERYBODY), keys, [[float(values[key]) for key in keys]], ""], merge
    )
    if wrong:
        raise RuntimeError(wrong)
    columns = dict(zip(keys, zip(*rows, strict=True), strict=True))
    return {key: columns[key] for key in values}
