"""A step's rollouts over all engines, scored while they run, and then known to every rank by their figures."""

import asyncio
import functools
import inspect
import math
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from generation.engine.engine import Leader
from generation.engine.sampling import NotFiniteError
from generation.importing import load
from generation.rollouts.agent import (
    Agent,
    InlineTags,
    environment_class,
    environment_rollout,
    environment_tools,
    inline_rollout,
    tool_rollout,
)
from generation.rollouts.client import CapturingServer, ClientRollout, StartServer
from generation.rollouts.client_process import ClientCommand, ClientProcesses
from generation.rollouts.environments import verifiers
from generation.rollouts.episode import RolloutFunction, custom_rollout, one_shot
from generation.rollouts.mcp_tools import McpServer, McpTools, list_tools
from generation.rollouts.run import EpisodeSetup, RolloutSettings, rollout
from generation.rollouts.sampler import Sampler, make_sampler, sample_batch
from generation.rollouts.sampler_prompts import prompt_batch
from generation.rollouts.tools import Tool, ToolLimits, ToolRunner, call_parser, make_tool, tools_by_name
from generation.trajectory import Trajectory, by_episode, checked_reward
from sharding.ranks import agreed, all_reduce_sum, exchange, is_main
from trainer.config.schema import ClientConfig, ProcessesConfig, RolloutConfig, TrainConfig, VerifiersConfig
from trainer.data import Prompt, image_rules, prompt_messages
from trainer.errors import Interrupted, UserError
from trainer.learning.answers import Answer, failed_episodes, gather_answers
from trainer.rewards.pool import RewardPool

T = TypeVar("T")
_CLOSE_SECONDS = 15.0
_LOOK_SECONDS = 0.2  # between looks at whether to go on

Source = Callable[[int, int], list[Prompt]]
"""Gives as many prompts to train on as asked for, from a position on."""


class RolloutLevel:
    """The recipe's way from a prompt to its trajectory, one of six levels, from nothing to any OpenAI client.

    It is loaded and checked before any model. Raises UserError naming the key that does not fit.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, start_server: StartServer | None = None
    ) -> None:
        """`start_server` serves the clients of level 6; it may be left out where nothing is going to run."""
        self.image_rules = image_rules(config, tokenizer)
        self._templated = config.data.apply_chat_template and tokenizer.chat_template is not None
        self.function: RolloutFunction | None = one_shot  # of one episode; None: a sampler takes all prompts at once
        self.sampler: Sampler | None = None  # level 5's object
        self._mcp: McpTools | None = None
        self.data = config.data  # where tools are to be described, their schemas go to the chat template
        named, kwargs = config.rollout, config.rollout.kwargs
        if (custom := named.custom) is not None:
            self.function = _checked("rollout.custom", lambda: custom_rollout(load(custom), kwargs))
        elif (sampler := named.sampler) is not None:
            recipe = config.model_dump()
            self.function = None
            self.sampler = _checked("rollout.sampler", lambda: make_sampler(load(sampler), kwargs, recipe))
        elif named.client is not None or named.verifiers is not None:
            self.function = _client_function(config, start_server)
        elif named.tools or named.mcp or named.environment is not None:
            self._mcp = _mcp_tools(config)
            self.function, schemas = _agent_function(named, tokenizer, self._mcp.tools, self.image_rules is not None)
            if named.mcp:
                self.function = self._mcp.around(self.function)
            if schemas and named.describe_tools:
                described = {**config.data.chat_template_kwargs, "tools": schemas}
                self.data = config.data.model_copy(update={"chat_template_kwargs": described})

    async def aclose(self) -> None:
        """Stop level 6's server and those of MCP, if there are any. On the engine's loop, before the engine stops."""
        if self._mcp is not None:
            await self._mcp.aclose()
        if isinstance(self.function, ClientRollout):
            await self.function.aclose()

    def messages(self, prompts: Sequence[Prompt]) -> list[list[dict[str, Any]] | None] | None:
        """The messages that each prompt was rendered from; None where nothing uses them, or without a chat template."""
        if not self._templated or self.function is one_shot:
            return None
        return [prompt_messages(prompt.row, self.data, len(prompt.images)) for prompt in prompts]


def _client_function(config: TrainConfig, start_server: StartServer | None) -> ClientRollout:
    """Level 6: a client on a thread of the leader, or in processes of another Python."""
    named, log = config.rollout, config.run.folder / "clients.log"

    async def serve(engine: Any, **settings: Any) -> CapturingServer:
        """A server that reads tool calls as the recipe says."""
        assert start_server is not None
        return await start_server(engine, tool_parser=named.tool_parser, **settings)

    if not isinstance(own := named.verifiers or named.client, ProcessesConfig):
        found = _checked("rollout.client", lambda: load(str(own)))
        client, seconds = (
            functools.partial(found, **named.kwargs) if named.kwargs else found,
            config.run.step_deadline_s,
        )
        return _checked("rollout.client", lambda: ClientRollout(client, serve, seconds))
    if isinstance(own, VerifiersConfig):
        key, command = "rollout.verifiers.python", verifiers.command(own.model_dump(), log)
    else:
        assert isinstance(own, ClientConfig)
        key, command = "rollout.client.command", ClientCommand(own.command, own.workers, own.env, named.kwargs, log)
    if shutil.which(command.command[0]) is None:
        raise UserError(f"{key}: there is no program {command.command[0]}")
    pool = ClientProcesses(command)
    return ClientRollout(pool.run, serve, own.timeout_s, pool.aclose)


def _mcp_tools(config: TrainConfig) -> McpTools:
    """The tools of rollout.mcp, which rank 0 asks for. Collective."""
    servers = [
        McpServer(name, server.command, server.url, server.env, server.session == "shared")
        for name, server in config.rollout.mcp.items()
    ]
    listed: dict[str, list[dict[str, Any]]] = {}
    if servers:
        with agreed("asking MCP servers for their tools"):
            if is_main():
                listed = _checked("rollout.mcp", lambda: list_tools(servers))
        listed = exchange(listed)[0]
    return McpTools(servers, listed, config.run.folder / "mcp.log")


def _agent_function(
    named: RolloutConfig, tokenizer: PreTrainedTokenizerBase, others: list[Tool], images: bool
) -> tuple[RolloutFunction, list[dict[str, Any]]]:
    """Levels 2 and 3, with `others` among their tools, and the schemas of all; replies may be `images`."""

    def function(spec: str) -> Callable[..., Any]:
        found: Callable[..., Any] = load(spec)
        if not inspect.isroutine(found):
            raise ValueError(f"{spec!r} is {type(found).__name__}, not a function")
        return found

    inline = named.tool_parser == "inline"  # such calls are found otherwise
    parser = "hermes" if inline else named.tool_parser
    limits = ToolLimits(
        named.tool_timeout_s, named.max_concurrency, named.max_tool_tokens, named.tool_error, named.tool_rates, images
    )
    tools = _checked("rollout.tools", lambda: tools_by_name([*(make_tool(function(s)) for s in named.tools), *others]))
    parse = _checked("rollout.tool_parser", lambda: call_parser(parser, tokenizer))
    agent = Agent(ToolRunner(limits, tokenizer), parse, named.max_turns, tools, named.describe_tools)
    schemas = [tool.schema for tool in tools.values()]
    if named.environment is None:
        _check_rates(named, tools)
        tags = InlineTags(**named.inline_tags.model_dump())
        return inline_rollout(agent, tags) if inline else tool_rollout(agent), schemas
    found = _checked("rollout.environment", functools.partial(load, named.environment))
    cls = _checked("rollout.environment", lambda: environment_class(found, named.kwargs))
    methods = _checked("rollout.environment", lambda: environment_tools(cls))
    _check_rates(named, [*tools, *methods])
    schemas += [tool.schema for tool in methods.values()]
    return _checked("rollout.environment", lambda: environment_rollout(cls, named.kwargs, agent, found)), schemas


def _check_rates(named: RolloutConfig, tools: Iterable[str]) -> None:
    if unknown := sorted({*named.tool_rates} - {*tools}):
        there = ", ".join(tools) or "none"
        raise UserError(f"rollout.tool_rates: there is no tool {unknown[0]!r}; there is {there}")


def _checked(key: str, make: Callable[[], T]) -> T:
    """The object that `make` gives; an error of the user's object becomes a sentence about the key."""
    try:
        return make()
    except (UserError, Interrupted):
        raise
    except BaseException as error:  # the user's constructor may raise anything
        raise UserError(f"{key}: {error or type(error).__name__}") from error


class RolloutError(RuntimeError):
    """Too many episodes of a step failed."""


class StepAbandoned(RuntimeError):
    """The step's rollouts were given up, on all ranks; policy and state are those of the step before."""


@dataclass(frozen=True)
class Terms:
    """How long rollouts may take, and what is to be known of their answers.

    Attributes:
        timeout: seconds; more are an error.
        give_up: whether to end them before they are done.
        details: see `gather_answers`.
        lengths: the prompts that these say were answered at the greatest length begin first; they learn how long they
            are now. None: in their order.
    """

    timeout: float
    give_up: Callable[[], bool] = lambda: False
    details: bool = False
    lengths: dict[int, int] | None = None


class Rollouts:
    """Runs rollouts on this rank's engine, if it leads one, and tells every rank of all answers."""

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
        """`engines` is how many leaders share the prompts; above `max_error_rate` failed episodes end the run."""
        self._leader, self._tokenizer, self._rewards, self._store = leader, tokenizer, rewards, store
        self._level, self._engines, self._max_error_rate = level, engines, max_error_rate
        self._rounds = self._calls = 0
        self._ages = False  # whether answers may be of earlier weights than the policy's
        self.finished = 0  # answers of the present round, on this rank's engine

    def run(self, prompts: list[Prompt], settings: RolloutSettings, terms: Terms, voting: bool = False) -> list[Answer]:
        """Sample and score groups for all prompts; the same list on all ranks, ordered by prompt and sample.

        `voting`: fill in each answer's vote, for a majority vote.

        Raises:
            RemoteError: on all ranks, when an engine failed on one.
            RolloutError: too many episodes failed.
            RewardError: a reward function failed in too many calls.
            StepAbandoned: on all ranks, when `terms.give_up()` became true on one whose engine was at work.
            NotFiniteError: on all ranks, when a log-probability of one's engine was not finite.
        """
        self._rounds, self.finished = self._rounds + 1, 0
        order = starting_order(prompts, terms.lengths)

        def sample(leader: Leader) -> Coroutine[Any, Any, list[Trajectory]]:
            return self._sample(leader, prompts, settings, terms.timeout, voting, order)

        own = self._on_leaders(sample, terms, settings.step)
        answers = self._gathered(own or [], terms, settings.policy_version if self._ages else None)
        return self._checked(answers, prompts, terms.lengths)

    def take(
        self,
        source: Source,
        position: int,
        count: int,
        settings: RolloutSettings,
        terms: Terms,
    ) -> tuple[list[Prompt], list[Answer], int]:
        """`count` prompts, the answers to them, and the position after the prompts that have begun; as `run`.

        The next of `source` is at `position`.
        """
        prompts = source(position, count)
        return prompts, self.run(prompts, settings, terms), position + count

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, if there was one that an engine's death or SIGTERM has ended. Collective."""
        self._rewards.take_counts()

    def figures(self) -> dict[str, float]:
        """A step's figures beside those of its answers."""
        return {}

    def waits_for(self) -> str:
        """What keeps a rollout that takes long, in words, where that is known. For any thread."""
        return ""

    def carried(self) -> bytes:
        """What a checkpoint keeps of this rank's rollouts."""
        return b""

    def untrained(self) -> list[Answer]:
        """Answers that are not trained in the step in which they were sampled, or some of them. Collective."""
        return []

    def _on_leaders(self, work: Callable[[Leader], Coroutine[Any, Any, T]], terms: Terms, step: int) -> T | None:
        """The result of `work` on this engine's loop; None on a rank that leads none. Collective; raises as `run`.

        Where it fails on one leader, the others stop soon after.
        """
        own: T | None = None
        not_finite: float | None = None
        self._calls += 1
        failed = f"rollout failed/{self._calls}"

        def stopped() -> bool:
            return terms.give_up() or self._store.check([failed])

        with agreed("rollout"):
            if self._leader is not None:
                self._leader.engine.not_finite = None
                try:
                    running = unless(stopped, work(self._leader))
                    own = self._leader.thread.run(running, terms.timeout, "the rollout")
                except Exception as error:
                    self._store.set(failed, "")
                    if isinstance(error, ExceptionGroup):
                        raise first_error(error) from None  # the others are the same error, once a request
                    raise
                not_finite = self._leader.engine.not_finite
        outcomes = exchange([self._leader is not None and own is None, not_finite])
        for rank, (_, number) in enumerate(outcomes):
            if number is not None:
                raise NotFiniteError(f"the engine of rank {rank} sampled a token with a log-probability of {number}")
        if any(given_up for given_up, _ in outcomes):
            raise StepAbandoned(f"the rollouts of step {step} were given up")
        return own

    def _gathered(self, own: list[Trajectory], terms: Terms, version: int | None) -> list[Answer]:
        """The answers of a round, of which this rank's engine has sampled `own`; see `gather_answers`."""
        return gather_answers(own, terms.details, version)

    def _checked(self, answers: list[Answer], prompts: list[Prompt], lengths: dict[int, int] | None) -> list[Answer]:
        """The answers, unless too many have failed; what they say of the prompts' lengths is noted. Collective."""
        check_failures(answers, self._max_error_rate)
        for answer in answers:
            answer.stored_images = prompts[answer.prompt_index].images
        self._rewards.check_error_rate(all_reduce_sum(self._rewards.take_counts()))
        if lengths is not None:
            lengths |= longest_answers(answers, prompts)
        return answers

    def close(self) -> None:
        """Stop what episodes have started; before the engine stops."""
        if self._leader is not None:
            self._leader.thread.run(self._level.aclose(), _CLOSE_SECONDS, "ending the rollouts")

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
        ids, level, key = [prompt.token_ids for prompt in prompts], self._level, f"rollout/{self._rounds}"

        def claim() -> int | None:
            """Prompts are handed out by a counter in the ranks' store: no server, and each goes to one engine."""
            index = self._store.add(key, 1) - 1
            return order[index] if index < len(ids) else None

        async def score(trajectory: Trajectory) -> None:
            await self._score(trajectory, prompts[trajectory.prompt_index], voting)

        if level.function is not None:
            setup = self._setup(prompts)
            return await rollout(leader.engine, ids, settings, claim, score, setup, self._engines)
        assert level.sampler is not None  # which wants all its prompts at once: engines share them out beforehand
        share = [index for _ in range(-(-len(ids) // self._engines)) if (index := claim()) is not None]
        messages, rows = level.messages(prompts), [prompt.row for prompt in prompts]
        rules = level.image_rules
        images = [(prompt.images, prompt.image_spans) for prompt in prompts] if rules else None
        batch = prompt_batch(ids, share, self._tokenizer, settings.group_size, messages, rows, images)
        whole = self._tokenizer, level.sampler, batch, settings, score, timeout, rules
        return await sample_batch(leader.engine, *whole)

    def _setup(self, prompts: Sequence[Prompt]) -> EpisodeSetup:
        level, rows = self._level, [prompt.row for prompt in prompts]
        images = [(prompt.images, prompt.image_spans) for prompt in prompts] if level.image_rules else None
        assert level.function is not None
        messages = level.messages(prompts)
        return EpisodeSetup(level.function, self._tokenizer, rows, messages, images, level.image_rules)

    async def _score(self, trajectory: Trajectory, prompt: Prompt, voting: bool = False) -> None:
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
        result = await self._rewards.score(
            prompt=self._tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False),
            completion=completion,
            row=prompt.row,
            finish_reason=trajectory.finish_reason,
            trajectory=trajectory,
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
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def starting_order(prompts: Sequence[Prompt], lengths: dict[int, int] | None) -> list[int]:
    """The indices of the prompts in the order in which engines begin them: their own, or by `lengths`, tokens of the
    last answers by prompt id, the longest first. A prompt that has not been answered yet may be the longest of all.
    """
    known = lengths or {}
    return sorted(range(len(prompts)), key=lambda index: -known.get(prompts[index].id, math.inf))


def longest_answers(answers: Sequence[Answer], prompts: Sequence[Prompt]) -> dict[int, int]:
    """By prompt id the tokens that the longest of its episodes sampled; prompts whose episodes all failed are not
    there.
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
