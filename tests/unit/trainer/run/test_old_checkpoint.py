"""A checkpoint that commit 8cc548e wrote, kept as it is: whatever changes, runs of before can be continued.

tests/data/checkpoint_8cc548e/step_3: `checkpoint.save` after three updates of the model below, by FSDP2 on one rank.
"""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from sharding.send.source import local_part
from tests.conftest import ROOT
from trainer.build import build_models
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.schema import TrainConfig
from trainer.distributed import destroy_process_group, init_process_group
from trainer.run import checkpoint
from trainer.run.keeper import find_checkpoint, run_identity

SAVED = ROOT / "tests" / "data" / "checkpoint_8cc548e" / "step_3"
WEIGHTS_AND_MOMENTS = "5aa06aa47aad0a53ec4d0e53055fa5a5fd9235d987592add3c8ab619a6875ba2"
DRAWN = (0.23796462709189137, 0.9670298390136767, 0.8302518725395203)  # by Python, NumPy and torch, after it was saved


@pytest.fixture
def group() -> Iterator[None]:
    init_process_group(60, device="cpu")
    yield
    destroy_process_group()


def test_a_checkpoint_of_8cc548e_is_continued(group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "layers": 1, "heads": 2, "kv_heads": 1}
    model = make_tiny_model(tmp_path / "model", **sizes)  # its weights are replaced by those of the checkpoint
    recipe = {
        "model": {"path": str(model)},
        "data": {"path": "x"},
        "policy": {"dtype": "float32"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "run": {"device": "cpu", "output_dir": str(tmp_path)},
        "checkpoint": {"resume": str(SAVED), "resume_anyway": ["model", "tokenizer"]},
    }
    config = TrainConfig.model_validate(recipe)
    identity = run_identity(config, "rows", AutoTokenizer.from_pretrained(model))
    path, state = find_checkpoint(config, identity)
    assert path == SAVED
    assert (state.step, state.prompts, state.seconds, state.syncs_verified) == (3, 96, 1.5, 3)
    assert (state.eval_before, state.eval_after) == (0.25, 0.5)
    said = f"[hotbunk] {SAVED} is of an older version, without digests: only its form was checked\n"
    assert said in capsys.readouterr().err

    policy, _, _ = build_models(config, torch.device("cpu"))
    checkpoint.load(path, {"policy": policy})
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == DRAWN
    digest, loaded = hashlib.sha256(), policy.state_dict()
    for section in ("model", "optimizer"):
        for name in sorted(loaded[section]):
            digest.update(local_part(loaded[section][name]).contiguous().numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_AND_MOMENTS
    assert policy.version == 3 and loaded["counters"].tolist() == [3, 0]
