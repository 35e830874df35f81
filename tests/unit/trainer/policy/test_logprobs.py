"""The head by blocks against torch.log_softmax over the whole logits tensor, and against finite differences."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.recipes import make_config
from trainer.engines import engine_settings
from trainer.policy.head import Logits
from trainer.policy.logprobs import CPU_ELEMENTS, block_shape, cuda_block_elements, target_logprobs


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(
        torch.promote_types(hidden.dtype, torch.float32)
    )
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(dim=-1)


def inputs(
    tokens: int, dtype: torch.dtype, with_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(23, 8, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(23, generator=generator).to(dtype).requires_grad_() if with_bias else None
    return hidden, weight, bias, torch.randint(23, (tokens,), generator=generator)


def test_one_token_at_a_time_by_hand() -> None:
    hidden, weight, _, targets = inputs(5, torch.float64)
    hidden, weight = hidden.detach(), weight.detach()
    logprobs, entropy = target_logprobs(hidden, weight, None, targets, temperature=0.7, block=(2, 5))
    for n in range(5):
        z = [sum(float(hidden[n, h] * weight[v, h]) for h in range(8)) / 0.7 for v in range(23)]
        p = torch.softmax(torch.tensor(z, dtype=torch.float64), dim=0)
        assert float(logprobs[n]) == pytest.approx(float(p[targets[n]].log()), abs=1e-10)
        assert float(entropy[n]) == pytest.approx(-sum(float(q * q.log()) for q in p), abs=1e-10)


@pytest.mark.parametrize("block", [(1, 1), (3, 7), (7, 3), (10, 23), (5, 64), (64, 4), None])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_blocks_equal_one_tensor_of_all_logits(
    block: tuple[int, int] | None, with_bias: bool, temperature: float
) -> None:
    """Values and all gradients, with blocks that divide tokens and vocabulary and blocks that do not."""
    args = inputs(10, torch.float32, with_bias)
    wanted = [x for x in args[:3] if x is not None]
    coefficients = torch.randn(2, 10)
    results = []
    for values in (plain(*args, temperature), target_logprobs(*args, temperature, block)):
        total = (values[0] * coefficients[0] + values[1] * coefficients[1]).sum()
        results.append([*values, *torch.autograd.grad(total, wanted)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


SHAPES = [(1, 64, 2049), (1025, 32, 2047), (1500, 48, 5003), (33, 128, 151)]
"""Tokens, hidden size and vocabulary, at the edges of blocks of 1,024 tokens and 2,048 columns."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_close_to_float64_as_their_dtype_allows(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """float32: within 1e-6 of the norm; bfloat16: no further than by whole rows of logits, of 256 tokens at a time."""
    tokens, size, vocabulary = shape
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(tokens, size, generator=draw),
        torch.randn(vocabulary, size, generator=draw),
    )
    operands = [hidden.to(dtype), weight.mul(0.1).to(dtype)]
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    coefficients = torch.randn(2, tokens, generator=draw)

    def results(
        function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, chunk: int = tokens
    ) -> list[Tensor]:
        parts = []
        for rows in torch.arange(tokens).split(chunk):
            leaves = [
                operands[0][rows].to(dtype).requires_grad_(),
                operands[1].to(dtype, copy=True).requires_grad_(),
            ]
            values = function(*leaves, None, targets[rows], 0.8)
            total = (values[0] * coefficients[0, rows] + values[1] * coefficients[1, rows]).sum()
            parts.append(
                [tensor.detach().double() for tensor in (*values, *torch.autograd.grad(total, leaves))]
            )
        *by_token, of_weight = zip(*parts, strict=True)
        return [torch.cat(tensors) for tensors in by_token] + [
            torch.stack(of_weight).sum(0).to(dtype).double()
        ]

    exact = results(plain, torch.float64)
    limits = [1e-6] * 4
    if dtype is torch.bfloat16:
        chunks = results(plain, dtype, 256)
        limits = [1.01 * ((a - b).norm() / b.norm()).item() for a, b in zip(chunks, exact, strict=True)]
    for got, expected, limit in zip(results(target_logprobs, dtype), exact, limits, strict=True):
        assert (got - expected).norm() / expected.norm() <= limit


def test_bits_are_the_same_again_and_on_any_number_of_threads() -> None:
    """More threads are compared where this machine's plain products do not depend on them, unlike those of some MKL."""
    hidden, weight = torch.randn(300, 64, requires_grad=True), torch.randn(5003, 64, requires_grad=True)
    targets = torch.randint(5003, (300,))
    block = torch.randn(128, 1024)
    threads = torch.get_num_threads()
    results: dict[str, list[Tensor]] = {}
    products: dict[str, Tensor] = {}
    try:
        for name, count in (("one", 1), ("one again", 1), ("two", 2), ("three", 3)):
            torch.set_num_threads(count)
            values = target_logprobs(hidden, weight, None, targets, block=(128, 1024))
            total = values[0].sum() + values[1].sum()
            results[name] = [*values, *torch.autograd.grad(total, (hidden, weight))]
            products[name] = block @ weight.detach()[:1024]
    finally:
        torch.set_num_threads(threads)
    for name, others in results.items():
        if torch.equal(products[name], products["one"]):
            assert all(torch.equal(a, b) for a, b in zip(results["one"], others, strict=True)), name


def test_a_block_has_twice_as_many_columns_as_tokens_where_the_vocabulary_has_them() -> None:
    assert block_shape(CPU_ELEMENTS, 151936) == (512, 1024)
    assert block_shape(cuda_block_elements(80 << 30), 151936) == (4096, 8192)
    assert block_shape(CPU_ELEMENTS, 512) == (1024, 512)


def test_what_a_model_makes_of_its_products_has_its_derivative() -> None:
    hidden, weight, bias, targets = inputs(4, torch.float64, with_bias=True)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return target_logprobs(*tensors, targets, 1.3, (3, 5), head=Logits(1.5, 3.0, 0.8))

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))
    logits = 3 * torch.tanh(1.5 * torch.nn.functional.linear(0.8 * hidden, weight, bias) / 3)
    expected = torch.log_softmax(logits / 1.3, dim=1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(function(hidden, weight, bias)[0], expected)


@pytest.mark.parametrize("fp32_head", [False, True])
def test_bfloat16_logits_are_changed_in_the_dtype_in_which_an_engine_changes_them(
    fp32_head: bool,
) -> None:
    """A float32 head: no rounding. Else products, quotients, tangents and logits are rounded, as in vLLM's layer."""
    hidden, weight, _, targets = inputs(33, torch.bfloat16)
    logits = torch.nn.functional.linear(
        *((hidden.float(), weight.float()) if fp32_head else (hidden, weight))
    )
    logits = torch.tanh(logits / 3.0) * 3.0
    head = Logits(cap=3.0)
    values = target_logprobs(hidden, weight, None, targets, 0.8, (4, 6), fp32_head, head)
    expected = (logits.float() / 0.8).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(values[0], expected, atol=1e-6, rtol=0)
    got = torch.autograd.grad(values[0].sum(), (hidden, weight))
    for one, other in zip(got, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.03)


@pytest.mark.parametrize("which", [0, 1, "both"])
def test_gradients_pass_gradcheck(which: int | str) -> None:
    hidden, weight, bias, targets = inputs(4, torch.float64, with_bias=True)

    def function(*tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        result = target_logprobs(*tensors, targets, temperature=1.3, block=(3, 5))
        return result if which == "both" else result[int(which)]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_bf16_inputs_give_fp32_results_and_bf16_gradients() -> None:
    hidden, weight, _, targets = inputs(33, torch.bfloat16)
    logprobs, entropy = target_logprobs(hidden, weight, None, targets, 1.0, block=(4, 6))
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, expected_entropy = plain(hidden, weight, None, targets, 1.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    got = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    exact = torch.autograd.grad(
        plain(hidden.double(), weight.double(), None, targets, 1.0)[0].sum(), (hidden, weight)
    )
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
        target_logprobs(hidden, weight, None, torch.zeros(tokens, dtype=torch.int64), block=(8, 512))
    assert max(saved) < tokens * vocabulary


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_float32_head_does_not_round_logits(with_bias: bool) -> None:
    """bfloat16 inputs: values are those of the same numbers in float32; gradients stay bfloat16's."""
    args = inputs(10, torch.bfloat16, with_bias)
    wanted = [x for x in args[:3] if x is not None]
    exact = plain(*(None if x is None else x.detach().float() for x in args[:3]), args[3], 0.8)  # type: ignore[arg-type]
    for block in ((3, 5), None):
        values = target_logprobs(*args, 0.8, block, fp32_head=True)
        rounded = target_logprobs(*args, 0.8, block)
        for value, narrow, expected in zip(values, rounded, exact, strict=True):
            torch.testing.assert_close(value, expected, atol=2e-5, rtol=1e-5)
            assert (narrow - expected).abs().max() > 1e-3
        for own, other in zip(
            torch.autograd.grad(values[0].sum(), wanted),
            torch.autograd.grad(rounded[0].sum(), wanted),
            strict=True,
        ):
            assert own.dtype is torch.bfloat16
            torch.testing.assert_close(own, other, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("asked", [False, True])
def test_a_float32_head_is_one_key_for_policy_and_engines(asked: bool, tmp_path: Path) -> None:
    """On one side alone it would move the two apart, where it is there to bring them together."""
    config = make_config(model={"path": str(tmp_path)}, policy={"fp32_head": asked})
    assert config.policy.fp32_head is asked
    assert engine_settings(config, on_cuda=False).fp32_head is asked
