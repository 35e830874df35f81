"""Files fetched from public addresses, and from no others: not from this machine or those beside it."""

import ipaddress
import socket
from typing import Any

import aiohttp

SECONDS = 20.0
"""How long a file may take, redirects included."""
_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses within IPv6 (RFC 6052)


def is_public(address: str) -> bool:
    """Whether an IP address is one that anybody on the internet may ask, also where it holds another one."""
    found: Any = ipaddress.ip_address(address.partition("%")[0])
    if found.version == 6:
        held = ipaddress.ip_address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None
        found = found.ipv4_mapped or found.sixtofour or held or found
    local = found.is_multicast or getattr(found, "is_site_local", False) or getattr(found, "teredo", None)
    return bool(found.is_global and not local)


class NotPublic(OSError):
    """A connection was to go to an address that is not public."""


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Of each connection, also after a redirect: the address that the name stands for, and that is connected to."""
    family, kind, protocol, _, (host, *_) = address
    if not is_public(host):
        raise NotPublic(f"{host} is not a public address")
    return socket.socket(family, kind, protocol)


async def fetch(url: str, limit: int) -> bytes:
    """A file of at most `limit` bytes. Raises ValueError, a sentence without its subject, where it is not to be had."""
    where = url[:60]
    connector = aiohttp.TCPConnector(socket_factory=_socket, force_close=True)
    total, plain = aiohttp.ClientTimeout(total=SECONDS), {"Accept-Encoding": "identity"}
    try:
        async with (  # not decompressed: a small file may not become a large one
            aiohttp.ClientSession(connector=connector, timeout=total, headers=plain, auto_decompress=False) as session,
            session.get(url, max_redirects=_REDIRECTS, raise_for_status=True) as answer,
        ):
            data = bytearray()
            async for part in answer.content.iter_chunked(1 << 16):
                data += part
                if len(data) > limit:
                    raise ValueError(f"has more than {limit} bytes, rollout.max_image_mib ({where})")
            return bytes(data)
    except TimeoutError as error:
        raise ValueError(f"was not fetched within {SECONDS:g} s ({where})") from error
    except (aiohttp.ClientError, OSError) as error:
        refused = _cause(error)
        raise ValueError(f"cannot be fetched ({where}): {refused or error or type(error).__name__}") from error


def _cause(error: BaseException) -> NotPublic | None:
    """The refusal behind aiohttp's own error, if that was it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, NotPublic):
        inner = getattr(found, "os_error", None) or found.__cause__ or found.__context__
        found = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
    return found
