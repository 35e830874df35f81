"""One ZMQ connection of a rank and its worker: msgpack messages, a secret on connecting, a deadline
on every wait.
"""

import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

MAX_MESSAGE_BYTES = 64 << 20
POLL_MS = 200

Look = Callable[[], None]
"""Called now and then during a wait; raises when there is nothing left to wait for, as the peer's
process is gone.
"""


class SyncError(RuntimeError):
    """A weight update went wrong; the message says on which worker, with which weight, and what to
    do.
    """


def pack(kind: str, **fields: Any) -> bytes:
    """Encode a message.
    Raises SyncError: it is larger than the other end accepts, which would drop it without a word.
    """
    packed = msgspec.msgpack.encode({"kind": kind, **fields})
    if len(packed) > MAX_MESSAGE_BYTES:
        raise SyncError(
            f"a message {kind!r} of {len(packed)} bytes is larger than the {MAX_MESSAGE_BYTES} allowed"
        )
    return packed


def unpack(packed: bytes, waiting_for: str) -> dict[str, Any]:
    """Decode a message that `pack` has made. Raises SyncError: the bytes are not a message."""
    try:
        message = msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SyncError(
            f"{len(packed)} bytes that are not a message arrived instead of a {waiting_for}: {error}"
        ) from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise SyncError(f"a message without a kind arrived instead of a {waiting_for}")
    return message


class MessageLine(Protocol):
    """Messages in order, both ways: a `Channel`, or what behaves like one."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, as `Channel.send` does."""

    def receive(
        self, timeout: float, waiting_for: str, still_alive: Look = lambda: None
    ) -> dict[str, Any]:
        """Wait for the next message, as `Channel.receive` does."""

    def waiting(self) -> bool:
        """Return True if a message is there already."""


class Channel:
    """An end of the connection. Messages are dictionaries with a "kind"; nothing is ever
    unpickled.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message without waiting. Raises SyncError if the peer has gone, since the send
        would wait for ever, or if the message is too large.
        """
        packed = pack(kind, **fields)
        try:
            self._put(packed)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            raise SyncError(
                f"nobody is connected to send {kind!r} to: the process at the other end has gone"
            ) from None

    def receive(
        self, timeout: float, waiting_for: str, still_alive: Look = lambda: None
    ) -> dict[str, Any]:
        """Return the next message, within `timeout` seconds; the error names what it was
        `waiting_for`. `still_alive`: called between polls. Raises TimeoutError: nothing arrived in
        time; a message larger than `MAX_MESSAGE_BYTES` never does. Raises SyncError: the bytes that
        arrived are not a message.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._socket.poll(int(max(0.0, min(POLL_MS, (deadline - time.monotonic()) * 1000)))):
                if (packed := self._take()) is not None:
                    return unpack(packed, waiting_for)
            else:
                still_alive()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no {waiting_for} within {timeout:.0f} s")

    def waiting(self) -> bool:
        """Return True if a message is there already."""
        return bool(self._socket.poll(0))

    def _put(self, packed: bytes) -> None:
        self._socket.send(packed, zmq.NOBLOCK)

    def _take(self) -> bytes | None:  # None: from another process than the accepted worker
        return self._socket.recv()

    def close(self) -> None:
        """Close the socket, unsent messages dropped."""
        self._socket.close(linger=0)


class Listener(Channel):
    """The trainer's end of a channel, in the run's private folder. It recognises the worker by a
    secret that only the worker received, and ignores messages of any other process.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Listen in `folder`. Raises SyncError: other users can enter it."""
        if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
            raise SyncError(
                f"{folder} has mode {mode:o}, open to other users: sockets need a folder of mode 700"
            )
        self.secret = secrets.token_hex(16)
        self._path = folder / name
        self.endpoint = f"ipc://{self._path}"
        # ZMQ's ids of the process that sent the latest message, and of the accepted worker.
        self._speaker = self._peer = b""
        socket = _socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that has gone is an error
        socket.bind(self.endpoint)
        super().__init__(socket)

    def accept(self, timeout: float, device_id: str) -> None:
        """Wait for the worker and check that it is ours, on our device. Raises SyncError: another
        process, or the worker of another device, spoke. Silent connections are ignored.
        """
        self._peer = b""
        hello = self.receive(timeout, f"connection from the worker on {device_id}")
        if hello["kind"] != "hello" or not secrets.compare_digest(str(hello.get("secret")), self.secret):
            raise SyncError(
                f"a stranger (pid {hello.get('pid')}) connected to {self.endpoint} without the run's "
                "secret"
            )
        if hello.get("device_id") != device_id:
            raise SyncError(
                f"the worker on {hello.get('device_id')} connected to the rank on {device_id}: they "
                "must share a device"
            )
        self._peer = self._speaker

    def _put(self, packed: bytes) -> None:
        self._socket.send_multipart([self._peer, packed], zmq.NOBLOCK)

    def _take(self) -> bytes | None:
        self._speaker, *parts = self._socket.recv_multipart()
        return parts[-1] if self._peer in (b"", self._speaker) else None

    def close(self) -> None:
        """Close the socket and remove its file."""
        super().close()
        self._path.unlink(missing_ok=True)


def _socket(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def connect(endpoint: str, secret: str, device_id: str, pid: int) -> Channel:
    """Connect the worker's end, and introduce the worker."""
    socket = _socket(zmq.DEALER)
    socket.connect(endpoint)
    channel = Channel(socket)
    channel.send("hello", secret=secret, device_id=device_id, pid=pid)
    return channel
