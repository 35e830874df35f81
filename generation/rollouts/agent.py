"""Levels 2 and 3: answers and tool calls alternate; the tools are functions, or an environment's
methods.

Calls may also be inside an answer: the engine stops at the end tag, the result is appended, and
generation resumes. The engine looks for the end tag in the text, however it is tokenised. A logits
processor that forces the result's tokens would be worse: the whole batch would wait while a tool
runs, forced and sampled tokens would look the same, sequences would share one processor's state,
and tags that are tokenised differently in context would be missed.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from generation.engine.sampling import SamplingSettings
from generation.image_marks import split_images
from generation.images import Image, subject
from generation.messages import chat_form, chosen_tools, clean_messages
from generation.rollouts import tools
from generation.rollouts.episode import Conversation, PolicyLLM, RolloutFunction
from generation.rollouts.tools import CallParser, Content, Tool, ToolRunner
from generation.trajectory import Trajectory, checked_reward

_ENVIRONMENT = "it must be a class with a method reset(**row), or a function that makes an object of one"


@dataclass(frozen=True)
class Agent:
    """The policy's tools, and the way it calls them.

    With `describe`, chat templates get the tools' schemas, or those that a row names in its column
    `tools_key`.
    """

    runner: ToolRunner
    parse: CallParser
    max_turns: int
    tools: Mapping[str, Tool] = field(default_factory=dict)
    describe: bool = True
    tools_key: str | None = None

    def described(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the prompt of a row describes."""
        schemas = [tool.schema for tool in self.tools.values()] if self.describe else []
        chosen = row.get(self.tools_key) if self.tools_key is not None else None
        return chosen_tools(chosen, schemas)


def tool_rollout(agent: Agent) -> RolloutFunction:
    """Level 2: answers and tool calls alternate until an answer has no call. The calls of one
    answer run at once.
    """

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        """Run one episode."""
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
    """Alternate answers and replies until an answer has no call or is cut, or turns or context run
    out.

    A turn's calls run at once, or one after the other with `in_order`; then `after_turn` is called.
    `respond` gets each answer without a call, the last one included, and returns the next message,
    or None at the end.
    """
    while (generation := await chat.sample(sampling)) is not None:
        # An answer that was cut may end inside a call, to which an error would be the wrong reply.
        calls = agent.parse(chat.answer) if generation.finish_reason == "stop" else []
        last = chat.turns == agent.max_turns
        if calls and not last:
            replies = await chat.llm.outside(
                agent.runner.run(agent.tools, calls, chat.metrics, in_order=in_order)
            )
            # Some chat templates render names and ids, and some of those require ids of nine
            # characters.
            chat.add(
                [
                    {
                        "role": "tool",
                        "content": reply,
                        "name": call.name or "unknown",
                        "tool_call_id": f"call{i:05d}",
                    }
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
    """The tags around calls and their results inside an answer."""

    start: str = "<function>"
    end: str = "</function>"
    result_start: str = "<result>"
    result_end: str = "</result>"


def inline_rollout(agent: Agent, tags: InlineTags = InlineTags()) -> RolloutFunction:
    """Level 2 with calls inside one answer: `<function> multiply(3, 302) </function>`;
    `agent.parse` is not used.

    `sampling.max_tokens` is for the complete answer, without the results in it.
    """

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        """Run one episode: one answer, extended by the results of the calls in it."""
        chat = llm.conversation()
        stopping = replace(sampling, stop=[*sampling.stop, tags.end])
        left = sampling.max_tokens
        calls = 0
        while (
            generation := await chat.sample(replace(stopping, max_tokens=left), continues=calls > 0)
        ) is not None:
            left -= len(generation.token_ids)
            call = pending_call(
                llm.tokenizer.decode(generation.token_ids, skip_special_tokens=False), tags
            )
            if generation.finish_reason != "stop" or call is None:
                break
            calls += 1
            if calls == agent.max_turns or left == 0:
                chat.finish_reason = "max_turns" if left else "length"
                break
            (result,) = await llm.outside(
                agent.runner.run(agent.tools, [tools.parse_inline(call)], chat.metrics)
            )
            text = f"{tags.result_start}{result}{tags.result_end}"
            chat.add_ids(llm.tokenizer(text, add_special_tokens=False)["input_ids"])
        return chat.trajectory()

    return run


def pending_call(text: str, tags: InlineTags) -> str | None:
    """Return the text between the tags of the call that `text` ends with, or None if it does not
    end with a call.

    The last token may reach beyond the end tag. An end tag without a start tag is an empty call,
    which gets an error.
    """
    before, end, _ = text.rpartition(tags.end)
    if not end:
        return None
    return before.rpartition(tags.start)[2] if tags.start in before else ""


def environment_tools(cls: type) -> dict[str, Tool]:
    """Return an environment's public methods as tools, except for the five that the rollout calls
    itself.

    Raises ValueError naming a method that cannot be a tool.
    """
    methods = {
        name: f for name, f in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")
    }
    return tools.tools_by_name(
        tools.make_tool(function, method=not isinstance(inspect.getattr_static(cls, name), staticmethod))
        for name, function in methods.items()
        if name not in ("reset", "respond", "turn_reward", "get_reward", "close")
    )


def environment_class(make: Callable[..., Any], kwargs: dict[str, Any]) -> type:
    """Return the class of the environments that `make` makes: `make` itself if it is a class. A
    function, like TRL's `environment_factory`, is called once to find out. Raises ValueError unless
    the class has a method `reset`.
    """
    cls: Any = make
    if not inspect.isclass(make):
        try:
            made = make(**kwargs)
        except Exception as error:
            raise ValueError(
                f"{_ENVIRONMENT}; {make!r} raised {type(error).__name__}: {error}"
            ) from error
        cls = type(made)
        if hasattr(made, "close"):
            made.close()
    if not callable(getattr(cls, "reset", None)):
        raise ValueError(f"{_ENVIRONMENT}, not {make!r}")
    return cast(type, cls)


def environment_rollout(
    cls: type, kwargs: dict[str, Any], agent: Agent, make: Callable[..., Any] | None = None
) -> RolloutFunction:
    """Level 3: an environment for each trajectory, whose methods are tools beside those of `agent`.

    The environment is made by `make`, or by its class `cls`. All of its methods may be sync or
    async. The calls of one turn run in order, since they share the environment.

        reset(**row)      called first, with the columns of the row that it has parameters for.
                          Returns None; or a string, which is added to the last message of the
                          prompt; or a list of messages, which replaces the prompt
        respond(answer)   optional: gets the text of each answer without a call, and returns the
                          next message, or None at the end
        turn_reward()     optional: returns a number after each answer and its calls; these
                          numbers are summed
        get_reward(t)     optional: returns a number, or several by name, at the end. The
                          parameter may be left out; it is the trajectory, whose `text` is the
                          last answer
        close()           optional: called at the end, also after an error

    Instead of a string, `reset`, `respond` and tools may return a Pillow image, or a list of texts
    and such images.
    """
    methods = environment_tools(cls)
    agent = replace(agent, tools=tools.tools_by_name([*agent.tools.values(), *methods.values()]))

    async def run(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        call = agent.runner.call
        environment = await llm.outside(call(functools.partial(make or cls, **kwargs)))
        bound = {
            name: replace(tool, function=getattr(environment, name)) for name, tool in methods.items()
        }
        try:
            observation = await llm.outside(call(_with_columns(environment.reset, row)))
            chat = _after_reset(llm, observation, agent.described(row))
            return await _converse_in(
                environment, chat, sampling, replace(agent, tools={**agent.tools, **bound})
            )
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return run


async def _converse_in(
    environment: Any, chat: Conversation, sampling: SamplingSettings, agent: Agent
) -> Trajectory:
    """Run all turns of an episode in an environment. Return its trajectory with the reward."""
    cls = type(environment).__name__
    turn_rewards = list[float]()

    async def turn_reward() -> None:
        value = await chat.llm.outside(agent.runner.call(environment.turn_reward))
        turn_rewards.append(checked_reward(value, f"{cls}.turn_reward returned, in turn {chat.turns},"))

    async def respond(answer: str) -> str | None:
        call = agent.runner.call(functools.partial(environment.respond, answer))
        return await chat.llm.outside(call)  # type: ignore[no-any-return]

    after_turn = turn_reward if hasattr(environment, "turn_reward") else None
    responding = respond if hasattr(environment, "respond") else None
    await converse(chat, sampling, agent, in_order=True, respond=responding, after_turn=after_turn)
    trajectory = chat.trajectory(text=chat.answer)
    final = dict[str, float]()
    if (function := getattr(environment, "get_reward", None)) is not None:
        arguments = [trajectory] if inspect.signature(function).parameters else []
        returned = await chat.llm.outside(agent.runner.call(functools.partial(function, *arguments)))
        description = f"{cls}.get_reward returned"
        if isinstance(returned, dict):
            final = {
                name: checked_reward(value, f"{description} as {name!r}")
                for name, value in returned.items()
            }
        else:
            final = {"final": checked_reward(returned, description)}
    trajectory.turn_rewards = turn_rewards
    trajectory.reward = sum(turn_rewards) + sum(final.values())
    if turn_rewards or final:
        trajectory.reward_parts = {"environment": trajectory.reward} | (final if len(final) > 1 else {})
    return trajectory


def _with_columns(function: Callable[..., Any], row: dict[str, Any]) -> functools.partial[Any]:
    """Bind the columns of the row that a function has parameters for; all of them where it takes
    `**row`.
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return functools.partial(function, **row)
    return functools.partial(function, **{name: row[name] for name in parameters if name in row})


def _after_reset(llm: PolicyLLM, observation: Any, schemas: list[dict[str, Any]]) -> Conversation:
    """Return a conversation that begins with the environment's first observation, rendered as
    prompts are.

    `schemas` are those of the tools that the prompt describes.
    """
    if observation is None:
        return llm.conversation()
    if isinstance(observation, str) and llm.messages is None:
        return llm.conversation(
            llm.prompt_ids + llm.tokenizer(observation, add_special_tokens=False)["input_ids"]
        )
    images: tuple[Image, ...] = ()
    added = tools.image_parts(observation) or observation
    if added is not observation or isinstance(added, str):
        *before, last = llm.messages or []
        observation = [*before, {**last, "content": _joined(last["content"], added)}]
        images = llm.images
    settings = dict(llm.settings.chat_template_kwargs)
    if schemas:
        settings["tools"] = schemas
    with subject("reset"):
        messages = clean_messages(observation)
        if messages[-1]["role"] == "assistant":
            raise ValueError("has messages that end with an assistant's turn: leave that out")
        if llm.image_rules is None:
            text = chat_form(llm.tokenizer).render(messages, **settings)
            return llm.conversation(list(llm.tokenizer(text, add_special_tokens=False)["input_ids"]))
        messages, sources = split_images(messages, images)
        text = llm.image_rules.processor.form.render(messages, **settings)
    images = llm.conversation([]).read_images(sources)
    ids, spans = llm.image_rules.processor.expand(text, images, special=False)
    chat = llm.conversation(ids)
    chat.images = images
    chat.image_spans = spans
    return chat


def _joined(before: Content, added: Content) -> Content:
    """Return a message's content with more content after it, on a new line."""
    if isinstance(before, str) and isinstance(added, str):
        return f"{before}\n{added}"
    parts: list[dict[str, Any]] = []
    for content in (before, "\n", added):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
