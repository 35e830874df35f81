"""Checks and completes the bodies of requests before vLLM sees them, and adds exact ids to vLLM's
answers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from generation.engine.sampling import SamplingSettings
from generation.engine.vllm_differences import ENDS_OF_RESPONSES
from generation.exact_ids import KnownPrefix, replace_prefix_tokens
from generation.server.conversations import VLLM_ERRORS, Refused, ServedCall, StoredResponses, as_key
from generation.server.dialects import MESSAGES, RESPONSES, add_event, message_in

Body = dict[str, Any]
EXACT_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The fields with exact ids that answers carry beside their text, and that a client may send
back.
"""

_FAILED = b'data: {"error"'
_TOO_DEEP = "the request is nested too deeply"

LARGEST = 4096
"""The most entries of a list that takes time: messages are validated against many types, and words
are tokenized.
"""


def parse_body(raw: bytes) -> Body:
    """Parse a request's body. Raises Refused where it is not a JSON object, is nested too deeply,
    or holds half of a surrogate pair, which is not text.
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
    """The limits of one request that vLLM does not have: `choices` and `answers` count answers, the
    others tokens.
    """

    choices: int
    answers: int
    context: int
    vocabulary: int

    def check_sizes(self, body: Body) -> None:
        """Raise `Refused` for lists longer than in any sensible request, before their entries take
        time.
        """
        limits = dict.fromkeys(("messages", "input", "tools"), min(self.context, LARGEST)) | {
            "bad_words": LARGEST
        }
        limits |= dict.fromkeys(("prompt", "tokens"), self.context)
        limits |= dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logit_bias"), self.vocabulary)
        for name, limit in limits.items():
            prompts = body[name] if name == "prompt" and isinstance(body.get(name), list) else []
            for value in (body.get(name), *prompts):
                if isinstance(value, list | dict) and len(value) > limit:
                    raise Refused(400, f"{name} has {len(value)} entries, but may have at most {limit}")

    def check(self, request: Any) -> None:
        """Raise `Refused` where a request asks for too many answers, or has a number that is too
        large.

        `request` is parsed by vLLM already, so that "129" and 129.0 have become 129.
        """
        n = getattr(request, "n", None) or 1
        prompt = getattr(request, "prompt", None)
        prompts = 1
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompts = len(prompt)
        if n > self.choices:
            raise Refused(400, f"n is {short(n)}, but must be at most {self.choices}")
        if n * prompts > self.answers:
            raise Refused(
                400,
                f"{prompts} prompts with n {n} ask for more than {self.answers} answers: split them up",
            )
        for name, value in vars(request).items():
            if isinstance(value, int) and abs(value) >= 2**63:
                # Messages to the engine hold integers of 64 bits
                raise Refused(400, f"{name} is {short(value)}, which does not fit in 64 bits")
        if (best := (request.model_extra or {}).get("best_of")) is not None and best != n:
            raise Refused(
                400, f"best_of is {short(best)}, but this server returns every sample: leave it out"
            )


def short(value: Any) -> str:
    """Return the first 60 characters of a value's repr."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def sentence_of(errors: Sequence[Mapping[str, Any]], body: Any) -> str:
    """Return pydantic's errors of a request's body as one sentence, which begins with the field's
    name.

    A value that may have several types has errors for each of them. The sentence is about the type
    that the value comes closest to: its `type` field matches, it fits to the greatest depth, and it
    has the fewest errors.
    """
    by_types: dict[tuple[Any, ...], list[tuple[list[str], Mapping[str, Any]]]] = {}
    for error in errors:
        where, types = _locate(error, body)
        by_types.setdefault(types, []).append((where, error))

    def closeness(errors: list[tuple[list[str], Mapping[str, Any]]]) -> tuple[bool, int, int]:
        other_type = any(
            error["type"] == "literal_error" and where[-1:] == ["type"] for where, error in errors
        )
        return (
            not other_type,
            max(len(where) - (error["type"] == "missing") for where, error in errors),
            -len(errors),
        )

    where, error = max(by_types.values(), key=closeness)[0]
    return f"{'.'.join(where) or 'the request'}: {error['msg']}"


def _locate(error: Mapping[str, Any], body: Any) -> tuple[list[str], tuple[Any, ...]]:
    """Return the path in the body of the value that an error is about, and the types that pydantic
    tried for it.
    """
    where = list[str]()
    types = list[Any]()
    value = body
    (_, *path) = error["loc"]
    for part in path:
        keys: Any = ()
        if isinstance(value, list):
            keys = range(len(value))
        elif isinstance(value, dict):
            keys = value
        if part in keys:
            where = [*where, str(part)]
            value = value[part]
        elif error["type"] != "missing" or part != path[-1]:
            types.append(part)
    if error["type"] == "missing":
        where = [*where, str(path[-1])]
    return where, tuple(types)


def fill_sampling(request: Any, trained: SamplingSettings) -> None:
    """Fill in training's sampling settings where the client left them open, instead of vLLM's
    defaults.

    `request` is parsed by vLLM. Raises Refused where it asks for a longer answer than in training,
    or for beam search.
    """
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if getattr(request, name, None) is None:
            setattr(request, name, getattr(trained, name))
    for name in ("stop", "stop_token_ids"):
        chosen = getattr(request, name, None) or []
        defaults = getattr(trained, name)
        chosen = [chosen] if isinstance(chosen, str) else chosen
        setattr(request, name, [*chosen, *(value for value in defaults if value not in chosen)])
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if (asked := vars(request).get(name) or 0) > trained.max_tokens:
            raise Refused(
                400,
                f"{name} is {short(asked)}, but answers are trained up to {trained.max_tokens} tokens",
            )
    if getattr(request, "use_beam_search", False):
        raise Refused(
            400, "use_beam_search is set, but the policy is trained on sampled answers: leave it out"
        )


def check_unforced(request: Any) -> None:
    """Raise `Refused` where a parameter forces the form of the answer; the error names it as the
    client does.

    `request` is parsed by vLLM, which has not yet made a grammar of such parameters.
    """
    choice = getattr(request, "tool_choice", None)
    asked = {"tool_choice": None if getattr(choice, "type", choice) in ("none", "auto") else choice}
    asked |= {name: getattr(request, name, None) for name in ("response_format", "structured_outputs")}
    for name in ("text", "output_config"):
        asked[f"{name}.format"] = getattr(getattr(request, name, None), "format", None)
    for name, value in asked.items():
        if value is not None and getattr(value, "type", None) != "text":
            value = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
            reason = (
                "forces the answer's form, but the policy is trained on answers whose form it has "
                "chosen itself"
            )
            raise Refused(400, f"{name} is {short(value)}: it {reason}; leave it out")


def take_prefix(body: Body, vocabulary: int) -> KnownPrefix | None:
    """Remove from a body the ids that the client wants to keep, and return them; None where there
    are none.

    They are `required_prefix_token_ids`, which stand for the messages up to the last answer, or
    else `prompt_token_ids` and `generation_token_ids` of the last message that has any. An empty
    list means that no ids are to be kept. Raises Refused where they are not ids of this model.
    """
    messages = readable_messages(body)
    required = body.pop("required_prefix_token_ids", None)
    carried = []
    for i, message in enumerate(messages):
        carried.append((i, [message.pop(name, None) for name in EXACT_FIELDS]))
    if required is not None and messages:
        last = max(
            (i + 1 for i, m in enumerate(messages) if m.get("role") == "assistant"),
            default=len(messages),
        )
        ids = _ids("required_prefix_token_ids", required, vocabulary)
        return KnownPrefix(ids, last) if ids else None
    for i, (prompt, answer, _) in reversed(carried):
        if prompt is not None:
            where = f"messages[{i}]"
            ids = _ids(f"{where}.prompt_token_ids", prompt, vocabulary)
            return KnownPrefix(
                ids + _ids(f"{where}.generation_token_ids", answer or [], vocabulary), i + 1
            )
    return None


def _ids(name: str, value: Any, vocabulary: int) -> list[int]:
    if isinstance(value, list) and all(
        type(token) is int and 0 <= token < vocabulary for token in value
    ):
        return value
    raise Refused(400, f"{name} must be a list of token ids from 0 to {vocabulary - 1}")


def readable_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the request's messages, or an empty list where they are not readable, which vLLM will
    report.
    """
    messages = body.get("messages")
    return messages if isinstance(messages, list) and all(isinstance(m, dict) for m in messages) else []


def exact_prompt(
    prefix: KnownPrefix, tokenizer: Any, rendered: list[int], eos_token_ids: Sequence[int]
) -> list[int]:
    """Return the ids of a rendered prompt, beginning with exact ids. Raises Refused if those are of
    another prompt.
    """
    try:
        return replace_prefix_tokens(tokenizer, prefix.ids, prefix.rendered, rendered, eos_token_ids)
    except ValueError as error:
        raise Refused(400, str(error)) from error


def prefix_request(body: Mapping[str, Any], messages: int) -> Body:
    """Return the request that has /tokenize render the first messages, without the opening of an
    answer.
    """
    wanted = {
        name: body[name]
        for name in ("model", "tools", "chat_template", "add_special_tokens")
        if name in body
    }
    kwargs = {
        name: body[name] for name in ("reasoning_effort", "documents") if body.get(name) is not None
    }
    kwargs |= body.get("chat_template_kwargs") or {}
    first: Sequence[Any] = body["messages"][:messages]
    return wanted | {"messages": first, "add_generation_prompt": False, "chat_template_kwargs": kwargs}


class AnswerSender:
    """Completes vLLM's answer to one call, and sends it. `stored` has the responses that later
    requests continue.
    """

    def __init__(
        self,
        request: Request,
        send: Send,
        call: ServedCall,
        stored: StoredResponses,
        previous: str | None,
    ) -> None:
        self._request = request
        self._send = send
        self._call = call
        self._stored = stored
        self._previous = previous
        self._path: str = request.scope["path"]
        self._start: Message = {}
        self._streams = False
        self._begun = False
        self._waiting = b""
        self._messages: dict[int, dict[str, Any]] = {}
        self._blocks: list[dict[str, Any]] = []

    async def send(self, message: Message) -> None:
        """Take one message of vLLM's application, in place of the server's `send`."""
        if message["type"] == "http.response.start":
            self._start = message
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            return
        self._waiting += message.get("body", b"")
        more = message.get("more_body", False)
        if self._streams and not self._begun:
            if self._call.refused is not None or self._waiting.startswith(_FAILED):
                # Nothing was sent yet, so `finish` can send the error as a response with its status
                return
            if self._path == RESPONSES and more and not self._call.taken:
                # vLLM sends the first events of a response before the engine has accepted the
                # request
                return
            await self._send(self._start)
            self._begun = True
        if self._streams:
            events = self._waiting.split(b"\n\n")
            self._waiting = events.pop() if more else b""
            body = b"\n\n".join(map(self._event, events))
            if more and events:
                body += b"\n\n"
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def finish(self, error: Exception | None) -> None:
        """Send the answer, unless it was streamed; `error` is what the application raised after it
        had answered.
        """
        if not self._begun:
            await self._response(error)(self._request.scope, self._request.receive, self._send)

    def _response(self, error: Exception | None) -> Response:
        """Return the response to send. vLLM's own checks crash on some requests, so an error that
        it raises before the engine has begun to answer is reported as a bad request.
        """
        status = self._start.get("status", 500)
        refused = self._call.refused
        if refused is not None and (status >= 400 or self._streams):
            return error_response(refused.status, str(refused))
        if self._streams and self._waiting.startswith(_FAILED):
            error_body = json.loads(self._waiting.partition(b"\n\n")[0].removeprefix(b"data: "))["error"]
            return error_response(error_body["code"], error_body["message"])
        if isinstance(error, RecursionError) and not self._call.taken:
            return error_response(400, _TOO_DEEP)
        if isinstance(error, VLLM_ERRORS) and not self._call.taken:
            return error_response(400, f"vLLM cannot read the request: {type(error).__name__}: {error}")
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
            return error_response(500, "vLLM has not answered the request")
        answered = Response(self._waiting, status)
        answered.raw_headers = self._start["headers"]
        return answered

    def _keep(self, index: int, message: dict[str, Any] | None, choice: dict[str, Any]) -> None:
        """Add a finished choice's ids and log-probabilities to `choice`, and record a chat's
        message in the history.
        """
        generation = self._call.generations.get(index)
        conversation = self._call.conversation
        if generation is None:
            return
        if self._call.messages is not None and conversation is not None:
            message = message or {"role": "assistant", "content": ""}
            conversation.history.record(self._call.messages, message, generation)
            if (
                self._call.turns is not None
                and not message.get("content")
                and not message.get("tool_calls")
            ):
                conversation.answered_empty.add(as_key(self._call.turns))
        # JSON has no minus infinity, which vLLM writes as -9999.0, too.
        logprobs = [max(logprob, -9999.0) for logprob in generation.logprobs]
        choice.update(
            zip(EXACT_FIELDS, (generation.prompt_ids, generation.token_ids, logprobs), strict=True)
        )

    def _complete_answer(self, answer: dict[str, Any]) -> None:
        """Add ids to a complete answer of another dialect; a response is stored for requests that
        continue it.
        """
        self._keep(0, message_in(self._path, answer), answer)
        if self._path == RESPONSES:
            answer |= {"previous_response_id": self._previous, "store": self._call.items is not None}
            if self._call.items is not None:
                conversation = self._call.conversation
                stored = self._stored if conversation is None else conversation.responses
                stored.keep(answer["id"], self._call.items + answer["output"])

    def _event(self, event: bytes) -> bytes:
        """Return one event of a stream. The text is collected, so that the last event can carry
        ids, as answers do.
        """
        kind, _, data = event.rpartition(b"data: ")
        if not data.startswith(b"{") or (
            self._path not in (RESPONSES, MESSAGES) and b'"choices"' not in data
        ):
            return event
        chunk = json.loads(data)
        if self._path == MESSAGES:
            add_event(self._blocks, chunk)
            if chunk["type"] == "message_delta":
                self._keep(0, message_in(MESSAGES, {"content": self._blocks}), chunk)
        if self._path == RESPONSES and chunk["type"] in ENDS_OF_RESPONSES:
            self._complete_answer(chunk["response"])
        if self._path in (RESPONSES, MESSAGES):
            return kind + b"data: " + json.dumps(chunk).encode()
        for choice in chunk["choices"]:
            empty: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
            message = self._messages.setdefault(choice["index"], empty)
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
    """Return the message in an error response of vLLM or of its web framework."""
    try:
        body = json.loads(answer)
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")


def as_json(status: int, answer: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; Starlette's own class refuses NaN and halves of surrogate pairs."""
    return Response(json.dumps(answer), status, headers, "application/json")


def error_response(status: int, text: str) -> Response:
    """Return an error in the form that OpenAI's clients expect, on one line of less than 300
    characters.

    A status for a body that was not read to its end also closes the connection.
    """
    kind = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
    sentence = " ".join(text.split())
    sentence = sentence if len(sentence) < 300 else f"{sentence[:298]}…"
    error = {
        "message": sentence,
        "type": kind.get(status, "invalid_request_error"),
        "param": None,
        "code": status,
    }
    headers = {}
    if status == 503:
        headers["retry-after"] = "1"
    elif status in (408, 413):
        headers["connection"] = "close"
    return as_json(status, {"error": error}, headers)
