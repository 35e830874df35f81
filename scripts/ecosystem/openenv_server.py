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
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_: Any) -> Sum:
        self.total = seed or 0
        return Sum(text=f"{self.total} so far", done=False, reward=0.0)

    def step(self, action: Told, **_: Any) -> Sum:
        self.total += len(action.message)
        return Sum(text=f"{self.total} so far", done=self.total >= 10, reward=0.1)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Adding, Told, Sum, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
