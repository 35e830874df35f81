"""The engines of a `Training`: their shifts, and answers to many prompts at once."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from generation import guardian
from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings, sample_seed
from generation.exact_ids import Generation
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.episodes import EpisodeSetup, rollout
from generation.trajectory import Trajectory, array, plain
from sharding.manager import ShardingManager
from sharding.ranks import RemoteError, agreed, rank, send_to_all, world_size
from trainer.build import build_sharding
from trainer.chat_template import end_tokens
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, plain_prompts
from trainer.engines import put_to_sleep, start_engine, stop_engine
from trainer.errors import UserError, quoted
from trainer.policy import FsdpPolicy
from trainer.rollouts.level import RolloutLevel

AnyPrompt = Sequence[int] | str | Sequence[Mapping[str, Any]]
"""Ids, a text that is encoded as it is, or messages for the model's chat template."""


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """The trained weights as they were at a moment, in host memory: with adapters, theirs alone."""

    version: int  # the number of optimizer steps at that moment
    number: int  # of these weights, which no other weights of this training have
    tensors: dict[str, Tensor]  # this rank's shards, by name


class NumberedPolicy:
    """A policy under the number of the weights that it holds now, as engines know them."""

    def __init__(self, policy: FsdpPolicy, number: int) -> None:
        self._policy = policy
        self.version = number

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Return what the policy's method of this name does. Collective."""
        return self._policy.score_tokens(token_ids)

    def release(self, weights: bool) -> int:
        """Put memory away, and return its bytes."""
        return self._policy.release(weights)

    def restore(self) -> None:
        """Bring everything back."""
        self._policy.restore()


class Engines:
    """The engines of all ranks. They start at the first sample, and sleep while the policy
    computes.

    Attributes: shifts: what each shift has cost, in seconds by phase, and `offloaded`, the bytes
        that the policy has put away. calls: the number of calls that sampled, on which seeds
        depend. resources: closes what is started.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy: FsdpPolicy,
        tokenizer: PreTrainedTokenizerBase,
        resources: ExitStack,
    ) -> None:
        """Start nothing yet."""
        self._config = config
        self._policy = policy
        self._tokenizer = tokenizer
        self.resources = resources
        self._leader: Leader | None = None
        self._sharding: ShardingManager | None = None
        self._running: list[Future[dict[int, Generation]]] = []
        self._awake: int | None = None  # the number of the weights of engines that are awake
        self.calls = 0
        self.shifts: list[dict[str, float]] = []

    def has(self, number: int) -> bool:
        """Return True if the engines are awake with the weights of this number."""
        return self._awake == number

    def wake(self, number: int) -> None:
        """Wake the engines, asleep now, with the policy's weights under this number. Collective."""
        sharding = self._sharding or self._start()
        try:
            sharding.wake(NumberedPolicy(self._policy, number))
        except RemoteError:
            with suppress(RemoteError):
                sharding.sleep()
            self._policy.restore()
            raise
        self._awake = number

    def sleep(self) -> None:
        """Put engines that are awake to sleep, once their answers are finished. Collective."""
        if self._awake is None or self._sharding is None:
            return
        wait(self._running)
        self._running = []
        self._awake = None
        self._sharding.sleep()
        report = self._sharding.report
        self.shifts.append({**report.seconds, "offloaded": float(report.offloaded)})

    def _start(self) -> ShardingManager:
        """Start the engines where the policy's memory was, and connect them. Collective."""
        config = self._config
        self._policy.release(weights=True)
        try:
            with agreed("starting the engine"):
                self._leader = start_engine(config, self._policy.device.type == "cuda")
                self.resources.callback(stop_engine, self._leader)
                put_to_sleep(self._leader, config.engine.start_timeout_s)
        finally:
            self._policy.restore()
        if self._leader is None:  # another rank leads the engine of this rank's device
            folder, lock = guardian.private_folder("weights")
            self.resources.callback(os.close, lock)
            self.resources.callback(guardian.remove, folder)
        else:
            folder = self._leader.engine.folder
        sharding = build_sharding(config, self._policy, self._leader, folder)
        assert isinstance(sharding, ShardingManager)  # since engines share the ranks' devices
        self.resources.enter_context(closing(sharding))
        sharding.connect()
        self._sharding = sharding
        return sharding

    def prompt_ids(self, prompts: Sequence[AnyPrompt]) -> list[list[int]]:
        """Return the ids of prompts. Raises UserError, naming the first that cannot be answered."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise UserError(f"prompts is {quoted(prompts)}: give a list of prompts")
        vocabulary = self._policy.model.config.get_text_config().vocab_size
        longest = self._config.engine.max_model_len - 1
        every = []
        for number, prompt in enumerate(prompts):
            ids = self._ids(f"prompt {number}", prompt)
            if not 0 < len(ids) <= longest:
                remedy = f"give at least one, and at most {longest} (engine.max_model_len - 1)"
                raise UserError(f"prompt {number} has {len(ids)} tokens: {remedy}")
            if outside := [token for token in ids if not 0 <= token < vocabulary]:
                ends = f"the vocabulary has the ids 0 to {vocabulary - 1}"
                raise UserError(f"prompt {number} contains {outside[0]}, but {ends}: correct it")
            every.append(ids)
        return every

    def _ids(self, name: str, prompt: AnyPrompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        values: list[Any] = list(prompt)
        if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            return values
        if not all(isinstance(value, Mapping) for value in values):
            raise UserError(f"{name} is {quoted(prompt)}: give ids, a text or a list of messages")
        try:
            text = self._tokenizer.apply_chat_template(
                values,
                tokenize=False,
                add_generation_prompt=True,
                **self._config.data.chat_template_kwargs,
            )
        except Exception as error:  # templates raise anything
            raise UserError(f"{name} cannot be rendered by the chat template: {error}") from error
        return list(self._tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def settings(self, changes: Mapping[str, Any]) -> SamplingSettings:
        """Return the recipe's sampling settings with `changes`, None leaving a key as it is."""
        sampling = self._config.sampling
        chosen = sampling.stop_token_ids
        ends = end_tokens(self._config.model.path, self._tokenizer, self._config.data, chosen)
        settings = SamplingSettings(**sampling.model_dump() | {"stop_token_ids": ends.ids})
        changed = {key: value for key, value in changes.items() if value is not None}
        return replace(settings, **changed)

    def submit(
        self, prompts: list[list[int]], n: int, settings: SamplingSettings
    ) -> "Future[dict[int, Generation]]":
        """Start this rank's share of `n` answers to each prompt; the future has them by number.

        Seeds are functions of the recipe's seed, the number of the call, the prompt and the sample,
        so the number of engines changes none.
        """
        self.calls += 1
        answers: Future[dict[int, Generation]] = Future()
        if self._leader is None:
            answers.set_result({})
            return answers
        mine = self._share(len(prompts) * n)
        engine = self._leader.engine
        assert self._awake is not None
        version = self._awake
        call = self.calls

        async def complete(number: int) -> Generation:
            prompt, sample = divmod(number, n)
            seed = sample_seed(self._config.run.seed, call, prompt, sample)
            return await engine.complete(prompts[prompt], settings, seed=seed, policy_version=version)

        async def complete_all() -> dict[int, Generation]:
            generations = await asyncio.gather(*map(complete, mine))
            return dict(zip(mine, generations, strict=True))

        answers = self._leader.thread.submit(complete_all())
        self._running.append(answers)
        return answers

    def _share(self, count: int) -> range:
        """Return this leader's share of `count` numbers."""
        leaders = world_size() // self._config.engine.tensor_parallel_size
        return range(rank() * leaders // world_size(), count, leaders)

    def level(
        self, rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]
    ) -> tuple[RolloutLevel, list[Prompt]]:
        """Return the way of rolling out that the keys of `rollout` name, and the prompts of rows.

        Raises UserError for what cannot be run, and for rows without a prompt.
        """
        if isinstance(rows, Mapping | str) or not isinstance(rows, Sequence):
            raise UserError(f"rows is {quoted(rows)}: give a list of rows, each a dictionary")
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"row {number} is {quoted(row)}: give a dictionary")
        section = self._config.rollout
        if elsewhere := [key for key in ("sampler", "client", "verifiers") if getattr(section, key)]:
            raise UserError(f"rollout.{elsewhere[0]} works in hotbunk train alone: leave it out")
        given = chosen if any(chosen.values()) else {}
        config = self._config.model_copy(update={"rollout": section.model_copy(update=given)})
        level = RolloutLevel(config, self._tokenizer)
        prompts = plain_prompts(rows, level.data, self._tokenizer)
        self.prompt_ids([prompt.token_ids for prompt in prompts])  # raises for one that is too long
        return level, prompts

    def episodes(
        self, level: RolloutLevel, prompts: list[Prompt], n: int, sampling: SamplingSettings
    ) -> list[Trajectory]:
        """Run this rank's share of `n` episodes of each prompt, and return their trajectories.

        Seeds are those of `submit`, whose third part is the number of the request in its episode.
        """
        self.calls += 1
        if self._leader is None:
            return []
        assert self._awake is not None and level.function is not None
        mine = iter(self._share(len(prompts)))
        template = self._config.data.chat_template_kwargs
        seed = self._config.run.seed
        settings = RolloutSettings(n, sampling, self._awake, seed, self.calls, template)
        rows = [prompt.row for prompt in prompts]
        setup = EpisodeSetup(level.function, self._tokenizer, rows, level.messages(prompts))

        engine = self._leader.engine

        async def finished(trajectory: Trajectory) -> None:
            ids = trajectory.response_ids
            trajectory.text = self._tokenizer.decode(ids, skip_special_tokens=True)

        async def run() -> list[Trajectory]:
            ids = [prompt.token_ids for prompt in prompts]
            try:
                return await rollout(engine, ids, settings, partial(next, mine, None), finished, setup)
            finally:
                await level.aclose()

        return self._leader.thread.run(run(), self._config.run.step_deadline_s, "the episodes")

    def gathered_episodes(
        self, mine: list[Trajectory], prompts: int, version: int
    ) -> list[list[Trajectory]]:
        """Return the trajectories of each prompt, in the order of its episodes, on every rank.
        Collective.
        """
        groups: list[list[Trajectory]] = [[] for _ in range(prompts)]
        for part in send_to_all(msgspec.msgpack.encode(mine, enc_hook=plain)):
            for trajectory in msgspec.msgpack.decode(part, type=list[Trajectory], dec_hook=array):
                trajectory.versions = [(version, 0)]
                trajectory.weight_version = version
                groups[trajectory.prompt_index].append(trajectory)
        for group in groups:
            group.sort(key=lambda trajectory: trajectory.sample_index)
        return groups

    def gathered(
        self, mine: dict[int, Generation], prompts: list[list[int]], n: int, version: int
    ) -> list[list[Generation]]:
        """Return all ranks' answers, `n` of each prompt, on every rank. Collective."""
        rows = [[k, g.token_ids, g.logprobs, g.finish_reason] for k, g in mine.items()]
        answers: dict[int, Generation] = {}
        for part in send_to_all(msgspec.msgpack.encode(rows)):
            for number, ids, logprobs, reason in msgspec.msgpack.decode(part):
                prompt = prompts[number // n]
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
                answers[number] = Generation(
                    ids, logprobs, reason, prompt_ids=prompt, weight_version=version, text=text
                )
        return [[answers[p * n + sample] for sample in range(n)] for p in range(len(prompts))]
