"""Tools: any failure of a call becomes text, is counted, and affects no other call."""

import asyncio
import functools
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

import pytest

from generation.rollouts.agent import Agent, tool_rollout
from generation.rollouts.tools import (
    ToolCall,
    ToolLimits,
    ToolRunner,
    cut_to_tokens,
    make_tool,
    named_call,
    parse_hermes,
    tools_by_name,
)
from tests.conftest import ROOT
from tests.support.scripted import ScriptedEngine, merging_tokenizer, run, spelled

TOKENIZER = merging_tokenizer()
say = functools.partial(spelled, TOKENIZER)


def add(x: float, y: float = 1.0) -> float:
    """Return the sum.

    Two numbers, or one and
    its successor.

    Args:
        x: the first,
            with a long description
        y (float): the second
    """
    return x + y


def runner(**limits: Any) -> ToolRunner:
    return ToolRunner(ToolLimits(**limits), TOKENIZER)


def agent(*functions: Callable[..., Any], turns: int = 8, **limits: Any) -> Agent:
    return Agent(runner(**limits), parse_hermes, turns, tools_by_name(map(make_tool, functions)))


def replies(
    calls: list[ToolCall], *functions: Callable[..., Any], **limits: Any
) -> tuple[list[str], dict[str, float]]:
    """Return the replies to the calls, and the metrics."""
    metrics: dict[str, float] = {}
    texts = asyncio.run(runner(**limits).run(tools_by_name(map(make_tool, functions)), calls, metrics))
    metrics.pop("tools/seconds")
    return texts, metrics


def test_a_schema_comes_from_signature_and_docstring() -> None:
    assert make_tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Return the sum. Two numbers, or one and its successor.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "number", "description": "the first, with a long description"},
                    "y": {"type": "number", "description": "the second", "default": 1.0},
                },
                "required": ["x"],
            },
        },
    }


def test_parameters_may_have_any_name_and_type() -> None:
    def odd(
        schema: Literal["a", "b"],
        model_config: list[int],
        title: dict[str, int] | None = None,
        json: Any = 3,
    ): ...

    tool = make_tool(odd)
    properties = tool.schema["function"]["parameters"]["properties"]
    assert list(properties) == ["schema", "model_config", "title", "json"]
    assert properties["schema"] == {"enum": ["a", "b"], "type": "string"}
    assert tool.arguments(ToolCall("odd", {"schema": "a", "model_config": ["7"]})) == {
        "schema": "a",
        "model_config": [7],
    }


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda *rest: 1, "has 'rest', which cannot be passed by name"),
        (lambda **rest: 1, "has 'rest', which cannot be passed by name"),
        (len, "has 'obj', which cannot be passed by name"),
    ],
)
def test_functions_that_can_be_no_tools_are_named(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        tools_by_name([make_tool(add), make_tool(add)])


def explode(x: int) -> None:
    raise OSError("the disk is full")


def silent() -> None:
    raise ValueError


def quits() -> None:
    sys.exit(3)


async def later(x: int) -> int:
    return x + 1


async def quits_later() -> None:
    raise SystemExit(4)


def endless() -> None:
    threading.Event().wait(3600)


async def endless_later() -> None:
    while True:  # not even a cancellation stops it at once
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            raise


def long() -> str:
    return "hello" * 100


MISTAKES = {
    "malformed": (
        ToolCall(malformed="the tool call is not valid JSON: x"),
        "the tool call is not valid JSON: x",
    ),
    "unknown": (ToolCall("subtract"), "Unknown function subtract"),
    "arguments": (ToolCall("later", {"x": "many"}), "later: x: Input should be a valid integer"),
    "exception": (ToolCall("explode", {"x": 1}), "the disk is full"),
    "timeout": (ToolCall("endless"), "endless took longer than 0.3 s"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_become_text_and_are_counted(kind: str) -> None:
    call, text = MISTAKES[kind]
    texts, counted = replies([call, ToolCall("later", {"x": 1})], explode, later, endless, timeout_s=0.3)
    assert texts[0].startswith(f"Error: {text}") and texts[1] == "2"
    assert counted == {
        "tools/calls": 2.0,
        "tools/errors": 1.0,
        f"tools/errors/{kind}": 1.0,
        "tools/truncated": 0.0,
    }


def test_an_oversized_reply_is_cut_by_tokens_and_counted() -> None:
    texts, counted = replies([ToolCall("long"), ToolCall("later", {"x": 1})], long, later, max_tokens=3)
    assert texts == ["hellohellohello [cut after 3 tokens]", "2"]
    assert counted == {"tools/calls": 2.0, "tools/truncated": 1.0}


def test_tools_that_exit_hang_or_raise_are_answered_in_the_chosen_error_format() -> None:
    calls = [ToolCall(name) for name in ("silent", "quits", "quits_later", "endless_later")]
    calls += [
        ToolCall("later", {"x": 1, "y": 2}),
        ToolCall("later"),
        ToolCall("later", positional=(1, 2)),
    ]
    texts, counted = replies(
        calls,
        silent,
        quits,
        quits_later,
        endless_later,
        later,
        timeout_s=0.3,
        error_format="{'oops': '{error}'}",
    )
    assert texts == [
        "{'oops': 'ValueError'}",
        "{'oops': 'SystemExit: 3'}",
        "{'oops': 'SystemExit: 4'}",
        "{'oops': 'endless_later took longer than 0.3 s'}",
        "{'oops': 'later: y: Extra inputs are not permitted'}",
        "{'oops': 'later: x: Field required'}",
        "{'oops': 'later takes 1 arguments'}",
    ]
    assert counted["tools/errors"] == 7


def test_characters_are_not_torn_and_texts_that_fit_stay_as_they_are() -> None:
    texts, cut = cut_to_tokens(TOKENIZER, ["ééé", "ok", "", "x" * 10**6], 3)
    assert texts == ["é [cut after 3 tokens]", "ok", "", "xxx [cut after 3 tokens]"]
    assert cut == 2


def test_calls_run_together_within_the_bound_and_none_waits_for_a_slow_one() -> None:
    active, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(4)

    def work(x: int) -> int:
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        together.wait(120)  # four at a time, or an error
        with lock:
            active[0] -= 1
        return x

    calls = [ToolCall("work", {"x": i}) for i in range(32)] + [ToolCall("endless")]
    texts, counted = replies(calls[:32], work, max_concurrency=4)
    assert texts == [str(i) for i in range(32)] and most[0] == 4
    texts, counted = replies([calls[-1], ToolCall("later", {"x": 5})], endless, later, timeout_s=0.2)
    assert texts[1] == "6" and counted["tools/errors/timeout"] == 1


def test_a_tool_with_a_rate_is_called_so_often_and_no_other_waits_for_it() -> None:
    """Call begin in order and no earlier than the rate permits, though there is room for all; waiting does not count
    as the call's time.
    """
    begun: list[tuple[str, float]] = []

    async def scarce(x: int) -> int:
        begun.append((f"scarce {x}", time.monotonic()))
        return x

    async def plenty(x: int) -> int:
        begun.append((f"plenty {x}", time.monotonic()))
        return x

    calls = [ToolCall(name, {"x": i}) for i in range(4) for name in ("scarce", "plenty")]
    start = time.monotonic()
    texts, counted = replies(calls, scarce, plenty, rates={"scarce": 5.0}, timeout_s=0.4)
    assert texts == [str(i) for i in range(4) for _ in range(2)] and "tools/errors" not in counted
    limited = [at for name, at in begun if name.startswith("scarce")]
    assert [name for name, _ in begun if name.startswith("scarce")] == [f"scarce {i}" for i in range(4)]
    assert all(at - start > 0.199 * turn for turn, at in enumerate(limited))
    assert {name for name, _ in begun[:5]} == {"scarce 0", *(f"plenty {i}" for i in range(4))}


def test_calls_as_hermes_writes_them() -> None:
    text = 'So: <tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call> and <tool_call>{"name": 3}</tool_call>'
    good, nameless = parse_hermes(text)
    assert good == ToolCall("add", {"x": 1}) and '"name"' in nameless.malformed
    (broken,) = parse_hermes('<tool_call>{"name": "add", "arguments": {"x": 1}</tool_call>')
    assert "not valid JSON" in broken.malformed
    (unclosed,) = parse_hermes('<tool_call>{"name": "add"')
    assert "not valid JSON" in unclosed.malformed
    assert parse_hermes("42") == []
    assert named_call("add", '{"x": 2}') == ToolCall("add", {"x": 2})
    assert "not an object" in named_call("add", "[1]").malformed


def test_five_lines_are_a_tool_using_rollout() -> None:
    """A function in a list is enough for the policy's calls to reach it."""
    script = iter(
        [say('<tool_call>{"name": "add", "arguments": {"x": 3, "y": 302}}</tool_call>'), say("305")]
    )
    engine = ScriptedEngine(lambda ids, seed: next(script))
    (done,) = run(engine, tool_rollout(agent(add)), [[5, 6]], TOKENIZER)
    transcript = TOKENIZER.decode(done.response_ids[: done.answer_start])
    assert transcript.endswith("<|end|>\n<|start|>tool\n305.0<|end|>\n<|start|>assistant\n")
    assert TOKENIZER.decode(done.response_ids[done.answer_start :], skip_special_tokens=True) == "305"
    assert (done.turns, done.finish_reason, done.metrics["tools/calls"]) == (2, "stop", 1.0)


def test_max_turns_ends_an_episode_with_its_last_call_unanswered() -> None:
    call = say('<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>')
    (done,) = run(
        ScriptedEngine(lambda ids, seed: call), tool_rollout(agent(add, turns=3)), [[5]], TOKENIZER
    )
    assert (done.turns, done.finish_reason, done.metrics["tools/calls"]) == (3, "max_turns", 2.0)
    assert sum(done.loss_mask) == 3 * len(call) and done.response_ids[-len(call) :] == call


def test_a_tool_runs_once_for_each_call() -> None:
    seen: list[str] = []

    def fresh() -> str:
        seen.append(uuid.uuid4().hex)
        return seen[-1]

    def answers(ids: list[int], seed: int) -> list[int]:
        return say('<tool_call>{"name": "fresh"}</tool_call>') if len(ids) < 9 else say("done")

    results = run(ScriptedEngine(answers), tool_rollout(agent(fresh)), [[5]] * 3, TOKENIZER, group=2)
    assert len(seen) == len(set(seen)) == 6
    assert all(sum(uid in TOKENIZER.decode(t.response_ids) for uid in seen) == 1 for t in results)


EXAMPLES = ROOT / "scripts" / "examples"


def test_the_calculator_example_is_short_and_right() -> None:
    from generation.importing import load

    calculate = load(f"{EXAMPLES}/calculator.py:calculate")
    assert calculate("12+34") == 46 and calculate(" 3 * 302 ") == 906 and calculate("5--4") == 9
    with pytest.raises(ValueError, match="not one operation"):
        calculate("1+2+3")
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.pop("accelerate_loop.py") < 120  # a training loop of its own
    assert max(lines.values()) < 50
