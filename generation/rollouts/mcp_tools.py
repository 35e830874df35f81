"""Tools of MCP servers, by the official SDK: listed once, described to the chat template, called like any other tool.

A server is started, or connected to, at a trajectory's first call of one of its tools, and ended with the trajectory
or, where its session is shared, with the run. Of the environment it is given PATH, HOME and the like, and nothing else
(`mcp.client.stdio.get_default_environment`).
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import BaseModel

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM, RolloutFunction
from generation.rollouts.tools import Tool, ToolCall, ToolError, without_titles
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from mcp import Client

_LIST_SECONDS = 120.0  # to start a server and ask it for its tools; some are downloaded first
_CONNECTION_CLOSED = -32000  # the SDK's code of that error
_CLOSE_SECONDS = 10.0  # the SDK asks a server to end, then kills it, within 6.5 s


@dataclass(frozen=True)
class McpServer:
    """How a server is reached: by its command line, or by its address; `shared`: one session for all trajectories."""

    name: str
    command: Sequence[str] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False


def list_tools(servers: Sequence[McpServer]) -> dict[str, list[dict[str, Any]]]:
    """The tools of each server, by its name, in the form of OpenAI's API. Raises ValueError naming one that fails."""

    async def ask(server: McpServer, errors: TextIO) -> list[dict[str, Any]]:
        """One server's, page by page."""
        async with asyncio.timeout(_LIST_SECONDS), _client(server, errors) as client:
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += [_described(tool) for tool in page.tools]
                if (cursor := page.next_cursor) is None:
                    return found

    tools = {}
    for server in servers:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                tools[server.name] = asyncio.run(ask(server, errors))
            except Exception as error:  # whatever the SDK makes of a program that may be anything
                errors.seek(0)
                said = " ".join(errors.read()[-200:].split())
                reason = f"{_first(error)}" + (f"; it said: {said}" if said else "")
                raise ValueError(f"the server {server.name!r} does not tell its tools: {reason}") from error
    return tools


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _described(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": without_titles(tool.input_schema),
    }
    return {"type": "function", "function": function}


def _mcp_error() -> type[Any]:
    from mcp import MCPError

    return MCPError


def _client(server: McpServer, errors: TextIO) -> "Client":
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if server.url is not None:
        return Client(server.url)
    parameters = StdioServerParameters(command=server.command[0], args=[*server.command[1:]], env=dict(server.env))
    return Client(stdio_client(parameters, errlog=errors))


class _Anything(BaseModel):
    """The server checks arguments itself."""


class McpTool(Tool):
    """A tool whose server checks the arguments."""

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """The call's arguments by name. Raises ToolError for positional ones beyond the last."""
        if len(call.positional) > len(self.parameters):
            raise ToolError("arguments", f"{self.name} takes {len(self.parameters)} arguments")
        return dict(zip(self.parameters, call.positional, strict=False)) | call.arguments


class _Session:
    """One connection. The SDK wants it closed by the task that opened it, so it has one of its own."""

    def __init__(self, server: McpServer, log: Path) -> None:
        self.ended = False  # the server has ended by itself
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.task = asyncio.create_task(self._hold(server, log))

    async def _hold(self, server: McpServer, log: Path) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as errors:
                async with _client(server, errors) as client:
                    self._client.set_result(client)
                    await self._stop.wait()
        except Exception as error:  # before it is there: its callers' failure; afterwards there is nobody to tell
            if not self._client.done():
                self._client.set_exception(RuntimeError(f"the MCP server {server.name!r} failed: {_first(error)}"))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The tool's reply as text. Raises RuntimeError with the server's words where it reports an error."""
        client = await asyncio.shield(self._client)
        try:
            result = await client.call_tool(name, arguments)
        except _mcp_error() as error:
            self.ended |= error.code == _CONNECTION_CLOSED
            raise
        text = "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def close(self) -> None:
        """End it, and the server that was started for it."""
        self._stop.set()
        await asyncio.wait({self.task}, timeout=_CLOSE_SECONDS)
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=_CLOSE_SECONDS)


class McpTools:
    """The tools of all servers, for the trajectories of one engine. Use it on one event loop."""

    def __init__(self, servers: Sequence[McpServer], listed: Mapping[str, list[dict[str, Any]]], log: Path) -> None:
        """`listed` is from `list_tools`; servers' standard error goes to `log`."""
        self._log = log
        self._shared: dict[str, _Session] = {}
        self._own: ContextVar[dict[str, _Session]] = ContextVar("sessions of this trajectory")
        self.tools = [self._tool(server, schema) for server in servers for schema in listed[server.name]]

    def _tool(self, server: McpServer, schema: dict[str, Any]) -> Tool:
        name, parameters = schema["function"]["name"], schema["function"]["parameters"].get("properties", {})

        async def function(**arguments: Any) -> str:
            return await (await self._session(server)).call(name, arguments)

        return McpTool(name, function, schema, tuple(parameters), _Anything)

    async def _session(self, server: McpServer) -> _Session:
        """This trajectory's, or the shared one; another one in place of one that has ended."""
        sessions = self._shared if server.shared else self._own.get()
        session = sessions.get(server.name)
        if session is None or session.ended or session.task.done():
            if session is not None:
                await session.close()
            if sessions.get(server.name) is session:  # else another call has opened one meanwhile
                sessions[server.name] = _Session(server, self._log)
        return sessions[server.name]

    def around(self, function: RolloutFunction) -> RolloutFunction:
        """The same rollout, with sessions of its own, which end with it."""

        async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory | list[Trajectory]:
            sessions: dict[str, _Session] = {}
            token = self._own.set(sessions)
            try:
                return await function(llm, row, sampling)
            finally:
                self._own.reset(token)
                async with llm.away():
                    await _close(sessions)

        return run

    async def aclose(self) -> None:
        """End the shared sessions."""
        await _close(self._shared)


async def _close(sessions: dict[str, _Session]) -> None:
    await asyncio.gather(*(session.close() for session in sessions.values()))
    sessions.clear()
