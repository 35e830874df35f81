"""The sync way that `auto` stands for, and the obstacles to ways that are asked for by name."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.unit.trainer.config.conftest import MODEL
from tests.unit.trainer.config.test_config_checks import problems
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import with_chosen_way

PLAIN = {"engine": {"plain_cpu_weights": True}}
ASKED = re.compile(r"\bway [!=]= |sync\.way (?:not )?in ")


def test_only_the_file_of_ways_compares_ways() -> None:
    files = [
        file
        for folder in ("trainer", "sharding", "generation")
        for file in Path(ROOT, folder).rglob("*.py")
    ]
    asking = {str(file.relative_to(ROOT)) for file in files if ASKED.search(file.read_text("utf-8"))}
    assert asking == {"trainer/config/sync_ways.py"}


def choice(config: dict, changes: dict, ranks: int = 1, neighbours: int | None = None) -> str:
    recipe = TrainConfig.model_validate(
        {**config, **changes, "sync": {"way": "auto"} | changes.get("sync", {})}
    )
    chosen, why = with_chosen_way(recipe, ranks, neighbours or ranks)
    assert why.startswith(f"sync.way is {chosen.sync.way}, since ")
    return why.removeprefix("sync.way is ")


@pytest.mark.parametrize(
    ("changes", "ranks", "neighbours", "way"),
    [
        (PLAIN, 1, 1, "zero_copy, since one rank and its engine keep weights in the same layout"),
        (
            PLAIN,
            2,
            2,
            "pull, since the engine can read all shards here (not zero_copy: there are 2 ranks)",
        ),
        (PLAIN | {"lora": {"rank": 4, "sync": "merged"}}, 1, 1, "pull, since"),
        (
            {},
            2,
            2,
            "staged, since engines cannot read shards here: engine.plain_cpu_weights is false, so that vLLM",
        ),
        (
            PLAIN,
            4,
            2,
            "staged, since engines cannot read shards here: a copy of the model is sharded over 4 ranks, and",
        ),
        (PLAIN | {"policy": {"shard_size": 2}}, 4, 2, "pull, since"),
        (
            PLAIN | {"lora": {"rank": 4}},
            2,
            2,
            "staged, since engines cannot read shards here: lora.sync sends the",
        ),
        (
            PLAIN | {"policy": {"offload": "all"}},
            2,
            2,
            "staged, since engines cannot read shards here: policy.offload",
        ),
        (
            {"run": {"device": "cuda"}},
            2,
            2,
            "staged, since it was tried most on GPUs: zero_copy ran on one, pull on none",
        ),
    ],
)
def test_the_automatic_sync_way_is_the_first_possible_one(
    config: dict, changes: dict, ranks: int, neighbours: int, way: str
) -> None:
    assert choice(config, changes, ranks, neighbours).startswith(way)


@pytest.mark.parametrize(
    "file",
    [
        MODEL | {"num_experts": 4},
        MODEL | {"kv_lora_rank": 4},
        {"text_config": MODEL, "vision_config": {"depth": 1}},
    ],
)
def test_models_that_vllm_reprocesses_are_pulled_if_possible(
    config: dict, tmp_path: Path, file: dict
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(file))
    assert choice(config, PLAIN).startswith("pull, since")


def test_a_sync_way_set_in_the_recipe_is_kept(config: dict) -> None:
    for way in ("staged", "pull", "zero_copy", "storage"):
        recipe = TrainConfig.model_validate(config | {"sync": {"way": way}})
        assert with_chosen_way(recipe, 1, 1) == (recipe, "")


@pytest.mark.parametrize(
    ("changes", "ranks", "sentence"),
    [
        (
            {"engine": {}},
            2,
            "engine.plain_cpu_weights is false, so that vLLM packs them: set it to true",
        ),
        (
            {"sync": {"way": "pull", "replay": False}},
            2,
            "sync.replay is false, and only the record says",
        ),
        (
            {"policy": {"offload": "all"}},
            2,
            "policy.offload moves weights away in every shift: set it to optimizer",
        ),
        (
            {"policy": {"backend": "deepspeed", "zero_stage": 2}},
            2,
            "policy.zero_stage below 3 shards no weights",
        ),
        ({"lora": {"rank": 4}}, 2, "lora.sync sends the adapter by itself: set it to merged"),
        (
            {"run": {"device": "cuda"}, "policy": {"update_on": "host"}},
            2,
            "policy.update_on: host keeps them in host",
        ),
        (
            {},
            4,
            "a copy of the model is sharded over 4 ranks, and a machine has 2: set policy.shard_size",
        ),
    ],
)
def test_obstacles_to_reading_shards_are_named(
    config: dict, changes: dict, ranks: int, sentence: str
) -> None:
    right = PLAIN | {"sync": {"way": "pull"}}
    assert problems(config, right, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") == []
    messages = problems(config, right | changes, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE="2")
    assert any(p.startswith("sync.way: pull lets engines read") and sentence in p for p in messages), (
        messages
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"engine": {"placement": "shared", "plain_cpu_weights": True}},
            "engine.placement is shared, where nothing",
        ),
        (
            {"sync": {"delta": True, "verify": "off"}},
            "sync.verify is off, and digests have to prove the result",
        ),
        (
            {"lora": {"rank": 4}},
            "lora.sync sends a small adapter anyway: leave it out, or set lora.sync to merged",
        ),
        (
            {"engine": {"placement": "ranks"}},
            "engine.plain_cpu_weights is false, so that vLLM packs them",
        ),
        (
            {"sync": {"delta": True, "replay": False}},
            "sync.replay is false, and only the record says where they are",
        ),
    ],
)
def test_obstacles_to_sending_changes_alone_are_named(
    config: dict, changes: dict, sentence: str
) -> None:
    right = {"sync": {"delta": True}, "engine": {"placement": "ranks", "plain_cpu_weights": True}}
    beginning = "sync.delta changes the weights that remote engines hold, but "
    found = [
        [p for p in problems(config, recipe, WORLD_SIZE="2") if p.startswith(beginning)]
        for recipe in (right, right | changes)
    ]
    assert found[0] == [] and [p.startswith(beginning + sentence) for p in found[1]] == [True]
