"""Whole runs with samplers (level 5): ChatLearn's module and both samplers of verl's thread, on real engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.support.real_run import ROOT, Run, write_recipe
from tests.support.rows import read_rows
from trainer.cli import main

STEPS = 2
MODULE = '''
import json
from pathlib import Path

from generation import VLLMModule

class Counting(VLLMModule):
    """Answers in words of its own; notes how it is called."""

    def setup(self):
        super().setup()
        self._note("setup", 0, [])

    def forward_step(self, data, iteration=0):
        return self._note("train", iteration, self._forward_step(data, iteration, eval_mode=False))

    def eval_forward(self, data, iteration=0):
        return self._note("eval", iteration, self._forward_step(data, iteration, eval_mode=True))

    def decode_internal(self, batched_outputs):
        answers = super().decode_internal(batched_outputs)
        sizes = [sum(logprob < -4 for logprob in logprobs) for logprobs in answers["logprobs"]]
        return answers | {"str_outputs": [f"{size} rare" for size in sizes]}

    def _note(self, mode, iteration, outputs):
        tokens = [len(output.outputs[0].token_ids) for output in outputs]
        prompts = [len(output.prompt_logprobs) == len(output.prompt_token_ids) for output in outputs]
        with (Path(__file__).parent / "calls.jsonl").open("a") as file:
            file.write(json.dumps([mode, iteration, tokens, prompts]) + "\\n")
        return outputs

class Prepares(Counting):
    def build_dataset(self, train_prompts, is_eval=False):
        return train_prompts

def rare(completion):
    number, word = completion.split()
    return float(number) + (word != "rare")
'''
ARGS = {
    "seq_length": 64,
    "max_new_tokens": 6,
    "temperature": 1.0,
    "eval_temperature": 0.0,
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "stop_token_list": "no such words",
}


def rollout(folder: Path, name: str = "Counting", **args: Any) -> dict[str, Any]:
    (folder / "counting.py").write_text(MODULE)
    return {"sampler": f"{folder}/counting.py:{name}", "kwargs": {"model_args": ARGS | args}}


def completions(run: Run) -> list[dict[str, Any]]:
    return read_rows(run.folder / "completions.jsonl")


def test_a_module_of_chatlearn_samples_a_whole_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The module's decoded answers are shown and rewarded, it evaluates itself, and its hyper-parameters apply."""
    sections: dict[str, Any] = {
        "run": {"steps": STEPS},
        "eval": {"every": 2, "temperature": 0.0, "max_tokens": 4},
    }
    reward = {"functions": [{"name": f"{tmp_path}/counting.py:rare"}]}
    recipe = write_recipe(tmp_path, tiny_model(), rollout=rollout(tmp_path), reward=reward, **sections)
    run = Run(recipe, ranks=1, preloaded=True)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    calls = read_rows(tmp_path / "calls.jsonl")
    assert [(mode, iteration) for mode, iteration, *_ in calls] == [
        ("setup", 0),
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    expected = {"train": [6] * 16, "eval": [4] * 16}  # EOS is ignored
    for mode, _, tokens, prompts in calls[1:]:
        assert tokens == expected[mode] and all(prompts)
    rows = completions(run)
    assert rows and all(row["text"] == f"{row['reward']:g} rare" for row in rows)
    assert len({row["text"] for row in rows}) > 1
    gaps = [row["gap/max"] for row in run.rows() if "gap/max" in row]
    assert len(gaps) == STEPS and max(gaps) <= 1e-4


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        (
            "Counting",
            {"temperature": 0.7},
            "temperature is 0.7, but in training sampling.temperature decides",
        ),
        (
            "Prepares",
            {},
            "Prepares.build_dataset is not called in training, whose prompts come from data.path",
        ),
    ],
)
def test_module_settings_that_would_be_ignored_are_refused_early(
    name: str,
    args: dict[str, Any],
    sentence: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), rollout=rollout(tmp_path, name, **args))
    assert main(["train", str(recipe), "--check"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and f"rollout.sampler: {sentence}" in errors, errors


def test_samplers_of_verls_thread_train_for_two_steps(tiny_model: TinyModel, tmp_path: Path) -> None:
    """One-shot sampling equals a run without a sampler, token by token; chats call functions."""
    recipe = write_recipe(tmp_path, tiny_model(), run={"steps": STEPS}, engine={"max_model_len": 512})
    oneshot, calls = (
        "generation:OneShotRolloutSampler",
        f"{ROOT}/scripts/examples/calculator.py:calculate",
    )
    words = {
        "plain": [],
        "oneshot": ["--rollout.sampler", oneshot],
        "calling": [
            "--rollout.sampler",
            "generation:FnCallRolloutSampler",
            "--rollout.kwargs",
            json.dumps({"functions": [calls], "max_turns": 2}),
        ],
    }
    runs = {name: Run(recipe, *more, ranks=1, name=name, preloaded=True) for name, more in words.items()}
    for run in runs.values():
        assert run.wait() == 0, run.output()
        assert [row["sync/version"] for row in run.rows()] == [1.0, 2.0]
        assert max(row["gap/max"] for row in run.rows()) <= 1e-4
    answers = {
        name: [(row["prompt"], row["text"], row["reward"]) for row in completions(run)]
        for name, run in runs.items()
    }
    assert answers["oneshot"] == answers["plain"]
    # The chats list the functions
    assert all("calculate" in prompt for prompt, *_ in answers["calling"])
    assert all("calculate" not in prompt for prompt, *_ in answers["plain"])
