"""Tools of MCP servers, through the official SDK: listed once, described to the chat template,
called like other tools.

A server is started, or connected to, when a trajectory first calls one of its tools. It is ended
with the trajectory or, where its session is shared, with the run. It inherits only a few
environment variables such as PATH and HOME (`mcp.client.stdio.get_default_environment`). `Output`
limits how much it may write, `list_tools` how many tools it has.
"""

import asyncio
import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_json

from generation.engine.sampling import SamplingSettings
from generation.rollouts.client_process import Copier
from generation.rollouts.episode import PolicyLLM, RolloutFunction
from generation.rollouts.tools import Tool, tool_schema
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from mcp import Client

_LIST_SECONDS = 120.0  # to start a server and ask it for its tools; some servers are downloaded first
_CONNECTION_CLOSED = -32000  # the SDK's error code
_CLOSE_SECONDS = 10.0  # the SDK asks a server to end, then kills it, within 6.5 s
_MOST_BYTES = 16 << 20  # of a server's output in answer to one call, or to the question for its tools
_MOST_LINES = 20_000  # of that output; a line that is not a message takes the SDK some 0.1 ms
_MOST_TOOLS = 1000
_MOST_PAGES = 100
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")  # MCP's rule for names of tools (SEP-986)


@dataclass(frozen=True)
class McpServer:
    """An MCP server that is started by a command or reached at a URL; if `shared`, all trajectories
    use one session.
    """

    name: str
    command: Sequence[str] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False


@dataclass
class Output:
    """Counts a server's output since the last request to it. `refused` says why it is no longer
    read, if it is not.
    """

    server: str
    characters: int = 0
    lines: int = 0
    warned: bool = False
    refused: str = ""

    def take(self, text: str) -> bool:
        """Count text that the server has written. Return False where it has written too much."""
        self.characters, self.lines = self.characters + len(text), self.lines + text.count("\n")
        if self.characters > _MOST_BYTES or self.lines > _MOST_LINES:
            self.refused = (
                f"it wrote more than {_MOST_BYTES >> 20} MiB or {_MOST_LINES} lines instead of an answer"
            )
        return not self.refused


_OUTPUT: ContextVar[Output] = ContextVar("the output of the server that this task reads")


def list_tools(servers: Sequence[McpServer]) -> dict[str, list[dict[str, Any]]]:
    """Return each server's tools by its name, in the form of OpenAI's API. Raises ValueError naming
    a bad server.
    """
    return {server.name: _list_tools(server) for server in servers}


def _list_tools(server: McpServer) -> list[dict[str, Any]]:
    output = Output(server.name)

    async def ask(errors: IO[bytes]) -> list[dict[str, Any]]:
        """Return the server's tools, which it lists page by page."""
        _OUTPUT.set(output)
        tools: list[dict[str, Any]] = []
        async with asyncio.timeout(_LIST_SECONDS), _client(server, errors) as client:
            cursor = None
            for _ in range(_MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += [
                    tool_schema(tool.name, tool.description or "", tool.input_schema)
                    for tool in page.tools
                ]
                if (cursor := page.next_cursor) is None:
                    break
        if cursor is not None or len(tools) > _MOST_TOOLS:
            raise ValueError(f"it has more than {_MOST_TOOLS} tools, or {_MOST_PAGES} pages of them")
        _check_names(tools)
        return tools

    with Copier(None) as copier:
        try:
            return asyncio.run(ask(copier.input))
        except Exception as error:  # the SDK may raise anything where the program is not an MCP server
            late = f"it took more than {_LIST_SECONDS:g} s" if isinstance(error, TimeoutError) else ""
            reason = output.refused or late or _first_error(error)
            output_end = " ".join(copier.end().split())[-200:]
            reason += f"; it last printed: {output_end}" if output_end else ""
            raise ValueError(
                f"the MCP server {server.name!r} does not list its tools: {reason}"
            ) from error


def _check_names(tools: list[dict[str, Any]]) -> None:
    """Raise ValueError for the first tool whose name is invalid or occurs twice."""
    for name, count in Counter(str(tool["function"]["name"]) for tool in tools).items():
        if not _NAME.fullmatch(name):
            letters = "1 to 128 of the letters a to z and A to Z, digits, _, - and ."
            raise ValueError(f"one of them is called {name[:80]!r}, but names are {letters}")
        if count > 1:
            raise ValueError(f"{count} of them are called {name!r}")


def _first_error(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    detail = " ".join(str(error).split())[:300]
    if type(error) is ValueError:
        return detail
    kind = type(error).__name__
    return f"{kind}: {detail}" if detail else kind


def _client(server: McpServer, errors: IO[bytes]) -> "Client":
    from mcp import Client, StdioServerParameters

    if server.url is not None:
        return Client(server.url)
    parameters = StdioServerParameters(
        command=server.command[0], args=[*server.command[1:]], env=dict(server.env)
    )
    return Client(_bounded_stdio().stdio_client(parameters, errlog=errors))


@functools.cache
def _bounded_stdio() -> Any:
    """Return the SDK's module for servers that are started, with another reader. The SDK's own
    (2.3) reads without limit; this one ends a server's output where it is too long.
    """
    import anyio
    from mcp.client import stdio

    class BoundedStream(stdio.TextReceiveStream):
        async def receive(self) -> str:
            text = await super().receive()
            if _OUTPUT.get().take(text):
                return text
            await self.transport_stream.aclose()
            raise anyio.EndOfStream

    stdio.TextReceiveStream = BoundedStream  # type: ignore[misc]
    stdio.logger.addFilter(_one_line)
    return stdio


def _one_line(record: logging.LogRecord) -> bool:
    """Filter the SDK's log, which has a traceback for each line that is not a message: only a
    server's first is kept, as one line.
    """
    output = _OUTPUT.get(None)
    if output is None or not record.exc_info:
        return True
    first = not output.warned
    output.warned = True
    error = record.exc_info[1]
    record.exc_info = None
    record.args = ()
    detail = " ".join(str(error).split())[:200]
    record.msg = (
        f"the MCP server {output.server!r} writes lines that are not messages; the first of them: "
        f"{detail}"
    )
    return first


class McpTool(Tool):
    """A tool whose arguments are checked by its server."""

    arguments = Tool.named


class _Session:
    """One connection to a server. The SDK requires the task that opened it to close it, so a
    session has a task.
    """

    def __init__(self, server: McpServer, log: Path) -> None:
        self.ended = False  # True once the server has ended by itself
        self.output = Output(server.name)
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.task = asyncio.create_task(self._hold(server, log))

    async def _hold(self, server: McpServer, log: Path) -> None:
        _OUTPUT.set(self.output)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with Copier(log) as copier:
                async with _client(server, copier.input) as client:
                    self._client.set_result(client)
                    await self._stop.wait()
        except Exception as error:
            # Callers get it while they wait for the client; afterwards nobody does
            if not self._client.done():
                self._client.set_exception(
                    RuntimeError(f"the MCP server {server.name!r} failed: {_first_error(error)}")
                )

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Return its reply as text, or raise RuntimeError with it where the reply is
        an error.
        """
        from mcp import MCPError

        # In a message, what cannot be written would end the connection for all episodes
        to_json([[[[arguments]]]])
        client = await asyncio.shield(self._client)
        self.output.characters = self.output.lines = 0
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            self.ended |= error.code == _CONNECTION_CLOSED
            if self.ended and self.output.refused:
                raise RuntimeError(
                    f"the MCP server {self.output.server!r}: {self.output.refused}"
                ) from error
            raise
        text = "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def close(self) -> None:
        """End the connection, and the server if it was started for it."""
        self._stop.set()
        await asyncio.wait({self.task}, timeout=_CLOSE_SECONDS)
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=_CLOSE_SECONDS)


class McpTools:
    """The tools of all servers, for the trajectories of one engine. Use it on one event loop."""

    def __init__(
        self, servers: Sequence[McpServer], listed: Mapping[str, list[dict[str, Any]]], log: Path
    ) -> None:
        """Make the tools that `list_tools` has `listed`. The servers' standard error goes to
        `log`.
        """
        self._log = log
        self._shared: dict[str, _Session] = {}
        self._of_trajectory: ContextVar[dict[str, _Session]] = ContextVar("sessions of this trajectory")
        self.tools = [self._tool(server, schema) for server in servers for schema in listed[server.name]]

    def _tool(self, server: McpServer, schema: dict[str, Any]) -> Tool:
        name = schema["function"]["name"]
        parameters = schema["function"]["parameters"].get("properties", {})

        async def function(**arguments: Any) -> str:
            return await (await self._session(server)).call(name, arguments)

        return McpTool(name, function, schema, tuple(parameters), BaseModel)

    async def _session(self, server: McpServer) -> _Session:
        """Return this trajectory's session, or the shared one. A session that has ended is replaced
        by a new one.
        """
        sessions = self._shared if server.shared else self._of_trajectory.get()
        session = sessions.get(server.name)
        if session is None or session.ended or session.output.refused or session.task.done():
            if session is not None:
                await session.close()
            if sessions.get(server.name) is session:  # otherwise another call has opened one meanwhile
                sessions[server.name] = _Session(server, self._log)
        return sessions[server.name]

    def around(self, function: RolloutFunction) -> RolloutFunction:
        """Return a rollout function with separate sessions for each episode, which end with the
        episode.
        """

        async def run(
            llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
        ) -> Trajectory | list[Trajectory]:
            sessions: dict[str, _Session] = {}
            token = self._of_trajectory.set(sessions)
            try:
                return await function(llm, row, sampling)
            finally:
                self._of_trajectory.reset(token)
                await llm.outside(_close(sessions))

        return run

    async def aclose(self) -> None:
        """End the shared sessions."""
        await _close(self._shared)


async def _close(sessions: dict[str, _Session]) -> None:
    await asyncio.gather(*(session.close() for session in sessions.values()))
    sessions.clear()
