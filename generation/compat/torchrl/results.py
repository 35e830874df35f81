"""A service's calls: prompts in all forms of vLLM's `LLM.generate`, errors that name their prompt, waits that end."""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from typing import TYPE_CHECKING, Any, Self

from generation.compat.torchrl.settings import TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


class PromptErrors(ExceptionGroup[Exception]):
    """Some prompts of a batch failed, each with its own error. `outputs` has None for those, in the prompts' order."""

    outputs: "list[RequestOutput | None]"

    def __new__(cls, errors: Sequence[Exception], outputs: "list[RequestOutput | None]") -> Self:
        text = f"{len(errors)} of {len(outputs)} prompts failed; the others' answers are in the error's `outputs`"
        self = super().__new__(cls, text, errors)
        self.outputs = outputs
        return self

    def __repr__(self) -> str:
        return f"PromptErrors({self.message!r}, {list(self.exceptions)!r})"

    def derive(self, excs: Sequence[Exception]) -> "PromptErrors":  # type: ignore[override]
        return PromptErrors(excs, self.outputs)


def answer_or_error(future: Future[Any], place: int) -> Any:
    """The result of a future that has ended, or its error with a note that names the prompt."""
    try:
        return future.result()
    except CancelledError:
        error: Exception = RuntimeError("the service was shut down before this prompt was answered")
    except Exception as raised:
        error = raised
    error.add_note(f"prompt {place}")
    return error


def answers(results: list[Any], single: bool, return_exceptions: bool) -> Any:
    """Results of a call in the form that it asked for, or its errors raised."""
    errors = [result for result in results if isinstance(result, Exception)]
    if errors and not return_exceptions:
        if single:
            raise errors[0]
        raise PromptErrors(errors, [None if isinstance(result, Exception) else result for result in results])
    return results[0] if single else results


def results_of(calls: Sequence[Future[Any]], timeout: float, what: str) -> list[Any]:
    """Results of calls to all engines, in order; the first failure at once, TimeoutError naming `what` and engines."""
    done, missing = wait(calls, timeout, FIRST_EXCEPTION)
    results = [call.result() for call in calls if call in done]
    if missing:
        late = ", ".join(str(i) for i, call in enumerate(calls) if call in missing)
        raise TimeoutError(f"{what}: no answer from engine {late} within {timeout:.0f} s")
    return results


def wait_until_started(starts: Sequence[Future[Any]], timeout: float) -> None:
    """Wait for all engines; raises the first failure at once, or `TimeoutError` with the remedy."""
    try:
        results_of(starts, timeout, "starting engines")
    except TimeoutError as error:
        error.add_note(f"The environment variable {TIMEOUT_VARIABLE} allows more time.")
        raise


PROMPT_KEYS = ("prompt_token_ids", "prompt", "prompt_embeds", "encoder_prompt")
"""A prompt dictionary holds one of these."""


def prompt_dictionaries(prompts: Any = None, prompt_token_ids: Any = None) -> tuple[list[dict[str, Any]], bool]:
    """The prompts that a call asks for, in order, and whether it asks for one by itself rather than for a list.

    Args:
        prompts: a text, token ids, a prompt dictionary, or a list or tuple of these; ValueError names the first item
            that is not a prompt.
        prompt_token_ids: instead of `prompts`: token ids of one prompt, or a list of those of several.
    """
    if prompt_token_ids is not None:
        if prompts is not None:
            raise ValueError("Cannot specify both prompts and prompt_token_ids")
        if not isinstance(prompt_token_ids, (list, tuple)):
            raise ValueError(f"prompt_token_ids must be a list, not a {type(prompt_token_ids).__name__}")
        if not prompt_token_ids:
            raise ValueError("prompt_token_ids cannot be empty")
        if stranger := next((p for p in prompt_token_ids if not isinstance(p, (int, list, tuple))), None):
            raise ValueError(f"prompt_token_ids holds token ids or lists of them, not a {type(stranger).__name__}")
        prompts = prompt_token_ids
    elif prompts is None:
        raise ValueError("Must specify either prompts or prompt_token_ids")
    if not isinstance(prompts, (list, tuple)) or any(isinstance(item, int) for item in prompts):
        return [_prompt_dictionary(prompts, 0)], True
    return [_prompt_dictionary(prompt, place) for place, prompt in enumerate(prompts)], False


def _prompt_dictionary(prompt: Any, place: int) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        if any(prompt.get(key) is not None for key in PROMPT_KEYS):
            return dict(prompt)
        raise ValueError(f"prompt {place} is a dictionary without any of {', '.join(PROMPT_KEYS)}")
    if not isinstance(prompt, (list, tuple)):
        raise ValueError(f"prompt {place} is a {type(prompt).__name__}: give a text, token ids or a prompt dictionary")
    if not prompt:
        raise ValueError(f"prompt {place} has no token ids")
    if not all(isinstance(token, int) for token in prompt):
        raise ValueError(f"prompt {place} mixes token ids with something else")
    return {"prompt_token_ids": list(prompt)}


def sampling_for_each(
    sampling_params: "SamplingParams | Sequence[SamplingParams] | None", count: int
) -> "list[SamplingParams]":
    """A copy of the parameters for each of `count` prompts, for final outputs only; ValueError for another number."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    several = isinstance(sampling_params, (list, tuple))
    given: Any = sampling_params if several else [sampling_params or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling parameters were given for {count} prompts")
    each = [params.clone() for params in given]
    for params in each:
        params.output_kind = RequestOutputKind.FINAL_ONLY
    return each
