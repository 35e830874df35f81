"""Held-out prompts, and the figures of the answers to them: in training between two steps, or by `hotbunk eval`.

pass@k and majority@k are estimated from n ≥ k answers without bias and without drawing: they are expectations over all
subsets of k of the n answers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING

from generation.trajectory import by_episode
from trainer.config.schema import EvalConfig, TrainConfig
from trainer.data import load_held_out
from trainer.engines import evaluation_sampling
from trainer.learning.answers import Answer
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.sampling import HeldOut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n answers, `right` of which are right, hold a right one.

    1 - C(n - right, k) / C(n, k): Chen et al. 2021 (arXiv:2107.03374), equation 1, for 1 ≤ k ≤ n.
    """
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)


def majority_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer among k of the n is right (self-consistency, arXiv:2203.11171).

    Args:
        votes: [n] what each answer comes down to; None abstains, and where all abstain nothing is right.
        right: [n] whether it is right. Where votes for the same answer were judged differently, their mean counts.
        k: from 1 to n. Of answers that tie, each wins equally often.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    verdicts = Counter(vote for vote, verdict in zip(votes, right, strict=True) if verdict)
    expected = 0.0
    for most in range(1, min(k, max(counts.values(), default=0)) + 1):  # votes of the winners
        # By the number of winners so far and the ballots left: the chance of that, and the winners' worth times it.
        states, pool = {(0, k): (1.0, 0.0)}, len(votes)
        for vote, count in counts.items():
            grown: dict[tuple[int, int], tuple[float, float]] = {}
            for (winners, left), (chance, worth) in states.items():
                for ballots in range(max(0, left - pool + count), min(count, most, left) + 1):
                    share = comb(count, ballots) * comb(pool - count, left - ballots) / comb(pool, left)
                    wins = ballots == most
                    before = grown.get(state := (winners + wins, left - ballots), (0.0, 0.0))
                    gained = chance * verdicts[vote] / count if wins else 0.0
                    grown[state] = before[0] + chance * share, before[1] + (worth + gained) * share
            states, pool = grown, pool - count
        expected += sum(worth / winners for (winners, _), (_, worth) in states.items() if winners)
    return expected


Metrics = dict[str, float]


def load_held_outs(
    config: TrainConfig, level: RolloutLevel, tokenizer: "PreTrainedTokenizerBase", end_ids: list[int]
) -> list[HeldOut]:
    """All datasets to evaluate on, in the recipe's order. Raises UserError naming the one that cannot be read."""
    found = []
    for name, dataset in config.eval.datasets.items():
        prompts = load_held_out(dataset, level.data, tokenizer, level.image_rules)
        sampling = evaluation_sampling(config, dataset, end_ids)
        found.append(HeldOut(name, prompts, sampling, dataset.samples or config.eval.samples))
    return found


def evaluation_metrics(answers: Mapping[str, Sequence[Answer]], label: str | None, config: EvalConfig) -> Metrics:
    """eval/… of the only dataset; or eval/NAME/… of each, and eval/…, their mean, in which each weighs the same.

    `answers` are by dataset. `label` is that of the recipe's first reward function, the one that tells right from
    wrong; None: the reward does.
    """
    figures = {name: dataset_figures(trajectories, label, config) for name, trajectories in answers.items()}
    several = figures.items() if len(figures) > 1 else ()
    metrics = {f"eval/{name}/{key}": value for name, part in several for key, value in part.items()}
    keys = dict.fromkeys(key for part in figures.values() for key in part)
    return metrics | {f"eval/{key}": _mean([part.get(key, 0.0) for part in figures.values()]) for key in keys}


def dataset_figures(trajectories: Sequence[Answer], label: str | None, config: EvalConfig) -> Metrics:
    """The figures of one dataset, means over answers and then over prompts.

    An answer is what an episode came to: its last trajectory's reward, vote and end, and the tokens of all of them.
    accuracy is the mean of the first reward function; pass@k and majority@k take an answer for right from
    `config.right_from` on. An episode that failed is a wrong answer of reward 0, and its vote an abstention; where that
    is a reward function's fault, misjudged is the share of such episodes.
    """
    prompts = _by_prompt(trajectories)
    episodes = [episode for answers in prompts for episode in answers]
    figures = {
        "accuracy": _mean(accuracies(trajectories, label)),
        "reward": _mean([_mean([0.0 if _failed(e) else e[-1].reward for e in answers]) for answers in prompts]),
        "length": _mean([float(sum(t.sampled for t in episode)) for episode in episodes]),
        "truncated": _mean([float(episode[-1].cut) for episode in episodes]),
    }
    if any(t.misjudged for t in trajectories):
        figures["misjudged"] = _mean([float(any(t.misjudged for t in episode)) for episode in episodes])
    for k in config.k:
        verdicts = [[not _failed(e) and _score(e, label) >= config.right_from for e in answers] for answers in prompts]
        votes = [[None if _failed(e) else e[-1].vote for e in answers] for answers in prompts]
        figures[f"pass@{k}"] = _mean([pass_at_k(len(right), sum(right), k) for right in verdicts])
        figures[f"majority@{k}"] = _mean([majority_at_k(v, right, k) for v, right in zip(votes, verdicts, strict=True)])
    return figures


def accuracies(trajectories: Sequence[Answer], label: str | None) -> list[float]:
    """Each prompt's accuracy, the mean over its answers."""
    return [_mean([_score(episode, label) for episode in answers]) for answers in _by_prompt(trajectories)]


def standard_error(values: Sequence[float]) -> float:
    """Of their mean, were they drawn independently, as prompts are and answers to one prompt are not; 0 for one value.

    Clustered by prompt in this way: Miller 2024 (arXiv:2411.00640), section 2.2.
    """
    mean, count = _mean(values), len(values)
    return (sum((value - mean) ** 2 for value in values) / max(count - 1, 1) / count) ** 0.5


def _by_prompt(trajectories: Iterable[Answer]) -> list[list[list[Answer]]]:
    """Each prompt's episodes."""
    prompts: dict[int, list[list[Answer]]] = defaultdict(list)
    for episode in by_episode(trajectories):
        prompts[episode[0].prompt_index].append(episode)
    return list(prompts.values())


def _failed(episode: list[Answer]) -> bool:
    return any(trajectory.error for trajectory in episode)


def _score(episode: list[Answer], label: str | None) -> float:
    if _failed(episode):
        return 0.0
    return episode[-1].reward if label is None else episode[-1].reward_parts.get(label, 0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
