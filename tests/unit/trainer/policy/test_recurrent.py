"""Hybrids in packs: no sequence sees another, and each is computed as if it were alone."""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.families import make_family
from trainer.config.schema import ModelConfig
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.policy.attention import require_branches
from trainer.policy.hf_format import build_meta_model, checkpoint_activations, load_sharded
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.recurrent import recurrent_mixers
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
LENGTHS = [70, 20, 17, 9]  # in the order of a pack; two of them share a call
TEMPERATURE = 1.0


@lru_cache(maxsize=2)
def policy(family: str) -> PolicyModule:
    """Build a family's policy as a run does."""
    with TemporaryDirectory() as folder:
        make_family(family, Path(folder))
        model = build_meta_model(
            Path(folder), ModelConfig(path=folder), torch.float32, torch.device("cpu")
        )
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
    module.rows.lengths = ()
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
            # Nothing reads its lengths, so mixers get the pack as it is
            module.rows = type(start).__new__(type(start))
            start.lengths = ()
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


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_hybrids_do_not_share_beginnings(family: str) -> None:
    """A state at a branch would reach one of the branches at most."""
    with pytest.raises(
        UserError, match="share_prefixes is true, but .* has recurrent layers, whose state"
    ):
        require_branches(policy(family).model)
