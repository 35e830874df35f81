"""Rewards that can never be 1 are named before a run starts, with the row and the reason."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.schema import RewardConfig
from trainer.data import Prompt, PromptDataset, column_value, load_rows
from trainer.errors import UserError
from trainer.rewards import RewardPool, bind_rewards
from trainer.rewards.functions import FormatRegex, exact_match, math_verify, numeric_match
from trainer.rewards.trial import check_rewards, judge_answers, opened_tag


@pytest.mark.parametrize(
    ("function", "answer", "right", "wrong"),
    [
        (exact_match, 42.0, ["42", "42.0", " 42\n"], ["43", "42.00", ""]),
        (exact_match, 0.5, ["0.5"], ["0", "1/2"]),
        (exact_match, 42, ["42"], ["42.0"]),
        (exact_match, 1e20, ["1e+20", "100000000000000000000"], ["1"]),
        (exact_match, float("inf"), ["inf"], ["0"]),
        (exact_match, True, ["True", "true", "TRUE"], ["false", "1", "yes"]),
        (exact_match, False, ["False", "false"], ["true", ""]),
        (exact_match, "True", ["True"], ["true"]),  # a text is compared as it is
        (exact_match, ["Bern", "Berne"], ["Bern", " Berne "], ["bern", "['Bern', 'Berne']"]),
        (exact_match, [None, 7.0], ["7"], ["None", ""]),
        (numeric_match, 42.0, ["so 42", "42.0"], ["41"]),
        (numeric_match, ["41", "42"], ["41", "it is 42"], ["43", "none"]),
        (numeric_match, ["many", 12], ["12"], ["many"]),
        (math_verify, ["a"], ["a", r"\boxed{a}"], ["b", r"\boxed{b}"]),
        (math_verify, ["1/2", "0.3"], [r"\boxed{0.5}", r"\boxed{\frac{3}{10}}"], [r"\boxed{0.2}"]),
        (math_verify, "B", ["(B)", "B", r"\boxed{B}", "(B)."], ["(C)", "A"]),
        (math_verify, "(B)", ["B", "(B)", r"\boxed{\text{(B)}}"], ["C", ""]),
        (math_verify, 42.0, [r"\boxed{42}", "42"], ["41"]),
    ],
)
def test_answers_of_every_type_are_judged_as_people_mean_them(
    function: Any, answer: Any, right: list[str], wrong: list[str]
) -> None:
    assert [function(text, answer=answer) for text in right] == [1.0] * len(right)
    assert [function(text, answer=answer) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize("function", [exact_match, numeric_match, math_verify])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"value": "42"}, "has fields: set data.answer_key to one"),
        ([{"value": "42"}], "has fields"),
        ([["42"]], "list of lists"),
        ([], "no answer"),
        ([None], "no answer"),
        (float("nan"), "no answer"),
    ],
)
def test_answers_that_nothing_can_equal_are_refused(function: Any, answer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        function("42", answer=answer)


def dataset(rows: list[dict[str, Any]], token_ids: tuple[int, ...] = (4, 5)) -> PromptDataset:
    return PromptDataset([Prompt(number, token_ids, row) for number, row in enumerate(rows)])


def tried(answers: list[Any], *names: str, seed: int = 0) -> list[str]:
    pool = RewardPool(RewardConfig.model_validate({"functions": list(names)}))
    prompts = dataset([{"answer": answer} for answer in answers])
    return check_rewards(pool, {"d.jsonl": prompts}, small_tokenizer(), seed)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_that_can_never_be_right_are_named_whatever_the_file(tmp_path: Path, kind: str) -> None:
    """Row 1 has no answer, row 2 has no number; the column of floats has whole numbers."""
    path = tmp_path / f"d.{kind}"
    table = pyarrow.table(
        {"text": ["5", None, "none"], "number": [42.0, None, 7.0], "some": [["1"], [], ["x", "2"]]}
    )
    write_rows(path, table.to_pylist())
    rows = load_rows(str(path), None, "train")
    functions = bind_rewards([("numeric_match", {}), ("exact_match", {})])
    bad = {}
    for key in ("text", "number", "some"):
        answers = [(number, {"answer": column_value(row, key)}) for number, row in enumerate(rows)]
        judgements = list(judge_answers(functions, answers, small_tokenizer()))
        assert len(judgements) == 2 * len(rows)
        bad[key] = [(judgement.row, judgement.label) for judgement in judgements if judgement.reason]
    missing = [(1, "numeric_match"), (1, "exact_match")]
    assert bad == {"text": [*missing, (2, "numeric_match")], "number": missing, "some": missing}


def test_math_verify_is_tried_in_a_process_that_can_be_killed() -> None:
    functions = bind_rewards([("math_verify", {}), ("exact_match", {})])
    answers = ["1/2", "", ["x^2", "y"], {"a": 1}]
    judged = list(
        judge_answers(
            functions, [(n, {"answer": a}) for n, a in enumerate(answers)], small_tokenizer(), 60
        )
    )
    reasons = {
        judgement.row: judgement.reason for judgement in judged if judgement.label == "math_verify"
    }
    assert [row for row, reason in reasons.items() if reason] == [1, 3]
    assert "is not a mathematical expression" in reasons[1] and "has fields" in reasons[3]
    assert [
        judgement.row for judgement in judged if judgement.label == "exact_match" and judgement.reason
    ] == [3]


def test_one_sentence_for_each_kind_of_answer_and_a_refusal_where_no_row_fits() -> None:
    answers = ["5", "x", None, "y", *["7"] * 10]
    lines = tried(answers, "numeric_match", "exact_match")
    assert [line.partition(", as on row ")[0] for line in sorted(lines)] == [
        "reward 'exact_match' can never be 1 on 1 of 14 rows of d.jsonl that were tried",
        "reward 'numeric_match' can never be 1 on 1 of 14 rows of d.jsonl that were tried",
        "reward 'numeric_match' can never be 1 on 2 of 14 rows of d.jsonl that were tried",
    ]
    assert any("as on row 2: the row has no answer" in line for line in lines)
    with pytest.raises(
        UserError, match=r"'exact_match' can never be 1 in d.jsonl, as in row \d: .*has fields"
    ):
        tried([{"value": "1"}, {"value": "2"}], "exact_match")


def test_two_hundred_rows_are_tried_and_all_before_a_refusal() -> None:
    """A function may be for a few rows of many: one row that fits, wherever it is, is enough."""
    for place in (0, 250, 999):
        answers: list[Any] = [None] * 1000
        answers[place] = "5"
        (line,) = tried(answers, "exact_match", seed=3)
        tries = int(line.partition(" of ")[2].partition(" rows")[0])
        assert 200 <= tries <= 1000
        assert f"can never be 1 on {tries - 1} of {tries} rows" in line
    with pytest.raises(UserError, match="can never be 1"):
        tried([None] * 1000, "exact_match")
    (line,) = tried(["5", None] * 500, "exact_match")
    assert " of 200 rows" in line


def test_functions_of_the_user_are_not_called(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def own(completion, answer): raise SystemExit('called')\n")
    assert tried(["1"], f"{tmp_path}/own.py:own", "exact_match") == []


def test_an_answer_that_the_tokenizer_cannot_write_is_named() -> None:
    """Completions are decoded without special tokens, so no completion equals this answer."""
    tokenizer = small_tokenizer()
    text = f"42{tokenizer.eos_token}"
    functions = bind_rewards([("exact_match", {}), ("numeric_match", {})])
    exact, numeric = judge_answers(functions, [(0, {"answer": text})], tokenizer)
    assert exact.reason == f"the tokenizer makes '42' of the answer {text!r}"
    assert numeric.reason == ""


THINK = r"<think>(?!.*<think>).*?</think>.*"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("1+1=<assistant><think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("Seed: <seed:think>", "<seed:think>"),
        ("<think>So 1+1", ""),
        ("Use <answer> tags.\nassistant\n", ""),
        ("<|im_start|>", ""),
        ("a </think>\n", ""),
        ("", ""),
    ],
)
def test_the_tag_that_a_prompt_ends_with_is_found(prompt: str, opened: str) -> None:
    tokenizer = small_tokenizer()
    assert opened_tag(tokenizer, tokenizer.encode(prompt)) == opened


def test_special_tokens_are_not_tags_since_completions_do_not_show_them() -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    assert opened_tag(tokenizer, tokenizer.encode("1+1=<assistant><think>\n")) == ""
    pool = RewardPool(
        RewardConfig.model_validate(
            {"functions": [{"name": "format_regex", "kwargs": {"pattern": THINK}}]}
        )
    )
    (line,) = check_rewards(pool, {"d": dataset([{"answer": "1"}])}, tokenizer, 0)
    assert "'format_regex' can hardly be 1: it gets a well-formed answer, '<think>1</think>'" in line
    assert line.endswith("without special tokens as '1'")


@pytest.mark.parametrize("name", ["format_regex", "trl.rewards:think_format_reward"])
def test_format_rewards_see_the_tag_that_the_template_has_opened(name: str) -> None:
    """A well-formed answer gets 1 with the tag written by the template, or by the model as before."""
    if name.startswith("trl"):
        pytest.importorskip("trl.rewards", reason="TRL is not installed")
    kwargs = {"pattern": THINK} if name == "format_regex" else {}
    (reward,) = bind_rewards([(name, kwargs)])
    row = {"prompt": [{"role": "user", "content": "1+1="}]}
    for opened, text, value in (
        ("<think>\n", "So 2.\n</think>\n2", 1.0),
        ("", "So 2.\n</think>\n2", 0.0),
        ("", "<think>So 2.</think>2", 1.0),
        ("<think>\n", "<think>So 2.</think>2", 1.0),  # as without the rule
        ("<think>\n", "So 2.", 0.0),
        ("<think>\n\n</think>\n\n", "2", 1.0),
    ):
        assert reward(text, {"prompt": "?", "row": row, "opened": opened}) == value, (opened, text)
    own = FormatRegex(r"[^<]*</think>\d")  # written for what the model itself writes
    assert (own("So</think>2", opened="<think>\n"), own("<think>So</think>2")) == (1.0, 0.0)


def test_format_rewards_are_tried_against_the_template() -> None:
    tokenizer = small_tokenizer()
    patterns = {
        THINK: True,
        r"<think>\n.*</think>\s*<answer>.*</answer>": True,
        r"<think>\w+</think>.*": False,  # the template writes a line break, which this does not allow
        r".*####.*": True,  # without tags, it cannot be tried
        r"<think>\d{9}</think>": True,
    }
    thinking = dataset([{"answer": "1"}], tuple(tokenizer.encode("1+1=<assistant><think>\n")))
    plain = dataset([{"answer": "1"}], tuple(tokenizer.encode("1+1=<assistant>")))
    for pattern, fits in patterns.items():
        functions = {"functions": [{"name": "format_regex", "kwargs": {"pattern": pattern}}]}
        pool = RewardPool(RewardConfig.model_validate(functions))
        assert check_rewards(pool, {"d": plain}, tokenizer, 0) == []
        lines = check_rewards(pool, {"d": thinking}, tokenizer, 0)
        assert [line[:42] for line in lines] == (
            [] if fits else ["reward 'format_regex' can hardly be 1: it "]
        ), pattern
        assert fits or r"after '<think>\n' from the chat template" in lines[0]
