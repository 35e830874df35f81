"""Levels 2 and 3: answers and tool calls in turn, with functions as tools or with an environment's methods.

Calls may also stand inside an answer: the engine stops at the end tag, the result is appended, generation resumes. (A
logits processor that forces the result's tokens would be worse: the whole batch waits while a tool runs, forced and
sampled tokens look the same, sequences share one processor's state, and markers that tokenise differently in context
are missed. The engine looks for the end tag in the text, however it is tokenised.)
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from generation.engine.sampling import SamplingSettings
from generation.images import Image, split_images
from generation.rollouts import tools
from generation.rollouts.episode import Conversation, PolicyLLM, RolloutFunction
from generation.rollouts.tools import CallParser, Content, Tool, ToolRunner
from generation.trajectory import Trajectory, checked_reward

_ENVIRONMENT = "it must be a class with a method reset(**row), or a function that makes an object of one"


@dataclass(frozen=True)
class Agent:
    """The policy's way of calling tools. `describe`: chat templates are given their schemas to render a prompt."""

    runner: ToolRunner
    parse: CallParser
    max_turns: int
    tools: Mapping[str, Tool] = field(default_factory=dict)
    describe: bool = True


def tool_rollout(agent: Agent) -> RolloutFunction:
    """Level 2: the policy answers, its calls are run all at once, and so on until it answers without a call."""

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        """One answer, extended by the results of the calls in it."""
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
    respond: Callable[[str], Awaitable[str | None]] | None = None,
    after_turn: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Answers and replies in turn until an answer calls nothing or is cut, or turns or context run out.

    A turn's calls run at once, or `in_order`; `after_turn` is called when they have been run. `respond` gives the next
    message to an answer that calls nothing, or None at the end; it sees the last answer, too.
    """
    while (generation := await chat.sample(sampling)) is not None:
        # A cut answer may end inside a call: that is truncation, not a mistake to answer.
        calls = agent.parse(chat.answer) if generation.finish_reason == "stop" else []
        last = chat.turns == agent.max_turns
        if calls and not last:
            replies = await chat.llm.outside(agent.runner.run(agent.tools, calls, chat.metrics, in_order=in_order))
            # Names and ids are for the templates that show them, some in nine characters.
            chat.add(
                [
                    {"role": "tool", "content": reply, "name": call.name or "unknown", "tool_call_id": f"call{i:05d}"}
                    for i, (call, reply) in enumerate(zip(calls, replies, strict=True))
                ]
            )
        reply = await respond(chat.answer) if respond is not None and not calls else None
        if after_turn is not None:
            await after_turn()
        if not calls and (reply is None or generation.finish_reason != "stop"):
            return
        if reply is not None and not last:
            chat.add([{"role": "user", "content": tools.image_parts(reply) or reply}])
        if last:
            chat.finish_reason = "max_turns"
            return


@dataclass(frozen=True)
class InlineTags:
    """The tags around calls and results inside an answer."""

    start: str = "<function>"
    end: str = "</function>"
    result_start: str = "<result>"
    result_end: str = "</result>"


def inline_rollout(agent: Agent, tags: InlineTags = InlineTags()) -> RolloutFunction:
    """Level 2 with calls inside one answer: `<function> multiply(3, 302) </function>`; `agent.parse` is not used.

    `sampling.max_tokens` is for the answer as a whole, results left out.
    """

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        """One episode in an environment of its own, which is closed however it ends."""
        chat = llm.conversation()
        stopping = replace(sampling, stop=[*sampling.stop, tags.end])
        left, calls = sampling.max_tokens, 0
        while (generation := await chat.sample(replace(stopping, max_tokens=left), continues=calls > 0)) is not None:
            left -= len(generation.token_ids)
            call = pending_call(llm.tokenizer.decode(generation.token_ids, skip_special_tokens=False), tags)
            if generation.finish_reason != "stop" or call is None:
                break
            calls += 1
            if calls == agent.max_turns or left == 0:
                chat.finish_reason = "max_turns" if left else "length"
                break
            (result,) = await llm.outside(agent.runner.run(agent.tools, [tools.parse_inline(call)], chat.metrics))
            text = f"{tags.result_start}{result}{tags.result_end}"
            chat.add_ids(llm.tokenizer(text, add_special_tokens=False)["input_ids"])
        return chat.trajectory()

    return run


def pending_call(text: str, tags: InlineTags) -> str | None:
    """The text between the tags of the call that `text` ends with; None when it ends otherwise.

    The last token may reach a little beyond the end tag. An end tag without a start is an empty call, which gets an
    error for an answer.
    """
    before, end, _ = text.rpartition(tags.end)
    if not end:
        return None
    return before.rpartition(tags.start)[2] if tags.start in before else ""


def environment_tools(cls: type) -> dict[str, Tool]:
    """An environment's public methods as tools, except its own five. Raises ValueError naming one that cannot be."""
    methods = {name: f for name, f in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    return tools.tools_by_name(
        tools.make_tool(function, method=not isinstance(inspect.getattr_static(cls, name), staticmethod))
        for name, function in methods.items()
        if name not in ("reset", "respond", "turn_reward", "get_reward", "close")
    )


def environment_class(make: Callable[..., Any], kwargs: dict[str, Any]) -> type:
    """The class of the environments that `make` gives: itself, or of the one that a function makes on trial, as TRL's
    `environment_factory` does. Raises ValueError unless it has a method reset.
    """
    cls: Any = make
    if not inspect.isclass(make):
        try:
            made = make(**kwargs)
        except Exception as error:
            raise ValueError(f"{_ENVIRONMENT}; {make!r} raised {type(error).__name__}: {error}") from error
        cls = type(made)
        if hasattr(made, "close"):
            made.close()
    if not callable(getattr(cls, "reset", None)):
        raise ValueError(f"{_ENVIRONMENT}, not {make!r}")
    return cast(type, cls)


def environment_rollout(
    cls: type, kwargs: dict[str, Any], agent: Agent, make: Callable[..., Any] | None = None
) -> RolloutFunction:
    """Level 3: an object of the class for each trajectory, its methods as tools beside those of `agent`; the class
    itself makes it, or `make`.

    All of its methods may be sync or async; calls of one turn run in order, as they share the object.

        reset(**row)        first; gets the columns of the row that it asks for. It returns None, or a string or a list
                            of messages, which is added to the last message of the prompt, or takes the prompt's place
        respond(answer)     optional: gets the text of each answer that calls nothing, and returns the next message, or
                            None at the end

    Where a string is meant, `reset`, `respond` and tools may return a Pillow image, or a list of text and such images.

        turn_reward()       optional: a number after each answer, its calls included; they are summed
        get_reward(t)       optional: a number, or several by name, at the end; the argument, which it need not take,
                            is the trajectory, whose `text` is the last answer
        close()             optional: always called
    """
    methods = environment_tools(cls)
    agent = replace(agent, tools=tools.tools_by_name([*agent.tools.values(), *methods.values()]))

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        call = agent.runner.call
        environment = await llm.outside(call(functools.partial(make or cls, **kwargs)))
        bound = {name: replace(tool, function=getattr(environment, name)) for name, tool in methods.items()}
        try:
            observation = await llm.outside(call(_asked_for(environment.reset, row)))
            chat = _after_reset(llm, observation, agent)
            return await _converse_in(environment, chat, sampling, replace(agent, tools={**agent.tools, **bound}))
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return run


async def _converse_in(environment: Any, chat: Conversation, sampling: SamplingSettings, agent: Agent) -> Trajectory:
    """All turns in an environment, then the reward."""
    cls, turn_rewards = type(environment).__name__, list[float]()

    async def turn_reward() -> None:
        value = await chat.llm.outside(agent.runner.call(environment.turn_reward))
        turn_rewards.append(checked_reward(value, f"{cls}.turn_reward returned, in turn {chat.turns},"))

    async def respond(answer: str) -> str | None:
        call = agent.runner.call(functools.partial(environment.respond, answer))
        return await chat.llm.outside(call)  # type: ignore[no-any-return]

    after_turn = turn_reward if hasattr(environment, "turn_reward") else None
    responding = respond if hasattr(environment, "respond") else None
    await converse(chat, sampling, agent, in_order=True, respond=responding, after_turn=after_turn)
    trajectory, final = chat.trajectory(text=chat.answer), dict[str, float]()
    if (function := getattr(environment, "get_reward", None)) is not None:
        asked_for = [trajectory] if inspect.signature(function).parameters else []
        returned = await chat.llm.outside(agent.runner.call(functools.partial(function, *asked_for)))
        description = f"{cls}.get_reward returned"
        if isinstance(returned, dict):
            final = {name: checked_reward(value, f"{description} as {name!r}") for name, value in returned.items()}
        else:
            final = {"final": checked_reward(returned, description)}
    trajectory.turn_rewards = turn_rewards
    trajectory.reward = sum(turn_rewards) + sum(final.values())
    trajectory.reward_parts = {"environment": trajectory.reward} | (final if len(final) > 1 else {})
    return trajectory


def _asked_for(function: Callable[..., Any], row: dict[str, Any]) -> functools.partial[Any]:
    """The function with the columns of the row that it asks for; with all of them where it takes `**row`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return functools.partial(function, **row)
    return functools.partial(function, **{name: row[name] for name in parameters if name in row})


def _after_reset(llm: PolicyLLM, observation: Any, agent: Agent) -> Conversation:
    """A conversation that begins with the environment's first words, rendered as the dataset's prompts are."""
    if observation is None:
        return llm.conversation()
    if isinstance(observation, str) and llm.messages is None:
        return llm.conversation(llm.prompt_ids + llm.tokenizer(observation, add_special_tokens=False)["input_ids"])
    images: tuple[Image, ...] = ()
    if (added := tools.image_parts(observation) or observation) is not observation or isinstance(added, str):
        *before, last = llm.messages or []
        observation, images = [*before, {**last, "content": _joined(last["content"], added)}], llm.images
    settings = {"add_generation_prompt": True} | llm.settings.chat_template_kwargs
    if agent.describe and (schemas := [tool.schema for tool in agent.tools.values()]):
        settings["tools"] = schemas
    if llm.image_rules is None:
        text = llm.tokenizer.apply_chat_template(observation, tokenize=False, **settings)
        return llm.conversation(list(llm.tokenizer(text, add_special_tokens=False)["input_ids"]))
    messages, sources = split_images(observation, images)
    images = llm.conversation([]).read_images(sources)
    ids, spans = llm.image_rules.processor.expand(messages, images, **settings)
    chat = llm.conversation(ids)
    chat.images, chat.image_spans = images, spans
    return chat


def _joined(before: Content, added: Content) -> Content:
    """A message's content with more behind it, on a line of its own."""
    if isinstance(before, str) and isinstance(added, str):
        return f"{before}\n{added}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content
        for content in (before, "\n", added)
    ]
    return [part for content_parts in parts for part in content_parts]
