"""A step's metrics: those of its trajectories, of its updates, and of the gap between trainer and
engine.
"""

import math
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from generation.engine.settings import QUANTIZING
from generation.trajectory import by_episode
from sharding.ranks import all_reduce_max, all_reduce_sum, exchange, sum_counts
from trainer.algorithms.corrections import correction_metrics
from trainer.algorithms.losses import LEVELS
from trainer.config.machine import resolve_device
from trainer.config.schema import AlgorithmConfig, TrainConfig
from trainer.errors import UserError
from trainer.learning.answers import Answer, exchange_samples
from trainer.learning.batching import Batcher
from trainer.learning.groups import MiniBatch, to_sample
from trainer.learning.policy_loss import split_by_age
from trainer.learning.prefixes import Prefixes, token_bytes
from trainer.types import Policy, UpdateStats

Metrics = dict[str, float]

GAP_ANSWERS = 32
"""The number of answers whose gap is measured in a step without an update."""

FLOAT32_SHARE = 0.02
"""The share of `sync.first_gap_limit` that holds in float32, where a faulty pack may move answers
by few millinats.
"""


def over_ranks(values: Tensor) -> tuple[int, Callable[[int], float]]:
    """Count the values [N] of all ranks, and make a collective function that returns the n-th
    smallest, n from 0.

    NaN counts as larger than all numbers. The function is exact: it sums histograms of the values'
    bits over ranks, from the highest bits to the lowest.
    """
    bits = values.double().cpu().view(torch.int64)
    ordered = bits ^ ((bits >> 63) & _ALL_BUT_SIGN)  # integers in the order of the numbers

    def nth_smallest(index: int) -> float:
        left = ordered
        prefix = 0
        for shift, width in _DIGITS:
            digits = (left >> shift) & ((1 << width) - 1)
            if shift == _DIGITS[0][0]:
                digits ^= 1 << (width - 1)  # negative ones first
            upto = sum_counts(torch.bincount(digits, minlength=1 << width)).cumsum(0)
            digit = int((upto <= index).sum())
            index -= int(upto[digit - 1]) if digit else 0
            left = left[digits == digit]
            prefix = prefix << width | digit
        key = prefix - (1 << 63)
        (number,) = struct.unpack("<d", struct.pack("<q", key ^ (key >> 63 & _ALL_BUT_SIGN)))
        return float(number)

    return int(sum_counts(torch.tensor([len(values)]))), nth_smallest


_ALL_BUT_SIGN = (1 << 63) - 1
_DIGITS = ((53, 11), (42, 11), (31, 11), (20, 11), (9, 11), (0, 9))
"""The digits of a 64-bit number: the lowest bit of each, and its number of bits."""


def engine_gap(gaps: list[tuple[Tensor, Tensor]], config: AlgorithmConfig) -> Metrics:
    """Return metrics of the gap between the log-probabilities of trainer and engine on a step's
    trainable tokens. Collective.

    `gaps` are `PolicyLoss.gaps`. gap/mean, gap/p95 (nearest rank) and gap/max are of absolute
    differences in nats. gap/outside_clip is the share of tokens whose ratio is outside the clip
    band before any training: the loss's band if its ratios are of single tokens, else 0.8 to 1.28.
    Empty without tokens, since a gap that was not measured is not 0.
    """
    trainer = engine = torch.empty(0)
    if gaps:
        trainer = torch.cat([pair[0].float() for pair in gaps]).cpu().double()
        engine = torch.cat([pair[1].float() for pair in gaps]).cpu().double()
    by_token = config.loss_record.band and not LEVELS[config.ratio_level].by_answer
    low, high = (config.clip_low, config.clip_high) if by_token else (0.2, 0.28)
    assert low is not None and high is not None
    difference = trainer - engine
    distance = difference.abs()
    ratio = torch.exp(difference)
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


def check_first_gap(metrics: Metrics, config: TrainConfig) -> None:
    """Raise UserError if the gap's mean is above `sync.first_gap_limit`, or in float32 above a
    fiftieth of it.

    It is for a run's first measured gap: weights can be equal, and verified, while one of the two
    computes with them otherwise than the model was made. By default, rounding makes less than a
    tenth of the limit.
    """
    gap = metrics.get("gap/mean")
    limit = config.sync.first_gap_limit
    engine = config.engine
    if gap is None or limit is None:
        return
    narrow = {engine.dtype or config.policy.dtype, config.policy.dtype} != {"float32"}
    if narrow or engine.extra.keys() & {*QUANTIZING, "kv_cache_dtype"}:
        bound = limit
        whose = f"sync.first_gap_limit = {limit:g}"
    else:
        bound = FLOAT32_SHARE * limit
        whose = f"{bound:g}, which sync.first_gap_limit = {limit:g} means in float32"
    if gap <= bound:
        return
    trials = ", ".join(_gap_trials(config))
    raise UserError(
        f"trainer and engine are {gap:.2g} nats apart on average in the first step, more than {whose}, "
        f"so one of them does not compute this model as it was made: try {trials or 'another model'}, "
        "each by itself; if the gap is meant to be, as with logits processors, set "
        "sync.first_gap_limit to null"
    )


def _gap_trials(config: TrainConfig) -> Iterator[str]:
    """Yield the settings that may close the gap between trainer and engine, without those that are
    set already.
    """
    engine = config.engine
    on_cpu = resolve_device(config) == "cpu"
    if (engine.dtype or config.policy.dtype) != "float32":
        yield "engine.dtype float32"
    elif not on_cpu and os.environ.get("TRITON_F32_DEFAULT", "ieee") != "ieee":
        yield "the environment without TRITON_F32_DEFAULT"
    for key in sorted(engine.extra.keys() & {*QUANTIZING, "kv_cache_dtype"}):
        yield f"engine.extra without {key}"
    if on_cpu and engine.plain_cpu_weights:
        yield "engine.plain_cpu_weights false"
    if config.batch.packing:
        yield "batch.packing false"
    if config.model.routes != "engine":
        yield "model.routes engine for a mixture of experts"


def gap_without_update(
    answers: list[Answer],
    policy: Policy,
    config: TrainConfig,
    batcher: Batcher,
    version: int | None = None,
) -> Metrics:
    """Return `engine_gap` of a step without an update, measured on `GAP_ANSWERS` answers spread
    over the step. Collective.

    Answers of every length take part. Empty if no answer was sampled. With a `version`, only its
    tokens count.
    """
    sampled = [t for t in answers if not t.error and t.sampled > t.old]
    chosen = sampled[:: max(1, math.ceil(len(sampled) / GAP_ANSWERS))]
    if not chosen:
        return {}
    shares = batcher.deal_answers(chosen)
    make = partial(to_sample, routes=batcher.routes, version=version)
    [samples] = exchange_samples([chosen], [shares], make, batcher.routes)
    batches = batcher.micro_batches(samples)
    outputs = policy.score(batches, config.sampling.temperature)
    gaps = [
        split_by_age(batch, output.logprobs)[0] for output, batch in zip(outputs, batches, strict=True)
    ]
    return engine_gap(gaps, config.algorithm)


def share_metrics(minibatches: list[MiniBatch], least: int) -> Metrics:
    """Return metrics of what a step's micro-batches compute once for several sequences. Collective.

    - share/tokens: tokens that are computed, over the tokens of all sequences;
    - share/nodes: number of stretches of tokens that are computed as one;
    - share/split_groups: groups whose answers are in several micro-batches, each of which computes
      the prompt;
    - share/lost_to_routes: tokens that are computed again only since a mixture routes them
      differently.
    """
    sums = dict.fromkeys(("computed", "logical", "nodes", "lost"), 0.0)
    split = 0
    for minibatch in minibatches:
        group_of = []
        for number, group in enumerate(minibatch.groups):
            group_of += [number] * sum(len(episode) for episode in group)
        pieces = torch.zeros(len(minibatch.groups), dtype=torch.int64)
        for batch in minibatch.batches:
            if not (batch.counts and batch.rows):
                continue
            pieces[sorted({group_of[row] for row in batch.rows})] += 1
            pack = batch.layout.pack
            assert pack is not None
            sums["computed"] += sum(pack.lengths)
            sums["logical"] += sum(pack.lengths) if pack.tree is None else pack.tree.logical_tokens
            sums["nodes"] += len(pack.lengths)
            if batch.routes is not None:
                table = batch.input_ids.tolist()
                rows = [ids[:size] for ids, size in zip(table, batch.lengths, strict=True)]
                same = Prefixes.of(list(map(token_bytes, rows)), least)
                sums["lost"] += sum(pack.lengths) - same.cost(same.sorted(range(len(rows))))
        split += int((sum_counts(pieces) > 1).sum())
    sums = all_reduce_sum(sums)
    return {
        "share/tokens": sums["computed"] / max(1.0, sums["logical"]),
        "share/nodes": sums["nodes"],
        "share/split_groups": float(split),
        "share/lost_to_routes": sums["lost"],
    }


def stale_metrics(old: list[tuple[Tensor, Tensor, Tensor]]) -> Metrics:
    """Return the mean distance (nats) of the policy from the earlier versions that sampled trained
    tokens. Collective.

    `old` is `PolicyLoss.old`. stale/log_ratio is over all such tokens, stale/log_ratio_N over those
    that are N updates old. Empty if there are none.
    """
    local: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for trainer, engine, ages in old:
        distances = (trainer.double() - engine.double()).abs()
        for age in ages.unique().tolist():
            part = distances[ages == age]
            local[age] = [local[age][0] + part.sum().item(), local[age][1] + len(part)]
    sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rows in exchange([[age, *parts] for age, parts in local.items()]):
        for age, distance, tokens in rows:
            for number in (0, age):  # 0: of any age
                sums[number] = [sums[number][0] + distance, sums[number][1] + tokens]
    metrics = {}
    for age in sorted(sums):
        distance, tokens = sums[age]
        suffix = f"_{age}" if age > 0 else ""
        metrics[f"stale/log_ratio{suffix}"] = distance / tokens
    return metrics


def update_metrics(updates: list[UpdateStats]) -> Metrics:
    """Return metrics of a step's policy updates: means over updates, or over tokens for sums of
    loss functions.
    """
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
    """Return metrics of the updates of a critic with a trunk of its own."""
    return value_metrics(summed(updates)) | {
        "value/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "value/skipped": float(sum(u.skipped for u in updates)),
    }


def value_metrics(sums: Metrics) -> Metrics:
    """Return metrics of a step's values, from the sums of `CriticLoss`; empty without a critic.

    value/loss, value/clip_fraction and value/return are means over tokens. value/explained is the
    share of the returns' variance that the values from before the step explain, 1 - Var(return -
    value) / Var(return), at most 1.
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
    """Add up over updates the sums that loss functions returned."""
    keys = {key for update in updates for key in update.sums}
    sums: Metrics = {}
    for key in sorted(keys):
        sums[key] = sum(update.sums.get(key, 0.0) for update in updates)
    return sums


def rollout_metrics(answers: list[Answer]) -> Metrics:
    """Return metrics of a step's episodes: rewards, lengths and failures. Collective.

    An episode's reward, and whether it was cut off, are those of its last trajectory. Rewards are
    of the episodes that something has judged: reward/abstained counts the others. Trajectories with
    a group have figures by role, too.
    """
    episodes = by_episode(answers)
    sound = []
    lengths = []
    for episode in episodes:
        if not any(t.error for t in episode):
            sound.append(episode)
            lengths.append(sum(t.sampled for t in episode))
    sampled = [t for episode in sound for t in episode]
    last = [episode[-1] for episode in sound]
    rewards = torch.tensor([t.reward for t in last if not t.abstained], dtype=torch.float64)
    count = max(1, len(sound))
    metrics = {
        "reward/mean": rewards.mean().item() if len(rewards) else 0.0,
        "reward/std": rewards.std(correction=0).item() if len(rewards) else 0.0,
        "reward/errors": float(sum(bool(t.misjudged) for t in answers)),
        "reward/abstained": float(sum(t.abstained for t in last)),
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths, default=0)),
        "length/truncated": sum(t.cut for t in last) / count,
        "rollout/failed": float(len(episodes) - len(sound)),
        "rollout_tokens": float(sum(lengths)),
        "turns/mean": sum(t.turns for t in sampled) / count,
    }
    parts: list[tuple[str, float]] = []
    for answer in last:
        if answer.trajectory is not None:
            parts += answer.trajectory.reward_parts.items()
    tools: list[tuple[str, float]] = []
    for answer in sampled:
        if answer.trajectory is not None:
            for name, number in answer.trajectory.metrics.items():
                if name.startswith(("tools/", "server/", "client/", "length/")):
                    tools.append((name, number))
    rewards_by_name: Metrics = {}
    for name, (total, times) in named_sums(parts).items():
        rewards_by_name[f"reward/{name}"] = total / times
    counts: Metrics = {}
    for name, (total, times) in named_sums(tools).items():
        counts[name] = total / times if name.startswith(("client/", "length/")) else total
    if calls := counts.get("tools/calls"):
        counts["tools/failure_rate"] = counts.get("tools/errors", 0.0) / calls
    # The run's metrics come last again, since an environment or a client may use their names for
    # its rewards.
    roles = role_metrics(sampled)
    return metrics | rewards_by_name | counts | reward_errors(answers) | roles | metrics


def role_metrics(answers: list[Answer]) -> Metrics:
    """Return mean and standard deviation of the rewards, mean length in sampled tokens, and number
    of the trajectories of each role, which is the name of their group up to the first slash.
    """
    roles: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.group and not answer.abstained:
            roles.setdefault(answer.group.partition("/")[0], []).append(answer)
    metrics: Metrics = {}
    for role, members in sorted(roles.items()):
        rewards = torch.tensor([answer.reward for answer in members], dtype=torch.float64)
        metrics |= {
            f"role/{role}/reward": rewards.mean().item(),
            f"role/{role}/reward_std": rewards.std(correction=0).item(),
            f"role/{role}/length": sum(answer.sampled for answer in members) / len(members),
            f"role/{role}/trajectories": float(len(members)),
        }
    return metrics


def reward_errors(answers: list[Answer]) -> Metrics:
    """Count the answers on which reward functions failed, by reward/errors/FUNCTION/KIND.
    Collective.
    """
    reported: list[tuple[str, float]] = []
    for answer in answers:
        if answer.trajectory is not None:
            reported += answer.trajectory.metrics.items()
    errors = named_sums(metric for metric in reported if metric[0].startswith("reward/errors/"))
    return {name: total for name, (total, _) in errors.items()}


def named_sums(pairs: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """Return the sum and the count of all ranks' numbers by name, in the order of names.
    Collective.

    A sum is rounded once, so that it does not depend on which rank has which number; it is NaN if
    one is not finite.
    """
    numbers: dict[str, list[float]] = {}
    for name, number in pairs:
        numbers.setdefault(name, []).append(float(number))
    ranks = exchange(numbers)
    sums = {}
    for name in sorted({*chain(*ranks)}):
        column = [number for rank in ranks for number in rank.get(name, ())]
        total = math.fsum(column) if all(map(math.isfinite, column)) else math.nan
        sums[name] = total, len(column)
    return sums
