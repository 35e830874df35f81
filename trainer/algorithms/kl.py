"""Estimators of the Kullback-Leibler divergence from single samples, for the loss and for the reward.

In the *loss*, what counts is the estimator's gradient, not its value (Liu et al. 2025, arXiv:2510.01555; Tang and Munos
2025, arXiv:2506.09477): k2's is that of the divergence while the policy is the one that sampled, k3's is biased, and
k1's is 0 on average, so k1 does nothing there but add noise. With the importance weight, k3's is right off-policy too.
In the *reward* only values count, and k1 is the one whose expectation is exact; that is `penalty`.

Estimators take log-probabilities [B, T]: `logprobs` under the policy, which carry the gradient, and, treated as
constant, `old_logprobs` under the policy that sampled and `reference_logprobs`. They return nats a token, [B, T].
"""

from __future__ import annotations

from trainer.algorithms.losses import MAX_LOG_RATIO
from trainer.algorithms.records import Estimator, Tensor, torch


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """policy - reference, in logarithms: unbiased, of high variance, and negative for many tokens.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). Within +-MAX_LOG_RATIO; beyond it the
    gradient is 0, that of all estimators here.
    """
    return (logprobs - reference_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the square of k1: biased, but its gradient k1 * grad(logprobs) is that of the divergence."""
    return 0.5 * k1(logprobs, reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: unbiased for KL(policy || reference), never negative, low variance.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); the form in GRPO's equation 4
    (arXiv:2402.03300).
    """
    difference = -k1(logprobs, reference_logprobs)
    return torch.expm1(difference) - difference


def unbiased_k3(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r * k3 with r = exp(logprobs - old_logprobs): value and gradient unbiased for samples of the old policy, too.

    DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 7. The ratio carries a gradient as well, and has to: even at r = 1
    it is what turns k3's gradient into that of the divergence. Where the difference to the reference is beyond its
    bound, k3 is a constant, and the ratio is one, too: by itself its gradient would be k3's value, 4.9e8 at 20 nats, in
    the wrong direction. NeMo RL does the same (`calculate_kl` in nemo_rl/algorithms/utils.py).
    """
    ratio = torch.exp((logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    bounded = (logprobs - reference_logprobs).abs() > MAX_LOG_RATIO
    ratio = torch.where(bounded, ratio.detach(), ratio)
    return ratio * k3(logprobs, reference_logprobs)


def divergence(
    estimator: str, logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor, clamp: float | None = None
) -> Tensor:
    """An estimate [B, T] by its name in `ESTIMATORS`.

    `clamp` is a bound of the absolute value, nats; a token beyond it has no gradient. A few tokens that the reference
    deems impossible would otherwise decide the step.
    """
    tensors = {"logprobs": logprobs, "old_logprobs": old_logprobs, "reference_logprobs": reference_logprobs}
    estimate: Tensor = ESTIMATORS[estimator]({}, **tensors)
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def penalty(estimate: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """-coefficient * KL for each token, to be added to its reward; the sum over T is for a sequence's reward.

    Ouyang et al. 2022 (arXiv:2203.02155), equation 2; for each token: Ziegler et al. 2019 (arXiv:1909.08593), equation
    2. The estimate [B, T] is of the policy that sampled: `k1`. Gives [B, T] without gradient, 0 on masked tokens.
    """
    return torch.where(mask.bool(), -coefficient * estimate.detach(), 0.0)


ESTIMATORS = {
    "k1": Estimator(k1, "log ratio: unbiased, for the reward", in_loss=False, in_reward=True),
    "k2": Estimator(k2, "half its square: the right gradient while the policy is the one that sampled"),
    "k3": Estimator(k3, "never negative, of low variance (GRPO)"),
    "unbiased_k3": Estimator(unbiased_k3, "k3 times the importance ratio: the right gradient off-policy, too"),
}
"""The estimators of KL that a recipe can name."""
