"""Level 6: any OpenAI client is a rollout. It talks to a server on the engine, which captures the answers.

    async def client(base_url, api_key, model, row):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
            answer = await openai.chat.completions.create(model=model, messages=[...])
        return 1.0 if row["answer"] in answer.choices[0].message.content else 0.0

The client's code runs on a thread of its own: it may block, and the engine does not wait for it.
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
    """A client's result: a reward, several by name, whose sum counts, or None to leave that to others; and figures."""

    reward: Any
    metrics: Mapping[str, Any] = {}


Client = Callable[[str, str, str, dict[str, Any]], Awaitable[Any] | Any]
"""Called with base URL, API key, the model's name and the row; gives a reward, several by name, None, or `Scored`."""


class CapturingServer(Protocol):
    """A server that captures the answers under a key; see `generation.server.OpenAIServer`."""

    base_url: str

    def open(
        self,
        *,
        sampling: SamplingSettings,
        seed: int,
        policy_version: int,
        turnstile: Turnstile | None,
        row_images: tuple[Image, ...],
    ) -> str: ...
    def address(self, key: str) -> str: ...
    def lost_keys(self, key: str) -> int: ...
    def fatal(self, key: str) -> Exception | None: ...
    def take(self, key: str) -> list[Trajectory]: ...
    async def stop(self) -> None: ...


StartServer = Callable[..., Awaitable[CapturingServer]]
"""Starts a server on an engine, its argument; by keyword it gets `model_name`, `api_key`, `sampling`,
`eos_token_ids` and `image_rules`.
"""


class LostKey(ValueError):
    """A client has sent requests without its trajectory's key; none of them was answered."""


@dataclass(eq=False)
class ClientRollout:
    """A `RolloutFunction`: an episode is a call of a client, sync or async. The server it starts ends with `aclose`.

    `timeout_s` is how long one call of the client may take, parked time left out; `end_client` is called once, where
    the client was. Raises ValueError if the client cannot be called.
    """

    client: Client
    start_server: StartServer
    timeout_s: float = 600.0
    end_client: Callable[[], Coroutine[Any, Any, None]] | None = None

    def __post_init__(self) -> None:
        if not callable(self.client):
            raise ValueError(f"a client is a function (base_url, api_key, model, row), not {self.client!r}")
        self._running: tuple[CapturingServer, EngineThread] | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> list[Trajectory]:
        """One run of the client; a trajectory for each of its conversations, all with the reward that it returned.
        Raises TimeoutError where it takes longer than it may, LostKey where it has sent requests without its key,
        ValueError where it has asked for nothing or its reward is not a finite number, and as `call_user` does.
        """
        async with self._starting:
            if self._running is None:
                self._running = await self._start(llm)
        server, thread = self._running
        place = llm.settings.seed, llm.settings.step, llm.prompt_index, llm.sample_index
        key = server.open(
            sampling=sampling,
            seed=sample_seed(*place),
            policy_version=llm.settings.policy_version,
            turnstile=llm.turnstile,
            row_images=llm.images,
        )
        if llm.images:
            row = {**row, "images": [image.data_url() for image in llm.images]}
        run = functools.partial(self.client, server.address(key), key, MODEL, row)
        try:
            returned = await self._in_time(asyncio.wrap_future(thread.submit(call_user(run))), llm.turnstile)
        finally:
            lost, fatal, trajectories = server.lost_keys(key), server.fatal(key), server.take(key)
            if fatal is not None:
                llm.fatal = fatal
            if llm.engine.llm.errored:  # the client has only seen some request fail
                llm.fatal = llm.engine.llm.dead_error
        if lost:
            raise LostKey(f"the client lost its key: {lost} of its requests came without the api_key it was given")
        if not trajectories:
            raise ValueError("the client ended without an answer of the policy: it must use base_url and api_key")
        scored = returned if isinstance(returned, Scored) else Scored(returned)
        parts, description = scored.reward, "the client returned"
        if isinstance(parts, Mapping):
            parts = {str(name): checked_reward(value, f"{description} as {name!r}") for name, value in parts.items()}
            reward = checked_reward(sum(parts.values()), description)
        else:
            parts, reward = {}, 0.0 if parts is None else checked_reward(parts, description)
        for trajectory in trajectories:
            trajectory.prompt_index, trajectory.sample_index = llm.prompt_index, llm.sample_index
            trajectory.reward, trajectory.reward_parts = reward, dict(parts)
        for name, value in scored.metrics.items():
            trajectories[0].metrics[f"client/{name}"] = checked_reward(value, f"{description} as metric {name!r}")
        return trajectories

    async def _in_time(self, running: "asyncio.Future[Any]", turnstile: Turnstile | None) -> Any:
        """The client's result. Raises what it raised, TimeoutError where it is late: seen here, as it may block its own
        loop.
        """
        begun, left = time.monotonic(), self.timeout_s
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
        sampling, eos = llm.settings.sampling, llm.tokenizer.eos_token_id
        server = await self.start_server(
            llm.engine,
            model_name=MODEL,
            # Without one of the user's it is given to nobody: only keys of open trajectories are answered.
            api_key=os.environ.get("HOTBUNK_API_KEY") or secrets.token_urlsafe(32),
            sampling=sampling,
            eos_token_ids=tuple(sorted({*sampling.stop_token_ids, *([eos] if eos else [])})),
            image_rules=llm.image_rules,
        )
        if "HOTBUNK_API_KEY" in os.environ:
            print(f"[hotbunk] clients are answered at {server.base_url}", file=sys.stderr, flush=True)
        return server, EngineThread("clients")

    async def aclose(self) -> None:
        """Stop the server and the clients' thread; a client that still blocks ends with its connection."""
        if self._running is not None:
            (server, thread), self._running = self._running, None
            if self.end_client is not None:
                await asyncio.wrap_future(thread.submit(self.end_client()))
            await asyncio.to_thread(thread.close)
            await server.stop()
