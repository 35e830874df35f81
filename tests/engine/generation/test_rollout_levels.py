"""Levels 1 to 4 on a real engine, with a model that has learned three conversations by heart."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings, sample_seed, vllm_sampling_params
from generation.rollouts.agent import Agent, environment_rollout, inline_rollout, tool_rollout
from generation.rollouts.episode import PolicyLLM, RolloutFunction, custom_rollout, one_shot
from generation.rollouts.episodes import EpisodeSetup, RolloutSettings, rollout
from generation.rollouts.tools import (
    ToolCall,
    ToolLimits,
    ToolRunner,
    call_parser,
    make_tool,
    parse_hermes,
    tools_by_name,
)
from generation.trajectory import Trajectory
from tests.conftest import TinyModel
from tests.support.colocated import HfPolicy, start_engine, stop

# The two prompts of verl's thread, and a correct model's call, its result, and the rest of the
# answer
POC = {
    "Hello world. please say <function> multiply(3, 302) </function> \nthis is a test": (
        " <function> multiply(3, 302) </function>",
        "<result>906.0</result>",
        ". Can I assist with anything else?",
    ),
    "Hello world. please say <function> add(3, 302) </function> ": (
        "<function> add(3, 302) </function>",
        "<result>305.0</result>",
        ". Is there anything else I can help with?",
    ),
}
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "30+12"}}</tool_call>'
CHAT = [
    {"role": "user", "content": "30+12?"},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
GREEDY = SamplingSettings(120, temperature=0.0, stop_token_ids=[2])
STEPS = 160


def by_heart(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the three conversations as ids, the tools' results included."""
    texts = [prompt + "".join(parts) + "<|im_end|>" for prompt, parts in POC.items()]
    texts.append(tokenizer.apply_chat_template(CHAT, tokenize=False))
    return tokenizer(texts)["input_ids"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: TinyModel) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="module")
def model(
    tiny_model: TinyModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a tiny model that has learned the conversations by heart."""
    network = AutoModelForCausalLM.from_pretrained(tiny_model())
    rows = [torch.tensor(ids) for ids in by_heart(tokenizer)]
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for _ in range(STEPS):
        network(inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("by-heart")
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def leader(model: Path) -> Iterator[Leader]:
    """Yield an engine of that model, at version 0."""
    leader = start_engine(model, max_model_len=320, max_num_seqs=16)
    leader.engine.state.adopt_checkpoint(0)
    yield leader
    stop(leader)


def calculate(expression: str) -> int:
    """Return the sum.

    Args:
        expression: two numbers with a plus
    """
    return sum(map(int, expression.split("+")))


def multiply(x, y):
    return x * y


def add(x, y):
    return x + y


def agent(tokenizer: PreTrainedTokenizerBase, *functions: Callable[..., Any], **limits: Any) -> Agent:
    tools = tools_by_name(map(make_tool, functions))
    return Agent(ToolRunner(ToolLimits(**limits), tokenizer), parse_hermes, 4, tools)


def run(
    leader: Leader,
    tokenizer: PreTrainedTokenizerBase,
    function: RolloutFunction,
    prompts: list[list[int]],
    sampling: SamplingSettings = GREEDY,
    group: int = 1,
    **episodes: Any,
) -> list[Trajectory]:
    """Run a rollout, in which no trajectory may fail; sorted by prompt and sample."""

    async def score(trajectory: Trajectory) -> None:
        await asyncio.sleep(0)

    settings = RolloutSettings(group, sampling, policy_version=0, seed=1, step=3)
    claim = partial(next, iter(range(len(prompts))), None)
    work = rollout(
        leader.engine, prompts, settings, claim, score, EpisodeSetup(function, tokenizer, **episodes)
    )
    done = leader.thread.run(work, 120, "a rollout")
    assert [t.error for t in done] == [""] * len(done)
    return sorted(done, key=lambda t: (t.prompt_index, t.sample_index))


def chat_prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    return tokenizer(text)["input_ids"]


def test_the_default_is_one_generation_with_the_same_seed(
    leader: Leader, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The tokens are vLLM's; naming the default, or a function that does the same, changes nothing.

    Log-probabilities agree only to rounding: arrival times decide which requests share a forward pass.
    """
    prompts, sampling = [chat_prompt(tokenizer), [20, 21]], SamplingSettings(30, stop_token_ids=[2])

    async def ask(llm: PolicyLLM, row: dict[str, Any], settings: SamplingSettings) -> Trajectory:
        chat = llm.conversation()
        await chat.sample(settings)
        return chat.trajectory()

    plain, same = (
        run(leader, tokenizer, f, prompts, sampling, group=3)
        for f in (one_shot, custom_rollout(ask, {}))
    )
    assert [(t.response_ids, t.finish_reason) for t in plain] == [
        (t.response_ids, t.finish_reason) for t in same
    ]
    for one, other in zip(plain, same, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for done in plain:
        params = vllm_sampling_params(sampling, sample_seed(1, 3, done.prompt_index, done.sample_index))
        request = leader.engine.request({"prompt_token_ids": done.prompt_ids}, params, policy_version=0)
        assert list(leader.thread.run(request, 60, "vLLM").outputs[0].token_ids) == done.response_ids


def test_the_result_of_an_inline_call_follows_it_in_the_answer(
    leader: Leader, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The engine stops at a call, the tool runs, and the answer continues. The result is not trained on."""
    inline = inline_rollout(agent(tokenizer, multiply, add))
    results = run(leader, tokenizer, inline, tokenizer(list(POC))["input_ids"])
    for done, (call, result, after) in zip(results, POC.values(), strict=True):
        assert tokenizer.decode(done.response_ids, skip_special_tokens=True) == call + result + after
        trained = [token for token, mask in zip(done.response_ids, done.loss_mask, strict=True) if mask]
        assert trained == tokenizer(call + after + "<|im_end|>")["input_ids"]
        assert done.metrics["tools/calls"] == 1 and done.finish_reason == "stop"
    # The prefix comes from the cache, and the tool's result is between the sampled tokens.
    check_logprobs(leader, results, temperature=1.0)


def check_logprobs(leader: Leader, trajectories: list[Trajectory], temperature: float) -> None:
    """Every sampled token has the log-probability of plain Transformers on the whole sequence."""
    policy = HfPolicy(leader.engine.settings.model)
    for done in trajectories:
        ids = done.prompt_ids + done.response_ids
        expected = policy.logprobs(ids, temperature)[len(done.prompt_ids) - 1 :]
        for mask, ours, theirs in zip(done.loss_mask, done.logprobs, expected, strict=True):
            assert abs(ours - theirs) < 1e-4 if mask else ours == 0.0


def test_a_typed_function_is_a_tool(leader: Leader, tokenizer: PreTrainedTokenizerBase) -> None:
    (done,) = run(leader, tokenizer, tool_rollout(agent(tokenizer, calculate)), [chat_prompt(tokenizer)])
    # Without the template's last newline
    assert done.prompt_ids + done.response_ids == by_heart(tokenizer)[2][:-1]
    assert (done.turns, done.metrics["tools/calls"], done.finish_reason) == (2, 1.0, "stop")
    assert (
        tokenizer.decode(done.response_ids[done.answer_start :], skip_special_tokens=True) == "It is 42."
    )


class Desk:
    """An environment of level 3: the calculator with a memory, which asks the question itself."""

    def reset(self, question: str) -> list[dict[str, str]]:
        self.asked: list[str] = []
        return [{"role": "user", "content": question}]

    async def calculate(self, expression: str) -> int:
        """Return the sum."""
        self.asked.append(expression)
        return calculate(expression)

    def turn_reward(self) -> float:
        return 0.25 * len(self.asked)

    async def get_reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.text == "It is 42.")


def test_an_environments_methods_are_tools_and_its_rewards_count(
    leader: Leader, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = Agent(ToolRunner(ToolLimits(), tokenizer), parse_hermes, 4, describe=False)
    function = environment_rollout(Desk, {}, plain)
    rows = [{"question": "30+12?", "answer": 42}]
    (done,) = run(leader, tokenizer, function, [[20, 21]], rows=rows, messages=[CHAT[:1]])
    assert done.prompt_ids == chat_prompt(tokenizer)
    assert done.turn_rewards == [0.25, 0.25] and done.reward == 1.5


def test_turns_of_a_custom_rollout_have_the_engines_logprobs(
    leader: Leader, tokenizer: PreTrainedTokenizerBase
) -> None:
    """At temperature 1.3, two samples of each prompt include ids that no text encodes to."""

    async def talk(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        chat = llm.conversation()
        while await chat.sample(sampling) is not None and chat.turns < 4:
            chat.add([{"role": "user", "content": f"turn {chat.turns}"}])
        return chat.trajectory(reward=1.0)

    sampling = SamplingSettings(12, temperature=1.3, stop_token_ids=[2])
    results = run(leader, tokenizer, talk, [chat_prompt(tokenizer), [20, 21, 280]], sampling, group=2)
    assert [t.turns for t in results] == [4] * 4 and all(0 in t.loss_mask for t in results)
    check_logprobs(leader, results, temperature=1.3)


def test_a_tool_that_hangs_is_an_error_of_its_trajectory_only(
    leader: Leader, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Sixteen trajectories on one engine are in a tool at the same time, and one call never returns."""
    meeting = threading.Barrier(15)
    lock, calls = threading.Lock(), [0]

    def first_hangs(expression: str) -> int:
        with lock:
            calls[0] += 1
            first = calls[0] == 1
        if first:
            threading.Event().wait(60)
        meeting.wait(120)
        return calculate(expression)

    tool = make_tool(first_hangs)
    late = Agent(ToolRunner(ToolLimits(timeout_s=3.0), tokenizer), parse_hermes, 4, {"calculate": tool})
    results = run(leader, tokenizer, tool_rollout(late), [chat_prompt(tokenizer)], group=16)
    failed = [t for t in results if t.metrics.get("tools/errors/timeout")]
    assert len(failed) == 1 and calls[0] == 16
    assert "Error: calculate took longer than 3 s" in tokenizer.decode(failed[0].response_ids)
    assert (
        sum("<tool_response>42</tool_response>" in tokenizer.decode(t.response_ids) for t in results)
        == 15
    )


def test_no_tokenizer_is_loaded_during_a_rollout(
    leader: Leader, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", partial(loaded.append))
    run(leader, tokenizer, tool_rollout(agent(tokenizer, calculate)), [chat_prompt(tokenizer)] * 3)
    assert loaded == []


def test_vllms_tool_parsers_are_found_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    assert call_parser("hermes", tokenizer) is parse_hermes
    parse = call_parser("pythonic", tokenizer)
    assert parse("[add(x=1, y=2.5)]") == [ToolCall("add", {"x": 1, "y": 2.5})]
    assert parse("just text") == []
    with pytest.raises(ValueError, match=r"'pythonick' is not a tool parser: vLLM has .*pythonic"):
        call_parser("pythonick", tokenizer)
