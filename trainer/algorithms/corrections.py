"""The engine and the trainer do not compute the same probabilities: how far apart they are, and what to do about it.

Ratios of trainer to engine, of tokens or sequences, become *weights* that multiply the loss (truncated importance
sampling), or decide which tokens are *kept* (masking), or both: weights from one level, what is kept from another.
There are two ways to leave tokens out. Multiplied into the loss, the count it is divided by stays that of all tokens,
as in the papers; multiplied into the mask before it is counted, the remaining tokens weigh more.
"""

import torch
from torch import Tensor

from trainer.algorithms.losses import log_ratio


def rollout_ratios(old_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """Trainer's over engine's probability: of each token, their geometric mean over a sequence, or their product.

    `.clamp(max=cap)` makes truncated importance weights of it, which correct the gradient for samples drawn by another
    distribution: Espeholt et al. 2018 (IMPALA, arXiv:1802.01561, the rho of equation 1). Of tokens, between engine and
    trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; of whole
    sequences: Liu et al. 2025, "When speed kills stability" (unbiased except for the cap, and noisy). Log-probabilities
    [B, T]: the trainer's before the step's first update, and the engine's under its sampling distribution. [B, T]
    without gradient, 1 on masked tokens.
    """
    return torch.exp(log_ratio(old_logprobs.detach(), engine_logprobs, mask, level))


def within(ratios: Tensor, low: float, high: float) -> Tensor:
    """Whether ratios lie in [low, high], and so are kept.

    On tokens, with the ratio itself as weight: IcePop, Ling Team 2025 (arXiv:2510.18855), 0.5 to 5 for example. On
    geometric means: a sequence is kept or left out as a whole, and the band has to be narrow, such as 0.99 to 1.01.
    Ratios [B, T], see `rollout_ratios`; [B, T] bool.
    """
    return (ratios >= low) & (ratios <= high)


def not_stale(logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """False for bad samples that the policy has moved away from: their gradient would only push it further.

    Off-policy sequence masking, DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 9: where A < 0 and the mean over the
    sequence's trainable tokens of log(engine / policy) exceeds the threshold. Staleness of both kinds counts, that of
    earlier updates in the step and that of the engine's kernels. Log-probabilities [B, T] under the policy as it is
    now, and the engine's; advantages [B] or [B, T]; the threshold is above 0, nats a token. [B, T] bool: what to keep,
    True on masked tokens.
    """
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    divergence = -log_ratio(logprobs.detach(), engine_logprobs, mask, "geometric")
    return (advantages >= 0) | (divergence <= threshold)


def correction_sums(weights: Tensor, cap: float, kept: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The effect of a correction on a part of the step, to be added up over micro-batches and ranks.

    `weights` [B, T] are ratios before they are capped, and `cap` their upper bound; `kept` [B, T] bool; mask [B, T].
    Gives scalars: correction/tokens and correction/sequences (with a trainable token), of these
    correction/dropped_tokens and correction/dropped_sequences (without a kept token), correction/capped tokens, and the
    sums of capped weights and of their squares over the kept, correction/weight and correction/weight_squared.
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
    """Shares of a step from the sums above; all 0 without tokens.

    correction/weight: mean over kept tokens, 1 where engine and trainer agree; correction/effective: Kish's effective
    sample size of the weights as a share of the kept tokens; capped and dropped_tokens as shares of all tokens,
    dropped_sequences of sequences.
    """
    tokens = sums["correction/tokens"]
    kept = max(tokens - sums["correction/dropped_tokens"], 1.0)
    total, squares = sums["correction/weight"], sums["correction/weight_squared"]
    return {
        "correction/weight": total / kept,
        "correction/effective": total * total / (kept * squares) if squares else 0.0,
        "correction/capped": sums["correction/capped"] / max(tokens, 1.0),
        "correction/dropped_tokens": sums["correction/dropped_tokens"] / max(tokens, 1.0),
        "correction/dropped_sequences": sums["correction/dropped_sequences"] / max(sums["correction/sequences"], 1.0),
    }
