"""Layers whose activations are recomputed: gradients against layers that keep everything, and products counted."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from tests.support.families import make_family
from tests.unit.trainer.commands.test_plan import recipe
from tests.unit.trainer.policy.test_fused import distance, make_tiny, passed
from tests.unit.trainer.policy.test_shared_prefixes import CASES, computed, cut, make_module
from trainer.config.schema import LoraConfig
from trainer.errors import UserError
from trainer.estimates.memory import activation_bytes, product_bytes
from trainer.estimates.model_sizes import model_sizes
from trainer.policy.fused import Fused, fuse
from trainer.policy.hf_format import checkpoint_activations
from trainer.policy.lora import add_adapters

FAMILIES = ["qwen2", "llama", "gemma3", "qwen3_moe", "qwen3_5", "qwen3_next", "granite4", "phi3"]
FUSED = ["qwen3_moe", "qwen3_5"]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Products(TorchDispatchMode):
    """Counts products with weights and calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0  # of results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        results = func(*args, **(kwargs or {}))
        if name in ("mm", "addmm") or name.startswith("_scaled_dot_product"):
            self.calls[name] += 1
            self.bytes += sum(tensor.nbytes for tensor in tree_leaves(results))
        return results


def test_products_and_attention_are_computed_once() -> None:
    """A layer has seven matrices; what the last of them results in is not needed, so recomputation leaves it out."""
    counts = {}
    for layers in ("none", "products", "full"):
        model = make_tiny(torch.float32)
        model.set_attn_implementation("sdpa")
        checkpoint_activations(model, layers)  # type: ignore[arg-type]
        with Products() as products:
            passed(model)
        counts[layers] = products.calls
    number = model.config.num_hidden_layers
    assert counts["products"] == counts["none"]
    again = counts["full"] - counts["none"]
    assert again == {"mm": 6 * number, "_scaled_dot_product_flash_attention_for_cpu": number}


def test_the_plan_has_the_bytes_of_kept_results(tiny_qwen2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)
    with Products() as products, torch.no_grad():
        model.model(input_ids=torch.zeros(2, 24, dtype=torch.int64), use_cache=False)
    planned = {}
    for layers in ("none", "products", "full"):
        config = recipe(tiny_qwen2, policy={"activation_checkpointing": layers, "dtype": "float32"})
        sizes = model_sizes(config, config.model.path)
        planned[layers] = activation_bytes(config, config.policy, sizes, 1)
    per_token = product_bytes(config.policy, sizes)
    assert sizes.layers * 48 * per_token == products.bytes
    assert planned["full"][1] < planned["products"][1] < planned["none"][1]
    # What is kept of the layer in backward is not there twice
    kept = planned["products"][1] - planned["full"][1]
    assert planned["full"][3] - planned["products"][3] == pytest.approx(kept / sizes.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_gradients_of_kept_activations(family: str, tmp_path: Path) -> None:
    model = make_family(family, tmp_path).float()
    plain = passed(model)
    checkpoint_activations(model, "products")
    assert_equal(passed(model), plain)
    if family in FUSED:
        fuse(model, partial(Fused, backend="aot_eager"))
        with torch._dynamo.config.patch(disable=False, fail_on_recompile_limit_hit=True):
            assert distance(passed(model), plain) < 5e-6


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    model = make_family("gpt_oss", tmp_path)
    with pytest.raises(UserError, match="experts that have biases, .*: set it to every_second or full"):
        checkpoint_activations(model, "products")


@pytest.mark.parametrize("kind", ["qwen2", "soft caps", "sinks"])
def test_common_beginnings_have_the_gradients_of_kept_activations(kind: str) -> None:
    samples = CASES["five levels"]
    module = make_module(kind)
    plain = computed(module, cut(samples), samples)
    checkpoint_activations(module.model, "products")
    assert_equal(computed(module, cut(samples), samples), plain)


def test_adapters_have_the_gradients_of_kept_activations() -> None:
    model = make_tiny(torch.float32)
    add_adapters(model, LoraConfig(rank=2), torch.float32, "cpu")
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    plain = passed(model)
    checkpoint_activations(model, "products")
    assert_equal(passed(model), plain)
