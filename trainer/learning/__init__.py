"""Learning: the way from scored trajectories to optimizer steps.

    groups        answers by prompt, without failed ones; their rewards, shaped by length; the
                  batch of each optimizer step, and each rank's share of it
    batching      the micro-batches of a rank's share
    credit        an advantage for every token
    policy_loss   the loss of one optimizer step, for the policy and for the critic
    metrics       a step's metrics
    learner       one step's learning, from top to bottom

Every rank has a summary of all answers (`answers`). Each rank therefore computes by itself, without
a collective, what concerns the whole step, unless it depends on tokens or on a model's outputs for
them.
"""

from trainer.learning.learner import Learner
from trainer.learning.metrics import Metrics, reward_errors, rollout_metrics

__all__ = ["Learner", "Metrics", "reward_errors", "rollout_metrics"]
