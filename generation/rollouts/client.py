"""Level 6: any OpenAI client can be a rollout. It sends requests to a server on the engine, which
captures the answers.

    async def client(base_url, api_key, model, row):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
            answer = await openai.chat.completions.create(model=model, messages=[...])
        return 1.0 if row["answer"] in answer.choices[0].message.content else 0.0

The client's code runs on a separate thread, so the engine goes on where that code blocks.
"""

import asyncio
import functools
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from generation.engine.sampling import SamplingSettings, sample_seed
from generation.engine.slices import Turnstile
from generation.engine.thread import EngineThread
from generation.images import Image
from generation.rollouts.episode import PolicyLLM
from generation.rollouts.user_code import call_user
from generation.trajectory import Trajectory, checked_reward

MODEL = "policy"
"""The name by which clients call the model."""


class Scored(NamedTuple):
    """A client's result: its reward, or several by name that are summed, or None; and metrics by
    name.
    """

    reward: Any
    metrics: Mapping[str, Any] = {}


Client = Callable[[str, str, str, dict[str, Any]], Awaitable[Any] | Any]
"""Called with base URL, API key, model name and row; returns a reward, several by name, None, or a
`Scored`.
"""


class CapturingServer(Protocol):
    """A server that captures the answers under a key, such as `generation.server.OpenAIServer`.

    Methods with a `key` raise KeyError if its trajectory is not open.
    """

    base_url: str

    def open(
        self,
        *,
        sampling: SamplingSettings,
        seed: int,
        policy_version: int,
        turnstile: Turnstile | None,
        row_images: tuple[Image, ...],
    ) -> str:
        """Start to capture a trajectory, and return its key. Requests with the key are sampled with
        `sampling` and `seed`.
        """

    def address(self, key: str) -> str:
        """Return the base URL for the trajectory's clients."""

    def lost_keys(self, key: str) -> int:
        """Return the number of requests to the trajectory's address that lacked its key."""

    def fatal(self, key: str) -> Exception | None:
        """Return the error of a request that would fail in any other trajectory, too, or None."""

    def take(self, key: str) -> list[Trajectory]:
        """Return the trajectories captured under `key`, and forget the key."""

    async def stop(self) -> None:
        """Stop accepting requests, and end those that still run."""


StartServer = Callable[..., Awaitable[CapturingServer]]
"""Starts a server on the engine that it gets as its argument. Its keyword arguments are
`model_name`, `api_key`, `sampling`, `eos_token_ids` and `image_rules`.
"""


class LostKey(ValueError):
    """A client has sent requests without its trajectory's key, which the server has refused."""


@dataclass(eq=False)
class ClientRollout:
    """A `RolloutFunction` whose episodes are calls of a client. The first episode starts the
    server; `aclose` ends it.

    The client is called for each episode; it may be sync or async. A call may take `timeout_s`
    seconds, not counting the time for which answers are parked between slices. `end_client` is
    called once at the end, on the client's event loop. Raises ValueError if the client cannot be
    called.
    """

    client: Client
    start_server: StartServer
    timeout_s: float = 600.0
    end_client: Callable[[], Coroutine[Any, Any, None]] | None = None

    def __post_init__(self) -> None:
        if not callable(self.client):
            raise ValueError(
                f"a client is a function (base_url, api_key, model, row), not {self.client!r}"
            )
        self._running: tuple[CapturingServer, EngineThread] | None = None
        self._starting = asyncio.Lock()

    async def __call__(
        self, llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> list[Trajectory]:
        """Call the client once. Return a trajectory for each of its conversations, all with the
        reward it returned.

        Raises TimeoutError where the client takes longer than it may, LostKey where it has sent
        requests without its key, ValueError where it has got no answer or its reward is not a
        finite number, and as `call_user` does.
        """
        async with self._starting:
            if self._running is None:
                self._running = await self._start(llm)
        server, thread = self._running
        indices = llm.settings.seed, llm.settings.step, llm.prompt_index, llm.sample_index
        key = server.open(
            sampling=sampling,
            seed=sample_seed(*indices),
            policy_version=llm.settings.policy_version,
            turnstile=llm.turnstile,
            row_images=llm.images,
        )
        if llm.images:
            row = {**row, "images": [image.data_url() for image in llm.images]}
        run = functools.partial(self.client, server.address(key), key, MODEL, row)
        try:
            returned = await self._in_time(
                asyncio.wrap_future(thread.submit(call_user(run))), llm.turnstile
            )
        finally:
            lost = server.lost_keys(key)
            fatal = server.fatal(key)
            trajectories = server.take(key)
            if fatal is not None:
                llm.fatal = fatal
            if llm.engine.llm.errored:  # the client itself can only report that its request has failed
                llm.fatal = llm.engine.llm.dead_error
        if lost:
            raise LostKey(
                f"the client lost its key: {lost} of its requests came without the api_key it was given"
            )
        if not trajectories:
            raise ValueError(
                "the client ended without an answer of the policy: it must use base_url and api_key"
            )
        scored = returned if isinstance(returned, Scored) else Scored(returned)
        parts = scored.reward
        description = "the client returned"
        if isinstance(parts, Mapping):
            parts = {
                str(name): checked_reward(value, f"{description} as {name!r}")
                for name, value in parts.items()
            }
            reward = checked_reward(sum(parts.values()), description)
        else:
            parts, reward = {}, 0.0 if parts is None else checked_reward(parts, description)
        for trajectory in trajectories:
            trajectory.prompt_index = llm.prompt_index
            trajectory.sample_index = llm.sample_index
            trajectory.reward = reward
            trajectory.reward_parts = dict(parts)
        for name, value in scored.metrics.items():
            trajectories[0].metrics[f"client/{name}"] = checked_reward(
                value, f"{description} as metric {name!r}"
            )
        return trajectories

    async def _in_time(self, running: "asyncio.Future[Any]", turnstile: Turnstile | None) -> Any:
        """Return the client's result. Raises the client's error, or TimeoutError where it takes too
        long.

        The deadline is kept on this event loop, since the client may block its own.
        """
        begun = time.monotonic()
        left = self.timeout_s
        try:
            while left > 0:
                if (await asyncio.wait({running}, timeout=max(left, 0.1)))[0]:
                    return running.result()
                parked_s = turnstile.parked_s if turnstile is not None else 0.0
                left = self.timeout_s - (time.monotonic() - begun - parked_s)
            raise TimeoutError(f"the client did not finish within {self.timeout_s:g} s")
        finally:
            running.cancel()

    async def _start(self, llm: PolicyLLM) -> tuple[CapturingServer, EngineThread]:
        sampling = llm.settings.sampling
        ends = set(sampling.stop_token_ids)
        if eos := llm.tokenizer.eos_token_id:
            ends.add(eos)
        server = await self.start_server(
            llm.engine,
            model_name=MODEL,
            # A random key is known to nobody, so that only the keys of open trajectories are
            # accepted.
            api_key=os.environ.get("HOTBUNK_API_KEY") or secrets.token_urlsafe(32),
            sampling=sampling,
            eos_token_ids=tuple(sorted(ends)),
            image_rules=llm.image_rules,
        )
        if "HOTBUNK_API_KEY" in os.environ:
            print(f"[hotbunk] clients are answered at {server.base_url}", file=sys.stderr, flush=True)
        return server, EngineThread("clients")

    async def aclose(self) -> None:
        """Stop the server and the clients' thread. A client that still waits for an answer loses
        its connection.
        """
        if self._running is not None:
            (server, thread) = self._running
            self._running = None
            if self.end_client is not None:
                await asyncio.wrap_future(thread.submit(self.end_client()))
            await asyncio.to_thread(thread.close)
            await server.stop()
