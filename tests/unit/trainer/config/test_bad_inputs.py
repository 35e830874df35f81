"""Everything a user is likely to get wrong ends in one sentence and exit code 2, before any model loads."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.conftest import ROOT
from tests.support.refusals import refusal
from tests.support.released_models import write_weights
from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.cli import main
from trainer.config.model_file import model_config
from trainer.errors import UserError

RECIPE = """
run: {{device: cpu, output_dir: {0}/runs}}
model: {{path: {0}/model}}
data: {{path: {0}/data.jsonl, max_prompt_tokens: 100}}
sampling: {{max_tokens: 100}}
engine: {{max_model_len: 256}}
eval: {{every: 1, datasets: {{same: {{path: {0}/data.jsonl}}}}}}
batch: {{prompts_per_step: 4}}
reward: {{functions: [{{name: exact_match}}]}}
"""
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128}
REWARDS = """
def good(completion, *, answer): return 1.0
def greedy(completion, *, teacher): return 1.0
def frank(completion, *, row): return 1.0
def trl(completions, **kwargs): return [1.0]
def trl_asks(completions, answer, **kwargs): return [1.0]
"""


MODEL = {"model_type": "qwen2", "max_position_embeddings": 512, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with weights of the folder's model, which takes no space."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_weights(folder)
    return folder / "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a valid recipe and all the files it names."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(tmp_path))
    write_rows(tmp_path / "data.jsonl", [{"prompt": str(n), "answer": n} for n in range(8)])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    os.link(weights, tmp_path / "model" / "model.safetensors")
    small_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    return tmp_path


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    """Overwrites a file of the folder."""

    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


def other_model(sizes: dict[str, Any]) -> Callable[[Path], None]:
    """Replace the folder's model by another one, with its weights."""

    def spoil(folder: Path) -> None:
        (folder / "model" / "config.json").write_text(json.dumps(sizes))
        (folder / "model" / "model.safetensors").unlink()
        write_weights(folder / "model")

    return spoil


def remove(name: str) -> Callable[[Path], None]:
    """Remove a file from the folder."""
    return lambda folder: (folder / name).unlink()


def reward(name: str, **kwargs: str) -> list[str]:
    """Return the override that names one reward function."""
    return ["--reward.functions", json.dumps([{"name": name, "kwargs": kwargs}])]


def without_held_out(folder: Path) -> None:
    """Remove the evaluation datasets from the recipe."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(re.sub(r"eval: .*", "eval: {every: 1}", recipe.read_text()))


def nothing(folder: Path) -> None:
    """Leave the folder as it is."""


# What is done to the folder, what is added to the command line ({0}: the folder), and what the sentence says.
BAD: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "no recipe": (remove("recipe.yaml"), [], "recipe.yaml: no such recipe file"),
    "broken YAML": (rewrite("recipe.yaml", "model: {path: x\ndata: ["), [], "is not valid YAML"),
    "recipe is a list": (rewrite("recipe.yaml", "- model\n"), [], "must be a mapping of keys"),
    "recipe lacks the model": (rewrite("recipe.yaml", "data: {path: x}"), [], "model is missing"),
    "unknown key": (nothing, ["--policy.learning_rate", "1e-5"], "did you mean policy.lr?"),
    "unknown option": (nothing, ["--dryrun"], "unrecognized arguments: --dryrun"),
    "override without value": (nothing, ["--run.steps"], "--run.steps needs a value"),
    "wrong type": (
        nothing,
        ["--run.steps", "many"],
        "run.steps is 'many', but should be a valid integer",
    ),
    "negative learning rate": (
        nothing,
        ["--policy.lr=-1e-5"],
        "policy.lr is -1e-05, but should be at least 1e-20",
    ),
    "unknown backend": (
        nothing,
        ["--policy.backend", "megatron"],
        "policy.backend is 'megatron', but should be 'fsdp'",
    ),
    "name with a slash": (nothing, ["--run.name", "a/b"], "run.name is 'a/b'"),
    "unset environment variable": (
        nothing,
        ["--data.path", "${oc.env:HOTBUNK_TEST_NO}"],
        "'HOTBUNK_TEST_NO' not found",
    ),
    "groups of one": (nothing, ["--algorithm.group_size", "1"], "algorithm.group_size is 1"),
    "batch over ranks": (
        nothing,
        ["--batch.prompts_per_step", "3", "--algorithm.group_size", "3"],
        "= 9 must be divisible by the number of ranks (2)",
    ),
    "batch over updates": (
        nothing,
        ["--batch.updates_per_step", "50"],
        "but each of batch.updates_per_step = 50 updates needs a prompt of its own",
    ),
    "too long for the engine": (
        nothing,
        ["--sampling.max_tokens", "200"],
        "is more than engine.max_model_len = 256",
    ),
    "too long for the model": (
        nothing,
        ["--engine.max_model_len", "1024"],
        "more than the 512 positions of the model",
    ),
    "tensor parallel over ranks": (
        nothing,
        ["--engine.tensor_parallel_size", "4"],
        "the number of ranks = 2 must be",
    ),
    "nucleus sampling": (
        nothing,
        ["--sampling.top_p", "0.9"],
        "sampling.top_p is 0.9, but when sampling is truncated",
    ),
    "top-k sampling": (
        nothing,
        ["--sampling.top_k", "20"],
        "sampling.top_k is 20, but when sampling is truncated",
    ),
    "greedy training": (nothing, ["--sampling.temperature", "0"], "sampling.temperature is 0"),
    "no GPU": (
        nothing,
        ["--run.device", "cuda"],
        "run.device is cuda, but this machine shows no NVIDIA GPU",
    ),
    "allocator without IPC": (
        nothing,
        ["--run.device", "cuda"],
        "PYTORCH_CUDA_ALLOC_CONF sets backend:cudaMallocAsync",
    ),
    "no such model": (nothing, ["--model.path", "{0}/absent"], "model.path: there is no folder"),
    "model without config": (remove("model/config.json"), [], "holds no config.json"),
    "model with broken config": (rewrite("model/config.json", "{"), [], "config.json is not valid JSON"),
    "model without weights": (remove("model/model.safetensors"), [], "holds no *.safetensors"),
    "model without tokenizer": (
        nothing,
        ["--model.tokenizer", "{0}"],
        "no tokenizer can be loaded from",
    ),
    "no such data": (
        nothing,
        ["--data.path", "{0}/absent.jsonl"],
        "data.path: there is no file or folder",
    ),
    "empty data": (rewrite("data.jsonl", ""), [], "data.jsonl holds no rows"),
    "broken data": (
        rewrite("data.jsonl", '{"prompt": "a", "ans'),
        [],
        "data.jsonl (split train) cannot be read",
    ),
    "row without prompt": (
        rewrite("data.jsonl", '{"prompt": "a", "answer": 1}\n{"answer": 1}\n'),
        [],
        "row 1 of {0}/data.jsonl has neither 'prompt' nor 'messages'",
    ),
    "no prompt column": (
        nothing,
        ["--data.prompt_key", "question"],
        "has only the columns prompt, answer",
    ),
    "no answer column": (
        nothing,
        ["--data.answer_key", "solution"],
        "data.answer_key = 'solution' is not a column or a field of one",
    ),
    "all prompts too long": (nothing, ["--data.max_prompt_tokens", "2"], "all 8 prompts of"),
    "nothing to evaluate on": (without_held_out, [], "eval.every is set, but there is nothing"),
    "no reward": (nothing, ["--reward.functions", "[]"], "reward.functions is empty"),
    "unknown reward": (
        nothing,
        reward("exact_mach"),
        "reward 'exact_mach' is unknown: did you mean exact_match?",
    ),
    "reward file missing": (nothing, reward("{0}/absent.py:f"), "there is no file {0}/absent.py"),
    "reward function missing": (
        nothing,
        reward("{0}/rewards.py:god"),
        "has no 'god'; did you mean good?",
    ),
    "reward fails to import": (
        nothing,
        reward("{0}/broken.py:f"),
        "{0}/broken.py, line 1, imports a_module_that_is_not_there, which is neither installed nor in {0}: install",
    ),
    "reward asks for too much": (nothing, reward("{0}/rewards.py:greedy"), "asks for 'teacher'"),
    "reward gets too much": (
        nothing,
        reward("{0}/rewards.py:good", depth="3"),
        "takes no argument 'depth'",
    ),
    "invalid regex": (
        nothing,
        reward("format_regex", pattern="(["),
        "pattern '([' is not a regular expression",
    ),
    "tool missing": (
        nothing,
        ["--rollout.tools", "[{0}/rewards.py:god]"],
        "has no 'god'; did you mean good?",
    ),
    "no rollout": (
        nothing,
        ["--rollout.custom", "{0}/rewards.py:good"],
        "is not a rollout: write `async def rollout",
    ),
    "two ways to roll out": (nothing, ["--rollout.custom=a:b", "--rollout.sampler=c:d"], "are both set"),
    "adapters beside nothing": (
        nothing,
        ["--lora.rank", "4", "--lora.target_modules", "[c_attn]", "--lora.sync", "merged"],
        "lora.target_modules does not fit Qwen2ForCausalLM",
    ),
    "routers that cannot be replaced": (
        other_model({"model_type": "phimoe", "num_local_experts": 4} | SMALL),
        ["--model.routes", "recorded"],
        "model.routes: model.layers.0.mlp",
    ),
    "attention in its own way": (
        other_model({"model_type": "stablelm"} | SMALL),
        [],
        "has its own attention, which does not take the ends of sequences: set it to false",
    ),
    "positions that depend on neighbours": (
        rewrite("model/config.json", json.dumps({"model_type": "qwen2", "rope_scaling": LONG} | SMALL)),
        [],
        "beyond 128 tokens the longrope positions of model.path depend on the longest sequence of a batch: lower it",
    ),
    "resume from nothing": (nothing, ["--resume", "{0}/model"], "is not a complete checkpoint"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_sentence(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, arguments, expected = BAD[case]
    spoil(folder)
    if case != "no GPU":
        monkeypatch.setattr("trainer.config.machine.cuda_problem", lambda: None)
    if case == "allocator without IPC":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    words = [word.replace("{0}", str(folder)) for word in arguments]
    sentence = refusal(capsys, "train", str(folder / "recipe.yaml"), "--dry-run", *words)
    assert expected.replace("{0}", str(folder)) in sentence and capsys.readouterr().out == ""


def test_rollouts_are_looked_at_before_there_are_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher checks with --check: one sentence instead of a traceback of each rank."""
    assert (
        main(["train", str(folder / "recipe.yaml"), "--check", "--rollout.tools", "[no.module:f]"]) == 2
    )
    assert "'no.module:f' cannot be loaded" in capsys.readouterr().err
    assert main(["train", str(folder / "recipe.yaml"), "--check"]) == 0


@pytest.mark.parametrize(
    ("name", "asks"), [("good", True), ("trl_asks", True), ("frank", False), ("trl", False)]
)
def test_rows_need_an_answer_only_where_a_reward_takes_it(
    name: str, asks: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.jsonl").write_text('{"prompt": "1"}\n' * 8)
    words = ["train", str(folder / "recipe.yaml"), "--dry-run", *reward(f"{folder}/rewards.py:{name}")]
    assert main(words) == (2 if asks else 0)
    assert ("data.answer_key = 'answer' is not a column" in capsys.readouterr().err) == asks
    # What is asked for by name has to be there
    assert main([*words, "--data.answer_key", "solution"]) == 2


@pytest.mark.parametrize("mode", ["--check", "--dry-run"])
def test_logits_processors_are_looked_at_before_anything_is_loaded(
    mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """test_sampler.py has what else may be wrong with one."""
    words = ["train", str(folder / "recipe.yaml"), mode, "--engine.logits_processors", "['no.module:f']"]
    complaint = "engine.logits_processors: 'no.module:f' cannot be loaded"
    assert complaint in refusal(capsys, *words) and capsys.readouterr().out == ""


def test_good_input_is_summed_up_and_its_recipe_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", str(folder / "recipe.yaml"), "--dry-run", *reward(f"{folder}/rewards.py:good")])
        == 0
    )
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "[hotbunk] prompts have from 18 to 18 tokens, median 18, p95 18",
        "[hotbunk] the first prompt is '<user>0<assistant>'",
        "[hotbunk] eval.datasets.same has 8 prompts of the training data: rows 0, 1, 2 and 5 more",
    ]
    (folder / "again.yaml").write_text(captured.out)
    assert main(["train", str(folder / "again.yaml"), "--dry-run"]) == 0
    recipes = [text.partition("# all checked")[0] for text in (captured.out, capsys.readouterr().out)]
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize(("command", "local_rank"), [("train", None), ("sft", "0"), ("train", "1")])
def test_a_run_reports_a_mistake_once_on_each_machine(
    folder: Path, command: str, local_rank: str | None
) -> None:
    rank = {"LOCAL_RANK": local_rank or "", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    environment = os.environ | (rank if local_rank else {"WORLD_SIZE": "1"})
    words = [
        sys.executable,
        "-m",
        "trainer",
        command,
        str(folder / "recipe.yaml"),
        "--model.path",
        "/absent",
    ]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 2
    assert result.stderr == (
        "" if local_rank == "1" else "hotbunk: model.path: there is no folder /absent\n"
    )
    assert not (folder / "runs").exists()


def test_variables_that_another_launcher_has_left_silence_no_command(folder: Path) -> None:
    """As a PyTorchJob's pod, or a shell that was started within a rank, has them."""
    left = {"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "2", "GROUP_RANK": "1", "PET_NNODES": "2"}
    recipe = str(folder / "recipe.yaml")
    for words in (["-m", "trainer", "train"], ["-m", "hotbunk", "train"], ["-m", "trainer", "plan"]):
        command = [sys.executable, *words, recipe, "--model.path", "/absent"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | left)
        assert result.returncode == 2
        lines = result.stderr.splitlines()
        assert lines.pop() == "hotbunk: model.path: there is no folder /absent"
        ignored = "[hotbunk] RANK=3 and WORLD_SIZE=2 are ignored, since torchrun has not set them: a run on 2 nodes"
        assert [line.startswith(ignored) for line in lines] == [True] * ("train" in words)


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/step_40"])
def test_a_run_given_for_a_model_names_its_model(part: str, tmp_path: Path) -> None:
    for folder in ("model", "checkpoints/step_40"):
        (tmp_path / "base" / folder).mkdir(parents=True)
    (tmp_path / "base" / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        model_config(str(tmp_path / "base" / part))
    assert str(refused.value).endswith(
        f"is a run, or a part of one: name its model, {tmp_path}/base/model"
    )
