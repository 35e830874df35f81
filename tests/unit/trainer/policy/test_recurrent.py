"""Hybrids in packs and in tries: no sequence sees another, and each is computed as if it were alone."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests.support.families import make_family
from tests.support.row_advantages import advantage
from tests.support.shared_answers import CASES, LEAST, group
from trainer.config.schema import ModelConfig
from trainer.learning.batching import micro_batches
from trainer.model_structure import recurrent_mixers
from trainer.policy.hf_format import build_meta_model, checkpoint_activations, load_sharded
from trainer.policy.module import PolicyModule, outputs
from trainer.types import MicroBatch, Sample

HYBRIDS = [
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "granite4",
    "nemotron_h",
    "falcon_h1",
    "jamba",
    "olmo_hybrid",
    "kimi_linear",
]
IN_TREES = [*HYBRIDS, "granite4_moe", "lfm2_moe", "mamba2", "qwen3_5_moe", "zamba2"]
SAMPLES = [*CASES["five levels"], *CASES["two prompts"]]
SHARED: dict[str, Any] = {"packing": True, "shared_min": LEAST}
LENGTHS = [70, 20, 17, 9]  # in the order of a pack; two of them share a call
TEMPERATURE = 1.0


@lru_cache(maxsize=2)
def policy(family: str, dtype: torch.dtype = torch.float32) -> PolicyModule:
    """Build a family's policy as a run does."""
    with TemporaryDirectory() as folder:
        make_family(family, Path(folder))
        model = build_meta_model(Path(folder), ModelConfig(path=folder), dtype, torch.device("cpu"))
        load_sharded(model, Path(folder), torch.device("cpu"))
    return PolicyModule(model)


def make_samples(first: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(first)
    seeds = [generator, *(torch.Generator().manual_seed(100 + n) for n in range(len(LENGTHS) - 1))]
    ids = [
        torch.randint(4, 270, (n,), generator=g).tolist() for n, g in zip(LENGTHS, seeds, strict=True)
    ]
    return [Sample(tokens, [1] * len(tokens), [0.0] * len(tokens)) for tokens in ids]


def batch_of(samples: list[Sample], packing: bool = True) -> MicroBatch:
    (batch,) = micro_batches(samples, 10**6, 0, "cpu", 1, packing=packing)
    return batch


def logprobs_by_sample(module: PolicyModule, batch: MicroBatch) -> list[Tensor]:
    table = outputs(module, batch, TEMPERATURE).logprobs
    order = {number: row for row, number in enumerate(batch.rows)}
    return [table[order[n], : length - 1] for n, length in enumerate(LENGTHS)]


def alone(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Return log-probabilities of one sequence by itself, through Transformers' own logits."""
    ids = torch.tensor([sample.input_ids])
    log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_p.gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("family", HYBRIDS)
def test_each_sequence_of_a_pack_is_computed_as_if_it_were_alone(family: str) -> None:
    module, samples = policy(family), make_samples()
    parameters = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
    packed = logprobs_by_sample(module, batch_of(samples))
    weights = [torch.linspace(-1, 1, len(row)) for row in packed]

    def gradients(rows: list[Tensor]) -> tuple[Tensor | None, ...]:
        loss = torch.stack(
            [(row * weight).sum() for row, weight in zip(rows, weights, strict=True)]
        ).sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    by_pack = gradients(packed)
    module.rows.paths = None
    expected = [alone(module.model, sample) for sample in samples]
    by_sample = gradients(expected)
    for row, other in zip(packed, expected, strict=True):
        torch.testing.assert_close(row, other, atol=1e-5, rtol=0)
    for grad, other_grad in zip(by_pack, by_sample, strict=True):
        assert (grad is None) == (other_grad is None)
        if grad is not None and other_grad is not None:
            assert float((grad - other_grad).norm()) <= 1e-4 * float(other_grad.norm()) + 1e-7


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_sequence_of_a_pack_sees_another(family: str) -> None:
    """With the first sequence's tokens replaced, the others' figures are the same bits; without rows they are not,
    unless Transformers refuses, as some families' layers do from 5.20 on.
    """
    module = policy(family)
    batches = [batch_of(make_samples(first)) for first in (1, 2)]
    assert batches[0].rows == batches[1].rows
    with torch.no_grad():
        one, other = (logprobs_by_sample(module, batch)[1:] for batch in batches)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        start = module.rows
        try:
            # Mixers get the pack as it is
            start.paths = None
            module.rows = SimpleNamespace(begin=lambda packing: None, paths=None)  # type: ignore[assignment]
            one, other = (logprobs_by_sample(module, batch)[1:] for batch in batches)
        except ValueError as error:
            if "can't keep packed sequences apart" not in str(error):
                raise
            return
        finally:
            module.rows = start
    assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) > 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_layers_computed_again_in_backward_know_the_lengths_of_their_pack(family: str) -> None:
    module = policy(family)
    batch = batch_of(make_samples())

    def gradients() -> list[Tensor]:
        module.zero_grad()
        outputs(module, batch, TEMPERATURE).logprobs.sum().backward()
        return [p.grad.clone() for p in module.model.parameters() if p.grad is not None]

    module.train()
    plain = gradients()
    checkpoint_activations(module.model, "full")
    calls = 0
    mixer = recurrent_mixers(module.model)[0]

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hook = mixer.register_forward_pre_hook(count)
    try:
        recomputed = gradients()
    finally:
        hook.remove()
        module.model.gradient_checkpointing_disable()
        module.eval()
    assert calls == 2
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def computed(module: PolicyModule, samples: list[Sample], **layout: Any) -> dict[str, Tensor]:
    """Return each sample's outputs, by its number, and the gradients of a loss that is linear in them."""
    module.zero_grad()
    module.train()
    results: dict[str, Tensor] = {}
    for batch in micro_batches(samples, 10**6, 0, "cpu", 1, **layout):
        out = outputs(module, batch, TEMPERATURE)
        factors = torch.tensor([[advantage(samples[row].input_ids)] for row in batch.rows])
        (factors * out.logprobs + 0.1 * out.entropy).sum().backward()
        for row, logprobs, entropy in zip(batch.rows, out.logprobs, out.entropy, strict=True):
            size = len(samples[row].input_ids) - 1
            results[f"output {row}"] = torch.stack([logprobs[:size], entropy[:size]]).detach()
    module.eval()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad.clone()
    return results


def assert_close(results: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """Each output and gradient differs by at most `limit` of its norm."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert float((results[name] - value).norm()) <= limit * float(value.norm()), name


class Wide(TorchFunctionMode):
    """Replaces float32 by float64, in which Transformers' recurrences would otherwise not be computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        args = [wide.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args]
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@pytest.mark.parametrize("family", IN_TREES)
def test_trees_have_the_values_and_gradients_of_separate_rows(family: str) -> None:
    """As they are and with all layers computed again."""
    module = policy(family)
    expected = computed(module, SAMPLES, packing=False)
    assert_close(computed(module, SAMPLES, **SHARED), expected, 1e-5)
    checkpoint_activations(module.model, "full")
    try:
        again = computed(module, SAMPLES, **SHARED)
    finally:
        module.model.gradient_checkpointing_disable()
    assert_close(again, expected, 1e-5)


@pytest.mark.parametrize("family", HYBRIDS)
def test_in_float64_trees_differ_from_separate_rows_by_rounding_alone(family: str) -> None:
    module = policy(family, torch.float64)
    module.model.set_experts_implementation("eager")  # the other one has no float64
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            expected = computed(module, SAMPLES, packing=False)
            shared = computed(module, SAMPLES, **SHARED)
    finally:
        torch.set_default_dtype(torch.float32)
    # OLMo's A_log keeps a float32 gradient
    assert_close(shared, expected, 1e-8 if family == "olmo_hybrid" else 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_every_case_of_common_beginnings_has_the_values_of_separate_rows(case: str) -> None:
    for family in ("qwen3_5", "falcon_h1"):
        expected = computed(policy(family), CASES[case], packing=False)
        shared = computed(policy(family), CASES[case], **SHARED)
        assert_close(shared, expected, 1e-5)


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_branch_sees_another_even_if_states_hardly_decay(family: str) -> None:
    """Each answer's gradient with respect to tokens of others is exactly 0, and with them replaced its figures are the
    same bits.
    """
    module = policy(family)
    samples = CASES["one level"]
    decays = [p for name, p in module.named_parameters() if name.endswith("A_log")]
    kept = [parameter.detach().clone() for parameter in decays]
    embedded: list[Tensor] = []
    hook = module.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: embedded.append(output)
    )
    try:
        for parameter in decays:
            torch.nn.init.constant_(parameter, -3.0)
        (batch,) = micro_batches(samples, 10**6, 0, "cpu", 1, **SHARED)
        logprobs = outputs(module, batch, TEMPERATURE).logprobs
        pack = batch.layout.pack
        assert pack is not None and pack.tree is not None
        for row, last in enumerate(pack.tree.trie[1]):
            (gradient,) = torch.autograd.grad(logprobs[row].sum(), embedded, retain_graph=True)
            on_path = torch.zeros(gradient.shape[1], dtype=torch.bool)
            for begin, end in pack.tree.ranges[last]:
                on_path[begin:end] = True
            assert gradient[0, on_path].any(1).sum() > 40, "the prompt has more"
            assert not gradient[0, ~on_path].any()
        other = [*samples[:-1], replaced(samples[-1])]
        (changed,) = micro_batches(other, 10**6, 0, "cpu", 1, **SHARED)
        after = dict(zip(changed.rows, outputs(module, changed, TEMPERATURE).logprobs, strict=True))
        for row, before in zip(batch.rows, logprobs, strict=True):
            assert torch.equal(before, after[row]) == (row != len(samples) - 1)
    finally:
        hook.remove()
        for parameter, values in zip(decays, kept, strict=True):
            parameter.data.copy_(values)


def replaced(sample: Sample) -> Sample:
    """Return the sample with the tokens of its answer replaced, after the first one."""
    ids = [*sample.input_ids[:41], *(token % 60 + 1 for token in sample.input_ids[41:])]
    return Sample(ids, sample.loss_mask, sample.engine_logprobs)


def test_two_passes_over_a_tree_have_the_same_bits() -> None:
    first = computed(policy("qwen3_5"), SAMPLES, **SHARED)
    second = computed(policy("qwen3_5"), SAMPLES, **SHARED)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "granite4"])
def test_operations_are_those_of_the_linear_layers_calls(family: str) -> None:
    """Paths of one length, so that no row is padded: mixers compute each path, and all else each token once."""
    module = policy(family)
    samples = group(5, 40, [12])
    sizes = module.work.of
    multiplied = [0]

    def count(layer: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        multiplied[0] += layer.weight.numel() * args[0].shape[:-1].numel()

    layers = [m for m in module.model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    before = module.work.flops
    try:
        with torch.no_grad():
            outputs(module, *micro_batches(samples, 10**6, 0, "cpu", 1, **SHARED), TEMPERATURE)
    finally:
        for hook in hooks:
            hook.remove()
    path = 40 + 12 - 1
    tokens = 40 + 5 * 11
    convolutions = 0
    for mixer in recurrent_mixers(module.model):
        convolutions += sum(m.weight.numel() for m in mixer.modules() if isinstance(m, torch.nn.Conv1d))
    # Each of a path's own tokens attends to all before it
    pairs = path * (path + 1) / 2 * 5 - 4 * 40 * 41 / 2
    heads = sizes.attention * 4 * pairs
    head = 2 * sizes.head * sum(sample.trainable for sample in samples)
    once = module.work.flops - before - heads - head
    assert once == 2 * (multiplied[0] + convolutions * 5 * path)
    assert sizes.recurrent > 0 and once > 2 * sizes.trunk * tokens


def test_mixers_count_in_the_budget_as_often_as_they_compute_a_token() -> None:
    """Five answers of 12 tokens to a prompt of 40: 100 tokens, and four times 40 in mixers."""
    samples = group(5, 40, [13])
    share = policy("qwen3_5").work.of.recurrent_share
    assert 0.1 < share < 0.9
    whole = 40 + 5 * 12 + round(share * 4 * 40)
    for budget, count in ((whole, 1), (whole - 1, 2)):
        batches = micro_batches(samples, budget, 0, "cpu", repeated=share, **SHARED)
        assert len(batches) == count
