"""The policy as one trajectory sees it: what a rollout function is given to sample with.

A conversation as token ids that are only ever appended to.

What the policy sampled stays as it was sampled; of what others say, only the new text is encoded. So a turn costs the
same few calls of the tokenizer however long the conversation is, and each prompt begins with all ids before it.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from generation.engine.sampling import SamplingSettings, response_budget, sample_seed
from generation.engine.vllm_compat import request_errors
from generation.exact_ids import Generation
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from generation.engine.engine import VllmAsyncGenerationWorker


_ANSWER = "<the answer>"  # stands for one where only what the chat template puts behind it is wanted
_BEFORE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]


class Conversation:
    """One episode's ids, with mask and log-probabilities; made by `PolicyLLM.conversation`.

        chat = llm.conversation()
        while (completion := await chat.sample(sampling)) is not None and not finished(chat.answer):
            chat.add([{"role": "user", "content": "Look again."}])
        return chat.trajectory(reward=1.0)

    Attributes:
        prompt_ids, response_ids, loss_mask, logprobs: as in `Trajectory`.
        turns: how many answers were sampled.
        answer_start: where the latest answer begins in `response_ids`.
        finish_reason: of the latest answer; "length" when the context had no room for what was to come next.
        metrics: figures of this episode, by name; they end up in the trajectory.
    """

    def __init__(self, llm: "PolicyLLM", prompt_ids: Sequence[int]) -> None:
        self.llm = llm
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.turns = 0
        self.answer_start = 0
        self.finish_reason = "stop"
        self.metrics: dict[str, float] = {}
        self._full = False

    @property
    def ids(self) -> list[int]:
        """Everything so far: what the next prompt is."""
        return self.prompt_ids + self.response_ids

    @property
    def answer(self) -> str:
        """The text since the latest answer's beginning, without the token that ended it."""
        ids = self.response_ids[self.answer_start :]
        if ids and ids[-1] in self._ends:
            ids.pop()
        return str(self.llm.tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def _ends(self) -> set[int | None]:
        return {self.llm.tokenizer.eos_token_id, *self.llm.settings.sampling.stop_token_ids}

    async def sample(self, sampling: SamplingSettings, *, continues: bool = False) -> Generation | None:
        """The policy's next answer, already appended; None, and `finish_reason` "length", when there is no room for it.

        Args:
            continues: it goes on with the latest answer instead of beginning another.
        """
        length = len(self.prompt_ids) + len(self.response_ids)
        budget = 0 if self._full else response_budget(length, sampling.max_tokens, self.llm.max_model_len)
        if budget == 0:
            self.finish_reason = "length"
            return None
        completion = await self.llm.sample(self.ids, replace(sampling, max_tokens=budget))
        if not continues:
            self.answer_start = len(self.response_ids)
        self.turns += 1
        self._append(completion.token_ids, 1, completion.logprobs)
        self.finish_reason = completion.finish_reason
        return completion

    def add(self, messages: list[dict[str, Any]]) -> None:
        """Append messages of others, and the opening of the policy's next answer; they are context, not learned.

        Messages that leave no room for an answer are not appended: the next `sample` gives None.
        """
        added = encode_following(self.llm.tokenizer, messages, self.llm.settings.chat_template_kwargs)
        self.add_ids(without_second_end((self.response_ids or self.prompt_ids)[-1], added, self._ends))

    def add_ids(self, token_ids: Sequence[int]) -> None:
        """Append ids that the policy did not sample, unless they leave no room for an answer."""
        length = len(self.prompt_ids) + len(self.response_ids) + len(token_ids)
        if response_budget(length, 1, self.llm.max_model_len) == 0:
            self._full = True
        else:
            self._append(token_ids, 0, [0.0] * len(token_ids))

    def trajectory(self, **fields: Any) -> Trajectory:
        """What is learned from: prompt, and everything after it; `fields` are further ones of `Trajectory`."""
        own = {
            "response_ids": self.response_ids,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "turns": self.turns,
            "answer_start": self.answer_start,
            "metrics": self.metrics,
        }
        return self.llm.trajectory(self.prompt_ids, **(own | fields))

    def _append(self, token_ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.response_ids += token_ids
        self.loss_mask += [mask] * len(token_ids)
        self.logprobs += logprobs


def encode_following(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], template_kwargs: dict[str, Any]
) -> list[int]:
    """The ids of what a chat template writes after any answer: its end, the messages, the next answer's opening.

    The conversation before does not matter to it, so a stand-in of two messages is rendered instead.
    """
    rendered = tokenizer.apply_chat_template(
        [*_BEFORE, *messages], tokenize=False, **({"add_generation_prompt": True} | template_kwargs)
    )
    _, found, following = str(rendered).partition(_ANSWER)
    if not found:
        raise ValueError("the chat template does not show an assistant's answer as it is: no turn can follow one")
    ids: list[int] = tokenizer(following, add_special_tokens=False)["input_ids"]
    return ids


def without_second_end(last_id: int, added: list[int], ends: set[int | None]) -> list[int]:
    """`added` as it goes behind `last_id`: the template ends the answer; where it has ended itself, once is enough."""
    ended_twice = bool(added) and added[0] in ends and last_id in ends
    return added[1:] if ended_twice else added


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

    async def sample(self, prompt_ids: Sequence[int], sampling: SamplingSettings) -> Generation:
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
