"""Level 6: any OpenAI client is a rollout. It talks to a server on the engine, which captures what is sampled.

    async def client(base_url, api_key, model, row):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
            answer = await openai.chat.completions.create(model=model, messages=[...])
        return 1.0 if row["answer"] in answer.choices[0].message.content else 0.0

The client's code runs on a thread of its own: it may block, and the engine does not wait for it.
"""

import asyncio
import functools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from generation.engine.sampling import SamplingSettings, sample_seed
from generation.engine.thread import EngineThread
from generation.rollouts.episode import PolicyLLM
from generation.rollouts.user_code import call_user
from generation.server import OpenAIServer, ServerSettings
from generation.trajectory import Trajectory, checked_reward

Client = Callable[[str, str, str, dict[str, Any]], Awaitable[float | None] | float | None]
"""Called with base URL, API key, the model's name and the row; gives a reward, or None to leave that to others."""


class LostKey(ValueError):
    """A client has sent requests without its trajectory's key; none of them was answered."""


class ClientRollout:
    """A `RolloutFunction`, with a server that starts with the first trajectory and lasts until `aclose`."""

    def __init__(self, client: Client, settings: ServerSettings, timeout_s: float) -> None:
        self._client, self._settings, self._timeout_s = client, settings, timeout_s
        self._server: OpenAIServer | None = None
        self._thread: EngineThread | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> list[Trajectory]:
        """One run of the client; a trajectory for each of its conversations, all with the reward that it returned.

        Raises:
            TimeoutError: the client takes longer than it may.
            LostKey: it has sent requests without the key they would be captured under.
            ValueError: it has asked for nothing, or its reward is not a finite number.
            UserCodeError: it raised what is not an `Exception`.
        """
        server, thread = await self._started(llm)
        place = llm.settings.seed, llm.settings.step, llm.prompt_index, llm.sample_index
        key = server.open(sampling=sampling, seed=sample_seed(*place), policy_version=llm.settings.policy_version)
        run = functools.partial(self._client, server.address(key), key, self._settings.model_name, row)
        try:
            running = asyncio.wrap_future(thread.submit(call_user(run)))
            async with asyncio.timeout(self._timeout_s) as limit:  # here, as a client may block its own loop
                given = await running
        except TimeoutError as error:
            if not limit.expired():  # its own
                raise
            raise TimeoutError(f"the client did not finish within {self._timeout_s:g} s") from error
        finally:
            lost, trajectories = server.lost_keys(key), server.take(key)
            if llm.engine.engine.errored:  # the client has only seen some request fail
                llm.fatal = llm.engine.engine.dead_error
        if lost:
            raise LostKey(f"the client lost its key: {lost} of its requests came without the api_key it was given")
        if not trajectories:
            raise ValueError("the client ended without an answer of the policy: it must use base_url and api_key")
        reward = 0.0 if given is None else checked_reward(given, "the client returned")
        for trajectory in trajectories:
            trajectory.prompt_index, trajectory.sample_index = llm.prompt_index, llm.sample_index
            trajectory.reward = reward
        return trajectories

    async def _started(self, llm: PolicyLLM) -> tuple[OpenAIServer, EngineThread]:
        async with self._starting:
            if self._server is None or self._thread is None:
                own = llm.settings.sampling
                ends = {*own.stop_token_ids, *([llm.tokenizer.eos_token_id] if llm.tokenizer.eos_token_id else [])}
                # A key that nobody knows: keys of open trajectories are the only ones that open this server.
                key = self._settings.api_key or secrets.token_urlsafe(32)
                settings = replace(self._settings, api_key=key, sampling=own, eos_token_ids=tuple(sorted(ends)))
                self._server = await OpenAIServer.start(llm.engine, settings)
                self._thread = EngineThread("clients")
        return self._server, self._thread

    async def aclose(self) -> None:
        """Stop the server and the clients' thread; a client that still blocks ends with its connection."""
        server, self._server = self._server, None
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.close)
        if server is not None:
            await server.stop()


def client_rollout(
    client: Client, settings: ServerSettings | None = None, *, timeout_s: float = 600.0
) -> ClientRollout:
    """A rollout function for an OpenAI client, sync or async, which is called once for each trajectory.

    Args:
        client: `client(base_url, api_key, model, row)`; `api_key` is the key its trajectory is captured under.
        settings: of the server; sampling and ends of answers are those of the rollout.
        timeout_s: how long one call of the client may take.
    """
    if not callable(client):
        raise ValueError(f"a client is a function (base_url, api_key, model, row), not {client!r}")
    return ClientRollout(client, settings or ServerSettings(), timeout_s)


def verifiers_client(environment: Any) -> Client:
    """A client that runs environments of the verifiers library, or whatever has their `rollout`.

    That is `await environment.rollout(row, client, model, sampling_args)`, which gives a state. The reward is the
    state's; where the library leaves it to the rubric, `environment.rubric.score_rollout(state)` is asked for it.
    """

    async def client(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float | None:
        """One rollout of the environment; its reward, None where the state has none."""
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
            state = await environment.rollout(row, openai, model, {})
            if state.get("reward") is None and getattr(environment, "rubric", None) is not None:
                await environment.rubric.score_rollout(state)
        reward: float | None = state.get("reward")
        return reward

    return client
