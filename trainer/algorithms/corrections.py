"""Corrections for the difference between the probabilities that the engine and the trainer compute.

Ratios of trainer to engine, of tokens or sequences, become *weights* that multiply the loss
(truncated importance sampling), or decide which tokens are *kept* (masking), or both, each at a
level of its own. There are two ways to leave tokens out. If `kept` multiplies the loss, the divisor
still counts all tokens, as in the papers; if it multiplies the mask before tokens are counted, the
remaining tokens weigh more.
"""

import torch
from torch import Tensor

from trainer.algorithms.losses import log_ratio


def rollout_ratios(
    old_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, level: str = "token"
) -> Tensor:
    """Return ratios of the trainer's to the engine's probability: per token, or their geometric
    mean or product per sequence.

    `.clamp(max=cap)` turns them into truncated importance weights, which correct the gradient for
    samples drawn from another distribution: Espeholt et al. 2018 (IMPALA, arXiv:1802.01561, the rho
    of equation 1). Per token, between engine and trainer: Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training" (fengyao.notion.site/off-policy-rl). Per
    sequence: Liu et al. 2025, "When speed kills stability" (richardli.xyz/rl-collapse); this is
    unbiased except for the cap, and noisy. Log-probabilities are [B, T]: the trainer's before the
    step's first update, and the engine's under its sampling distribution. Returns [B, T] without
    gradient, 1 on masked tokens.
    """
    return torch.exp(log_ratio(old_logprobs.detach(), engine_logprobs, mask, level))


def within(ratios: Tensor, low: float, high: float) -> Tensor:
    """Return True where ratios lie in [low, high], so that their tokens are kept.

    Per token, with the ratio itself as weight, this is IcePop, Ling Team 2025 (arXiv:2510.18855),
    with 0.5 to 5 for example. With geometric means a sequence is kept or left out as a whole, and
    the band has to be narrow, such as 0.99 to 1.01. Takes the ratios [B, T] of `rollout_ratios` and
    returns [B, T] bool.
    """
    return (ratios >= low) & (ratios <= high)


def not_stale(
    logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return False for bad samples that the policy has moved away from, since their gradient would
    only push it further.

    Off-policy sequence masking, DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 9: False where A <
    0 and the mean over the sequence's trainable tokens of log(engine / policy) exceeds the
    threshold. This includes staleness from earlier updates in the step as well as from the engine's
    kernels. Log-probabilities [B, T] are the current policy's and the engine's; advantages are [B]
    or [B, T]; the threshold is above 0, in nats a token. Returns the tokens to keep, [B, T] bool,
    True on masked tokens.
    """
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    divergence = -log_ratio(logprobs.detach(), engine_logprobs, mask, "geometric")
    return (advantages >= 0) | (divergence <= threshold)


def correction_sums(weights: Tensor, cap: float, kept: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sum that describe a correction's effect on a part of the step, to be added up over
    micro-batches and ranks.

    `weights` [B, T] are ratios before they are capped, and `cap` is their upper bound; `kept` is
    [B, T] bool, and the mask [B, T]. Returns scalars:

    - correction/tokens and correction/sequences: trainable tokens, and sequences that have one;
    - correction/dropped_tokens and correction/dropped_sequences: those that are not kept, or have
      no kept token;
    - correction/capped: kept tokens whose weight is capped;
    - correction/weight and correction/weight_squared: sums over kept tokens of capped weights, and
      of their squares.
    """
    trained = mask.bool()
    used = trained & kept
    capped = torch.where(used, weights.clamp(max=cap), 0.0)
    sequences = trained.any(dim=1)
    return {
        "correction/tokens": trained.sum(),
        "correction/sequences": sequences.sum(),
        "correction/dropped_tokens": (trained & ~kept).sum(),
        "correction/dropped_sequences": (sequences & ~used.any(dim=1)).sum(),
        "correction/capped": (used & (weights > cap)).sum(),
        "correction/weight": capped.sum(),
        "correction/weight_squared": capped.square().sum(),
    }


def correction_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return metrics of a step's correction, from the step's `correction_sums`; all are 0 without
    tokens.

    - correction/weight: mean weight of kept tokens, 1 if engine and trainer agree;
    - correction/effective: Kish's effective sample size of the weights, as a share of the kept
      tokens;
    - correction/capped and correction/dropped_tokens: shares of all tokens;
    - correction/dropped_sequences: share of all sequences.
    """
    tokens = sums["correction/tokens"]
    kept = max(tokens - sums["correction/dropped_tokens"], 1.0)
    total = sums["correction/weight"]
    squares = sums["correction/weight_squared"]
    return {
        "correction/weight": total / kept,
        "correction/effective": total * total / (kept * squares) if squares else 0.0,
        "correction/capped": sums["correction/capped"] / max(tokens, 1.0),
        "correction/dropped_tokens": sums["correction/dropped_tokens"] / max(tokens, 1.0),
        "correction/dropped_sequences": sums["correction/dropped_sequences"]
        / max(sums["correction/sequences"], 1.0),
    }
