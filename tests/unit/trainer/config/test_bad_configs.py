"""Impossible recipes are refused in one sentence before anything loads."""

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from generation.importing import importable, load
from sharding.ranks import agreed
from tests.support.bad_configs import Case, Folder, Outcome, search
from trainer.cli import main
from trainer.config.machine import device_gib, unwritable
from trainer.errors import UserError, quoted

DEEP = "[" * 900 + "]" * 900
MODEL = "model/config.json"
RANK = {"TORCHELASTIC_RUN_ID": "none"}  # torchrun's, without which variables of ranks are ignored
QUITTING = "class f:\n    def __init__(self):\n        raise KeyboardInterrupt('enough')\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path) -> Iterator[Folder]:
    import datasets

    made = tmp_path_factory.mktemp("configs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", made / "cache")
        yield Folder(made, tiny_qwen2)


def code(key: str, text: str) -> Case:
    return {"files": {"code.py": text}, key: "code"}


# What is wrong, and what the sentence says of it.
REFUSED: list[tuple[Case, str]] = [
    ({"run.output_dir": "{file}/below"}, "run.output_dir: "),
    ({"run.output_dir": "/proc/nothing"}, "nothing can be written in /proc"),
    ({"run.output_dir": "/dev/null/x"}, "/dev/null is not a folder"),
    ({"run.output_dir": "a\0b"}, "run.output_dir is 'a\\x00b', but should be text in UTF-8 without NUL"),
    (
        {"run.output_dir": "/a" * 2100},
        "as it has more than 3900 bytes, or a name in it has more than 255",
    ),
    (
        {"run.output_dir": "/nowhere/" + "a" * 300},
        "as it has more than 3900 bytes, or a name in it has more than 255",
    ),
    ({"run.name": "a" * 300}, "run.name is 'aaa"),
    ({"run.name": "a/b"}, "run.name is 'a/b'"),
    (
        {"run.first_step_deadline_s": 1e300},
        "run.first_step_deadline_s is 1e+300, but should be at most 1e+06",
    ),
    ({"run.first_step_deadline_s": 1e12}, "should be at most 1e+06"),
    ({"run.step_deadline_s": 1e-300}, "run.step_deadline_s is 1e-300, but should be at least 1"),
    ({"run.step_deadline_s": True}, "run.step_deadline_s is True, but should be a number"),
    ({"run.seed": 2**70}, "run.seed is 1180591620717411303424, but should be less than 4294967296"),
    (
        {"sampling.temperature": 1e-300},
        "sampling.temperature is 1e-300, but should be 0 (greedy) or at least 0.01",
    ),
    ({"sampling.temperature": 2.5}, "sampling.temperature is 2.5, but should be at most 2"),
    ({"policy.lr": 1e300}, "policy.lr is 1e+300, but should be at most 1"),
    ({"policy.lr": 0.5, "policy.weight_decay": 2.0}, "policy.lr * policy.weight_decay = 1 "),
    ({"policy.betas": [0.9, 1.0]}, "policy.betas.1 is 1.0, but should be less than 1"),
    (
        {"algorithm.group_size": 10**12},
        "algorithm.group_size is 1000000000000, but should be at most 65536",
    ),
    (
        {"algorithm.group_size": 65536, "batch.prompts_per_step": 64},
        "answers in a step, but at most 1048576 are",
    ),
    ({"reward.workers": 10**6}, "reward.workers is 1000000, but should be at most 256"),
    (
        {"engine.max_model_len": 48},
        "engine.max_model_len is 48, but sync.verify has the engines score 48 tokens",
    ),
    (
        {"engine.kv_cache_gib": 1e12},
        "engine.kv_cache_gib is 1000000000000.0, but should be at most 1e+09",
    ),
    ({"engine.kv_cache_gib": 1e6}, "engine.kv_cache_gib = 1e+06 is more than the"),
    (
        {
            "engine.max_num_seqs": 65536,
            "engine.max_model_len": 10**7,
            "files": {MODEL: {"max_position_embeddings": None}},
        },
        "engine.max_num_seqs * engine.max_model_len: vLLM's table of ids takes 2441.41 GiB",
    ),
    (
        {"reward.functions": [{"name": "exact_match", "weight": 1e308}]},
        "reward.functions.0.weight is 1e+308",
    ),
    (
        {"lora.target_modules": 3},
        "lora.target_modules is 3, but should be 'all-linear' or be a valid list",
    ),
    ({"run.seed": "9" * 5000}, "run.seed is '999"),
    (
        {"engine.extra": {"no_such_argument": 1}},
        "engine.extra.no_such_argument: the vLLM installed here has no such",
    ),
    ({"engine.extra": {"max_log_probs": 1}}, "did you mean max_logprobs?"),
    ({"engine.extra": {"model": "x"}}, "engine.extra.model is Hotbunk's to set: set model.path instead"),
    (
        {"engine.extra": {"pipeline_parallel_size": 2}},
        "engine.extra.pipeline_parallel_size is Hotbunk's to set",
    ),
    (
        {"engine.extra": {"hf_overrides": 3}},
        "engine.extra.hf_overrides is 3, but should be a mapping of keys",
    ),
    *(({"files": {MODEL: text}}, "config.json: it is ") for text in ("[]", '"text"', "null", "7")),
    (
        {"files": {MODEL: {"text_config": [1]}}},
        "config.json: it is [1], but should be a mapping of keys",
    ),
    (
        {"files": {MODEL: {"rope_parameters": "x"}}},
        "config.json: rope_parameters is 'x', but should be a mapping",
    ),
    (
        {"files": {MODEL: {"layer_types": 3}}},
        "config.json: layer_types is 3, but should be a valid list",
    ),
    (
        {"files": {MODEL: {"num_attention_heads": "4"}}},
        "num_attention_heads is '4', but should be a valid integer",
    ),
    (
        {"files": {MODEL: {"max_position_embeddings": [1]}}},
        "max_position_embeddings is [1], but should be a valid int",
    ),
    (
        {"files": {MODEL: {"num_attention_heads": 0}}},
        "num_attention_heads is 0, but should be at least 1",
    ),
    ({"files": {MODEL: "[" * 100_000}}, "config.json is not valid JSON: maximum recursion"),
    ({"env": {"WORLD_SIZE": "abc"}}, "WORLD_SIZE is 'abc', but should be a number from 1 on"),
    ({"env": {"WORLD_SIZE": "0"}}, "WORLD_SIZE is '0', but should be a number from 1 on"),
    ({"env": {"WORLD_SIZE": "-1"}}, "WORLD_SIZE is '-1'"),
    ({"env": RANK | {"LOCAL_WORLD_SIZE": "0"}}, "LOCAL_WORLD_SIZE is '0'"),
    ({"env": RANK | {"LOCAL_RANK": "abc"}}, "LOCAL_RANK is 'abc', but should be a number from 0 on"),
    (
        {"env": RANK | {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}},
        "RANK is 2, but should be less than WORLD_SIZE = 2",
    ),
    (
        {"env": RANK | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}},
        "RANK is set, but MASTER_ADDR is not",
    ),
    (
        {"files": {"recipe.yaml": f"engine: {{extra: {{a: {DEEP}}}}}"}},
        "nested too deep: make it flatter",
    ),
    (
        {"engine.extra": {"hf_overrides": {"a": json.loads(DEEP[860:940])}}},
        "more than 32 deep: make it flatter",
    ),
    (
        {"files": {"recipe.yaml": f"run: {{seed: {'9' * 5000}}}"}},
        "recipe.yaml cannot be read: Exceeds the limit",
    ),
    ({"files": {"data/train.jsonl": f'{{"prompt": "a", "answer": {DEEP}}}\n'}}, "train.jsonl"),
    (
        {"files": {"data/train.jsonl": '{"prompt": "a"}\n null\n'}},
        "train.jsonl: line 2 is null, but should be a row",
    ),
    ({"data.path": ""}, "data.path is '', but should have at least 1 character"),
    ({"data.path": "x" * 5000}, "data.path: there is no file or folder xxx"),
    (
        {"data.chat_template_kwargs": {"tokenize": True}},
        "data.chat_template_kwargs may not hold tokenize",
    ),
    ({"data.chat_template_kwargs": {"self": 1}}, "does not suit the chat template"),
    (code("reward.functions", "raise KeyboardInterrupt\n"), "importing it raised KeyboardInterrupt"),
    (code("rollout.tools", "raise SystemExit(3)\n"), "importing it raised SystemExit: 3"),
    (
        code("rollout.custom", "raise BaseException('x' * 5000)\n"),
        "importing it raised BaseException: xxx",
    ),
    (code("reward.functions", QUITTING), "cannot be set up with kwargs {}: KeyboardInterrupt: enough"),
    (code("rollout.sampler", QUITTING), "rollout.sampler: enough"),
    (code("reward.functions", "f = max\n"), "has no signature: wrap it"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_impossible_recipes_are_refused_in_one_sentence(folder: Folder, number: int) -> None:
    case, expected = REFUSED[number]
    outcome = folder.judge(case, "--dry-run")
    assert not outcome.fault, outcome.fault
    assert len(outcome.messages) == 1 and expected in outcome.messages[0], outcome.messages


def test_nothing_drawn_at_random_is_met_with_a_traceback(folder: Folder) -> None:
    seen: list[Outcome] = []

    def look(case: Case, outcome: Outcome) -> None:
        assert not outcome.fault, f"{case!r:.300}\n{outcome.fault}"
        seen.append(outcome)

    search(folder, 40, look, "--check")
    assert {outcome.code for outcome in seen} == {0, 2}  # neither all refused nor all accepted
    assert folder.judge({}, "--dry-run").code == 0  # and the folder is as it was


def test_modules_of_logits_processors_may_raise_anything(tmp_path: Path) -> None:
    (tmp_path / "hotbunk_quits.py").write_text("raise KeyboardInterrupt('enough')\n")
    with pytest.raises(
        ValueError,
        match="'hotbunk_quits:f' cannot be loaded: importing it raised KeyboardInterrupt: enough",
    ):
        load(importable(f"{tmp_path}/hotbunk_quits.py:f"))
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("output", ["/proc/nothing", "/dev/null/x"])
def test_an_evaluation_checks_first_that_it_can_write(
    output: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder.folder / "model"), str(folder.recipe), "--output", output]
    assert main(["eval", *words]) == 2
    assert f"hotbunk: --output: {output} cannot be made or written to, as " in capsys.readouterr().err


def test_an_error_agreed_by_all_ranks_is_still_a_sentence(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(*_: object) -> None:
        with agreed("starting the engine"):
            raise UserError("the engine does not start")

    monkeypatch.setattr("trainer.cli.check_config", tell)
    assert main(["train", str(folder.recipe)]) == 2
    assert capsys.readouterr().err == "hotbunk: the engine does not start\n"


def test_long_values_are_quoted_without_their_middle() -> None:
    for value in ("a" * 5000, 10**5000, json.loads(DEEP), {"a": ["b" * 300]}):
        assert len(quoted(value)) <= 80
    assert quoted("ab") == "'ab'" and quoted(10**20) == str(10**20)


def test_a_long_sentence_loses_nothing() -> None:
    sentence = f"data.path: there is no file {'x' * 5000}: {'name another, or ' * 50}".rstrip()
    error = UserError(sentence, "two\nlines")
    assert str(error) == f"{sentence}\ntwo lines"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_checking_a_folder_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unwritable(tmp_path / "a" / "b") is None and unwritable(tmp_path) is None
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "dangling" in str(unwritable(tmp_path / "dangling" / "runs"))
    assert [path.name for path in tmp_path.iterdir()] == ["dangling"]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert unwritable(tmp_path / "a") == f"nothing can be written in {tmp_path} (Read-only file system)"


def test_the_memory_of_gpus_comes_from_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    for command, expected in (("echo 81920\necho 24576", 80.0), ("echo N/A", None), ("exit 9", None)):
        tool.write_text(f"#!/bin/sh\n{command}\n")
        tool.chmod(0o755)
        assert device_gib() == expected
