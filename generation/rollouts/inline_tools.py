"""Calls inside an answer: `<function> multiply(3, 302) </function>` is stopped at, its result appended, and gone on.

A logits processor that forces the result's tokens would do the same worse: the whole batch waits while a tool runs,
forced tokens cannot be told from sampled ones, one processor's state is shared between sequences, and markers that
tokenise differently in context are missed. Here the engine looks for the end tag in the text, however it is tokenised;
the result is context, masked out of the loss; and what a trajectory knows is in its own coroutine.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..sampling import SamplingSettings
from ..trajectory import Trajectory
from .agent import Agent
from .conversation import Conversation
from .llm import PolicyLLM, RolloutFunction
from .tool_calls import parse_inline


@dataclass(frozen=True)
class InlineTags:
    """What surrounds calls and results."""

    start: str = "<function>"
    end: str = "</function>"
    result_start: str = "<result>"
    result_end: str = "</result>"


def inline_rollout(agent: Agent, tags: InlineTags = InlineTags()) -> RolloutFunction:
    """Level 2 with calls inside the answer, in the manner of Python; `agent.parse` is not used.

    `sampling.max_tokens` is for the answer as a whole, results left out.
    """

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        chat = llm.conversation()
        await answer_with_calls(chat, sampling, agent, tags)
        return chat.trajectory()

    return run


async def answer_with_calls(chat: Conversation, sampling: SamplingSettings, agent: Agent, tags: InlineTags) -> None:
    """One answer, stopped at each call and gone on with behind its result."""
    stopping = replace(sampling, stop=[*sampling.stop, tags.end])
    left, calls = sampling.max_tokens, 0
    while True:
        completion = await chat.sample(replace(stopping, max_tokens=left), continues=calls > 0)
        if completion is None:
            return
        left -= len(completion.token_ids)
        call = pending_call(chat.llm.tokenizer.decode(completion.token_ids, skip_special_tokens=False), tags)
        if completion.finish_reason != "stop" or call is None:
            return
        calls += 1
        if calls == agent.max_turns or left == 0:
            chat.finish_reason = "max_turns" if left else "length"
            return
        async with chat.llm.away():
            (result,) = await agent.runner.run(agent.tools, [parse_inline(call)], chat.metrics)
        text = f"{tags.result_start}{result}{tags.result_end}"
        chat.add_ids(chat.llm.tokenizer(text, add_special_tokens=False)["input_ids"])


def pending_call(text: str, tags: InlineTags) -> str | None:
    """What stands between the tags of the call that `text` ends with; None when it ends otherwise.

    The last token may reach a little beyond the end tag. An end tag without a start is an empty call, which gets an
    error for an answer.
    """
    before, found, _ = text.rpartition(tags.end)
    if not found:
        return None
    return before.rpartition(tags.start)[2] if tags.start in before else ""
