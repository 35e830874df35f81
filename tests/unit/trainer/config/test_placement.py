"""Placements of engines: who trains, who leads, and where the rest of the code may ask."""

import re
from pathlib import Path

import pytest

from tests.support.real_run import ROOT
from tests.support.recipes import make_config
from trainer.config.placement import (
    PLACEMENTS,
    engine_workers,
    generating_ranks,
    leads_engine,
    training_ranks,
)
from trainer.config.schema import TrainConfig

ASKED = re.compile(
    r"engine\.(apart|placement)\b\s*(==|!=|\bin\b|\)? (else|and|or)\b)|[!=]= ['\"]ray['\"]"
)
"""A question where engines are, rather than a look at the record."""


@pytest.mark.parametrize(
    ("engine", "leaders", "training", "workers"),
    [
        ({}, [0, 1, 2, 3, 4, 5], 6, 6),
        ({"tensor_parallel_size": 2}, [0, 2, 4], 6, 6),
        ({"placement": "ranks"}, [5], 5, 1),
        ({"placement": "ranks", "ranks": 4, "tensor_parallel_size": 2}, [2, 4], 2, 4),
        ({"placement": "ray", "replicas": 3, "tensor_parallel_size": 4}, [5], 5, 12),
    ],
)
def test_ranks_train_lead_and_generate(
    engine: dict[str, object], leaders: list[int], training: int, workers: int
) -> None:
    recipe = make_config(engine=engine)
    assert [rank for rank in range(6) if leads_engine(recipe, rank, 6)] == leaders
    assert training_ranks(recipe, 6) == training == 6 - generating_ranks(recipe)
    assert engine_workers(recipe, 6) == workers


def test_every_value_of_the_key_has_a_record() -> None:
    named = TrainConfig.model_fields["engine"].annotation.model_fields["placement"].annotation  # type: ignore[union-attr]
    assert set(PLACEMENTS) == set(named.__args__)  # type: ignore[union-attr]


def test_only_the_placement_file_compares_placements() -> None:
    files = [file for folder in ("trainer", "sharding") for file in Path(ROOT, folder).rglob("*.py")]
    asking = {str(file.relative_to(ROOT)) for file in files if ASKED.search(file.read_text("utf-8"))}
    assert not asking
