"""`hotbunk eval` scores the answers of plain Transformers, and its estimates are those of its answers."""

import json
import os
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.support.forked import ENGINES, PYTHON
from tests.support.refusals import refusal
from tests.support.rows import read_rows, write_rows
from trainer.commands.eval import evaluation_config

TOKENS, QUESTIONS = 5, [f"what is {n}+{n}?" for n in range(6)]
REWARD = """
def right(completion, *, answer):
    return float(len(completion) % 2 == 0 if answer == "even" else completion.strip() == answer.strip())
"""


@pytest.fixture
def folder(tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe with two datasets: one for greedy answers, of which all but two are right, and one for random ones."""
    monkeypatch.chdir(tmp_path)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tiny_qwen2),
        AutoModelForCausalLM.from_pretrained(tiny_qwen2),
    )
    rows = []
    for number, question in enumerate(QUESTIONS):
        ids = torch.tensor([tokenizer(question)["input_ids"]])
        mask = torch.ones_like(ids)
        answer = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS)[
            0, ids.shape[1] :
        ]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        rows.append({"question": question, "answer": text if number > 1 else f"not {text}"})
    write_rows(tmp_path / "greedy.jsonl", rows)
    sampled = [{"prompt": question, "answer": "even"} for question in QUESTIONS]
    write_rows(tmp_path / "sampled.jsonl", sampled)
    (tmp_path / "rewards.py").write_text(REWARD)
    recipe = {
        "model": {"path": "another"},
        "data": {"path": "sampled.jsonl", "max_prompt_tokens": 32, "apply_chat_template": False},
        "engine": {
            "max_model_len": 64,
            "max_num_seqs": 32,
            "kv_cache_gib": 0.03125,
            "load_format": "dummy",
        },
        "policy": {"dtype": "float32"},
        "sampling": {"max_tokens": TOKENS},
        "reward": {"functions": [{"name": "rewards.py:right"}], "workers": 1, "timeout_s": 60},
        "eval": {
            "datasets": {
                "greedy": {"path": "greedy.jsonl", "prompt_key": "question"},
                "sampled": {"path": "sampled.jsonl", "samples": 4, "temperature": 1.0, "size": 5},
            }
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def test_eval_of_a_run_measures_its_model_by_its_recipe(tiny_qwen2: Path, folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    (folder / "recipe.yaml").rename(run / "config.yaml")
    (run / "model").symlink_to(tiny_qwen2)
    words = ["eval", "run", "--eval.k=[1, 2]", "--eval.samples=2"]
    done = subprocess.run(  # returns when no process is left that could write
        [*PYTHON, "-m", "trainer", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), ENGINES: "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    datasets = json.loads((run / "eval" / "eval.json").read_text())["datasets"]
    rows = read_rows(run / "eval" / "completions.jsonl")
    greedy = datasets["greedy"]
    assert greedy["accuracy"] == greedy["pass@2"] == greedy["majority@2"] == pytest.approx(4 / 6)
    assert greedy["accuracy_standard_error"] == pytest.approx((6 * (4 / 6) * (2 / 6) / 5 / 6) ** 0.5)
    assert "0.667 ± 0.211" in done.stdout
    sampled = {
        p: [r["reward"] for r in rows if (r["dataset"], r["prompt_id"]) == ("sampled", p)]
        for p in range(5)
    }
    assert [len(rewards) for rewards in sampled.values()] == [4] * 5 and len(rows) == 6 * 2 + 5 * 4
    pairs = [list(combinations(rewards, 2)) for rewards in sampled.values()]
    assert datasets["sampled"]["pass@1"] == pytest.approx(sum(map(sum, sampled.values())) / 20)
    assert datasets["sampled"]["pass@2"] == pytest.approx(
        sum(sum(map(any, part)) / len(part) for part in pairs) / 5
    )
    assert 0 < datasets["sampled"]["pass@1"] < datasets["sampled"]["pass@2"]


def test_eval_of_any_model_takes_all_of_a_recipe_except_its_model(
    tiny_qwen2: Path, folder: Path
) -> None:
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"eval": {}}))
    config = evaluation_config(str(tiny_qwen2), folder / "recipe.yaml", ["data.split=train[:2]"])
    assert config.model.path == str(tiny_qwen2)
    assert config.engine.load_format == "auto" and not config.engine.sleep
    # Without held-out prompts, the training prompts are evaluated.
    assert [(d.path, d.split) for d in config.eval.datasets.values()] == [("sampled.jsonl", "train[:2]")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["MODEL"], "is not a run's folder: name a recipe after it"),
        (["absent/model/x", "recipe.yaml"], "model.path: there is no folder absent/model/x"),
        (["unfinished"], "has no model yet: its run is not finished"),
        (["MODEL", "recipe.yaml", "--eval.k", "[2]"], "eval.k has k = 2, but eval.samples = 1"),
        (
            ["MODEL", "recipe.yaml", "--eval.datasets.greedy.path", "no.jsonl"],
            "eval.datasets.greedy.path: there is no",
        ),
        (
            ["MODEL", "recipe.yaml", "--eval.datasets.greedy.prompt_ky", "x"],
            "mean eval.datasets.NAME.prompt_key?",
        ),
        (
            ["MODEL", "recipe.yaml", "--eval.datasets.greedy.prompt_key", "x"],
            "prompt_key = 'x' of eval.datasets is no",
        ),
        (["MODEL", "recipe.yaml", "--reward.functions", "[]"], "reward.functions is empty"),
        (
            ["MODEL", "recipe.yaml", "--engine.tensor_parallel_size", "7"],
            "num_attention_heads of the model",
        ),
    ],
)
def test_a_mistake_in_a_call_of_eval_is_reported_in_one_sentence(
    words: list[str], expected: str, tiny_qwen2: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.yaml").write_bytes((folder / "recipe.yaml").read_bytes())
    words = [str(tiny_qwen2) if word == "MODEL" else word for word in words]
    assert expected in refusal(capsys, "eval", *words)
