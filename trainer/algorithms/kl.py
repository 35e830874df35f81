"""Estimators of the Kullback-Leibler divergence from single samples."""

import torch
from torch import Tensor

from trainer.algorithms.losses import MAX_LOG_RATIO


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: unbiased for KL(policy || reference), never negative, low variance.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); the form in GRPO's equation 4
    (arXiv:2402.03300).

    Args:
        logprobs: [B, T] under the policy that sampled the tokens; carries the gradient.
        reference_logprobs: [B, T], treated as constant.

    Returns:
        [B, T], nats a token.
    """
    difference = (reference_logprobs.detach() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference
