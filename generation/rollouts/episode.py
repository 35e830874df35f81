"""One episode: the handle on the policy that a rollout function gets, and a conversation that only
appends ids.
"""

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
from generation.image_marks import split_images
from generation.images import Image, ImageRules, Spans, subject
from generation.messages import clean_messages
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from generation.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutSettings:
    """One step's rollouts: `group_size` samples of each prompt by the policy of `policy_version`.

    `seed` and `step` only decide the samples' seeds. The prompts were rendered with
    `chat_template_kwargs`. With `evaluation`, the answers are not trained on.
    """

    group_size: int
    sampling: SamplingSettings
    policy_version: int
    seed: int
    step: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    evaluation: bool = False


class SamplingError(RuntimeError):
    """A request ended without an answer."""


@dataclass(eq=False, repr=False)
class PolicyLLM:
    """One episode's handle on the policy. Each episode has a separate one, so that episodes share
    nothing.

    Attributes: prompt_index, sample_index: the episode's prompt in the step, and its sample among
        those of the prompt. prompt_ids: the row's prompt with the chat template applied. messages:
        the messages that the prompt was rendered from; None where the prompt is plain text or ids.
        images, image_spans: the images of the row's prompt and their places; see `Trajectory`.
        image_rules: how the run treats images; None: the run has none. room: the engine's places
        for episodes, one of which this episode holds; None: their number is not limited. turnstile:
        the episode's access to the gate where answers grow slice by slice; None: answers are not
        cut. unfinished: a parked answer that the episode's first answer continues, if there is one.
        calls: the number of requests so far, on which the next request's seed depends. sampled: the
        answers so far; they are kept where there is a turnstile, or the engine returns routes.
        fatal: the engine's own error, if there was one; it ends the rollout even if the function
        catches it.
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
        """The most tokens of a prompt and its response together."""
        return self.engine.settings.max_model_len

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        images: Sequence[Image] | None = None,
        image_spans: Spans = (),
    ) -> Generation:
        """Sample one response to a prompt. Its seed depends on seed, step, prompt, sample and
        number of the call only.

        `images` and their places are by default the row's, where the ids begin with the row's
        prompt. Raises ValueError where no room is left for a response or vLLM refuses the request,
        SamplingError where vLLM ended the request early.
        """
        settings = self.settings
        seed = sample_seed(
            settings.seed, settings.step, self.prompt_index, self.sample_index, self.calls
        )
        self.calls += 1
        unfinished = self.unfinished
        self.unfinished = None
        try:
            if images is None:
                images, image_spans = self._row_images(prompt_ids)
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
        except ImageCountError as error:
            # The model's files are to blame, so every other episode would fail, too
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

    def _row_images(self, prompt_ids: Sequence[int]) -> tuple[tuple[Image, ...], Spans]:
        begins_alike = self.images and list(prompt_ids[: len(self.prompt_ids)]) == self.prompt_ids
        return (self.images, self.image_spans) if begins_alike else ((), ())

    def add_routes(self, trajectory: Trajectory) -> None:
        """Give a trajectory the routes of its latest answer, which cover all tokens before it,
        too.
        """
        ids = trajectory.prompt_ids + trajectory.response_ids
        answers = (answer for answer in reversed(self.sampled) if ids[: len(answer.ids)] == answer.ids)
        if trajectory.routes is None and (latest := next(answers, None)) is not None:
            trajectory.routes = latest.routes

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Surround a wait for anything except the engine. Another episode may take this one's place
        meanwhile; where answers grow slice by slice, the slice does not end before the wait has
        ended.
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
        """Return the result of work outside the engine, which is awaited within `away`."""
        async with self.away():
            return await work

    def conversation(self, prompt_ids: Sequence[int] | None = None) -> "Conversation":
        """Return an empty conversation that begins with the row's prompt, or with other ids."""
        return Conversation(self, self.prompt_ids if prompt_ids is None else prompt_ids)

    def trajectory(self, prompt_ids: Sequence[int] | None = None, **fields: Any) -> Trajectory:
        """Return a trajectory of this episode, with its indices and weight version filled in.

        `fields` are further fields of `Trajectory`, among them `response_ids`, `loss_mask` and
        `logprobs`, or none of these three.
        """
        if "images" not in fields:
            images, spans = self._row_images(self.prompt_ids if prompt_ids is None else prompt_ids)
            fields |= {"images": images, "image_spans": spans}
        return Trajectory(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_ids=list(self.prompt_ids if prompt_ids is None else prompt_ids),
            weight_version=max(
                [self.settings.policy_version, *(answer.weight_version for answer in self.sampled)]
            ),
            **fields,
        )


class Conversation(Trajectory):
    """A trajectory that grows turn by turn; `PolicyLLM.conversation` makes it.

    Sampled ids stay as they are, and only the text of new messages is encoded. So the cost of a
    turn does not depend on the length of the conversation, and each prompt begins with all ids
    before it.

        chat = llm.conversation()
        while (generation := await chat.sample(sampling)) is not None and not finished(chat.answer):
            chat.add([{"role": "user", "content": "Look again."}])
        return chat.trajectory(reward=1.0)

    Attributes: turns: the number of answers so far. answer_start: where the latest answer begins in
        `response_ids`. finish_reason: why the latest answer ended; "length" where the context had
        no room for the next turn.
    """

    def __init__(self, llm: PolicyLLM, prompt_ids: Sequence[int]) -> None:
        super().__init__(**vars(llm.trajectory(prompt_ids, turns=0)))
        self.llm = llm
        self._full = False

    @property
    def ids(self) -> list[int]:
        """All ids so far, which are the next prompt."""
        return self.prompt_ids + self.response_ids

    @property
    def answer(self) -> str:
        """The text from the latest answer on, without the token that ended it."""
        ids = self.response_ids[self.answer_start :]
        if ids and ids[-1] in self._ends:
            ids.pop()
        return str(self.llm.tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def _ends(self) -> set[int | None]:
        return {self.llm.tokenizer.eos_token_id, *self.llm.settings.sampling.stop_token_ids}

    async def sample(self, sampling: SamplingSettings, *, continues: bool = False) -> Generation | None:
        """Sample and append the policy's next answer. Return None, with `finish_reason` "length",
        if it has no room.

        With `continues`, the new tokens belong to the latest answer.
        """
        length = len(self.prompt_ids) + len(self.response_ids)
        budget = (
            0 if self._full else response_budget(length, sampling.max_tokens, self.llm.max_model_len)
        )
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
        """Append messages that the policy has not written, and the opening of its next answer. They
        are not trained on.

        Messages that leave no room for an answer are not appended: the next `sample` returns None.
        Where the run has images, a message's content may be a list of parts with images among them
        (`split_images`); images that cannot be used raise ValueError.
        """
        template = self.llm.settings.chat_template_kwargs
        images: tuple[Image, ...] = ()
        spans: Spans = ()
        if (rules := self.llm.image_rules) is None:
            added = encode_following(self.llm.tokenizer, messages, template)
        else:
            messages, sources = split_images(clean_messages(messages))
            images = self.read_images(sources)
            text = following(rules.processor.form.render([*STAND_IN, *messages], **template))
            added, spans = rules.processor.expand(text, images, special=False)
        kept = without_second_end((self.response_ids or self.prompt_ids)[-1], added, self._ends)
        begin = len(self.ids) + len(kept) - len(added)
        if self.add_ids(kept):
            self.images += images
            self.image_spans += tuple((begin + start, length) for start, length in spans)

    def read_images(self, sources: Sequence[Any]) -> tuple[Image, ...]:
        """Read images that came up in the episode. Raises ValueError where they are too many, or
        too large.
        """
        if (rules := self.llm.image_rules) is None:
            raise ValueError("the run has no images: set data.max_images")
        images = rules.read(sources)
        if (count := len(self.images) + len(images)) > rules.most:
            raise ValueError(f"the episode has {count} images, more than data.max_images = {rules.most}")
        with subject("the episode"):
            rules.check_bytes((*self.images, *images), {image.digest for image in self.llm.images})
        return images

    def add_ids(self, token_ids: Sequence[int]) -> bool:
        """Append ids that the policy did not sample. Return False if that would leave no room for
        an answer.
        """
        length = len(self.prompt_ids) + len(self.response_ids) + len(token_ids)
        if response_budget(length, 1, self.llm.max_model_len) == 0:
            self._full = True
        else:
            self.extend(token_ids)
        return not self._full

    def trajectory(self, **changes: Any) -> Trajectory:
        """Return the trajectory so far, with `changes` to fields of `Trajectory`."""
        return Trajectory(
            **({field.name: getattr(self, field.name) for field in fields(self)} | changes)
        )


RolloutFunction = Callable[
    [PolicyLLM, dict[str, Any], SamplingSettings], Awaitable[Trajectory | list[Trajectory]]
]
"""Runs one episode: called with the episode's handle, the dataset's row and the sampling settings.

An error that it raises fails only that episode. All levels of rollouts except the fifth are such
functions.
"""


async def one_shot(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
    """Level 1: samples one response to the prompt."""
    generation = await llm.sample(llm.prompt_ids, sampling)
    done = llm.trajectory(finish_reason=generation.finish_reason)
    done.extend(generation.token_ids, generation.logprobs)
    return done


def custom_rollout(target: Any, kwargs: dict[str, Any]) -> RolloutFunction:
    """Level 4: a custom `async def (llm, row, sampling, **kwargs)`, or a class with such a method
    `run` or `__call__`.

    A class is constructed once, with `kwargs`, and the object serves all episodes. Raises
    ValueError where `target` is neither.
    """
    if inspect.isclass(target):
        made = target(**kwargs)
        function: Any = getattr(made, "run", made)
    else:
        function = functools.partial(target, **kwargs) if kwargs else target
    called = getattr(function, "func", function)  # the function that a functools.partial calls
    method = getattr(called, "__call__", None)  # noqa: B004
    if not (inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(method)):
        raise ValueError(
            f"{target!r} is not a rollout: write `async def rollout(llm, row, sampling)`, or such a "
            "method"
        )
    return cast(RolloutFunction, function)
