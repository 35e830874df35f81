"""Fused norms, rotary embeddings and gates: against the modules they are made from, and against float64."""

import copy
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor
from torch.nn.functional import rms_norm, silu
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
)

from tests.support.families import make_family
from tests.unit.trainer.policy.test_shared_prefixes import KINDS
from trainer.config.schema import LoraConfig, PolicyConfig
from trainer.errors import UserError
from trainer.model_structure import decoder
from trainer.policy import fused
from trainer.policy import module as policy_module
from trainer.policy.fused import Fused, fuse, is_fused
from trainer.policy.head import Logits
from trainer.policy.logprobs import target_logprobs
from trainer.policy.lora import add_adapters
from trainer.policy.shortcuts import Shortcut, without

FAMILIES = {
    "qwen2": [],
    "qwen3": [],
    "llama": [],
    "mistral": [],
    "gemma2": [],
    "gemma3": [],
    "gemma3_vl": [],
    "olmo2": [],
    "qwen3_moe": [],
    "qwen3_5": [],
    "gpt_oss": ["gates of MLPs"],  # its experts cap both halves
    "phi3": ["gates of MLPs"],  # one product gives both halves
}
"""Families, and the parts of each that stay as they are."""


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    """Compile, as no other test does, and fail where a variant too many would run uncompiled."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False, fail_on_recompile_limit_hit=True):
        yield


def passed(model: PreTrainedModel, rows: int = 2, length: int = 24) -> dict[str, Tensor]:
    """Return the logits of some tokens, and the gradients of a loss that is linear in them."""
    draw = torch.Generator().manual_seed(0)
    model.train().zero_grad()
    ids = torch.randint(5, 40, (rows, length), generator=draw).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits.cpu()
    (logits * torch.randn(logits.shape, generator=draw)).sum().backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | gradients


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the largest distance of a tensor, relative to its norm."""
    assert found.keys() == exact.keys()
    return max(
        float((found[name].double() - value.double()).norm() / (value.double().norm() + 1e-9))
        for name, value in exact.items()
        if not name.endswith("k_proj.bias")  # its gradient is zero but for rounding
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_the_same(family: str, tmp_path: Path) -> None:
    model = make_family(family, tmp_path).float()
    plain = passed(model)
    names = {type(m).__name__ for m in decoder(model).modules() if "Norm" in type(m).__name__}
    assert fuse(model, partial(Fused, backend="aot_eager")) == FAMILIES[family] and names
    counted = torch._dynamo.utils.counters
    counted.clear()
    assert distance(passed(model), plain) < 5e-6
    assert counted["stats"]["unique_graphs"] and not counted["graph_break"]
    before = counted["stats"]["unique_graphs"]
    passed(model, length=31)  # another length is not compiled again
    assert counted["stats"]["unique_graphs"] == before
    with without(Shortcut.FUSED):
        assert all(torch.equal(value, plain[name]) for name, value in passed(model).items())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_fused_families_in_bfloat16_are_as_near_to_float64(family: str, tmp_path: Path) -> None:
    model = make_family(family, tmp_path).bfloat16()
    exact = passed(copy.deepcopy(model).double())
    eager = distance(passed(model), exact)
    fuse(model, partial(Fused, backend="aot_eager"))
    assert 0 < distance(passed(model), exact) <= 1.2 * eager


def make_tiny(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KINDS["qwen3"](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(parameter.ndim == 1, 0.3)  # norms are around 1
    return model.to(dtype)


def normed_rotated_and_gated(norm: Any, x: Tensor, y: Tensor, *angles: Tensor) -> Any:
    queries, keys = apply_rotary_pos_emb(norm(x), norm(y), *angles)
    return fused._gated(silu, queries, keys)


def test_generated_kernels_are_as_near_to_float64_as_eager_ones() -> None:
    """Those of Inductor for a CPU, for all three parts in one graph, since each graph takes two compilations by g++.

    tests/gpu has the test for CUDA, part by part and in bfloat16 as well.
    """
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, 4, 40, 32, generator=draw) for _ in range(2)]
    turns = torch.rand(2, 40, 32, generator=draw) * 6
    norm = Qwen3RMSNorm(32)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=draw)

    def computed(body: Any, module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        norm.zero_grad()
        norm.to(dtype)
        inputs = [head.to(dtype, copy=True).requires_grad_() for head in heads]
        result = body(module, *inputs, turns.cos().to(dtype), turns.sin().to(dtype))
        (result * (2 * turns[:, None] - 6).to(dtype)).sum().backward()
        gradients = {str(index): head.grad for index, head in enumerate(inputs)}
        return {"result": result.detach(), "weight": norm.weight.grad, **gradients}

    plain = partial(rms_norm, normalized_shape=[32], weight=norm.weight, eps=norm.variance_epsilon)
    exact = computed(normed_rotated_and_gated, plain, torch.float64)
    eager = computed(normed_rotated_and_gated, norm, torch.float32)
    # Neither try out instruction sets nor precompile headers: either takes longer than the kernels
    with inductor.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        compiled = computed(Fused(normed_rotated_and_gated), norm, torch.float32)
    for name, value in exact.items():
        bound = 3 if name == "weight" else 1.2  # a sum over all tokens, in another order
        far, near = (distance({name: tensors[name]}, {name: value}) for tensors in (eager, compiled))
        assert 0 < near <= bound * far, name


HEADS = [
    (50, 1.0, Logits(), False),
    (50, 0.7, Logits(1.5, 3.0, 0.8), True),
    (37, 1.0, Logits(), False),
    (1, 0.7, Logits(1.5, 3.0, 0.8), True),
]
"""Tokens, a temperature, what the model does to its logits, and whether there are a bias and slopes of entropies."""


def headed(case: tuple[int, float, Logits, bool], dtype: torch.dtype, **maker: Any) -> dict[str, Tensor]:
    """Return values and gradients of a head in blocks of unlike sizes."""
    tokens, temperature, head, everything = case
    draw = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(size, generator=draw) for size in ((tokens, 16), (101, 16), (101,))]
    hidden, weight, bias = (operand.bfloat16().to(dtype).requires_grad_() for operand in drawn)
    slopes = torch.randn(2, tokens, generator=draw)
    targets = torch.randint(101, (tokens,), generator=draw)
    operands = (hidden, weight, bias if everything else None)
    values = target_logprobs(*operands, targets, temperature, (16, 32), head=head, **maker)
    total = (values[0] * slopes[0]).sum() + everything * (values[1] * slopes[1]).sum()
    found = [*values, *torch.autograd.grad(total, [leaf for leaf in operands if leaf is not None])]
    return {str(index): value.detach() for index, value in enumerate(found)}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_head_is_as_near_to_float64_as_an_eager_one(dtype: torch.dtype, backend: str) -> None:
    """The real compiler has one case."""
    make = lru_cache(maxsize=None)(partial(Fused, backend=backend))
    with inductor.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        for case in HEADS[1:2] if backend == "inductor" else HEADS:
            exact = headed(case, torch.float64)
            eager = headed(case, dtype)
            compiled = headed(case, dtype, make=make)
            assert 0 < distance(compiled, exact) <= 1.2 * distance(eager, exact)


def test_the_head_of_a_fused_model_is_fused_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = []
    monkeypatch.setattr(policy_module, "target_logprobs", lambda *_, **options: makers.append(options))
    model = make_tiny(torch.float32)
    policy_module._return_logprobs(model.lm_head, Logits(), False)
    fuse(model, partial(Fused, backend="aot_eager"))
    for on_gpu in (True, False):
        hidden = SimpleNamespace(is_cuda=on_gpu)
        model.lm_head.forward(hidden, torch.zeros(1), 1.0)
        assert ("make" in makers[-1]) is on_gpu
    body = makers[0]["make"](torch.relu)
    assert isinstance(body, Fused) and makers[0]["make"](torch.relu) is body, "compiled once"


def test_adapters_in_a_gated_mlp_learn_the_same() -> None:
    model = make_tiny(torch.float32)
    targets = ["gate_proj", "up_proj", "down_proj", "q_proj"]
    add_adapters(model, LoraConfig(rank=2, target_modules=targets), torch.float32, "cpu")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    plain = passed(model)
    assert plain.keys() > {"logits"} and all("lora" in name for name in plain.keys() - {"logits"})
    assert not fuse(model, partial(Fused, backend="aot_eager"))
    assert distance(passed(model), plain) < 5e-6


@pytest.mark.parametrize("graphs", [1, 2])
def test_a_compiler_that_fails_is_one_sentence_with_the_remedy(graphs: int) -> None:
    """The one that lacks Triton's own compiler, say; also if only the gradient's kernel fails."""
    calls = 0

    def compile_graph(graph: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == graphs:
            raise RuntimeError("no C compiler\nwas found")
        return make_boxed_func(graph)

    model = make_tiny(torch.float32)
    fuse(model, partial(Fused, backend=aot_autograd(fw_compiler=compile_graph)))
    message = r"^policy.compile: Qwen3RMSNorm.forward cannot be .* \(.*no C compiler\): set it to false$"
    with pytest.raises(UserError, match=message):
        model(input_ids=torch.zeros(1, 5, dtype=torch.int64))


def test_a_forward_that_says_more_than_the_common_line_is_not_a_gated_mlp() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return 2 * down_proj

    class Normed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            x = self.norm(x)
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert [fused._is_gated_mlp(kind) for kind in (Qwen3MLP, Scaled, Normed)] == [True, False, False]


def test_by_default_gpus_with_a_compiler_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    default = PolicyConfig()
    for compiler in (True, False):
        monkeypatch.setattr(fused, "has_triton", lambda found=compiler: found)
        assert is_fused(default, "cuda") is compiler and not is_fused(default, "cpu")
    monkeypatch.setattr(fused, "has_triton", lambda: True)
    assert not is_fused(default.model_copy(update={"backend": "deepspeed"}), "cuda")
    for choice in (True, False):
        assert is_fused(default.model_copy(update={"compile": choice}), "cuda") is choice
