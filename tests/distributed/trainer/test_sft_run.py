"""Supervised fine-tuning on one and two ranks: both train alike, the loss falls, and the result opens anywhere."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.examples.tasks.arithmetic import write_arithmetic
from tests.support.launch import run_ranks
from trainer.commands import sft
from trainer.commands.exporting import export
from trainer.commands.generate import model_folder
from trainer.commands.report_record import metric_lines, read_record, state
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.run.checkpoint import read_extra
from trainer.run.keeper import check_identity

STEPS = 60


def train(folder: str, name: str, resume: str = "none") -> None:
    """Run `hotbunk sft` on one rank."""
    root = Path(folder)
    values = {
        "run": {"name": name, "output_dir": root / "runs", "device": "cpu"},
        "model": {"path": str(root / "start")},
        "data": {"path": str(root / "data" / "sft.jsonl")},
        "eval": {
            "every": 30,
            "datasets": {"held_out": {"path": str(root / "data" / "sft.jsonl"), "size": 16}},
        },
        "checkpoint": {"every": 30, "resume": resume},
        "tracking": {"wandb": "disabled"},
        "policy": {"dtype": "float32", "schedule": "linear"},
        "batch": {"tokens_per_micro_batch": 300},
        "sft": {
            "steps": STEPS,
            "batch_size": 30,
            "lr": 5e-3,
            "warmup_steps": 5,
            "completion_key": "completion",
        },
    }
    sft.main(TrainConfig.model_validate(values))


def losses(folder: Path, name: str) -> list[float]:
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows if "loss" in json.loads(row)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on one and on two ranks; the folder has both runs."""
    folder = tmp_path_factory.mktemp("sft")
    make_tiny_model(folder / "start", hidden_size=32, intermediate_size=64, layers=2)
    write_arithmetic(folder / "data", sft_size=512)
    for ranks in (1, 2):
        output = run_ranks(train, ranks, timeout=120, arguments=[str(folder), f"on_{ranks}"])
        assert f"the model is in {folder}/runs/on_{ranks}/model" in output
    return folder


def test_two_ranks_train_like_one_and_the_loss_falls(trained: Path) -> None:
    one, two = losses(trained, "on_1"), losses(trained, "on_2")
    assert len(one) == STEPS
    assert two[:20] == pytest.approx(one[:20], abs=1e-3)
    assert sum(one[-10:]) < 0.7 * sum(one[:10])


def test_the_result_opens_in_plain_transformers(trained: Path) -> None:
    folder = trained / "runs" / "on_2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34="}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    answer = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    assert len(answer) == 4 and answer[-1] == tokenizer.eos_token_id and model.dtype == torch.float32


def test_a_resumed_warm_start_ends_with_the_weights_of_an_undisturbed_one(trained: Path) -> None:
    """The run resumes from the checkpoint of step 30, in another folder, on one rank."""
    start = trained / "runs" / "on_1" / "checkpoints" / "step_30"
    output = run_ranks(train, 1, timeout=120, arguments=[str(trained), "resumed", str(start)])
    assert f"resuming from {start}, after step 30" in output
    assert losses(trained, "resumed") == losses(trained, "on_1")[30:]
    weights = [
        (trained / "runs" / name / "model" / "model.safetensors").read_bytes()
        for name in ("on_1", "resumed")
    ]
    assert weights[0] == weights[1]


def test_other_commands_accept_the_folder_of_a_warm_start(trained: Path) -> None:
    """The held-out loss is the one that plain Transformers computes."""
    folder = trained / "runs" / "on_2"
    assert model_folder(str(folder)) == folder / "model"
    # Two ranks saved them
    last, middle = (export(folder / "checkpoints" / f"step_{n}", folder) for n in (STEPS, 30))
    result = (folder / "model" / "model.safetensors").read_bytes()
    assert (
        (last / "model.safetensors").read_bytes()
        == result
        != (middle / "model.safetensors").read_bytes()
    )
    record = read_record(folder)
    assert state(record).startswith(f"{STEPS} steps in")
    assert "eval/loss" in [line[0] for line in metric_lines(record.rows)]
    row = record.rows[-1]
    tokens = row["throughput/update_tokens_per_s_per_device"] * 2 * row["time/update"]
    # The tokens of 30 rows
    assert tokens == pytest.approx(round(tokens), abs=1e-3) and 30 * 8 < tokens < 30 * 40
    assert (
        row["memory/trainer_gib_update"] > 0
        and row["time/eval"] > 0
        and "memory/engine_gib_awake" not in row
    )
    summary = json.loads((folder / "summary.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    total = count = 0.0
    for line in (trained / "data" / "sft.jsonl").read_text().splitlines()[:16]:
        row = json.loads(line)
        messages = [{"role": "user", "content": row["prompt"]}]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([asked + answer])).logits[0].log_softmax(-1)
        total -= sum(
            float(logprobs[len(asked) - 1 + place, token]) for place, token in enumerate(answer)
        )
        count += len(answer)
    assert summary["eval_loss_after"] == pytest.approx(total / count, rel=1e-4)
    before = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert before["train/step"] == 0 and before["eval/loss"] > summary["eval_loss_after"]


def test_train_does_not_resume_from_a_checkpoint_of_sft(trained: Path) -> None:
    path = trained / "runs" / "on_1" / "checkpoints" / "step_60"
    extra = read_extra(path)
    with pytest.raises(UserError, match="saved by hotbunk sft, and hotbunk train cannot resume from it"):
        check_identity(path, extra, {key: extra["identity"][key] for key in ("data", "model")}, [])
    with pytest.raises(UserError, match=r"was trained with sft\.batch_size = 30 \(now 31\)"):
        check_identity(path, extra, extra["identity"] | {"sft.batch_size": 31}, [])
