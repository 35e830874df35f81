"""Held-out prompts, and the figures of the answers to them: in training between two steps, or by `hotbunk eval`."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from generation.sampling import SamplingSettings
from generation.trajectory import by_episode
from trainer.answers import Answer
from trainer.config import DataConfig, EvalConfig, TrainConfig
from trainer.data import PromptDataset, load_held_out
from trainer.engines import evaluation_sampling
from trainer.estimators import majority_at_k, pass_at_k

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Metrics = dict[str, float]


@dataclass(frozen=True)
class HeldOut:
    """One dataset to evaluate on.

    Attributes:
        name: empty for the only one, which data.eval_path names.
        samples: answers for each prompt.
    """

    name: str
    prompts: PromptDataset
    sampling: SamplingSettings
    samples: int


def load_held_outs(
    config: TrainConfig, data: DataConfig, tokenizer: "PreTrainedTokenizerBase", end_ids: list[int]
) -> list[HeldOut]:
    """All datasets to evaluate on, in the recipe's order. Raises UserError naming the one that cannot be read.

    Args:
        data: the recipe's data section, or what rollouts made of it.
    """
    return [
        HeldOut(
            name,
            load_held_out(dataset, data, tokenizer),
            evaluation_sampling(config, dataset, end_ids),
            dataset.samples or config.eval.samples,
        )
        for name, dataset in config.held_out.items()
    ]


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever the block draws from the global generators of Python, NumPy and torch, it is as if it had not.

    Samples have seeds of their own; this is about tools, environments and rewards that use those generators.
    """
    python, numbers = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


def evaluation_metrics(answers: Mapping[str, Sequence[Answer]], label: str | None, config: EvalConfig) -> Metrics:
    """eval/NAME/… of every dataset that has a name, and eval/…, their mean, in which each dataset weighs the same.

    Args:
        answers: to each dataset's prompts, by its name.
        label: of the recipe's first reward function, the one that tells right from wrong; None: the reward does.
    """
    figures = {name: dataset_figures(trajectories, label, config) for name, trajectories in answers.items()}
    metrics = {f"eval/{name}/{key}": value for name, part in figures.items() if name for key, value in part.items()}
    keys = next(iter(figures.values()))
    return metrics | {f"eval/{key}": _mean([part[key] for part in figures.values()]) for key in keys}


def dataset_figures(trajectories: Sequence[Answer], label: str | None, config: EvalConfig) -> Metrics:
    """The figures of one dataset, means over answers and then over prompts.

    An answer is what an episode came to: its last trajectory's reward, vote and end, and the tokens of all of them.
    accuracy is the mean of the first reward function; pass@k and majority@k take an answer for right from
    `config.right_from` on. An episode that failed is a wrong answer of reward 0, and its vote an abstention.
    """
    prompts = _by_prompt(trajectories)
    episodes = [episode for answers in prompts for episode in answers]
    figures = {
        "accuracy": _mean(accuracies(trajectories, label)),
        "reward": _mean([_mean([0.0 if _failed(e) else e[-1].reward for e in answers]) for answers in prompts]),
        "length": _mean([float(sum(t.sampled for t in episode)) for episode in episodes]),
        "truncated": _mean([float(episode[-1].cut) for episode in episodes]),
    }
    for k in config.k:
        verdicts = [[not _failed(e) and _score(e, label) >= config.right_from for e in answers] for answers in prompts]
        votes = [[None if _failed(e) else e[-1].vote for e in answers] for answers in prompts]
        figures[f"pass@{k}"] = _mean([pass_at_k(len(right), sum(right), k) for right in verdicts])
        figures[f"majority@{k}"] = _mean([majority_at_k(*pair, k) for pair in zip(votes, verdicts, strict=True)])
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
