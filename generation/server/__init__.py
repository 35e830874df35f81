"""vLLM's OpenAI-compatible server on an engine in training: exact ids, captured trajectories, no surprises.

A socket is bound once; vLLM's application and uvicorn run on the engine's event loop.
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
from generation.server.connections import bounded
from generation.server.conversations import Conversations, ServedConversation, ServerSettings, TooManyConversations
from generation.server.gate import OF_VLLM, PLACES, Gate
from generation.server.served_engine import ServedEngine, build_openai_app
from generation.trajectory import Trajectory
from generation.undoing import undone_by

if TYPE_CHECKING:
    import uvicorn
    from starlette.responses import Response

__all__ = ["OpenAIServer", "ServerSettings", "TooManyConversations"]

STOP_SECONDS = 5.0
"""How long requests may take to end when the server stops."""


class OpenAIServer:
    """An OpenAI-compatible server for an engine; made by `start`, on the engine's event loop, and stopped there.

    `base_url` is as OpenAI's clients want it, `http://127.0.0.1:<port>/v1`.
    """

    def __init__(
        self, settings: ServerSettings, sock: socket.socket, server: "uvicorn.Server", open_: Conversations
    ) -> None:
        self.settings = settings
        self._conversations = open_
        self._server = server
        self._socket = sock
        host, port = sock.getsockname()[:2]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._task = asyncio.ensure_future(self._serve())

    @classmethod
    async def start(cls, worker: Engine, settings: ServerSettings | None = None) -> Self:
        """Serve a running engine from now on. Raises ValueError where it cannot listen, or there is no tokenizer."""
        import uvicorn

        settings = settings or ServerSettings()
        sock = bind(settings.host, settings.port)
        with undone_by(sock.close):
            gate, app, conversations = await _application(worker, settings, is_loopback(sock.getsockname()[0]))
            # The lifespan would freeze this process's garbage (vllm/entrypoints/launchers/utils/server_utils.py).
            config = uvicorn.Config(gate, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=120)
            config.load()
            config.http_protocol_class = bounded(config.http_protocol_class)  # type: ignore[arg-type]
            server = uvicorn.Server(config)
            app.state.server = server  # vLLM tells it to stop when the engine has died
        started = cls(settings, sock, server, conversations)
        while not server.started:
            if started._task.done():
                started._task.result()
                raise RuntimeError("the server ended while it started")
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
        """Begin to capture answers under `key` (by default a new one that cannot be guessed); gives the key.

        A client sends it as its API key, or, where the settings allow it, in the header `x-hotbunk-trajectory`, which
        opens a trajectory by itself. `sampling` is by default the server's; where requests name no seed, theirs derives
        from `seed`; they are answered by weights of `policy_version` only, if given, or, with a `turnstile`, slice by
        slice by the version that its gate is open for: they wait where it is closed. `row_images` are those that
        the client has from its row, which do not count among those that come up.
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
        """A base URL for one trajectory's clients, where requests without its key count as lost. KeyError: not open."""
        return self.base_url.removesuffix("/v1") + PLACES + self._conversations[key].place + "/v1"

    def lost_keys(self, key: str) -> int:
        """Requests to the trajectory's own address refused for lack of its key. Raises KeyError if it is not open."""
        return self._conversations[key].counts["lost_keys"]

    def fatal(self, key: str) -> Exception | None:
        """The error of a request after which no trajectory would fare better. Raises KeyError if it is not open."""
        return self._conversations[key].fatal

    def take(self, key: str) -> list[Trajectory]:
        """The trajectories captured under `key`, which is then forgotten. Raises KeyError if it is not open."""
        return self._conversations.take(key)

    async def stop(self) -> None:
        """Answer no more, and end the requests that still run; safe to call twice."""
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=STOP_SECONDS)
        if not done:
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_SECONDS)


async def _application(worker: Engine, settings: ServerSettings, local: bool) -> tuple[Gate, Any, Conversations]:
    """vLLM's application on the engine: behind the gate, and by itself; and the conversations that it captures."""
    from fastapi.exceptions import RequestValidationError

    if worker.settings.extra.get("skip_tokenizer_init"):
        raise ValueError("an OpenAI server needs the engine's tokenizer: leave skip_tokenizer_init out")
    tokenizer = worker.llm.get_tokenizer()
    conversations = Conversations(tokenizer, settings)
    config = worker.llm.model_config
    limits = Limits(settings.max_choices, settings.max_answers, config.max_model_len, config.get_vocab_size())
    app = await build_openai_app(ServedEngine(worker, settings, limits, conversations), settings)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in OF_VLLM]
    app.user_middleware.clear()  # authentication is the gate's, and pages of other origins have no business here

    @app.exception_handler(RequestValidationError)  # vLLM's own lists all that pydantic has tried, over many lines
    async def invalid(_: Any, error: RequestValidationError) -> "Response":
        return error_response(400, sentence_of(error.errors(), error.body))

    return Gate(app, worker, settings, conversations, limits, tokenizer, local), app, conversations


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; handed on as it is, so that no other process can take its port in between."""
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
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; port 0 takes a free one") from error
    return sock
