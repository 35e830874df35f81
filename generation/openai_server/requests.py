"""What is read from a request's body, and what is written into it, before vLLM sees it."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..chat_history import KnownPrefix
from ..sampling import SamplingSettings
from .call import Call, ExactIds, Refused

Body = dict[str, Any]
Render = Callable[[Body], Awaitable[list[int]]]
"""The ids of the body of a request to /tokenize."""

CARRIED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What answers carry beside their text, and what a client may send back with them."""


def parse_body(raw: bytes) -> Body:
    """The JSON object that a request holds.

    Raises:
        Refused: it is something else, nested beyond reason, or holds halves of surrogate pairs, which are no text.
    """
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Refused(400, "the request is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise Refused(400, "the request holds half of a surrogate pair, which is no text") from error
    except ValueError as error:
        raise Refused(400, f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the request must be a JSON object")
    return body


def fill_sampling(body: Body, trained: SamplingSettings) -> None:
    """Write what the policy is trained with where the client left it open: vLLM's own defaults are nobody's choice.

    Raises:
        Refused: an answer longer than in training is asked for, or beam search.
    """
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if body.get(name) is None:
            body[name] = getattr(trained, name)
    for name in ("stop", "stop_token_ids"):
        given, own = body.get(name) or [], list(getattr(trained, name))
        given = [given] if isinstance(given, str) else given
        if own and isinstance(given, list):
            body[name] = [*given, *(value for value in own if value not in given)]
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and body[name] > trained.max_tokens:
            raise Refused(400, f"{name} is {body[name]}, but answers are trained up to {trained.max_tokens} tokens")
    if body.get("use_beam_search"):
        raise Refused(400, "use_beam_search is set, but the policy is trained on what it samples: leave it out")


def take_prefix(body: Body, vocabulary: int) -> KnownPrefix | None:
    """Take the ids that the client wants to be kept out of the body, and give them with the messages they stand for.

    They are `required_prefix_token_ids`, up to the last answer (an empty list: none), or else `prompt_token_ids` and
    `generation_token_ids` of the last message that has any.

    Raises:
        Refused: they are not ids of this model.
    """
    messages = readable_messages(body)
    required = body.pop("required_prefix_token_ids", None)
    carried = [(i, [m.pop(name, None) for name in CARRIED]) for i, m in enumerate(messages)]
    if required is not None and messages:
        last = max((i + 1 for i, m in enumerate(messages) if m.get("role") == "assistant"), default=len(messages))
        ids = _ids("required_prefix_token_ids", required, vocabulary)
        return KnownPrefix(ids, last) if ids else None
    for i, (prompt, answer, _) in reversed(carried):
        if prompt is not None:
            where = f"messages[{i}]"
            ids = _ids(f"{where}.prompt_token_ids", prompt, vocabulary)
            return KnownPrefix(ids + _ids(f"{where}.generation_token_ids", answer or [], vocabulary), i + 1)
    return None


def _ids(name: str, value: Any, vocabulary: int) -> list[int]:
    if isinstance(value, list) and all(type(token) is int and 0 <= token < vocabulary for token in value):
        return value
    raise Refused(400, f"{name} must be a list of token ids from 0 to {vocabulary - 1}")


def readable_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The request's messages; none where they are no messages, which vLLM will say."""
    messages = body.get("messages")
    return messages if isinstance(messages, list) and all(isinstance(m, dict) for m in messages) else []


async def find_exact(body: Body, call: Call, given: KnownPrefix | None, render: Render) -> ExactIds | None:
    """The ids that the prompt of `body` must begin with: those given, or those the conversation remembers."""
    known = None
    if call.conversation is not None and not body.get("continue_final_message"):
        known = call.conversation.history.known_prefix(readable_messages(body))
    # What is remembered is known to belong; ids from the client have to prove it.
    if known is None or (given is not None and given.messages > known.messages):
        known = given
    if known is None:
        return None
    if body.get("continue_final_message"):
        raise Refused(400, "exact ids cannot be kept with continue_final_message: the last answer has no end")
    return ExactIds(known, await render(prefix_request(body, known.messages)), known is given)


def prefix_request(body: Mapping[str, Any], messages: int) -> Body:
    """The request to /tokenize whose ids are those of the first messages, without the opening of an answer."""
    wanted = {name: body[name] for name in ("model", "tools", "chat_template", "add_special_tokens") if name in body}
    kwargs = {name: body[name] for name in ("reasoning_effort", "documents") if body.get(name) is not None}
    kwargs |= body.get("chat_template_kwargs") or {}
    first: Sequence[Any] = body["messages"][:messages]
    return wanted | {"messages": first, "add_generation_prompt": False, "chat_template_kwargs": kwargs}
