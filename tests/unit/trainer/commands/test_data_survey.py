"""`hotbunk data`: its figures equal those of a second computation, and its screen shows what a model is shown."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from tests.conftest import TinyModel
from tests.support.reciting_model import base_tokenizer
from tests.support.rows import read_rows, write_rows
from trainer.cli import main
from trainer.commands.data import histogram, panel, table
from trainer.commands.data_survey import Example, Survey
from trainer.config.recipe import load_config
from trainer.data import Prompt
from trainer.data.summary import TokenLengths, named_rows, prompt_lines

QUESTIONS = ["6 * 7", "12 + 30", "6 * 7", "x" * 100, "9 - 2", "12 + 30"]
LEVELS = """
def levels(completions, level, **kwargs):
    return [0.0]
def whole(completion, *, row):
    return 0.0
"""


@pytest.fixture
def recipe(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six rows, of which one is too long, two are duplicates, and one is evaluated on."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tiny_model(layers=1)
    rows = [{"prompt": text, "answer": "42", "level": 1, "source": "s"} for text in QUESTIONS]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(
        tmp_path / "eval.jsonl", [{"prompt": "9 - 2", "answer": "7"}, {"prompt": "1 + 1", "answer": "2"}]
    )
    sections = {
        "model": {"path": str(folder)},
        "data": {
            "path": str(tmp_path / "train.jsonl"),
            "max_prompt_tokens": 64,
            "system_prompt": "Count.",
        },
        "eval": {"every": 1, "datasets": {"held_out": {"path": str(tmp_path / "eval.jsonl")}}},
        "sampling": {"max_tokens": 8},
        "engine": {"max_model_len": 128},
        "reward": {"functions": [{"name": "exact_match"}]},
        "run": {"output_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "recipe.yaml"


def facts_of(capsys: pytest.CaptureFixture[str], recipe: Path, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["data", str(recipe), "--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out))


def prompt_ids(recipe: Path, text: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(load_config(recipe, []).model.path)
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_figures_are_those_of_the_rows(
    kind: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe.parent / "train.jsonl"
    if kind == "parquet":
        rows = read_rows(path)
        path = write_rows(path.with_suffix(".parquet"), rows)
    facts = facts_of(capsys, recipe, "--data.path", str(path), "--rows", "2")
    lengths = [len(prompt_ids(recipe, text)) for text in QUESTIONS]
    too_long = [index for index, length in enumerate(lengths) if length > 64]
    assert too_long == [3]
    assert facts["path"] == str(path) and facts["limit"] == 64
    assert (facts["rows"], facts["used"]) == (6, 5)
    assert facts["dropped"] == {"is longer than data.max_prompt_tokens": too_long}
    ordered = sorted(lengths)
    assert [facts["lengths"][key] for key in ("least", "median", "p95", "longest")] == [
        ordered[0],
        ordered[2],
        ordered[5],
        ordered[5],
    ]
    assert sum(facts["lengths"]["histogram"]) == 6
    assert facts["duplicates"] == [[2, 0], [5, 1]]
    assert facts["shared"] == {"held_out": [4]}
    assert facts["columns_read"] == ["prompt", "answer"]
    assert (facts["columns_passed"], facts["readers"]) == (["level", "source"], [])
    assert facts["ends"] == ["<|im_end|> (2)"] and facts["template"] == []
    tokenizer = AutoTokenizer.from_pretrained(load_config(recipe, []).model.path)
    assert facts["examples"] == [
        {
            "row": row,
            "pieces": [[tokenizer.decode(prompt_ids(recipe, QUESTIONS[row])), False]],
            "tools": [],
            "tokens": lengths[row],
            "images": 0,
        }
        for row in (0, 1)
    ]


def test_a_warm_start_shows_what_is_trained(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = recipe.parent / "sft.jsonl"
    turns = [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": "42"}]
    write_rows(data, [{"messages": turns * 2}, {"messages": turns[:1]}, {"messages": turns * 2}])
    words = ("--data.path", str(data), "--sft", "--eval.every", "0", "--data.system_prompt", "null")
    facts = facts_of(capsys, recipe, *words)
    assert (facts["rows"], facts["used"], facts["limit"]) == (
        3,
        2,
        64 + load_config(recipe, []).sft.max_tokens,
    )
    assert facts["dropped"] == {"has no assistant turn": [1]} and facts["duplicates"] == [[2, 0]]
    question = "<|im_start|>user\n6 * 7<|im_end|>\n<|im_start|>assistant\n"
    assert facts["examples"][0]["pieces"] == [
        [question, False],
        ["42<|im_end|>", True],
        [f"\n{question}", False],
        ["42<|im_end|>", True],
    ]
    capsys.readouterr()
    assert main(["data", str(recipe), *words, "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert (
        "⟦42<|im_end|>⟧" in shown
        and "row 2, which is like row 0" in shown
        and "has no assistant turn: row 1" in shown
    )


@pytest.mark.parametrize(
    ("function", "read", "readers"),
    [("levels", ["prompt", "answer", "level"], []), ("whole", ["prompt", "answer"], ["reward whole"])],
)
def test_columns_that_a_reward_reads_are_told_from_those_that_nobody_reads(
    function: str, read: list[str], readers: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = recipe.parent / "rewards.py"
    rewards.write_text(LEVELS.replace(", **kwargs", ""))
    functions = json.dumps([{"name": "exact_match"}, {"name": f"{rewards}:{function}"}])
    facts = facts_of(capsys, recipe, "--reward.functions", functions)
    assert (facts["columns_read"], facts["readers"]) == (read, readers)
    assert sorted(facts["columns_read"] + facts["columns_passed"]) == [
        "answer",
        "level",
        "prompt",
        "source",
    ]


def test_answers_for_which_a_reward_can_never_be_1_are_named(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": str(number), "answer": answer}
        for number, answer in enumerate(["1", "one", "2", "two"])
    ]
    write_rows(recipe.parent / "train.jsonl", rows)
    facts = facts_of(capsys, recipe, "--reward.functions", '[{"name": "numeric_match"}]')
    ((reason, named),) = facts["remarks"].items()
    assert named == [1, 3] and reason.startswith("reward 'numeric_match' can never be 1, since ")


def test_what_is_wrong_with_a_template_is_shown(
    recipe: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(layers=1, seed=1, tokenizer=base_tokenizer())
    words = ["--model.path", str(model), "--data.chat_template_kwargs", "{enable_thinkng: false}"]
    facts = facts_of(capsys, recipe, *words, "--rows", "0")
    unread, ends = facts["template"]
    assert unread.startswith(
        "data.chat_template_kwargs has enable_thinkng, which the chat template never reads"
    )
    assert ends.startswith("answers end with <|im_end|> (2), too") and facts["examples"] == []
    assert facts["ends"] == ["<|endoftext|> (0)", "<|im_end|> (2)"]


def test_a_row_that_cannot_be_used_ends_in_its_sentence(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(
        recipe.parent / "train.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "", "answer": "1"}]
    )
    assert main(["data", str(recipe)]) == 2
    assert "hotbunk: row 1 of " in capsys.readouterr().err
    assert main(["data", str(recipe), "--rows", "-1"]) == 2
    assert capsys.readouterr().err == "hotbunk: --rows must be at least 0\n"


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_quantiles_are_lengths_and_bins_count_them(lengths: list[int]) -> None:
    figures = TokenLengths.of(lengths)
    expected = [int(np.percentile(lengths, part, method="inverted_cdf")) for part in (0, 50, 95, 100)]
    assert [figures.least, figures.median, figures.p95, figures.longest] == expected
    bins = Counter((length - 1) // figures.width for length in lengths)
    assert figures.histogram == [bins[number] for number in range(8)]
    assert len(str(histogram(figures)).splitlines()) == 8


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([4], "row 4"),
        ([4, 6], "rows 4 and 6"),
        ([1, 2, 3], "rows 1, 2 and 3"),
        ([1, 2, 3, 9], "rows 1, 2, 3 and 1 more"),
    ],
)
def test_rows_are_named_in_few_words(rows: list[int], name: str) -> None:
    assert named_rows(rows) == name


def test_the_screen_fits_80_columns_and_loses_no_text() -> None:
    lengths = TokenLengths.of([*range(1, 4000, 7), 900, 901])
    facts = Survey("some/" * 20 + "data.jsonl", 4096, rows=12345, used=12000, lengths=lengths)
    facts.columns_read, facts.columns_passed = (
        ["prompt", "answer"],
        [f"column_{number}" for number in range(20)],
    )
    facts.dropped = {"is longer than data.max_prompt_tokens": list(range(345))}
    example = Example(
        3, [("a question\x07 " * 30 + "<|im_start|>", False), ("an answer", True)], ["look"], 12, 1
    )
    console = Console(width=80, file=io.StringIO())
    console.print(table(facts))
    console.print(panel(example, ["<|im_start|>"], colours=False))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    words = "".join(text.replace("│", "").split())
    assert (
        all(name in words for name in facts.columns_passed) and "345rows,sinceeachislongerthan" in words
    )
    assert (
        "⟦ananswer⟧" in words and "\x07" not in text and "row 3, 12 tokens, 1 image, tools look" in text
    )


def test_a_run_starts_with_a_short_form(tiny_model: TinyModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(layers=1))

    def prompts(*texts: str) -> list[Prompt]:
        return [
            Prompt(number, tuple(tokenizer(text)["input_ids"]), {}) for number, text in enumerate(texts)
        ]

    lines = list(
        prompt_lines(prompts("1+1", "2", "1+1", "3"), {"held_out": prompts("3", "4", "2")}, tokenizer)
    )
    assert lines == [
        "prompts have from 1 to 3 tokens, median 1, p95 3",
        "the first prompt is '1+1'",
        "1 duplicate among the rows, such as row 2, which is like row 0",
        "eval.datasets.held_out has 2 prompts of the training data: rows 1 and 3",
    ]
