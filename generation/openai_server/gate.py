"""What stands before vLLM's application: who may ask, for what, when, and how the answer is to be sampled."""

import hmac
import json
from typing import Any

from ..worker_async import VllmAsyncGenerationWorker
from .asgi import (
    App,
    Disconnected,
    Receive,
    Scope,
    Send,
    TooLarge,
    ask,
    header,
    read_body,
    replay,
    respond,
    with_length,
)
from .call import CURRENT, Call, ExactIds, Refused
from .conversations import Conversation, Conversations, TooManyConversations
from .requests import Body, fill_sampling, find_exact, parse_body, readable_messages, take_prefix
from .responses import Response, send_error
from .served_engine import check_ready
from .settings import ServerSettings

KEY_HEADER = "x-hotbunk-trajectory"
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
SERVED = (CHAT, COMPLETIONS, TOKENIZE, "/detokenize", "/v1/models", "/health", "/version", "/openapi.json")
LARGEST = 32 << 20  # bytes of a request


class Gate:
    """An ASGI application around vLLM's."""

    def __init__(
        self,
        app: App,
        worker: VllmAsyncGenerationWorker,
        settings: ServerSettings,
        conversations: Conversations,
        vocabulary: int,
        tokenizer: Any,
    ) -> None:
        self._app, self._worker, self._settings = app, worker, settings
        self._conversations, self._vocabulary, self._tokenizer = conversations, vocabulary, tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check_allowed(scope)
            if scope["method"] == "POST":
                await self._post(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refused as refused:
            await send_error(send, refused.status, str(refused))
        except TooLarge as error:
            await send_error(send, 413, str(error))
        except TooManyConversations as error:
            await send_error(send, 429, str(error))
        except Disconnected:
            return

    def _check_allowed(self, scope: Scope) -> None:
        if scope["path"] not in SERVED:
            raise Refused(404, f"there is no {scope['path'][:80]} here; there is {', '.join(SERVED)}")
        own = self._settings.api_key
        if own is None or scope["path"] == "/health":
            return
        token = _token(scope)
        if not hmac.compare_digest(token.encode(), own.encode()) and token not in self._conversations:
            raise Refused(401, "the API key is missing, or is not this server's: send it as a bearer token")

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["path"] in (CHAT, COMPLETIONS)
        conversation = self._conversation(scope) if generates else None
        call = Call(self._settings.sampling if conversation is None else conversation.sampling, conversation)
        if generates:
            check_ready(self._worker, call)
        body = parse_body(await read_body(receive, LARGEST))
        response = Response(send, call, readable_messages(body) if scope["path"] == CHAT else None)
        raw = await self._prepared(scope, call, body)
        if scope["path"] == TOKENIZE and call.exact is not None:
            await self._tokenize(send, call.exact, body)
            return
        token = CURRENT.set(call if generates else None)
        error = None
        try:
            await self._app(with_length(scope, raw), replay(raw, receive), response.send)
        except Exception as raised:  # after an answer has been made of it
            error = raised
        finally:
            CURRENT.reset(token)
        await response.finish(error)

    async def _prepared(self, scope: Scope, call: Call, body: Body) -> bytes:
        """The body for vLLM; what only we understand is taken out of it, and what it must not decide is put in."""
        if scope["path"] in (CHAT, COMPLETIONS):
            call.open_ended = body.get("max_tokens") is None and body.get("max_completion_tokens") is None
            if call.sampling is not None:
                fill_sampling(body, call.sampling)
            if isinstance(body.get("n"), int) and body["n"] > self._settings.max_choices:
                raise Refused(400, f"n is {body['n']}, but must be at most {self._settings.max_choices}")
        if scope["path"] in (CHAT, TOKENIZE):
            call.exact = await self._exact(body, call)
        return json.dumps(body).encode()

    def _conversation(self, scope: Scope) -> Conversation | None:
        """The one that the header names, which opens it, or that the bearer token is the key of."""
        if key := header(scope, KEY_HEADER):
            if key not in self._conversations:
                self._conversations.open(key, sampling=self._settings.sampling)
            return self._conversations.get(key)
        return self._conversations.get(_token(scope))

    async def _exact(self, body: Body, call: Call) -> ExactIds | None:
        wanted = body.get("required_prefix_token_ids")
        given = take_prefix(body, self._vocabulary)
        if self._settings.keep_exact_ids:
            return await find_exact(body, call, given, self._render)
        if wanted:
            raise Refused(400, "required_prefix_token_ids is set, but this server does not keep exact ids")
        return None

    async def _render(self, request: Body) -> list[int]:
        status, answer = await ask(self._app, TOKENIZE, request)
        if status != 200:
            raise Refused(status, answer["error"]["message"])
        tokens: list[int] = answer["tokens"]
        return tokens

    async def _tokenize(self, send: Send, exact: ExactIds, body: Body) -> None:
        """As vLLM's, with exact ids."""
        status, answer = await ask(self._app, TOKENIZE, body)
        if status == 200:
            ids = exact.prompt(self._tokenizer, answer["tokens"], self._settings.eos_token_ids)
            answer |= {"tokens": ids, "count": len(ids)}
            if answer.get("token_strs"):
                answer["token_strs"] = self._tokenizer.convert_ids_to_tokens(ids)
        await respond(send, status, answer)


def _token(scope: Scope) -> str:
    kind, _, token = header(scope, "authorization").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
