"""Sampling settings that leave nothing to defaults of vLLM or a model, and seeds that depend on
their place alone.

vLLM fills unset fields from the model's `generation_config.json` (vllm/config/model.py); here every
field that changes the distribution is written out for every request.
"""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import SamplingParams


class NotFiniteError(RuntimeError):
    """Raised where log-probabilities are NaN or infinite: the weights, or the computation, are
    broken.
    """


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling of one response. `temperature` 0 is greedy; `top_k` -1, `top_p` 1 and `min_p` 0
    truncate nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)


def sample_seed(seed: int, step: int, prompt: int, sample: int, call: int = 0) -> int:
    """Return a 63-bit seed that is a function of the arguments alone; `call` counts a trajectory's
    requests.
    """
    key = f"{seed}/{step}/{prompt}/{sample}" + (f"/{call}" if call else "")
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def response_budget(context_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Return the largest number of tokens that a response may have after a context; 0 if there is
    no room.
    """
    return max(0, min(max_tokens, max_model_len - context_tokens))


def vllm_sampling_params(
    settings: SamplingSettings, seed: int | None, max_tokens: int | None = None
) -> "SamplingParams":
    """Return vLLM's parameters of one response, with log-probabilities; `max_tokens` overrides that
    of `settings`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
        seed=None if settings.temperature == 0 else seed,
        stop=list(settings.stop),
        stop_token_ids=list(settings.stop_token_ids),
        include_stop_str_in_output=True,
        ignore_eos=False,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(settings.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
