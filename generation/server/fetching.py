"""Fetch files from public addresses only, never from this machine or its private network."""

import ipaddress
import socket
from typing import Any

import aiohttp

SECONDS = 20.0
"""Seconds that one file may take, redirects included."""
_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses within IPv6 (RFC 6052)


def is_public(address: str) -> bool:
    """Return True if an IP address, and an IPv4 address embedded in it, is reachable from the
    public internet.
    """
    ip: Any = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6:
        embedded = ipaddress.ip_address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or embedded or ip
    local = ip.is_multicast or getattr(ip, "is_site_local", False) or getattr(ip, "teredo", None)
    return bool(ip.is_global and not local)


class NotPublic(OSError):
    """Refuses a connection whose address is not public."""


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Open the socket of a connection to a resolved address, also after a redirect. Raises
    NotPublic.
    """
    family, kind, protocol, _, (host, *_) = address
    if not is_public(host):
        raise NotPublic(f"{host} is not a public address")
    return socket.socket(family, kind, protocol)


async def fetch(url: str, limit: int) -> bytes:
    """Fetch a file of at most `limit` bytes. Raises ValueError where it cannot; its text lacks the
    subject.
    """
    where = url[:60]
    connector = aiohttp.TCPConnector(socket_factory=_socket, force_close=True)
    total = aiohttp.ClientTimeout(total=SECONDS)
    plain = {"Accept-Encoding": "identity"}
    try:
        async with (  # not decompressed: a small file may not become a large one
            aiohttp.ClientSession(
                connector=connector, timeout=total, headers=plain, auto_decompress=False
            ) as session,
            session.get(url, max_redirects=_REDIRECTS, raise_for_status=True) as answer,
        ):
            data = bytearray()
            async for part in answer.content.iter_chunked(1 << 16):
                data += part
                if len(data) > limit:
                    raise ValueError(
                        f"has more than {limit} bytes, the limit of rollout.max_image_mib ({where})"
                    )
            return bytes(data)
    except TimeoutError as error:
        raise ValueError(f"was not fetched within {SECONDS:g} s ({where})") from error
    except (aiohttp.ClientError, OSError) as error:
        refused = _cause(error)
        raise ValueError(
            f"cannot be fetched ({where}): {refused or error or type(error).__name__}"
        ) from error


def _cause(error: BaseException) -> NotPublic | None:
    """Return the refusal that aiohttp's error wraps, or None where the error has another cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, NotPublic):
        inner = getattr(cause, "os_error", None) or cause.__cause__ or cause.__context__
        cause = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
    return cause
