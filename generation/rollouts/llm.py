"""The policy as one trajectory sees it: what a rollout function is given to sample with."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ..sampling import Completion, SamplingSettings, sample_seed
from ..trajectory import Trajectory
from ..vllm_compat import request_errors
from .conversation import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..worker_async import VllmAsyncGenerationWorker


@dataclass(frozen=True)
class RolloutSettings:
    """What one step's rollouts are: `group_size` samples of each prompt by the policy of `policy_version`.

    `seed` and `step` only choose the samples' seeds. `chat_template_kwargs` are what the prompts were rendered with.
    """

    group_size: int
    sampling: SamplingSettings
    policy_version: int
    seed: int
    step: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class SamplingError(RuntimeError):
    """One request ended without an answer."""


class PolicyLLM:
    """One trajectory's handle on the policy. A rollout function gets one of its own, so it shares nothing by accident.

    Attributes:
        prompt_index, sample_index: which trajectory this is.
        prompt_ids: the row's prompt, chat template applied.
        messages: the messages it was rendered from; None where the prompt is plain text or ids.
        calls: how many requests have been made; the next one's seed depends on it.
        fatal: the error of the engine itself, if there was one: it ends the rollout whatever the function does with it.
    """

    def __init__(
        self,
        engine: "VllmAsyncGenerationWorker",
        tokenizer: "PreTrainedTokenizerBase",
        settings: RolloutSettings,
        prompt_index: int,
        sample_index: int,
        prompt_ids: Sequence[int],
        messages: list[dict[str, Any]] | None = None,
        room: asyncio.Semaphore | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.prompt_index, self.sample_index = prompt_index, sample_index
        self.prompt_ids, self.messages = list(prompt_ids), messages
        self.calls = 0
        self.fatal: Exception | None = None
        self._room = room

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and response may have together."""
        return self.engine.settings.max_model_len

    async def sample(self, prompt_ids: Sequence[int], sampling: SamplingSettings) -> "Completion":
        """One response to these ids; its seed depends on (seed, step, prompt, sample, number of the call) alone.

        Raises:
            ValueError: no room is left for a response, or vLLM refuses the request.
            SamplingError: vLLM ended the request before it was done.
        """
        settings = self.settings
        seed = sample_seed(settings.seed, settings.step, self.prompt_index, self.sample_index, self.calls)
        self.calls += 1
        version = settings.policy_version
        try:
            completion = await self.engine.complete(list(prompt_ids), sampling, seed=seed, policy_version=version)
        except request_errors():
            raise
        except Exception as error:
            self.fatal = error
            raise
        if completion.finish_reason not in ("stop", "length"):
            raise SamplingError(f"vLLM ended the request with {completion.finish_reason!r}")
        return completion

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Around a wait for anything but the engine: another trajectory may have this one's place meanwhile."""
        if self._room is None:
            yield
            return
        self._room.release()
        try:
            yield
        finally:
            await self._room.acquire()

    def conversation(self, prompt_ids: Sequence[int] | None = None) -> Conversation:
        """An empty conversation that begins with the row's prompt, or with other ids."""
        return Conversation(self, self.prompt_ids if prompt_ids is None else prompt_ids)

    def trajectory(self, prompt_ids: Sequence[int] | None = None, **fields: Any) -> Trajectory:
        """A trajectory with this one's place and weight version filled in; `fields` are further ones of `Trajectory`.

        `fields` need `response_ids`, `loss_mask` and `logprobs`, or none of them.
        """
        return Trajectory(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_ids=list(self.prompt_ids if prompt_ids is None else prompt_ids),
            weight_version=self.settings.policy_version,
            **fields,
        )


RolloutFunction = Callable[[PolicyLLM, dict[str, Any], SamplingSettings], Awaitable[Trajectory | list[Trajectory]]]
"""One episode: called with the trajectory's handle, the dataset's row and the sampling settings.

Whatever it raises is that trajectory's failure and nobody else's. All levels of rollouts are turned into one of these.
"""


async def one_shot(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
    """One response to the prompt, and nothing else."""
    completion = await llm.sample(llm.prompt_ids, sampling)
    return llm.trajectory(
        response_ids=completion.token_ids,
        loss_mask=[1] * len(completion.token_ids),
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
    )


def custom_rollout(target: Any, kwargs: dict[str, Any]) -> RolloutFunction:
    """Level 4: one's own `async def (llm, row, sampling, **kwargs)`, or a class with such a method `run` or `__call__`.

    A class is constructed once, with `kwargs`; its object serves all trajectories. Raises ValueError.
    """
    if inspect.isclass(target):
        made = target(**kwargs)
        function: Any = getattr(made, "run", made)
    else:
        function = functools.partial(target, **kwargs) if kwargs else target
    called = getattr(function, "func", function)  # of a partial
    if not (inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))):  # noqa: B004
        raise ValueError(f"{target!r} is no rollout: write `async def rollout(llm, row, sampling)`, or a class with it")
    return cast(RolloutFunction, function)
