"""One ZMQ pair between a rank and its worker: msgpack messages, a secret on connecting, a deadline on every wait."""

import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

MAX_MESSAGE_BYTES = 64 << 20
POLL_MS = 200


class SyncError(RuntimeError):
    """A weight update went wrong; the message says on which worker, with which weight, and what to do."""


def pack(kind: str, **fields: Any) -> bytes:
    """A message as it travels.

    Raises:
        SyncError: it is larger than what is taken at the other end, which would drop it without a word.
    """
    packed = msgspec.msgpack.encode({"kind": kind, **fields})
    if len(packed) > MAX_MESSAGE_BYTES:
        raise SyncError(f"a message {kind!r} of {len(packed)} bytes is larger than the {MAX_MESSAGE_BYTES} allowed")
    return packed


def unpack(packed: bytes, waiting_for: str) -> dict[str, Any]:
    """What `pack` has packed, wherever the bytes come from.

    Raises:
        SyncError: they are no message.
    """
    try:
        message = msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SyncError(
            f"{len(packed)} bytes that are no message arrived instead of a {waiting_for}: {error}"
        ) from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise SyncError(f"a message without a kind arrived instead of a {waiting_for}")
    return message


class Channel:
    """An endpoint of the pair. Messages are dictionaries with a "kind"; nothing is ever unpickled (invariant 11)."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message without waiting.

        Raises:
            SyncError: the peer has gone (a pair's send would otherwise wait for its return, for ever), or see `pack`.
        """
        try:
            self._socket.send(pack(kind, **fields), zmq.NOBLOCK)
        except zmq.Again:
            raise SyncError(f"nobody is connected to send {kind!r} to: the process at the other end has gone") from None

    def receive(
        self, timeout: float, waiting_for: str, still_alive: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The next message.

        Args:
            timeout: seconds.
            waiting_for: named in the error.
            still_alive: called between polls; raises when the peer's process is known to be gone.

        Raises:
            TimeoutError: nothing arrived in time; what is larger than `MAX_MESSAGE_BYTES` never does.
            SyncError: what arrived is no message.
        """
        deadline = time.monotonic() + timeout
        while not self._socket.poll(int(max(0.0, min(POLL_MS, (deadline - time.monotonic()) * 1000)))):
            still_alive()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no {waiting_for} within {timeout:.0f} s")
        return unpack(self._socket.recv(), waiting_for)

    def close(self) -> None:
        """Close the socket, unsent messages dropped."""
        self._socket.close(linger=0)


class Listener(Channel):
    """The trainer's end.

    It lives in the run's private folder and knows its peer by a secret that only the peer was told. A pair has one
    peer: who connects later is heard only when the first one has gone.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Listen in `folder`.

        Raises:
            SyncError: other users can enter it.
        """
        if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
            raise SyncError(f"{folder} has mode {mode:o}, open to other users: sockets need a folder of mode 700")
        self.secret = secrets.token_hex(16)
        self.endpoint = f"ipc://{folder / name}"
        self._path = folder / name
        socket = _pair()
        socket.bind(self.endpoint)
        super().__init__(socket)

    def accept(self, timeout: float, device_id: str) -> None:
        """Wait for the worker and check that it is ours, on our device.

        Raises:
            SyncError: a stranger, or the worker of another device, connected.
        """
        hello = self.receive(timeout, f"connection from the worker on {device_id}")
        if hello["kind"] != "hello" or not secrets.compare_digest(str(hello.get("secret")), self.secret):
            raise SyncError(
                f"a stranger (pid {hello.get('pid')}) connected to {self.endpoint} without the run's secret"
            )
        if hello.get("device_id") != device_id:
            raise SyncError(
                f"the worker on {hello.get('device_id')} connected to the rank on {device_id}: they must share a device"
            )

    def close(self) -> None:
        """Close the socket and remove its file."""
        super().close()
        self._path.unlink(missing_ok=True)


def _pair() -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def connect(endpoint: str, secret: str, device_id: str, pid: int) -> Channel:
    """The worker's end: connect and say who we are."""
    socket = _pair()
    socket.connect(endpoint)
    channel = Channel(socket)
    channel.send("hello", secret=secret, device_id=device_id, pid=pid)
    return channel
