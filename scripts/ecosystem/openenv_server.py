"""An OpenEnv server, with a port as its argument, whose environment adds up numbers."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Message(Action):
    """An action: a message with a number, or with other text."""

    message: str


class Sum(Observation):
    """An observation: the sum so far."""

    text: str = ""


class Adding(Environment):
    """An environment with a sum, to which a message adds its number or, if it is none, its length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_: Any) -> Sum:
        """Start with the seed as the sum."""
        self.total = seed or 0
        return Sum(text=f"{self.total} so far", done=False, reward=0.0)

    def step(self, action: Message, **_: Any) -> Sum:
        """Add to the sum. The reward is a tenth of that; the episode ends at a sum of 10."""
        number = int(action.message) if action.message.isdigit() else len(action.message)
        self.total += number
        return Sum(text=f"{self.total} so far", done=self.total >= 10, reward=number / 10)

    @property
    def state(self) -> State:
        """Returns an empty state, as the interface needs one."""
        return State()


def server(environment: type[Adding], port: int) -> uvicorn.Server:
    """Return a server of that environment on loopback, which the caller has to run."""
    app = create_fastapi_app(environment, Message, Sum, max_concurrent_envs=16)
    return uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))


if __name__ == "__main__":
    server(Adding, int(sys.argv[1])).run()
