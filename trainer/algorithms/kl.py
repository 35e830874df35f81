"""Estimators of the Kullback-Leibler divergence from single samples, for the loss and for the
reward.

In the *loss*, the estimator's gradient counts, not its value (Liu et al. 2025, arXiv:2510.01555;
Tang and Munos 2025, arXiv:2506.09477). The gradient of k2 is that of the divergence while the
policy is the one that sampled; that of k3 is biased; that of k1 is 0 on average, so k1 only adds
noise there. With the importance weight, the gradient of k3 is right off-policy, too. In the
*reward* only values count, and k1 is the one whose expectation is exact (`penalty`).

Estimators take log-probabilities [B, T]: `logprobs` of the policy, which carry the gradient, and,
treated as constant, `old_logprobs` of the policy that sampled and `reference_logprobs`. They return
nats a token, [B, T].
"""

from __future__ import annotations

from trainer.algorithms.catalogue import Estimator, Tensor, torch
from trainer.algorithms.losses import MAX_LOG_RATIO


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return log(policy / reference): unbiased, of high variance, and negative for many tokens.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). It is clamped to
    +-MAX_LOG_RATIO, beyond which the gradient of this and all other estimators here is 0.
    """
    return (logprobs - reference_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return half the square of k1: biased, but its gradient k1 * grad(logprobs) is that of the
    divergence.
    """
    return 0.5 * k1(logprobs, reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = log(reference / policy): unbiased for KL(policy || reference),
    never negative.

    It has low variance. Schulman 2020, "Approximating KL divergence"
    (joschu.net/blog/kl-approx.html); GRPO, Shao et al. 2024 (arXiv:2402.03300), equation 4, has
    this form.
    """
    difference = -k1(logprobs, reference_logprobs)
    return torch.expm1(difference) - difference


def unbiased_k3(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return r * k3 with r = exp(logprobs - old_logprobs): value and gradient are unbiased for
    samples of the old policy, too.

    DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 7. The ratio must carry a gradient as well:
    even at r = 1 it turns k3's gradient into that of the divergence. Where the difference to the
    reference exceeds its bound, k3 is constant, and the ratio is treated as constant, too: its
    gradient would be k3's value, 4.9e8 at 20 nats, in the wrong direction. NeMo RL does the same
    (`calculate_kl` in nemo_rl/algorithms/utils.py).
    """
    ratio = torch.exp((logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    bounded = (logprobs - reference_logprobs).abs() > MAX_LOG_RATIO
    ratio = torch.where(bounded, ratio.detach(), ratio)
    return ratio * k3(logprobs, reference_logprobs)


def divergence(
    estimator: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    clamp: float | None = None,
) -> Tensor:
    """Estimate [B, T] by the estimator with this name in `ESTIMATORS`.

    `clamp` bounds the absolute value, in nats; a token beyond it has no gradient. Otherwise a few
    tokens that the reference deems impossible would dominate the step.
    """
    tensors = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "reference_logprobs": reference_logprobs,
    }
    estimate: Tensor = ESTIMATORS[estimator]({}, **tensors)
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def penalty(estimate: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Return -coefficient * KL for each token, to be added to its reward, or, summed over T, to a
    sequence's reward.

    Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), equation 2; for each token: Ziegler et al.
    2019 (arXiv:1909.08593), equation 2. The estimate [B, T] is `k1` of the policy that sampled.
    Returns [B, T] without gradient, 0 on masked tokens.
    """
    return torch.where(mask.bool(), -coefficient * estimate.detach(), 0.0)


ESTIMATORS = {
    "k1": Estimator(k1, "log ratio: unbiased, for the reward", in_loss=False, in_reward=True),
    "k2": Estimator(
        k2, "half the square of k1: the right gradient while the policy is the one that sampled"
    ),
    "k3": Estimator(k3, "never negative, of low variance (GRPO)"),
    "unbiased_k3": Estimator(
        unbiased_k3, "k3 times the importance ratio: the right gradient off-policy, too"
    ),
}
"""The estimators of KL that a recipe can choose by name."""
