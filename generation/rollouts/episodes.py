"""Run the episodes of one engine: those of one step, or those that continue over several shifts.

The engines decide while they run which of them samples which prompt of a step. The leader of an
engine claims the next prompt when the engine has room, so that no engine idles while another has a
long answer. It never has more than its share of the prompts unfinished; otherwise the first leader
could claim all prompts of a small step. The samples do not depend on the engine, since a sample's
seed depends on its prompt and sample index only. Each episode goes on with its next turn as soon as
it can, without waiting for other episodes.

Where answers are cut into slices of tokens, episodes park at the end of a slice, and go on in the
next shift. Whether an episode has ended after a slice depends on its own tokens only, so it is the
same on any number of engines.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from generation.engine.engine import Engine
from generation.engine.slices import Slices, Turnstile, Unfinished
from generation.exact_ids import mark_versions
from generation.images import ImageRules, Spans, StoredImage
from generation.rollouts.episode import (
    Conversation,
    PolicyLLM,
    RolloutFunction,
    RolloutSettings,
    one_shot,
)
from generation.rollouts.user_code import contained, described
from generation.trajectory import Trajectory, check_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Claim = Callable[[], int | None]
"""Returns the index of the next prompt that no engine has taken yet, or None when there is none."""

OnSample = Callable[[Trajectory], Awaitable[None]]
"""Called with each finished trajectory, while others still run, to score it."""


@dataclass(frozen=True)
class EpisodeSetup:
    """The function that runs an episode, and its arguments besides the prompt's ids.

    Attributes: function: the rollout function. tokenizer: the model's tokenizer. rows: the
        dataset's row of each prompt. messages: the messages that each prompt was rendered from;
        None for a prompt that is plain text or ids. images: the images of each prompt, and their
        places among its ids. image_rules: how the run treats images; None: the run has none.
    """

    function: RolloutFunction = one_shot
    tokenizer: "PreTrainedTokenizerBase | None" = None
    rows: Sequence[Mapping[str, Any]] | None = None
    messages: Sequence[list[dict[str, Any]] | None] | None = None
    images: Sequence[tuple[Sequence[StoredImage], Spans]] | None = None
    image_rules: ImageRules | None = None

    def image_arguments(self, prompt: int) -> dict[str, Any]:
        """Read a prompt's images. Return `PolicyLLM`'s arguments for them. Raises ValueError where
        a file is gone.
        """
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
    """Sample groups for as many prompts as this engine can claim. Return trajectories in the order
    they finished.

    `engines` is the number of engines that share the prompts.

    An episode that fails becomes a trajectory with `error` set, and affects no other episode. Where
    `on_sample` sets `error` on one of an episode's trajectories, all of its trajectories have
    failed. A dead engine, an engine in the wrong state and an error that `on_sample` raises end the
    rollout.
    """
    engine.state.check_can_generate(settings.policy_version)
    finished: list[Trajectory] = []
    begun: dict[tuple[int, int], PolicyLLM] = {}
    # One group more than the engine runs at once, so that the engine always has work; no more than
    # that where other engines can claim prompts. A single engine also has the next wave of answers
    # waiting, since all answers of a wave can end in the same step. Episodes that wait for tools do
    # not count.
    waves = 2 if engines == 1 else 1
    room = asyncio.Semaphore(engine.settings.max_num_seqs * waves + settings.group_size)
    # In samples of whole groups
    share = asyncio.Semaphore(max(1, -(-len(prompts) // engines)) * settings.group_size)

    async def run_one(llm: PolicyLLM) -> None:
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
            images = setup.image_arguments(prompt)
            for sample in range(settings.group_size):
                ids = list(prompts[prompt])
                llm = PolicyLLM(
                    engine, tokenizer, settings, prompt, sample, ids, messages, room, **images
                )
                begun[prompt, sample] = llm
                group.create_task(run_one(llm)).add_done_callback(lambda _: share.release())
                await room.acquire()
    ended = {(t.prompt_index, t.sample_index) for t in finished}
    # A task group does not notice when a task is cancelled by other code.
    return finished + [lost_episode(llm) for indices, llm in begun.items() if indices not in ended]


def lost_episode(llm: PolicyLLM) -> Trajectory:
    """Return the failed trajectory of an episode whose task was cancelled, but not by this
    module.
    """
    error = "CancelledError: the episode's task was cancelled by other code"
    return llm.trajectory(finish_reason="error", error=error)


async def scored_episode(
    function: RolloutFunction,
    llm: PolicyLLM,
    row: dict[str, Any],
    on_sample: OnSample,
    room: asyncio.Semaphore,
) -> list[Trajectory]:
    """Run an episode, free its place in `room`, and have `on_sample` score its trajectories. Return
    them.
    """
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


async def run_episode(
    function: RolloutFunction, llm: PolicyLLM, row: dict[str, Any]
) -> list[Trajectory]:
    """Run an episode, and return its trajectories. An error that the function raises becomes the
    `error` of a single trajectory. The engine's own failure is raised, even if the function has
    caught it.
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
        raise TypeError(
            f"a rollout function must return a Trajectory or a list of them, but gave {result!r:.100}"
        )
    for trajectory in trajectories:
        llm.add_routes(trajectory)
        trajectory.prompt_index = llm.prompt_index
        trajectory.sample_index = llm.sample_index
        mark_versions(trajectory, llm.sampled)
        check_rewards(trajectory, getattr(function, "__qualname__", "the rollout"))
    return trajectories


@dataclass
class CarriedGroup:
    """The episodes of one prompt, from their beginning until they are trained on. Checkpoints
    contain it.

    Attributes:
        place: the position of the prompt in the sequence of all prompts; a lower one is older.
        born: the step in which the group began.
        done: the scored trajectories of the episodes that have ended, by sample.
        unfinished: the parked answers by sample, where an episode consists of a single answer.
    """

    place: int
    born: int
    done: dict[int, list[Trajectory]] = field(default_factory=dict)
    unfinished: dict[int, Unfinished] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """The arguments for starting or continuing a group. `prompt_index` and `settings` decide its
    seeds.
    """

    group: CarriedGroup
    settings: RolloutSettings
    prompt_index: int
    prompt_ids: Sequence[int]
    row: Mapping[str, Any]
    messages: list[dict[str, Any]] | None
    on_sample: OnSample
    images: Mapping[str, Any] = field(default_factory=dict)  # from `EpisodeSetup.image_arguments`


@dataclass(eq=False)
class CarriedEpisodes:
    """All groups of one engine that are not trained on yet. Its coroutines run on the engine's
    event loop.

    Attributes:
        groups: the groups by place.
    """

    engine: Engine
    slices: Slices
    function: RolloutFunction
    tokenizer: "PreTrainedTokenizerBase"
    group_size: int
    groups: dict[int, CarriedGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # See `rollout`
        self._room = asyncio.Semaphore(self.engine.settings.max_num_seqs + self.group_size)
        # The turnstiles of unfinished episodes, by place and sample.
        self._turnstiles: dict[tuple[int, int], Turnstile] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._stopped = False

    @property
    def unfinished(self) -> int:
        """The number of unfinished episodes."""
        return len(self._turnstiles)

    @property
    def elsewhere(self) -> int:
        """The number of episodes that run tools or their own code, or are being scored. Safe from
        any thread.
        """
        return self.slices.elsewhere

    def complete(self) -> list[int]:
        """Return the places of the groups whose episodes have all ended."""
        return [
            position for position, group in self.groups.items() if len(group.done) == self.group_size
        ]

    async def slice(self, version: int, new: Sequence[Beginning]) -> list[int]:
        """Continue every unfinished episode by a slice, the oldest first, then begin the new groups
        in their order.

        Returns `complete()` when every episode has ended or is parked. The engine's failure, and an
        error that `on_sample` raises, end all episodes.
        """
        self.engine.state.check_can_generate(version)
        advanced = asyncio.ensure_future(self._continue_and_begin(version, new))
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({advanced, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return advanced.result()
        except BaseException:
            await self.stop()
            raise
        finally:
            self.slices.close()
            for task in (advanced, failed):
                task.cancel()
            await asyncio.gather(advanced, failed, return_exceptions=True)

    async def _continue_and_begin(self, version: int, new: Sequence[Beginning]) -> list[int]:
        self.slices.open(version)
        await asyncio.sleep(0)  # episodes that were parked take their places first
        for beginning in new:
            self.groups[beginning.group.place] = beginning.group
            for sample in range(self.group_size):
                if sample not in beginning.group.done:
                    await self._room.acquire()
                    self._begin(beginning, sample)
        await self.slices.settled()
        return self.complete()

    def _begin(self, beginning: Beginning, sample: int) -> None:
        group = beginning.group
        resources = ExitStack()
        turnstile = resources.enter_context(self.slices.episode(self._room))
        llm = PolicyLLM(
            self.engine,
            self.tokenizer,
            beginning.settings,
            beginning.prompt_index,
            sample,
            list(beginning.prompt_ids),
            beginning.messages,
            self._room,
            turnstile=turnstile,
            unfinished=group.unfinished.pop(sample, None),
            **beginning.images,
        )

        async def run() -> None:
            """Run the episode to its end, over as many steps as it takes."""
            row = dict(beginning.row)
            on_sample = beginning.on_sample
            group.done[sample] = await scored_episode(self.function, llm, row, on_sample, self._room)

        def ended(task: asyncio.Task[None]) -> None:
            """Note the end of the task: a cancelled episode is lost, and an error ends all
            episodes.
            """
            self._tasks.discard(task)
            del self._turnstiles[group.place, sample]
            if self._stopped:
                task.cancelled() or task.exception()  # retrieved, so that asyncio logs no warning
            elif task.cancelled():
                group.done[sample] = [lost_episode(llm)]
            elif (error := task.exception()) is not None:
                self._failure = self._failure or error
                self._failed.set()
            resources.close()

        self._turnstiles[group.place, sample] = turnstile
        self._tasks.add(task := asyncio.ensure_future(run()))
        task.add_done_callback(ended)

    def parked(self) -> list[tuple[int, int, Unfinished]]:
        """Return place, sample and answer of each episode that is parked with exactly one
        unfinished answer.

        In an episode of several turns, the answer's prompt contains the earlier ones.
        """
        parked = []
        for (position, sample), turnstile in self._turnstiles.items():
            answer = turnstile.unfinished
            if answer is not None:
                parked.append((position, sample, answer))
        return parked

    def kept(self) -> list[CarriedGroup]:
        """Return copies of the groups for a checkpoint, between two slices; later slices do not
        change the copies.
        """
        copies = {
            position: replace(group, done=dict(group.done), unfinished={})
            for position, group in self.groups.items()
        }
        for position, sample, answer in self.parked() if self.function is one_shot else ():
            copies[position].unfinished[sample] = replace(answer, opening=0)
        return [copies[position] for position in sorted(copies)]

    async def stop(self) -> None:
        """Cancel all unfinished episodes."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
