"""One step's rollouts on one engine: groups of samples, each group scheduled as soon as there is room for it.

Which engine samples which prompt is decided while they run: every leader claims the next prompt when it has room, so
one long answer does not idle the others. What is sampled does not depend on it, since the seed of a sample depends on
its place only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .sampling import SamplingSettings, sample_seed
from .trajectory import Trajectory
from .vllm_compat import request_errors
from .worker_async import VllmAsyncGenerationWorker

Claim = Callable[[], int | None]
"""The index of the next prompt that nobody has taken yet, over all engines, or None when there is none."""

OnSample = Callable[[Trajectory], Awaitable[None]]
"""Called for each finished sample while others still run; scoring happens here."""


@dataclass(frozen=True)
class RolloutSettings:
    """What one step's rollouts are: `group_size` samples of each prompt by the policy of `policy_version`.

    `seed` and `step` only choose the samples' seeds.
    """

    group_size: int
    sampling: SamplingSettings
    policy_version: int
    seed: int
    step: int


async def rollout(
    engine: VllmAsyncGenerationWorker,
    prompts: Sequence[Sequence[int]],
    settings: RolloutSettings,
    claim: Claim,
    on_sample: OnSample,
) -> list[Trajectory]:
    """Sample groups for as many prompts as this engine can claim; returns their trajectories in the order they
    finished.

    A request that fails becomes a trajectory with `error` set and takes nobody with it. A dead engine, an engine in the
    wrong state and an error in `on_sample` end the rollout.
    """
    engine.state.check_can_generate(settings.policy_version)
    finished: list[Trajectory] = []
    # One group more than the engine runs at once, so that it never waits for us; no more, so that others find work to
    # claim.
    room = asyncio.Semaphore(engine.settings.max_num_seqs + settings.group_size)

    async def one(prompt: int, sample: int) -> None:
        try:
            trajectory = await sample_once(engine, prompts[prompt], prompt, sample, settings)
        finally:
            room.release()
        await on_sample(trajectory)
        finished.append(trajectory)

    async with asyncio.TaskGroup() as group:
        await room.acquire()
        while (prompt := claim()) is not None:
            for sample in range(settings.group_size):
                group.create_task(one(prompt, sample))
                await room.acquire()
    return finished


async def sample_once(
    engine: VllmAsyncGenerationWorker, prompt_ids: Sequence[int], prompt: int, sample: int, settings: RolloutSettings
) -> Trajectory:
    """One response to one prompt; a failing request is told in the trajectory's `error`."""
    seed = sample_seed(settings.seed, settings.step, prompt, sample)
    version = settings.policy_version
    try:
        completion = await engine.complete(list(prompt_ids), settings.sampling, seed=seed, policy_version=version)
    except request_errors() as error:
        text = f"{type(error).__name__}: {error}"
        return Trajectory(prompt, sample, list(prompt_ids), weight_version=version, finish_reason="error", error=text)
    aborted = completion.finish_reason not in ("stop", "length")
    return Trajectory(
        prompt_index=prompt,
        sample_index=sample,
        prompt_ids=list(prompt_ids),
        response_ids=completion.token_ids,
        loss_mask=[1] * len(completion.token_ids),
        logprobs=completion.logprobs,
        weight_version=version,
        finish_reason="error" if aborted else completion.finish_reason,
        error=f"vLLM ended the request with {completion.finish_reason!r}" if aborted else "",
    )
