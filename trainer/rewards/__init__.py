"""Reward functions, which run in processes that can be killed."""

from trainer.rewards.loading import BoundReward, bind_rewards
from trainer.rewards.reward_pool import RewardError, RewardPool, RewardResult

__all__ = ["BoundReward", "RewardError", "RewardPool", "RewardResult", "bind_rewards"]
