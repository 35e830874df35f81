"""Tools of a real MCP server, started by its command: sessions, errors, deadlines, and no process left."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from generation.rollouts import client_process, mcp_tools
from generation.rollouts.agent import Agent, tool_rollout
from generation.rollouts.mcp_tools import McpServer, McpTools, list_tools
from generation.rollouts.tools import (
    ToolCall,
    ToolError,
    ToolLimits,
    ToolRunner,
    parse_hermes,
    tools_by_name,
)
from tests.conftest import ROOT
from tests.support.scripted import ScriptedEngine, run
from tests.unit.generation.rollouts.test_environments import TOKENIZER, bytes_of, say

pytest.importorskip(
    "mcp", reason="the MCP SDK lacks cryptography here, which it imports", exc_type=ImportError
)
COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]

SEARCH = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def servers() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children(recursive=True) if COMMAND[1] in child.cmdline()
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert servers() == []


@pytest.fixture(scope="module")
def listed() -> dict[str, list[dict[str, Any]]]:
    return list_tools([McpServer("shelf", COMMAND, env=SEARCH)])


def test_a_servers_tools_are_listed_in_the_form_of_chat_templates(
    listed: dict[str, list[dict[str, Any]]],
) -> None:
    put = next(tool["function"] for tool in listed["shelf"] if tool["function"]["name"] == "put")
    assert put["description"] == "Put one thing on the shelf."
    assert put["parameters"]["required"] == ["item"] and put["parameters"]["properties"] == {
        "item": {"type": "string"}
    }


def test_an_mcp_server_that_does_not_list_its_tools_is_named_with_its_error() -> None:
    with pytest.raises(ValueError, match="server 'shelf' does not list its tools: .*no shelf here"):
        list_tools([McpServer("shelf", [*COMMAND, "--broken"], env=SEARCH)])
    with pytest.raises(ValueError, match="server 'shelf' does not list its tools: FileNotFoundError"):
        list_tools([McpServer("shelf", ["/no/such/program"])])


@pytest.mark.skipif(find_spec("socksio") is not None, reason="httpx can use SOCKS proxies here")
def test_a_socks_proxy_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"server 'far' does not list .*SOCKS proxy.*`pip install httpx\[socks\]`"
    ):
        list_tools([McpServer("far", url="http://example.org/mcp")])


def test_the_example_server_is_one(tmp_path: Path) -> None:
    server = McpServer("dates", [sys.executable, f"{ROOT}/scripts/examples/dates.py"], env=SEARCH)
    queues = {"a": [call("weekday", date="2026-02-14"), say("ok")]}
    (trajectory,) = converse(
        list_tools([server]), tmp_path, queues, name="dates", command=server.command
    ).values()
    assert "tool\nSaturday" in TOKENIZER.decode(trajectory.response_ids) and trajectory.error == ""


def test_all_pages_of_a_long_list_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def list_tools(self, cursor: str | None) -> SimpleNamespace:
            page = int(cursor or 0)
            tool = SimpleNamespace(name=f"tool-{page}", description=None, input_schema={})
            return SimpleNamespace(tools=[tool], next_cursor=str(page + 1) if page < 2 else None)

    monkeypatch.setattr(mcp_tools, "_client", lambda *_: Client())
    named = [tool["function"]["name"] for tool in list_tools([McpServer("long", ["x"])])["long"]]
    assert named == ["tool-0", "tool-1", "tool-2"]


HOSTILE = [sys.executable, str(Path(__file__).with_name("hostile_mcp_server.py"))]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("pages", "does not list its tools: it has more than 1000 tools, or 100 pages of them"),
        ("large pages", "it wrote more than 16 MiB or 20000 lines instead of an answer"),
        ("line", "it wrote more than 16 MiB or 20000 lines instead of an answer"),
        ("lines", "it wrote more than 16 MiB or 20000 lines instead of an answer"),
        ("notifications", "it wrote more than 16 MiB or 20000 lines instead of an answer"),
        ("silence", "does not list its tools: it took more than 3 s"),
        ("path", "one of them is called '../../x', but names are 1 to 128 of"),
        ("empty", "one of them is called '', but names"),
        ("twice", "2 of them are called 'x'"),
    ],
)
def test_listing_ends_in_a_sentence_whatever_a_server_says(
    how: str, sentence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "silence":
        monkeypatch.setattr(mcp_tools, "_LIST_SECONDS", 3.0)
    with pytest.raises(ValueError, match="the MCP server 'odd' ") as caught:
        list_tools([McpServer("odd", [*HOSTILE, how])])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert len(caplog.messages) == (how == "lines") and "Traceback" not in caplog.text
    assert all(
        "the MCP server 'odd' writes lines that are not messages" in line for line in caplog.messages
    )


def test_arguments_may_come_by_position() -> None:
    schema = {"function": {"name": "put", "parameters": {"properties": {"item": {}, "place": {}}}}}
    (tool,) = McpTools([McpServer("shelf")], {"shelf": [schema]}, Path("unused")).tools
    assert tool.arguments(ToolCall("put", {"place": 3}, ("x",))) == {"item": "x", "place": 3}
    with pytest.raises(ToolError, match="put takes 2 arguments"):
        tool.arguments(ToolCall("put", {}, (1, 2, 3)))


def call(name: str, **arguments: str) -> list[int]:
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return say(f'<tool_call>{{"name": "{name}", "arguments": {{{pairs}}}}}</tool_call>')


def converse(
    listed: dict,
    tmp_path: Path,
    queues: dict[str, list],
    timeout_s: float = 60.0,
    env: Any = SEARCH,
    **server: Any,
) -> dict:
    """Run one episode a letter, all at once on one loop, and return each letter's trajectory."""
    how: dict[str, Any] = {"name": "shelf", "command": COMMAND, "env": SEARCH | env} | server
    mcp = McpTools([McpServer(**how)], listed, tmp_path / "logs" / "mcp.log")
    agent = Agent(
        ToolRunner(ToolLimits(timeout_s=timeout_s), TOKENIZER), parse_hermes, 8, tools_by_name(mcp.tools)
    )
    engine = ScriptedEngine(lambda ids, seed: queues[bytes_of(ids)[:1].decode()].pop(0))
    function = mcp.around(tool_rollout(agent))

    async def closing(llm: Any, row: dict, sampling: Any) -> Any:
        trajectory = await function(llm, row, sampling)
        row["left"].discard(row["name"])
        if not row["left"]:
            await mcp.aclose()  # as at the end of a run, on the engine's loop
        return trajectory

    left = set(queues)
    rows = [{"name": name, "left": left} for name in queues]
    results = run(engine, closing, [say(name)[:-1] for name in queues], TOKENIZER, rows=rows)
    return dict(zip(queues, sorted(results, key=lambda t: t.prompt_index), strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["a session each", "one session for all"])
def test_sessions_are_a_trajectorys_own_or_shared(
    shared: bool, listed: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers keep state for one trajectory or for all; they see the variables meant for them and none of the
    trainer's.
    """
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "key")
    queues = {name: [call("put", item=name), call("put", item=name * 2), say("ok")] for name in "ab"}
    trajectories = converse(listed, tmp_path, queues, env={"SHELF": "oak"}, shared=shared)
    text = {name: TOKENIZER.decode(trajectory.response_ids) for name, trajectory in trajectories.items()}
    assert all("(oak, None)" in transcript for transcript in text.values())
    if shared:
        assert sum("4: " in transcript for transcript in text.values()) == 1
    else:
        assert "2: a, aa (" in text["a"] and "2: b, bb (" in text["b"]
    assert all(trajectory.metrics["tools/calls"] == 2 for trajectory in trajectories.values())


def test_errors_exits_and_hangs_of_a_server_fail_only_their_call(listed: dict, tmp_path: Path) -> None:
    calls = [
        call("misbehave", how="raise"),
        call("misbehave", how="exit"),
        call("put", item="x"),
        say("ok"),
    ]
    (trajectory,) = converse(listed, tmp_path, {"a": calls}).values()
    text = TOKENIZER.decode(trajectory.response_ids)
    assert (
        "Error executing tool misbehave" in text
        and "Connection closed" in text
        and "1: x (" in text
        and trajectory.error == ""
    )
    assert trajectory.metrics["tools/errors"] == 2
    (late,) = converse(
        listed, tmp_path, {"a": [call("misbehave", how="hang"), say("ok")]}, timeout_s=6.0
    ).values()
    assert late.metrics["tools/errors/timeout"] == 1 and "took longer than 6 s" in TOKENIZER.decode(
        late.response_ids
    )


def test_excessive_or_invalid_output_of_a_server_fails_only_its_call(
    listed: dict, tmp_path: Path
) -> None:
    """The next call of the trajectory succeeds, and so does another trajectory."""
    hostile = [call("misbehave", how=how) for how in ("flood", "babble")]
    queues = {"a": [*hostile, call("put", item="x"), say("ok")], "b": [call("put", item="y"), say("ok")]}
    trajectories = converse(listed, tmp_path, queues)
    text = TOKENIZER.decode(trajectories["a"].response_ids)
    assert "xxxxxxxx [cut after 1024 tokens]" in text and "babbled" in text and "1: x (" in text
    assert (
        trajectories["a"].metrics["tools/truncated"] == 1
        and trajectories["a"].error == trajectories["b"].error == ""
    )
    assert "1: y (" in TOKENIZER.decode(trajectories["b"].response_ids)


def test_endless_output_of_a_server_fails_only_its_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = list_tools([McpServer("shelf", [*HOSTILE, "calls"])])
    (name,) = (tool["function"]["name"] for tool in listed["shelf"])
    calls = [call(name, how="lines"), call(name), say("ok")]
    (trajectory,) = converse(listed, tmp_path, {"a": calls}, command=[*HOSTILE, "calls"]).values()
    text = TOKENIZER.decode(trajectory.response_ids)
    assert (
        "the MCP server 'shelf': it wrote more than 16 MiB or 20000 lines" in text
        and "tool\nfine" in text
    )
    assert trajectory.error == "" and trajectory.metrics["tools/errors"] == 1
    assert sum("writes lines that are not messages" in line for line in caplog.messages) == 1


def test_endless_standard_error_does_not_fill_the_disk(
    listed: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a server's standard error is cut at its limit. Tools' prints land there, too, since the SDK keeps
    standard output for messages.
    """
    monkeypatch.setattr(client_process, "LONGEST_LOG", 100_000)
    (trajectory,) = converse(
        listed, tmp_path, {"a": [call("misbehave", how="print"), say("ok")]}, timeout_s=15.0
    ).values()
    assert trajectory.metrics["tools/errors/timeout"] == 1
    assert (tmp_path / "logs" / "mcp.log").stat().st_size == 100_000


def test_arguments_that_no_message_can_hold_do_not_end_a_shared_session(
    listed: dict, tmp_path: Path
) -> None:
    async def work() -> list[str]:
        mcp = McpTools(
            [McpServer("shelf", COMMAND, env=SEARCH, shared=True)], listed, tmp_path / "mcp.log"
        )
        tools = {tool.name: tool.function for tool in mcp.tools}
        deep: list[Any] = []
        for _ in range(400):
            deep = [deep]
        try:
            results = [await tools["put"](item="x")]
            for item in ("\ud800", deep):
                with pytest.raises(ValueError, match="Error serializing to JSON"):
                    await tools["put"](item=item)
            return [*results, await tools["put"](item="y")]
        finally:
            await mcp.aclose()

    assert [result.partition(" (")[0] for result in asyncio.run(work())] == ["1: x", "2: x, y"]


def test_a_late_answer_is_not_attributed_to_the_next_call(listed: dict, tmp_path: Path) -> None:
    async def work() -> list[str]:
        mcp = McpTools(
            [McpServer("shelf", COMMAND, env=SEARCH, shared=True)], listed, tmp_path / "mcp.log"
        )
        tools = {tool.name: tool.function for tool in mcp.tools}
        try:
            results = [await tools["put"](item="x")]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await tools["misbehave"](how="late")
            results.append(await tools["put"](item="y"))
            await asyncio.sleep(2.0)  # until it has come
            return [*results, await tools["put"](item="z")]
        finally:
            await mcp.aclose()

    assert [result.partition(" (")[0] for result in asyncio.run(work())] == [
        "1: x",
        "2: x, y",
        "3: x, y, z",
    ]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of a running server, and a function that ends it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with subprocess.Popen([*COMMAND, str(port)], env={**os.environ, "SHELF": "web"}) as server:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.1)

        def end() -> None:
            server.kill()
            server.wait()

        yield f"http://127.0.0.1:{port}/mcp", end
        end()


@pytest.mark.parametrize("shared", [False, True], ids=["a session each", "one session for all"])
def test_a_server_may_run_already_and_have_an_address(
    shared: bool, url: tuple[str, Callable[[], None]], tmp_path: Path, listed: dict
) -> None:
    """The tools are those that the server lists; all trajectories share its shelf; the server outlives them."""
    address, end = url
    there = list_tools([McpServer("shelf", url=address)])
    assert there == listed
    queues = {name: [call("put", item=name), call("put", item=name * 2), say("ok")] for name in "ab"}
    trajectories = converse(there, tmp_path, queues, command=(), url=address, shared=shared)
    text = " ".join(TOKENIZER.decode(trajectory.response_ids) for trajectory in trajectories.values())
    assert all(f"{count}: " in text for count in range(1, 5)) and text.count("(web, None)") == 4
    end()
    queues = {"c": [call("put", item="c"), say("ok")]}
    (late,) = converse(there, tmp_path, queues, command=(), url=address, shared=shared).values()
    assert late.error == "" and late.metrics["tools/errors"] == 1
    with pytest.raises(ValueError, match="server 'shelf' does not list its tools: "):
        list_tools([McpServer("shelf", url=address)])


def test_a_trajectory_without_calls_starts_no_server(listed: dict, tmp_path: Path) -> None:
    (trajectory,) = converse(listed, tmp_path, {"a": [say("ok")]}).values()
    assert trajectory.error == "" and not (tmp_path / "logs").exists()
