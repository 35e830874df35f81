"""Level 4: a coroutine of one's own, as `custom: scripts/examples/second_look.py:second_look` in a recipe.

It runs on the engine's event loop, once for each trajectory, all of them at once: wait for others with `llm.away()`.
"""

from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM
from generation.trajectory import Trajectory


async def second_look(
    llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings, *, looks: int = 2, bonus: float = 0.1
) -> Trajectory:
    """Ask for another look at each answer; an answer that stays the same earns a bonus."""
    chat, answers = llm.conversation(), list[str]()
    while await chat.sample(sampling) is not None:
        answers.append(chat.answer)
        if chat.turns > looks:
            break
        chat.add([{"role": "user", "content": "Look again."}])
    settled = len(answers) > 1 and answers[-1] == answers[-2]
    return chat.trajectory(reward=bonus * settled)
