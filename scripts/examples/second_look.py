"""Level 4: a custom coroutine, as `custom: scripts/examples/second_look.py:second_look` in a recipe.

It runs on the engine's event loop, for all trajectories at once. Use `llm.away()` to wait for anything but the engine.
"""

from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM
from generation.trajectory import Trajectory


async def second_look(
    llm: PolicyLLM,
    row: dict[str, Any],
    sampling: SamplingSettings,
    *,
    looks: int = 2,
    bonus: float = 0.1,
) -> Trajectory:
    """Ask for another look at each answer. An answer that stays the same gets a bonus."""
    chat, answers = llm.conversation(), list[str]()
    while await chat.sample(sampling) is not None:
        answers.append(chat.answer)
        if chat.turns > looks:
            break
        chat.add([{"role": "user", "content": "Look again."}])
    settled = len(answers) > 1 and answers[-1] == answers[-2]
    return chat.trajectory(reward=bonus * settled)
