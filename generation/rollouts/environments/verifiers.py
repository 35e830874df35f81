"""verifiers (https://github.com/PrimeIntellect-ai/verifiers) in a separate Python; its tasks become
prompts.

rollout: {verifiers: {environment: gsm8k, python: /home/me/agents/bin/python}}
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generation.rollouts import elsewhere
from generation.rollouts.client_process import ClientCommand, ClientError, ClientProcesses

PREFIX = "verifiers:"
_TOGETHER = 100  # tasks per line between the processes; a line may have 16 MiB
_LIST_SECONDS = 900.0  # for all tasks; some tasksets are downloaded first


def command(settings: Mapping[str, Any], log: Path | None = None) -> ClientCommand:
    """Return the command that starts episodes; `settings` are the keys of `rollout.verifiers`."""
    program = Path(elsewhere.__path__[0]) / "verifiers_agent.py"
    keywords = {"environment": settings["environment"], "args": settings["args"]}
    return ClientCommand(
        [settings["python"], str(program)], settings["workers"], settings["env"], keywords, log
    )


def rows(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the environment's first `tasks` tasks as rows with `prompt`, `answer` (None where a
    task has none), and `task`, which an episode needs. Raises ValueError naming the environment.
    """

    async def ask(pool: ClientProcesses) -> list[dict[str, Any]]:
        """Return all tasks, which it requests in several lines."""
        tasks: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                while left := settings["tasks"] - len(tasks):
                    more = (await pool.run("", "", "", {"next": min(left, _TOGETHER)})).reward
                    if not more:
                        break
                    tasks += more
        finally:
            await pool.aclose()
        return tasks

    try:
        return asyncio.run(ask(ClientProcesses(command(settings))))
    except (ClientError, TimeoutError) as error:
        reason = str(error) or f"it took longer than {_LIST_SECONDS:g} s"
        raise ValueError(
            f"the environment {settings['environment']!r} of verifiers lists no tasks: {reason}"
        ) from error
