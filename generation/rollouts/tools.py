"""Tools, which are typed functions that the policy may call, and the parsing and running of its
calls.

An error in a call becomes the text of its reply, and is counted. A call that cannot be parsed gets
such a reply, too.
"""

import ast
import asyncio
import functools
import inspect
import json
import re
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from generation.rollouts.user_code import call_user

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# More than a token has, except in runs of blanks; bounds the time to encode a huge reply
_TOKEN_CHARACTERS = 64
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE
)
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call as the policy wrote it; `malformed` says why it cannot be parsed, or is empty."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    malformed: str = ""


CallParser = Callable[[str], list[ToolCall]]
"""Returns the calls in an answer's text, in order; an empty list where it is the final answer."""


def parse_hermes(text: str) -> list[ToolCall]:
    """Parse calls of the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, used by
    Hermes, Qwen, others.
    """

    def read(body: str) -> ToolCall:
        try:
            call = json.loads(body)
        except (ValueError, RecursionError, MemoryError) as error:
            return ToolCall(malformed=f"the tool call is not valid JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return ToolCall(malformed='a tool call is an object with "name" and "arguments"')
        return named_call(call["name"], call.get("arguments", {}))

    return [read(body) for body in _HERMES.findall(text)]


def named_call(name: str, arguments: Any) -> ToolCall:
    """Return a call with arguments that are an object, or the JSON text of one, as some models
    write it.
    """
    # JSON may hold lone surrogates, which no tokenizer takes
    name = name.encode(errors="replace").decode()
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError, MemoryError) as error:
            return ToolCall(name, malformed=f"the arguments of {name} are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, malformed=f"the arguments of {name} are not an object")
    return ToolCall(name, arguments)


def parse_inline(text: str) -> ToolCall:
    """Parse a call in Python's syntax, `multiply(3, 302)`. Arguments are literals; integers become
    floats.
    """

    def literal(node: ast.expr) -> Any:
        value = ast.literal_eval(node)
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return ToolCall(malformed=f"{text.strip()!r:.100} is not a call such as name(1, 2)")
        positional = tuple(map(literal, node.args))
        named = {keyword.arg or "**": literal(keyword.value) for keyword in node.keywords}
    except Exception as error:
        # Python's parser and float() raise seven kinds of them, for texts of seven kinds
        return ToolCall(malformed=f"{text.strip()!r:.100} cannot be read as a call: {error}")
    return ToolCall(node.func.id, named, positional)


def call_parser(name: str, tokenizer: "PreTrainedTokenizerBase") -> CallParser:
    """Return the parser called `name`: `parse_hermes`, which tells malformed calls from answers, or
    one of vLLM's.

    Raises ValueError where vLLM has no parser of that name, or one that does not read texts.
    """
    if name == "hermes":
        return parse_hermes
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except KeyError as error:
        names = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ValueError(f"{name!r} is not a tool parser: vLLM has {names}") from error
    request = SimpleNamespace(
        tools=None, tool_choice="auto", skip_special_tokens=False, chat_template_kwargs=None
    )

    def read(text: str) -> list[ToolCall]:
        calls = parser.extract_tool_calls(text, request).tool_calls
        return [named_call(call.function.name, call.function.arguments) for call in calls]

    def parse(text: str) -> list[ToolCall]:
        try:
            return read(text)
        except Exception as error:  # vLLM's parsers raise anything for a text that they do not expect
            return [ToolCall(malformed=f"the tool calls cannot be read: {error}")]

    try:
        read("an answer without calls")
    except Exception as error:  # some are only for vLLM's own server
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"vLLM's tool parser {name!r} does not read answers here ({reason}): name another"
        ) from error
    return parse


Content = str | list[dict[str, Any]]
"""A message's content: text, or a list of parts with images among them."""


class ToolError(Exception):
    """The error that a call gets as its reply, counted under `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes: name: the name by which the policy calls it. function: the function, sync or async.
        schema: name, description and parameters in the form of OpenAI's API, for chat templates.
        parameters: names of the function's parameters, in order. model: checks and converts
        arguments; its fields are `arg0`, `arg1`, … in the order of the parameters.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    parameters: tuple[str, ...]
    model: type[BaseModel]

    def named(self, call: ToolCall) -> dict[str, Any]:
        """Return the call's arguments by name. Raises ToolError if there are more than
        parameters.
        """
        if len(call.positional) > len(self.parameters):
            raise ToolError("arguments", f"{self.name} takes {len(self.parameters)} arguments")
        return dict(zip(self.parameters, call.positional, strict=False)) | call.arguments

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the call's arguments by name, converted to the function's types. Raises
        ToolError.
        """
        named = self.named(call)
        try:
            checked = self.model.model_validate(named)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolError("arguments", f"{self.name}: {'; '.join(problems)}") from error
        except Exception as error:  # a validator of the user's may raise anything
            raise ToolError("arguments", f"{self.name}: {error}") from error
        names = {f"arg{i}": name for i, name in enumerate(self.parameters)}
        return {names[key]: getattr(checked, key) for key in checked.model_fields_set}


def make_tool(function: Callable[..., Any], *, method: bool = False) -> Tool:
    """Make a tool of a function, from its name, signature, type hints and docstring (with an
    `Args:` section, if any).

    The first parameter of a `method` is left out. Raises ValueError for positional-only, `*args` or
    `**kwargs` parameters, and for a type hint that has no schema.
    """
    name = function.__name__
    parameters = list(inspect.signature(function).parameters.values())[int(method) :]
    if unnamed := [p.name for p in parameters if p.kind not in _NAMED]:
        wrong = f"tool {name!r} has {unnamed[0]!r}, which cannot be passed by name"
        raise ValueError(
            f"{wrong}: use parameters that are neither positional-only nor *args or **kwargs"
        )
    description, meanings = _read_docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function)
        # The fields are not named like the parameters, since pydantic reserves some names.
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(parameters):
            default = ... if parameter.default is parameter.empty else parameter.default
            checked = Field(default, alias=parameter.name, description=meanings.get(parameter.name))
            fields[f"arg{index}"] = (hints.get(parameter.name, Any), checked)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except (PydanticUserError, NameError) as error:
        raise ValueError(
            f"tool {name!r} has a type hint that no schema can be made of: {error}"
        ) from error
    schema.pop("additionalProperties", None)
    described = tool_schema(name, description, schema)
    return Tool(name, function, described, tuple(p.name for p in parameters), model)


def tool_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema in the form of OpenAI's API."""
    function = {"name": name, "description": description, "parameters": without_titles(parameters)}
    return {"type": "function", "function": function}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its first section, and the entries of its `Args:` section by
    name.
    """
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    entries: dict[str, str] = {}
    last = ""
    for line in sections.get(
        "Args", sections.get("Arguments", sections.get("Parameters", ""))
    ).splitlines():
        if match := _ENTRY.fullmatch(line.strip()):
            last = match[1]
            entries[last] = match[2]
        elif last and line.strip():
            entries[last] += " " + line.strip()
    return " ".join(parts[0].split()), entries


def without_titles(schema: Any) -> Any:
    """Return a schema without the titles that pydantic adds everywhere, which would waste tokens in
    a prompt.
    """
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: without_titles(value) for key, value in kept.items()}


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by their names. Raises ValueError when two have the same name."""
    tools = list(tools)
    names = Counter(tool.name for tool in tools)
    if duplicates := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"two tools are named {duplicates[0]!r}: rename one, so that the policy can choose"
        )
    return {tool.name: tool for tool in tools}


@dataclass(frozen=True)
class ToolLimits:
    """The limits of calls and replies.

    Attributes: timeout_s: seconds that a call may take, not counting the wait for its turn.
        max_concurrency: the most calls that run at the same time, over all trajectories of an
        engine. max_tokens: the most tokens of a reply; longer replies are cut. error_format: the
        reply to a call that fails; `{error}` stands for the error's message. rates: the most calls
        per second of a tool, by its name; they begin at even intervals. The wait for one does not
        count towards `timeout_s`. images: whether replies may contain images.
    """

    timeout_s: float = 30.0
    max_concurrency: int = 64
    max_tokens: int = 1024
    error_format: str = "Error: {error}"
    rates: Mapping[str, float] = field(default_factory=dict)
    images: bool = False


class ToolRunner:
    """Runs the calls of all trajectories of one engine. Use it on one event loop."""

    def __init__(self, limits: ToolLimits, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        # The event loop's time of the next call of each tool that has a rate
        self._next: dict[str, float] = {}

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call user code when there is a place for it. Raises TimeoutError, or the code's own
        error.
        """
        async with self._slots:
            return await call_user(function, self.limits.timeout_s)

    async def _wait_for_rate(self, name: str) -> None:
        """Wait until a tool's rate allows one more call."""
        if (rate := self.limits.rates.get(name)) is not None:
            now = asyncio.get_running_loop().time()
            at = max(now, self._next.get(name, now))
            self._next[name] = at + 1 / rate
            await asyncio.sleep(at - now)

    async def run(
        self,
        tools: Mapping[str, Tool],
        calls: list[ToolCall],
        metrics: dict[str, float],
        *,
        in_order: bool = False,
    ) -> list[Content]:
        """Run one turn's calls. Return the replies in order, cut to the limit; add counts and
        seconds to `metrics`.

        The calls run at once, or one after the other with `in_order`, for the methods of one
        object.
        """
        start = time.perf_counter()
        if in_order:
            replies = [await self._reply(tools, call, metrics) for call in calls]
        else:
            replies = list(await asyncio.gather(*(self._reply(tools, call, metrics) for call in calls)))
        replies, cut = cut_contents(self._tokenizer, replies, self.limits.max_tokens)
        _count(metrics, "tools/truncated", cut)
        _count(metrics, "tools/calls", len(calls))
        _count(metrics, "tools/seconds", time.perf_counter() - start)
        return replies

    async def _reply(
        self, tools: Mapping[str, Tool], call: ToolCall, metrics: dict[str, float]
    ) -> Content:
        """Return the result of one call as text, or as parts where it has images; or its error,
        which is counted.
        """
        try:
            if call.malformed:
                raise ToolError("malformed", call.malformed)
            if (tool := tools.get(call.name)) is None:
                raise ToolError("unknown", f"Unknown function {call.name}")
            function = functools.partial(tool.function, **tool.arguments(call))
            await self._wait_for_rate(call.name)
            try:
                result = await self.call(function)
                if self.limits.images and (parts := image_parts(result)) is not None:
                    return parts
                if isinstance(result, str):
                    return result
                return json.dumps(result, ensure_ascii=False, default=str)
            except TimeoutError as error:
                raise ToolError("timeout", f"{call.name} {error}") from error
            except Exception as error:  # whatever the tool raises
                raise ToolError("exception", str(error) or type(error).__name__) from error
        except ToolError as error:
            _count(metrics, "tools/errors")
            _count(metrics, f"tools/errors/{error.kind}")
            return self.limits.error_format.replace("{error}", str(error))


def image_parts(result: Any) -> list[dict[str, Any]] | None:
    """Return a Pillow image, or a list of images and text, as parts of a message; None where there
    is no image.
    """
    parts = list(result) if isinstance(result, list | tuple) else [result]
    are_images = [hasattr(part, "convert") and hasattr(part, "getexif") for part in parts]
    if not any(are_images):
        return None
    return [
        {"type": "image", "image": part} if image else {"type": "text", "text": str(part)}
        for part, image in zip(parts, are_images, strict=True)
    ]


def cut_contents(
    tokenizer: "PreTrainedTokenizerBase", contents: list[Content], limit: int
) -> tuple[list[Content], int]:
    """Cut contents as `cut_to_tokens` cuts texts. Of a content in parts, each text is cut by
    itself, images never.
    """
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    texts = [part["text"] for content in parts for part in content if "text" in part]
    short, cut = cut_to_tokens(tokenizer, texts, limit)
    rest = iter(short)
    kept: list[Content] = []
    for was, content in zip(contents, parts, strict=True):
        shortened = [part | {"text": next(rest)} if "text" in part else part for part in content]
        kept.append(shortened[0]["text"] if isinstance(was, str) else shortened)
    return kept, cut


def cut_to_tokens(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], limit: int
) -> tuple[list[str], int]:
    """Cut texts to `limit` tokens each. Return them with a note where they were cut, and how many
    were cut.
    """
    # A tokenizer takes no lone surrogates
    texts = [text.encode(errors="replace").decode() for text in texts]
    bounded = [text[: limit * _TOKEN_CHARACTERS] for text in texts]
    ids = tokenizer(bounded, add_special_tokens=False)["input_ids"] if texts else []
    fitting = [len(i) <= limit and b == t for i, b, t in zip(ids, bounded, texts, strict=True)]
    kept = [i[:limit] for i, fits in zip(ids, fitting, strict=True) if not fits]
    heads = iter(tokenizer.batch_decode(kept) if kept else [])
    cut = f" [cut after {limit} tokens]"
    # A character of which only some tokens are left decodes to U+FFFD.
    replies = [
        t if fits else next(heads).rstrip("\ufffd") + cut for t, fits in zip(texts, fitting, strict=True)
    ]
    return replies, len(kept)


def _count(metrics: dict[str, float], name: str, amount: float = 1.0) -> None:
    metrics[name] = metrics.get(name, 0.0) + amount
