"""A checkpoint is loaded as Transformers loads it, or refused in a sentence."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import make_family
from trainer.config.schema import ModelConfig
from trainer.errors import UserError
from trainer.model_structure import decoder
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


def test_the_layers_of_llama_4_are_found(tmp_path: Path) -> None:
    """Its class names another attribute for its trunk than it has."""
    make_family("llama4", tmp_path)
    model = build_meta_model(tmp_path, ModelConfig(path=str(tmp_path)), torch.float32, CPU)
    assert len(decoder(model).layers) == 2 and model.base_model is model.model


def test_an_attention_that_transformers_lacks_is_refused_with_a_remedy(tmp_path: Path) -> None:
    make_family("deepseek_v4", tmp_path)
    with pytest.raises(UserError, match="has no sdpa for DeepseekV4ForCausalLM: set it to eager"):
        build_meta_model(tmp_path, ModelConfig(path=str(tmp_path)), torch.float32, CPU)
