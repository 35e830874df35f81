"""A step's figures: of its trajectories, of its updates, and of how far trainer and engine are apart."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from generation.trajectory import Trajectory, by_episode
from sharding.collectives import all_gather_bytes, rank, world_size
from trainer.algorithms.corrections import correction_metrics, gap_metrics
from trainer.batching import assign_to_ranks, micro_batches
from trainer.config import AlgorithmConfig, TrainConfig
from trainer.learning.groups import sampled_tokens
from trainer.learning.minibatches import to_sample
from trainer.policy.base import Policy, UpdateStats

Metrics = dict[str, float]

GAP_ANSWERS = 32
"""Answers whose gap is measured in a step that learns from none."""

_PPO_BAND = (0.2, 0.28)


def gather_columns(own: Tensor) -> Tensor:
    """[R, N] float32 of this rank to [R, all ranks' N], on the CPU. Collective."""
    parts = all_gather_bytes(own.float().cpu().contiguous().numpy().tobytes())
    columns = [torch.frombuffer(bytearray(part), dtype=torch.float32).view(len(own), -1) for part in parts if part]
    return torch.cat(columns, dim=1) if columns else torch.empty(len(own), 0)


def engine_gap(gaps: list[tuple[Tensor, Tensor]], config: AlgorithmConfig) -> Metrics:
    """Trainer against engine on every token of the step, all ranks. Collective.

    The band is the loss's where that is about single tokens, else the usual one.

    Args:
        gaps: trainer's and engine's log-probabilities, as `PolicyLoss.gaps` has them.
    """
    own = torch.stack([torch.cat([pair[i] for pair in gaps]) for i in (0, 1)]) if gaps else torch.empty(2, 0)
    by_token = config.loss == "clip" and config.ratio_level == "token"
    low, high = (config.clip_low, config.clip_high) if by_token else _PPO_BAND
    assert low is not None and high is not None
    trainer, engine = gather_columns(own)
    return gap_metrics(trainer, engine, low, high)


def gap_without_update(trajectories: list[Trajectory], policy: Policy, config: TrainConfig, pad_id: int) -> Metrics:
    """`engine_gap` where no update has scored the answers: of `GAP_ANSWERS`, spread over the step. Collective.

    Which they are depends on the trajectories alone, and these are the same on all ranks. None is left out for its
    length. There is nothing where none was sampled.
    """
    sampled = [t for t in trajectories if not t.error and any(t.loss_mask)]
    samples = [to_sample(t) for t in sampled[:: max(1, math.ceil(len(sampled) / GAP_ANSWERS))]]
    if not samples:
        return {}
    own = assign_to_ranks([len(s.input_ids) for s in samples], world_size())[rank()]
    budget, packing = config.batch.tokens_per_micro_batch, config.batch.packing
    batches = micro_batches([samples[i] for i in own], budget, pad_id, policy.device, packing=packing)
    outputs = policy.score(batches, config.sampling.temperature)
    gaps = [(b.trained(o.logprobs), b.trained(b.engine_logprobs)) for o, b in zip(outputs, batches, strict=True)]
    return engine_gap(gaps, config.algorithm)


def update_metrics(updates: list[UpdateStats]) -> Metrics:
    """One step's figures from the policy's updates: means over updates, or over tokens for what was summed."""
    sums = summed(updates)

    def mean(values: Callable[[UpdateStats], float]) -> float:
        return sum(map(values, updates)) / len(updates)

    def per_token(key: str) -> float:
        return sums.get(key, 0.0) / max(sums.get("tokens", 0.0), 1.0)

    metrics = {
        "loss": mean(lambda u: u.loss),
        "grad_norm": mean(lambda u: u.grad_norm),
        "lr": updates[-1].learning_rate,
        "entropy": per_token("entropy"),
        "clip_fraction": per_token("clipped"),
        "updates": float(len(updates)),
        "skipped_steps": float(sum(u.skipped for u in updates)),
        "train_tokens": sums.get("tokens", 0.0),
    }
    metrics |= {name: per_token(name) for name in ("kl", "decisive") if name in sums}
    if "correction/tokens" in sums:
        metrics |= correction_metrics(sums)
        metrics["importance_weight"] = metrics.pop("correction/weight")
    return metrics | value_metrics(sums)


def critic_metrics(updates: list[UpdateStats]) -> Metrics:
    """Of a critic's own updates."""
    return value_metrics(summed(updates)) | {
        "value/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "value/skipped": float(sum(u.skipped for u in updates)),
    }


def value_metrics(sums: Metrics) -> Metrics:
    """Figures of a step's values, from what `CriticLoss` sums up; none where there is no critic.

    Returns:
        value/loss, and as means over tokens value/clip_fraction and value/return; value/explained: the share of the
        returns' variance that values of before the step explain, 1 - Var(return - value) / Var(return), at most 1.
    """
    tokens = sums.get("value/tokens", 0.0)
    if not tokens:
        return {}
    variance = sums["value/return_squared"] / tokens - (sums["value/return"] / tokens) ** 2
    unexplained = sums["value/error_squared"] / tokens - (sums["value/error"] / tokens) ** 2
    return {
        "value/loss": sums["value/loss"] / tokens,
        "value/clip_fraction": sums["value/clipped"] / tokens,
        "value/return": sums["value/return"] / tokens,
        "value/explained": 1.0 - unexplained / variance if variance > 0 else 0.0,
    }


def summed(updates: list[UpdateStats]) -> Metrics:
    """What loss functions returned, added up over updates."""
    keys = {key for update in updates for key in update.sums}
    return {key: sum(update.sums.get(key, 0.0) for update in updates) for key in sorted(keys)}


def rollout_metrics(trajectories: list[Trajectory]) -> Metrics:
    """Rewards, lengths and failures of a step's episodes; reward and end are those of an episode's last trajectory."""
    episodes = by_episode(trajectories)
    sound = [episode for episode in episodes if not any(t.error for t in episode)]
    sampled, last = [t for episode in sound for t in episode], [episode[-1] for episode in sound]
    rewards = torch.tensor([t.reward for t in last], dtype=torch.float64)
    lengths = [sum(map(sampled_tokens, episode)) for episode in sound]
    count = max(1, len(sound))
    metrics = {
        "reward/mean": rewards.mean().item() if sound else 0.0,
        "reward/std": rewards.std(correction=0).item() if sound else 0.0,
        "reward/errors": sum(t.metrics.get("reward/error", 0.0) for t in sampled),
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths, default=0)),
        "length/truncated": sum(t.finish_reason == "length" for t in last) / count,
        "rollout/failed": float(len(episodes) - len(sound)),
        "rollout_tokens": float(sum(lengths)),
        "turns/mean": sum(t.turns for t in sampled) / count,
    }
    for name in sorted({part for t in last for part in t.reward_parts}):
        values = [t.reward_parts[name] for t in last if name in t.reward_parts]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics | tool_metrics(sampled)


def tool_metrics(trajectories: list[Trajectory]) -> Metrics:
    """What trajectories count under "tools/", summed; and the share of calls that failed."""
    names = sorted({name for t in trajectories for name in t.metrics if name.startswith("tools/")})
    metrics = {name: sum(t.metrics.get(name, 0.0) for t in trajectories) for name in names}
    if calls := metrics.get("tools/calls"):
        metrics["tools/failure_rate"] = metrics.get("tools/errors", 0.0) / calls
    return metrics
