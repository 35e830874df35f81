"""Supervised fine-tuning end to end on two ranks: the loss falls, ranks do not change it, the result opens anywhere."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.arithmetic import write_arithmetic
from tests.distributed.launch import run_ranks
from trainer.commands import sft
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.schema import TrainConfig

STEPS = 60


def train(folder: str, name: str) -> None:
    """What each rank runs."""
    root = Path(folder)
    values = {
        "run": {"name": name, "output_dir": root / "runs", "device": "cpu"},
        "model": {"path": str(root / "start")},
        "data": {"path": str(root / "data" / "sft.jsonl")},
        "policy": {"dtype": "float32", "schedule": "linear"},
        "batch": {"tokens_per_micro_batch": 300},
        "sft": {"steps": STEPS, "batch_size": 30, "lr": 5e-3, "warmup_steps": 5, "completion_key": "completion"},
    }
    sft.main(TrainConfig.model_validate(values))


def losses(folder: Path, name: str) -> list[float]:
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_tiny_model(folder / "start", hidden_size=32, intermediate_size=64, layers=2)
    write_arithmetic(folder / "data", sft_size=512)
    for ranks in (1, 2):
        run_ranks(train, ranks, timeout=120, arguments=[str(folder), f"on_{ranks}"])
    return folder


@pytest.mark.covers("P14")
def test_two_ranks_train_like_one(trained: Path) -> None:
    one, two = losses(trained, "on_1"), losses(trained, "on_2")
    assert len(one) == STEPS
    assert two[:20] == pytest.approx(one[:20], abs=1e-3)
    assert sum(one[-10:]) < 0.7 * sum(one[:10])


@pytest.mark.covers("P20")
def test_the_result_opens_in_plain_transformers(trained: Path) -> None:
    folder = trained / "runs" / "on_2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34="}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    answer = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    assert len(answer) == 4 and answer[-1] == tokenizer.eos_token_id and model.dtype == torch.float32
