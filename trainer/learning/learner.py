"""One step's learning, read from top to bottom: groups, scores, credit, updates, figures."""

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from trainer.algorithms.entropy import entropy_threshold, high_entropy_mask
from trainer.batching import MicroBatch
from trainer.config import TrainConfig
from trainer.learning.credit import assign_credit, has_signal
from trainer.learning.groups import informative, longest_answer, make_groups
from trainer.learning.metrics import Metrics, engine_gap, gather_columns, update_metrics
from trainer.learning.minibatches import MiniBatch, prepare, split
from trainer.learning.policy_loss import PolicyLoss
from trainer.policy.base import Outputs, Policy


class Learner:
    """Updates the policy on a step's trajectories. Collective: the same trajectories on all ranks."""

    def __init__(
        self,
        config: TrainConfig,
        policy: Policy,
        reference: Policy | None,
        pad_id: int,
        reward_weights: dict[str, float] | None = None,
    ) -> None:
        """`reward_weights` are those of the reward functions, by label."""
        self._config, self._policy, self._reference, self._pad_id = config, policy, reference, pad_id
        self._reward_weights = reward_weights or {}

    def learn(self, trajectories: list[Trajectory]) -> Metrics:
        """All passes over the step's batch; returns its figures, the same on all ranks.

        A step in which no token was better or worse than expected, and neither KL nor entropy pulls, has a gradient of
        zero: it is left out, since Adam's momentum would move the weights all the same.
        """
        config = self._config
        groups = make_groups(trajectories)
        if config.algorithm.drop_zero_variance:
            groups = [group for group in groups if informative(group)]
        minibatches = [
            prepare(part, config, self._pad_id, self._policy.device)
            for part in split(groups, config.batch.updates_per_step)
        ]
        self._score_before(minibatches)
        assign_credit(minibatches, config, self._reward_weights)
        if not has_signal(minibatches) and not (minibatches and self._pulled()):
            return {"no_signal_steps": 1.0, "skipped_steps": 0.0}
        return {"no_signal_steps": 0.0} | self._update(minibatches)

    def _pulled(self) -> bool:
        """Whether the loss has a gradient without any advantage."""
        algorithm = self._config.algorithm
        return algorithm.entropy_coef > 0 or (algorithm.kl_coef > 0 and algorithm.kl_in == "loss")

    def _score_before(self, minibatches: list[MiniBatch]) -> None:
        """What policy and reference say of the tokens before the step's first update, where it is needed."""
        temperature = self._config.sampling.temperature
        for minibatch in minibatches:
            batches = minibatch.batches
            if self._needs_old(len(minibatches)):
                outputs = self._policy.score(batches, temperature)
                for batch, old in zip(batches, outputs, strict=True):
                    batch.old_logprobs = old.logprobs
                if self._config.algorithm.high_entropy_share < 1:
                    mark_decisive(batches, outputs, self._config.algorithm.high_entropy_share)
            if self._reference is not None:
                for batch, ref in zip(batches, self._reference.score(batches, temperature), strict=True):
                    batch.ref_logprobs = ref.logprobs

    def _needs_old(self, minibatches: int) -> bool:
        """With a single update the policy's own forward pass tells its log-probabilities: nothing has changed yet."""
        algorithm = self._config.algorithm
        before_credit = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        return minibatches * algorithm.num_iterations > 1 or before_credit or algorithm.high_entropy_share < 1

    def _update(self, minibatches: list[MiniBatch]) -> Metrics:
        algorithm, longest = self._config.algorithm, longest_answer(self._config)
        updates = []
        gaps: list[tuple[Tensor, Tensor]] = []
        for iteration in range(algorithm.num_iterations):
            for minibatch in minibatches:
                loss = PolicyLoss(algorithm, minibatch, longest)
                updates.append(self._policy.update(minibatch.batches, loss, self._config.sampling.temperature))
                if iteration == 0:
                    gaps += loss.gaps
        return update_metrics(updates) | engine_gap(gaps, algorithm)


def mark_decisive(batches: list[MicroBatch], outputs: list[Outputs], share: float) -> None:
    """Choose the tokens of highest entropy among those of an optimizer step, all ranks. Collective."""
    masks = [batch.loss_mask.bool() for batch in batches]
    own = torch.cat([o.entropy[mask] for o, mask in zip(outputs, masks, strict=True)])
    threshold = entropy_threshold(gather_columns(own.unsqueeze(0))[0], share)
    for batch, output in zip(batches, outputs, strict=True):
        batch.decisive = high_entropy_mask(output.entropy, batch.loss_mask, threshold)
