"""`hotbunk report --watch`: a server on loopback for the page of a run, which polls the run's
metrics.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from generation.loopback import foreign_host
from trainer.commands.report_page import embedded, page, page_data
from trainer.commands.report_record import RunRecord, read_record
from trainer.errors import UserError

_FILES = ("metrics.jsonl", "completions.jsonl", "tokens.jsonl", "config.yaml")
_REQUEST_SECONDS = 30  # time in which a client must send its request


class Runs:
    """The records of some runs, which are read again when files in their folders have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._stats: list[list[tuple[int, int]]] = []
        self._records: list[RunRecord] = []

    def read(self) -> tuple[list[RunRecord], str]:
        """Return the current records of the runs, and an ETag of them. Raises UserError if a folder
        is not a run's.
        """
        stats = []
        for folder in self._folders:
            files = _present(folder)
            stats.append([(file.stat().st_mtime_ns, file.stat().st_size) for file in files])
        if stats != self._stats:
            self._records = [read_record(folder, begun=False) for folder in self._folders]
            self._stats = stats
        return self._records, f'"{hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}"'


def _present(folder: Path) -> list[Path]:
    return [folder / name for name in _FILES if (folder / name).is_file()]


def watch(folders: Sequence[Path], port: int) -> int:
    """Serve the page until Ctrl-C. Raises UserError if a folder is not a run's, or the port is
    taken.
    """
    with make_server(folders, port) as server, suppress(KeyboardInterrupt):
        print(f"{folders[0]} at http://127.0.0.1:{server.server_port}/ until Ctrl-C", flush=True)
        server.serve_forever(poll_interval=0.2)
    print()
    return 0


def make_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Make a server that listens only on 127.0.0.1; port 0 takes a free port."""
    runs = Runs(folders)
    runs.read()

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            if name := foreign_host(self.headers.get("Host", "")):
                self._answer(
                    HTTPStatus.FORBIDDEN, f"this page is on loopback, not at {name[:80]!r}", "text/plain"
                )
                return
            try:
                records, tag = runs.read()
            except UserError as error:  # the folder was moved meanwhile
                self._answer(HTTPStatus.GONE, str(error), "text/plain")
                return
            if self.path == "/":
                self._answer(HTTPStatus.OK, page(records, follows=True), "text/html")
            elif self.path != "/data":
                self._answer(HTTPStatus.NOT_FOUND, "there is / and /data", "text/plain")
            elif self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, "", "application/json", tag)
            else:
                self._answer(HTTPStatus.OK, embedded(page_data(records)), "application/json", tag)

        def _answer(self, status: HTTPStatus, text: str, kind: str, tag: str = "") -> None:
            body = text.encode()
            self.send_response(status)
            headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
            headers |= {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
            for name, value in (headers | ({"ETag": tag} if tag else {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port {port} cannot be listened on ({error}): name another, or 0 for a free one"
        ) from error
