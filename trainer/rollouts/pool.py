"""Episodes on the engines of a crew of ranks: each engine runs its share of a round; every rank knows all answers."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from generation.engine.engine import Leader
from generation.engine.sampling import NotFiniteError
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.episodes import EpisodeSetup, rollout
from generation.rollouts.sampler import sample_batch
from generation.rollouts.sampler_prompts import prompt_batch
from generation.trajectory import Trajectory, by_episode, checked_reward
from sharding.ranks import agreed, all_reduce_sum, exchange
from trainer.data import Prompt
from trainer.learning.answers import Answer, failed_episodes, gather_answers
from trainer.rewards.pool import RewardPool
from trainer.rollouts.level import RolloutLevel

T = TypeVar("T")
_CLOSE_SECONDS = 15.0
_LOOK_SECONDS = 0.2  # between looks at whether to go on


class RolloutError(RuntimeError):
    """Too many episodes of a step failed."""


class StepAbandoned(RuntimeError):
    """The step's rollouts were given up, on all ranks; policy and state are those of the step before."""


@dataclass(frozen=True)
class Terms:
    """The conditions of a round of rollouts.

    Attributes:
        timeout: seconds; a round that takes longer is an error.
        give_up: asked now and then; once true, the round ends before it is done.
        details: as in `gather_answers`.
        lengths: tokens of the last answers by prompt id, updated in place; the longest begin first. None: prompts begin
            in their order.
    """

    timeout: float
    give_up: Callable[[], bool] = lambda: False
    details: bool = False
    lengths: dict[int, int] | None = None


class Pool:
    """The engines of this crew's ranks, one of which this rank may lead, and the scoring of what they sample.

    Attributes:
        leader: this rank's engine, if it leads one.
        engines: number of engines that share the prompts.
        finished: answers of the present round that this rank's engine has finished.
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
    ) -> None:
        """`store`: of the ranks, where prompts are claimed. Above `max_error_rate` failed episodes end the run."""
        self.leader, self.tokenizer, self.level, self.engines = leader, tokenizer, level, engines
        self.finished = 0
        self._rewards, self._store, self._max_error_rate = rewards, store, max_error_rate
        self._rounds = self._calls = 0

    def run(self, prompts: list[Prompt], settings: RolloutSettings, terms: Terms, voting: bool = False) -> list[Answer]:
        """Sample and score groups for all prompts; the same list on all ranks, ordered by prompt and sample.

        Args:
            voting: fill in each answer's vote, for a majority vote.

        Raises:
            RemoteError: on all ranks, when an engine failed on one.
            RolloutError: too many episodes failed.
            RewardError: a reward function failed in too many calls.
            StepAbandoned: on all ranks, when `terms.give_up()` became true on one whose engine was at work.
            NotFiniteError: on all ranks, when a log-probability of one's engine was not finite.
        """
        self.begin_round()
        order = starting_order(prompts, terms.lengths)

        def sample(leader: Leader) -> Coroutine[Any, Any, list[Trajectory]]:
            return self._sample(leader, prompts, settings, terms.timeout, voting, order)

        sampled = self.on_leaders(sample, terms, settings.step)
        answers = gather_answers(sampled or [], terms.details)
        self.check(answers, prompts, terms.lengths)
        return answers

    def begin_round(self) -> None:
        """Count finished answers from 0, and hand prompts out anew."""
        self._rounds, self.finished = self._rounds + 1, 0

    def check(self, answers: list[Answer], prompts: list[Prompt], lengths: dict[int, int] | None) -> None:
        """Raise RolloutError or RewardError where too much has failed in a round; see `note_answers`. Collective."""
        note_answers(answers, prompts, self._max_error_rate, lengths)
        self._rewards.check_error_rate(all_reduce_sum(self._rewards.take_counts()))

    def take_back(self) -> None:
        """Forget the failures of an attempt. Collective."""
        self._rewards.take_counts()

    def on_leaders(self, work: Callable[[Leader], Coroutine[Any, Any, T]], terms: Terms, step: int) -> T | None:
        """The result of `work` on this engine's loop; None on a rank that leads none. Collective; raises as `run`.

        Where it fails on one leader, the others stop soon after.
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
                        raise first_error(error) from None  # the others are the same error, once a request
                    raise
                not_finite = self.leader.engine.not_finite
        outcomes = exchange([self.leader is not None and result is None, not_finite])
        for rank, (_, number) in enumerate(outcomes):
            if number is not None:
                raise NotFiniteError(f"the engine of rank {rank} sampled a token with a log-probability of {number}")
        if any(given_up for given_up, _ in outcomes):
            raise StepAbandoned(f"the rollouts of step {step} were given up")
        return result

    def close(self) -> None:
        """Stop what episodes have started; before the engine stops."""
        if self.leader is not None:
            self.leader.thread.run(self.level.aclose(), _CLOSE_SECONDS, "ending the rollouts")

    async def _sample(
        self,
        leader: Leader,
        prompts: list[Prompt],
        settings: RolloutSettings,
        timeout: float,
        voting: bool,
        order: Sequence[int],
    ) -> list[Trajectory]:
        """The trajectories of this engine's share of the prompts, which are begun in that order, scored."""
        ids, level, key = [prompt.token_ids for prompt in prompts], self.level, f"rollout/{self._rounds}"

        def claim() -> int | None:
            """Prompts are handed out by a counter in the ranks' store: no server, and each goes to one engine."""
            index = self._store.add(key, 1) - 1
            return order[index] if index < len(ids) else None

        async def score(trajectory: Trajectory) -> None:
            await self.score(trajectory, prompts[trajectory.prompt_index], voting)

        if level.function is not None:
            setup = self.setup(prompts)
            return await rollout(leader.engine, ids, settings, claim, score, setup, self.engines)
        assert level.sampler is not None  # which wants all its prompts at once: engines share them out beforehand
        share = [index for _ in range(-(-len(ids) // self.engines)) if (index := claim()) is not None]
        messages, rows = level.messages(prompts), [prompt.row for prompt in prompts]
        rules = level.image_rules
        images = [(prompt.images, prompt.image_spans) for prompt in prompts] if rules else None
        batch = prompt_batch(ids, share, self.tokenizer, settings.group_size, messages, rows, images)
        return await sample_batch(leader.engine, self.tokenizer, level.sampler, batch, settings, score, timeout, rules)

    def setup(self, prompts: Sequence[Prompt]) -> EpisodeSetup:
        """The arguments of the episodes of these prompts."""
        level, rows = self.level, [prompt.row for prompt in prompts]
        images = [(prompt.images, prompt.image_spans) for prompt in prompts] if level.image_rules else None
        assert level.function is not None
        messages = level.messages(prompts)
        return EpisodeSetup(level.function, self.tokenizer, rows, messages, images, level.image_rules)

    async def score(self, trajectory: Trajectory, prompt: Prompt, voting: bool = False) -> None:
        """Add the reward functions' sum to the episode's own reward. They judge the last answer.

        An episode without a reward that can be learned from has failed.
        """
        self.finished += 1
        if trajectory.error:
            return
        start = time.perf_counter()
        decoded, last = trajectory.decoded, trajectory.response_ids[trajectory.answer_start :]
        trajectory.text = self._text(trajectory.response_ids) if decoded is None else decoded
        completion = self._text(last) if trajectory.answer_start and decoded is None else trajectory.text
        if voting:
            trajectory.vote = await self._rewards.extract(completion)
        if not self._rewards.labels:
            return
        asked, reason = self.tokenizer.decode([*prompt.token_ids], skip_special_tokens=False), trajectory.finish_reason
        result = await self._rewards.score(
            prompt=asked, completion=completion, row=prompt.row, finish_reason=reason, trajectory=trajectory
        )
        trajectory.reward_parts |= result.parts
        trajectory.metrics["time/reward"] = time.perf_counter() - start
        if result.failures:
            trajectory.reward_error = result.error
            trajectory.metrics |= {f"reward/errors/{label}/{kind}": 1.0 for label, kind in result.failures.items()}
        try:
            if result.unusable:
                raise ValueError(result.error)
            total = trajectory.reward + result.reward
            trajectory.reward = checked_reward(total, "with what reward functions gave, the episode's own reward is")
        except ValueError as error:
            trajectory.reward, trajectory.finish_reason, trajectory.error = 0.0, "error", f"reward: {error}"

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def note_answers(
    answers: list[Answer], prompts: list[Prompt], max_error_rate: float, lengths: dict[int, int] | None
) -> None:
    """Raise RolloutError where too many episodes of a round failed; give answers their prompts' images, and note in
    `lengths` how long they are.
    """
    check_failures(answers, max_error_rate)
    for answer in answers:
        answer.stored_images = prompts[answer.prompt_index].images
    if lengths is not None:
        lengths |= longest_answers(answers, prompts)


def starting_order(prompts: Sequence[Prompt], lengths: dict[int, int] | None) -> list[int]:
    """The indices of the prompts in the order in which engines begin them: their own, or by `lengths`, tokens of the
    last answers by prompt id, the longest first. A prompt that has not been answered yet may be the longest of all.
    """
    known = lengths or {}
    return sorted(range(len(prompts)), key=lambda index: -known.get(prompts[index].id, math.inf))


def longest_answers(answers: Sequence[Answer], prompts: Sequence[Prompt]) -> dict[int, int]:
    """The tokens that the longest episode of each prompt sampled, by prompt id; prompts whose episodes all failed
    are not there.
    """
    found: dict[int, int] = {}
    for episode in by_episode(answers):
        if not any(answer.error for answer in episode):
            prompt, length = prompts[episode[0].prompt_index].id, sum(answer.sampled for answer in episode)
            found[prompt] = max(length, found.get(prompt, 0))
    return found


async def unless(stopped: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
    """The coroutine's result, or None when it was cancelled because of `stopped()`, which is asked now and then."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not stopped():
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check_failures(answers: list[Answer], max_error_rate: float) -> None:
    """Raise RolloutError, with the first error, when a larger share of the episodes failed.

    Those on which a reward function failed are not among them: `reward.max_error_rate` is about these.
    """
    episodes, errors = by_episode(answers), failed_episodes(answers)
    if len(errors) > max_error_rate * len(episodes):
        raise RolloutError(
            f"{len(errors)} of {len(episodes)} episodes failed, more than rollout.max_error_rate="
            f"{max_error_rate:g} allows; first error: {errors[0]}"
        )


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The error a task group failed with: the first that is not a mere cancellation."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return first_error(error)
        if not isinstance(error, asyncio.CancelledError):
            return error
    return group
