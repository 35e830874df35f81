"""Serve an engine in training through vLLM's OpenAI-compatible API, with exact token ids and
captured trajectories.

The server binds its socket once. vLLM's application and uvicorn run on the engine's event loop.
"""

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Any, Self

from generation.engine.engine import Engine
from generation.engine.sampling import SamplingSettings
from generation.engine.slices import Turnstile
from generation.images import Image
from generation.loopback import is_loopback
from generation.server.bodies import Limits, error_response, sentence_of
from generation.server.connections import with_limits
from generation.server.conversations import (
    Conversations,
    ServedConversation,
    ServerSettings,
    TooManyConversations,
)
from generation.server.gate import TRAJECTORY_PATH, VLLM_PATHS, Gate
from generation.server.served_engine import ServedEngine, build_openai_app
from generation.trajectory import Trajectory
from generation.undoing import undone_by

if TYPE_CHECKING:
    import uvicorn
    from starlette.responses import Response

__all__ = ["OpenAIServer", "ServerSettings", "TooManyConversations"]

STOP_SECONDS = 5.0
"""The seconds that requests may take to end when the server stops."""


class OpenAIServer:
    """An OpenAI-compatible server for an engine; `start` makes it on the engine's event loop, where
    it is also stopped.

    `base_url` has the form that OpenAI's clients expect: `http://127.0.0.1:<port>/v1`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        sock: socket.socket,
        server: "uvicorn.Server",
        conversations: Conversations,
    ) -> None:
        self.settings = settings
        self._conversations = conversations
        self._server = server
        self._socket = sock
        host, port = sock.getsockname()[:2]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._task = asyncio.ensure_future(self._serve())

    @classmethod
    async def start(cls, worker: Engine, settings: ServerSettings | None = None) -> Self:
        """Start serving a running engine. Raises ValueError if it cannot listen, or the engine has
        no tokenizer.
        """
        import uvicorn

        settings = settings or ServerSettings()
        sock = bind(settings.host, settings.port)
        with undone_by(sock.close):
            gate, app, conversations = await _application(
                worker, settings, is_loopback(sock.getsockname()[0])
            )
            # vLLM's lifespan would call gc.freeze() in this process
            # (vllm/entrypoints/launchers/utils/server_utils.py).
            config = uvicorn.Config(
                gate, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=120
            )
            config.load()
            config.http_protocol_class = with_limits(config.http_protocol_class)  # type: ignore[arg-type]
            server = uvicorn.Server(config)
            app.state.server = server  # vLLM stops the server through this when the engine has died
        started = cls(settings, sock, server, conversations)
        while not server.started:
            if started._task.done():
                started._task.result()
                raise RuntimeError("the HTTP server ended before it was ready")
            await asyncio.sleep(0.01)
        return started

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def open(
        self,
        key: str = "",
        *,
        sampling: SamplingSettings | None = None,
        seed: int | None = None,
        policy_version: int | None = None,
        turnstile: Turnstile | None = None,
        row_images: tuple[Image, ...] = (),
    ) -> str:
        """Start to capture answers under `key`, by default a new key that cannot be guessed. Return
        the key.

        A client sends the key as its API key. Where the settings allow it, a client may instead
        send a key of its choice in the header `x-hotbunk-trajectory`, which opens a trajectory
        without a call of this method.

        Args: key: the trajectory's key. sampling: how requests have to be sampled; by default as
            the server's settings say. seed: requests that name no seed get one that is derived from
            it. policy_version: the only version of the weights that may answer; None allows any.
            turnstile: has requests answered slice by slice, by the version that its gate is open
            for; while the gate is closed, they wait. row_images: the images of the client's dataset
            row, which do not count towards an episode's limit.
        """
        sampling = self.settings.sampling if sampling is None else sampling
        new = ServedConversation(
            key or f"hotbunk-{secrets.token_urlsafe(24)}",
            sampling=sampling,
            seed=seed,
            policy_version=policy_version,
            turnstile=turnstile,
            row_images=row_images,
        )
        return self._conversations.open(new).key

    def address(self, key: str) -> str:
        """Return the base URL for one trajectory's clients; requests to it without the trajectory's
        key are counted.

        Raises KeyError if the trajectory is not open.
        """
        return (
            self.base_url.removesuffix("/v1") + TRAJECTORY_PATH + self._conversations[key].slug + "/v1"
        )

    def lost_keys(self, key: str) -> int:
        """Return how many requests to the trajectory's address lacked its key. Raises KeyError if
        it is not open.
        """
        return self._conversations[key].counts["lost_keys"]

    def fatal(self, key: str) -> Exception | None:
        """Return the error of a request that would fail in any other trajectory, too, or None.

        Raises KeyError if the trajectory is not open.
        """
        return self._conversations[key].fatal

    def take(self, key: str) -> list[Trajectory]:
        """Return the trajectories captured under `key`, and forget the key. Raises KeyError if it
        is not open.
        """
        return self._conversations.take(key)

    async def stop(self) -> None:
        """Stop accepting requests, and end those that still run. Safe to call twice."""
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=STOP_SECONDS)
        if not done:
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_SECONDS)


async def _application(
    worker: Engine, settings: ServerSettings, local: bool
) -> tuple[Gate, Any, Conversations]:
    """Build vLLM's application on the engine. Return the gate, the application, and the
    conversations captured.
    """
    from fastapi.exceptions import RequestValidationError

    if worker.settings.extra.get("skip_tokenizer_init"):
        raise ValueError("an OpenAI server needs the engine's tokenizer: leave skip_tokenizer_init out")
    tokenizer = worker.llm.get_tokenizer()
    conversations = Conversations(tokenizer, settings)
    config = worker.llm.model_config
    limits = Limits(
        settings.max_choices, settings.max_answers, config.max_model_len, config.get_vocab_size()
    )
    app = await build_openai_app(ServedEngine(worker, settings, limits, conversations), settings)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", "") in VLLM_PATHS
    ]
    # The gate authenticates, and pages of other origins are to get no CORS headers
    app.user_middleware.clear()

    # vLLM's own lists every type that pydantic tried, on many lines
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Any, error: RequestValidationError) -> "Response":
        return error_response(400, sentence_of(error.errors(), error.body))

    return Gate(app, worker, settings, conversations, limits, tokenizer, local), app, conversations


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; uvicorn gets the socket itself, so that no other process can take
    its port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ValueError(
            f"cannot listen on {host} port {port}: {error.strerror}; port 0 takes a free one"
        ) from error
    return sock
