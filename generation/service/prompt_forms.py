"""The input forms of vLLM's `LLM.generate`, brought to one: a list of vLLM's prompt dictionaries."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams

PROMPT_KEYS = ("prompt_token_ids", "prompt", "prompt_embeds", "encoder_prompt")
"""A prompt dictionary holds one of these."""


def prompt_dictionaries(prompts: Any = None, prompt_token_ids: Any = None) -> tuple[list[dict[str, Any]], bool]:
    """The prompts that a call asks for, in order, and whether it asks for one by itself rather than for a list.

    Args:
        prompts: a text, token ids, a prompt dictionary, or a list or tuple of these.
        prompt_token_ids: instead of `prompts`: token ids of one prompt, or a list of those of several.

    Raises:
        ValueError: naming the prompt that is none.
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
    """Sampling parameters of each of `count` prompts, for final outputs only; the caller's objects stay as they are.

    Raises:
        ValueError: a list of another length.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if isinstance(sampling_params, (list, tuple)):
        if len(sampling_params) != count:
            raise ValueError(f"{len(sampling_params)} sampling parameters were given for {count} prompts")
        each = [params.clone() for params in sampling_params]
    else:
        one: Any = sampling_params or SamplingParams()
        each = [one.clone() for _ in range(count)]
    for params in each:
        params.output_kind = RequestOutputKind.FINAL_ONLY
    return each
