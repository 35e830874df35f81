"""The recipe: its keys, their overrides, and error messages about wrong keys."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from tests.conftest import ROOT
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.kl import ESTIMATORS
from trainer.algorithms.losses import LEVELS, LOSSES
from trainer.cli import describe_keys, split_overrides
from trainer.config.algorithm import PRESETS
from trainer.config.recipe import known_keys, load_config, to_yaml
from trainer.config.schema import TrainConfig
from trainer.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {path: m}\ndata: {path: d}\npolicy: {lr: 1e-5}\nsync: {verify: off}\n"
        "reward: {functions: [{name: exact_match}, {name: math_verify}]}\nengine: {extra: {seed: 1}}\n"
    )
    return path


def value(config: TrainConfig, key: str) -> object:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_a_recipe_is_read_with_yamls_traps_taken_out(recipe: Path) -> None:
    config = load_config(recipe, [])
    assert config.policy.lr == 1e-5  # YAML 1.1 takes this spelling for text
    assert config.sync.verify == "off"  # and this for false
    assert config.run.name == "small"
    assert config.run.folder == Path("runs/small")
    assert [function.weight for function in config.reward.functions] == [1.0, 1.0]


def test_the_resolved_recipe_reads_back_as_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_config(
        recipe,
        ["sampling.stop=['a', \"b'\"]", "run.name=other", "eval.max_tokens=null", "policy.eps=1e-9"],
    )
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again, []) == config


def test_a_preset_on_the_command_line_counts_more_than_a_resolved_recipe(
    recipe: Path, tmp_path: Path
) -> None:
    plain = load_config(
        recipe, ["algorithm.group_size=6", "algorithm.preset=gspo", "algorithm.clip_low=0.1"]
    )
    grpo = tmp_path / "config.yaml"
    grpo.write_text(to_yaml(load_config(recipe, ["algorithm.group_size=6", "algorithm.preset=grpo"])))
    overrides = ["algorithm.preset=gspo", "algorithm.clip_low=0.1", "run.name=small"]
    assert load_config(grpo, overrides).algorithm == plain.algorithm
    assert load_config(grpo, ["algorithm.clip_low=0.1"]).algorithm.kl_coef == 0.04


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("run.steps=7", "run.steps", 7),
        ("policy.lr=3e-4", "policy.lr", 3e-4),
        ("engine.sleep=false", "engine.sleep", False),
        ("engine.kv_cache_gib=null", "engine.kv_cache_gib", None),
        ("sampling.stop=[a, 'b c']", "sampling.stop", ["a", "b c"]),
        ("data.system_prompt=a=b", "data.system_prompt", "a=b"),
        ("run.name=2026", "run.name", "2026"),
        ("sync.verify=off", "sync.verify", "off"),
        ("engine.extra.max_logprobs=3", "engine.extra", {"seed": 1, "max_logprobs": 3}),
        ("data.path=${oc.env:HOTBUNK_TEST_DATA}", "data.path", "/from/environment"),
        ("data.path=${model.path}/data", "data.path", "m/data"),
        ("data.path=${oc.env:HOTBUNK_TEST_ABSENT,else}", "data.path", "else"),
    ],
)
def test_overrides_are_yaml(
    recipe: Path, override: str, key: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBUNK_TEST_DATA", "/from/environment")
    assert value(load_config(recipe, [override]), key) == expected


def test_an_override_reaches_into_a_list(recipe: Path) -> None:
    config = load_config(recipe, ["reward.functions.1.weight=0.5"])
    assert [function.weight for function in config.reward.functions] == [1.0, 0.5]


def test_overrides_are_distinguished_from_options() -> None:
    words = [
        "train",
        "--run.steps",
        "3",
        "r.yaml",
        "--reward.error_reward",
        "-1",
        "--dry-run",
        "--run.name=a=b",
        "--data.path",
        "",
    ]
    assert split_overrides(words) == (
        ["train", "r.yaml", "--dry-run"],
        ["run.steps=3", "reward.error_reward=-1", "run.name=a=b", "data.path="],
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("polcy.lr=1", "polcy is not a known key; did you mean policy?"),
        ("policy.learning_rate=1", "policy.learning_rate is not a known key; did you mean policy.lr?"),
        ("policy.schedul=linear", "policy.schedul is not a known key; did you mean policy.schedule?"),
        ("run.group_size=4", "run.group_size is not a known key; did you mean algorithm.group_size?"),
        ("group_size=4", "group_size is not a known key; did you mean algorithm.group_size?"),
        ("eval.lr=1", "eval.lr is not a known key; did you mean policy.lr or critic.lr or sft.lr?"),
        (
            "reward.functions.0.wieght=2",
            "reward.functions.0.wieght is not a known key; did you mean reward.functions.N.weight?",
        ),
        ("quux=1", "quux is not a known key; see --help for all of them"),
        ("policy.lr=-1", "policy.lr is -1, but should be at least 1e-20"),
        ("policy.lr=.nan", "policy.lr is nan, but should be a finite number"),
        (
            "run.name=../up",
            "run.name is '../up', but may have only letters, digits, '_', '-' and, inside, '.'",
        ),
        (
            "data.path=${oc.env:HOTBUNK_TEST_ABSENT}",
            "Environment variable 'HOTBUNK_TEST_ABSENT' not found",
        ),
        ("run.steps=[1", "--run.steps=[1 cannot be applied"),
    ],
)
def test_each_problem_is_one_sentence(recipe: Path, override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [override])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_wrong_keys_are_named_at_once(recipe: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, ["policy.lr=0", "run.stpes=3", "algorithm.aggregation=mean"])
    lines = str(caught.value).splitlines()
    assert sorted(line.split()[0] for line in lines) == [
        "algorithm.aggregation",
        "policy.lr",
        "run.stpes",
    ]


def test_every_key_is_explained_once() -> None:
    text = describe_keys(100)
    for key, field in known_keys():
        section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        assert len(re.findall(rf"\n{key}: " if section else rf"  --{re.escape(key)}\s", text)) == 1, key
        assert section or field.description, f"{key} has no description"
    assert max(map(len, text.splitlines())) <= 100
    assert "--eval.top_p  float = 1.0" in text
    assert "--engine.dtype  float32|bfloat16|null = null" in text
    assert "--model.path  text, required" in text


def test_every_value_is_explained() -> None:
    """Values of a fixed set and names of a table each have a line of their own below their key."""

    def values(annotation: Any) -> set[str]:
        if get_origin(annotation) is Literal:
            return set(map(str, get_args(annotation)))
        return set().union(*(values(part) for part in get_args(annotation) if not isinstance(part, str)))

    text = describe_keys(100)
    entries = {entry.split()[0]: entry for entry in text.split("\n  --")[1:]}
    for key, field in known_keys():
        for value in values(field.annotation) if "." in key else ():
            assert re.search(rf"\n {{10}}{value}: \S", entries[key]), (key, value)
    tables = {"preset": PRESETS, "advantage": ADVANTAGES, "loss": LOSSES, "aggregation": AGGREGATIONS}
    tables |= {
        "kl_estimator": ESTIMATORS,
        "ratio_level": LEVELS,
        "tis_level": LEVELS,
        "keep_level": LEVELS,
    }
    for name, table in tables.items():
        for value, record in table.items():
            assert f"\n          {value}: {record.meaning[:40]}" in entries[f"algorithm.{name}"]
    assert '--algorithm.loss  clip|cispo|sapo|reinforce|file.py:fn = "clip"' in text


def test_the_command_line_loads_no_torch() -> None:
    script = (
        "import sys, trainer.cli\n"
        "try: trainer.cli.main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'vllm', 'datasets'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "--policy.lr  float = 1e-06" in result.stdout


def test_a_rank_loads_vllm_only_where_an_engine_starts() -> None:
    script = "import sys, trainer.loop, trainer.commands.sft\nassert 'vllm' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
