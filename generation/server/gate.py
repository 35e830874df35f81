"""The gate in front of vLLM's web application. It authenticates requests, checks them, fills in
what training requires of their sampling, and reports metrics.
"""

import asyncio
import hmac
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from generation.engine.engine import Engine
from generation.engine.lifecycle import EngineStateError
from generation.engine.logits import REQUESTED, requested
from generation.exact_ids import KnownPrefix
from generation.loopback import foreign_host
from generation.server import bodies
from generation.server.bodies import AnswerSender, Body, Limits
from generation.server.conversations import (
    COUNTERS,
    CURRENT,
    VLLM_ERRORS,
    Conversations,
    Refused,
    ServedCall,
    ServerSettings,
)
from generation.server.dialects import MESSAGES, RESPONSES
from generation.server.served_engine import check_ready

KEY_HEADER = "x-hotbunk-trajectory"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
MODELS = "/v1/models"
METRICS = "/metrics"
ANSWERING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
VLLM_PATHS = (
    *(*ANSWERING, f"{MESSAGES}/count_tokens", TOKENIZE, DETOKENIZE, MODELS),
    *("/health", "/version", "/openapi.json"),
)
SERVED = (*VLLM_PATHS, f"{MODELS}/MODEL", METRICS)
TRAJECTORY_PATH = "/trajectories/"
"""The path prefix of trajectories' own addresses; the trajectory's `slug` follows it."""


@dataclass(eq=False)
class Gate:
    """The web application (ASGI) that the server runs. It passes requests on to vLLM's application,
    `app`.

    `local` is True where the server listens on loopback. `requests` counts answered requests by
    path and status.
    """

    app: ASGIApp
    worker: Engine
    settings: ServerSettings
    conversations: Conversations
    limits: Limits
    tokenizer: Any
    local: bool
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; close a websocket at once. A refused request is answered with its
        status and the reason.
        """
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.requests[path if path in VLLM_PATHS else "other", message["status"]] += 1
            await send(message)

        try:
            path = self._path(Request(scope))
            request = Request({**scope, "path": path, "raw_path": path.encode()}, receive)
            if path not in VLLM_PATHS:
                await (await self._answer(request))(request.scope, receive, counted)
            elif request.method == "POST":
                await self._post(request, counted)
            else:
                await self.app(request.scope, receive, counted)
        except Refused as refused:
            await bodies.error_response(refused.status, str(refused))(scope, receive, counted)
        except ClientDisconnect:
            return

    def _path(self, request: Request) -> str:
        """Check that a request is allowed. Return its path, without the prefix of a trajectory's
        own address.
        """
        if self.local and (name := foreign_host(request.headers.get("host", ""))):
            raise Refused(
                403,
                f"this server listens on loopback, and is not {name[:80]!r}: use localhost or 127.0.0.1",
            )
        path = request.scope["path"]
        conversation = None
        if path.startswith(TRAJECTORY_PATH):
            slug, _, rest = path.removeprefix(TRAJECTORY_PATH).partition("/")
            path = f"/{rest}"
            conversation = self.conversations.by_slug.get(slug)
            if conversation is None:
                raise Refused(404, "there is no such trajectory, or it has ended")
        # Anthropic's clients add /v1 to a base URL that ends with it
        path = path.replace("/v1/v1/", "/v1/", 1)
        if path not in (*VLLM_PATHS, METRICS) and not path.startswith(f"{MODELS}/"):
            raise Refused(404, f"there is no {path[:80]} on this server, which has {', '.join(SERVED)}")
        api_key = self.settings.api_key
        token = _token(request)
        opened = self.conversations.get(token)
        if conversation is not None and not _equal(token, conversation.key):
            for counts in (conversation.counts, self.conversations.counts):
                counts["lost_keys"] += request.method == "POST"
            raise Refused(
                401, "the key of this trajectory was lost: send the api_key that came with this base_url"
            )
        # Clients choose the keys that they send in the header, so others might guess them: such
        # keys are not trusted. Metrics are about all trajectories, so no trajectory's key is enough
        # for them.
        trusted = opened is not None and not opened.by_request and path != METRICS
        authorised = api_key is None or _equal(token, api_key) or trusted
        if not authorised and path != "/health":
            raise Refused(
                401,
                "the API key is missing, or is not this server's: send the right one as a bearer token",
            )
        return path

    def _call(self, request: Request) -> ServedCall:
        """Return the state of a request that asks for answers. It belongs to the trajectory whose
        key is in the header `x-hotbunk-trajectory` or is the bearer token. Raises Refused where a
        key may not be used.
        """
        token = _token(request)
        key = request.headers.get(KEY_HEADER, "")
        api_key = self.settings.api_key
        conversation = self.conversations.get(key or token)
        if key and not self.settings.header_keys:
            raise Refused(
                400, f"this server takes no trajectory keys in the header {KEY_HEADER}: leave it out"
            )
        if key and api_key is not None and not _equal(token, api_key) and token != key:
            raise Refused(
                403, f"a trajectory's key cannot open another trajectory: leave {KEY_HEADER} out"
            )
        if conversation is not None:
            return ServedCall(conversation.sampling, conversation, totals=self.conversations.counts)
        if key:
            self.conversations.check_room(by_request=True)
        return ServedCall(self.settings.sampling, opens=key, totals=self.conversations.counts)

    async def _post(self, request: Request, send: Send) -> None:
        """Check a request's body and fill in missing fields, pass it to vLLM, and send vLLM's
        answer with the fields that this server adds.
        """
        path = request.scope["path"]
        call = ServedCall(None)
        if generates := path in ANSWERING:
            call = self._call(request)
            check_ready(self.worker, call)
        body = bodies.parse_body(await self._read(request))
        self.limits.check_sizes(body)
        if generates and (named := body.pop(REQUESTED, None)) is not None:
            try:
                call.processors = requested(named, self.worker.settings.extra)
            except ValueError as unknown:
                raise Refused(400, str(unknown)) from unknown
        lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        call.open_ended = all(body.get(name) is None for name in lengths)
        stored = (call.conversation or self.conversations).responses
        previous = body.get("previous_response_id") if path == RESPONSES else None
        items = stored.full_input(body) if path == RESPONSES else bodies.readable_messages(body)
        if call.conversation is not None and path in (CHAT, RESPONSES):
            call.turns = call.conversation.with_empty_answers(items)
            if len(call.turns) > len(items):
                body["input" if path == RESPONSES else "messages"] = items = call.turns
        if path == RESPONSES:
            call.items = None if body.get("store") is False else items
            if isinstance(body.get("store", True), bool):
                body["store"] = False  # `AnswerSender` stores the response, not vLLM
        if path in (RESPONSES, MESSAGES):
            call.find_exact = partial(self._exact_prefix, call=call)
        if path in (CHAT, TOKENIZE):
            call.messages = bodies.readable_messages(body)
            call.exact = await self._exact_prefix(body, call)
        if path == TOKENIZE and call.exact is not None:
            await self._tokenize(request, send, call.exact, body)
            return
        # The request that vLLM sees lacks the fields that only this server understands.
        scope = dict(request.scope)
        raw = json.dumps(body).encode()
        headers = MutableHeaders(scope=scope)
        headers["content-length"] = str(len(raw))
        del headers["transfer-encoding"]
        waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            """Return the completed body first, and then the client's further messages."""
            return waiting.pop() if waiting else await request.receive()

        answer = AnswerSender(request, send, call, stored, previous)
        token = CURRENT.set(call if generates else None)
        error = None
        try:
            await self.app(scope, receive, answer.send)
        except Exception as raised:
            # Starlette raises an error again after it has answered it with status 500
            error = raised
        finally:
            CURRENT.reset(token)
        await answer.finish(error)

    async def _read(self, request: Request) -> bytes:
        """Return the complete body. Raises Refused if it is too large, if its header says so, or if
        it does not arrive in time.
        """
        seconds = self.settings.body_timeout_s
        rules = self.settings.image_rules
        limit = self.settings.max_body_bytes + (3 * rules.max_bytes if rules is not None else 0)
        announced = request.headers.get("content-length", "")
        body = bytearray()
        too_large = Refused(413, f"the request is larger than {limit:,} bytes")
        if announced.isdecimal() and int(announced) > limit:
            raise too_large
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as late:
            raise Refused(408, f"the request was not complete after {seconds:g} s") from late
        return bytes(body)

    async def _exact_prefix(self, body: Body, call: ServedCall) -> KnownPrefix | None:
        """Return the ids that the prompt must begin with, if any: those in the client's field
        `required_prefix_token_ids`, or those of the trajectory's earlier answers.
        """
        wanted = body.get("required_prefix_token_ids")
        client_prefix = bodies.take_prefix(body, self.limits.vocabulary)
        if not self.settings.keep_exact_ids:
            if wanted:
                raise Refused(
                    400, "required_prefix_token_ids is set, but this server does not keep exact ids"
                )
            return None
        prefix = None
        if call.conversation is not None and not body.get("continue_final_message"):
            with suppress(*VLLM_ERRORS):  # vLLM will report messages that cannot be read
                prefix = call.conversation.history.known_prefix(bodies.readable_messages(body))
        # Captured ids are known to fit; a client's are checked later, and used only where they
        # cover more messages.
        if prefix is None or (client_prefix is not None and client_prefix.messages > prefix.messages):
            prefix = client_prefix
        if prefix is None:
            return None
        if body.get("continue_final_message"):
            raise Refused(
                400, "exact ids cannot be kept with continue_final_message: the last answer has no end"
            )
        status, answer = await self._ask(TOKENIZE, bodies.prefix_request(body, prefix.messages))
        if status != 200:
            raise Refused(status, answer["error"]["message"])
        return replace(prefix, rendered=answer["tokens"])

    async def _tokenize(self, request: Request, send: Send, exact: KnownPrefix, body: Body) -> None:
        """Answer a /tokenize request as vLLM does, but with exact ids."""
        status, answer = await self._ask(TOKENIZE, body)
        if status == 200:
            ids = bodies.exact_prompt(
                exact, self.tokenizer, answer["tokens"], self.settings.eos_token_ids
            )
            answer |= {"tokens": ids, "count": len(ids)}
            if answer.get("token_strs"):
                answer["token_strs"] = self.tokenizer.convert_ids_to_tokens(ids)
        await bodies.as_json(status, answer)(request.scope, request.receive, send)

    async def _answer(self, request: Request) -> Response:
        """Return the response to a request for metrics or for one model. vLLM's application answers
        neither.
        """
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, f"{request.scope['path'][:80]} takes GET only")
        if request.scope["path"] == METRICS:
            return self._metrics()
        name = request.scope["path"].removeprefix(f"{MODELS}/")
        _, listed = await self._ask(MODELS)
        for model in listed["data"]:
            if model["id"] == name:
                return bodies.as_json(200, model)
        raise Refused(
            404, f"there is no model {name[:80]!r} on this server, which has {listed['data'][0]['id']}"
        )

    def _metrics(self) -> Response:
        """Return vLLM's metrics, where the engine keeps any, and this server's, in Prometheus's
        format.
        """
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        answered = CounterMetricFamily(
            "hotbunk_requests", "requests answered", labels=["path", "status"]
        )
        for (path, status), count in sorted(self.requests.items()):
            answered.add_metric([path, str(status)], count)
        metrics: list[Any] = [answered]
        not_taken = sum(conversation.history.retemplated for conversation in self.conversations.values())
        for name, meaning in COUNTERS.items():
            count = self.conversations.counts[name]
            if name == "retemplated":
                count += not_taken
            metrics.append(CounterMetricFamily(f"hotbunk_{name}", meaning, value=count))
        open_ = len(self.conversations)
        metrics.append(
            GaugeMetricFamily("hotbunk_trajectories", "trajectories being captured", value=open_)
        )
        with suppress(EngineStateError):  # a sleeping engine has no version
            version = self.worker.state.usable_version()
            metrics.append(
                GaugeMetricFamily("hotbunk_weight_version", "the version of the weights", value=version)
            )

        class ServerMetrics:
            def collect(self) -> list[Any]:
                return metrics

        registry = CollectorRegistry()
        registry.register(ServerMetrics())
        text = generate_latest(registry) + generate_latest(get_prometheus_registry())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _ask(self, path: str, body: Body | None = None) -> tuple[int, Any]:
        """Send a request of this server's own to vLLM's application. Return the status and the JSON
        of the response.
        """
        method, content = ("GET", "") if body is None else ("POST", json.dumps(body))
        headers = {"content-type": "application/json"}
        request = httpx.Request(method, f"http://localhost{path}", content=content, headers=headers)
        # Going through httpx.AsyncClient would take twice as long.
        answer = await httpx.ASGITransport(self.app).handle_async_request(request)
        return answer.status_code, json.loads(await answer.aread())


def _token(request: Request) -> str:
    """Return the key that a client sends as a bearer token or, as Anthropic's clients do, in
    `x-api-key`.
    """
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def _equal(token: str, key: str) -> bool:
    """Return True if both are equal. The comparison takes equally long wherever they differ, so
    that the key cannot be guessed piece by piece.
    """
    return hmac.compare_digest(token.encode(), key.encode())
