"""OpenEnv (https://github.com/meta-pytorch/OpenEnv): a server of environments, with a session for
each trajectory.

    rollout:
      environment: generation.rollouts.environments.openenv:OpenEnv
      kwargs: {url: "http://127.0.0.1:8000"}

The data's column `seed` is passed to reset.
"""

import asyncio
import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient


class OpenEnv:
    """An environment in which actions are calls of the tool `act`. A turn's reward is the sum of
    its steps' rewards.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        """Make an environment of the server at `url`, each of whose answers may take `timeout_s`
        seconds.
        """
        self._client = GenericEnvClient(base_url=url, message_timeout_s=timeout_s, mode="simulation")
        self._earned = 0.0
        self._over = False
        self._lost = False

    async def reset(self, seed: int | None = None) -> str:
        """Open a connection to the server, and return the first observation."""
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
            raise RuntimeError(
                "the server did not answer an earlier action in time, so this session is lost"
            )
        try:
            result = await self._client.step(action)
        except (TimeoutError, asyncio.CancelledError):
            # The late answer would be taken as that to the next action
            self._lost = True
            raise
        self._earned += float(result.reward or 0.0)
        self._over = result.done
        return _text(result.observation) + ("\nIt is over." if self._over else "")

    def turn_reward(self) -> float:
        """Return the sum of rewards since the last call."""
        earned = self._earned
        self._earned = 0.0
        return earned

    async def close(self) -> None:
        """End the session."""
        await self._client.close()


class OpenEnvText(OpenEnv):
    """An environment in which each answer is an action, as the text of the action's only field."""

    act = None  # type: ignore[assignment]  # no tool

    def __init__(self, url: str, field: str = "message", timeout_s: float = 60.0) -> None:
        """Make an environment whose actions have the one field `field`."""
        super().__init__(url, timeout_s)
        self._field = field

    async def respond(self, answer: str) -> str | None:
        """Return the next observation, or None at the end."""
        text = await OpenEnv.act(self, {self._field: answer})
        return None if self._over else text


def _text(observation: Any) -> str:
    """Return an observation's text if that is its only field, else the observation as JSON."""
    if isinstance(observation, dict) and len(observation) == 1:
        (value,) = observation.values()
        if isinstance(value, str):
            return value
    return json.dumps(observation, ensure_ascii=False)
