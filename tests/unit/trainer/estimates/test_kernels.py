"""Kernels that are counted on tensors without data: against whole trunks, against counts by hand, and in the plan."""

import json
from dataclasses import replace
from pathlib import Path

import common
import pytest
import torch

from tests.support.families import make_family
from tests.support.released_models import write_config
from tests.unit.trainer.commands.test_plan import recipe
from tests.unit.trainer.estimates.test_cost import BILLION, GPU, LENGTHS, by_name, config
from trainer.estimates import kernels
from trainer.estimates.gpus import GPUS
from trainer.estimates.kernels import KernelCounts, PassCount, count_kernels
from trainer.estimates.model_sizes import model_sizes
from trainer.estimates.time import _BLOCK_KERNELS, _LOGIT_BYTES, LAUNCH, Lengths, step_costs
from trainer.model_structure import decoder
from trainer.policy.fused import fuse
from trainer.policy.hf_format import build_meta_model
from trainer.policy.logprobs import block_shape, cuda_block_elements, target_logprobs

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
"""Sizes of Qwen3-0.6B, where they differ from those of Qwen3-4B."""

COUNTED = (
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "google/gemma-3-4b-it",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3-30B-A3B",
)


def layer(name: str, folder: Path, compile: bool | None) -> tuple[float, float, float]:
    """Return kernels, products and gigabytes of a layer of a released model, which is recomputed, at 16,384 tokens."""
    if name == "Qwen/Qwen3-0.6B":
        write_config("Qwen/Qwen3-4B", folder, **SMALL)
    else:
        write_config(name, folder)
    plan = recipe(folder, policy={"dtype": "bfloat16", "compile": compile})
    counts = count_kernels(plan, str(folder), rows=16, length=1024)
    config = json.loads((folder / "config.json").read_text())
    layers = (config.get("text_config") or config)["num_hidden_layers"]
    passes = (counts.forward.times(2) + counts.backward).times(1 / layers)
    return passes.kernels, passes.products, 16_384 * passes.token_bytes / 1e9


def test_a_layer_of_qwen3_4b_launches_what_was_counted_by_hand(tmp_path: Path) -> None:
    """Forward: 4 norms of 7 kernels, 7 products, 14 of rotary embeddings, SiLU, its product, 2 sums, attention."""
    norms, products, rotary = 4 * 7, 7, 14
    write_config("Qwen/Qwen3-4B", tmp_path)
    plan = recipe(tmp_path, policy={"dtype": "bfloat16", "compile": False})
    counts = count_kernels(plan, str(tmp_path), rows=16, length=1024)
    assert counts.forward.kernels / 36 == norms + products + rotary + 2 + 2 + 1
    assert counts.forward.products / 36 == products


def test_a_fused_layer_of_qwen3_4b_moves_what_follows_from_its_shapes(
    tmp_path: Path,
) -> None:
    """The same by hand: bytes of bfloat16 per token, those of a norm with the sums for its weight."""
    hidden, inner, queries, keys = 2560, 9728, 4096, 1024
    # 4 norms, 7 products, 2 of rotary embeddings, 1 of the gate, 2 sums, attention
    forward = 4 + 7 + 2 + 1 + 2 + 1
    # Norms with their weights' sums, products, 2, 1, residuals and sums of operands' gradients, attention
    backward = 4 * 3 + 14 + 2 + 1 + 5 + 1
    normed = 2 * hidden + queries + keys
    rotated = queries + keys
    attention = 2 * queries + 2 * keys
    rotary = 2 * rotated + 2 * 128
    values = 2 * normed + rotary + 3 * inner + 2 * 3 * hidden + attention
    gradients = 5 * normed + rotary + 5 * inner + 5 * 3 * hidden + 2 * attention
    kernels, products, gigabytes = layer("Qwen/Qwen3-4B", tmp_path, None)
    assert (kernels, products) == (2 * forward + backward, 28)
    assert gigabytes == pytest.approx(16_384 * 2 * (2 * values + gradients) / 1e9, rel=0.02)


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_the_benchmarks_page(name: str, tmp_path: Path) -> None:
    (kernels, _, gigabytes), (fused_kernels, _, fused_gigabytes) = (
        layer(name, tmp_path, compile) for compile in (False, None)
    )
    counts = f"{kernels:.0f} → {fused_kernels:.0f} | {gigabytes:.1f} → {fused_gigabytes:.1f}"
    assert f"| {name} | {counts} |" in Path("docs/benchmarks.md").read_text()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "qwen3_next", "gpt_oss"])
def test_the_sum_over_kinds_of_layers_is_the_count_of_the_whole_trunk(
    tmp_path: Path, family: str
) -> None:
    make_family(family, tmp_path)
    plan = recipe(tmp_path, policy={"dtype": "bfloat16"})
    counts = count_kernels(plan, str(tmp_path), rows=2, length=64)
    model = build_meta_model(tmp_path, plan.model, torch.bfloat16, torch.device("meta"))
    model.config.get_text_config()._attn_implementation = kernels._COUNTED_ATTENTION
    fuse(model, kernels.as_one_kernel)
    layers = decoder(model).layers
    entire = kernels._trunk_counts(model, layers, 2, 64)
    none = kernels._trunk_counts(model, layers[:0], 2, 64)
    assert counts.forward.kernels == entire.forward.kernels - none.forward.kernels > 0
    assert counts.backward.kernels == entire.backward.kernels - none.backward.kernels > 0
    assert counts.forward.token_bytes == pytest.approx(
        entire.forward.token_bytes - none.forward.token_bytes
    )
    assert counts.backward.token_bytes == pytest.approx(
        entire.backward.token_bytes - none.backward.token_bytes
    )


def test_narrow_factors_of_adapters_count_by_their_bytes(tmp_path: Path) -> None:
    write_config("Qwen/Qwen3-4B", tmp_path)
    bare = count_kernels(
        recipe(tmp_path, policy={"dtype": "bfloat16"}), str(tmp_path), rows=4, length=1024
    )
    lora = recipe(tmp_path, policy={"dtype": "bfloat16"}, lora={"rank": 16})
    adapted = count_kernels(lora, str(tmp_path), rows=4, length=1024)
    # Each of seven layers multiplies twice, and scales and adds the result.
    assert adapted.forward.kernels - bare.forward.kernels == 36 * 7 * 4
    assert adapted.forward.token_bytes > bare.forward.token_bytes


@pytest.mark.parametrize("fused", [False, True])
def test_bytes_and_kernels_of_the_head_are_those_of_its_code(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small hidden size and no bytes of products, what is left is the traffic of logits.

    Fused, each pass reads them once, and the second writes their gradients: 6 bytes of bfloat16.
    """
    monkeypatch.setattr(kernels, "WIDE", 0)
    tokens, hidden_size, vocabulary = 8192, 64, 65_536
    hidden = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(
        vocabulary, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    block = block_shape(cuda_block_elements(80 << 30), vocabulary)
    with kernels.KernelCounter() as counter:
        make = {"make": kernels.as_one_kernel} if fused else {}
        logprobs, _ = target_logprobs(hidden, weight, None, targets, block=block, **make)
        torch.autograd.grad([logprobs], [hidden, weight], [torch.empty_like(logprobs)])
    blocks = tokens * vocabulary / (block[0] * block[1])
    assert counter.bytes / tokens / vocabulary == pytest.approx(_LOGIT_BYTES[fused], rel=0.05)
    assert counter.kernels / blocks == pytest.approx(_BLOCK_KERNELS[fused], rel=0.05)
    assert 6 < _LOGIT_BYTES[True] < 30


def test_a_device_waits_for_the_host_where_kernels_are_many_and_short(tiny_qwen2: Path) -> None:
    plan = config(tiny_qwen2)  # four micro-batches on four ranks, all layers recomputed
    counts = KernelCounts(PassCount(1000, 0.0), PassCount(2000, 0.0))
    few = by_name(step_costs(plan, replace(BILLION, kernels=counts), 4, GPU, LENGTHS))[
        "update: launches"
    ]
    blocks = 38_400 * 100_000 / cuda_block_elements(80 << 30)
    assert few.seconds == 0.0
    assert few.hidden == pytest.approx(LAUNCH * (7 * 4000 + blocks * _BLOCK_KERNELS[True]))
    many = replace(BILLION, kernels=KernelCounts(PassCount(1e6, 0.0), PassCount(0.0, 0.0)))
    costs = by_name(step_costs(plan, many, 4, GPU, LENGTHS))
    working = costs["update: products"].seconds + costs["update: elementwise"].seconds
    assert costs["update: launches"].hidden == pytest.approx(working)
    assert costs["update: launches"].seconds == pytest.approx(
        LAUNCH * (7 * 2e6 + blocks * _BLOCK_KERNELS[True]) - working
    )


def test_the_one_measured_update_takes_at_most_twice_the_planned_seconds(tmp_path: Path) -> None:
    """A policy of 0.5B took 0.563 s on one H100 for 24,908 tokens, 19,882 of them targets."""
    common.write_config(tmp_path, "0.5B", "bfloat16")
    sections = {
        "run": {"device": "cuda"},
        "policy": {"dtype": "bfloat16", "activation_checkpointing": "none", "compile": False},
        "batch": {"prompts_per_step": 64, "tokens_per_micro_batch": 16_384},
        "algorithm": {"group_size": 1},
    }
    plan = recipe(tmp_path, **sections)
    lengths = Lengths(prompt=(24_908 - 19_882) / 64, answer=19_882 / 64)
    counts = count_kernels(plan, str(tmp_path), rows=42, length=389)
    model = replace(model_sizes(plan, str(tmp_path)), kernels=counts)
    costs = step_costs(plan, model, 1, GPUS["h100"], lengths)
    update = sum(cost.seconds for cost in costs if cost.name.startswith("update"))
    assert 0.563 / 2 < update < 0.563
