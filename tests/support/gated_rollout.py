"""A rollout of two turns that waits between them, in steps 3 and 4, until a file exists."""

import asyncio
import time
from pathlib import Path
from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM
from generation.trajectory import Trajectory


def wait_at(gate: Path) -> None:
    """Wait until the file exists, and mark that it is waiting."""
    gate.with_suffix(".reached").touch()
    while not gate.exists():
        time.sleep(0.1)


async def gated(
    llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings, *, folder: str
) -> Trajectory:
    """Sample twice, and between the turns of step N (3 or 4) waits for the file FOLDER/N.

    FOLDER/N.reached says that an episode is waiting.
    """
    chat, gate = llm.conversation(), Path(folder, str(llm.settings.step))
    await chat.sample(sampling)
    chat.add([{"role": "user", "content": "Look again."}])
    if llm.settings.step in (3, 4):
        async with llm.away():
            await asyncio.to_thread(wait_at, gate)
    await chat.sample(sampling)
    return chat.trajectory()
