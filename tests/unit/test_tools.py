"""Tools, environments and inline calls: what can go wrong becomes text, is counted, and is nobody else's business."""

import asyncio
import functools
import random
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from scripted import END, ScriptedEngine, merging_tokenizer, run, spelled

from generation.rollouts.agent import Agent, environment_rollout, environment_tools, tool_rollout
from generation.rollouts.inline_tools import InlineTags, inline_rollout, pending_call
from generation.rollouts.tool_calls import ToolCall, named_call, parse_hermes, parse_inline
from generation.rollouts.tools import Tool, ToolLimits, ToolRunner, cut_to_tokens, make_tool, tools_by_name
from generation.trajectory import Trajectory

TOKENIZER = merging_tokenizer()
say = functools.partial(spelled, TOKENIZER)


def add(x: float, y: float = 1.0) -> float:
    """The sum.

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


def replies(calls: list[ToolCall], *functions: Callable[..., Any], **limits: Any) -> tuple[list[str], dict[str, float]]:
    """What the calls are answered, and what was counted."""
    metrics: dict[str, float] = {}
    texts = asyncio.run(runner(**limits).run(tools_by_name(map(make_tool, functions)), calls, metrics))
    metrics.pop("tools/seconds")
    return texts, metrics


def test_a_schema_comes_from_signature_and_docstring() -> None:
    assert make_tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum. Two numbers, or one and its successor.",
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
    def odd(schema: Literal["a", "b"], model_config: list[int], title: dict[str, int] | None = None, json: Any = 3): ...

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
        (lambda *rest: 1, "cannot take 'rest' that way"),
        (lambda **rest: 1, "cannot take 'rest' that way"),
        (len, "cannot take 'obj' that way"),
    ],
)
def test_functions_that_can_be_no_tools_are_named(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools named 'add'"):
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
    "malformed": (ToolCall(malformed="the tool call is not valid JSON: x"), "the tool call is not valid JSON: x"),
    "unknown": (ToolCall("subtract"), "Unknown function subtract"),
    "arguments": (ToolCall("later", {"x": "many"}), "later: x: Input should be a valid integer"),
    "exception": (ToolCall("explode", {"x": 1}), "the disk is full"),
    "timeout": (ToolCall("endless"), "endless took longer than 0.3 s"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_v14_mistakes_become_text_and_are_counted(kind: str) -> None:
    call, text = MISTAKES[kind]
    texts, counted = replies([call, ToolCall("later", {"x": 1})], explode, later, endless, timeout_s=0.3)
    assert texts[0].startswith(f"Error: {text}") and texts[1] == "2"
    assert counted == {"tools/calls": 2.0, "tools/errors": 1.0, f"tools/errors/{kind}": 1.0, "tools/truncated": 0.0}


def test_v14_an_oversized_reply_is_cut_by_tokens_and_counted() -> None:
    texts, counted = replies([ToolCall("long"), ToolCall("later", {"x": 1})], long, later, max_tokens=3)
    assert texts == ["hellohellohello [cut after 3 tokens]", "2"]
    assert counted == {"tools/calls": 2.0, "tools/truncated": 1.0}


def test_v14_other_ways_to_fail_and_another_way_to_say_so() -> None:
    calls = [ToolCall(name) for name in ("silent", "quits", "quits_later", "endless_later")]
    calls += [ToolCall("later", {"x": 1, "y": 2}), ToolCall("later"), ToolCall("later", positional=(1, 2))]
    texts, counted = replies(
        calls, silent, quits, quits_later, endless_later, later, timeout_s=0.3, error_format="{'oops': '{error}'}"
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


def test_v10_v13_calls_run_together_within_the_bound_and_none_waits_for_a_slow_one() -> None:
    active, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(4)

    def work(x: int) -> int:
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        together.wait(10)  # four at a time, or an error
        with lock:
            active[0] -= 1
        return x

    calls = [ToolCall("work", {"x": i}) for i in range(32)] + [ToolCall("endless")]
    texts, counted = replies(calls[:32], work, max_concurrency=4)
    assert texts == [str(i) for i in range(32)] and most[0] == 4
    texts, counted = replies([calls[-1], ToolCall("later", {"x": 5})], endless, later, timeout_s=0.2)
    assert texts[1] == "6" and counted["tools/errors/timeout"] == 1


def test_calls_as_hermes_writes_them() -> None:
    text = (
        'So: <tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call> and <tool_call>{"name": 3}</tool_call>'
    )
    good, nameless = parse_hermes(text)
    assert good == ToolCall("add", {"x": 1}) and '"name"' in nameless.malformed
    (broken,) = parse_hermes('<tool_call>{"name": "add", "arguments": {"x": 1}</tool_call>')
    assert "not valid JSON" in broken.malformed
    (unclosed,) = parse_hermes('<tool_call>{"name": "add"')
    assert "not valid JSON" in unclosed.malformed
    assert parse_hermes("42") == []
    assert named_call("add", '{"x": 2}') == ToolCall("add", {"x": 2})
    assert "no object" in named_call("add", "[1]").malformed


def test_v30_five_lines_are_a_tool_using_rollout() -> None:
    """A function, a list with it in, and the policy's calls reach it: nothing else is needed."""
    script = iter([say('<tool_call>{"name": "add", "arguments": {"x": 3, "y": 302}}</tool_call>'), say("305")])
    engine = ScriptedEngine(lambda ids, seed: next(script))
    (done,) = run(engine, tool_rollout(agent(add)), [[5, 6]], TOKENIZER)
    said = TOKENIZER.decode(done.response_ids[: done.answer_start])
    assert said.endswith("<|end|>\n<|start|>tool\n305.0<|end|>\n<|start|>assistant\n")
    assert TOKENIZER.decode(done.response_ids[done.answer_start :], skip_special_tokens=True) == "305"
    assert (done.turns, done.finish_reason, done.metrics["tools/calls"]) == (2, "stop", 1.0)


def test_max_turns_ends_an_episode_with_its_last_call_unanswered() -> None:
    call = say('<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>')
    (done,) = run(ScriptedEngine(lambda ids, seed: call), tool_rollout(agent(add, turns=3)), [[5]], TOKENIZER)
    assert (done.turns, done.finish_reason, done.metrics["tools/calls"]) == (3, "max_turns", 2.0)
    assert sum(done.loss_mask) == 3 * len(call) and done.response_ids[-len(call) :] == call


class Shop:
    """Counts, per object; nothing is shared between trajectories."""

    made: ClassVar[list["Shop"]] = []

    def __init__(self, price: float) -> None:
        self.price, self.items, self.closed = price, [], False
        Shop.made.append(self)

    def reset(self, customer: str) -> str:
        self.customer = customer
        return f"Hello {customer}."

    async def buy(self, item: str) -> str:
        """Buy one."""
        await asyncio.sleep(0.05 if item == "pear" else 0)
        self.items.append(item)
        return f"{self.customer} has {', '.join(self.items)}"

    @staticmethod
    def help() -> str:
        """What is on offer."""
        return "apples"

    def turn_reward(self) -> float:
        return -0.1

    async def get_reward(self, trajectory: Trajectory) -> dict[str, float]:
        return {"paid": self.price * len(self.items), "polite": float("thanks" in trajectory.text)}

    def close(self) -> None:
        self.closed = True

    def _secret(self) -> None: ...


def buy(*items: str) -> list[int]:
    calls = (f'<tool_call>{{"name": "buy", "arguments": {{"item": "{item}"}}}}</tool_call>' for item in items)
    return say("".join(calls))


def test_an_environments_public_methods_are_tools() -> None:
    tools = environment_tools(Shop)
    assert sorted(tools) == ["buy", "help"]
    assert list(tools["buy"].schema["function"]["parameters"]["properties"]) == ["item"]


def test_v31_environments_have_state_rewards_and_an_end_of_their_own() -> None:
    """Two trajectories in turn with each other; rewards for turns and at the end, sync and async; and a function."""
    Shop.made.clear()
    queues = {5: [buy("pear", "fig"), say("ok")], 6: [buy("nut"), buy("egg"), say("thanks")]}
    engine = ScriptedEngine(lambda ids, seed: queues[5 if b"Ann" in bytes_of(ids) else 6].pop(0))
    messages = [[{"role": "user", "content": "Shop!"}]] * 2
    rows = [{"customer": "Ann", "other": 1}, {"customer": "Bob", "other": 2}]
    function = environment_rollout(Shop, {"price": 2.0}, agent(add))
    results = run(engine, function, [[5], [6]], TOKENIZER, messages=messages, rows=rows)
    ann, bob = sorted(results, key=lambda t: t.prompt_index)
    assert ann.error == bob.error == ""
    prompt = TOKENIZER.decode(ann.prompt_ids)
    assert prompt.endswith("<|start|>user\nShop!\nHello Ann.<|end|>\n<|start|>assistant\n")
    assert all(f'"name": "{name}"' in prompt for name in ("add", "buy", "help"))
    said = TOKENIZER.decode(ann.response_ids)
    assert "Ann has pear<" in said and "Ann has pear, fig<" in said  # in order: they share the object
    assert "Bob has nut, egg" in TOKENIZER.decode(bob.response_ids) and "Ann" not in TOKENIZER.decode(bob.response_ids)
    assert ann.turn_rewards == [-0.1, -0.1] and ann.reward == pytest.approx(4.0 - 0.2)
    assert bob.turn_rewards == [-0.1] * 3 and bob.reward == pytest.approx(4.0 + 1.0 - 0.3)
    assert bob.reward_parts == {"environment": bob.reward, "paid": 4.0, "polite": 1.0}
    assert len(Shop.made) == 2 and all(shop.closed for shop in Shop.made)


def bytes_of(ids: list[int]) -> bytes:
    return TOKENIZER.decode(ids).encode()


def test_an_environment_that_fails_is_closed_and_fails_alone() -> None:
    class Moody(Shop):
        def reset(self, customer: str) -> str:
            if customer == "Bob":
                raise OSError("closed today")
            return super().reset(customer)

    Shop.made.clear()
    engine = ScriptedEngine(lambda ids, seed: say("ok"))
    rows = [{"customer": "Ann"}, {"customer": "Bob"}, {}]
    results = run(engine, environment_rollout(Moody, {"price": 1.0}, agent()), [[5], [6], [7]], TOKENIZER, rows=rows)
    errors = {t.prompt_index: t.error for t in results}
    assert errors[0] == "" and errors[1] == "OSError: closed today" and "customer" in errors[2]
    assert [shop.closed for shop in Shop.made] == [True] * 3
    plain = next(t for t in results if t.prompt_index == 0)
    assert TOKENIZER.decode(plain.prompt_ids[1:]) == "Hello Ann."  # no messages: text behind the prompt's ids


def multiply(x, y):
    return x * y


def poc_add(x, y):
    return x + y


def inline(turns: int = 8) -> Agent:
    tools = [make_tool(multiply), Tool(**(vars(make_tool(poc_add)) | {"name": "add"}))]
    return Agent(runner(), parse_hermes, turns, tools_by_name(tools))


class StoppingEngine(ScriptedEngine):
    """Speaks one text, token by token, and stops as vLLM does: where the decoded text has come to hold a stop string.

    Asked to go on, it goes on with the text; the words of others in between are for the test to look at.
    """

    def __init__(self, texts: dict[int, list[int]]) -> None:
        super().__init__(self._speak)
        self._rest = {prompt: list(ids) for prompt, ids in texts.items()}

    def _speak(self, prompt_ids: list[int], seed: int) -> list[int]:
        rest, spoken = self._rest[prompt_ids[0]], []
        while rest:
            spoken.append(rest.pop(0))
            if any(stop in TOKENIZER.decode(spoken) for stop in self.sampling[-1].stop):
                break
        return spoken


def test_v16_the_threads_two_prompts_give_906_and_305() -> None:
    calls = {5: "<function> multiply(3, 302) </function>", 6: "<function> add(3, 302) </function>"}
    after = ". Can I assist with anything else?"
    engine = StoppingEngine({prompt: say(text, end=False) + say(after) for prompt, text in calls.items()})
    results = sorted(run(engine, inline_rollout(inline()), [[5], [6]], TOKENIZER), key=lambda t: t.prompt_index)
    for done, result in zip(results, ("906.0", "305.0"), strict=True):
        call = calls[done.prompt_ids[0]]
        text = TOKENIZER.decode(done.response_ids, skip_special_tokens=True)
        assert text == f"{call}<result>{result}</result>{after}"
        own = [token for token, mask in zip(done.response_ids, done.loss_mask, strict=True) if mask]
        assert own == say(call, end=False) + say(after)
        assert (done.turns, done.answer_start, done.finish_reason) == (2, 0, "stop")


def test_v17_a_tag_is_found_however_it_tokenises() -> None:
    """A thousand contexts in canonical and in torn tokens: comparing ids of the tag alone would miss most."""
    rng = random.Random(0)
    tag, missed_by_ids = InlineTags().end, 0
    tag_ids = TOKENIZER(tag, add_special_tokens=False)["input_ids"]
    for _ in range(1000):
        before = "".join(rng.choice("he<lo /function>x ") for _ in range(rng.randrange(12)))
        text = f"<function>{before}{tag}"
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] if rng.random() < 0.5 else say(text, end=False)
        spoken: list[int] = []
        while pending_call(TOKENIZER.decode(spoken), InlineTags()) is None:
            spoken.append(ids[len(spoken)])
        missed_by_ids += spoken[-len(tag_ids) :] != tag_ids
        found = pending_call(TOKENIZER.decode(spoken), InlineTags())
        assert found is not None and found == TOKENIZER.decode(spoken)[: -len(tag)].rpartition("<function>")[2]
    assert missed_by_ids > 300
    assert pending_call("2</function>", InlineTags()) == "" and pending_call("<function>2", InlineTags()) is None


def test_v18_interleaved_trajectories_never_see_each_others_calls() -> None:
    """A hundred at once with calls of their own; a shared buffer would mix them up (the thread's second report)."""
    texts = {p: [f"<function>multiply({p}, {k})</function>" for k in (2, 3, 4)] for p in range(5, 105)}
    engine = StoppingEngine({p: [*say("".join(calls), end=False), END] for p, calls in texts.items()})
    results = run(engine, inline_rollout(inline()), [[p] for p in texts], TOKENIZER)
    assert len(results) == 100
    for done in results:
        p = done.prompt_ids[0]
        expected = "".join(
            f"{call}<result>{float(p * k)}</result>" for call, k in zip(texts[p], (2, 3, 4), strict=True)
        )
        assert TOKENIZER.decode(done.response_ids, skip_special_tokens=True) == expected


def test_inline_mistakes_and_limits() -> None:
    text = "<function>divide(1)</function>a</function><function>1+</function><function>multiply(1)</function>"
    engine = StoppingEngine({5: say(text), 6: say("<function>multiply(2, 2)</function>" * 9)})
    one, two = sorted(run(engine, inline_rollout(inline(5)), [[5], [6]], TOKENIZER), key=lambda t: t.prompt_index)
    said = TOKENIZER.decode(one.response_ids)
    assert "<result>Error: Unknown function divide</result>" in said
    assert said.count("cannot be read as a call") == 2 and "multiply: y: Field required" in said
    assert one.metrics["tools/errors"] == 4
    assert (two.finish_reason, two.metrics["tools/calls"]) == ("max_turns", 4.0)
    assert parse_inline("f(1, x='a', y=[2, True])") == ToolCall("f", {"x": "a", "y": [2, True]}, (1.0,))


def test_v20_a_tool_runs_once_for_each_call() -> None:
    seen: list[str] = []

    def fresh() -> str:
        seen.append(uuid.uuid4().hex)
        return seen[-1]

    def answers(ids: list[int], seed: int) -> list[int]:
        return say('<tool_call>{"name": "fresh"}</tool_call>') if len(ids) < 9 else say("done")

    results = run(ScriptedEngine(answers), tool_rollout(agent(fresh)), [[5]] * 3, TOKENIZER, group=2)
    assert len(seen) == len(set(seen)) == 6
    assert all(sum(uid in TOKENIZER.decode(t.response_ids) for uid in seen) == 1 for t in results)


EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"


def test_the_calculator_example_is_short_and_right() -> None:
    from trainer.importing import load_object

    calculate = load_object(f"{EXAMPLES}/calculator.py:calculate")
    assert calculate("12+34") == 46 and calculate(" 3 * 302 ") == 906 and calculate("5--4") == 9
    with pytest.raises(ValueError, match="not one operation"):
        calculate("1+2+3")
    assert all(len(path.read_text().splitlines()) < 40 for path in EXAMPLES.glob("*.py"))
