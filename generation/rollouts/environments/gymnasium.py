"""gymnasium (https://gymnasium.farama.org): environments whose observations and actions can be
written as text.

    rollout:
      environment: generation.rollouts.environments.gymnasium:Gym
      kwargs: {id: FrozenLake-v1, render_mode: ansi, actions: [left, down, right, up]}

The data's columns `seed` and `options` are passed to reset. Without a seed, runs cannot be
repeated.
"""

import json
import re
from typing import Any

import gymnasium
import numpy as np

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class Gym:
    """An environment in which actions are calls of the tool `act`. A turn's reward is the sum of
    its steps' rewards.
    """

    def __init__(self, id: str, actions: list[str] | None = None, **kwargs: Any) -> None:
        """Make the environment `id`. `actions` names a discrete space's actions; `kwargs` go to
        `gymnasium.make`.
        """
        self._env = gymnasium.make(id, **kwargs)
        self._names = actions or []
        self._earned = 0.0
        self._over = False

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> str:
        """Reset the environment, and return the first observation."""
        observation, _ = self._env.reset(seed=seed, options=options)
        return self._text(observation)

    def act(self, action: str | float | list[Any]) -> str:
        """Do one thing in the environment.

        Args:
            action: its name or number, or a list of numbers.
        """
        if self._over:
            return "It is over already."
        observation, reward, terminated, truncated, _ = self._env.step(self._action(action))
        self._earned += float(reward)
        self._over = terminated or truncated
        return self._text(observation) + ("\nIt is over." if self._over else "")

    def turn_reward(self) -> float:
        """Return the sum of rewards since the last call."""
        earned = self._earned
        self._earned = 0.0
        return earned

    def close(self) -> None:
        """End the environment."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return _ANSI.sub("", str(self._env.render())).strip()
        return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)

    def _action(self, answer: Any) -> Any:
        """Return an action of the space. Raises ValueError naming the actions where `answer` is not
        one of them.
        """
        action = answer
        space = self._env.action_space
        if isinstance(answer, str) and answer.strip() in self._names:
            action = self._names.index(answer.strip())
            action += int(getattr(space, "start", 0))
        try:
            if isinstance(space, gymnasium.spaces.Discrete):
                action = np.int64(int(float(action)))
            elif not isinstance(space, gymnasium.spaces.Text):
                action = np.asarray(action, dtype=space.dtype).reshape(space.shape)
            if space.contains(action):
                return action
        except (TypeError, ValueError, OverflowError, RecursionError):
            pass
        raise ValueError(
            f"{answer!r:.100} is not an action; there are: {', '.join(self._names) or space}"
        )


class GymText(Gym):
    """An environment in which each answer is an action: the text in its last brackets, or else all
    of its text.
    """

    act = None  # type: ignore[assignment]  # no tool

    def respond(self, answer: str) -> str | None:
        """Return the next observation, or None at the end; for an answer that is not an action, the
        error's text.
        """
        bracketed = _BRACKETS.findall(answer)
        word = (bracketed[-1] if bracketed else answer).strip()
        try:
            value = json.loads(f"[{word}]") if "," in word else word
            text = Gym.act(self, value)
        except (ValueError, RecursionError, MemoryError) as error:  # json's, for brackets without end
            return str(error)
        return None if self._over else text


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
