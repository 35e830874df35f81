"""Messages and tools in the one form that the rest of the code reads, and the form that a chat
template takes.

`clean_messages` and `chosen_tools` read what people keep in their files. `ChatForm` finds out by
rendering what a template takes: some render lists of parts, some text only; some want a call's
arguments as an object, some as text. All raise ValueError with a sentence without its subject, the
row or the environment.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, Protocol

CleanMessage = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}
_CONTENT_KEYS = ("text", "value")  # where others keep what belongs under `content`
_TEXT_PARTS = ("text", "input_text", "output_text", None)
# An assistant's turn may consist of these alone
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_ASKED = {"role": "user", "content": "probe?"}
_ARGUMENTS = re.compile(r"probe_key\W+probe_value")


class Arguments(dict[str, Any]):
    """The arguments of a call, with the JSON text in which they were written, if they were."""

    text: str | None = None


class Template(Protocol):
    """The function of a tokenizer or processor that renders messages; `settings` are the template's
    arguments.
    """

    def __call__(self, messages: Sequence[CleanMessage], **settings: Any) -> str:
        """Return the text of messages."""


def messages_in(value: Any) -> Any:
    """Return what a column holds, in which JSON text of one or several messages has become a list.

    Any other text stays text, also if it is JSON. Raises ValueError for Python's text of a list of
    messages.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        if re.match(r"\s*\[\s*\{\s*['\"](role|content|from)['\"]\s*:", value):
            raise ValueError(
                "holds the text of a list of messages, which is not JSON: write it with json.dumps"
            ) from None
        return value
    messages = parsed if isinstance(parsed, list) else [parsed]
    if messages and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in messages
    ):
        return parsed
    return value


def clean_messages(messages: Any) -> list[CleanMessage]:
    """Return messages in one form: a role in small letters, content that is text or parts, calls
    with their arguments.

    An absent key is meant where a message has None under it, so it is left out. Text parts are
    `{"type": "text", "text": …}`; parts of other kinds stay as they are. A call is `{"type":
    "function", "function": {"name": …, "arguments": {…}}}` with an id, if it has one. A tool's
    content may be any JSON value. Raises ValueError naming the message, counted from 1, that cannot
    be read with certainty.
    """
    readable = isinstance(messages, list) and messages
    if not readable or not all(
        isinstance(message, Mapping) and message.get("role") for message in messages
    ):
        raise ValueError(
            "has a prompt that is neither a string nor a list of messages with role and content"
        )
    return [
        _clean_message(message, f"has a message ({n})") for n, message in enumerate(messages, start=1)
    ]


def _clean_message(message: Mapping[str, Any], name: str) -> CleanMessage:
    clean = {key: value for key, value in message.items() if value is not None}
    role = clean["role"]
    if not isinstance(role, str):
        raise ValueError(f"{name} whose role is {type(role).__name__}, not a string")
    if role not in _ROLES and role.strip().lower() in _ROLES:
        role = clean["role"] = role.strip().lower()
    if "content" not in clean:
        for key in _CONTENT_KEYS:
            if key in clean:
                clean["content"] = clean.pop(key)
                break
    written_calls = clean.pop("tool_calls", None) or clean.pop("function_call", None)
    calls = _clean_calls(written_calls, name) if written_calls else []
    if calls:
        clean["tool_calls"] = calls
    content = clean.get("content")
    if content is None or (content == [] and role != "tool"):
        clean.pop("content", None)
        thinks = role == "assistant" and any(key in clean for key in _THOUGHTS)
        if not calls and not thinks:
            raise ValueError(f"{name} without content; it has only {', '.join(clean)}")
    elif not isinstance(content, str):
        clean["content"] = _clean_content(content, role, name)
    return clean


def _clean_content(content: Any, role: str, name: str) -> Any:
    """Return content that is not text as text or a list of parts; a tool's, which may be any JSON
    value, unchanged.
    """
    number = isinstance(content, int | float) and not isinstance(content, bool)
    if number and role != "tool":
        return json.dumps(content)
    parts = [content] if isinstance(content, Mapping) else content
    if role == "tool" and not (isinstance(parts, list) and all(map(_is_part, parts))):
        return content
    if not isinstance(parts, list):
        raise ValueError(
            f"{name} whose content is {type(content).__name__}: it must be text or a list of parts"
        )
    return [_clean_part(part, name) for part in parts]


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _clean_part(part: Any, name: str) -> CleanMessage:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(
            f"{name} with a part that is {type(part).__name__}: it must be text or an image"
        )
    clean = {key: value for key, value in part.items() if value is not None}
    if clean.get("type") not in _TEXT_PARTS:
        return clean
    if not isinstance(clean.get("text"), str):
        raise ValueError(f"{name} with a part without text; it has only {', '.join(clean) or 'nulls'}")
    return {"type": "text", "text": clean["text"]}


def _clean_calls(calls: Any, name: str) -> list[CleanMessage]:
    if isinstance(calls, str):
        calls = _parsed(calls, f"{name} whose tool_calls are text that is not JSON")
    listed = calls if isinstance(calls, list) else [calls]
    return [_clean_call(call, name) for call in listed]


def _clean_call(call: Any, name: str) -> CleanMessage:
    """Return a call whose arguments are an object: Arrow stores an empty one as null, and some
    write an empty text.
    """
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name} with a call that has no name of a function")
    written = function.get("arguments")
    values = written
    if isinstance(written, str) and written.strip():
        values = _parsed(written, f"{name} with a call whose arguments are not a JSON object")
    if values and not isinstance(values, Mapping):
        raise ValueError(f"{name} with a call whose arguments are not a JSON object: {str(values)[:60]}")
    arguments = Arguments(values or {})
    if isinstance(written, str) and written.strip():
        arguments.text = written
    clean = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if "function" in call and call.get("id") is not None:
        clean["id"] = call["id"]
    return clean


def _parsed(text: str, sentence: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{sentence}: {text[:60]}") from None


def chosen_tools(value: Any, offered: Sequence[CleanMessage]) -> list[CleanMessage]:
    """Return the schemas of the tools that a row describes to the model.

    `value` is the row's: None for all of `offered`, the tools that the recipe runs; a list of names
    or schemas, or the JSON text of one, for some of them. Where nothing is offered, the row's own
    schemas are returned.
    """
    if value is None:
        return list(offered)
    if isinstance(value, str):
        value = _parsed(value, "has tools that are text, but not JSON") if value.strip() else []
    listed = value if isinstance(value, list) else [value]
    tools = [_tool(tool) for tool in listed]
    if not offered:
        if names := [tool for tool in tools if isinstance(tool, str)]:
            raise ValueError(
                f"names the tool {names[0]!r}, but the recipe has none, and the row does not describe it"
            )
        return tools
    by_name = {_function_name(schema): schema for schema in offered}
    chosen = []
    for tool in tools:
        tool_name = tool if isinstance(tool, str) else _function_name(tool)
        if tool_name not in by_name:
            raise ValueError(
                f"names the tool {tool_name!r}, but those of the recipe are {', '.join(by_name)}"
            )
        chosen.append(by_name[tool_name])
    return chosen


def _tool(tool: Any) -> Any:
    """Return a tool's name, or its schema in the form {"type": "function", "function": {"name":
    …}}.
    """
    if isinstance(tool, str):
        if not tool.lstrip().startswith("{"):
            return tool
        tool = _parsed(tool, "has a tool that is text, but not JSON")
    if isinstance(tool, Mapping) and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": tool}
    if not isinstance(tool, Mapping) or _function_name(tool) is None:
        raise ValueError("has a tool without the name of a function")
    return tool


def _function_name(schema: Mapping[str, Any]) -> Any:
    function = schema.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


class ChatForm:
    """The form in which a chat template takes messages, which is found by rendering short
    conversations.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._takes_parts: dict[str, bool] = {}
        self._calls: dict[Any, tuple[Any, bool] | None] = {}

    def render(self, messages: Sequence[CleanMessage], /, **settings: Any) -> str:
        """Return the text of clean messages, by default with a generation prompt.

        Raises ValueError where the template refuses them, or leaves calls out.
        """
        fitted = [self.fitted(message) for message in messages]
        try:
            text = self._template(fitted, **{"add_generation_prompt": True, **settings})
        except Exception as error:  # a template is a program
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"does not suit the chat template: {reason}") from error
        return text

    def fitted(self, message: CleanMessage) -> CleanMessage:
        """Return a clean message in the form that the template takes. Raises ValueError if it takes
        no such form.
        """
        role = message["role"]
        content = message.get("content")
        if role in _OTHER_NAMES and not self._takes_role(role):
            raise ValueError(f"has a message of the role {role!r}: call it {_OTHER_NAMES[role]!r}")
        fitted = dict(message)
        if isinstance(content, str):
            if content and not self._takes_text:
                fitted["content"] = [{"type": "text", "text": content}]
        elif role == "tool" and content is not None and not _are_parts(content):
            if not (isinstance(content, Mapping) and self._takes_json):
                fitted["content"] = json.dumps(content, ensure_ascii=False)
        elif content is not None and not self._takes_parts_of(role):
            kinds = [part["type"] for part in content if part["type"] != "text"]
            if kinds:
                raise ValueError(
                    f"has a part of the type {kinds[0]!r}, but the chat template takes text only"
                )
            fitted["content"] = "".join(part["text"] for part in content)
        if "tool_calls" in message:
            self._fit_calls(fitted)
        return fitted

    def _fit_calls(self, fitted: CleanMessage) -> None:
        """Give a message its empty content and its calls' arguments in the form that the template
        takes.
        """
        content = fitted.get("content", ...)
        if content in (..., "", None):
            content, as_text = self._form_of_calls(content)
            fitted.pop("content", None)
            if content is not ...:
                fitted["content"] = content
        else:
            _, as_text = self._form_of_calls("probe?")
        if as_text:
            fitted["tool_calls"] = [_with_text(call) for call in fitted["tool_calls"]]

    def _form_of_calls(self, written: Any) -> tuple[Any, bool]:
        """Return the content that a template takes beside calls (...: no key), and whether
        arguments are text.

        `written` is the content of a message, which is kept if the template renders calls beside
        it; other forms of no content are tried, too. Raises ValueError if calls are left out in
        each form.
        """
        if written not in self._calls:
            has_text = written not in (..., "", None)
            contents = [written] if has_text else list(dict.fromkeys([written, ..., "", None]))
            forms = [(content, as_text) for as_text in (False, True) for content in contents]
            self._calls[written] = next((form for form in forms if self._renders_call(*form)), None)
        form = self._calls[written]
        if form is None:
            # Some templates write either, not both
            beside = "" if written in (..., "", None) else " beside a text"
            raise ValueError(f"has a tool call{beside}, which the chat template leaves out")
        return form

    def _renders_call(self, content: Any, as_text: bool) -> bool:
        """Return True if the template writes a call's arguments once, as an object's JSON or in
        words of its own.
        """
        function = {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}
        call = {"id": "probe0000", "type": "function", "function": function}
        turn: CleanMessage = {"role": "assistant", "tool_calls": [_with_text(call) if as_text else call]}
        if content is not ...:
            turn["content"] = content
        tool = {
            "name": "probe_name",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }
        text = self._probe(_ASKED, turn, tools=[{"type": "function", "function": tool}])
        escaped = '\\"probe_key' in text or "{'probe_key'" in text
        return "probe_name" in text and _ARGUMENTS.search(text) is not None and not escaped

    def _probe(self, *messages: CleanMessage, **settings: Any) -> str:
        with suppress(Exception):
            return self._template(messages, add_generation_prompt=False, **settings)
        return ""

    @cached_property
    def opening(self) -> str:
        """The text with which the template opens an answer."""
        conversation = self._probe(_ASKED)
        with suppress(Exception):
            return self._template([_ASKED], add_generation_prompt=True).removeprefix(conversation)
        return ""

    @cached_property
    def _takes_text(self) -> bool:
        # Else nothing is known of it
        return "probe?" in self._probe(_ASKED) or not self._takes_parts_of("user")

    @cached_property
    def _takes_json(self) -> bool:
        call = {
            "id": "probe0000",
            "type": "function",
            "function": {"name": "probe_name", "arguments": {}},
        }
        turn = self.fitted({"role": "assistant", "tool_calls": [call]})
        reply = {
            "role": "tool",
            "name": "probe_name",
            "tool_call_id": "probe0000",
            "content": {"probe_key": "probe_value"},
        }
        return '{"probe_key": "probe_value"}' in self._probe(_ASKED, turn, reply)

    def _takes_parts_of(self, role: str) -> bool:
        """Return True if the template writes the texts of a list of parts, and nothing else of
        them.
        """
        if role not in self._takes_parts:
            parts = [{"type": "text", "text": text} for text in ("probe_a", "probe_b")]
            turn: CleanMessage = {"role": role, "content": parts}
            if role in ("system", "developer"):
                text = self._probe(turn, _ASKED)
            else:
                text = self._probe(turn) if role == "user" else self._probe(_ASKED, turn)
            self._takes_parts[role] = re.search(r"probe_a\s*probe_b", text) is not None
        return self._takes_parts[role]

    def _takes_role(self, role: str) -> bool:
        """Return True if the template knows another name of a role: it renders both names alike, or
        refuses ours.
        """
        usual = self._probe(_ASKED, {"role": _OTHER_NAMES[role], "content": "probe"})
        return not usual or usual == self._probe(_ASKED, {"role": role, "content": "probe"})


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(map(_is_part, content))


def _with_text(call: CleanMessage) -> CleanMessage:
    arguments = call["function"]["arguments"]
    text = getattr(arguments, "text", None) or json.dumps(arguments, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": text}}


def plain_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts with the tokenizer's special tokens, but no second BOS before a text
    that has one.
    """
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=True)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is None:
        return encoded
    return [ids[1:] if ids[:2] == [bos, bos] else ids for ids in encoded]


def chat_form(tokenizer: Any) -> ChatForm:
    """Return the form that a tokenizer's chat template takes; it is found once for a template."""
    return _tokenizer_form(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _tokenizer_form(tokenizer: Any, _template: str) -> ChatForm:
    def render(messages: Sequence[CleanMessage], **settings: Any) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))

    return ChatForm(render)
