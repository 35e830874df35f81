"""The group of processes that weights are broadcast in: trainer rank 0 and every worker of every
engine.

It is not a default group. Messages travel through its store, one box for each direction and worker;
buckets travel by gloo on CPU and NCCL on CUDA. A member that cannot continue aborts the group,
which ends all waits.

vLLM's StatelessProcessGroup and PyNcclCommunicator do much the same, but unpickle what comes over
their sockets (https://github.com/vllm-project/vllm/blob/main/vllm/distributed/utils.py).
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Self

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from sharding.wire.channel import Look, SyncError, pack, unpack

LOOK_SECONDS = 0.2
"""How often a wait looks whether the group was aborted, or the other end is gone."""

_FINEST = 1e-4  # seconds between two looks, at first
_COARSEST = 5e-3  # and after a while
_ABORTED = "aborted"


class GroupError(SyncError):
    """The group has ended; its members have to join a new one."""


def wait_until(done: Callable[[], bool], timeout: float, waiting_for: str, still_alive: Look) -> None:
    """Poll `done` until it returns True. Raises TimeoutError, naming `waiting_for`, after `timeout`
    seconds.
    """
    deadline = time.monotonic() + timeout
    look = 0.0
    pause = _FINEST
    while not done():
        now = time.monotonic()
        if now >= look:
            still_alive()
            look = now + LOOK_SECONDS
        if now >= deadline:
            raise TimeoutError(f"no {waiting_for} within {timeout:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, _COARSEST)


def listen(host: str, port: int, timeout: float) -> TCPStore:
    """Return the group's store, served by this process on `host` alone; port 0 is a free one, bound
    here and now.
    """
    server = socket.create_server((host, port), backlog=1024)
    longest = timedelta(seconds=timeout)
    port = server.getsockname()[1]
    fd = server.detach()
    return TCPStore(
        host, port, is_master=True, timeout=longest, wait_for_workers=False, master_listen_fd=fd
    )


def connect_store(host: str, port: int, timeout: float) -> TCPStore:
    """Connect to the group's store. Raises TimeoutError: nothing answers there; GroupError:
    something else does.
    """
    wait_until(lambda: _answers(host, port), timeout, f"trainer at {host}:{port}", lambda: None)
    try:
        return TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
    except RuntimeError as error:
        raise GroupError(f"{host}:{port} is not the address of a weights group: {error}") from error


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def own_address(peer: str, port: int) -> str:
    """Return the address of this machine under which `peer` is reached: loopback where it is on
    this machine, too.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))  # sends nothing
        return str(probe.getsockname()[0])


class GroupStore:
    """The group's store. Its errors say that the trainer cannot be reached, and it carries the
    notice that a member has ended the group.
    """

    def __init__(self, store: Store, where: str) -> None:
        self._store: Any = store  # its stubs know of no bytes
        self._where = where

    @classmethod
    def at(cls, host: str, port: int, timeout: float) -> Self:
        """Return the store that a trainer serves there. Raises as `connect_store`."""
        return cls(connect_store(host, port, timeout), f"{host}:{port}")

    def put(self, key: str, value: bytes) -> None:
        """Write a key."""
        self._ask(lambda: self._store.set(key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        """Write a key unless it is there; returns its value afterwards."""
        return bytes(self._ask(lambda: self._store.compare_set(key, "", value)))

    def has(self, key: str) -> bool:
        """Return True if a key was written."""
        return bool(self._ask(lambda: self._store.check([key])))

    def take(self, key: str) -> bytes:
        """Read and remove a key that is there."""
        value = self.read(key)
        self._ask(lambda: self._store.delete_key(key))
        return value

    def read(self, key: str) -> bytes:
        """Read a key that is there."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def abort(self, reason: str) -> None:
        """End all waits; the first reason counts."""
        self.claim(_ABORTED, reason.encode())

    def check_aborted(self) -> None:
        """Raise `GroupError`, with the reason, when a member has aborted the group."""
        if self.has(_ABORTED):
            raise GroupError(self.read(_ABORTED).decode())

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise GroupError(f"the trainer at {self._where} cannot be reached: {error}") from error


class StoreChannel:
    """A `Channel` over the store: messages in order, each removed when it is read."""

    def __init__(self, store: GroupStore, outbox: str, inbox: str) -> None:
        self._store = store
        self._outbox = outbox
        self._inbox = inbox
        self._sent = self._received = 0

    def send(self, kind: str, **fields: Any) -> None:
        """Write a message to the store, as `Channel.send` sends one. Raises GroupError if the store
        cannot be reached.
        """
        self._store.put(f"{self._outbox}/{self._sent}", pack(kind, **fields))
        self._sent += 1

    def receive(
        self, timeout: float, waiting_for: str, still_alive: Look = lambda: None
    ) -> dict[str, Any]:
        """Wait for the next message, as `Channel.receive` does; the end of the group ends the wait,
        too.
        """

        def look() -> None:
            still_alive()
            self._store.check_aborted()

        wait_until(self.waiting, timeout, waiting_for, look)
        packed = self._store.take(f"{self._inbox}/{self._received}")
        self._received += 1
        return unpack(packed, waiting_for)

    def waiting(self) -> bool:
        """Return True if a message is there already."""
        return self._store.has(f"{self._inbox}/{self._received}")


class BroadcastGroup:
    """Broadcasts from rank 0, each waited for with a deadline. All members construct it at the same
    time.
    """

    def __init__(
        self,
        store: GroupStore,
        rank: int,
        world_size: int,
        device: torch.device,
        address: str,
        timeout: float,
    ) -> None:
        self._store = store
        self._timeout = timeout
        make = _nccl if device.type == "cuda" else _gloo
        self._backend: Any = make(
            PrefixStore("broadcast", store._store), rank, world_size, address, timeout
        )
        first = torch.full((1,), world_size if rank == 0 else 0, dtype=torch.uint8, device=device)
        try:
            self.wait(self._join(first), "first broadcast")
        except BaseException:
            self.close()
            raise

    def _join(self, tensor: torch.Tensor) -> Work:
        """Start the first broadcast, in which NCCL connects: in a thread, as the call itself waits
        for every member.
        """
        started: Future[Work] = Future()

        def start() -> None:
            try:
                if tensor.is_cuda:
                    torch.cuda.set_device(tensor.device)  # the current device is a thread's own
                started.set_result(self.start(tensor))
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=start, name="weights-group-join", daemon=True).start()
        self._until(started.done, "connection of all members")
        return started.result()

    def start(self, tensor: torch.Tensor) -> Work:
        """Send from rank 0, receive elsewhere; `tensor` belongs to the group until `wait`
        returns.
        """
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            return self._backend.broadcast([tensor], options)
        except RuntimeError as error:
            raise GroupError(f"a broadcast could not start: {error}") from error

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Send or receive a contiguous tensor of any dtype. Raises GroupError: as `wait`."""
        self.wait(self.start(tensor.view(-1).view(torch.uint8)), what)

    def wait(self, work: Work, what: str) -> None:
        """Wait until the memory of a broadcast can be used. Raises GroupError: a member was lost,
        or the deadline passed.
        """
        self._until(work.is_completed, what)
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupError(f"{what}: {error}") from error

    def _until(self, done: Callable[[], bool], what: str) -> None:
        try:
            wait_until(done, self._timeout, what, self._store.check_aborted)
        except SyncError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise GroupError(f"{what}: {error}") from error

    def close(self) -> None:
        """Leave. A broadcast that still runs keeps its memory until it fails."""
        held = [self._backend]
        self._backend = None

        def let_go() -> None:  # gloo's destructor waits for running work (torch's ProcessGroupGloo.cpp)
            held[0].abort()
            held.clear()

        threading.Thread(target=let_go, name="weights-group-close", daemon=True).start()


def _gloo(store: Store, rank: int, world_size: int, address: str, timeout: float) -> ProcessGroupGloo:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 2
    return ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Store, rank: int, world_size: int, address: str, timeout: float) -> Any:
    """Return NCCL whose watchdog and heartbeat monitor do not end the engine where
    `BroadcastGroup.wait` ends the update
    (https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).
    """
    from torch.distributed import ProcessGroupNCCL

    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "0"))  # read by the constructor
    try:
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
