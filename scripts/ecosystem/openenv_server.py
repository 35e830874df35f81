"""An OpenEnv server, with a port as its argument, whose environment adds up what it is told."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Told(Action):
    message: str


class Sum(Observation):
    text: str = ""


class Adding(Environment):
    """Each session has a sum of its own, to which a message adds its number or, of other words, its length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_: Any) -> Sum:
        """Begin with the seed."""
        self.total = seed or 0
        return Sum(text=f"{self.total} so far", done=False, reward=0.0)

    def step(self, action: Told, **_: Any) -> Sum:
        """Add to it; a tenth of that is the reward. At 10 it is over."""
        told = int(action.message) if action.message.isdigit() else len(action.message)
        self.total += told
        return Sum(text=f"{self.total} so far", done=self.total >= 10, reward=told / 10)

    @property
    def state(self) -> State:
        """None beyond the sum."""
        return State()


def server(environment: type[Adding], port: int) -> uvicorn.Server:
    """A server of that environment on loopback, which has yet to be run."""
    app = create_fastapi_app(environment, Told, Sum, max_concurrent_envs=16)
    return uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))


if __name__ == "__main__":
    server(Adding, int(sys.argv[1])).run()
