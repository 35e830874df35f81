"""Sequences laid end to end give what each gives alone in plain Transformers: values, gradients, and no more memory."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.row_advantages import advantage, advantages
from trainer.config.schema import ModelConfig
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.policy import attention
from trainer.policy.hf_format import build_meta_model
from trainer.policy.logprobs import CPU_ELEMENTS
from trainer.policy.module import PolicyModule, outputs
from trainer.types import MicroBatch, Sample

VOCABULARY = 61
TEMPERATURE = 0.7
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2 untied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "llama untied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "gemma": lambda: GemmaConfig(**SHAPE | {"num_key_value_heads": 1}, head_dim=8),
    "gpt2 with absolute positions": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "gemma3 with windows": lambda: Gemma3TextConfig(
        **SHAPE, **WINDOWS, head_dim=8, query_pre_attn_scalar=8
    ),
    "gemma2 with soft caps": lambda: Gemma2Config(
        **SHAPE,
        **WINDOWS,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    ),
    "granite with sinks": lambda: GraniteSWAConfig(**SHAPE, **WINDOWS, logits_scaling=0.5),
    "gpt-oss with sinks": lambda: GptOssConfig(
        **SHAPE, **WINDOWS, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32's rounding
LENGTHS = [9, 7, 7, 3, 1, 12]


def make_model(kind: str = "qwen2") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager")


def make_module(model: PreTrainedModel) -> PolicyModule:
    model.set_attn_implementation(attention.implementation("sdpa", model))
    return PolicyModule(model)


def make_samples(lengths: list[int], seed: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, length in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        mask = [int(position >= 1 and (position + i) % 4 != 3) for position in range(length)]
        samples.append(Sample(ids, mask, [0.0] * length))
    return samples


def plain(model: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of one sequence by itself, through the whole logits tensor; 0 where
    masked.
    """
    ids, mask = torch.tensor([sample.input_ids]), torch.tensor(sample.loss_mask[1:])
    log_p = torch.log_softmax(model(ids).logits[0, :-1] / TEMPERATURE, dim=-1)
    return log_p.gather(1, ids[0, 1:, None])[:, 0] * mask, -(log_p.exp() * log_p).sum(dim=-1) * mask


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_gradients_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    """Compare to float32's rounding of the largest element, or of 1 where all are smaller: lengths [3, 14, 4] give
    8e-6.
    """
    tolerance = 1e-5 * max(1.0, *(float(grad.abs().max()) for grad in expected))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


def loss_of(logprobs: Tensor, entropy: Tensor, advantage: Tensor | float) -> Tensor:
    return (logprobs * advantage + 0.1 * entropy).sum()


def total_loss(module: PolicyModule, batches: list[MicroBatch]) -> Tensor:
    results = [(outputs(module, batch, TEMPERATURE), advantages(batch)) for batch in batches]
    return torch.stack([loss_of(out.logprobs, out.entropy, factor) for out, factor in results]).sum()


@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients_equal_those_of_separate_sequences(kind: str) -> None:
    model, samples = make_model(kind), make_samples(LENGTHS)
    alone = [plain(model, sample) for sample in samples]
    expected = gradients(
        model,
        sum(loss_of(*pair, advantage(s.input_ids)) for pair, s in zip(alone, samples, strict=True)),
    )
    for packing in (True, False):
        module = make_module(model)
        (batch,) = micro_batches(samples, 1000, 0, "cpu", 1, packing)
        out = outputs(module, batch, TEMPERATURE)
        for row, index in enumerate(batch.rows):
            size = len(samples[index].input_ids) - 1
            torch.testing.assert_close(out.logprobs[row, :size], alone[index][0], **CLOSE)
            torch.testing.assert_close(out.entropy[row, :size], alone[index][1], **CLOSE)
            assert not out.logprobs[row, size:].any() and not out.entropy[row, size:].any()
        got = gradients(model, total_loss(module, [batch]))
        assert_gradients_equal(got, expected)


@pytest.fixture(scope="module")
def windowed() -> PreTrainedModel:
    return make_model("gemma3 with windows")


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=7),
    st.integers(1, 60),
    st.integers(0, 2),
    st.booleans(),
)
def test_any_split_packed_or_padded_is_the_same_loss_and_gradient(
    windowed: PreTrainedModel, lengths: list[int], budget: int, fillers: int, packing: bool
) -> None:
    samples, module = make_samples(lengths), make_module(windowed)
    full_loss = total_loss(module, micro_batches(samples, 10_000, 0, "cpu", 1, packing=False))
    needed = len(micro_batches(samples, budget, 0, "cpu", len(samples), packing))
    parts = total_loss(module, micro_batches(samples, budget, 0, "cpu", needed + fillers, packing))
    torch.testing.assert_close(parts, full_loss, **CLOSE)
    assert_gradients_equal(gradients(windowed, parts), gradients(windowed, full_loss))


@pytest.mark.parametrize("kind", ["qwen2 untied", "gemma3 with windows", "granite with sinks"])
def test_a_sequence_does_not_see_its_neighbours(kind: str) -> None:
    """Another neighbour of the same length changes not a bit of the others' values and gradients."""
    model = make_model(kind)
    module, samples = make_module(model), make_samples([8, 8, 5, 3])
    for changed in range(4):
        results = []
        for ids in (samples[changed].input_ids, [60] * len(samples[changed].input_ids)):
            samples[changed].input_ids = ids
            (batch,) = micro_batches(samples, 1000, 0, "cpu", 1, packing=True)
            unchanged = torch.tensor([index != changed for index in batch.rows])
            logprobs = outputs(module, batch, TEMPERATURE).logprobs[unchanged]
            results.append([logprobs, *gradients(model, logprobs.sum())])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), changed


def test_masked_and_missing_targets_add_nothing() -> None:
    """Rows without any target, one of them a filler's single token, stand among rows that have some."""
    model = make_model()
    module, samples = make_module(model), make_samples([6, 1, 5])
    samples[2].loss_mask = [0] * 5
    (batch,) = micro_batches(samples, 1000, 0, "cpu", 1, packing=True)
    assert batch.loss_mask.any(dim=1).tolist() == [True, False, False]
    expected = gradients(model, plain(model, samples[0])[0].sum())
    assert_gradients_equal(
        gradients(model, outputs(module, batch, TEMPERATURE).logprobs.sum()), expected
    )
    (filler,) = micro_batches([], 10, 0, "cpu", 1, packing=True)
    assert not any(
        grad.any() for grad in gradients(model, outputs(module, filler, TEMPERATURE).logprobs.sum())
    )


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begin: Tensor,
    begin_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int,
) -> Tensor:
    """Return a second computation of `torch.nn.attention.varlen.varlen_attn`, as documented, in a loop over sequences."""
    assert num_splits == 1  # with more, a sequence's result depends on the longest of its batch
    assert enable_gqa and torch.equal(begin, begin_k) and begin.dtype is torch.int32
    assert longest == longest_k == int(begin.diff().max()) and window_size[1] == 0
    results = []
    for start, stop in itertools.pairwise(begin.tolist()):
        q, k, v = query[start:stop], key[start:stop], value[start:stop]
        k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        left = stop if window_size[0] == -1 else window_size[0]
        scores = scores.masked_fill((back < 0) | (back > left), float("-inf"))
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v))
    return torch.cat(results)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3 with windows"])
def test_the_kernel_for_gpus_is_asked_for_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(kind)
    module = make_module(model)
    (batch,) = micro_batches(make_samples(LENGTHS), 1000, 0, "cpu", 1, packing=True)
    expected = outputs(module, batch, TEMPERATURE).logprobs
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen)
    torch.testing.assert_close(outputs(module, batch, TEMPERATURE).logprobs, expected, **CLOSE)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements in the storage of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def test_memory_grows_neither_with_vocabulary_times_tokens_nor_with_tokens_squared() -> None:
    """For twice the tokens, the largest tensor of forward and backward is still a block of logits."""
    tokens, vocabulary = 2000, 6000
    config = Qwen2Config(**SHAPE | {"vocab_size": vocabulary})
    module = make_module(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    largest = []
    for length in (tokens // 20, tokens // 10):
        samples = [Sample([1] * length, [1] * length, [0.0] * length) for _ in range(20)]
        (batch,) = micro_batches(samples, 10**6, 0, "cpu", 1, packing=True)
        with LargestTensor() as mode:
            out = outputs(module, batch, TEMPERATURE)
            (out.logprobs + out.entropy).sum().backward()
        largest.append(mode.elements)
    assert (
        largest == [CPU_ELEMENTS, CPU_ELEMENTS] and CPU_ELEMENTS < tokens * tokens < tokens * vocabulary
    )


def test_models_that_cannot_be_packed_are_refused_in_one_sentence() -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    falcon = AutoModelForCausalLM.from_config(FalconConfig(**shape, num_attention_heads=2))
    experts = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }
    lightning = MiniMaxConfig(
        **shape, **experts, num_key_value_heads=1, layer_types=["linear_attention"]
    )
    chunked = Llama4TextConfig(
        **shape, **experts, num_key_value_heads=1, layer_types=["chunked_attention"], head_dim=8
    )
    made = [AutoModelForCausalLM.from_config(config) for config in (lightning, chunked)]
    reasons = [
        "has its own attention",
        "has recurrent layers of an unknown kind",
        r"\(chunked_attention\)",
    ]
    for model, reason in zip([falcon, *made], reasons, strict=True):
        with pytest.raises(
            UserError, match=rf"batch.packing is true, but {type(model).__name__} .*{reason}.* to false"
        ):
            attention.require_packing(model)
        with pytest.raises(
            UserError,
            match=f"sequence_parallel is above 1, but {type(model).__name__} .*{reason}.* to 1",
        ):
            attention.require_sharing(model)
        assert attention.implementation("sdpa", model) == "sdpa"
    shared = make_model("gemma3 with windows")
    with pytest.raises(
        UserError, match="model.attn_implementation is eager, which may mix .*: set the latter to sdpa"
    ):
        attention.require_packing(shared)
    with pytest.raises(
        UserError, match="Gemma3ForCausalLM computes its attention in its own way: set it to 1"
    ):
        attention.require_sharing(shared)  # Transformers' own, by the choice of `make_model`
    shared.set_attn_implementation(attention.NAME)
    attention.require_sharing(shared)
    attention.require_packing(shared)
    (batch,) = micro_batches(make_samples([5, 4]), 100, 0, "cpu", 1, packing=True)
    with pytest.raises(UserError, match="set it to false"):
        outputs(make_module(falcon), batch, TEMPERATURE)


def test_unsupported_arguments_of_attention_are_refused() -> None:
    query = torch.randn(1, 4, 6, 8)
    harmless = {"position_ids": torch.arange(6), "softcap": None, "use_cache": False}
    assert attention.attention(torch.nn.Identity(), query, query, query, None, **harmless)[0].shape == (
        1,
        6,
        4,
        8,
    )
    bias = {"position_bias": torch.zeros(1, 4, 6, 6)}
    with pytest.raises(
        UserError, match="Identity needs attention with position_bias, .* set model.attn_implement"
    ):
        attention.attention(torch.nn.Identity(), query, query, query, None, **bias)


@pytest.mark.parametrize(("capability", "taken"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_the_packing_kernel_begins_with_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    shape = torch.Size((1, 4, 6, 64))
    query: Any = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=shape)
    assert attention._kernel_takes(query, query, 0.0) == taken


def test_a_model_whose_layers_are_not_in_one_list_is_refused(tmp_path: Path) -> None:
    GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not keep its decoder layers"):
        build_meta_model(tmp_path, ModelConfig(path=str(tmp_path)), torch.float32, torch.device("cpu"))
