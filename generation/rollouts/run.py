"""One step's rollouts on one engine: groups of samples, each group scheduled as soon as there is room for it.

Which engine samples which prompt is decided while they run: every leader claims the next prompt when it has room, so
one long answer does not idle the others. It never has more than its fair share unfinished, or the first leader to begin
would claim a small step's prompts before the others can. The samples do not depend on it, since a sample's seed depends
on its place only. A trajectory continues with its next turn as soon as it can, whatever the others do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from generation.engine.engine import Engine
from generation.exact_ids import mark_versions
from generation.images import ImageRules, Spans, StoredImage
from generation.rollouts.episode import Conversation, PolicyLLM, RolloutFunction, RolloutSettings, one_shot
from generation.rollouts.user_code import contained, described
from generation.trajectory import Trajectory, check_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Claim = Callable[[], int | None]
"""The index of the next prompt that no engine has taken yet, or None when there is none."""

OnSample = Callable[[Trajectory], Awaitable[None]]
"""Called for each finished trajectory while others still run; scoring happens here."""


@dataclass(frozen=True)
class EpisodeSetup:
    """The function that runs an episode, and its arguments besides the prompt's ids.

    `rows` of the dataset are by prompt, and so are `messages`, those it was rendered from, where there are any, and
    `images` with their places among the prompt's ids, where the run has `image_rules`.
    """

    function: RolloutFunction = one_shot
    tokenizer: "PreTrainedTokenizerBase | None" = None
    rows: Sequence[Mapping[str, Any]] | None = None
    messages: Sequence[list[dict[str, Any]] | None] | None = None
    images: Sequence[tuple[Sequence[StoredImage], Spans]] | None = None
    image_rules: ImageRules | None = None

    def seen(self, prompt: int) -> dict[str, Any]:
        """The arguments of `PolicyLLM` about images, those of a prompt read. Raises ValueError where one is gone."""
        if not self.images:
            return {}
        images, spans = self.images[prompt]
        read = tuple(image.read() for image in images)
        return {"images": read, "image_spans": spans, "image_rules": self.image_rules}


async def rollout(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: RolloutSettings,
    claim: Claim,
    on_sample: OnSample,
    setup: EpisodeSetup = EpisodeSetup(),
    engines: int = 1,
) -> list[Trajectory]:
    """Sample groups for as many prompts as this engine can claim; returns their trajectories in the order they
    finished. `engines` share the prompts.

    An episode that fails becomes a trajectory with `error` set and affects no other: every episode that began is
    there, however it ended. Where `on_sample` sets `error` on one of an episode's trajectories, all of them have
    failed. A dead engine, an engine in the wrong state and an error that `on_sample` raises end the rollout.
    """
    engine.state.check_can_generate(settings.policy_version)
    finished: list[Trajectory] = []
    begun: dict[tuple[int, int], PolicyLLM] = {}
    # One group more than the engine runs at once, so that it never waits for us; no more, so that others find work to
    # claim. Trajectories that wait for tools do not count.
    room = asyncio.Semaphore(engine.settings.max_num_seqs + settings.group_size)
    share = asyncio.Semaphore(max(1, -(-len(prompts) // engines)) * settings.group_size)  # in samples of whole groups

    async def one(llm: PolicyLLM) -> None:
        row = dict(setup.rows[llm.prompt_index]) if setup.rows else {}
        finished.extend(await scored_episode(setup.function, llm, row, on_sample, room))

    async with asyncio.TaskGroup() as group:
        await room.acquire()
        while True:
            for _ in range(settings.group_size):
                await share.acquire()
            if (prompt := claim()) is None:
                break
            messages = setup.messages[prompt] if setup.messages else None
            tokenizer = cast("PreTrainedTokenizerBase", setup.tokenizer)
            seen = setup.seen(prompt)
            for sample in range(settings.group_size):
                llm = PolicyLLM(engine, tokenizer, settings, prompt, sample, prompts[prompt], messages, room, **seen)
                begun[prompt, sample] = llm
                group.create_task(one(llm)).add_done_callback(lambda _: share.release())
                await room.acquire()
    ended = {(t.prompt_index, t.sample_index) for t in finished}
    # A task group does not notice a task that somebody else has cancelled.
    return finished + [lost_episode(llm) for place, llm in begun.items() if place not in ended]


def lost_episode(llm: PolicyLLM) -> Trajectory:
    """The trajectory of an episode whose task somebody else has cancelled."""
    error = "CancelledError: the episode's task was cancelled by somebody else"
    return llm.trajectory(finish_reason="error", error=error)


async def scored_episode(
    function: RolloutFunction, llm: PolicyLLM, row: dict[str, Any], on_sample: OnSample, room: asyncio.Semaphore
) -> list[Trajectory]:
    """An episode's trajectories once `on_sample` has seen them; its place in `room` is free before that."""
    try:
        trajectories = await run_episode(function, llm, row)
    finally:
        room.release()
    for trajectory in trajectories:
        await on_sample(trajectory)
    if error := next((t.error for t in trajectories if t.error), ""):
        for trajectory in trajectories:
            trajectory.error = trajectory.error or error
    return trajectories


async def run_episode(function: RolloutFunction, llm: PolicyLLM, row: dict[str, Any]) -> list[Trajectory]:
    """An episode's trajectories, a list in any case. Whatever the function raises becomes one trajectory's `error`,
    except the engine's own failure, which is raised whatever the function made of it.
    """
    try:
        trajectories = await contained(_checked(function, llm, row))
    except Exception as error:
        if llm.fatal is not None:
            raise llm.fatal from None
        return [llm.trajectory(finish_reason="error", error=described(error))]
    if llm.fatal is not None:
        raise llm.fatal
    return trajectories


async def _checked(function: RolloutFunction, llm: PolicyLLM, row: dict[str, Any]) -> list[Trajectory]:
    result = await function(llm, row, llm.settings.sampling)
    trajectories = [result] if isinstance(result, Trajectory) else list(result)
    trajectories = [t.trajectory() if isinstance(t, Conversation) else t for t in trajectories]
    if not trajectories or not all(isinstance(t, Trajectory) for t in trajectories):
        raise TypeError(f"a rollout function must return a Trajectory or a list of them, but gave {result!r:.100}")
    for trajectory in trajectories:
        llm.add_routes(trajectory)
        trajectory.prompt_index, trajectory.sample_index = llm.prompt_index, llm.sample_index
        mark_versions(trajectory, llm.sampled)
        check_rewards(trajectory, getattr(function, "__qualname__", "the rollout"))
    return trajectories
