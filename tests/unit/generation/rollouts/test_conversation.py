"""Conversations only grow: ids, mask and log-probabilities of every turn, whatever is said and however it tokenises."""

import asyncio
import contextlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from generation.engine.sampling import SamplingSettings, response_budget, sample_seed
from generation.rollouts.agent import Agent, tool_rollout
from generation.rollouts.episode import PolicyLLM, RolloutSettings, encode_following
from generation.rollouts.tools import ToolCall, ToolLimits, ToolRunner, make_tool, tools_by_name
from generation.trajectory import Trajectory
from tests.support.scripted import END, Counting, ScriptedEngine, handle, merging_tokenizer, run, spelled
from tests.support.small_tokenizer import small_tokenizer
from tests.support.turn_templates import QWEN3
from trainer.learning.groups import to_sample

TOKENIZER = merging_tokenizer()
ANSWERS = st.lists(
    st.lists(st.integers(0, len(TOKENIZER) + 20), min_size=1, max_size=12), min_size=1, max_size=6
)  # any ids: torn characters, special tokens, and some that the tokenizer does not know
REPLIES = st.lists(st.text(max_size=40), min_size=6, max_size=6)


def agent(tokenizer: Any, replies: list[str], turns: int, **bounds: Any) -> Agent:
    """Return an agent that calls a tool in every answer except the last."""
    waiting = list(replies)

    def tool() -> str:
        return waiting.pop(0)

    runner = ToolRunner(ToolLimits(**bounds), tokenizer)
    return Agent(runner, lambda text: [ToolCall("tool")], turns, tools_by_name([make_tool(tool)]))


def test_a_turn_that_ends_with_a_stop_token_ends_once() -> None:
    """The end of a turn need not be EOS: then it is one of the ids that end an answer."""
    tokenizer = QWEN3.tokenizer(eos="<|endoftext|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = SamplingSettings(100, stop_token_ids=[end, tokenizer.eos_token_id])
    rollout = RolloutSettings(1, sampling, policy_version=0, seed=1, step=2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True
    )["input_ids"]
    answer = tokenizer("360", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(lambda ids, seed: [*answer, end])
    llm = PolicyLLM(engine, tokenizer, rollout, 0, 0, prompt)  # type: ignore[arg-type]

    async def two_turns() -> Trajectory:
        chat = llm.conversation()
        await chat.sample(sampling)
        assert chat.answer == "360" and chat.finish_reason == "stop"
        chat.add([{"role": "user", "content": "more"}])
        await chat.sample(sampling)
        return chat.trajectory()

    done = asyncio.run(two_turns())
    first, second = engine.prompts
    assert second[: len(first) + 4] == [*first, *answer, end]
    following = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(second[len(first) + 4 :]) == following
    assert [
        token for token, trained in zip(done.response_ids, done.loss_mask, strict=True) if trained
    ] == [
        *answer,
        end,
        *answer,
        end,
    ]


@limits(max_examples=60, deadline=None)
@given(ANSWERS, REPLIES)
def test_every_prompt_begins_with_all_ids_before_it(
    answers: list[list[int]], replies: list[str]
) -> None:
    sampled = iter(answers)
    engine = ScriptedEngine(lambda ids, seed: next(sampled))
    tokenizer = Counting(TOKENIZER)
    counts = []
    engine_complete = engine.complete

    async def noting(*args: Any, **kwargs: Any) -> Any:
        counts.append(tokenizer.calls)
        return await engine_complete(*args, **kwargs)

    engine.complete = noting  # type: ignore[method-assign]
    (done,) = run(engine, tool_rollout(agent(tokenizer, replies, len(answers))), [[5, 6]], tokenizer)
    assert done.error == "" and done.turns == len(answers)
    ids = done.prompt_ids + done.response_ids
    for (before, after), answer in zip(pairwise([*engine.prompts, ids]), answers, strict=True):
        assert after[: len(before) + len(answer)] == before + answer
    kept = [token for token, mask in zip(done.response_ids, done.loss_mask, strict=True) if mask]
    assert kept == [token for answer in answers for token in answer]
    assert sum(done.loss_mask) == sum(map(len, answers))
    assert all((p == 0.0) != bool(m) for p, m in zip(done.logprobs, done.loss_mask, strict=True))
    # Whatever the turn's number: read the answer, measure the reply, encode what follows.
    assert {after - before for before, after in pairwise(counts)} <= {3}


def test_text_after_an_answer_is_that_of_the_chat_template() -> None:
    """Turn rendered one by one equal the whole conversation rendered at once."""
    engine = ScriptedEngine(lambda ids, seed: spelled(TOKENIZER, "hello"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
    added = [{"role": "tool", "content": "<the answer> hello"}, {"role": "user", "content": "b"}]
    conversation = TOKENIZER.apply_chat_template(
        [*messages, *added], tokenize=False, add_generation_prompt=True
    )
    start = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    for ending, cut in ((True, 1000), (False, 5)):
        # ended by itself, or cut: the template's end comes once

        async def talk(limit: int = cut) -> list[int]:
            chat = handle(engine, TOKENIZER, TOKENIZER(start)["input_ids"]).conversation()
            await chat.sample(SamplingSettings(limit))
            assert chat.answer == "hello"
            chat.add(added)
            return chat.ids

        assert TOKENIZER.decode(asyncio.run(talk())) == conversation, ending


def test_a_template_that_hides_answers_is_named() -> None:
    with pytest.raises(ValueError, match="does not render an assistant's answer unchanged"):
        encode_following(
            small_tokenizer("{{ messages[-1].content }}"), [{"role": "user", "content": "x"}], {}
        )


def test_pad_and_end_in_one_and_tools_that_say_them() -> None:
    """The mask depends on positions alone, through to the trainer's sample, also where pad and end are one token and
    tools return it.
    """
    tokenizer = merging_tokenizer(pad_is_eos=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == END
    sampled = iter([[7, END, 8, END], [END]])
    engine = ScriptedEngine(lambda ids, seed: next(sampled))
    (done,) = run(engine, tool_rollout(agent(tokenizer, ["x<|end|>y"], 2)), [[5, END]], tokenizer)
    assert done.loss_mask[:4] == [1, 1, 1, 1] and done.loss_mask[-1] == 1
    assert sum(done.loss_mask) == 5 and done.response_ids.count(END) > 3
    sample = to_sample(done)
    assert sample.loss_mask == [0, 0, *done.loss_mask] and sample.engine_logprobs == [
        0.0,
        0.0,
        *done.logprobs,
    ]


def test_the_response_budget_is_what_the_context_leaves() -> None:
    assert response_budget(10, 5, 100) == 5
    assert response_budget(97, 5, 100) == 3
    assert response_budget(100, 5, 100) == response_budget(150, 5, 100) == 0


@pytest.mark.parametrize("max_tokens", [100_000, 50])
def test_a_huge_reply_ends_its_episode_or_is_cut_and_affects_no_other(max_tokens: int) -> None:
    """A reply of 70,000 characters exceeds the context, or is first cut to 50 tokens."""
    engine = ScriptedEngine(lambda ids, seed: [7, END], max_model_len=400)
    one = agent(TOKENIZER, ["x" * 70_000, "short", "short"], 2, max_tokens=max_tokens)
    results = sorted(
        run(engine, tool_rollout(one), [[5], [6], [7]], TOKENIZER), key=lambda t: t.prompt_index
    )
    assert [t.error for t in results] == ["", "", ""]
    assert all(len(t.prompt_ids + t.response_ids) <= 400 for t in results)
    reasons = [t.finish_reason for t in results]
    if max_tokens == 50:
        assert reasons == ["max_turns"] * 3
        assert [t.metrics["tools/truncated"] for t in results] == [1.0, 0.0, 0.0]
        assert "[cut after 50 tokens]" in TOKENIZER.decode(results[0].response_ids)
    else:
        assert reasons == ["length", "max_turns", "max_turns"]
        assert results[0].response_ids == [7, END] and results[0].loss_mask == [1, 1]


def test_an_unfinished_call_of_a_cut_answer_is_not_an_error() -> None:
    """A truncated answer is not replied to as a mistake; its tokens stay, and the episode says why it ended."""
    engine = ScriptedEngine(lambda ids, seed: [7] * 50, max_model_len=30)
    (done,) = run(engine, tool_rollout(agent(TOKENIZER, [], 5)), [[5, 6]], TOKENIZER)
    assert (done.finish_reason, done.turns, done.response_ids, done.metrics) == (
        "length",
        1,
        [7] * 28,
        {},
    )


def test_seeds_depend_on_the_place_and_the_number_of_the_call() -> None:
    engine = ScriptedEngine(lambda ids, seed: [7, END])
    run(engine, tool_rollout(agent(TOKENIZER, ["a", "b"], 3)), [[5]], TOKENIZER)
    assert engine.seeds == [
        sample_seed(1, 2, 0, 0),
        sample_seed(1, 2, 0, 0, 1),
        sample_seed(1, 2, 0, 0, 2),
    ]
    assert len(set(engine.seeds)) == 3


def test_an_engine_that_fails_ends_the_rollout_though_the_function_swallows_it() -> None:
    async def dead(ids: list[int]) -> list[int]:
        raise RuntimeError("the engine is gone")

    async def careless(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        with contextlib.suppress(RuntimeError):
            await llm.sample([5], sampling)
        return llm.trajectory()

    with pytest.raises(ExceptionGroup) as caught:
        run(ScriptedEngine(lambda ids, seed: dead(ids)), careless, [[5], [6]])
    assert caught.group_contains(RuntimeError, match="the engine is gone")


def test_a_failing_episode_affects_no_other() -> None:
    async def moody(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Any:
        if llm.prompt_index == 1:
            raise KeyError("colour")
        if llm.prompt_index == 2:
            return []
        return [llm.trajectory(), llm.trajectory()]

    results = run(ScriptedEngine(lambda ids, seed: [7]), moody, [[5], [6], [7], [8]])
    errors = {t.prompt_index: t.error for t in results}
    assert [t.prompt_index for t in results].count(0) == 2
    assert errors[0] == errors[3] == "" and errors[1] == "KeyError: 'colour'"
    assert "must return a Trajectory" in errors[2]


def test_a_trajectory_continues_and_is_recorded_whatever_other_trajectories_do() -> None:
    """One trajectory finishes three turns during the only turn of another; a lock-step rollout would never end."""
    three_turns = asyncio.Event()

    async def slow() -> list[int]:
        await asyncio.wait_for(three_turns.wait(), 10)
        return [9, END]

    engine = ScriptedEngine(lambda ids, seed: slow() if ids[0] == 6 else [7, END])
    plain = tool_rollout(agent(TOKENIZER, ["a", "b"], 3))

    async def episode(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Any:
        done = await plain(llm, row, sampling) if llm.prompt_index == 0 else await one(llm, sampling)
        if llm.prompt_index == 0:
            three_turns.set()
        return done

    async def one(llm: PolicyLLM, sampling: SamplingSettings) -> Trajectory:
        chat = llm.conversation()
        await chat.sample(sampling)
        return chat.trajectory()

    results = run(engine, episode, [[5], [6]], TOKENIZER)
    assert [(t.prompt_index, t.turns) for t in results] == [(0, 3), (1, 1)]


def test_an_episode_that_waits_for_a_tool_gives_its_place_to_another() -> None:
    """All four episodes wait for their tools at the same time, though only one place and its group's are free."""
    everybody = asyncio.Barrier(4)

    async def meet() -> str:
        await asyncio.wait_for(everybody.wait(), 10)
        return "met"

    engine = ScriptedEngine(lambda ids, seed: [7, END], max_num_seqs=1)
    runner = ToolRunner(ToolLimits(), TOKENIZER)
    meeting = Agent(runner, lambda text: [ToolCall("meet")], 2, tools_by_name([make_tool(meet)]))
    results = run(engine, tool_rollout(meeting), [[5], [6], [7], [8]], TOKENIZER)
    assert [t.metrics["tools/calls"] for t in results] == [1.0] * 4
    assert not any(t.metrics.get("tools/errors") for t in results)
