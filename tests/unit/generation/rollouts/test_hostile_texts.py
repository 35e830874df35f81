"""Whatever text the policy writes as a call, its episode goes on: the call gets an error as its reply."""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.tool_parsers import ToolParserManager

from generation.rollouts.agent import Agent, inline_rollout
from generation.rollouts.tools import (
    ToolCall,
    ToolLimits,
    ToolRunner,
    call_parser,
    make_tool,
    named_call,
    parse_hermes,
    parse_inline,
    tools_by_name,
)
from tests.support.scripted import ScriptedEngine, merging_tokenizer, run, spelled

TOKENIZER = merging_tokenizer()
VALUES = [
    "1",
    "-2.5",
    "9" * 400,
    "9" * 5000,
    "1e999",
    "-1e400",
    "NaN",
    "Infinity",
    "true",
    "None",
    "1j",
    "0x" + "f" * 300,
    "''",
    '"a"',
    "'''",
    '"\\ud800"',
    "b'x'",
    "\x00",
    "\ud800",
    "é",
    "f'{x}'",
    "lambda: 1",
    "x",
    "*[1]",
    "**{}",
    "...",
    "{[]: 1}",
    "{{}}",
    "{1: {2}}",
    "{(): []}",
    "[1, [2]]",
    "(1,)",
    "[" * 90,
    "[" * 300 + "]" * 300,
    "-" * 5000 + "1",
    "{" * 3000,
    '{"a":' * 2000,
    "[" * 20000,
    "not " * 3000 + "1",
    "10**10**10",
    "__import__('os')",
    "1_0",
]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    '"name"',
    '"arguments"',
    '"add"',
    '"keep"',
    "[TOOL_CALLS]",
    "<function=add>",
    "</function>",
    "<parameter=x>",
    "</parameter>",
    "functools[",
    "<|python_tag|>",
    "<|tool_call|>",
    "<tool_call>add",
    "<arg_key>x</arg_key>",
    "<arg_value>",
    '<invoke name="add">',
    "```json",
    "{",
    "}",
    "[",
    "]",
    ",",
    "(",
    ")",
    ":",
    "=",
    "\n",
    "add(",
    "keep(",
    "x=",
    "\\u0000",
    "\\ud800",
    "  ",
]


def add(x: float, y: float = 1.0) -> float:
    """Return the sum."""
    return x + y


def keep(x: Any) -> Any:
    """Return the same thing again."""
    return x


def inline(rng: random.Random) -> str:
    values = rng.choices(VALUES, k=rng.randint(0, 3))
    arguments = ", ".join(rng.choice(("", "x=", "y=", "**", "if=")) + value for value in values)
    return f"{rng.choice(('add', 'keep', 'a.b', '', 'add()'))}({arguments}{rng.choice((')', '', '))'))}"


def in_json(rng: random.Random) -> str:
    name = json.dumps(rng.choice(("add", "keep", "\ud800", "\x00", "n" * 9999)))
    arguments = rng.choice(
        (f'{{"x": {rng.choice(VALUES)}}}', rng.choice(VALUES), json.dumps(rng.choice(VALUES)))
    )
    call = f'{{"name": {rng.choice((name, rng.choice(VALUES)))}, "arguments": {arguments}}}'
    cut = rng.choice((len(call), rng.randrange(len(call))))
    return f"<tool_call>{call[:cut]}</tool_call>"


def mixed(rng: random.Random) -> str:
    return "".join(rng.choice(rng.choice((MARKS, MARKS, VALUES))) for _ in range(rng.randint(1, 12)))


def replies(calls: list[ToolCall]) -> list[Any]:
    runner = ToolRunner(ToolLimits(max_tokens=20), TOKENIZER)
    return asyncio.run(runner.run(tools_by_name(map(make_tool, (add, keep))), calls, {}))


def answered(parse: Callable[[str], list[ToolCall]], texts: list[str]) -> int:
    """Return the number of calls in these texts, each of which must get a reply that can be spelled in tokens."""
    calls = [call for text in texts for call in parse(text)]
    for reply in replies(calls):
        assert isinstance(reply, str) and reply.encode().decode() == reply
    # Some chat templates render it
    assert all(call.name.encode().decode() == call.name for call in calls)
    return len(calls)


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_every_inline_call_gets_a_reply() -> None:
    rng = random.Random(0)
    texts = [inline(rng) for _ in range(3500)] + [mixed(rng) for _ in range(500)]
    assert answered(lambda text: [parse_inline(text)], texts) == 4000
    for text in ("add({[]: 1}, 2)", f"add({'9' * 400})", f"keep({'[' * 20000})", "keep(\ud800)"):
        assert parse_inline(text).malformed, text
        assert replies([parse_inline(text)])[0].startswith("Error: "), text


def test_an_episode_of_inline_calls_outlives_its_own_texts() -> None:
    texts = ["add({[]: 1}, 2)", f"add({'9' * 400}, 2)", "add(1, 2)"]
    answers = [f"<function>{text}</function>" for text in texts]
    queue = [spelled(TOKENIZER, text) for text in [*answers, "done"]]
    agent = Agent(ToolRunner(ToolLimits(), TOKENIZER), parse_hermes, 8, tools_by_name([make_tool(add)]))
    (trajectory,) = run(
        ScriptedEngine(lambda ids, seed: queue.pop(0)), inline_rollout(agent), [[5]], TOKENIZER
    )
    assert trajectory.error == "" and trajectory.metrics["tools/errors/malformed"] == 2
    assert "<result>3.0</result>" in TOKENIZER.decode(trajectory.response_ids)


def test_every_call_in_json_gets_a_reply() -> None:
    rng = random.Random(1)
    assert (
        answered(parse_hermes, [in_json(rng) for _ in range(3500)] + [mixed(rng) for _ in range(500)])
        > 3500
    )
    assert named_call("\ud800", {}).name == "?"


def test_no_text_fails_a_parser_of_vllm_that_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM logs a traceback for each text
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    rng = random.Random(2)
    texts = [mixed(rng) for _ in range(40)] + [in_json(rng)[:2000] for _ in range(20)]
    # Some of vLLM's expressions take minutes for longer ones
    texts = [text for text in texts if len(text) < 3000]
    chosen = []
    for name in ToolParserManager.list_registered():
        try:
            parse = call_parser(name, TOKENIZER)
        except (ValueError, RuntimeError):  # it needs tokens of its own
            continue
        chosen.append(name)
        answered(parse, texts)
    assert len(chosen) > 30 and {"qwen3_coder", "glm45", "pythonic", "granite"} <= {*chosen}


@pytest.mark.parametrize("name", ["openai", "cohere_command3"])
def test_a_parser_that_only_vllms_server_can_use_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM's tool parser '{name}' does not read answers here"):
        call_parser(name, TOKENIZER)


def test_a_parsers_own_error_is_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ToolParserManager.get_tool_parser("qwen3_json")
    parse = call_parser("qwen3_json", TOKENIZER)

    def fail(*_: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(kind, "extract_tool_calls", fail)
    (call,) = parse("anything")
    assert call.malformed == "the tool calls cannot be read: list index out of range"
