"""Beginnings that are computed once give what whole sequences give: values, gradients, and the same bits each time."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteSWAConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.row_advantages import advantage
from tests.support.shared_answers import CASES, LEAST, VOCABULARY, group
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.policy import attention, paths
from trainer.policy.hf_format import checkpoint_activations
from trainer.policy.module import PolicyModule, outputs
from trainer.types import MicroBatch, Sample

TEMPERATURE = 0.7
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
KINDS = {
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    # Most models compute norms in float32, whatever their dtype is.
    "without float32 inside": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "window within the answers": lambda: MistralConfig(**SHAPE, sliding_window=5),
    "window within the prompt": lambda: MistralConfig(**SHAPE, sliding_window=17),
    "window beyond everything": lambda: MistralConfig(**SHAPE, sliding_window=200),
    "alternating windows": lambda: Gemma3TextConfig(
        **SHAPE, **ALTERNATING, sliding_window=9, query_pre_attn_scalar=8
    ),
    "soft caps": lambda: Gemma2Config(
        **SHAPE, **ALTERNATING, sliding_window=9, query_pre_attn_scalar=8, attn_logit_softcapping=0.5
    ),
    "sinks": lambda: GraniteSWAConfig(
        **SHAPE, layer_types=ALTERNATING["layer_types"], sliding_window=9, logits_scaling=0.5
    ),
    "sinks and experts": lambda: GptOssConfig(
        **SHAPE, **ALTERNATING, sliding_window=9, num_local_experts=4, num_experts_per_tok=2
    ),
}


def make_module(kind: str = "qwen2", dtype: torch.dtype = torch.float32) -> PolicyModule:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        KINDS[kind](), attn_implementation="eager", dtype=dtype
    )
    model.set_attn_implementation(attention.implementation("sdpa", model))
    return PolicyModule(model)


def cut(samples: list[Sample], budget: int = 10_000, shared: int | None = LEAST) -> list[MicroBatch]:
    return micro_batches(samples, budget, 0, "cpu", packing=True, shared_min=shared)


def computed(
    module: PolicyModule, batches: list[MicroBatch], samples: list[Sample]
) -> dict[str, Tensor]:
    """Return the outputs of each sample, its numbers of sequence, and the gradient of a loss that is linear in them."""
    module.zero_grad()
    module.train()
    found: dict[str, Tensor] = {}
    for batch in batches:
        out = outputs(module, batch, TEMPERATURE)
        factors = torch.tensor([[advantage(samples[row].input_ids)] for row in batch.rows])
        (factors * out.logprobs + 0.1 * out.entropy).sum().backward()
        for row, logprobs, entropy in zip(
            batch.rows, out.logprobs.detach(), out.entropy.detach(), strict=True
        ):
            size = len(samples[row].input_ids) - 1
            found[f"output {row}"] = torch.stack([logprobs[:size], entropy[:size]])
            assert not logprobs[size:].any() and not entropy[size:].any()
    named = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return found | named


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], limit: float, outputs: float = 1e-5
) -> None:
    """Gradients differ by at most `limit` in relative norm, and outputs by at most `outputs`, absolute."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("output"):
            torch.testing.assert_close(found[name], value, atol=outputs, rtol=0)
        elif not name.endswith("k_proj.bias"):  # its gradient is zero but for rounding
            assert float((found[name] - value).norm()) <= limit * float(value.norm()), name


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_whole_sequences(case: str) -> None:
    samples = CASES[case]
    for kind, dtype, limit in (
        ("qwen2", torch.float32, 5e-6),
        ("without float32 inside", torch.float64, 1e-12),
    ):
        module = make_module(kind, dtype)
        whole = computed(module, cut(samples, shared=None), samples)
        assert_close(computed(module, cut(samples), samples), whole, limit)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_caps_sinks_and_experts_see_the_whole_path(kind: str) -> None:
    samples = [*CASES["five levels"], *CASES["two prompts"]]
    module = make_module(kind)
    whole = computed(module, cut(samples, shared=None), samples)
    assert_close(computed(module, cut(samples), samples), whole, 5e-6)


def test_one_to_four_micro_batches_padded_packed_and_shared_are_the_same() -> None:
    samples = [*CASES["five levels"], *CASES["two prompts"]]
    module = make_module()
    whole = computed(module, cut(samples, shared=None), samples)
    budgets = {len(cut(samples, budget)): budget for budget in range(800, 30, -10)}
    assert budgets.keys() >= {1, 2, 3, 4}
    for count in (1, 2, 3, 4):
        shared = cut(samples, budgets[count])
        assert_close(computed(module, shared, samples), whole, 5e-6)
    padded = micro_batches(samples, 300, 0, "cpu", packing=False, shared_min=LEAST)
    assert_close(computed(module, padded, samples), whole, 5e-6)


@pytest.mark.parametrize("layers", ["every_second", "full"])
def test_recomputed_layers_read_the_same_paths(layers: Any) -> None:
    samples = CASES["five levels"]
    module = make_module()
    whole = computed(module, cut(samples, shared=None), samples)
    checkpoint_activations(module.model, layers)
    assert_close(computed(module, cut(samples), samples), whole, 5e-6)


def test_an_answer_moves_no_siblings_outputs() -> None:
    samples = CASES["one level"]
    other = [
        *samples[:-1],
        group(1, 40, [len(samples[-1].input_ids) - 40], seed=8, prompt=samples[0].input_ids[:40])[0],
    ]
    module = make_module()
    before, after = (computed(module, cut(some), some) for some in (samples, other))
    for row in range(len(samples) - 1):
        assert torch.equal(before[f"output {row}"], after[f"output {row}"])
    assert not torch.equal(before[f"output {len(samples) - 1}"], after[f"output {len(samples) - 1}"])


def test_two_runs_have_the_same_bits() -> None:
    samples = group(16, 60, [9] * 16)
    first, second = (computed(make_module(), cut(samples), samples) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scores_before_an_update_are_exactly_those_within_it() -> None:
    samples = CASES["five levels"]
    module = make_module()
    (batch,) = cut(samples)
    within = outputs(module.train(), batch, TEMPERATURE).logprobs.detach()
    with torch.no_grad():
        assert torch.equal(outputs(module.eval(), batch, TEMPERATURE).logprobs, within)


def test_an_mlp_sees_each_token_of_the_trie_once() -> None:
    """The trie is counted here as a set of all distinct beginnings."""
    for samples in CASES.values():
        module, seen = make_module(), list[int]()
        count = partial(_count_tokens, seen)
        for layer in module.model.model.layers:
            layer.mlp.register_forward_pre_hook(count)
        (batch,) = cut(samples, shared=1)
        outputs(module, batch, TEMPERATURE)
        ids = [sample.input_ids[:-1] for sample in samples]
        beginnings = {tuple(row[: end + 1]) for row in ids for end in range(len(row))}
        assert seen == [max(1, len(beginnings))] * 2
        assert batch.layout.pack is not None
        logical = sum(max(1, len(row)) for row in ids)
        assert batch.layout.pack.tree is None or batch.layout.pack.tree.logical_tokens == logical


def _count_tokens(seen: list[int], _: nn.Module, args: tuple[Tensor, ...]) -> None:
    seen.append(args[0].shape[:-1].numel())


def test_in_bfloat16_gradients_are_as_near_to_float32_as_those_of_packs() -> None:
    samples = group(16, 60, [9, 14], seed=2)
    exact = computed(make_module(), cut(samples, shared=None), samples)
    distances = []
    for shared in (None, LEAST):
        rounded = computed(make_module(dtype=torch.bfloat16), cut(samples, shared=shared), samples)
        parts = [
            (rounded[name].float() - exact[name]).norm()
            for name in exact
            if not name.startswith("output")
        ]
        distances.append(float(torch.stack(parts).norm()))
    assert distances[1] <= 1.5 * distances[0], distances


def test_both_gathers_add_repeated_rows_in_float32() -> None:
    """256 and then 255 ones: bfloat16 alone has no 257, so sums of single terms would stay at 256."""
    rows = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    ranges = [[(0, 2)], *[[(0, 1), (2, 3)]] * 511]
    paths.Paths.apply(rows, ranges).sum().backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [512, 1, 512]


def test_every_list_of_lengths_gives_the_pairs_that_attention_computes() -> None:
    module = make_module()
    samples = CASES["five levels"]
    (batch,) = cut(samples, shared=1)
    outputs(module, batch, TEMPERATURE)
    beginnings = {tuple(s.input_ids[: end + 1]) for s in samples for end in range(len(s.input_ids) - 1)}
    pairs = sum(map(len, beginnings))
    sizes = module.work.of
    targets = sum(s.trainable for s in samples)
    assert module.work.flops == sum(
        f(len(beginnings), targets, pairs) for f in (sizes.forward, sizes.backward)
    )


def test_models_with_dropout_or_another_attention_are_refused_by_name() -> None:
    dropping = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    dropping.set_attn_implementation(attention.implementation("sdpa", dropping))
    with pytest.raises(UserError, match="share_prefixes is true, but GPT2LMHeadModel has dropout"):
        attention.require_branches(dropping)
    with pytest.raises(
        UserError, match="share_prefixes is true, but Qwen2ForCausalLM computes its attention in its"
    ):
        attention.require_branches(
            AutoModelForCausalLM.from_config(KINDS["qwen2"](), attn_implementation="eager")
        )
    attention.require_branches(make_module().model)
