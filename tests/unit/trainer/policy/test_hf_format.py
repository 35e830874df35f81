"""A checkpoint is loaded as Transformers loads it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.families import make_family
from trainer.config.schema import ModelConfig
from trainer.policy.hf_format import build_meta_model, load_sharded

CPU = torch.device("cpu")


def test_saved_buffers_without_dimensions_are_loaded(tmp_path: Path) -> None:
    """Apertus saves two numbers of each activation function."""
    make_family("apertus", tmp_path)
    model = build_meta_model(tmp_path, ModelConfig(path=str(tmp_path)), torch.float32, CPU)
    load_sharded(model, tmp_path, CPU)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert any(not tensor.shape for tensor in expected.values())
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
