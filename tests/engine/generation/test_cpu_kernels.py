"""An engine on a CPU uses the same kernels whether or not the processor has AMX."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from generation.engine.cpu_kernels import hidden_instructions, kernel_environment
from sharding.wire.channel import SyncError
from sharding.worker.loader import check_unpacked
from tests.support.forked import PYTHON

ROOT = Path(__file__).resolve().parents[3]
DENSE = {"torch", "CPUAttentionBackendImpl vec"}
KERNELS = {
    "qwen2": DENSE,
    "qwen3_moe": DENSE | {"PlainExperts"},
    "deepseek_v2": {"torch", "CPUMLAImpl", "PlainExperts"},
}


def test_plain_engines_have_the_same_kernels_on_a_processor_with_amx(tmp_path: Path) -> None:
    """In bfloat16, two updates are replayed and verified; the process that starts the engines still sees AMX."""
    command = [*PYTHON, "-m", "tests.support.cpu_with_amx", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    reports = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == len(KERNELS)
    for (architecture, kernels), report in zip(KERNELS.items(), reports, strict=True):
        assert not any(report["processor"].values()) and report["front"]
        assert set(report["layers"].values()) == kernels, architecture
        # Latent attention keeps products of its weights, so an update is verified by a prompt.
        assert report["verified"] == ["probe" if architecture == "deepseek_v2" else "full"] * 2


def test_instruction_sets_are_hidden_only_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True, "sve": True})
    for plain in (True, False):
        with pytest.raises(KeyError), hidden_instructions(plain):
            assert not torch.cpu._is_amx_tile_supported() and not torch.cpu._is_amx_fp16_supported()
            assert torch.cpu._is_avx512_bf16_supported() is not plain
            assert torch.cpu.get_capabilities() == {"bf16": not plain, "sve": True}
            raise KeyError
        assert torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()
        assert torch.cpu.get_capabilities()["bf16"]


def test_onednns_instruction_set_is_capped_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert kernel_environment(plain=True) == {
        "HOTBUNK_PLAIN_CPU_WEIGHTS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    }
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert kernel_environment(plain=False) == {
        "HOTBUNK_PLAIN_CPU_WEIGHTS": "0",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize("packed", ["linear", "convolution"])
def test_a_weight_that_is_packed_unexpectedly_is_named_with_its_remedy(packed: str) -> None:
    """A kernel of a later vLLM release might pack it."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    check_unpacked(model, [])
    layer: SimpleNamespace | torch.nn.Module = model["b"]
    if packed == "linear":
        layer.cpu_linear = lambda x, weight, bias: x
    else:
        layer._cpu_unpacked_conv_weight = torch.zeros(2, 2)
    with pytest.raises(
        SyncError, match=r"^b\.weight is packed by .* set engine\.plain_cpu_weights to false$"
    ):
        check_unpacked(model, [])
    check_unpacked(model, [model["b"]])  # a reload writes the weight, and packs it again


def test_queries_of_three_dimensions_and_prompts_at_any_place_are_computed_alike() -> None:
    """The worker is imported in a process of its own, since its import decides what torch reports of the processor."""
    program = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from generation.engine import cpu_worker
with set_current_vllm_config(VllmConfig()):
    rope = get_rope(32, max_position=64, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
query, key, positions = torch.randn(5, 4, 32), torch.randn(5, 2, 32), torch.arange(5)
flat = rope.forward_native(positions, query.flatten(1), key.flatten(1))
for turned, expected in zip(rope.forward_cpu(positions, query.clone(), key.clone()), flat):
    torch.testing.assert_close(turned.flatten(1), expected)
by_kernel = rope.forward_cpu(positions, query.flatten(1).clone(), key.flatten(1).clone())
for turned, expected in zip(by_kernel, flat):
    torch.testing.assert_close(turned, expected)
copies, tokens, heads, size, state = 6, 23, 8, 32, 16
def repeated(*shape):
    return torch.randn(tokens, *shape).repeat(copies, *[1] * len(shape))
x, steps, b, c, a = repeated(heads, size), repeated(heads), repeated(1, state), repeated(1, state), -torch.rand(heads)
ends = torch.arange(0, copies * tokens + 1, tokens, dtype=torch.int32)
options = {"dt_bias": torch.rand(heads), "dt_softplus": True, "cu_seqlens": ends}
def states(scan):
    return scan(x, steps, a, b, c, 16, torch.empty_like(x), **options)
scanned = states(cpu_worker.scan)
assert all(torch.equal(scanned[0], one) for one in scanned)
torch.testing.assert_close(scanned, states(cpu_worker._scan_by_kernel))
print("alike")
"""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [*PYTHON, "-c", program], capture_output=True, text=True, timeout=300, env=environment
    )
    assert "alike" in done.stdout, done.stderr[-2000:]
