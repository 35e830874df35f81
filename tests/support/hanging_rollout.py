"""A rollout function whose step 4 never ends, in a file of its own, so that ranks need not import tests."""

import asyncio
from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM, one_shot
from generation.trajectory import Trajectory


async def hangs_in_step_4(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
    """Generate one answer, except in step 4, where it sleeps."""
    if llm.settings.step == 4:
        await asyncio.sleep(1000)
    return await one_shot(llm, row, sampling)
