"""The loss of one optimizer step, composed from `trainer.algorithms` as the recipe says."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.algorithms import corrections, kl, losses
from trainer.algorithms.aggregation import token_mean_weights, weights
from trainer.algorithms.losses import clipped_value_loss, log_ratio
from trainer.config.schema import AlgorithmConfig
from trainer.learning.answer_rows import TokenMetrics
from trainer.learning.groups import MiniBatch
from trainer.types import MicroBatch, Outputs

Sums = dict[str, Tensor]
PerToken = TypeVar("PerToken", MicroBatch, Outputs)


class PolicyLoss:
    """The policy's loss function (`trainer.types.LossFn`), called for each micro-batch of an
    optimizer step.

    The loss is the surrogate of each token times its correction, on tokens of high entropy only if
    the recipe says so, plus KL, minus the entropy bonus, plus the value loss if a value head shares
    the trunk. All tensors are [B, T-1]; nothing is read where the loss mask is 0.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        minibatch: MiniBatch,
        longest: int,
        metrics: TokenMetrics | None = None,
    ) -> None:
        """Make the loss of one optimizer step.

        `longest` is the number of tokens of the longest possible answer, for the aggregation
        fixed_length. `metrics` notes every micro-batch.
        """
        self._token_metrics = metrics
        # The results of `split_by_age` for all micro-batches: tokens of the current version, and
        # those of older ones.
        self.gaps: list[tuple[Tensor, Tensor]] = []
        self.old: list[tuple[Tensor, Tensor, Tensor]] = []
        self._config = config
        self._longest = longest
        self._critic = CriticLoss(config, minibatch)
        self._counts = (minibatch.tokens, minibatch.sequences)
        self._loss = config.loss_record
        self._keys = dict(config)

    def __call__(self, batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, Sums]:
        batch, outputs = only_trained(batch, batch.loss_mask), only_trained(outputs, batch.loss_mask)
        if self._token_metrics is not None:
            self._token_metrics.note(batch, outputs)
        config = self._config
        mask = batch.loss_mask
        logprobs = outputs.logprobs
        # With a single update nothing has changed yet, so this forward pass has the old
        # log-probabilities.
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        new, earlier = split_by_age(batch, old)
        self.gaps.append(new)
        self.old.append(earlier)
        tensors = {
            "logprobs": logprobs,
            "old_logprobs": old,
            "advantages": batch.advantages,
            "mask": mask,
        }
        if self._loss.takes("log_ratio"):
            tensors["log_ratio"] = log_ratio(logprobs, old, mask, config.ratio_level)
        loss, bounded = self._loss(self._keys, **tensors)
        sums = {
            "tokens": mask.sum(),
            "clipped": (bounded * mask).sum(),
            "entropy": (outputs.entropy.detach() * mask).sum(),
        }
        weight, correction_sums = correction(config, batch, old, logprobs)
        loss = loss * weight
        sums = sums | correction_sums
        if batch.high_entropy is not None:
            loss = loss * batch.high_entropy
            sums["decisive"] = (batch.high_entropy * mask).sum()
        if batch.ref_logprobs is not None:
            estimate = kl.divergence(
                config.kl_estimator, logprobs, old, batch.ref_logprobs, config.kl_clamp
            )
            sums["kl"] = (estimate.detach() * mask).sum()
            if config.kl_in_loss:
                loss = loss + config.kl_coef * estimate
        if config.entropy_coef:
            loss = loss + losses.entropy_bonus(outputs.entropy, config.entropy_coef)
        total = (loss * weights(mask, config.aggregation, *self._counts, self._longest)).sum()
        if outputs.values is not None:
            value_loss, value_sums = self._critic(batch, outputs.values)
            total = total + config.value_coef * value_loss
            sums = sums | value_sums
        return total, sums


def split_by_age(
    batch: MicroBatch, logprobs: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Split the trainer's and the engine's log-probabilities of targets by the version that sampled
    the targets.

    `logprobs` [B, T-1] are the trainer's. Returns the pair [K] of targets of the policy's current
    version, and the pair of those of earlier versions with their ages.
    """
    trainer = batch.trained(logprobs)
    engine = batch.trained(batch.engine_logprobs)
    if batch.ages is None:  # no mask, since its length would make the host wait for the device
        return (trainer, engine), (trainer[:0], engine[:0], trainer[:0].to(torch.uint8))
    ages = batch.trained(batch.ages)
    old = ages > 0
    return (trainer[~old], engine[~old]), (trainer[old], engine[old], ages[old])


def only_trained(tensors: PerToken, mask: Tensor) -> PerToken:
    """Return a copy with zeros in every floating tensor where `mask`, of the tensors' shape, is 0.

    Values are selected and not multiplied, since 0 * NaN is NaN, and so is the gradient through it.
    """
    values: dict[str, Any] = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            values[name] = torch.where(mask.bool(), value, 0.0)
    return replace(tensors, **values)


def correction(
    config: AlgorithmConfig, batch: MicroBatch, old: Tensor, logprobs: Tensor
) -> tuple[Tensor, Sums]:
    """Return weights [B, T-1] that correct for the gap between engine and trainer, 0 on tokens left
    out, and their sums.
    """
    mask = batch.loss_mask
    engine = batch.engine_logprobs
    if config.tis_cap is None and config.keep_band is None and config.stale_threshold is None:
        return torch.ones_like(mask), {}
    kept = torch.ones_like(mask, dtype=torch.bool)
    if config.keep_band is not None:
        kept &= corrections.within(
            corrections.rollout_ratios(old, engine, mask, config.keep_level), *config.keep_band
        )
    if config.stale_threshold is not None:
        kept &= corrections.not_stale(logprobs, engine, batch.advantages, mask, config.stale_threshold)
    ratios = torch.ones_like(mask)
    cap = 1.0
    if config.tis_cap is not None:
        ratios = corrections.rollout_ratios(old, engine, mask, config.tis_level)
        cap = config.tis_cap
    return ratios.clamp(max=cap) * kept, corrections.correction_sums(ratios, cap, kept, mask)


class CriticLoss:
    """The value model's loss, a mean over all trainable tokens, called for each micro-batch of an
    optimizer step.
    """

    def __init__(self, config: AlgorithmConfig, minibatch: MiniBatch) -> None:
        self._clip = config.value_clip
        self._tokens = minibatch.tokens

    def __call__(self, batch: MicroBatch, values: Tensor) -> tuple[Tensor, Sums]:
        """Return the loss and its sums; `values` [B, T-1] carry the gradient."""
        batch, mask = only_trained(batch, batch.loss_mask), batch.loss_mask
        assert batch.old_values is not None and batch.returns is not None
        values = torch.where(mask.bool(), values, 0.0)
        goal = batch.returns
        loss, clipped = clipped_value_loss(values, batch.old_values, goal, self._clip)
        sums = {
            "value/tokens": mask.sum(),
            "value/loss": (loss.detach() * mask).sum(),
            "value/clipped": (clipped * mask).sum(),
            "value/return": (goal * mask).sum(),
            "value/return_squared": (goal.square() * mask).sum(),
            "value/error": ((goal - batch.old_values) * mask).sum(),
            "value/error_squared": ((goal - batch.old_values).square() * mask).sum(),
        }
        return (loss * token_mean_weights(mask, float(self._tokens))).sum(), sums
