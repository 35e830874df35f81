"""Files from public addresses: a server on loopback plays the internet, and its neighbour what must not be asked."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from generation.server import fetching
from generation.server.fetching import fetch, is_public

LOCAL = [
    *(
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
    ),
    *(
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
    ),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:53aa:64c:0:ffff:80ff:fffe"),
]


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, port = self.path.partition("?")[0], self.server.server_address[1]
        self.server.asked.append((self.client_address[0], self.path))  # type: ignore[attr-defined]
        to = {
            "/near": f"http://127.0.0.2:{port}/file",
            "/named": f"http://localhost:{port}/file",
            "/round": "/round",
            "/far": "/file",
            "/disk": "file:///etc/hostname",
        }.get(name)
        self.send_response(302 if to else 404 if name == "/none" else 200)
        if to:
            self.send_header("location", to)
        if name == "/packed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        if not to:
            self.wfile.write(b"12345678")
        if name == "/slow":
            threading.Event().wait(3)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def internet() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("0.0.0.0", 0), Pages)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def at(internet: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the public server's base address; of all loopback addresses, 127.0.0.3 alone counts as public."""
    monkeypatch.setattr(
        fetching, "is_public", lambda address: address == "127.0.0.3" or is_public(address)
    )
    return f"http://127.0.0.3:{internet.server_address[1]}"


@pytest.mark.parametrize("address", LOCAL)
def test_no_address_of_this_machine_or_its_neighbours_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


def test_a_file_is_fetched_also_after_a_redirect(at: str) -> None:
    assert [asyncio.run(fetch(f"{at}/{name}", 8)) for name in ("file", "far", "packed")] == [
        b"12345678"
    ] * 3


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/near", "127.0.0.2 is not a public address"),
        ("/named", "is not a public address"),
        ("/disk", "cannot be fetched"),
        ("/round", "cannot be fetched"),
        ("/none", "404"),
        ("/slow", "was not fetched within 1 s"),
    ],
)
def test_a_model_or_data_set_that_cannot_be_fetched_is_reported_in_one_sentence(
    at: str, internet: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, path: str, sentence: str
) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 1.0)
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(fetch(at + path, 8))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0"])
def test_nothing_is_asked_of_this_machine_however_it_is_named(
    internet: ThreadingHTTPServer, host: str
) -> None:
    before = list(internet.asked)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cannot be fetched"):
        asyncio.run(fetch(f"http://{host}:{internet.server_address[1]}/file", 8))
    assert internet.asked == before  # type: ignore[attr-defined]


def test_a_file_that_is_too_large_is_not_read_to_its_end(at: str) -> None:
    with pytest.raises(ValueError, match="has more than 7 bytes, the limit of rollout.max_image_mib"):
        asyncio.run(fetch(f"{at}/file", 7))
