"""From scored trajectories to optimizer steps.

    groups        answers by prompt, failed ones left out; their rewards, shaped by length; the batch of each optimizer
                  step, and which rank trains on what
    credit        an advantage for every token
    policy_loss   the loss of one optimizer step, of the policy and of the critic
    metrics       a step's figures
    learner       one step's learning, read from top to bottom
    dynamic       which prompts a step samples, and which groups it trains on

Every rank knows all answers (`answers`), so whatever concerns the whole step is computed on each of them alike,
without a collective, unless it depends on tokens or on what a model says of them.
"""

from trainer.learning.dynamic import StepSampling
from trainer.learning.learner import Learner
from trainer.learning.metrics import Metrics, reward_errors, rollout_metrics

__all__ = ["Learner", "Metrics", "StepSampling", "reward_errors", "rollout_metrics"]
