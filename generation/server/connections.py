"""Limits on the number and the idle time of a server's connections, which uvicorn does not have."""

import asyncio
import resource
from typing import Any

HEADER_SECONDS = 60.0
"""Seconds that a client may take to send a request's headers, from its connection or the first byte
on.
"""

CONNECTIONS = 4096
"""The most connections at a time, or half of the files that this process may open, if that is
less.
"""

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"content-type: text/plain\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    b"the server has reached its limit of connections: try again later\n"
)


def with_limits(protocol: type[Any]) -> type[Any]:
    """Return a subclass of one of uvicorn's HTTP protocols that observes both limits.

    A connection is closed where it sends nothing, or only a part of a request's headers, for
    `HEADER_SECONDS`. No clock runs while a request is being answered. Between requests, uvicorn's
    own clock (`timeout_keep_alive`) runs until the next request begins to arrive.
    """

    class LimitedProtocol(protocol):  # type: ignore[misc]
        clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > min(
                CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
            ):
                transport.write(_FULL)
                transport.close()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def _watch(self) -> None:
            """Start the clock while headers are awaited, and stop it when they have arrived."""
            if self.cycle is None or self.cycle.response_complete:
                self.clock = self.clock or self.loop.call_later(HEADER_SECONDS, self.transport.close)
            elif self.clock is not None:
                self.clock.cancel()
                self.clock = None

    return LimitedProtocol
