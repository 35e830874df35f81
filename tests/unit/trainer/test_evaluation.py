"""Evaluation on held-out prompts: each dataset's figures, their mean, and no random number that training would draw."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from pydantic import ValidationError

from generation.engine.engine import Engine, Leader
from generation.engine.lifecycle import Memory
from generation.engine.sampling import NotFiniteError, SamplingSettings
from generation.engine.settings import EngineSettings
from generation.trajectory import Trajectory
from tests.support.learning_steps import as_answers
from tests.support.recipes import make_config
from tests.support.small_tokenizer import small_tokenizer
from tests.support.turn_templates import QWEN3
from trainer import engines
from trainer.chat_template import end_tokens
from trainer.commands import eval as command
from trainer.commands.eval import Evaluation, tables
from trainer.config.checks import _check_evaluation, _check_lengths
from trainer.config.schema import EvalConfig, RewardConfig
from trainer.data import Prompt, PromptDataset
from trainer.engines import evaluation_sampling
from trainer.errors import UserError
from trainer.evaluation import (
    accuracies,
    dataset_metrics,
    evaluation_metrics,
    standard_error,
)
from trainer.learning.answer_rows import failure_lines
from trainer.learning.metrics import reward_errors
from trainer.rewards import RewardPool
from trainer.rollouts.local import HeldOut, random_states_kept
from trainer.run.screen import make_console


def answer(
    prompt: int, sample: int, vote: str | None, right: float, reward: float = 0.0, **fields: Any
) -> Trajectory:
    """Return an answer with three sampled tokens of five; `right` is the first reward function's value."""
    tokens = {"response_ids": [7] * 5, "loss_mask": [1, 1, 0, 0, 1], "logprobs": [0.0] * 5}
    parts = {"reward_parts": {"match": right, "form": 9.0}}
    return Trajectory(prompt, sample, [1], vote=vote, reward=reward, **(tokens | parts | fields))


ANSWERS = [
    answer(0, 0, "4", 1.0, 2.0),
    answer(0, 1, "4", 1.0, 2.0, finish_reason="length"),
    answer(0, 2, "5", 0.0),
    answer(1, 0, "x", 0.5, 1.0),  # not right: half a point
    answer(1, 1, None, 0.0, error="a tool died", reward=7.0),
    answer(1, 2, "y", 1.0, 2.0),
]


def test_figures_of_a_dataset_by_hand() -> None:
    figures = dataset_metrics(as_answers(ANSWERS), ["match"], EvalConfig(k=[1, 2, 3]))
    assert figures == pytest.approx(
        {
            "accuracy": (2 / 3 + 1.5 / 3) / 2,
            "reward": (4 / 3 + 3 / 3) / 2,
            "length": 3.0,
            "truncated": 1 / 6,
            "pass@1": (2 / 3 + 1 / 3) / 2,
            "pass@2": (1 + 2 / 3) / 2,
            "pass@3": 1.0,
            "majority@1": (2 / 3 + 1 / 3) / 2,
            "majority@2": ((1 + 1 / 2 + 1 / 2) / 3 + (0 + 1 / 2 + 1) / 3) / 2,
            "majority@3": (1 + 1 / 2) / 2,
        }
    )


def test_failed_checks_are_reported_and_not_counted_silently_as_wrong() -> None:
    late = {"reward_error": "match took longer", "metrics": {"reward/errors/match/timeout": 1.0}}
    failed = answer(1, 0, "x", 0.0, error="reward: match took longer", **late)
    answers = as_answers(
        [answer(0, 0, "4", 1.0), answer(0, 1, "4", 1.0), failed, answer(1, 1, "y", 1.0)]
    )
    plain = as_answers([answer(0, 0, "4", 1.0)])
    assert dataset_metrics(answers, ["match"], EvalConfig())["misjudged"] == 0.25
    assert "misjudged" not in dataset_metrics(plain, ["match"], EvalConfig())
    figures = evaluation_metrics({"a": plain, "b": answers}, ["match"], EvalConfig())
    assert (figures["eval/b/misjudged"], figures["eval/misjudged"]) == (0.25, 0.125)
    (line,) = failure_lines(answers, reward_errors(answers), "count as wrong")
    assert (
        line
        == "rewards failed on 1 answers (match/timeout 1), 1 of which count as wrong; the first: match took longer"
    )


def test_answers_that_nothing_has_judged_have_no_part_in_accuracy() -> None:
    """The first function that has not abstained decides: `match` on prompt 0, `form` on prompt 1, none on prompt 2."""
    form = {"reward_parts": {"form": 1.0}, "reward": 1.0}
    nothing: dict[str, Any] = {"reward_parts": {}, "abstained": True}
    step = [answer(0, 0, "4", 1.0, 10.0), answer(0, 1, "5", 0.0), answer(0, 2, "5", 0.0, **nothing)]
    step += [
        answer(1, 0, "x", 0.0, **form),
        answer(1, 1, "x", 0.0, **nothing),
        answer(1, 2, "x", 0.0, **nothing),
    ]
    step += [answer(2, sample, "y", 0.0, **nothing) for sample in range(3)]
    labels, config = ["match", "form"], EvalConfig(k=[1, 2])
    figures = dataset_metrics(as_answers(step), labels, config)
    expected = {
        "accuracy": (1 / 2 + 1) / 2,
        "reward": (5 + 1) / 2,
        "abstained": 6 / 9,
        "pass@1": (1 / 2 + 1) / 2,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    assert (figures["pass@2"], figures["length"]) == (1.0, 3.0)
    assert accuracies(as_answers(step), labels) == [0.5, 1.0]
    several = evaluation_metrics({"a": as_answers(step), "b": as_answers(ANSWERS)}, labels, config)
    assert several["eval/abstained"] == pytest.approx(3 / 9)
    with pytest.raises(UserError, match="eval.datasets.tasks: the reward functions abstain"):
        evaluation_metrics({"tasks": as_answers(step[6:])}, labels, config)
    with pytest.raises(UserError, match="no prompt has 2 to"):
        evaluation_metrics({"tasks": as_answers(step[3:])}, labels, config)
    failed = [answer(0, 0, "4", 1.0, 3.0, reward_error="match took longer", reward_parts={"form": 9.0})]
    assert dataset_metrics(as_answers(failed), labels, EvalConfig())["accuracy"] == 0.0


def test_an_answer_in_several_parts_is_one_answer() -> None:
    """Half of the answers are right, not 3/4: three conversations of one answer are right, one of another is wrong."""
    right, wrong = (
        [answer(0, 0, v, r, 9 * r) for v, r in ((None, 0.0), ("5", 0.0), ("4", 1.0))],
        answer(0, 1, "5", 0.0),
    )
    figures = dataset_metrics(as_answers([*right, wrong]), ["match"], EvalConfig(k=[1, 2], samples=2))
    expected = {
        "accuracy": 0.5,
        "reward": 4.5,
        "length": 6.0,
        "truncated": 0.0,
        "pass@1": 0.5,
        "pass@2": 1.0,
    }
    assert figures == pytest.approx(expected | {"majority@1": 0.5, "majority@2": 0.5})
    again = [replace(t, prompt_index=1, finish_reason="length") for t in right]
    assert accuracies(as_answers([*right, wrong, *again]), ["match"]) == [0.5, 1.0]
    assert standard_error(accuracies(as_answers([*right, wrong, *again]), ["match"])) == pytest.approx(
        0.25
    )  # of 0.5 and 1
    assert dataset_metrics(as_answers([*right, wrong, *again]), ["match"], EvalConfig())[
        "truncated"
    ] == pytest.approx(1 / 3)
    again[0].error = "a part of it failed"
    assert dataset_metrics(as_answers(again), ["match"], EvalConfig(k=[1]))["pass@1"] == 0


def test_the_number_of_answers_that_eval_tells_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt has two answers, one of them in two parts."""
    held_out = HeldOut(
        "questions", PromptDataset([Prompt(0, (1,), {})]), SamplingSettings(max_tokens=4), 2
    )
    recipe = make_config(eval={"datasets": {"questions": {"path": "questions.jsonl"}}})
    evaluation = SimpleNamespace(
        config=recipe, held_outs=[held_out], rewards=SimpleNamespace(labels=["match"])
    )
    trajectories = [answer(0, 0, "5", 0.0), answer(0, 0, "4", 1.0), answer(0, 1, "5", 0.0)]
    results = Evaluation.results(evaluation, {"questions": as_answers(trajectories)}) | {"seconds": 1.0}  # type: ignore[arg-type]
    assert (
        results["datasets"]["questions"]["answers"],
        results["datasets"]["questions"]["accuracy"],
    ) == (2, 0.5)
    (table,) = tables(results, width=80)
    make_console().print(table)
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "prompts 1 answers 2 accuracy 0.500 ± 0.000" in printed


def test_the_recipe_defines_which_answers_are_right() -> None:
    answers = as_answers(ANSWERS)
    assert dataset_metrics(answers, ["match"], EvalConfig(k=[1], right_from=0.5))[
        "pass@1"
    ] == pytest.approx(2 / 3)
    # Without reward functions it is the environment's reward that tells.
    assert dataset_metrics(answers, [], EvalConfig(k=[1]))["pass@1"] == pytest.approx(2 / 3)
    assert dataset_metrics(answers, [], EvalConfig())["accuracy"] == pytest.approx((4 / 3 + 3 / 3) / 2)


def test_named_datasets_have_figures_of_their_own_and_weigh_the_same() -> None:
    config = EvalConfig(k=[1])
    answers = as_answers(ANSWERS)
    alone = evaluation_metrics({"all": answers}, ["match"], config)
    assert alone == {
        f"eval/{key}": value for key, value in dataset_metrics(answers, ["match"], config).items()
    }
    both = evaluation_metrics({"all": answers, "first": as_answers(ANSWERS[:3])}, ["match"], config)
    assert both["eval/first/accuracy"] == pytest.approx(2 / 3)
    assert both["eval/all/pass@1"] == alone["eval/pass@1"]
    assert both["eval/accuracy"] == pytest.approx(
        (both["eval/first/accuracy"] + both["eval/all/accuracy"]) / 2
    )


def test_evaluation_leaves_the_global_generators_as_they_were() -> None:
    def draw() -> list[float]:
        return [random.random(), numpy.random.random(), torch.rand(()).item()]

    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    undisturbed = draw()
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    with random_states_kept():
        draw()
    assert draw() == undisturbed
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    with pytest.raises(KeyError), random_states_kept():
        draw()
        raise KeyError
    assert draw() == undisturbed


REWARDS = """
def plain(completion): return 1.0
class Careful:
    def __call__(self, completion): return 1.0
    def extract(self, completion): return completion.split("=")[1] if completion != "none" else None
"""


@pytest.mark.parametrize(
    ("name", "votes"),
    [
        ("exact_match", {" a b\n": "a b"}),
        ("numeric_match", {"so 1,000": "1000.0", "it is 1e3": "1000.0", "nothing": None}),
        ("math_verify", {r"thus $\boxed{1+x}$": "x + 1", "$x+1$": "x + 1", "nothing": None}),
        ("FILE:plain", {" as it stands ": "as it stands"}),
        ("FILE:Careful", {"x=3": "3", "none": None, "no sign": None}),  # the last one raises
    ],
)
def test_votes_are_on_the_values_that_the_first_reward_function_compares(
    tmp_path: Path, name: str, votes: dict[str, str | None]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    functions = [{"name": name.replace("FILE", f"{tmp_path}/rewards.py")}, {"name": "exact_match"}]
    config = RewardConfig.model_validate({"functions": functions, "workers": 1, "timeout_s": 60})

    async def extract(pool: RewardPool) -> dict[str, str | None]:
        return {text: await pool.extract(text) for text in votes}

    with RewardPool(config) as pool:
        assert asyncio.run(extract(pool)) == votes
        errors = pool.take_counts()[f"reward/errors/{pool.labels[0]}"]
    assert errors == (1 if "no sign" in votes else 0)


def test_each_dataset_may_be_sampled_in_its_own_way() -> None:
    datasets = {
        "a": {"path": "a"},
        "b": {"path": "b", "temperature": 0.6, "top_p": 0.9, "max_tokens": 5},
    }
    recipe = make_config(
        eval={"temperature": 0.2, "datasets": datasets}, sampling={"max_tokens": 9, "stop": ["."]}
    )
    both = [evaluation_sampling(recipe, dataset, [2]) for dataset in recipe.eval.datasets.values()]
    assert [(s.temperature, s.top_p, s.max_tokens) for s in both] == [(0.2, 1.0, 9), (0.6, 0.9, 5)]
    assert all(s.stop == ["."] and s.stop_token_ids == [2] for s in both)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"eval": {"k": [1, 4], "datasets": {"a": {"path": "a"}}}},
            "k = 4, but eval.samples = 1: raise it",
        ),
        (
            {
                "eval": {
                    "k": [4],
                    "samples": 8,
                    "datasets": {"a": {"path": "a"}, "b": {"path": "b", "samples": 2}},
                }
            },
            "k = 4, but eval.datasets.b.samples = 2",
        ),
        (
            {"eval": {"datasets": {"a": {"path": "a", "max_tokens": 2000}}}},
            "data.max_prompt_tokens + eval.datasets.a.max_tokens = 3024 is more than",
        ),
    ],
)
def test_impossible_evaluations_are_refused_before_they_start(
    sections: dict[str, Any], sentence: str
) -> None:
    checked = make_config(**sections, reward={"functions": [{"name": "exact_match"}]})
    (problem,) = [*_check_evaluation(checked), *_check_lengths(checked)]
    assert sentence in problem


def test_a_datasets_name_is_part_of_file_and_metric_names() -> None:
    with pytest.raises(ValidationError, match="pattern"):
        make_config(eval={"datasets": {"a/b": {"path": "a"}}})


def test_votes_are_taken_where_asked_for_only() -> None:
    from trainer.rollouts.pool import Pool

    class Scores:
        labels = ()

        async def extract(self, completion: str) -> str:
            return completion.upper()

    tokenizer = small_tokenizer()
    ids = tokenizer("call a tool", add_special_tokens=False)["input_ids"]
    pool = Pool(None, tokenizer, Scores(), None, SimpleNamespace())  # type: ignore[arg-type]
    for voting in (False, True):
        done = Trajectory(0, 0, [4], ids, [1] * len(ids), [0.0] * len(ids), answer_start=5)
        asyncio.run(pool.score(done, SimpleNamespace(), voting))  # type: ignore[arg-type]
        assert done.vote == ("A TOOL" if voting else None)


@pytest.mark.parametrize("special", [True, False])
def test_rewards_see_an_answer_without_the_token_that_ended_it(special: bool) -> None:
    from trainer.rollouts.pool import Pool

    class Scores:
        labels = ("seen",)
        seen: ClassVar[list[str]] = []

        async def score(self, completion: str, **_: Any) -> SimpleNamespace:
            self.seen.append(completion)
            return SimpleNamespace(
                parts={}, failures={}, unusable=False, abstained=False, reward=0.0, error=""
            )

    marks = ("<|endoftext|>", "<s>")
    template = replace(QWEN3, marks=(*marks, "<|im_end|>")) if special else replace(QWEN3, marks=marks)
    tokenizer = replace(
        template, words=("<|im_start|>", "<|im_end|>") if not special else ()
    ).tokenizer()
    ends = end_tokens("no/model", tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(ends.added)) == ["<|im_end|>"]
    pool = Pool(None, tokenizer, Scores(), None, SimpleNamespace(), ends=ends)  # type: ignore[arg-type]
    for text, reason in (("360<|im_end|>", "stop"), ("360", "length"), ("360<|im_end|>24", "length")):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        done = Trajectory(0, 0, [4], ids, [1] * len(ids), [0.0] * len(ids), finish_reason=reason)
        asyncio.run(pool.score(done, Prompt(0, (4,), {})))
        passed = {"length/past_end": float("24" in text)} if reason == "length" else {}
        assert {key: value for key, value in done.metrics.items() if key != "time/reward"} == passed
    assert Scores.seen == ["360", "360", "36024" if special else "360<|im_end|>24"]


def test_evaluation_of_a_model_that_is_not_finite_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(leader: Any) -> Any:
        raise NotFiniteError("the engine of rank 0 sampled a token with a log-probability of nan")

    engine = Engine(EngineSettings("m", 64))
    thread = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(engines.processes, "install_signal_handlers", lambda phase, command: None)
    monkeypatch.setattr(engines.Leader, "start", lambda *_: Leader(engine, thread))
    monkeypatch.setattr(command, "engine_settings", lambda *_: engine.settings)
    asked: Any = SimpleNamespace(config=make_config(run={"device": "cpu"}), answers=answers)
    assert command.evaluate(asked, tmp_path / "eval") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "hotbunk: the engine of rank 0 sampled a token with a log-probability of nan: look at"
    )
    assert not (tmp_path / "eval").exists()
    assert engine.state.memory is Memory.CLOSED
