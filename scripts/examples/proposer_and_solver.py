"""Level 4 with two roles: `custom: scripts/examples/proposer_and_solver.py:propose_and_solve` in a recipe.

The policy proposes a sum, and then solves it several times. Each trajectory has its own reward and the name of its
group: proposers of a prompt are compared with each other, and so are all solutions of the same sum.
"""

import asyncio
from typing import Any

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import Conversation, PolicyLLM
from generation.trajectory import Trajectory


async def propose_and_solve(
    llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings, *, attempts: int = 4
) -> list[Trajectory]:
    """Have the policy choose the second number of a sum, and add it to the first one, which is the row's.

    A solver gets 1 for the right sum. A proposer gets the share of solvers that are wrong, and nothing for what is
    not a number. An evaluation has the solver alone, with the row's own sum.
    """
    first, second = row["prompt"].rstrip("=").split("+")
    if llm.settings.evaluation:
        return [await solve(llm, first, second, sampling)]
    proposer = chat(llm, f"{first}+?")
    await proposer.sample(sampling)
    proposal = proposer.answer[:2]
    if not (len(proposal) == 2 and proposal.isascii() and proposal.isdigit()):
        return [proposer.trajectory(group="proposer", reward=0.0)]
    solving = [solve(llm, first, proposal, sampling) for _ in range(attempts)]
    solvers = await asyncio.gather(*solving)
    wrong = sum(solver.reward == 0 for solver in solvers) / attempts
    return [proposer.trajectory(group="proposer", reward=wrong), *solvers]


async def solve(llm: PolicyLLM, first: str, second: str, sampling: SamplingSettings) -> Trajectory:
    """Return an attempt at a sum, whose digits are written units first."""
    solver = chat(llm, f"{first}+{second}=")
    await solver.sample(sampling)
    right = f"{int(first) + int(second):03d}"[::-1]
    return solver.trajectory(group=f"solver/{second}", reward=float(solver.answer == right))


def chat(llm: PolicyLLM, text: str) -> Conversation:
    """Return a conversation that begins with a user's message."""
    messages = [{"role": "user", "content": text}]
    prompt = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return llm.conversation(llm.tokenizer(prompt, add_special_tokens=False)["input_ids"])
