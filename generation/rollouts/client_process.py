"""Level 6 in separate processes: an agent runs in another Python, whose packages may conflict with
Hotbunk's.

The command is started with a clean environment and a socket, whose file descriptor is in
`HOTBUNK_MESSAGES`. It sends `{"ready": true}`, and then answers each line with one line of at most
16 MiB:

    {"id": "…", "row": {…}, "base_url": "…", "api_key": "…", "model": "policy", "kwargs": {…}}
    {"id": "…", "reward": 1.0 or {"name": 1.0, …} or null, "metrics": {"name": 1.0, …}}   or {"id":
    "…", "error": "…"}

`generation/rollouts/elsewhere/hotbunk_client.py` does that for a function. A process has one
episode at a time. A process that does anything except answer is killed with all processes that it
has started, and the next episode gets a new one.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from generation.loopback import off_proxies
from generation.rollouts.client import Scored
from generation.undoing import undone_by

LONGEST_LINE = 16 << 20
LONGEST_LOG = 16 << 20  # bytes of the processes' output that are logged; the rest is dropped
START_SECONDS = 120.0
INHERITED = ("PATH", "HOME", "LANG")  # environment variables
_TAIL = 300  # bytes of a process's last output that errors quote


class ClientError(RuntimeError):
    """A client's process has not answered, or has reported an error."""


@dataclass(frozen=True)
class ClientCommand:
    """The command that starts a client.

    Attributes:
        command: program and arguments.
        workers: the number of processes, and so the number of episodes at the same time.
        env: environment variables besides PATH, HOME and LANG.
        kwargs: arguments that are sent with every episode.
        log: the file for the processes' output; None drops it.
    """

    command: Sequence[str]
    workers: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    log: Path | None = None


class ClientProcesses:
    """A pool of a client's processes, each of which is started when it is first needed. Use it on
    one event loop.
    """

    def __init__(self, settings: ClientCommand) -> None:
        self._settings = settings
        self._room = asyncio.Semaphore(settings.workers)
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()

    async def run(self, base_url: str, api_key: str, model: str, row: dict[str, Any]) -> Scored:
        """Run one episode, as a `Client` does. Raises ClientError. When cancelled, it kills the
        episode's process.
        """
        question = {"row": row, "base_url": base_url, "api_key": api_key, "model": model}
        async with self._room:
            process = await self._idle_process()
            with undone_by(partial(self._end, process)):
                answer = await process.ask(question | {"kwargs": dict(self._settings.kwargs)})
            self._idle.append(process)
        if error := answer.get("error"):
            raise ClientError(f"the client reports an error: {str(error)[:_TAIL]}")
        metrics = answer.get("metrics")
        return Scored(answer.get("reward"), metrics if isinstance(metrics, dict) else {})

    async def _idle_process(self) -> "_Process":
        """Return a process that is idle and alive; start one if there is none."""
        while self._idle:
            process = self._idle.pop()
            if process.alive():
                return process
            self._end(process)
        process = _Process(self._settings)
        self._running.add(process)
        with undone_by(partial(self._end, process)):
            await process.begin()
        return process

    def _end(self, process: "_Process") -> None:
        process.kill()
        self._running.discard(process)

    async def aclose(self) -> None:
        """Kill all processes, also those that have an episode."""
        for process in list(self._running):
            self._end(process)


class Copier(AbstractContextManager["Copier"]):
    """A pipe for a process's output. A thread copies the output to a log of at most `LONGEST_LOG`
    bytes.
    """

    def __init__(self, log: Path | None) -> None:
        """Open the pipe. If `log` is None, all output is dropped."""
        read, write = os.pipe()
        self.input = os.fdopen(write, "wb")
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, args=(read, log), daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Close this process's copy of the pipe's input; the process that was started has another
        one.
        """
        self.input.close()

    def end(self) -> str:
        """Return the end of the output, once the process has ended."""
        self.input.close()
        self._thread.join(5.0)
        return self._tail.decode(errors="replace")

    def _copy(self, read: int, log: Path | None) -> None:
        with suppress(OSError, ValueError), os.fdopen(read, "rb") as output:
            while part := os.read(output.fileno(), 65536):
                self._tail = (self._tail + part)[-_TAIL:]
                if log is not None:
                    with log.open("ab") as file:
                        file.write(part[: max(0, LONGEST_LOG - file.tell())])


class _Process:
    """One process of a client, and the socket to it."""

    def __init__(self, settings: ClientCommand) -> None:
        self._ours, theirs = socket.socketpair()
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        number = theirs.fileno()
        environment = inherited | {
            "CUDA_VISIBLE_DEVICES": "",
            **settings.env,
            "HOTBUNK_MESSAGES": str(number),
        }
        environment |= off_proxies(environment)
        self._program = settings.command[0]
        try:
            with Copier(settings.log) as self._copier:
                self._process = subprocess.Popen(
                    settings.command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._copier.input,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=[number],
                    start_new_session=True,  # so that the processes it starts can be killed with it
                )
        except OSError as error:
            self._ours.close()
            raise ClientError(f"{self._program} cannot be started: {error.strerror or error}") from error
        finally:
            theirs.close()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def begin(self) -> None:
        """Wait until the process is ready. Raises ClientError."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=LONGEST_LINE)
        try:
            async with asyncio.timeout(START_SECONDS):
                message = await self._read_message()
        except TimeoutError as late:
            raise ClientError(
                f"{self._program} was not ready within {START_SECONDS:g} s{self._last_line()}"
            ) from late
        if message.get("ready") is not True:
            raise ClientError(f'{self._program} did not begin with {{"ready": true}}')

    def alive(self) -> bool:
        """Return True if the process runs, and has sent nothing since its last answer.

        A process that sends an answer before the next question is not to be trusted.
        """
        quiet = not self._reader._buffer  # type: ignore[attr-defined]
        return quiet and not self._reader.at_eof() and not self._ended()

    def _ended(self) -> bool:
        """Return True if the process has ended. Only `kill` reaps it, so that until then its id
        stays in use.
        """
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask the client a question, and return its answer. Raises ClientError."""
        assert self._writer is not None
        # Random, so that an answer cannot have been sent before the question
        name = secrets.token_hex(8)
        line = json.dumps({"id": name} | question, default=str).encode()
        if len(line) >= LONGEST_LINE:
            raise ClientError(
                f"the row is larger than {LONGEST_LINE:,} bytes, the most that a client can be sent"
            )
        with suppress(ConnectionError):  # reading the answer will report that the process has ended
            self._writer.write(line + b"\n")
            await self._writer.drain()
        answer = await self._read_message()
        if answer.get("id") != name:
            raise ClientError(f"{self._program} answered with another id than that of its question")
        return answer

    async def _read_message(self) -> dict[str, Any]:
        try:
            line = await self._reader.readuntil(b"\n")
            message = json.loads(line)
        except asyncio.LimitOverrunError as error:
            raise ClientError(
                f"{self._program} sent a line of more than {LONGEST_LINE:,} bytes"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            for _ in range(20):  # the socket of a process closes just before the process has ended
                if by_itself := self._ended():
                    break
                await asyncio.sleep(0.05)
            self.kill()
            ended = (
                f"ended with exit code {self._process.returncode}" if by_itself else "closed its socket"
            )
            raise ClientError(
                f"{self._program} {ended} before it answered{self._last_line()}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ClientError(f"{self._program} sent a line that is not JSON") from error
        if not isinstance(message, dict):
            raise ClientError(f"{self._program} sent a line that is not a JSON object")
        return message

    def _last_line(self) -> str:
        """Kill the process, so that its output is complete. Return its last line as the end of an
        error message.
        """
        self.kill()
        lines = self._copier.end().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it last printed: {last}" if last else ""

    def kill(self) -> None:
        """Kill the process and all processes that it has started, including those in other
        sessions.
        """
        if self._process.returncode is None:
            below: list[psutil.Process] = []
            with suppress(ProcessLookupError, psutil.Error):
                os.killpg(self._process.pid, signal.SIGSTOP)  # so that it starts no further processes
                below = psutil.Process(self._process.pid).children(recursive=True)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for process in below:
                with suppress(psutil.Error):
                    process.kill()
            self._process.wait()
        (self._writer or self._ours).close()
