"""One episode: the policy as a rollout function sees it, and a conversation whose ids are only ever appended to."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from generation.engine.image_inputs import ImageCountError
from generation.engine.sampling import SamplingSettings, response_budget, sample_seed
from generation.engine.slices import Turnstile, Unfinished
from generation.engine.vllm_compat import request_errors
from generation.exact_ids import STAND_IN, Generation, encode_following, following, without_second_end
from generation.images import Image, ImageRules, Spans, split_images, subject
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from generation.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutSettings:
    """One step's rollouts: `group_size` samples of each prompt by the policy of `policy_version`.

    `seed` and `step` only choose the samples' seeds. The prompts were rendered with `chat_template_kwargs`. Answers of
    an `evaluation` are not trained on.
    """

    group_size: int
    sampling: SamplingSettings
    policy_version: int
    seed: int
    step: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    evaluation: bool = False


class SamplingError(RuntimeError):
    """One request ended without an answer."""


@dataclass(eq=False, repr=False)
class PolicyLLM:
    """One episode's handle on the policy. A rollout function gets one of its own, so it shares nothing by accident.

    Attributes:
        prompt_index, sample_index: which episode this is.
        prompt_ids: the row's prompt, chat template applied.
        messages: the messages it was rendered from; None where the prompt is plain text or ids.
        images, image_spans: of the row's prompt; see `Trajectory`.
        image_rules: how the run treats images; None: it has none.
        room: the places of episodes in the engine, one of which this one has; None: there are as many as it takes.
        turnstile: the episode's way through the gate where answers grow slice by slice; None: they are not cut.
        unfinished: the answer that the first one goes on from, if there is one.
        calls: the number of requests so far; the next one's seed depends on it.
        sampled: its answers so far; noted with a turnstile, and where the engine tells routes.
        fatal: the error of the engine itself, if there was one: it ends the rollout whatever the function does with it.
    """

    engine: "Engine"
    tokenizer: "PreTrainedTokenizerBase"
    settings: RolloutSettings
    prompt_index: int
    sample_index: int
    prompt_ids: list[int]
    messages: list[dict[str, Any]] | None = None
    room: asyncio.Semaphore | None = None
    turnstile: Turnstile | None = None
    unfinished: Unfinished | None = None
    images: tuple[Image, ...] = ()
    image_spans: Spans = ()
    image_rules: ImageRules | None = None
    calls: int = 0
    sampled: list[Generation] = field(default_factory=list)
    fatal: Exception | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and response may have together."""
        return self.engine.settings.max_model_len

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        images: Sequence[Image] | None = None,
        image_spans: Spans = (),
    ) -> Generation:
        """One response to these ids; its seed depends on (seed, step, prompt, sample, number of the call) alone. Raises
        ValueError where no room is left for a response or vLLM refuses the request, SamplingError where vLLM ended it
        before it was done.

        `images` and their places are by default the row's, where the ids begin with the row's prompt.
        """
        settings = self.settings
        seed = sample_seed(settings.seed, settings.step, self.prompt_index, self.sample_index, self.calls)
        self.calls += 1
        unfinished, self.unfinished = self.unfinished, None
        try:
            if images is None:
                images, image_spans = self._own_images(prompt_ids)
            generation = await self.engine.complete(
                list(prompt_ids),
                sampling,
                seed=seed,
                policy_version=settings.policy_version,
                turnstile=self.turnstile,
                unfinished=unfinished,
                images=images,
                image_spans=image_spans,
            )
        except ImageCountError as error:  # of the model's files: no other episode would fare better
            self.fatal = ImageCountError(f"prompt {self.prompt_index} of the step: {error}")
            raise self.fatal from None
        except Exception as error:
            if not isinstance(error, request_errors()):
                self.fatal = error
            raise
        if generation.finish_reason not in ("stop", "length"):
            raise SamplingError(f"vLLM ended the request with {generation.finish_reason!r}")
        if self.turnstile is not None or generation.routes is not None:
            self.sampled.append(generation)
        return generation

    def _own_images(self, prompt_ids: Sequence[int]) -> tuple[tuple[Image, ...], Spans]:
        begins_alike = self.images and list(prompt_ids[: len(self.prompt_ids)]) == self.prompt_ids
        return (self.images, self.image_spans) if begins_alike else ((), ())

    def add_routes(self, trajectory: Trajectory) -> None:
        """Give a trajectory the routes of its latest answer, which are those of all tokens before as well."""
        ids = trajectory.prompt_ids + trajectory.response_ids
        answers = (answer for answer in reversed(self.sampled) if ids[: len(answer.ids)] == answer.ids)
        if trajectory.routes is None and (latest := next(answers, None)) is not None:
            trajectory.routes = latest.routes

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Around a wait for anything except the engine: another episode may have this one's place meanwhile, and where
        answers grow slice by slice, this one is waited for.
        """
        with self.turnstile.away() if self.turnstile is not None else nullcontext():
            if self.room is None:
                yield
                return
            self.room.release()
            try:
                yield
            finally:
                await self.room.acquire()

    async def outside(self, work: Awaitable[T]) -> T:
        """The result of something that is not the engine's, waited for as `away` says."""
        async with self.away():
            return await work

    def conversation(self, prompt_ids: Sequence[int] | None = None) -> "Conversation":
        """An empty conversation that begins with the row's prompt, or with other ids."""
        return Conversation(self, self.prompt_ids if prompt_ids is None else prompt_ids)

    def trajectory(self, prompt_ids: Sequence[int] | None = None, **fields: Any) -> Trajectory:
        """A trajectory with this one's place and weight version filled in.

        `fields` are further ones of `Trajectory`: `response_ids`, `loss_mask` and `logprobs`, or none of them.
        """
        if "images" not in fields:
            images, spans = self._own_images(self.prompt_ids if prompt_ids is None else prompt_ids)
            fields |= {"images": images, "image_spans": spans}
        return Trajectory(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_ids=list(self.prompt_ids if prompt_ids is None else prompt_ids),
            weight_version=max([self.settings.policy_version, *(answer.weight_version for answer in self.sampled)]),
            **fields,
        )


class Conversation(Trajectory):
    """A trajectory in the making; made by `PolicyLLM.conversation`.

    Sampled ids stay as they are; of other people's messages, only the new text is encoded. So a turn costs the same few
    calls of the tokenizer however long the conversation is, and each prompt begins with all ids before it.

        chat = llm.conversation()
        while (generation := await chat.sample(sampling)) is not None and not finished(chat.answer):
            chat.add([{"role": "user", "content": "Look again."}])
        return chat.trajectory(reward=1.0)

    Attributes:
        turns: the number of answers so far.
        answer_start: where the latest answer begins in `response_ids`.
        finish_reason: of the latest answer; "length" when the context had no room for the next turn.
    """

    def __init__(self, llm: PolicyLLM, prompt_ids: Sequence[int]) -> None:
        super().__init__(**vars(llm.trajectory(prompt_ids, turns=0)))
        self.llm = llm
        self._full = False

    @property
    def ids(self) -> list[int]:
        """Everything so far: the next prompt."""
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

        Where it `continues` the latest answer, it does not begin another.
        """
        length = len(self.prompt_ids) + len(self.response_ids)
        budget = 0 if self._full else response_budget(length, sampling.max_tokens, self.llm.max_model_len)
        if budget == 0:
            self.finish_reason = "length"
            return None
        settings = replace(sampling, max_tokens=budget)
        generation = await self.llm.sample(self.ids, settings, self.images, self.image_spans)
        if not continues:
            self.answer_start = len(self.response_ids)
        self.turns += 1
        self.extend(generation.token_ids, generation.logprobs)
        self.finish_reason = generation.finish_reason
        return generation

    def add(self, messages: list[dict[str, Any]]) -> None:
        """Append messages of others, and the opening of the policy's next answer; they are context, not learned.

        Messages that leave no room for an answer are not appended: the next `sample` gives None. Their content may be a
        list of parts with images among them (`split_images`), where the run has images; they may raise ValueError.
        """
        template = self.llm.settings.chat_template_kwargs
        images: tuple[Image, ...] = ()
        spans: Spans = ()
        if (rules := self.llm.image_rules) is None:
            added = encode_following(self.llm.tokenizer, messages, template)
        else:
            messages, sources = split_images(messages)
            images = self.read_images(sources)
            text = following(rules.processor.render([*STAND_IN, *messages], **template))
            added, spans = rules.processor.expand(text, images, special=False)
        kept = without_second_end((self.response_ids or self.prompt_ids)[-1], added, self._ends)
        begin = len(self.ids) + len(kept) - len(added)
        if self.add_ids(kept):
            self.images += images
            self.image_spans += tuple((begin + start, length) for start, length in spans)

    def read_images(self, sources: Sequence[Any]) -> tuple[Image, ...]:
        """Images that came up in the episode; ValueError where they are too many, or too large together."""
        if (rules := self.llm.image_rules) is None:
            raise ValueError("the run has no images: set data.max_images")
        images = rules.read(sources)
        if (count := len(self.images) + len(images)) > rules.most:
            raise ValueError(f"the episode has {count} images, more than data.max_images = {rules.most}")
        with subject("the episode"):
            rules.check_bytes((*self.images, *images), {image.digest for image in self.llm.images})
        return images

    def add_ids(self, token_ids: Sequence[int]) -> bool:
        """Append ids that the policy did not sample, unless they leave no room for an answer; whether it did."""
        length = len(self.prompt_ids) + len(self.response_ids) + len(token_ids)
        if response_budget(length, 1, self.llm.max_model_len) == 0:
            self._full = True
        else:
            self.extend(token_ids)
        return not self._full

    def trajectory(self, **changes: Any) -> Trajectory:
        """The trajectory so far, with other values for some fields of `Trajectory`."""
        return Trajectory(**({field.name: getattr(self, field.name) for field in fields(self)} | changes))


RolloutFunction = Callable[[PolicyLLM, dict[str, Any], SamplingSettings], Awaitable[Trajectory | list[Trajectory]]]
"""One episode: called with the episode's handle, the dataset's row and the sampling settings.

Whatever it raises is that episode's failure alone. All levels of rollouts except the fifth become one of these.
"""


async def one_shot(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
    """One response to the prompt, and nothing else."""
    generation = await llm.sample(llm.prompt_ids, sampling)
    done = llm.trajectory(finish_reason=generation.finish_reason)
    done.extend(generation.token_ids, generation.logprobs)
    return done


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
        raise ValueError(
            f"{target!r} is not a rollout: write `async def rollout(llm, row, sampling)`, or a class with it"
        )
    return cast(RolloutFunction, function)
