"""From what the policy wrote to the calls it asks for. A call that cannot be read is a call, too: it gets an answer."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call as the policy wrote it; `malformed` says why it cannot be read, if it cannot."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    malformed: str = ""


CallParser = Callable[[str], list[ToolCall]]
"""The calls in an answer's text, in their order; none: it is the final answer."""


def parse_hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them: Hermes, Qwen and many others."""
    return [_from_json(body) for body in _HERMES.findall(text)]


def _from_json(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(malformed=f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(malformed='a tool call is an object with "name" and "arguments"')
    return named_call(call["name"], call.get("arguments", {}))


def named_call(name: str, arguments: Any) -> ToolCall:
    """A call with these arguments: an object, or its JSON, as some models write it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return ToolCall(name, malformed=f"the arguments of {name} are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, malformed=f"the arguments of {name} are no object")
    return ToolCall(name, arguments)


def parse_inline(text: str) -> ToolCall:
    """A call in the manner of Python: `multiply(3, 302)`. Arguments are literals; numbers are read as floats."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return ToolCall(malformed=f"{text.strip()!r:.100} is no call such as name(1, 2)")
        positional = tuple(_literal(argument) for argument in node.args)
        named = {keyword.arg or "**": _literal(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ToolCall(malformed=f"{text.strip()!r:.100} cannot be read as a call: {error}")
    return ToolCall(node.func.id, named, positional)


def _literal(node: ast.expr) -> Any:
    value = ast.literal_eval(node)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def call_parser(name: str, tokenizer: "PreTrainedTokenizerBase") -> CallParser:
    """Our own reading of "hermes", which tells malformed calls from answers, or any of vLLM's tool parsers by its name.

    Raises:
        ValueError: there is no such parser.
    """
    if name == "hermes":
        return parse_hermes
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ValueError(f"{name!r} is no tool parser: vLLM has {known}") from error
    request = SimpleNamespace(tools=None, tool_choice="auto", skip_special_tokens=False)

    def parse(text: str) -> list[ToolCall]:
        found = parser.extract_tool_calls(text, request).tool_calls
        return [named_call(call.function.name, call.function.arguments) for call in found]

    return parse
