"""Answers by prompt, and what they are worth to the learner: rewards combined and shaped by length."""

from collections import defaultdict

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from trainer.algorithms.shaping import length_normalized, soft_overlong_penalty
from trainer.config import TrainConfig
from trainer.errors import UserError

Group = list[Trajectory]
"""The answers to one prompt that can be trained on."""


def make_groups(trajectories: list[Trajectory]) -> list[Group]:
    """Answers by prompt, in the order of prompts. Failed ones are left out, before any mean is taken."""
    groups: dict[int, Group] = defaultdict(list)
    for trajectory in trajectories:
        if not trajectory.error:
            groups[trajectory.prompt_index].append(trajectory)
    return [group for _, group in sorted(groups.items())]


def informative(group: Group) -> bool:
    """Whether rewards differ, in sum or turn by turn, before length has any say: as DAPO asks of answers' correctness.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 11.
    """
    return any((t.reward, t.turn_rewards) != (group[0].reward, group[0].turn_rewards) for t in group)


def longest_answer(config: TrainConfig) -> int:
    """The most tokens an episode can sample: one answer's, or as many turns' as the context has room for."""
    turns = config.rollout.max_turns if config.rollout.tools or config.rollout.code else 1
    return min(turns * config.sampling.max_tokens, config.engine.max_model_len)


def shaped_rewards(group: Group, config: TrainConfig) -> Tensor:
    """Rewards [G] float32, divided by length, then less the penalty of long answers, where the recipe says so."""
    rewards, lengths = torch.tensor([t.reward for t in group]), sampled_tokens(group)
    algorithm = config.algorithm
    if algorithm.length_strength:
        _refuse_negative(group, "length_strength")
        rewards = length_normalized(rewards.unsqueeze(0), lengths.unsqueeze(0), algorithm.length_strength)[0]
    if algorithm.advantage == "max_rl":
        _refuse_negative(group, "advantage: max_rl")
    return rewards + overlong_penalty(lengths, config)


def overlong_penalty(lengths: Tensor, config: TrainConfig) -> Tensor:
    """See `soft_overlong_penalty`; [G], zeros where the recipe has none."""
    margin = config.algorithm.overlong_margin
    if margin is None:
        return torch.zeros(len(lengths))
    longest = longest_answer(config)
    return soft_overlong_penalty(lengths, longest, round(margin * longest))


def reward_components(group: Group, weights: dict[str, float], config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Each reward by itself: of every function, what the episode itself gave, and the penalty of long answers.

    Args:
        weights: of each reward function, by its label; what is missing in an answer, since it failed, is 0.

    Returns:
        rewards [R, G] and weights [R]; their weighted sum is the reward (plus the penalty).
    """
    columns = [[t.reward_parts.get(label, 0.0) for t in group] for label in weights]
    scored = [sum(w * t.reward_parts.get(label, 0.0) for label, w in weights.items()) for t in group]
    columns.append([t.reward - score for t, score in zip(group, scored, strict=True)])
    parts = torch.tensor(columns, dtype=torch.float64)
    penalty = overlong_penalty(sampled_tokens(group), config).double()
    return torch.cat([parts, penalty.unsqueeze(0)]), torch.tensor([*weights.values(), 1.0, 1.0])


def turn_rewards(group: Group, totals: Tensor) -> tuple[Tensor, Tensor]:
    """What each turn was given: its own reward, and the last one whatever else the episode was given.

    Args:
        totals: [G], the episodes' rewards, those of turns included.

    Returns:
        rewards [G, K] float32, and [G, K], 1 where the answer has this turn: a run of tokens that the policy sampled.
    """
    counts = [count_turns(t.loss_mask) for t in group]
    rewards = torch.zeros(len(group), max(1, *counts))
    for row, trajectory, count, total in zip(rewards, group, counts, totals.tolist(), strict=True):
        if count:
            own = trajectory.turn_rewards[: count - 1]
            row[: len(own)] = torch.tensor(own)
            row[count - 1] = total - sum(own)
    return rewards, (torch.arange(rewards.shape[1]) < torch.tensor(counts).unsqueeze(1)).float()


def count_turns(loss_mask: list[int]) -> int:
    """Runs of ones."""
    return sum(now > before for before, now in zip([0, *loss_mask], loss_mask, strict=False))


def sampled_tokens(group: Group) -> Tensor:
    """[G] float32: tokens the policy sampled; what tools said is not its own."""
    return torch.tensor([float(sum(t.loss_mask)) for t in group])


def _refuse_negative(group: Group, key: str) -> None:
    worst = min(group, key=lambda t: t.reward)
    if worst.reward < 0:
        raise UserError(
            f"algorithm.{key} needs rewards of at least 0, but an answer got {worst.reward:g} "
            f"({worst.reward_parts or 'from its episode'}): shift the rewards, or leave that key out"
        )
