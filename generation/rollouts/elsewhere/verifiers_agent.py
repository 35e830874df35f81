"""Serve tasks and episodes of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers) from
its own Python.

`rollout.verifiers` starts this file. `args` are the keys that verifiers' own recipes have in
`[env]`, except for the taskset's id. A row has a task in the form that verifiers' environment
server gets it: its data as JSON (verifiers/v1/serve/types.py, RunRequest).
"""

import os
import sys
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

from hotbunk_client import serve

KEY = "HOTBUNK_API_KEY"  # verifiers passes no variable with API_KEY in its name on to tools
# Episodes between restarts of verifiers' servers, which keep an HTTP client for every address
TOGETHER = 64


class Environment:
    """A taskset and the agent that works on it, one episode after the other."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        # Where uv is
        os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        taskset = {"id": name} | args.get("taskset", {})
        self.env = load_environment(resolve_env_config(args | {"taskset": taskset}))
        self.tasks = iter(self.env.taskset)
        self.episodes = 0
        self.serving = AsyncExitStack()

    def rows(self, count: int) -> list[dict[str, str | None]]:
        """Return at most `count` further rows; none at the end. Raises ValueError for a task that
        JSON cannot hold.
        """
        rows = []
        for data in (task.data for task in islice(self.tasks, count)):
            written = data.model_dump_json()
            if type(data).model_validate_json(written) != data:
                raise ValueError(f"task {data.idx} differs after it was written as JSON and read again")
            prompt = data.prompt_text or data.name or f"task {data.idx}"
            answer = getattr(data, "answer", None)
            rows.append(
                {"prompt": prompt, "answer": None if answer is None else str(answer), "task": written}
            )
        return rows

    async def episode(
        self, task: str, base_url: str, model: str
    ) -> tuple[dict[str, float] | None, dict[str, float]]:
        """Run one episode. Return rewards and metrics by name. Raises RuntimeError where verifiers
        says it failed.
        """
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        if self.episodes % TOGETHER == 0:
            await self.serving.aclose()
            await self.serving.enter_async_context(self.env.serving())
        self.episodes += 1
        kind = type(self.env.taskset).task_type()
        task = kind(kind.data_type().model_validate_json(task), self.env.config.taskset.task)
        client = EvalClientConfig(base_url=base_url, api_key_var=KEY)
        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, ModelContext(model=model, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            if not errors:
                raise RuntimeError("verifiers says that the episode failed")
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
        if len(episode.traces) != 1:
            raise RuntimeError(
                f"the episode has {len(episode.traces)} agents, but only one can be trained"
            )
        (trace,) = episode.traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return rewards or None, {
            name: value for name, value in trace.metrics.items() if value is not None
        }


LOADED: dict[str, Environment] = {}


async def agent(
    base_url: str, api_key: str, model: str, row: dict[str, Any], environment: str, args: dict[str, Any]
) -> Any:
    """Run an episode of the row's task; for a row with `next`, return that many further tasks
    instead.
    """
    if not LOADED:
        LOADED["environment"] = Environment(environment, args)
    if "next" in row:
        return LOADED["environment"].rows(row["next"])
    os.environ[KEY] = api_key
    return await LOADED["environment"].episode(row["task"], base_url, model)


if __name__ == "__main__":
    serve(agent)
