"""Policy-gradient losses per token, with importance ratios, entropy bonus and value loss, and their
records.

A loss function takes `log_ratio` [B, T] and `logprobs` [B, T], which carry the gradient unless its
docstring says otherwise, and `advantages` [B] or [B, T], treated as constant. `clip_low` and
`clip_high` are distances from 1, both >= 0. It returns the loss [B, T], which `aggregation`
averages, and a mask [B, T] bool of the tokens on which its bounds took effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.algorithms.catalogue import Level, Loss, Tensor, torch

# exp(20) is 5e8: ratios beyond it carry no information, and without a bound exp() overflows to inf
# at 89, which turns a masked or clipped token into inf * 0 = nan.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """Return log(policy / old policy) per token, or one value for all tokens of a sequence.

    - token: log p(y_t) - log p_old(y_t), as in PPO.
    - geometric: its mean over the sequence's trainable tokens, so that exp() is the geometric mean
      of their ratios: GSPO, Zheng et al. 2025 (arXiv:2507.18071), equation 7.
    - sequence: its sum, so that exp() is the ratio of the probabilities of the whole sequence, as
      in RLOO (Ahmadian et al. 2024, arXiv:2402.14740). It leaves any fixed band as sequences grow.

    With geometric and sequence, a token has the sequence's value and the gradient of its own
    log-probability (GSPO-token, equation 14). Averaged over the sequence for geometric, or summed
    for sequence, that is the gradient of the sequence's ratio. Advantages and corrections can still
    differ from token to token, and a token with weight 0 contributes nothing.

    Log-probabilities [B, T] are those of the policy being trained, which carry the gradient, and
    those of the policy to compare with, treated as constant; their values where the mask [B, T] is
    0 do not matter. Returns [B, T] within +-MAX_LOG_RATIO, 0 on masked tokens. Beyond the bound the
    gradient is 0.
    """
    trained = mask.bool()
    difference = torch.where(trained, logprobs - old_logprobs.detach(), 0.0)
    if LEVELS[level].by_answer:
        value = difference.detach().sum(dim=1, keepdim=True)
        if LEVELS[level].mean:
            value = value / trained.sum(dim=1, keepdim=True).clamp(min=1)
        difference = torch.where(trained, value + (difference - difference.detach()), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; different bounds below and above:
    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 8; with geometric ratios: GSPO, Zheng et al.
    2025 (arXiv:2507.18071), equation 5. With `dual_clip` = c, tokens with A < 0 have -max(min(...),
    c A): Ye et al. 2020 (arXiv:1912.09729); otherwise the loss of a token that has become much more
    likely is unbounded. The gradient is 0 where clipped. `dual_clip` is a ratio above 1 +
    clip_high, such as 3 or 10.
    """
    advantages = _per_token(advantages)
    ratio = torch.exp(log_ratio)
    surrogate = torch.minimum(
        ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    )
    clipped = ((ratio > 1.0 + clip_high) & (advantages > 0)) | (
        (ratio < 1.0 - clip_low) & (advantages < 0)
    )
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
        clipped = clipped | ((ratio > dual_clip) & (advantages < 0))
    return -surrogate, clipped


def cispo(
    log_ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, Tensor]:
    """Return -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p: the weight is clipped, and no token
    loses its gradient.

    CISPO, MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5, where sg[...] carries no
    gradient; `log_ratio` is treated as constant. The paper has only an upper bound, so clip_low =
    1. Common upper bounds are 5 and more, so clip_high = 4.
    """
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * _per_token(advantages) * logprobs, weight != ratio


def sapo(
    log_ratio: Tensor, advantages: Tensor, sapo_temperatures: tuple[float, float] = (1.0, 1.05)
) -> tuple[Tensor, Tensor]:
    """Return -(4 / t) sigmoid(t (r - 1)) A: a smooth gate in place of clipping, of slope 1 at r = 1
    and flat far from it.

    SAPO, Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv:2511.20347). `sapo_temperatures`
    are t for A > 0 and t for other tokens: the higher t is, the sooner the gate is flat. No token
    is clipped.
    """
    advantages = _per_token(advantages)
    temperature = torch.where(advantages > 0, *sapo_temperatures)
    gate = torch.sigmoid(temperature * (torch.exp(log_ratio) - 1.0)) * 4.0 / temperature
    return -gate * advantages, torch.zeros_like(log_ratio, dtype=torch.bool)


def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -A log p: the plain policy gradient, for samples of the current policy, with one
    update a step.

    REINFORCE, Williams 1992 (doi:10.1007/BF00992696).
    """
    return -_per_token(advantages) * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


def _per_token(advantages: Tensor) -> Tensor:
    """Return advantages as [B, 1] or [B, T], without gradient."""
    return (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).detach()


def entropy_bonus(entropy: Tensor, coefficient: float) -> Tensor:
    """Return -coefficient * H for each token: added to the loss, it keeps the policy from becoming
    certain too early.

    Williams and Peng 1991 (doi:10.1080/09540099108946587); Mnih et al. 2016 (arXiv:1602.01783),
    section 4. Entropies [B, T] in nats, which carry the gradient.
    """
    return -coefficient * entropy


def entropy_threshold(count: int, nth_smallest: Callable[[int], float], share: float) -> float:
    """Return the least entropy of the share of tokens with the highest: the (1 - share) quantile,
    linearly interpolated.

    The tokens are all trainable ones of the optimizer step, over all ranks: within a micro-batch
    the choice would depend on the other answers in it. `nth_smallest` returns one of the `count`
    entropies by its position from 0; the paper's share is 0.2. Returns nats; infinity without
    tokens, so that none is chosen.
    """
    if count == 0:
        return math.inf
    position = (1.0 - share) * (count - 1)
    below = nth_smallest(math.floor(position))
    above = nth_smallest(math.ceil(position))
    return below + (above - below) * (position - math.floor(position))


def high_entropy_mask(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Mark the tokens whose entropy reaches the threshold, at which the policy makes a choice.

    Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939), which multiplies the policy loss
    by this mask and still divides by the count of all tokens. Takes entropies [B, T] in nats and
    the result of `entropy_threshold`. Returns [B, T] bool, False wherever the mask is 0.
    """
    return (entropy.detach().double() >= threshold) & mask.bool()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2 for each token.

    PPO's reference implementation, as Engstrom et al. 2020 (arXiv:2005.12729) describe it in
    section 3.

    Values [B, T] carry the gradient. Old values [B, T], from before the step's first update, and
    returns [B, T], the targets of the values (see `advantages.gae`), are treated as constant.
    `clip` is the largest change of a value from its old one in a step, in units of reward; None:
    the plain square. Returns the loss [B, T], to be summed with weights like any other, and the
    mask [B, T] bool of tokens on which clipping took effect, which have no gradient.
    """
    old_values = old_values.detach()
    returns = returns.detach()
    loss = (values - returns).square()
    if clip is None:
        return 0.5 * loss, torch.zeros_like(values, dtype=torch.bool)
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(loss, bounded), bounded > loss


LEVELS = {
    "token": Level("the ratio of each token (PPO)"),
    "geometric": Level("the geometric mean over an answer's tokens (GSPO)", by_answer=True, mean=True),
    "sequence": Level(
        "the product over an answer's tokens: the ratio of the answer's probabilities", by_answer=True
    ),
}
"""The levels of a ratio that a recipe can choose by name: a token, or a whole answer."""

LOSSES = {
    "clip": Loss(clipped_surrogate, "clipped ratios (PPO, GRPO, DAPO)", band=True),
    "cispo": Loss(cispo, "the policy gradient with clipped weights (CISPO)"),
    "sapo": Loss(sapo, "soft gates in place of clipping (SAPO)"),
    "reinforce": Loss(reinforce, "the plain policy gradient, without ratios: one update a step"),
}
"""The losses that a recipe can choose by name."""
