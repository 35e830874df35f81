"""Bounds on the connections of a server, which uvicorn does not have."""

import asyncio
import resource
from typing import Any

HEADER_SECONDS = 60.0
"""Seconds that a client may take for the headers of a request, from its connection or its first byte on."""

CONNECTIONS = 4096
"""The most connections at a time, or half of the files that this process may open, if that is less."""

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    b"this server has as many connections as it takes: try again later\n"
)


def bounded(protocol: type[Any]) -> type[Any]:
    """One of uvicorn's protocols for HTTP with both bounds.

    A connection is closed that sends nothing, or half of a request's headers. Requests that are being answered have no
    clock, and between requests uvicorn's own runs (`timeout_keep_alive`), until the next one begins to arrive.
    """

    class BoundedProtocol(protocol):  # type: ignore[misc]
        clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
                transport.write(_FULL)
                transport.close()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def _watch(self) -> None:
            """Start the clock where headers are awaited, and stop it where they have come."""
            if self.cycle is None or self.cycle.response_complete:
                self.clock = self.clock or self.loop.call_later(HEADER_SECONDS, self.transport.close)
            elif self.clock is not None:
                self.clock.cancel()
                self.clock = None

    return BoundedProtocol
