"""The few things about ASGI that are needed here: reading a request, replaying it, asking an application oneself."""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TooLarge(ValueError):
    """A request's body is larger than allowed."""


class Disconnected(ConnectionError):
    """The client went away before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        TooLarge: it has, or is announced to have, more than `limit` bytes.
        TimeoutError: it is not there after `timeout_s` seconds.
        Disconnected: the client went away.
    """
    announced = header(scope, "content-length")
    parts, size, more = [], 0, True
    async with asyncio.timeout(timeout_s):
        while more:
            if max(size, int(announced) if announced.isdecimal() else 0) > limit:
                raise TooLarge(f"the request is larger than {limit:,} bytes")
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False) or size > limit
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, and then waits for the client to go away."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


def header(scope: Scope, name: str) -> str:
    """The header's value; empty where it is not there."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name.encode()), "")


def is_loopback(host: str) -> bool:
    """Whether that name or address means this machine to every program: `localhost`, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def named_host(scope: Scope) -> str:
    """The machine that the request's Host header names, without the port; empty where HTTP/1.0 leaves it out."""
    host = header(scope, "host").strip()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def with_length(scope: Scope, body: bytes) -> Scope:
    """The request with another body's length."""
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


async def respond(send: Send, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
    """Send `answer` as JSON."""
    body = json.dumps(answer).encode()
    told = {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
    pairs = [(key.encode(), value.encode()) for key, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def ask(app: App, path: str, request: Any) -> tuple[int, Any]:
    """POST a JSON request to the application itself; its status and its JSON answer."""
    body = json.dumps(request).encode()
    scope: Scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    scope.update({"scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b""})
    scope.update({"client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0), "state": {}})
    scope["headers"] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    status, parts = 0, []

    async def stay() -> Message:
        await asyncio.Event().wait()  # the client, which is us, does not go away
        raise AssertionError

    async def send(message: Message) -> None:
        """What the application answers, kept."""
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, replay(body, stay), send)
    return status, json.loads(b"".join(parts))
