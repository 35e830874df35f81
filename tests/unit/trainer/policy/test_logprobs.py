"""The chunked head equals torch.log_softmax over the whole logits tensor, and finite differences."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.config.schema import TrainConfig
from trainer.engines import engine_settings
from trainer.policy.logprobs import target_logprobs


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(dim=-1)


def inputs(tokens: int, dtype: torch.dtype, with_bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(23, 8, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(23, generator=generator).to(dtype).requires_grad_() if with_bias else None
    return hidden, weight, bias, torch.randint(23, (tokens,), generator=generator)


def test_one_token_at_a_time_by_hand() -> None:
    hidden, weight, _, targets = inputs(5, torch.float64)
    hidden, weight = hidden.detach(), weight.detach()
    logprobs, entropy = target_logprobs(hidden, weight, None, targets, temperature=0.7, chunk_tokens=2)
    for n in range(5):
        z = [sum(float(hidden[n, h] * weight[v, h]) for h in range(8)) / 0.7 for v in range(23)]
        p = torch.softmax(torch.tensor(z, dtype=torch.float64), dim=0)
        assert float(logprobs[n]) == pytest.approx(float(p[targets[n]].log()), abs=1e-10)
        assert float(entropy[n]) == pytest.approx(-sum(float(q * q.log()) for q in p), abs=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 7, 10, 64, None])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_equal_one_tensor_of_all_logits(chunk: int | None, with_bias: bool, temperature: float) -> None:
    """Values and all gradients are equal, with chunks that divide the tokens and chunks that do not."""
    args = inputs(10, torch.float32, with_bias)
    wanted = [x for x in args[:3] if x is not None]
    coefficients = torch.randn(2, 10)
    results = []
    for values in (plain(*args, temperature), target_logprobs(*args, temperature, chunk)):
        total = (values[0] * coefficients[0] + values[1] * coefficients[1]).sum()
        results.append([*values, *torch.autograd.grad(total, wanted)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("which", [0, 1, "both"])
def test_gradients_pass_gradcheck(which: int | str) -> None:
    hidden, weight, bias, targets = inputs(4, torch.float64, with_bias=True)

    def function(*tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        result = target_logprobs(*tensors, targets, temperature=1.3, chunk_tokens=3)
        return result if which == "both" else result[int(which)]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_bf16_inputs_give_fp32_results_and_bf16_gradients() -> None:
    hidden, weight, _, targets = inputs(33, torch.bfloat16)
    logprobs, entropy = target_logprobs(hidden, weight, None, targets, 1.0, chunk_tokens=4)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, expected_entropy = plain(hidden, weight, None, targets, 1.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    got = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    exact = torch.autograd.grad(plain(hidden.double(), weight.double(), None, targets, 1.0)[0].sum(), (hidden, weight))
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b.float(), atol=0.05, rtol=0.03)


def test_no_tokens_give_zero_gradients_rather_than_none() -> None:
    """A rank without work still has to take part in the reduction of every gradient."""
    hidden, weight, _, targets = inputs(0, torch.float32)
    logprobs, entropy = target_logprobs(hidden, weight, None, targets)
    assert logprobs.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all(not g.any() for g in grads) and grads[1].shape == weight.shape


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, 1), 300.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs, entropy = target_logprobs(hidden, weight, None, torch.tensor([0, 1]))
    assert logprobs.tolist() == [0.0, -600.0] and torch.isfinite(entropy).all()
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_saves_nothing_the_size_of_the_logits() -> None:
    tokens, vocabulary = 64, 4096
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        target_logprobs(hidden, weight, None, torch.zeros(tokens, dtype=torch.int64), chunk_tokens=8)
    assert max(saved) < tokens * vocabulary


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_float32_head_does_not_round_logits(with_bias: bool) -> None:
    """Values of bfloat16 inputs equal those of the same numbers in float32, in any chunks; gradients stay
    bfloat16's.
    """
    args = inputs(10, torch.bfloat16, with_bias)
    wanted = [x for x in args[:3] if x is not None]
    exact = plain(*(None if x is None else x.detach().float() for x in args[:3]), args[3], 0.8)  # type: ignore[arg-type]
    for chunk in (3, None):
        values = target_logprobs(*args, 0.8, chunk, fp32_head=True)
        rounded = target_logprobs(*args, 0.8, chunk)
        for value, narrow, expected in zip(values, rounded, exact, strict=True):
            torch.testing.assert_close(value, expected, atol=2e-5, rtol=1e-5)
            assert (narrow - expected).abs().max() > 1e-3
        for tensor, other in zip(
            torch.autograd.grad(values[0].sum(), wanted), torch.autograd.grad(rounded[0].sum(), wanted), strict=True
        ):
            assert tensor.dtype is torch.bfloat16
            torch.testing.assert_close(tensor, other, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("asked", [False, True])
def test_a_float32_head_is_one_key_for_policy_and_engines(asked: bool, tmp_path: Path) -> None:
    """A float32 head on one side alone would widen the gap that it is meant to close."""
    recipe = {"model": {"path": str(tmp_path)}, "data": {"path": "d"}}
    config = TrainConfig.model_validate(recipe | {"policy": {"fp32_head": asked}})
    assert config.policy.fp32_head is asked
    assert engine_settings(config, on_cuda=False).fp32_head is asked
