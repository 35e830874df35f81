"""Recognises names of this machine, and requests that are meant for a different one, for servers on
loopback.
"""

import ipaddress
from collections.abc import Mapping
from contextlib import suppress

_NAMES = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Return True if a name or address means this machine to every program: `localhost`,
    127.0.0.0/8 or ::1.
    """
    with suppress(ValueError):
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def foreign_host(header: str) -> str:
    """Return the host that a request's Host header names, or "" if that is this machine or the
    header is empty.

    Servers refuse other hosts, since a web page whose name is made to resolve to 127.0.0.1 could
    otherwise read answers (DNS rebinding). The header may be empty, since HTTP/1.0 leaves it out.
    """
    host = header.strip()
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0]
    return "" if not name or is_loopback(name) else name


def off_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, those in `environ` with more hosts, that keep clients from asking a
    proxy for loopback.
    """
    variables: dict[str, str] = {}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in environ.get(name, "").split(",") if host]
        hosts += [host for host in _NAMES if host not in hosts]
        variables[name] = ",".join(hosts)
    return variables
