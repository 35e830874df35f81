"""From scored trajectories to optimizer steps: group advantages, mini-batches, the GRPO loss, and the step's figures.

Every rank has all trajectories, so whatever concerns the whole step (advantages, counts, which rank trains on what) is
computed on each of them alike, without a collective.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.collectives import all_gather_bytes, rank, world_size
from trainer.algorithms.advantages import group_relative
from trainer.algorithms.aggregation import weights
from trainer.algorithms.corrections import gap_metrics, truncated_importance_weights
from trainer.algorithms.kl import k3
from trainer.algorithms.losses import clipped_policy_gradient
from trainer.batching import MicroBatch, Sample, assign_to_ranks, micro_batches
from trainer.config import AlgorithmConfig, TrainConfig
from trainer.policy.base import Outputs, Policy, UpdateStats

Metrics = dict[str, float]


@dataclass
class Group:
    """The samples of one prompt that can be trained on, with their advantages."""

    samples: list[Sample]
    informative: bool  # rewards differ


class Learner:
    """Updates the policy on a step's trajectories. Collective: the same trajectories on all ranks."""

    def __init__(self, config: TrainConfig, policy: Policy, reference: Policy | None, pad_id: int) -> None:
        self._config, self._policy, self._reference, self._pad_id = config, policy, reference, pad_id

    def learn(self, trajectories: list[Trajectory]) -> Metrics:
        """All passes over the step's batch; returns its figures, the same on all ranks.

        A step in which no answer was better or worse than its group, and no KL pulls, has a gradient of zero: it is
        left out, since Adam's momentum would move the weights all the same.
        """
        algorithm = self._config.algorithm
        groups = make_groups(trajectories, algorithm)
        if not any(g.informative for g in groups) and algorithm.kl_coef == 0:
            return {"no_signal_steps": 1.0, "skipped_steps": 0.0}
        minibatches = [self._prepare(part) for part in split(groups, self._config.batch.updates_per_step)]
        self._score_before(minibatches)
        updates, gaps = [], []
        for iteration in range(algorithm.num_iterations):
            for batches, denominator in minibatches:
                loss = GrpoLoss(algorithm, denominator)
                updates.append(self._policy.update(batches, loss, self._config.sampling.temperature))
                if iteration == 0:
                    gaps += loss.gaps
        return {"no_signal_steps": 0.0} | update_metrics(updates) | self._gap_metrics(gaps)

    def _prepare(self, groups: list[Group]) -> tuple[list[MicroBatch], float]:
        """This rank's micro-batches of an optimizer step, and the count over all ranks that its loss is divided by."""
        samples = [sample for group in groups for sample in group.samples]
        lengths = [len(s.input_ids) for s in samples]
        mine = [samples[i] for i in assign_to_ranks(lengths, world_size())[rank()]]
        batches = micro_batches(mine, self._config.batch.tokens_per_micro_batch, self._pad_id, self._policy.device)
        if self._config.algorithm.aggregation == "token_mean":
            return batches, float(sum(sum(s.loss_mask) for s in samples))
        return batches, float(sum(any(s.loss_mask) for s in samples))

    def _score_before(self, minibatches: list[tuple[list[MicroBatch], float]]) -> None:
        """Log-probabilities of the policy the step began with, and of the reference, where they are needed.

        With a single update the policy's own forward pass gives the former: nothing has changed yet.
        """
        temperature = self._config.sampling.temperature
        several = len(minibatches) * self._config.algorithm.num_iterations > 1
        for batches, _ in minibatches:
            if several:
                for batch, old in zip(batches, self._policy.score(batches, temperature), strict=True):
                    batch.old_logprobs = old.logprobs
            if self._reference is not None:
                for batch, ref in zip(batches, self._reference.score(batches, temperature), strict=True):
                    batch.ref_logprobs = ref.logprobs

    def _gap_metrics(self, gaps: list[tuple[Tensor, Tensor]]) -> Metrics:
        """Trainer against engine on every token of the step, all ranks."""
        own = torch.stack([torch.cat([pair[i] for pair in gaps]).cpu() for i in (0, 1)]) if gaps else torch.empty(2, 0)
        parts = all_gather_bytes(own.contiguous().numpy().tobytes())
        both = torch.cat([torch.frombuffer(bytearray(p), dtype=torch.float32).view(2, -1) for p in parts if p], dim=1)
        return gap_metrics(both[0], both[1], self._config.algorithm.clip_low, self._config.algorithm.clip_high)


class GrpoLoss:
    """The loss of one optimizer step, called for each of its micro-batches.

    Clipped policy gradient on group advantages, weighted by truncated importance sampling against the engine, plus k3
    KL.

    Attributes:
        gaps: (trainer's, engine's) log-probabilities of the trainable tokens seen, before any update of the step.
    """

    def __init__(self, config: AlgorithmConfig, denominator: float) -> None:
        self.gaps: list[tuple[Tensor, Tensor]] = []
        self._config, self._denominator = config, denominator

    def __call__(self, batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """See `trainer.policy.base.LossFn`. Shapes [B, T-1]."""
        config, mask, logprobs = self._config, batch.loss_mask, outputs.logprobs
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        trained = mask.bool()
        self.gaps.append((old[trained], batch.engine_logprobs[trained]))
        loss, clipped = clipped_policy_gradient(logprobs, old, batch.advantages, config.clip_low, config.clip_high)
        sums = {
            "tokens": mask.sum(),
            "clipped": (clipped * mask).sum(),
            "entropy": (outputs.entropy.detach() * mask).sum(),
        }
        if config.tis_cap is not None:
            importance = truncated_importance_weights(old, batch.engine_logprobs, config.tis_cap)
            loss = loss * importance
            sums["importance"] = (importance * mask).sum()
        if batch.ref_logprobs is not None:
            kl = k3(logprobs, batch.ref_logprobs)
            loss = loss + config.kl_coef * kl
            sums["kl"] = (kl.detach() * mask).sum()
        return (loss * weights(mask, config.aggregation, self._denominator)).sum(), sums


def make_groups(trajectories: list[Trajectory], config: AlgorithmConfig) -> list[Group]:
    """Samples by prompt, with advantages relative to the group.

    Failed samples are left out, before the mean is taken.
    """
    by_prompt: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if not trajectory.error:
            by_prompt[trajectory.prompt_index].append(trajectory)
    groups = [_group(members, config.normalize_std) for _, members in sorted(by_prompt.items())]
    return [g for g in groups if g.informative] if config.drop_zero_variance else groups


def _group(members: list[Trajectory], normalize_std: bool) -> Group:
    rewards = [t.reward for t in members]
    advantages = group_relative(torch.tensor([rewards], dtype=torch.float64), normalize_std)[0].tolist()
    samples = [to_sample(t, advantage) for t, advantage in zip(members, advantages, strict=True)]
    return Group(samples, max(rewards) > min(rewards))


def to_sample(trajectory: Trajectory, advantage: float) -> Sample:
    """Prompt and response in one sequence; mask and log-probabilities are 0 on the prompt."""
    prompt = len(trajectory.prompt_ids)
    return Sample(
        input_ids=trajectory.prompt_ids + trajectory.response_ids,
        loss_mask=[0] * prompt + trajectory.loss_mask,
        engine_logprobs=[0.0] * prompt + trajectory.logprobs,
        advantage=advantage,
    )


def split(groups: list[Group], parts: int) -> list[list[Group]]:
    """Consecutive groups in at most `parts` portions, as even as can be; no group is torn, no portion empty."""
    size = max(1, math.ceil(len(groups) / parts))
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def update_metrics(updates: list[UpdateStats]) -> Metrics:
    """One step's figures from its optimizer steps: means over updates, or over tokens for what was summed."""

    def mean(values: Callable[[UpdateStats], float]) -> float:
        return sum(map(values, updates)) / len(updates)

    def per_token(key: str) -> float:
        tokens = sum(u.sums.get("tokens", 0.0) for u in updates)
        return sum(u.sums.get(key, 0.0) for u in updates) / max(tokens, 1.0)

    metrics = {
        "loss": mean(lambda u: u.loss),
        "grad_norm": mean(lambda u: u.grad_norm),
        "lr": updates[-1].learning_rate,
        "entropy": per_token("entropy"),
        "clip_fraction": per_token("clipped"),
        "skipped_steps": float(sum(u.skipped for u in updates)),
        "train_tokens": sum(u.sums.get("tokens", 0.0) for u in updates),
    }
    if any("kl" in u.sums for u in updates):
        metrics["kl"] = per_token("kl")
    if any("importance" in u.sums for u in updates):
        metrics["importance_weight"] = per_token("importance")
    return metrics


def rollout_metrics(trajectories: list[Trajectory]) -> Metrics:
    """Rewards, lengths and failures of a step's trajectories."""
    sampled = [t for t in trajectories if not t.error]
    rewards = torch.tensor([t.reward for t in sampled], dtype=torch.float64)
    lengths = [sum(t.loss_mask) for t in sampled]  # what the policy sampled: what tools said is not its own
    count = max(1, len(sampled))
    metrics = {
        "reward/mean": rewards.mean().item() if sampled else 0.0,
        "reward/std": rewards.std(correction=0).item() if sampled else 0.0,
        "reward/errors": sum(t.metrics.get("reward/error", 0.0) for t in sampled),
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths, default=0)),
        "length/truncated": sum(t.finish_reason == "length" for t in sampled) / count,
        "rollout/failed": float(len(trajectories) - len(sampled)),
        "rollout_tokens": float(sum(lengths)),
        "turns/mean": sum(t.turns for t in sampled) / count,
    }
    for name in sorted({part for t in sampled for part in t.reward_parts}):
        values = [t.reward_parts[name] for t in sampled if name in t.reward_parts]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics | tool_metrics(sampled)


def tool_metrics(trajectories: list[Trajectory]) -> Metrics:
    """What trajectories count under "tools/", summed; and the share of calls that failed."""
    names = sorted({name for t in trajectories for name in t.metrics if name.startswith("tools/")})
    metrics = {name: sum(t.metrics.get(name, 0.0) for t in trajectories) for name in names}
    if calls := metrics.get("tools/calls"):
        metrics["tools/failure_rate"] = metrics.get("tools/errors", 0.0) / calls
    return metrics
