"""What is read from a request's body, and what is written into it, before vLLM sees it.

What is added to vLLM's responses: exact ids and log-probabilities beside the text; and what is remembered.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation, KnownPrefix
from generation.server.asgi import Message, Send, respond
from generation.server.conversations import STUMBLES, Call, ExactIds, Refused

_FAILED = b'data: {"error"'

LONGEST = 300
"""Characters of an error's message, at most one less."""

LOWEST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON does not have (vLLM's own choice)."""


def carried(generation: Generation) -> dict[str, Any]:
    """What a client finds beside an answer, and may send back with it."""
    return {
        "prompt_token_ids": generation.prompt_ids,
        "generation_token_ids": generation.token_ids,
        "generation_log_probs": [max(logprob, LOWEST) for logprob in generation.logprobs],
    }


class Response:
    """Sends on what vLLM answers to one call, completed. `messages` are those of a chat, None elsewhere."""

    def __init__(self, send: Send, call: Call, messages: list[Any] | None) -> None:
        self._send, self._call, self._messages = send, call, messages
        self._start: Message = {}
        self._streams = self._begun = False
        self._waiting = b""
        self._said: dict[int, dict[str, Any]] = {}

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
                return  # before a word was said, so it need not be told within the stream
            await self._send(self._start)
            self._begun = True
        if self._streams:
            *events, self._waiting = self._waiting.split(b"\n\n") if more else (*self._waiting.split(b"\n\n"), b"")
            body = b"\n\n".join(map(self._event, events)) + b"\n\n" * (more and bool(events))
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def finish(self, error: Exception | None) -> None:
        """Send what has not been streamed. `error` is what the application raised after it had answered, if anything.

        vLLM's own checks of a request stumble over some; what they raise before the engine answers is a bad request.
        """
        if self._begun:
            return
        status, refused = self._start.get("status", 500), self._call.refused
        if refused is not None and (status >= 400 or self._streams):
            await send_error(self._send, refused.status, str(refused))
        elif self._streams and self._waiting.startswith(_FAILED):
            told = json.loads(self._waiting.partition(b"\n\n")[0].removeprefix(b"data: "))["error"]
            await send_error(self._send, told["code"], told["message"])
        elif isinstance(error, STUMBLES) and not self._call.taken:
            await send_error(self._send, 400, f"the request makes no sense to vLLM: {type(error).__name__}: {error}")
        elif status == 400 and self._call.open_ended and b"max_tokens must be at least 1" in self._waiting:
            await send_error(self._send, 400, "the prompt fills the context and leaves no room for an answer")
        elif self._start and status >= 400:
            # 501 is vLLM's word for what this model or this server does not offer.
            await send_error(self._send, 400 if status == 501 else status, _said(self._waiting))
        elif status == 200 and self._waiting.startswith(b"{"):
            await respond(self._send, status, self._completed(json.loads(self._waiting)))
        elif self._start:
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": self._waiting})
        else:
            await send_error(self._send, 500, "the request was not answered")

    def _completed(self, answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer.get("choices", []):
            generation = self._call.generations.get(choice["index"])
            if generation is None:
                continue
            self._record(choice.get("message"), generation)
            choice.get("message", choice).update(carried(generation))
        return answer

    def _record(self, message: dict[str, Any] | None, generation: Generation) -> None:
        if message is not None and self._messages is not None and self._call.conversation is not None:
            self._call.conversation.history.record(self._messages, message, generation)

    def _event(self, event: bytes) -> bytes:
        """One event of a stream: what an answer says is collected, and its end carries what whole answers carry."""
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{") or b'"choices"' not in data:
            return event
        chunk = json.loads(data)
        for choice in chunk["choices"]:
            said = self._said.setdefault(choice["index"], {"role": "assistant", "content": "", "tool_calls": []})
            _add_delta(said, choice.get("delta") or {})
            generation = self._call.generations.get(choice["index"])
            if generation is not None and choice.get("finish_reason") is not None:
                self._record(said, generation)
                choice.get("delta", choice).update(carried(generation))
        return b"data: " + json.dumps(chunk).encode()


def _add_delta(said: dict[str, Any], delta: dict[str, Any]) -> None:
    said["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or []:
        while len(said["tool_calls"]) <= part["index"]:
            said["tool_calls"].append({"function": {"name": "", "arguments": ""}})
        function = said["tool_calls"][part["index"]]["function"]
        for name in ("name", "arguments"):
            function[name] += (part.get("function") or {}).get(name) or ""


def _said(answer: bytes) -> str:
    """The message of an error that vLLM or its web framework has answered with."""
    try:
        found = json.loads(answer)
        return str(found["error"]["message"] if "error" in found else found["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")


def error_answer(status: int, text: str) -> dict[str, Any]:
    """An error in the form OpenAI's clients know, on one line of less than 300 characters."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
    sentence = " ".join(text.split())
    sentence = sentence if len(sentence) < LONGEST else f"{sentence[: LONGEST - 2]}…"
    error = {"message": sentence, "type": kind.get(status, "invalid_request_error"), "param": None, "code": status}
    return {"error": error}


async def send_error(send: Send, status: int, text: str) -> None:
    """Answer with an error. Where the request's body was not read to its end, the connection ends with it."""
    extra = {"retry-after": "1"} if status == 503 else {"connection": "close"} if status in (408, 413) else {}
    await respond(send, status, error_answer(status, text), extra)


Body = dict[str, Any]
Render = Callable[[Body], Awaitable[list[int]]]
"""The ids of the body of a request to /tokenize."""

CARRIED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What answers carry beside their text, and what a client may send back with them."""

LARGEST = 4096
"""The most entries of a list whose entries take time: messages are tried against many forms, words are tokenized."""


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


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for, beyond what vLLM limits itself; in answers, or in tokens."""

    choices: int
    answers: int
    context: int
    vocabulary: int

    def check_sizes(self, body: Body) -> None:
        """Refuse lists longer than any sensible request's, before time goes into what is in them.

        Raises:
            Refused: naming the field.
        """
        most = {"messages": min(self.context, LARGEST), "tools": min(self.context, LARGEST), "bad_words": LARGEST}
        most |= dict.fromkeys(("prompt", "tokens"), self.context)
        most |= dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logit_bias"), self.vocabulary)
        for name, limit in most.items():
            prompts = body[name] if name == "prompt" and isinstance(body.get(name), list) else []
            for value in (body.get(name), *prompts):
                if isinstance(value, list | dict) and len(value) > limit:
                    raise Refused(400, f"{name} has {len(value)} entries, but may have at most {limit}")

    def check(self, request: Any) -> None:
        """Refuse what asks for too much. `request` is vLLM's own, parsed: "129" and 129.0 have become 129.

        Raises:
            Refused: naming the field.
        """
        n, prompt = request.n or 1, getattr(request, "prompt", None)
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        if n > self.choices:
            raise Refused(400, f"n is {short(n)}, but must be at most {self.choices}")
        if n * prompts > self.answers:
            raise Refused(400, f"{prompts} prompts with n {n} ask for more than {self.answers} answers: ask in parts")
        for name, value in vars(request).items():
            if isinstance(value, int) and abs(value) >= 2**63:  # more than messages to the engine hold
                raise Refused(400, f"{name} is {short(value)}, which is out of all bounds")
        if (best := (request.model_extra or {}).get("best_of")) is not None and best != n:
            raise Refused(400, f"best_of is {short(best)}, but this server picks none from several: leave it out")


def short(value: Any) -> str:
    """The beginning of what Python writes for it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def sentence_of(errors: Sequence[Mapping[str, Any]], body: Any) -> str:
    """What pydantic finds wrong with a request's body first, in a sentence that begins with the field's name."""
    where, value, (_, *path) = list[str](), body, errors[0]["loc"]
    for part in path:  # beside fields and places in lists, it names what pydantic has tried
        there = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        if part in there:
            where, value = [*where, str(part)], value[part]
    if errors[0]["type"] == "missing":
        where.append(str(path[-1]))
    return f"{'.'.join(where) or 'the request'}: {errors[0]['msg']}"


def fill_sampling(request: Any, trained: SamplingSettings) -> None:
    """Write what the policy is trained with where the client left it open: vLLM's own defaults are nobody's choice.

    `request` is vLLM's own, parsed.

    Raises:
        Refused: an answer longer than in training is asked for, or beam search.
    """
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if getattr(request, name) is None:
            setattr(request, name, getattr(trained, name))
    for name in ("stop", "stop_token_ids"):
        given, own = getattr(request, name) or [], getattr(trained, name)
        given = [given] if isinstance(given, str) else given
        setattr(request, name, [*given, *(value for value in own if value not in given)])
    for name in ("max_tokens", "max_completion_tokens"):
        if (asked := vars(request).get(name) or 0) > trained.max_tokens:
            raise Refused(400, f"{name} is {short(asked)}, but answers are trained up to {trained.max_tokens} tokens")
    if request.use_beam_search:
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
