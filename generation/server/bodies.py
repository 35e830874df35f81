"""The bodies of requests, checked and completed before vLLM sees them, and of its answers, with exact ids added."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import KnownPrefix, replace_prefix_tokens
from generation.server.conversations import STUMBLES, Refused, ServedCall, StoredResponses, as_key
from generation.server.dialects import MESSAGES, RESPONSES, add_event, said_in

Body = dict[str, Any]
CARRIED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The fields that answers carry beside their text, and that a client may send back with them."""

_FAILED = b'data: {"error"'
_TOO_DEEP = "the request is nested too deeply"

LARGEST = 4096
"""The most entries of a list whose entries take time: messages are tried against many forms, words are tokenized."""


def parse_body(raw: bytes) -> Body:
    """The JSON object that a request holds. Refused where it is something else, nested beyond reason, or holds halves
    of surrogate pairs, which are not text.
    """
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Refused(400, _TOO_DEEP) from error
    except UnicodeEncodeError as error:
        raise Refused(400, "the request holds half of a surrogate pair, which is not text") from error
    except ValueError as error:
        raise Refused(400, f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the request must be a JSON object")
    return body


@dataclass(frozen=True)
class Limits:
    """Limits of one request, beyond those of vLLM itself; in answers, or in tokens."""

    choices: int
    answers: int
    context: int
    vocabulary: int

    def check_sizes(self, body: Body) -> None:
        """Raise `Refused` for lists longer than any sensible request's, before time goes into their entries."""
        most = dict.fromkeys(("messages", "input", "tools"), min(self.context, LARGEST)) | {"bad_words": LARGEST}
        most |= dict.fromkeys(("prompt", "tokens"), self.context)
        most |= dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logit_bias"), self.vocabulary)
        for name, limit in most.items():
            prompts = body[name] if name == "prompt" and isinstance(body.get(name), list) else []
            for value in (body.get(name), *prompts):
                if isinstance(value, list | dict) and len(value) > limit:
                    raise Refused(400, f"{name} has {len(value)} entries, but may have at most {limit}")

    def check(self, request: Any) -> None:
        """Raise `Refused` for too much of anything in vLLM's own, parsed request: "129" and 129.0 have become 129."""
        n, prompt = getattr(request, "n", None) or 1, getattr(request, "prompt", None)
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        if n > self.choices:
            raise Refused(400, f"n is {short(n)}, but must be at most {self.choices}")
        if n * prompts > self.answers:
            raise Refused(400, f"{prompts} prompts with n {n} ask for more than {self.answers} answers: ask in parts")
        for name, value in vars(request).items():
            if isinstance(value, int) and abs(value) >= 2**63:  # more than a message to the engine holds
                raise Refused(400, f"{name} is {short(value)}, which is out of all bounds")
        if (best := (request.model_extra or {}).get("best_of")) is not None and best != n:
            raise Refused(400, f"best_of is {short(best)}, but this server picks none from several: leave it out")


def short(value: Any) -> str:
    """The beginning of a value's repr."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def sentence_of(errors: Sequence[Mapping[str, Any]], body: Any) -> str:
    """Returns pydantic's errors of a request's body as one sentence, which begins with the field's name.

    A value that may have several types has errors for each of them. The sentence is about the type that the value comes
    closest to: its `type` field matches, it fits to the greatest depth, and it has the fewest errors.
    """
    places: dict[tuple[Any, ...], list[tuple[list[str], Mapping[str, Any]]]] = {}
    for error in errors:
        where, tried = _place(error, body)
        places.setdefault(tried, []).append((where, error))

    def closeness(errors: list[tuple[list[str], Mapping[str, Any]]]) -> tuple[bool, int, int]:
        other_type = any(error["type"] == "literal_error" and where[-1:] == ["type"] for where, error in errors)
        return not other_type, max(len(where) - (error["type"] == "missing") for where, error in errors), -len(errors)

    where, error = max(places.values(), key=closeness)[0]
    return f"{'.'.join(where) or 'the request'}: {error['msg']}"


def _place(error: Mapping[str, Any], body: Any) -> tuple[list[str], tuple[Any, ...]]:
    """The path into the body of what an error is about, and the types that pydantic has tried on the way."""
    where, tried, value, (_, *path) = list[str](), list[Any](), body, error["loc"]
    for part in path:
        there = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        if part in there:
            where, value = [*where, str(part)], value[part]
        elif error["type"] != "missing" or part != path[-1]:
            tried.append(part)
    return where + [str(path[-1])] * (error["type"] == "missing"), tuple(tried)


def fill_sampling(request: Any, trained: SamplingSettings) -> None:
    """Fill in training's values where the client left them open: nobody has chosen vLLM's own defaults.

    `request` is vLLM's own, parsed. Refused where it asks for an answer longer than in training, or beam search.
    """
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if getattr(request, name) is None:
            setattr(request, name, getattr(trained, name))
    for name in ("stop", "stop_token_ids"):
        chosen, defaults = getattr(request, name) or [], getattr(trained, name)
        chosen = [chosen] if isinstance(chosen, str) else chosen
        setattr(request, name, [*chosen, *(value for value in defaults if value not in chosen)])
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if (asked := vars(request).get(name) or 0) > trained.max_tokens:
            raise Refused(400, f"{name} is {short(asked)}, but answers are trained up to {trained.max_tokens} tokens")
    if getattr(request, "use_beam_search", False):
        raise Refused(400, "use_beam_search is set, but the policy is trained on what it samples: leave it out")


def check_unforced(request: Any) -> None:
    """Raise `Refused`, in the words of the client's own parameter, where it forces the form of the answer.

    `request` is vLLM's own, parsed, before vLLM has made a grammar of it.
    """
    choice = getattr(request, "tool_choice", None)
    asked = {"tool_choice": None if getattr(choice, "type", choice) in ("none", "auto") else choice}
    asked |= {name: getattr(request, name, None) for name in ("response_format", "structured_outputs")}
    for name in ("text", "output_config"):
        asked[f"{name}.format"] = getattr(getattr(request, name, None), "format", None)
    for name, value in asked.items():
        if value is not None and getattr(value, "type", None) != "text":
            value = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
            reason = "forces the answer's form, but the policy is trained on answers whose form is its own choice"
            raise Refused(400, f"{name} is {short(value)}: it {reason}; leave it out")


def take_prefix(body: Body, vocabulary: int) -> KnownPrefix | None:
    """Take the ids that the client wants to be kept out of the body, and give them with the messages they stand for.

    They are `required_prefix_token_ids`, up to the last answer (an empty list: none), or else `prompt_token_ids` and
    `generation_token_ids` of the last message that has any. Refused where they are not ids of this model.
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
    """The request's messages; none where they are something else, which vLLM will say."""
    messages = body.get("messages")
    return messages if isinstance(messages, list) and all(isinstance(m, dict) for m in messages) else []


def exact_prompt(prefix: KnownPrefix, tokenizer: Any, rendered: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Return the prompt rendered as `rendered`, with exact ids. Refused if they belong to another prompt."""
    try:
        return replace_prefix_tokens(tokenizer, prefix.ids, prefix.rendered, rendered, eos_token_ids)
    except ValueError as error:
        raise Refused(400, str(error)) from error


def prefix_request(body: Mapping[str, Any], messages: int) -> Body:
    """The request to /tokenize whose ids are those of the first messages, without the opening of an answer."""
    wanted = {name: body[name] for name in ("model", "tools", "chat_template", "add_special_tokens") if name in body}
    kwargs = {name: body[name] for name in ("reasoning_effort", "documents") if body.get(name) is not None}
    kwargs |= body.get("chat_template_kwargs") or {}
    first: Sequence[Any] = body["messages"][:messages]
    return wanted | {"messages": first, "add_generation_prompt": False, "chat_template_kwargs": kwargs}


class AnswerSender:
    """A sender of vLLM's answer to one call, which it completes; `kept` takes responses that others may continue."""

    def __init__(
        self, request: Request, send: Send, call: ServedCall, kept: StoredResponses, previous: str | None
    ) -> None:
        self._request = request
        self._send = send
        self._call = call
        self._kept = kept
        self._previous = previous
        self._path: str = request.scope["path"]
        self._start: Message = {}
        self._streams = False
        self._begun = False
        self._waiting = b""
        self._said: dict[int, dict[str, Any]] = {}
        self._blocks: list[dict[str, Any]] = []

    async def send(self, message: Message) -> None:
        """In the place of the server's `send`."""
        if message["type"] == "http.response.start":
            self._start = message
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            return
        self._waiting += message.get("body", b"")
        more = message.get("more_body", False)
        if self._streams and not self._begun:
            if self._call.refused is not None or self._waiting.startswith(_FAILED):
                return  # before anything was said, so the error is an answer of its own
            if self._path == RESPONSES and more and not self._call.taken:
                return  # it says that it begins before the request has been looked at
            await self._send(self._start)
            self._begun = True
        if self._streams:
            *events, self._waiting = self._waiting.split(b"\n\n") if more else (*self._waiting.split(b"\n\n"), b"")
            body = b"\n\n".join(map(self._event, events)) + b"\n\n" * (more and bool(events))
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def finish(self, error: Exception | None) -> None:
        """Send the answer, unless it was streamed; `error` is whatever the application raised after it had answered."""
        if not self._begun:
            await self._whole(error)(self._request.scope, self._request.receive, self._send)

    def _whole(self, error: Exception | None) -> Response:
        """vLLM's checks of a request stumble over some; errors before the engine answers mean a bad request."""
        status, refused = self._start.get("status", 500), self._call.refused
        if refused is not None and (status >= 400 or self._streams):
            return error_response(refused.status, str(refused))
        if self._streams and self._waiting.startswith(_FAILED):
            error_body = json.loads(self._waiting.partition(b"\n\n")[0].removeprefix(b"data: "))["error"]
            return error_response(error_body["code"], error_body["message"])
        if isinstance(error, RecursionError) and not self._call.taken:
            return error_response(400, _TOO_DEEP)
        if isinstance(error, STUMBLES) and not self._call.taken:
            return error_response(400, f"the request makes no sense to vLLM: {type(error).__name__}: {error}")
        if status == 400 and self._call.open_ended and b"max_tokens must be at least 1" in self._waiting:
            return error_response(400, "the prompt fills the context and leaves no room for an answer")
        if self._start and status >= 400:
            # 501 is vLLM's status for anything that this model or this server does not offer.
            return error_response(400 if status == 501 else status, _message_of(self._waiting))
        if status == 200 and self._waiting.startswith(b"{"):
            answer = json.loads(self._waiting)
            for choice in answer.get("choices", []):
                self._keep(choice["index"], choice.get("message"), choice.get("message", choice))
            if self._path in (RESPONSES, MESSAGES):
                self._complete_answer(answer)
            return as_json(status, answer)
        if not self._start:
            return error_response(500, "the request was not answered")
        answered = Response(self._waiting, status)
        answered.raw_headers = self._start["headers"]
        return answered

    def _keep(self, index: int, message: dict[str, Any] | None, place: dict[str, Any]) -> None:
        """Put a finished choice's ids and log-probabilities in their place, and remember a chat's message."""
        generation, conversation = self._call.generations.get(index), self._call.conversation
        if generation is None:
            return
        if self._call.messages is not None and conversation is not None:
            message = message or {"role": "assistant", "content": ""}
            conversation.history.record(self._call.messages, message, generation)
            if self._call.turns is not None and not message.get("content") and not message.get("tool_calls"):
                conversation.silent.add(as_key(self._call.turns))
        # JSON has no minus infinity; the number in its place is vLLM's own choice.
        logprobs = [max(logprob, -9999.0) for logprob in generation.logprobs]
        place.update(zip(CARRIED, (generation.prompt_ids, generation.token_ids, logprobs), strict=True))

    def _complete_answer(self, answer: dict[str, Any]) -> None:
        """As `_keep`, of another dialect's whole answer; a response is kept for those that continue it."""
        self._keep(0, said_in(self._path, answer), answer)
        if self._path == RESPONSES:
            answer |= {"previous_response_id": self._previous, "store": self._call.items is not None}
            if self._call.items is not None:
                conversation = self._call.conversation
                kept = self._kept if conversation is None else conversation.responses
                kept.keep(answer["id"], self._call.items + answer["output"])

    def _event(self, event: bytes) -> bytes:
        """One event of a stream: the answer's words are collected, and its end carries what whole answers carry."""
        kind, _, data = event.rpartition(b"data: ")
        if not data.startswith(b"{") or (self._path not in (RESPONSES, MESSAGES) and b'"choices"' not in data):
            return event
        chunk = json.loads(data)
        if self._path == MESSAGES:
            add_event(self._blocks, chunk)
            if chunk["type"] == "message_delta":
                self._keep(0, said_in(MESSAGES, {"content": self._blocks}), chunk)
        if self._path == RESPONSES and chunk["type"] == "response.completed":
            self._complete_answer(chunk["response"])
        if self._path in (RESPONSES, MESSAGES):
            return kind + b"data: " + json.dumps(chunk).encode()
        for choice in chunk["choices"]:
            message = self._said.setdefault(choice["index"], {"role": "assistant", "content": "", "tool_calls": []})
            _add_delta(message, choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._keep(choice["index"], message, choice.get("delta", choice))
        return b"data: " + json.dumps(chunk).encode()


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or []:
        while len(message["tool_calls"]) <= part["index"]:
            message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
        function = message["tool_calls"][part["index"]]["function"]
        for name in ("name", "arguments"):
            function[name] += (part.get("function") or {}).get(name) or ""


def _message_of(answer: bytes) -> str:
    """The message of an error that vLLM or its web framework has answered with."""
    try:
        body = json.loads(answer)
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")


def as_json(status: int, answer: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; Starlette's own refuses NaN, and characters that are half of a pair."""
    return Response(json.dumps(answer), status, headers, "application/json")


def error_response(status: int, text: str) -> Response:
    """An error in the form OpenAI's clients know, on one line of less than 300 characters.

    Where the request's body was not read to its end, the connection ends with it.
    """
    kind = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
    sentence = " ".join(text.split())
    sentence = sentence if len(sentence) < 300 else f"{sentence[:298]}…"
    error = {"message": sentence, "type": kind.get(status, "invalid_request_error"), "param": None, "code": status}
    headers = {"retry-after": "1"} if status == 503 else {"connection": "close"} if status in (408, 413) else {}
    return as_json(status, {"error": error}, headers)
