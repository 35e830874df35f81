"""What stands before vLLM's application: who may ask, for what, when, and how the answer is to be sampled."""

import hmac
import json
from typing import Any

from generation.engine.engine import VllmAsyncGenerationWorker
from generation.server.asgi import (
    App,
    Disconnected,
    Receive,
    Scope,
    Send,
    TooLarge,
    ask,
    header,
    is_loopback,
    named_host,
    read_body,
    replay,
    respond,
    with_length,
)
from generation.server.bodies import (
    Body,
    Limits,
    Response,
    find_exact,
    parse_body,
    readable_messages,
    send_error,
    take_prefix,
)
from generation.server.conversations import CURRENT, Call, Conversations, ExactIds, Refused, TooManyConversations
from generation.server.served_engine import check_ready
from generation.server.settings import ServerSettings

KEY_HEADER = "x-hotbunk-trajectory"
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
SERVED = (CHAT, COMPLETIONS, TOKENIZE, "/detokenize", "/v1/models", "/health", "/version", "/openapi.json")
PLACES = "/trajectories/"
"""Before the path of a request to one trajectory's own address, which names the trajectory beside its key."""


class Gate:
    """An ASGI application around vLLM's. `local`: the server listens on loopback."""

    def __init__(
        self,
        app: App,
        worker: VllmAsyncGenerationWorker,
        settings: ServerSettings,
        conversations: Conversations,
        limits: Limits,
        tokenizer: Any,
        local: bool,
    ) -> None:
        self._app, self._worker, self._settings, self._local = app, worker, settings, local
        self._conversations, self._limits, self._tokenizer = conversations, limits, tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            scope = self._allowed(scope)
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

    def _allowed(self, scope: Scope) -> Scope:
        """The request without its trajectory's address, once it is known that it may be made."""
        if self._local and (host := named_host(scope)) and not is_loopback(host):
            # A page whose name is made to resolve to 127.0.0.1 would otherwise read answers: DNS rebinding.
            raise Refused(403, f"this server listens on loopback, and is not {host[:80]!r}: ask localhost or 127.0.0.1")
        path, conversation = scope["path"], None
        if path.startswith(PLACES):
            place, _, rest = path.removeprefix(PLACES).partition("/")
            path, conversation = f"/{rest}", self._conversations.at(place)
            if conversation is None:
                raise Refused(404, "there is no such trajectory, or it has ended")
        if path not in SERVED:
            raise Refused(404, f"there is no {path[:80]} here; there is {', '.join(SERVED)}")
        own, token = self._settings.api_key, _token(scope)
        opened = self._conversations.get(token)
        if conversation is not None and not _same(token, conversation.key):
            conversation.lost_keys += scope["method"] == "POST"
            raise Refused(401, "the key of this trajectory was lost: send the api_key that came with this base_url")
        # The key of a header is the client's choice, which others might guess: it lets nobody in.
        known = own is None or _same(token, own) or (opened is not None and not opened.by_request)
        if not known and path != "/health":
            raise Refused(401, "the API key is missing, or is not this server's: send it as a bearer token")
        return {**scope, "path": path, "raw_path": path.encode()}

    def _call(self, scope: Scope) -> Call:
        """Under which trajectory a request for answers is captured: the one of its header, or of its bearer token."""
        token, key = _token(scope), header(scope, KEY_HEADER)
        conversation = self._conversations.get(key or token)
        if key and not self._settings.header_keys:
            raise Refused(400, f"this server takes no trajectories' keys in {KEY_HEADER}: leave it out")
        own = self._settings.api_key
        if key and own is not None and not _same(token, own) and token != key:
            raise Refused(403, f"a trajectory's key opens no others: leave {KEY_HEADER} out")
        if conversation is not None:
            return Call(conversation.sampling, conversation)
        if key:
            self._conversations.check_room(by_request=True)
        return Call(self._settings.sampling, opens=key)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["path"] in (CHAT, COMPLETIONS)
        call = self._call(scope) if generates else Call(None)
        if generates:
            check_ready(self._worker, call)
        limit, seconds = self._settings.max_body_bytes, self._settings.body_timeout_s
        try:
            raw = await read_body(scope, receive, limit, seconds)
        except TimeoutError as late:
            raise Refused(408, f"the request was not complete after {seconds:g} s") from late
        body = parse_body(raw)
        self._limits.check_sizes(body)
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
        if scope["path"] in (CHAT, TOKENIZE):
            call.exact = await self._exact(body, call)
        return json.dumps(body).encode()

    async def _exact(self, body: Body, call: Call) -> ExactIds | None:
        wanted = body.get("required_prefix_token_ids")
        given = take_prefix(body, self._limits.vocabulary)
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


def _same(token: str, key: str) -> bool:
    """Compared in a time that does not tell how much of it is right."""
    return hmac.compare_digest(token.encode(), key.encode())
