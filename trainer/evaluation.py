"""Held-out prompts and the metrics of their answers, for evaluations during training and for
`hotbunk eval`.

pass@k and majority@k are unbiased estimates from n ≥ k answers: exact expectations over all subsets
of k of the n answers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING

from generation.trajectory import by_episode
from trainer.config.schema import EvalConfig, TrainConfig
from trainer.data import load_held_out
from trainer.engines import evaluation_sampling
from trainer.errors import UserError
from trainer.learning import Metrics
from trainer.learning.answers import Answer
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.local import HeldOut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the probability that k of n answers, `right` of which are right, include a right one.

    1 - C(n - right, k) / C(n, k): Chen et al. 2021 (arXiv:2107.03374), equation 1, for 1 ≤ k ≤ n.
    """
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)


def majority_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent vote among k of n answers is right.

    This is self-consistency (arXiv:2203.11171).

    Args: votes: [n] each answer's vote, such as its final number. None abstains; if all k abstain,
        the result is wrong. right: [n] True for each right answer. If equal votes were judged
        differently, their mean counts. k: number of answers that vote, from 1 to n. Votes that tie
        win equally often.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    verdicts = Counter(vote for vote, verdict in zip(votes, right, strict=True) if verdict)
    expected = 0.0
    for most in range(1, min(k, max(counts.values(), default=0)) + 1):
        # `most` is the number of ballots of a winner. States are keyed by the number of winners so
        # far and of ballots left. Each holds its probability, and that probability times the summed
        # correctness of its winners.
        states = {(0, k): (1.0, 0.0)}
        pool = len(votes)
        for vote, count in counts.items():
            grown: dict[tuple[int, int], tuple[float, float]] = {}
            for (winners, left), (chance, worth) in states.items():
                for ballots in range(max(0, left - pool + count), min(count, most, left) + 1):
                    share = comb(count, ballots) * comb(pool - count, left - ballots) / comb(pool, left)
                    wins = ballots == most
                    state = (winners + wins, left - ballots)
                    before = grown.get(state, (0.0, 0.0))
                    gained = chance * verdicts[vote] / count if wins else 0.0
                    grown[state] = before[0] + chance * share, before[1] + (worth + gained) * share
            states = grown
            pool = pool - count
        expected += sum(worth / winners for (winners, _), (_, worth) in states.items() if winners)
    return expected


def load_held_outs(
    config: TrainConfig, level: RolloutLevel, tokenizer: "PreTrainedTokenizerBase", end_ids: list[int]
) -> list[HeldOut]:
    """Load all datasets to evaluate on, in the recipe's order. Raises UserError naming one that
    cannot be read.
    """
    held_outs = []
    for name, dataset in config.eval.datasets.items():
        prompts = load_held_out(dataset, level.data, tokenizer, level.image_rules)
        sampling = evaluation_sampling(config, dataset, end_ids)
        held_outs.append(HeldOut(name, prompts, sampling, dataset.samples or config.eval.samples))
    return held_outs


def evaluation_metrics(
    answers: Mapping[str, Sequence[Answer]], labels: Sequence[str], config: EvalConfig
) -> Metrics:
    """Return the metrics of an evaluation: eval/… for a single dataset; with several, also
    eval/NAME/… for each.

    With several datasets, eval/… is their mean, in which all weigh the same.

    Args:
        answers: the answers to each dataset, by its name.
        labels: the labels of the recipe's reward functions, as in `dataset_metrics`.
    """
    datasets = {name: dataset_metrics(part, labels, config, name=name) for name, part in answers.items()}
    several = datasets.items() if len(datasets) > 1 else ()
    metrics = {f"eval/{name}/{key}": value for name, part in several for key, value in part.items()}
    keys = dict.fromkeys(key for part in datasets.values() for key in part)
    for key in keys:
        metrics[f"eval/{key}"] = _mean([part.get(key, 0.0) for part in datasets.values()])
    return metrics


def dataset_metrics(
    trajectories: Sequence[Answer], labels: Sequence[str], config: EvalConfig, name: str = "data"
) -> Metrics:
    """Return the metrics of one dataset: means over the answers to a prompt, and then over prompts.

    An episode counts as one answer: it has the reward, vote and ending of its last trajectory, and
    the tokens of all of its trajectories. Its score is the value of the first reward function that
    has not abstained from it, in the order of `labels`; its total reward, if there is none.
    accuracy is the mean of the scores. For pass@k and majority@k an answer is right if its score is
    at least `config.right_from`. A failed episode counts as a wrong answer with reward 0 that
    abstains from votes. misjudged is the share of episodes on which a reward function failed.

    An answer from which all functions abstain has no part in accuracy, reward, pass@k and
    majority@k, nor has a prompt with fewer than k other answers. abstained is the share of such
    answers. Raises UserError, with the dataset's `name`, if that leaves no prompt.
    """
    prompts = _by_prompt(trajectories)
    episodes = [episode for answers in prompts for episode in answers]
    judged = _judged(prompts, name)
    rewards = []
    for answers in judged:
        rewards.append(_mean([0.0 if _failed(e) else e[-1].reward for e in answers]))
    lengths = []
    misjudged = []
    for episode in episodes:
        lengths.append(float(sum(trajectory.sampled for trajectory in episode)))
        misjudged.append(float(any(trajectory.misjudged for trajectory in episode)))
    metrics = {
        "accuracy": _mean(accuracies(trajectories, labels)),
        "reward": _mean(rewards),
        "length": _mean(lengths),
        "truncated": _mean([float(episode[-1].cut) for episode in episodes]),
    }
    if any(misjudged):
        metrics["misjudged"] = _mean(misjudged)
    if any(_unjudged(episode) for episode in episodes):
        metrics["abstained"] = _mean([float(_unjudged(episode)) for episode in episodes])
    for k in config.k:
        judged = _judged(prompts, name, least=k)
        verdicts = []
        votes = []
        for answers in judged:
            verdicts.append([not _failed(e) and _score(e, labels) >= config.right_from for e in answers])
            votes.append([None if _failed(e) else e[-1].vote for e in answers])
        metrics[f"pass@{k}"] = _mean([pass_at_k(len(right), sum(right), k) for right in verdicts])
        metrics[f"majority@{k}"] = _mean(
            [majority_at_k(v, right, k) for v, right in zip(votes, verdicts, strict=True)]
        )
    return metrics


def accuracies(trajectories: Sequence[Answer], labels: Sequence[str]) -> list[float]:
    """Return the accuracy of each prompt, the mean over its answers from which not all functions
    abstained.
    """
    means = []
    for answers in _judged(_by_prompt(trajectories)):
        means.append(_mean([_score(episode, labels) for episode in answers]))
    return means


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; 0 for a single value.

    Pass one value per prompt, since answers to the same prompt are not independent: Miller 2024
    (arXiv:2411.00640), section 2.2.
    """
    mean = _mean(values)
    count = len(values)
    return (sum((value - mean) ** 2 for value in values) / max(count - 1, 1) / count) ** 0.5


def _by_prompt(trajectories: Iterable[Answer]) -> list[list[list[Answer]]]:
    """Group trajectories by prompt, and within each prompt by episode."""
    prompts: dict[int, list[list[Answer]]] = defaultdict(list)
    for episode in by_episode(trajectories):
        prompts[episode[0].prompt_index].append(episode)
    return list(prompts.values())


def _judged(
    prompts: Iterable[list[list[Answer]]], name: str = "data", least: int = 1
) -> list[list[list[Answer]]]:
    """Return each prompt's answers from which not all functions abstained, of prompts that have at
    least `least`.

    Raises UserError if there is no such prompt.
    """
    judged = []
    for answers in prompts:
        present = [episode for episode in answers if not _unjudged(episode)]
        if len(present) >= least:
            judged.append(present)
    if not judged:
        raise UserError(
            f"eval.datasets.{name}: the reward functions abstain from so many answers that no prompt "
            f"has {least} to measure: add a function that judges its rows, or leave the dataset out"
        )
    return judged


def _unjudged(episode: list[Answer]) -> bool:
    return episode[-1].abstained and not _failed(episode)


def _failed(episode: list[Answer]) -> bool:
    return any(trajectory.error for trajectory in episode)


def _score(episode: list[Answer], labels: Sequence[str]) -> float:
    """Return the value of the first function that has not abstained; 0 if the episode or the first
    function failed.
    """
    last = episode[-1]
    first_failed = bool(last.misjudged and labels) and labels[0] not in last.reward_parts
    if _failed(episode) or first_failed:
        return 0.0
    values = (last.reward_parts[label] for label in labels if label in last.reward_parts)
    return next(values, last.reward)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
