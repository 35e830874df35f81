"""What is added to vLLM's responses: exact ids and log-probabilities beside the text; and what is remembered."""

import json
from typing import Any

from ..capture import Generation
from .asgi import Message, Send, respond
from .call import Call

_STUMBLES = (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError)

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
        self._streams = False
        self._waiting = b""
        self._said: dict[int, dict[str, Any]] = {}

    async def send(self, message: Message) -> None:
        """In the place of the server's `send`."""
        if message["type"] == "http.response.start":
            self._start = message
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            if self._streams:
                await self._send(message)
            return
        self._waiting += message.get("body", b"")
        more = message.get("more_body", False)
        if self._streams:
            *events, self._waiting = self._waiting.split(b"\n\n") if more else (*self._waiting.split(b"\n\n"), b"")
            body = b"\n\n".join(map(self._event, events)) + b"\n\n" * (more and bool(events))
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def finish(self, error: Exception | None) -> None:
        """Send what has not been streamed. `error` is what the application raised after it had answered, if anything.

        vLLM's own checks of a request stumble over some; what they raise before the engine is asked is a bad request.
        """
        if self._streams:
            return
        status, refused = self._start.get("status", 500), self._call.refused
        if refused is not None and status >= 400:
            await send_error(self._send, refused.status, str(refused))
        elif isinstance(error, _STUMBLES) and self._call.choices == 0:
            await send_error(self._send, 400, f"the request makes no sense to vLLM: {type(error).__name__}: {error}")
        elif status == 400 and self._call.open_ended and b"max_tokens must be at least 1" in self._waiting:
            await send_error(self._send, 400, "the prompt fills the context and leaves no room for an answer")
        elif status == 501:  # vLLM's word for what this model or this server does not offer
            await send_error(self._send, 400, json.loads(self._waiting)["error"]["message"])
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


async def send_error(send: Send, status: int, sentence: str) -> None:
    """An error in the form OpenAI's clients know."""
    kind = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
    error = {"message": sentence, "type": kind.get(status, "invalid_request_error"), "param": None, "code": status}
    extra = {"retry-after": "1"} if status == 503 else {}
    await respond(send, status, {"error": error}, extra)
