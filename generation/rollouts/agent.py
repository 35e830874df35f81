"""Levels 2 and 3: answers and tool calls in turn, with functions as tools or with an environment's methods.

Calls inside an answer: `<function> multiply(3, 302) </function>` is stopped at, its result appended, and gone on.

A logits processor that forces the result's tokens would do the same worse: the whole batch waits while a tool runs,
forced tokens cannot be told from sampled ones, one processor's state is shared between sequences, and markers that
tokenise differently in context are missed. Here the engine looks for the end tag in the text, however it is tokenised;
the result is context, masked out of the loss; and what a trajectory knows is in its own coroutine.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import Conversation, PolicyLLM, RolloutFunction
from generation.rollouts.tools import CallParser, Tool, ToolCall, ToolRunner, make_tool, parse_inline, tools_by_name
from generation.trajectory import Trajectory, checked_reward

OWN_METHODS = ("reset", "turn_reward", "get_reward", "close")
"""Methods of an environment that are no tools."""

AfterTurn = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Agent:
    """How the policy calls tools.

    Attributes:
        tools: by name.
        describe: the tools' schemas are given to the chat template when a prompt is rendered.
    """

    runner: ToolRunner
    parse: CallParser
    max_turns: int
    tools: Mapping[str, Tool] = field(default_factory=dict)
    describe: bool = True


def tool_rollout(agent: Agent) -> RolloutFunction:
    """Level 2: the policy answers, its calls are run all at once, and so on until it answers without a call."""

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        chat = llm.conversation()
        await converse(chat, sampling, agent)
        return chat.trajectory()

    return run


async def converse(
    chat: Conversation,
    sampling: SamplingSettings,
    agent: Agent,
    *,
    in_order: bool = False,
    after_turn: AfterTurn | None = None,
) -> None:
    """Answers and replies in turn until an answer calls nothing or is cut, or turns or context run out.

    Args:
        in_order: a turn's calls run one after the other.
        after_turn: called after each answer, when its calls have been run.
    """
    while (completion := await chat.sample(sampling)) is not None:
        # A cut answer may end inside a call: that is truncation, and no mistake to answer.
        calls = agent.parse(chat.answer) if completion.finish_reason == "stop" else []
        last = chat.turns == agent.max_turns
        if calls and not last:
            async with chat.llm.away():
                replies = await agent.runner.run(agent.tools, calls, chat.metrics, in_order=in_order)
            chat.add(tool_messages(calls, replies))
        if after_turn is not None:
            await after_turn()
        if not calls:
            return
        if last:
            chat.finish_reason = "max_turns"
            return


def tool_messages(calls: list[ToolCall], replies: list[str]) -> list[dict[str, Any]]:
    """Replies as a chat template takes them; names and ids are for those that show them, some in nine characters."""
    return [
        {"role": "tool", "content": reply, "name": call.name or "unknown", "tool_call_id": f"call{index:05d}"}
        for index, (call, reply) in enumerate(zip(calls, replies, strict=True))
    ]


def environment_tools(cls: type) -> dict[str, Tool]:
    """The public methods of an environment class, as tools. Raises ValueError naming the method that can be none."""
    methods = {name: f for name, f in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    return tools_by_name(
        make_tool(function, method=not isinstance(inspect.getattr_static(cls, name), staticmethod))
        for name, function in methods.items()
        if name not in OWN_METHODS
    )


def environment_rollout(cls: type, kwargs: dict[str, Any], agent: Agent) -> RolloutFunction:
    """Level 3: an object of the class for each trajectory, its methods as tools beside those of `agent`.

    All of its methods may be sync or async; calls of one turn run in order, as they share the object.

        reset(**row)        first; told what it asks for of the row. What it returns, a string or a list of messages,
                            is added to the last message of the prompt, or takes the prompt's place
        turn_reward()       optional: a number after each answer, its calls included; they are summed
        get_reward(t)       optional: a number, or several by name, at the end; the argument, which it need not take,
                            is the trajectory, whose `text` is the last answer
        close()             optional: always called
    """
    methods = environment_tools(cls)
    agent = replace(agent, tools=tools_by_name([*agent.tools.values(), *methods.values()]))

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        """An episode in an environment of its own."""
        call = agent.runner.call
        async with llm.away():
            environment = await call(functools.partial(cls, **kwargs))
        own = {name: replace(tool, function=getattr(environment, name)) for name, tool in methods.items()}
        try:
            async with llm.away():
                observation = await call(_asked_for(environment.reset, row))
            chat = llm.conversation(_prompt_after_reset(llm, observation, agent))
            episode = _Episode(environment, chat, replace(agent, tools={**agent.tools, **own}))
            return await episode.run(sampling)
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return run


class _Episode:
    """One trajectory in one environment, and the rewards that its turns were given."""

    def __init__(self, environment: Any, chat: Conversation, agent: Agent) -> None:
        self.environment, self.chat, self.agent = environment, chat, agent
        self.turn_rewards: list[float] = []

    async def run(self, sampling: SamplingSettings) -> Trajectory:
        """All turns, then the reward."""
        after_turn = self._turn_reward if hasattr(self.environment, "turn_reward") else None
        await converse(self.chat, sampling, self.agent, in_order=True, after_turn=after_turn)
        trajectory = self.chat.trajectory(text=self.chat.answer)
        parts = await self._final_reward(trajectory)
        trajectory.turn_rewards = self.turn_rewards
        trajectory.reward = sum(self.turn_rewards) + sum(parts.values())
        trajectory.reward_parts = {"environment": trajectory.reward} | (parts if len(parts) > 1 else {})
        return trajectory

    async def _turn_reward(self) -> None:
        async with self.chat.llm.away():
            given = await self.agent.runner.call(self.environment.turn_reward)
        said = f"{type(self.environment).__name__}.turn_reward returned, in turn {self.chat.turns},"
        self.turn_rewards.append(checked_reward(given, said))

    async def _final_reward(self, trajectory: Trajectory) -> dict[str, float]:
        if not hasattr(self.environment, "get_reward"):
            return {}
        function = self.environment.get_reward
        if inspect.signature(function).parameters:
            function = functools.partial(function, trajectory)
        async with self.chat.llm.away():
            given = await self.agent.runner.call(function)
        said = f"{type(self.environment).__name__}.get_reward returned"
        if isinstance(given, dict):
            return {name: checked_reward(value, f"{said} as {name!r}") for name, value in given.items()}
        return {"final": checked_reward(given, said)}


def _asked_for(function: Callable[..., Any], row: dict[str, Any]) -> functools.partial[Any]:
    """The function with what it asks for of the row; with all of it where it takes `**row`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return functools.partial(function, **row)
    return functools.partial(function, **{name: row[name] for name in parameters if name in row})


def _prompt_after_reset(llm: PolicyLLM, observation: Any, agent: Agent) -> list[int]:
    """The prompt with what the environment says first."""
    if observation is None:
        return llm.prompt_ids
    if isinstance(observation, str) and llm.messages is None:
        added: list[int] = llm.tokenizer(observation, add_special_tokens=False)["input_ids"]
        return llm.prompt_ids + added
    if isinstance(observation, str):
        *before, last = llm.messages or []
        observation = [*before, {**last, "content": f"{last['content']}\n{observation}"}]
    return render_prompt(llm, observation, agent.tools.values() if agent.describe else [])


def render_prompt(llm: PolicyLLM, messages: list[dict[str, Any]], tools: Iterable[Tool] = ()) -> list[int]:
    """The ids of a prompt made of these messages, rendered as the dataset's prompts are."""
    settings = {"add_generation_prompt": True} | llm.settings.chat_template_kwargs
    schemas = [tool.schema for tool in tools]
    if schemas:
        settings["tools"] = schemas
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    ids: list[int] = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


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
