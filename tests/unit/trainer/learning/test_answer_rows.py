"""The figures of single tokens equal a plain computation from the trajectories; and the rows in which they
are shown.
"""

import math
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generation.trajectory import Trajectory, by_episode
from tests.support.learning_steps import TablePolicy, as_answers, as_step, on_ranks, random_step
from tests.support.recipes import make_config
from trainer.commands.tiny_model import make_tokenizer
from trainer.learning import Learner
from trainer.learning.answer_rows import Watched, answer_rows, shown_text, token_rows
from trainer.learning.answers import Answer

TEMPERATURE = 0.7


def expected(
    step: list[Trajectory], watched: Watched
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Compute the figures by a bigram table of the trajectory's tokens, one by one from the first sampled one on."""
    logprobs = torch.log_softmax(TablePolicy().table / TEMPERATURE, dim=1)
    place = watched.answer.prompt_index, watched.answer.sample_index
    episode = [t for t in step if (t.prompt_index, t.sample_index) == place]
    (trajectory,) = [t for t in episode if t.response_ids[t.loss_mask.index(1) :] == watched.ids]
    group = [
        sibling
        for sibling in by_episode(step)
        if sibling[0].prompt_index == place[0] and not any(t.error for t in sibling)
    ]
    advantage = episode[-1].reward - fmean(sibling[-1].reward for sibling in group)
    figures: dict[str, list[float | None]] = {"gap": [], "entropy": [], "advantage": []}
    ids = trajectory.prompt_ids + trajectory.response_ids
    for number in range(trajectory.loss_mask.index(1), len(trajectory.response_ids)):
        at = len(trajectory.prompt_ids) + number
        row, sampled = logprobs[ids[at - 1]], trajectory.loss_mask[number]
        values = row[ids[at]] - trajectory.logprobs[number], -(row.exp() * row).sum(), advantage
        for name, value in zip(figures, values, strict=True):
            figures[name].append(float(value) if sampled else None)
    return trajectory.response_ids[trajectory.loss_mask.index(1) :], figures


@pytest.mark.parametrize(
    ("ranks", "packing", "updates", "ways"),
    # The last share all micro-batches
    [(1, True, 1, 1), (2, True, 2, 1), (2, False, 1, 1), (2, True, 1, 2)],
)
def test_each_token_has_the_figures_of_the_pass_before_the_update(
    ranks: int, packing: bool, updates: int, ways: int
) -> None:
    step = random_step(6, 4, seed=4)
    config = make_config(
        algorithm={"normalize_std": False, "num_iterations": 2},
        batch={"packing": packing, "tokens_per_micro_batch": 40, "updates_per_step": updates},
        sampling={"temperature": TEMPERATURE},
        tracking={"tokens_per_step": 5},
        policy={"sequence_parallel": ways},
    )

    def rank() -> tuple[list[Watched], torch.Tensor]:
        policy = TablePolicy()
        learner = Learner(config, policy, None, pad_id=0)  # type: ignore[arg-type]
        learner.learn(*as_step(step), step=1)
        return learner.watched, policy.table

    (watched, table), *other_ranks = on_ranks(ranks, rank)
    assert len(watched) == 5 and not any(rows for rows, _ in other_ranks)
    for answer in watched:
        ids, figures = expected(step, answer)
        assert answer.ids == ids
        for name, values in figures.items():
            assert answer.metrics[name] == [
                None if v is None else pytest.approx(v, abs=1e-5) for v in values
            ], name
    assert any(None in answer.metrics["gap"] for answer in watched)  # tokens of tools are among them
    config = config.model_copy(
        update={"tracking": config.tracking.model_copy(update={"tokens_per_step": 0})}
    )
    (none, without), *_ = on_ranks(ranks, rank)
    assert none == [] and torch.equal(without, table)  # to look changes nothing


def test_rows_have_texts_and_numbers_that_json_can_express() -> None:
    (answer,) = as_answers([Trajectory(0, 3, [1], [2, 3], [1, 1], [-1.0, -1.0], reward=0.5)])
    watched = Watched(answer, [2, 3], {"gap": [0.123456, math.nan], "entropy": [1.0, None]})
    pieces = {2: "▁a", 3: "b"}
    tokenizer: Any = SimpleNamespace(
        decode=lambda ids: pieces[ids[0]].strip("▁"), convert_ids_to_tokens=pieces.get
    )
    (row,) = token_rows([watched], [SimpleNamespace(id=12)], tokenizer)  # type: ignore[list-item]
    assert row == {
        "prompt_id": 12,
        "sample": 3,
        "reward": 0.5,
        "tokens": [" a", "b"],
        "gap": [0.1235, None],
        "entropy": [1.0, None],
    }


@pytest.mark.parametrize(
    ("ids", "mask", "shown"),
    [
        ("360<|im_end|>", "1111", "360"),
        ("360", "111", "360"),
        ("360<|im_end|>24<|im_end|>", "1111111", "360<|im_end|>24"),
        ("<|im_start|>1<|endoftext|>", "111", "<|im_start|>1"),
        # turns, and what lies between them
        ("1<|im_end|>\n<|im_start|>user\n2<|im_end|>", "11000011", "1\nuser\n2"),
        ("1<|im_end|>3<|im_end|>\n2<|im_end|>", "1111011", "1<|im_end|>3\n2"),
    ],
)
def test_special_tokens_before_the_end_of_an_answer_are_shown(ids: str, mask: str, shown: str) -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer(ids, add_special_tokens=False)["input_ids"]
    sampled = [int(letter) for letter in mask]
    assert len(tokens) == len(sampled)
    trajectory = Trajectory(0, 0, [1], tokens, sampled, [-1.0 * trained for trained in sampled])
    trajectory.text = tokenizer.decode(tokens, skip_special_tokens=True)  # rewards see no special tokens
    assert shown_text(trajectory, tokenizer) == shown
    trajectory.decoded = trajectory.text = "the rollout's own text"
    assert shown_text(trajectory, tokenizer) == "the rollout's own text"


def test_an_answer_with_tools_is_shown_in_pieces_by_author() -> None:
    trajectory = Trajectory(0, 0, [1], [5, 6, 7, 8, 5], [1, 1, 0, 0, 1], [-1.0, -1.0, 0.0, 0.0, -1.0])
    tokenizer: Any = SimpleNamespace(
        decode=lambda ids, skip_special_tokens=False: "".join(map(str, ids))
    )
    prompt: Any = SimpleNamespace(id=0, row={})

    def rows(answers: list[Answer]) -> list[dict[str, Any]]:
        return answer_rows(answers, [prompt], tokenizer)

    (row,) = rows(as_answers([trajectory]))
    assert row["pieces"] == [["56", True], ["78", False], ["5", True]]
    trajectory.loss_mask = [1] * 5
    (row,) = rows(as_answers([trajectory]))
    assert "pieces" not in row
