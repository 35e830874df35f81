"""A step's rollouts over all engines, scored while they run, and then known to every rank."""

import asyncio
import time

import msgspec
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from generation.rollout import Claim, RolloutSettings, rollout
from generation.trajectory import Trajectory
from sharding.collectives import agreed, all_gather_bytes
from sharding.manager import Leader
from trainer.data import Prompt
from trainer.rewards.pool import RewardPool


class Rollouts:
    """Runs rollouts on this rank's engine, if it leads one, and gives every rank all trajectories."""

    def __init__(
        self, leader: Leader | None, tokenizer: PreTrainedTokenizerBase, rewards: RewardPool, store: dist.Store
    ) -> None:
        self._leader, self._tokenizer, self._rewards, self._store = leader, tokenizer, rewards, store
        self._rounds = 0

    def run(self, prompts: list[Prompt], settings: RolloutSettings, timeout: float) -> list[Trajectory]:
        """Sample and score groups for all prompts; the same list on all ranks, ordered by prompt and sample.

        Raises:
            RemoteError: on all ranks, when an engine failed on one.
        """
        self._rounds += 1
        own: list[Trajectory] = []
        with agreed("rollout"):
            if self._leader is not None:
                work = self._sample(self._leader, prompts, settings)
                try:
                    own = self._leader.thread.run(work, timeout, "the rollout")
                except ExceptionGroup as group:
                    raise first_error(group) from None  # the others are the same error, once a request
        packed = all_gather_bytes(msgspec.msgpack.encode(own))
        everything = [t for part in packed for t in msgspec.msgpack.decode(part, type=list[Trajectory])]
        return sorted(everything, key=lambda t: (t.prompt_index, t.sample_index))

    async def _sample(self, leader: Leader, prompts: list[Prompt], settings: RolloutSettings) -> list[Trajectory]:
        ids = [prompt.token_ids for prompt in prompts]

        async def score(trajectory: Trajectory) -> None:
            await self._score(trajectory, prompts[trajectory.prompt_index])

        return await rollout(leader.engine, ids, settings, self._claims(len(prompts)), score)

    def _claims(self, count: int) -> Claim:
        """Prompts are handed out by a counter in the ranks' store: no server, and no two engines get the same one."""
        key = f"rollout/{self._rounds}"

        def claim() -> int | None:
            index = self._store.add(key, 1) - 1
            return index if index < count else None

        return claim

    async def _score(self, trajectory: Trajectory, prompt: Prompt) -> None:
        if trajectory.error:
            return
        start = time.perf_counter()
        trajectory.text = self._tokenizer.decode(trajectory.response_ids, skip_special_tokens=True)
        result = await self._rewards.score(
            prompt=self._tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False),
            completion=trajectory.text,
            row=prompt.row,
            finish_reason=trajectory.finish_reason,
        )
        trajectory.reward, trajectory.reward_parts = result.reward, result.parts
        trajectory.metrics["time/reward"] = time.perf_counter() - start
        if result.error:
            trajectory.metrics["reward/error"] = 1.0


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The error a task group failed with: the first that is not a mere cancellation."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return first_error(error)
        if not isinstance(error, asyncio.CancelledError):
            return error
    return group
