"""What is added to vLLM's responses: exact ids and log-probabilities beside the text; and what is remembered."""

import json
from typing import Any

from ..capture import Generation
from .asgi import Message, Send, respond
from .call import STUMBLES, Call

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
