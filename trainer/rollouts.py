"""A step's rollouts over all engines, scored while they run, and then known to every rank by their figures.

What the recipe's `rollout` section names, loaded and checked before any model is: the way from prompt to trajectory.

Six levels, from nothing to any OpenAI client; each is one key of the section (README, "Rollouts").
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from generation.engine.sampling import NotFiniteError
from generation.rollouts.agent import Agent, environment_rollout, environment_tools, inline_rollout, tool_rollout
from generation.rollouts.episode import RolloutFunction, custom_rollout, one_shot
from generation.rollouts.run import Claim, Episodes, OnSample, RolloutSettings, rollout
from generation.rollouts.sampler import Sampler, make_sampler, sample_batch
from generation.rollouts.sampler_llm import PromptText, prompt_batch
from generation.rollouts.tools import CallParser, ToolLimits, ToolRunner, call_parser, make_tool, tools_by_name
from generation.trajectory import Trajectory, by_episode, checked_reward
from sharding.manager import Leader
from sharding.ranks import agreed, all_to_all_bytes, exchange, world_size
from trainer.config.schema import DataConfig, RolloutConfig, TrainConfig
from trainer.data import Prompt, prompt_messages
from trainer.errors import Interrupted, UserError
from trainer.importing import load_object
from trainer.learning.answers import Answer, gather_answers
from trainer.rewards.pool import RewardPool

if TYPE_CHECKING:
    pass


T = TypeVar("T")


class EpisodePlan:
    """How this recipe's prompts become trajectories. Raises UserError naming the key that does not fit.

    Attributes:
        data: the recipe's data section; where tools are to be described, their schemas go to the chat template.
        function: runs one episode; None where a sampler takes all prompts at once.
        sampler: level 5's object, or None.
    """

    def __init__(self, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
        rollout = config.rollout
        self._templated = config.data.apply_chat_template and tokenizer.chat_template is not None
        self.function: RolloutFunction | None = one_shot
        self.sampler: Sampler | None = None
        schemas: list[dict[str, Any]] = []
        if rollout.custom is not None:
            found = load_object(rollout.custom)
            self.function = _checked("rollout.custom", lambda: custom_rollout(found, rollout.kwargs))
        elif rollout.sampler is not None:
            found = load_object(rollout.sampler)
            self.function, self.sampler = None, _checked("rollout.sampler", lambda: make_sampler(found, rollout.kwargs))
        elif rollout.client is not None:
            self.function = _checked("rollout.client", lambda: _client_function(config))
        elif rollout.tools or rollout.environment is not None:
            self.function, schemas = _agent_function(rollout, tokenizer)
        self.data = _describing(config.data, schemas) if rollout.describe_tools else config.data

    async def aclose(self) -> None:
        """Stop what the function has started: level 6's server. On the engine's loop, before the engine stops."""
        if (close := getattr(self.function, "aclose", None)) is not None:
            await close()

    def messages(self, prompts: Sequence[Prompt]) -> list[list[dict[str, Any]] | None] | None:
        """What each prompt was rendered from; None where nobody asks, or no chat template is applied."""
        if not self._templated or self.function is one_shot:
            return None
        return [prompt_messages(prompt.row, self.data) for prompt in prompts]


def _agent_function(
    rollout: RolloutConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[RolloutFunction, list[dict[str, Any]]]:
    """Levels 2 and 3, and the schemas of their tools."""
    limits = ToolLimits(rollout.tool_timeout_s, rollout.max_concurrency, rollout.max_tool_tokens, rollout.tool_error)
    tools = _checked("rollout.tools", lambda: tools_by_name(make_tool(_function(spec)) for spec in rollout.tools))
    parse = _checked("rollout.tool_parser", lambda: _parser(rollout.tool_parser, tokenizer))
    agent = Agent(ToolRunner(limits, tokenizer), parse, rollout.max_turns, tools, rollout.describe_tools)
    schemas = [tool.schema for tool in tools.values()]
    if rollout.environment is None:
        return inline_rollout(agent) if rollout.tool_parser == "inline" else tool_rollout(agent), schemas
    found = load_object(rollout.environment)
    if not inspect.isclass(found) or not callable(getattr(found, "reset", None)):
        raise UserError(f"rollout.environment: {rollout.environment!r} must be a class with a method reset(**row)")
    schemas += [t.schema for t in _checked("rollout.environment", lambda: environment_tools(found)).values()]
    return _checked("rollout.environment", lambda: environment_rollout(found, rollout.kwargs, agent)), schemas


def _parser(name: str, tokenizer: "PreTrainedTokenizerBase") -> CallParser:
    return call_parser("hermes" if name == "inline" else name, tokenizer)  # inline calls are found otherwise


def _function(spec: str) -> Callable[..., Any]:
    found = load_object(spec)
    if not inspect.isroutine(found):
        raise ValueError(f"{spec!r} is {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _client_function(config: TrainConfig) -> RolloutFunction:
    """Level 6. The server and what it needs are imported only here."""
    from generation.rollouts.client import client_rollout
    from generation.server import ServerSettings

    assert config.rollout.client is not None
    found = load_object(config.rollout.client)
    client = functools.partial(found, **config.rollout.kwargs) if config.rollout.kwargs else found
    server = ServerSettings(tool_parser=config.rollout.tool_parser)
    return client_rollout(client, server, timeout_s=config.run.step_deadline_s)


def _checked(key: str, make: Callable[[], T]) -> T:
    """What `make` gives; what is wrong with the user's object becomes a sentence about the key."""
    try:
        return make()
    except (UserError, Interrupted):
        raise
    except BaseException as error:  # the user's constructor may raise anything
        raise UserError(f"{key}: {error or type(error).__name__}") from error


def _describing(data: DataConfig, schemas: list[dict[str, Any]]) -> DataConfig:
    if not schemas:
        return data
    return data.model_copy(update={"chat_template_kwargs": {**data.chat_template_kwargs, "tools": schemas}})


_CLOSE_SECONDS = 15.0
_LOOK_SECONDS = 0.2  # between looks at whether to go on


class RolloutError(RuntimeError):
    """Too many episodes of a step failed."""


class StepAbandoned(RuntimeError):
    """The step's rollouts were given up, on all ranks; policy and state are those of the step before."""


class Rollouts:
    """Runs rollouts on this rank's engine, if it leads one, and tells every rank of all answers."""

    def __init__(
        self,
        leader: Leader | None,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardPool,
        store: dist.Store,
        plan: EpisodePlan,
        engines: int = 1,
        max_error_rate: float = 1.0,
    ) -> None:
        """`engines` is how many leaders share the prompts; above `max_error_rate` failed episodes end the run."""
        self._leader, self._tokenizer, self._rewards, self._store = leader, tokenizer, rewards, store
        self._plan, self._engines, self._max_error_rate = plan, engines, max_error_rate
        self._rounds = 0

    def run(
        self,
        prompts: list[Prompt],
        settings: RolloutSettings,
        timeout: float,
        voting: bool = False,
        give_up: Callable[[], bool] = lambda: False,
        details: bool = False,
    ) -> list[Answer]:
        """Sample and score groups for all prompts; the same list on all ranks, ordered by prompt and sample.

        Args:
            voting: fill in what each answer comes down to, for a majority vote.
            details: see `gather_answers`.

        Raises:
            RemoteError: on all ranks, when an engine failed on one.
            RolloutError: too many episodes failed.
            StepAbandoned: on all ranks, when `give_up()` became true on one whose engine was at work.
            NotFiniteError: on all ranks, when a log-probability of one's engine was not finite.
        """
        self._rounds += 1
        own: list[Trajectory] | None = []
        not_finite: float | None = None
        with agreed("rollout"):
            if self._leader is not None:
                self._leader.engine.not_finite = None
                work = unless(give_up, self._sample(self._leader, prompts, settings, timeout, voting))
                try:
                    own = self._leader.thread.run(work, timeout, "the rollout")
                except ExceptionGroup as group:
                    raise first_error(group) from None  # the others are the same error, once a request
                not_finite = self._leader.engine.not_finite
        outcomes = exchange([own is None, not_finite])
        for rank, (_, number) in enumerate(outcomes):
            if number is not None:
                raise NotFiniteError(f"the engine of rank {rank} sampled a token with a log-probability of {number}")
        if own is None or any(given_up for given_up, _ in outcomes):
            raise StepAbandoned(f"the rollouts of step {settings.step} were given up")
        answers = gather_answers(own, details)
        check_failures(answers, self._max_error_rate)
        return answers

    def close(self) -> None:
        """Stop what episodes have started; before the engine stops."""
        if self._leader is not None:
            self._leader.thread.run(self._plan.aclose(), _CLOSE_SECONDS, "ending the rollouts")

    async def _sample(
        self, leader: Leader, prompts: list[Prompt], settings: RolloutSettings, timeout: float, voting: bool
    ) -> list[Trajectory]:
        ids, rows = [prompt.token_ids for prompt in prompts], [prompt.row for prompt in prompts]
        messages, claim = self._plan.messages(prompts), self._claims(len(prompts))

        async def score(trajectory: Trajectory) -> None:
            await self._score(trajectory, prompts[trajectory.prompt_index], voting)

        if self._plan.function is not None:
            episodes = Episodes(self._plan.function, self._tokenizer, rows, messages)
            return await rollout(leader.engine, ids, settings, claim, score, episodes, self._engines)
        # A sampler wants all its prompts at once, so the engines share them out beforehand.
        share = [index for _ in range(-(-len(ids) // self._engines)) if (index := claim()) is not None]
        batch = prompt_batch(ids, share, self._tokenizer, settings.group_size, messages, rows)
        return await self._sample_batch(leader, batch, settings, score, timeout)

    async def _sample_batch(
        self, leader: Leader, batch: list[PromptText], settings: RolloutSettings, score: OnSample, timeout: float
    ) -> list[Trajectory]:
        assert self._plan.sampler is not None
        engine, sampler = leader.engine, self._plan.sampler
        return await sample_batch(engine, self._tokenizer, sampler, batch, settings, score, timeout)

    def _claims(self, count: int) -> Claim:
        """Prompts are handed out by a counter in the ranks' store: no server, and no two engines get the same one."""
        key = f"rollout/{self._rounds}"

        def claim() -> int | None:
            index = self._store.add(key, 1) - 1
            return index if index < count else None

        return claim

    async def _score(self, trajectory: Trajectory, prompt: Prompt, voting: bool = False) -> None:
        """Add the reward functions' sum to what the episode itself gave. They judge the last answer.

        An episode whose reward is not a number that can be learned from has failed.
        """
        if trajectory.error:
            return
        start = time.perf_counter()
        trajectory.text = self._text(trajectory.response_ids)
        last = trajectory.response_ids[trajectory.answer_start :]
        completion = self._text(last) if trajectory.answer_start else trajectory.text
        if voting:
            trajectory.vote = await self._rewards.extract(completion)
        if not self._rewards.labels:
            return
        result = await self._rewards.score(
            prompt=self._tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False),
            completion=completion,
            row=prompt.row,
            finish_reason=trajectory.finish_reason,
            trajectory=trajectory,
        )
        trajectory.reward_parts |= result.parts
        trajectory.metrics["time/reward"] = time.perf_counter() - start
        if result.error:
            trajectory.metrics["reward/error"] = 1.0
        try:
            if result.unusable:
                raise ValueError(result.error)
            total = trajectory.reward + result.reward
            trajectory.reward = checked_reward(total, "with what reward functions gave, the episode's own reward is")
        except ValueError as error:
            trajectory.reward, trajectory.finish_reason, trajectory.error = 0.0, "error", f"reward: {error}"

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def answer_row(trajectory: Trajectory) -> dict[str, Any]:
    """What completions.jsonl keeps of a trajectory beside its prompt."""
    return {
        "text": trajectory.text,
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "finish_reason": trajectory.finish_reason,
        "tokens": len(trajectory.response_ids),
        "weight_version": trajectory.weight_version,
        "error": trajectory.error,
    }


def answer_rows(
    answers: Sequence[Answer], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """What completions.jsonl keeps of answers, on rank 0, where it is written; on other ranks nothing. Collective."""
    own = {n: answer_row(a.trajectory) for n, a in enumerate(answers) if a.trajectory is not None}
    payloads = [msgspec.msgpack.encode(own), *[b""] * (world_size() - 1)]
    found: dict[int, dict[str, Any]] = {}
    for part in filter(None, all_to_all_bytes(payloads)):
        found |= msgspec.msgpack.decode(part, type=dict[int, dict[str, Any]])
    rows = []
    for answer, row in ((answers[n], row) for n, row in sorted(found.items())):
        prompt = prompts[answer.prompt_index]
        text, right = tokenizer.decode(list(prompt.token_ids)), prompt.row.get("answer")
        asked = {"prompt_id": prompt.id, "sample": answer.sample_index, "prompt": text}
        rows.append(asked | {"text": row.pop("text"), "answer": right} | row)
    return rows


async def unless(stopped: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
    """What the coroutine gives, or None when it is cancelled since `stopped()`, which is looked at now and then."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not stopped():
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check_failures(answers: list[Answer], max_error_rate: float) -> None:
    """Raise RolloutError, with the first error, when a larger share of the episodes failed."""
    episodes = by_episode(answers)
    errors = [error for episode in episodes if (error := next((t.error for t in episode if t.error), ""))]
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
