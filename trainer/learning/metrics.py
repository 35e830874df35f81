"""A step's figures: of its trajectories, of its updates, and of how far trainer and engine are apart."""

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from generation.trajectory import by_episode
from sharding.ranks import all_reduce_max, all_reduce_sum, exchange, sum_counts
from trainer.algorithms.corrections import correction_metrics
from trainer.algorithms.losses import LEVELS
from trainer.config.schema import AlgorithmConfig, TrainConfig
from trainer.learning.answers import Answer, hand_over
from trainer.learning.batching import deal, micro_batches
from trainer.learning.groups import to_sample
from trainer.learning.policy_loss import told_by_age
from trainer.learning.routes import engine_routes
from trainer.types import Policy, UpdateStats

Metrics = dict[str, float]

GAP_ANSWERS = 32
"""Answers whose gap is measured in a step that learns from none."""


def over_ranks(own: Tensor) -> tuple[int, Callable[[int], float]]:
    """The number of values [N] that all ranks have together, and the collective function that finds one of them.

    It takes a position from 0 and gives the number that stands there when all are sorted (NaN last), exactly: by
    histograms of their bits, the highest first, that are summed over ranks.
    """
    bits = own.double().cpu().view(torch.int64)
    ordered = bits ^ ((bits >> 63) & _ALL_BUT_SIGN)  # integers in the order of the numbers

    def nth_smallest(place: int) -> float:
        left, found = ordered, 0
        for shift, width in _DIGITS:
            digits = (left >> shift) & ((1 << width) - 1)
            if shift == _DIGITS[0][0]:
                digits ^= 1 << (width - 1)  # negative ones first
            upto = sum_counts(torch.bincount(digits, minlength=1 << width)).cumsum(0)
            digit = int((upto <= place).sum())
            place -= int(upto[digit - 1]) if digit else 0
            left, found = left[digits == digit], found << width | digit
        key = found - (1 << 63)
        (number,) = struct.unpack("<d", struct.pack("<q", key ^ (key >> 63 & _ALL_BUT_SIGN)))
        return float(number)

    return int(sum_counts(torch.tensor([len(own)]))), nth_smallest


_ALL_BUT_SIGN = (1 << 63) - 1
_DIGITS = ((53, 11), (42, 11), (31, 11), (20, 11), (9, 11), (0, 9))
"""Of 64 bits: where each digit begins, and how many bits it has."""


def engine_gap(gaps: list[tuple[Tensor, Tensor]], config: AlgorithmConfig) -> Metrics:
    """The distance of the trainer from the engine on the step's trainable tokens, all ranks. Collective.

    From `PolicyLoss.gaps`: absolute differences in nats, as gap/mean, gap/p95 (nearest rank) and gap/max;
    gap/outside_clip, the share of tokens outside the clip band before any training took place: the loss's where that is
    about single tokens, else the usual one. Nothing without tokens: what was not measured is not 0.
    """
    pairs = [torch.cat([pair[i].float() for pair in gaps]).cpu().double() if gaps else torch.empty(0) for i in (0, 1)]
    by_token = config.loss_record.band and not LEVELS[config.ratio_level].by_answer
    low, high = (config.clip_low, config.clip_high) if by_token else (0.2, 0.28)
    assert low is not None and high is not None
    difference = pairs[0] - pairs[1]
    distance, ratio = difference.abs(), torch.exp(difference)
    outside = ((ratio < 1.0 - low) | (ratio > 1.0 + high)).sum()
    count, nth_smallest = over_ranks(distance)
    if not count:
        return {}
    sums = all_reduce_sum({"distance": distance.sum().item(), "outside": float(outside)})
    return {
        "gap/mean": sums["distance"] / count,
        "gap/p95": nth_smallest(max(0, -(-95 * count // 100) - 1)),
        "gap/max": all_reduce_max({"gap": distance.max().item() if len(distance) else 0.0})["gap"],
        "gap/outside_clip": sums["outside"] / count,
    }


def gap_without_update(
    answers: list[Answer], policy: Policy, config: TrainConfig, pad_id: int, version: int | None = None
) -> Metrics:
    """`engine_gap` where no update has scored the answers: of `GAP_ANSWERS`, spread over the step. Collective.

    None is left out for its length. There is nothing where none was sampled. With a `version`, only its tokens count.
    """
    sampled = [t for t in answers if not t.error and t.sampled > t.old]
    chosen = sampled[:: max(1, math.ceil(len(sampled) / GAP_ANSWERS))]
    if not chosen:
        return {}
    ways, sizes = config.policy.sequence_parallel, policy.work.of
    worth, more = sizes.tokens_worth, sizes.image_token
    shares = deal([t.length for t in chosen], worth, ways)
    routes = engine_routes(config, policy)
    [own] = hand_over([chosen], [shares], partial(to_sample, routes=routes, version=version), routes)
    budget, packing = config.batch.tokens_per_micro_batch, config.batch.packing
    batches = micro_batches(own, budget, pad_id, policy.device, None, packing, ways, worth, more)
    outputs = policy.score(batches, config.sampling.temperature)
    gaps = [told_by_age(batch, output.logprobs)[0] for output, batch in zip(outputs, batches, strict=True)]
    return engine_gap(gaps, config.algorithm)


def stale_metrics(old: list[tuple[Tensor, Tensor, Tensor]]) -> Metrics:
    """stale/log_ratio, the mean distance (nats) of the policy from the versions that sampled the trained tokens, of
    those that are not the present one, and stale/log_ratio_N of those that are N updates old; `old` is
    `PolicyLoss.old`. Nothing where there are none. Collective.
    """
    told: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for trainer, engine, ages in old:
        distances = (trainer.double() - engine.double()).abs()
        for age in ages.unique().tolist():
            own = distances[ages == age]
            told[age] = [told[age][0] + own.sum().item(), told[age][1] + len(own)]
    sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for age, distance, tokens in (one for rank in exchange([[age, *own] for age, own in told.items()]) for one in rank):
        for number in (0, age):  # 0: of any age
            sums[number] = [sums[number][0] + distance, sums[number][1] + tokens]
    return {f"stale/log_ratio{f'_{age}' * (age > 0)}": sums[age][0] / sums[age][1] for age in sorted(sums)}


def update_metrics(updates: list[UpdateStats]) -> Metrics:
    """One step's figures from the policy's updates: means over updates, or over tokens for what was summed."""
    sums = summed(updates)

    def per_token(key: str) -> float:
        return sums.get(key, 0.0) / max(sums.get("tokens", 0.0), 1.0)

    metrics = {
        "loss": sum(u.loss for u in updates) / len(updates),
        "grad_norm": sum(u.grad_norm for u in updates) / len(updates),
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
    """The sums that loss functions returned, added up over updates."""
    keys = {key for update in updates for key in update.sums}
    return {key: sum(update.sums.get(key, 0.0) for update in updates) for key in sorted(keys)}


def rollout_metrics(answers: list[Answer]) -> Metrics:
    """Rewards, lengths, failures of a step's episodes; reward and end are those of the last trajectory. Collective."""
    episodes = by_episode(answers)
    sound = [episode for episode in episodes if not any(t.error for t in episode)]
    sampled, last = [t for episode in sound for t in episode], [episode[-1] for episode in sound]
    rewards = torch.tensor([t.reward for t in last], dtype=torch.float64)
    lengths = [sum(t.sampled for t in episode) for episode in sound]
    count = max(1, len(sound))
    metrics = {
        "reward/mean": rewards.mean().item() if sound else 0.0,
        "reward/std": rewards.std(correction=0).item() if sound else 0.0,
        "reward/errors": float(sum(bool(t.misjudged) for t in answers)),
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths, default=0)),
        "length/truncated": sum(t.cut for t in last) / count,
        "rollout/failed": float(len(episodes) - len(sound)),
        "rollout_tokens": float(sum(lengths)),
        "turns/mean": sum(t.turns for t in sampled) / count,
    }
    parts = [part for t in last if t.trajectory is not None for part in t.trajectory.reward_parts.items()]
    figures = [figure for t in sampled if t.trajectory is not None for figure in t.trajectory.metrics.items()]
    tools = [figure for figure in figures if figure[0].startswith(("tools/", "server/", "client/"))]
    rewards_by_name = {f"reward/{name}": total / number for name, (total, number) in named_sums(parts).items()}
    found = named_sums(tools).items()
    counts = {name: total / number if name.startswith("client/") else total for name, (total, number) in found}
    if calls := counts.get("tools/calls"):
        counts["tools/failure_rate"] = counts.get("tools/errors", 0.0) / calls
    # Last the run's own again, whatever an environment or a client calls its rewards.
    return metrics | rewards_by_name | counts | reward_errors(answers) | metrics


def reward_errors(answers: list[Answer]) -> Metrics:
    """The answers on which reward functions failed, by reward/errors/FUNCTION/KIND; none where none did. Collective."""
    figures = [figure for t in answers if t.trajectory is not None for figure in t.trajectory.metrics.items()]
    errors = named_sums(figure for figure in figures if figure[0].startswith("reward/errors/"))
    return {name: total for name, (total, _) in errors.items()}


def named_sums(pairs: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """The sum of all ranks' numbers by name, and how many there are, in the order of names. Collective.

    A sum is rounded once, so that it does not depend on which rank has what; where it cannot be, it is NaN.
    """
    numbers: dict[str, list[float]] = {}
    for name, number in pairs:
        numbers.setdefault(name, []).append(float(number))
    ranks = exchange(numbers)
    columns = {name: [number for rank in ranks for number in rank.get(name, ())] for name in sorted({*chain(*ranks)})}
    sums = {name: math.fsum(c) if all(map(math.isfinite, c)) else math.nan for name, c in columns.items()}
    return {name: (sums[name], len(column)) for name, column in columns.items()}
