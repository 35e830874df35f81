"""OpenEnv (https://github.com/meta-pytorch/OpenEnv): a server of environments, with a session for each trajectory.

    rollout:
      environment: generation.rollouts.environments.openenv:OpenEnv
      kwargs: {url: "http://127.0.0.1:8000"}

A column `seed` of the data is given to reset.
"""

import asyncio
import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient


class OpenEnv:
    """Actions are calls of a tool, `act`. Each turn's reward is the sum of those of its steps."""

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        """`url` is the server's address; `timeout_s` bounds the wait for each of its answers."""
        self._client = GenericEnvClient(base_url=url, message_timeout_s=timeout_s, mode="simulation")
        self._earned = 0.0
        self._over = False
        self._lost = False

    async def reset(self, seed: int | None = None) -> str:
        """The first observation, over a connection of its own."""
        await self._client.connect()
        result = await self._client.reset(**({} if seed is None else {"seed": seed}))
        return _text(result.observation)

    async def act(self, action: dict[str, Any]) -> str:
        """Do one thing in the environment.

        Args:
            action: the fields of the action.
        """
        if self._over:
            return "It is over already."
        if self._lost:
            raise RuntimeError("the server did not answer an earlier action in time, so this session is lost")
        try:
            result = await self._client.step(action)
        except (TimeoutError, asyncio.CancelledError):  # the late answer would be taken for the next action's
            self._lost = True
            raise
        self._earned += float(result.reward or 0.0)
        self._over = result.done
        return _text(result.observation) + ("\nIt is over." if self._over else "")

    def turn_reward(self) -> float:
        """Return what was earned since the last call."""
        earned, self._earned = self._earned, 0.0
        return earned

    async def close(self) -> None:
        """End the session."""
        await self._client.close()


class OpenEnvText(OpenEnv):
    """Each answer is an action: the text of its one field."""

    act = None  # type: ignore[assignment]  # no tool

    def __init__(self, url: str, field: str = "message", timeout_s: float = 60.0) -> None:
        """`field` is the action's."""
        super().__init__(url, timeout_s)
        self._field = field

    async def respond(self, answer: str) -> str | None:
        """The next observation, or None at the end."""
        text = await OpenEnv.act(self, {self._field: answer})
        return None if self._over else text


def _text(observation: Any) -> str:
    """The only text in it, or all of it as JSON."""
    texts = [value for value in observation.values() if isinstance(value, str)] if isinstance(observation, dict) else []
    return texts[0] if len(texts) == 1 == len(observation) else json.dumps(observation, ensure_ascii=False)
