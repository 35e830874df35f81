"""Run episodes on the engines of a crew of ranks: each engine runs a share of a round, all ranks
get all answers.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from generation.engine.engine import Leader
from generation.engine.sampling import NotFiniteError
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.episodes import CarriedGroup, EpisodeSetup, rollout
from generation.rollouts.sampler import sample_batch
from generation.rollouts.sampler_prompts import prompt_batch
from generation.trajectory import Trajectory, by_episode, checked_reward
from sharding.ranks import agreed, all_reduce_sum, exchange
from trainer.chat_template import EndTokens
from trainer.data import Prompt
from trainer.learning.answers import Answer, failed_episodes, gather_answers
from trainer.rewards.reward_pool import RewardPool
from trainer.rewards.trial import opened_tag
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.round import Round, sampled_round

T = TypeVar("T")
_CLOSE_SECONDS = 15.0
_LOOK_SECONDS = 0.2  # between checks of whether to stop

TakePrompts = Callable[[int, int], list[Prompt]]
"""A function (position, count) that returns this many prompts to train on, from this position
on.
"""


class RolloutError(RuntimeError):
    """Too many episodes of a step failed."""


class StepAbandoned(RuntimeError):
    """The step's rollouts were abandoned on all ranks; policy and state are those after the
    previous step.
    """


@dataclass(frozen=True)
class Terms:
    """The conditions of a round of rollouts.

    Attributes:
        timeout: seconds after which a round fails.
        give_up: polled during a round; True abandons it.
        details: as in `gather_answers`.
    """

    timeout: float
    give_up: Callable[[], bool] = lambda: False
    details: bool = False


class EpisodePool(Protocol):
    """The groups of episodes that steps take. All ranks of a crew make the same calls.

        pool.take_back(step)  # undoes an attempt at this step, if there was one
        taken = pool.take(position, count, settings, terms)
        following = pool.take(taken.position, more, settings, terms)
        checkpoint = pool.groups()
        pool.close()

    `Pool` samples whole answers; `trainer.rollouts.carried.CarriedPool` lets them grow slice by
    slice.
    """

    def take(self, position: int, count: int, settings: RolloutSettings, terms: Terms) -> Round:
        """Return `count` scored groups, of which new ones begin with the prompt at `position`.
        Collective.

        Raises as `Pool.run`. `Round.position` is the position of the next prompt to begin.
        """

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, if there was one. Collective."""

    def groups(self) -> list[CarriedGroup]:
        """Return this engine's groups that continue in the next step. Call it between rounds."""

    def present(self) -> list[Trajectory]:
        """Return a few of those groups' answers that have tokens of the present version."""

    def waits_for(self) -> str:
        """Describe this engine's episodes that hold up the round while the engine is idle; "" for
        none.
        """

    def close(self) -> None:
        """End the episodes under way, their servers and processes. Call it before the engine
        stops.
        """


class Pool:
    """The engines of this crew's ranks, and the scoring of their answers: an `EpisodePool` of whole
    answers.

    Attributes:
        prompts: the prompts to train on, by position.
        leader: this rank's engine, if it leads one.
        engines: number of engines that share the prompts.
        finished: number of answers in this round that this rank's engine has finished.
    """

    def __init__(
        self,
        leader: Leader | None,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardPool,
        store: dist.Store,
        level: RolloutLevel,
        engines: int = 1,
        max_error_rate: float = 1.0,
        ends: EndTokens | None = None,
        prompts: TakePrompts | None = None,
    ) -> None:
        """Prepare the pool.

        Args: store: the ranks' store. max_error_rate: the largest share of episodes that may fail.
            ends: the tokens that end an answer, which are not part of the text that rewards see;
            None: special tokens are left out of that text, and no others. prompts: the prompts to
            train on; None: the pool is for evaluations only.
        """
        self.leader = leader
        self.tokenizer = tokenizer
        self.level = level
        self.engines = engines
        self.prompts = prompts
        self.finished = 0
        self._rewards = rewards
        self._store = store
        self._max_error_rate = max_error_rate
        self._ends = ends or EndTokens()
        self._rounds = self._calls = 0

    def run(
        self, prompts: list[Prompt], settings: RolloutSettings, terms: Terms, voting: bool = False
    ) -> list[Answer]:
        """Sample and score groups for all prompts; return equal lists on all ranks, ordered by
        prompt and sample.

        Args:
            prompts: equal on all ranks.
            settings: how to sample.
            terms: time limit, and when to abandon the round.
            voting: True extracts each answer's vote, for a majority vote.

        Raises: RemoteError: on all ranks, if an engine failed on one. RolloutError: if too many
            episodes failed. RewardError: if a reward function failed in too many calls.
            StepAbandoned: on all ranks, if `terms.give_up()` became true on a rank while its engine
            was working. NotFiniteError: on all ranks, if an engine sampled a log-probability that
            is not finite.
        """
        self.begin_round()

        def sample(leader: Leader) -> Coroutine[Any, Any, list[Trajectory]]:
            return self._sample(leader, prompts, settings, terms.timeout, voting)

        sampled = self.on_leaders(sample, terms, settings.step)
        answers = gather_answers(sampled or [], terms.details)
        self.check(answers)
        return answers

    def begin_round(self) -> None:
        """Begin a round: reset the count of finished answers and the counter by which engines claim
        prompts.
        """
        self._rounds = self._rounds + 1
        self.finished = 0

    def check(self, answers: list[Answer]) -> None:
        """Raise RolloutError if too many of a round's episodes failed, RewardError if reward calls
        did. Collective.
        """
        check_failures(answers, self._max_error_rate)
        self._rewards.check_error_rate(all_reduce_sum(self._rewards.take_counts()))

    def take(self, position: int, count: int, settings: RolloutSettings, terms: Terms) -> Round:
        """Sample the groups of the `count` prompts from `position` on, as `EpisodePool.take`."""
        assert self.prompts is not None
        answers = self.run(self.prompts(position, count), settings, terms)
        end = position + count
        return sampled_round(answers, settings.step, settings.policy_version, range(position, end), end)

    def take_back(self, step: int) -> None:
        """Forget an attempt at a step: reset the counts of failed reward calls. Collective."""
        self._rewards.take_counts()

    def groups(self) -> list[CarriedGroup]:
        """Return []: no group continues in the next step."""
        return []

    def present(self) -> list[Trajectory]:
        """Return []: all answers are trained on."""
        return []

    def waits_for(self) -> str:
        """Return "": an episode that holds up the round is not known."""
        return ""

    def on_leaders(
        self, work: Callable[[Leader], Coroutine[Any, Any, T]], terms: Terms, step: int
    ) -> T | None:
        """Run `work` on this engine's event loop; return its result, or None on a rank without an
        engine.

        Collective; raises as `run`. If it fails on one leader, the others stop soon after.
        """
        result: T | None = None
        not_finite: float | None = None
        self._calls += 1
        failed = f"rollout failed/{self._calls}"

        def stopped() -> bool:
            return terms.give_up() or self._store.check([failed])

        with agreed("rollout"):
            if self.leader is not None:
                self.leader.engine.not_finite = None
                try:
                    running = unless(stopped, work(self.leader))
                    result = self.leader.thread.run(running, terms.timeout, "the rollout")
                except Exception as error:
                    self._store.set(failed, "")
                    if isinstance(error, ExceptionGroup):
                        # The group has the same error for each request
                        raise first_error(error) from None
                    raise
                not_finite = self.leader.engine.not_finite
        outcomes = exchange([self.leader is not None and result is None, not_finite])
        for rank, (_, number) in enumerate(outcomes):
            if number is not None:
                raise NotFiniteError(
                    f"the engine of rank {rank} sampled a token with a log-probability of {number}"
                )
        if any(given_up for given_up, _ in outcomes):
            raise StepAbandoned(f"the rollouts of step {step} were given up")
        return result

    def close(self) -> None:
        """Stop the servers and processes that episodes have started. Call it before the engine
        stops.
        """
        if self.leader is not None:
            self.leader.thread.run(self.level.aclose(), _CLOSE_SECONDS, "ending the rollouts")

    async def _sample(
        self,
        leader: Leader,
        prompts: list[Prompt],
        settings: RolloutSettings,
        timeout: float,
        voting: bool,
    ) -> list[Trajectory]:
        """Sample and score this engine's share of the prompts, which begin in their order."""
        ids = [prompt.token_ids for prompt in prompts]
        level = self.level
        key = f"rollout/{self._rounds}"

        def claim() -> int | None:
            """Claim the next prompt by a counter in the ranks' store, so that it goes to one engine
            only.
            """
            index = self._store.add(key, 1) - 1
            return index if index < len(ids) else None

        async def score(trajectory: Trajectory) -> None:
            await self.score(trajectory, prompts[trajectory.prompt_index], voting)

        if level.function is not None:
            setup = self.setup(prompts)
            return await rollout(leader.engine, ids, settings, claim, score, setup, self.engines)
        # A sampler takes all its prompts at once, so engines claim equal shares first
        assert level.sampler is not None
        claims = [claim() for _ in range(-(-len(ids) // self.engines))]
        share = [index for index in claims if index is not None]
        messages = level.messages(prompts)
        rows = [prompt.row for prompt in prompts]
        rules = level.image_rules
        images = [(prompt.images, prompt.image_spans) for prompt in prompts] if rules else None
        batch = prompt_batch(ids, share, self.tokenizer, settings.group_size, messages, rows, images)
        return await sample_batch(
            leader.engine, self.tokenizer, level.sampler, batch, settings, score, timeout, rules
        )

    def setup(self, prompts: Sequence[Prompt]) -> EpisodeSetup:
        """Return the arguments of these prompts' episodes."""
        level = self.level
        rows = [prompt.row for prompt in prompts]
        images = None
        if level.image_rules:
            images = [(prompt.images, prompt.image_spans) for prompt in prompts]
        assert level.function is not None
        messages = level.messages(prompts)
        return EpisodeSetup(level.function, self.tokenizer, rows, messages, images, level.image_rules)

    async def score(self, trajectory: Trajectory, prompt: Prompt, voting: bool = False) -> None:
        """Add the reward functions' weighted sum, for the last answer, to the episode's own reward.

        An episode whose reward is not usable counts as failed. One without a reward of its own,
        from which all functions abstain, is marked; a trajectory with a group has one, even if 0.
        """
        self.finished += 1
        if trajectory.error:
            return
        start = time.perf_counter()
        if trajectory.finish_reason == "length":
            trajectory.metrics["length/past_end"] = float(self._ends.are_passed_by(trajectory))
        decoded = trajectory.decoded
        last = trajectory.response_ids[trajectory.answer_start :]
        trajectory.text = self._text(trajectory.response_ids) if decoded is None else decoded
        completion = self._text(last) if trajectory.answer_start and decoded is None else trajectory.text
        if voting:
            trajectory.vote = await self._rewards.extract(completion)
        if not self._rewards.labels:
            return
        question = self.tokenizer.decode([*prompt.token_ids], skip_special_tokens=False)
        before = trajectory.prompt_ids + trajectory.response_ids[: trajectory.answer_start]
        has_reward = bool(
            trajectory.group or trajectory.reward or trajectory.reward_parts or trajectory.turn_rewards
        )
        result = await self._rewards.score(
            prompt=question,
            completion=completion,
            row=prompt.row,
            finish_reason=trajectory.finish_reason,
            trajectory=trajectory,
            opened=opened_tag(self.tokenizer, before),
        )
        trajectory.abstained = result.abstained and not has_reward
        trajectory.reward_parts |= result.parts
        trajectory.metrics["time/reward"] = time.perf_counter() - start
        if result.failures:
            trajectory.reward_error = result.error
            trajectory.metrics |= {
                f"reward/errors/{label}/{kind}": 1.0 for label, kind in result.failures.items()
            }
        try:
            if result.unusable:
                raise ValueError(result.error)
            total = trajectory.reward + result.reward
            trajectory.reward = checked_reward(
                total, "with what reward functions gave, the episode's own reward is"
            )
        except ValueError as error:
            trajectory.reward = 0.0
            trajectory.finish_reason = "error"
            trajectory.error = f"reward: {error}"

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(self._ends.removed_from(token_ids), skip_special_tokens=True))


async def unless(stopped: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the coroutine's result, or None after cancelling it because `stopped()`, which is
    polled, was true.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not stopped():
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check_failures(answers: list[Answer], max_error_rate: float) -> None:
    """Raise RolloutError, with the first error, if a larger share of the episodes than
    `max_error_rate` failed.

    Episodes on which only a reward function failed do not count; `reward.max_error_rate` limits
    those.
    """
    episodes = by_episode(answers)
    errors = failed_episodes(answers)
    if len(errors) > max_error_rate * len(episodes):
        raise RolloutError(
            f"{len(errors)} of {len(episodes)} episodes failed, more than rollout.max_error_rate="
            f"{max_error_rate:g} allows; first error: {errors[0]}"
        )


def first_error(group: BaseExceptionGroup) -> BaseException:
    """Return a task group's first error that is not a cancellation."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return first_error(error)
        if not isinstance(error, asyncio.CancelledError):
            return error
    return group
