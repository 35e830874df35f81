"""Samplers: code of the user's that answers all prompts of an engine's batch (level 5 in
docs/rollouts.md).

A sampler gets all prompts at once, and an object with the interface of `vllm.LLM`. It is called
with `(llm, prompts, sampling_params)`, or has a method `generate` that takes these. It returns one
result for each prompt: vLLM's `RequestOutput`, or a list of token ids. All calls that it makes of
`llm` are recorded: the trajectory of an answer begins with the first prompt of its conversation,
and all tokens that the sampler has put between answers are masked.

A sampler that waits for all answers before it asks for the next turn leaves the engine partly idle.
Levels 2 to 4 do not.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from generation.engine.logits import with_remedy
from generation.exact_ids import Generation, History, joined
from generation.images import ImageRules, subject
from generation.importing import load
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.sampler_llm import SamplerLLM
from generation.rollouts.sampler_prompts import PromptText
from generation.rollouts.tools import (
    ToolCall,
    ToolLimits,
    ToolRunner,
    make_tool,
    parse_hermes,
    tools_by_name,
)
from generation.rollouts.user_code import UserTimeout, call_user, described
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput

    from generation.engine.engine import Engine

Sampler = Callable[[Any, Any, Any], Any]
"""Called with (llm, prompts, sampling_params). Returns a list of one result for each prompt, or an
awaitable of it.
"""


class RolloutSampler(Protocol):
    """The interface of a sampler. Samplers need not be derived from it."""

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> "list[RequestOutput]":
        """Return one output for each prompt, in order."""


class OneShotRolloutSampler:
    """A sampler that generates once for each prompt."""

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> "list[RequestOutput]":
        """Return the outputs of `llm.generate`."""
        return list(llm.generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False))


class FnCallRolloutSampler:
    """A sampler of chats in which the policy may call functions.

    It continues all open conversations with one call of `llm.chat` for each turn. To change this,
    derive a class and override `__call__`, and pass `tools` to `llm.chat`.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | str] = (),
        max_turns: int = 8,
        limits: ToolLimits | None = None,
    ) -> None:
        """Make a sampler. `functions` are functions with typed parameters and a docstring, or their
        import names. A conversation has at most `max_turns` answers.
        """
        loaded = [load(function) if isinstance(function, str) else function for function in functions]
        self._tools = tools_by_name(map(make_tool, loaded))
        self._max_turns = max_turns
        self._limits = limits or ToolLimits()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Return the functions' schemas in the form of OpenAI's API."""
        return [tool.schema for tool in self._tools.values()]

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> "list[RequestOutput]":
        """Hold one conversation for each prompt, and return the last output of each. Its trajectory
        contains the earlier outputs as well.
        """
        chats = [
            list(getattr(p, "messages", None) or [{"role": "user", "content": str(p)}]) for p in prompts
        ]
        results: dict[int, Any] = dict.fromkeys(range(len(chats)))
        still_open = list(results)
        for turn in range(self._max_turns):
            chosen = [chats[i] for i in still_open]
            outputs = llm.chat(
                messages=chosen, sampling_params=sampling_params, use_tqdm=False, tools=self.tools
            )
            results |= zip(still_open, outputs, strict=True)
            # An answer that was cut at its longest may have been cut inside a call: none is run.
            ended = [i for i in still_open if results[i].outputs[0].finish_reason == "stop"]
            calls = {i: parse_hermes(results[i].outputs[0].text) for i in ended}
            still_open = [i for i in calls if calls[i]]
            if not still_open or turn + 1 == self._max_turns:
                break
            asked = [(calls[i], getattr(prompts[i], "metrics", {})) for i in still_open]
            replies = asyncio.run(self._replies(llm.get_tokenizer(), asked))
            for i, texts in zip(still_open, replies, strict=True):
                chats[i].append({"role": "assistant", "content": results[i].outputs[0].text})
                chats[i] += [{"role": "tool", "content": text} for text in texts]
        return list(results.values())

    async def _replies(
        self, tokenizer: Any, asked: list[tuple[list[ToolCall], dict[str, float]]]
    ) -> list[list[Any]]:
        """Run the function calls of all conversations concurrently. Return, by conversation, the
        text of each reply. An error becomes a reply, and is counted in the conversation's metrics.
        """
        runner = ToolRunner(self._limits, tokenizer)
        return list(
            await asyncio.gather(*(runner.run(self._tools, calls, metrics) for calls, metrics in asked))
        )


def make_sampler(
    named: Any, kwargs: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> Sampler:
    """Return the sampler that a recipe names as a class, which is made with `kwargs`, as an object,
    or as a function.

    Calls the sampler's method `check_recipe`, if it has one, with `recipe`, a mapping of sections;
    the method may raise. Raises ValueError if the sampler cannot be called and has no method
    `generate`.
    """
    made = named(**(kwargs or {})) if isinstance(named, type) else named
    if kwargs and not isinstance(named, type):
        raise ValueError(f"{named!r:.100} takes no kwargs: only a class does")
    if recipe is not None and hasattr(made, "check_recipe"):
        made.check_recipe(recipe)
    if callable(made):
        return made  # type: ignore[no-any-return]
    if callable(generate := getattr(made, "generate", None)):
        return generate  # type: ignore[no-any-return]
    raise ValueError(
        f"{named!r:.100} is not a sampler: make it, or its `generate`, callable with (llm, prompts, "
        "sampling_params)"
    )


async def sample_batch(
    engine: "Engine",
    tokenizer: "PreTrainedTokenizerBase",
    sampler: Sampler,
    batch: Sequence[PromptText],
    settings: RolloutSettings,
    on_sample: Callable[[Trajectory], Awaitable[None]],
    timeout: float = 3600.0,
    rules: ImageRules | None = None,
) -> list[Trajectory]:
    """Have a sampler answer a batch, and score its trajectories. Return them in the order of the
    batch.

    Runs on the engine's event loop, while the sampler runs on a separate thread. An error that the
    sampler raises fails every episode of the batch. The rollout ends where the engine fails, or the
    sampler takes longer than `timeout` seconds, but not where requests fail. `rules`: how images
    are treated; None: there are none. Raises ValueError naming the index of the first result that
    does not fit.
    """
    engine.state.check_can_generate(settings.policy_version)
    if not batch:
        return []
    llm = SamplerLLM(engine, tokenizer, settings, asyncio.get_running_loop(), batch, timeout, rules)

    def call() -> Any:
        """Return the sampler's result. A coroutine is run on a new event loop, on the sampler's
        thread.
        """
        result = sampler(llm, list(batch), llm.sampling_params)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    try:
        returned = await call_user(call, timeout)
    except UserTimeout as error:
        raise llm.fatal or TimeoutError(f"the sampler: {error}") from error
    except Exception as error:
        if llm.fatal is not None:
            raise llm.fatal from error
        version = settings.policy_version
        failures = [
            Trajectory(p.prompt_index, p.sample_index, p.token_ids, weight_version=version)
            for p in batch
        ]
        for failure in failures:
            failure.finish_reason, failure.error = (
                "error",
                f"the sampler raised {described(with_remedy(error))}",
            )
            await on_sample(failure)
        return failures
    finally:
        llm.close()
    if llm.fatal is not None:
        raise llm.fatal
    finished = trajectories(returned, batch, llm.history)
    async with asyncio.TaskGroup() as group:
        for done in finished:
            group.create_task(_awaited(on_sample(done)))
    return finished


def trajectories(returned: Any, batch: Sequence[PromptText], history: History) -> list[Trajectory]:
    """Return the trajectories of a sampler's results, one for each prompt of the batch. Raises
    ValueError where results are missing, too many, None, of an unknown type, or not sampled by the
    policy in this rollout.
    """
    if returned is None or isinstance(returned, str | Mapping) or not hasattr(returned, "__len__"):
        raise ValueError(
            f"the sampler returned {returned!r:.60} instead of a list with {len(batch)} results"
        )
    if len(returned) != len(batch):
        index = min(len(returned), len(batch))
        if len(returned) < len(batch):
            what = f"nothing for prompt {index}"
        else:
            what = f"result {index} has no prompt"
        raise ValueError(
            f"the sampler returned {len(returned)} results for {len(batch)} prompts: {what}"
        )
    by_place = {prompt.place: prompt for prompt in batch}
    return [_trajectory(returned[i], i, prompt, history, by_place) for i, prompt in enumerate(batch)]


def _trajectory(
    result: Any,
    index: int,
    prompt: PromptText,
    history: History,
    by_place: Mapping[tuple[int, int], PromptText],
) -> Trajectory:
    """Return the trajectory of one result. `by_place`: (prompt index, sample index) -> prompt of
    the batch. Raises ValueError, naming the result, if it does not fit its prompt.
    """
    if result is None:
        raise ValueError(f"the sampler returned None for prompt {index}")
    with subject(f"the sampler's result {index}"):
        is_output = hasattr(result, "outputs")
        answer, length = (
            _answer_of(result, history) if is_output else _answer_with(result, index, history)
        )
    answered = by_place.get(answer.chain[0].place, prompt)
    if answered.token_ids != prompt.token_ids:
        # Samples of one prompt, or of equal prompts, may be swapped
        swapped = f"answers prompt {answered.prompt_index}, not prompt {prompt.prompt_index}"
        raise ValueError(f"the sampler's result {index} {swapped}: keep the order of the prompts")
    if wrong := next((a.off_policy for a in answer.chain if a.off_policy), ""):
        remedy = (
            "clone the sampling_params that it is given and change only max_tokens, stop and the like"
        )
        raise ValueError(
            f"the sampler's result {index} was not sampled as training asks: {wrong}; {remedy}"
        )
    # An answer is empty where its prompt left no room in the context. This prompt is too long to be
    # trained on, so the trajectory ends with the answer before.
    done = joined(answer.chain if answer.token_ids or answer.parent is None else answer.parent.chain)
    if length is not None:
        for values in (done.response_ids, done.loss_mask, done.logprobs):
            del values[length:]  # type: ignore[attr-defined]
        done.answer_start = min(done.answer_start, length)
        end = len(done.prompt_ids) + length
        complete = [span for span in done.image_spans if span[0] < end]
        if complete and sum(complete[-1]) > end:
            raise ValueError(f"the sampler's result {index} is cut within an image")
        done.images = done.images[: len(complete)]
        done.image_spans = tuple(complete)
    aborted = answer.finish_reason not in ("stop", "length")
    done.finish_reason = "error" if aborted else answer.finish_reason
    done.error = answer.error or (
        f"vLLM ended the request with {answer.finish_reason!r}" if aborted else ""
    )
    done.prompt_index, done.sample_index = prompt.place
    done.metrics |= prompt.metrics
    done.decoded = prompt.decoded
    return done


def _answer_of(output: Any, history: History) -> tuple[Generation, int | None]:
    """Return the recorded answer that an output stands for, and the number of response tokens to
    cut its trajectory to (None: do not cut). Raises ValueError if the ids were not sampled in this
    rollout.
    """
    if len(output.outputs) != 1:
        raise ValueError(
            f"has {len(output.outputs)} answers: return one, since each prompt is there for each sample"
        )
    same = (output.request_id, output.outputs[0].index)
    token_ids = list(output.outputs[0].token_ids)
    answer = next((a for a in reversed(history.generations) if (a.request_id, a.index) == same), None)
    if answer is None:
        raise ValueError("is an output that this engine has not returned in this rollout")
    if token_ids == answer.token_ids:
        return answer, None
    if token_ids != answer.token_ids[: len(token_ids)]:
        raise ValueError("has other token_ids than were sampled: they may be cut, but not changed")
    return answer, len(answer.prompt_ids) - len(answer.chain[0].prompt_ids) + len(token_ids)


def _answer_with(result: Any, index: int, history: History) -> tuple[Generation, int | None]:
    """Return the recorded answer that a list of ids stands for, and the number of response tokens
    to cut its trajectory to (None: do not cut).

    The ids are those of a conversation's last answer, or the beginning of all its ids after the
    first prompt. Raises ValueError if the ids were not sampled in this rollout.
    """
    try:
        token_ids = [int(token) for token in result]
    except (TypeError, ValueError):
        raise ValueError(
            f"is {result!r:.60}, but should be a RequestOutput or a list of token ids"
        ) from None
    nearby = sorted(history.generations, key=lambda answer: answer.position != index)
    for answer in nearby:
        if answer.token_ids == token_ids:
            return answer, None
    for answer in nearby:
        if joined(answer.chain).response_ids[: len(token_ids)] == token_ids:
            return answer, len(token_ids)
    raise ValueError(f"holds {len(token_ids)} ids that the policy has not sampled in this rollout")


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
