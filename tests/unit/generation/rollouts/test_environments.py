"""Environments and inline calls: each trajectory has a state of its own, and tokens of others stay context."""

import asyncio
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from generation.rollouts.agent import (
    Agent,
    InlineTags,
    environment_class,
    environment_rollout,
    environment_tools,
    inline_rollout,
    pending_call,
)
from generation.rollouts.tools import (
    Tool,
    ToolCall,
    ToolLimits,
    ToolRunner,
    make_tool,
    parse_hermes,
    parse_inline,
    tools_by_name,
)
from generation.trajectory import Trajectory
from tests.support.recipes import make_config
from tests.support.scripted import END, ScriptedEngine, merging_tokenizer, run, spelled
from trainer.config.schema import TrainConfig
from trainer.rollouts.level import RolloutLevel

TOKENIZER = merging_tokenizer()
say = functools.partial(spelled, TOKENIZER)


def runner(**limits: Any) -> ToolRunner:
    return ToolRunner(ToolLimits(**limits), TOKENIZER)


def agent(*functions: Callable[..., Any], turns: int = 8, **limits: Any) -> Agent:
    return Agent(runner(**limits), parse_hermes, turns, tools_by_name(map(make_tool, functions)))


def add(x: float, y: float = 1.0) -> float:
    return x + y


class Shop:
    """An environment with a basket per object, so that trajectories share nothing."""

    made: ClassVar[list["Shop"]] = []

    def __init__(self, price: float) -> None:
        self.price, self.items, self.closed = price, [], False
        Shop.made.append(self)

    def reset(self, customer: str) -> str:
        self.customer = customer
        return f"Hello {customer}."

    async def buy(self, item: str) -> str:
        """Put one item into the basket."""
        await asyncio.sleep(0.05 if item == "pear" else 0)
        self.items.append(item)
        return f"{self.customer} has {', '.join(self.items)}"

    @staticmethod
    def help() -> str:
        """List the goods on offer."""
        return "apples"

    def turn_reward(self) -> float:
        return -0.1

    async def get_reward(self, trajectory: Trajectory) -> dict[str, float]:
        return {"paid": self.price * len(self.items), "polite": float("thanks" in trajectory.text)}

    def close(self) -> None:
        self.closed = True

    def _secret(self) -> None: ...


def buy(*items: str) -> list[int]:
    calls = (
        f'<tool_call>{{"name": "buy", "arguments": {{"item": "{item}"}}}}</tool_call>' for item in items
    )
    return say("".join(calls))


def test_an_environments_public_methods_are_tools() -> None:
    tools = environment_tools(Shop)
    assert sorted(tools) == ["buy", "help"]
    assert list(tools["buy"].schema["function"]["parameters"]["properties"]) == ["item"]


def test_a_function_that_makes_environments_is_accepted_like_their_class() -> None:
    """TRL's `environment_factory` is accepted; the environment made on trial, to read its methods, is closed."""
    Shop.made.clear()

    def factory() -> Shop:
        return Shop(3.0)

    cls = environment_class(factory, {})
    assert cls is environment_class(Shop, {"price": 1.0}) is Shop
    (trial,) = Shop.made
    assert trial.closed
    answers = [buy("fig"), say("ok")]
    function = environment_rollout(cls, {}, agent(), factory)
    (trajectory,) = run(
        ScriptedEngine(lambda *_: answers.pop(0)), function, [[5]], TOKENIZER, rows=[{"customer": "A"}]
    )
    assert trajectory.reward_parts["paid"] == 3.0 and Shop.made[1].closed
    with pytest.raises(ValueError, match="method reset"):
        environment_class(dict, {})


def test_environments_have_state_rewards_and_an_end_of_their_own() -> None:
    """Two trajectories alternate, with rewards for turns and at the end, synchronous and asynchronous, and a reward
    function.
    """
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
    text = TOKENIZER.decode(ann.response_ids)
    assert "Ann has pear<" in text and "Ann has pear, fig<" in text  # in order: they share the object
    assert "Bob has nut, egg" in TOKENIZER.decode(bob.response_ids) and "Ann" not in TOKENIZER.decode(
        bob.response_ids
    )
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
    results = run(
        engine,
        environment_rollout(Moody, {"price": 1.0}, agent()),
        [[5], [6], [7]],
        TOKENIZER,
        rows=rows,
    )
    errors = {t.prompt_index: t.error for t in results}
    assert errors[0] == "" and errors[1] == "OSError: closed today" and "customer" in errors[2]
    assert [shop.closed for shop in Shop.made] == [True] * 3
    plain = next(t for t in results if t.prompt_index == 0)
    # No messages: text behind the prompt's ids
    assert TOKENIZER.decode(plain.prompt_ids[1:]) == "Hello Ann."


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


def test_the_threads_two_prompts_give_906_and_305() -> None:
    calls = {5: "<function> multiply(3, 302) </function>", 6: "<function> add(3, 302) </function>"}
    after = ". Can I assist with anything else?"
    engine = StoppingEngine(
        {prompt: say(text, end=False) + say(after) for prompt, text in calls.items()}
    )
    results = sorted(
        run(engine, inline_rollout(inline()), [[5], [6]], TOKENIZER), key=lambda t: t.prompt_index
    )
    for done, result in zip(results, ("906.0", "305.0"), strict=True):
        call = calls[done.prompt_ids[0]]
        text = TOKENIZER.decode(done.response_ids, skip_special_tokens=True)
        assert text == f"{call}<result>{result}</result>{after}"
        sampled_ids = [
            token for token, mask in zip(done.response_ids, done.loss_mask, strict=True) if mask
        ]
        assert sampled_ids == say(call, end=False) + say(after)
        assert (done.turns, done.answer_start, done.finish_reason) == (2, 0, "stop")


def test_a_recipe_may_name_other_tags() -> None:
    """The recipe names the default tags of the thread's class, which differ from those in its printed example."""
    tags = {
        "start": " <function>",
        "end": " </function>",
        "result_start": "<results>",
        "result_end": "</results>",
    }
    rollout = {"tools": [f"{__name__}:multiply"], "tool_parser": "inline", "inline_tags": tags}
    config = make_config(rollout=rollout)
    function = RolloutLevel(config, TOKENIZER).function
    assert function is not None
    call, after = "say <function> multiply(3, 302) </function>", ". More?"
    (done,) = run(StoppingEngine({5: say(call, end=False) + say(after)}), function, [[5]], TOKENIZER)
    assert (
        TOKENIZER.decode(done.response_ids, skip_special_tokens=True)
        == f"{call}<results>906.0</results>{after}"
    )
    assert list(
        TrainConfig.model_validate(config.model_dump(include={"model", "data"})).rollout.inline_tags
    ) == [(name, getattr(InlineTags(), name)) for name in tags]


def test_a_tag_is_found_however_it_tokenises() -> None:
    """Tags are found in a thousand contexts, in canonical and in split tokens; comparing the tag's ids would
    miss most.
    """
    rng = random.Random(0)
    tag, missed_by_ids = InlineTags().end, 0
    tag_ids = TOKENIZER(tag, add_special_tokens=False)["input_ids"]
    for _ in range(1000):
        before = "".join(rng.choice("he<lo /function>x ") for _ in range(rng.randrange(12)))
        text = f"<function>{before}{tag}"
        ids = (
            TOKENIZER(text, add_special_tokens=False)["input_ids"]
            if rng.random() < 0.5
            else say(text, end=False)
        )
        spoken: list[int] = []
        while pending_call(TOKENIZER.decode(spoken), InlineTags()) is None:
            spoken.append(ids[len(spoken)])
        missed_by_ids += spoken[-len(tag_ids) :] != tag_ids
        call_text = pending_call(TOKENIZER.decode(spoken), InlineTags())
        assert (
            call_text is not None
            and call_text == TOKENIZER.decode(spoken)[: -len(tag)].rpartition("<function>")[2]
        )
    assert missed_by_ids > 300
    assert (
        pending_call("2</function>", InlineTags()) == ""
        and pending_call("<function>2", InlineTags()) is None
    )


def test_interleaved_trajectories_never_see_each_others_calls() -> None:
    """A hundred concurrent trajectories get the results of their own calls; a shared buffer would mix them up (the
    thread's second report).
    """
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


def test_mistakes_in_inline_calls_become_text_within_limits() -> None:
    text = "<function>divide(1)</function>a</function><function>1+</function><function>multiply(1)</function>"
    engine = StoppingEngine({5: say(text), 6: say("<function>multiply(2, 2)</function>" * 9)})
    one, two = sorted(
        run(engine, inline_rollout(inline(5)), [[5], [6]], TOKENIZER), key=lambda t: t.prompt_index
    )
    transcript = TOKENIZER.decode(one.response_ids)
    assert "<result>Error: Unknown function divide</result>" in transcript
    assert (
        transcript.count("cannot be read as a call") == 2 and "multiply: y: Field required" in transcript
    )
    assert one.metrics["tools/errors"] == 4
    assert (two.finish_reason, two.metrics["tools/calls"]) == ("max_turns", 4.0)
    assert parse_inline("f(1, x='a', y=[2, True])") == ToolCall("f", {"x": "a", "y": [2, True]}, (1.0,))
