"""A conversation in messages whose earlier answers keep the ids they were sampled with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .capture import Generation
from .prefix_tokens import replace_prefix_tokens

Message = Mapping[str, Any]


@dataclass(frozen=True)
class KnownPrefix:
    """Exact ids of the first `messages` messages, the last of which is an answer that was recorded."""

    ids: list[int]
    messages: int


class ChatHistory:
    """Answers are recognised by the messages before them and by what they say, not by who sends them back, or how.

    `retemplated` counts the prompts whose exact ids could not be kept, because the template does not say where an
    answer ends, or because tools have changed; they are what the template makes of the messages, and so begin a
    trajectory of their own.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._ends = tokenizer, tuple(eos_token_ids)
        self._answers: dict[str, Generation] = {}
        self.retemplated = 0

    def record(self, messages: Sequence[Message], assistant_message: Message, generation: Generation) -> None:
        """Note the answer that was given to `messages`."""
        self._answers[_key([*messages, assistant_message])] = generation

    def known_prefix(self, messages: Sequence[Message]) -> KnownPrefix | None:
        """The longest part of `messages` that ends with a recorded answer."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1].get("role") == "assistant":
                generation = self._answers.get(_key(messages[:count]))
                if generation is not None:
                    return KnownPrefix(generation.ids, count)
        return None

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a prompt for the next answer: those of the recorded answers, and the template's for the rest."""
        whole = self._render(messages, tools, add_generation_prompt=True, **template_kwargs)
        known = self.known_prefix(messages)
        if known is None:
            return whole
        until = self._render(messages[: known.messages], tools, add_generation_prompt=False, **template_kwargs)
        return self.continued(known, until, whole)

    def continued(self, known: KnownPrefix, until_answer: Sequence[int], whole: Sequence[int]) -> list[int]:
        """The prompt, from the template's ids of the known messages and of all."""
        try:
            return replace_prefix_tokens(self._tokenizer, known.ids, until_answer, whole, self._ends)
        except ValueError:
            self.retemplated += 1
            return list(whole)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, **kwargs: Any) -> list[int]:
        plain = [template_message(message) for message in messages]
        text = self._tokenizer.apply_chat_template(plain, tools=tools or None, tokenize=False, **kwargs)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates want it: content as text, arguments of tool calls as objects, None left out."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = content_text(message.get("content"))
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_template_call(call) for call in calls]
    return plain


def content_text(content: Any) -> str:
    """The text of a message's content: text itself, None, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def _template_call(call: Message) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    parsed = function | {"arguments": _arguments(function.get("arguments"))}
    return dict(call) | {"function": parsed} if "function" in call else parsed


def _arguments(arguments: Any) -> Any:
    """An object where JSON says one; text that is no JSON stays what it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _key(messages: Sequence[Message]) -> str:
    """What is said and called, message by message. Names of calls, thoughts and extras are left out: clients differ."""
    said = []
    for message in messages:
        calls = [call.get("function") or call for call in message.get("tool_calls") or []]
        told = [(call.get("name"), _arguments(call.get("arguments"))) for call in calls]
        said.append((message.get("role"), content_text(message.get("content")), told))
    return json.dumps(said, sort_keys=True, default=str)
