"""`hotbunk.Training` on one rank, against plain Transformers, torch's AdamW and the recipe's loop."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from hotbunk import Datum, Training, UserError
from tests.support import training_checks as checks
from tests.support.training_checks import (
    assert_equal,
    gradients_of,
    make,
    plain_logprobs,
    plain_model,
    random_data,
    weights_of,
)
from trainer.training.losses import NamedLoss


@pytest.fixture(scope="module")
def shared(tiny_qwen3: Path) -> Iterator[Training]:
    """A training whose weights no test changes."""
    with make(tiny_qwen3) as training:
        yield training


@pytest.fixture
def training(shared: Training) -> Iterator[Training]:
    yield shared
    shared._drop()
    assert shared.version == 0


@pytest.mark.parametrize(("lora_rank", "shared"), [(None, False), (None, True), (4, True)])
def test_a_step_of_a_recipe_given_as_data_ends_in_the_loops_weights(
    tiny_qwen3: Path, lora_rank: int | None, shared: bool
) -> None:
    checks.check_recipe(tiny_qwen3, lora_rank, shared=shared)


def test_logprobs_of_targets_that_are_not_the_inputs_equal_full_logits(
    training: Training, tiny_qwen3: Path
) -> None:
    data = random_data(9, shifted=False)
    model = plain_model(tiny_qwen3)
    for got, datum in zip(training.logprobs(data), data, strict=True):
        torch.testing.assert_close(got, plain_logprobs(model, datum), rtol=0, atol=1e-5)


def clipped(low: float, high: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda r, a: -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "cross_entropy": ({}, lambda p, q, a: -p),
    "reinforce": ({}, lambda p, q, a: -a * p),
    "importance_sampling": ({}, lambda p, q, a: -(p - q).exp() * a),
    "ppo": ({}, lambda p, q, a: clipped(0.2, 0.2)((p - q).exp(), a)),
    "clip": ({"clip_low": 0.5}, lambda p, q, a: clipped(0.5, 0.28)((p - q).exp(), a)),
    "cispo": (
        {"clip_high": 1.0},
        lambda p, q, a: -(p - q).exp().detach().clamp(0, 2) * a * p,
    ),
    "gspo": (
        {"clip_low": 0.5, "clip_high": 0.5},
        lambda p, q, a: clipped(0.5, 0.5)((p - q).mean().expand(len(p)).exp(), a),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient_equal_its_formula_on_full_logits(
    training: Training, tiny_qwen3: Path, name: str
) -> None:
    options, formula = FORMULAS[name]
    model = plain_model(tiny_qwen3)
    data = random_data(12)
    with torch.no_grad():  # ratios on both sides of 1
        for datum in data:
            noise = torch.tensor(datum.advantages)
            datum.logprobs = (plain_logprobs(model, datum) + noise).tolist()
            datum.advantages = noise.flip(0).tolist()
    if name == "gspo":  # GSPO-token spreads the sequence's gradient by each token's own weight
        data = [replace(datum, weights=None, advantages=[0.7] * len(datum.inputs)) for datum in data]
    total = torch.zeros(())
    for datum in data:
        weights = torch.tensor(datum.weights or [1.0] * len(datum.inputs))
        kept = weights != 0
        p, q, a = (
            values[kept]
            for values in (
                plain_logprobs(model, datum),
                torch.tensor(datum.logprobs),
                torch.tensor(datum.advantages),
            )
        )
        if kept.any():
            total = total + (weights[kept] * formula(p, q, a)).sum()
    total.backward()
    figures = training.forward_backward(data, name, **options)
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-5)
    expected = {n: p.grad for n, p in model.named_parameters()}
    got = gradients_of(training)
    assert_equal(
        got, {n: expected[n] for n in got}, 1e-4 * max(g.abs().max().item() for g in got.values())
    )


def test_calls_add_up_and_scores_between_them_change_no_bit(training: Training) -> None:
    data = random_data(16)
    training.forward_backward(data, "ppo")
    once = gradients_of(training)
    training._drop()
    for start in range(0, 16, 4):
        training.forward_backward(data[start : start + 4], "ppo")
    parts = gradients_of(training)
    assert_equal(parts, once, 1e-6 * max(g.abs().max().item() for g in once.values()))
    training._drop()
    for start in range(0, 16, 4):
        training.forward_backward(data[start : start + 4], "ppo")
        training.logprobs(data)
    assert_equal(gradients_of(training), parts)


def test_a_function_of_logprobs_equals_the_loss_of_that_name(training: Training) -> None:
    data = random_data(9)

    def loss(given: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        terms = [torch.tensor(d.weights) @ p for d, p in zip(given, logprobs, strict=True)]
        return -torch.stack(terms).sum(), {"data": len(given)}

    named = training.forward_backward(data, "cross_entropy")
    expected = gradients_of(training)
    training._drop()
    figures = training.forward_backward(data, loss)
    assert figures["data"] == 9 and figures["loss"] == pytest.approx(named["loss"], rel=1e-6)
    assert_equal(gradients_of(training), expected)


def test_data_that_a_function_leaves_out_have_no_gradient(training: Training) -> None:
    data = random_data(3)
    training.forward_backward([replace(data[1], weights=None)], "cross_entropy")
    expected = gradients_of(training)
    training._drop()
    training.forward_backward(data, lambda given, logprobs: -logprobs[1].sum())
    assert_equal(gradients_of(training), expected, 1e-5)


def test_steps_equal_transformers_and_torchs_adamw(tiny_qwen3: Path) -> None:
    """Twenty steps with changing rates, betas, eps, decay and bounds of the norm."""
    model = plain_model(tiny_qwen3)
    optimizer = torch.optim.AdamW(model.parameters())
    data = [replace(datum, weights=None) for datum in random_data(20)]
    with make(tiny_qwen3) as training:
        for step, datum in enumerate(data):
            labels = torch.tensor([[*datum.inputs[:1], *datum.targets]])
            loss = model(labels, labels=labels).loss * len(datum.inputs)
            loss.backward()
            keys: dict[str, Any] = {
                "betas": (0.9 - 0.02 * step, 0.95),
                "eps": 10.0 ** -(4 + step % 3),
                "weight_decay": 0.1 * (step % 2),
            }
            norm = clip_grad_norm_(model.parameters(), bound := 5.0 + step)
            for group in optimizer.param_groups:
                group |= keys | {"lr": 1e-4 * (1 + step % 4)}
            optimizer.step()
            optimizer.zero_grad()
            figures = training.forward_backward([datum], "cross_entropy")
            assert figures["loss"] == pytest.approx(loss.item(), rel=1e-6)
            step_figures = training.optim_step(1e-4 * (1 + step % 4), max_grad_norm=bound, **keys)
            assert step_figures["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        got = weights_of(training)
        expected = dict(model.named_parameters())
        assert_equal(got, {name: expected[name].detach() for name in got}, 1e-5)
        assert training.version == 20


def test_a_saved_training_continues_bit_for_bit(tiny_qwen3: Path, tmp_path: Path) -> None:
    data = random_data(12)
    with make(tiny_qwen3, lora_rank=4) as training:
        for part in (data[:4], data[4:8]):
            training.forward_backward(part)
            training.optim_step(1e-2)
        training.save(tmp_path / "a")
        training.forward_backward(data[8:])
        with pytest.raises(UserError, match="save would lose the waiting gradients"):
            training.save(tmp_path / "b")
        training.optim_step(1e-2)
        expected = weights_of(training)
    with make(tiny_qwen3, lora_rank=4) as training:
        training.forward_backward(data)  # dropped
        assert training.load(tmp_path / "a") == tmp_path / "a" / "step_2"
        training.forward_backward(data[8:])
        training.optim_step(1e-2)
        assert_equal(weights_of(training), expected)
        training.export(tmp_path / "model")
        model = plain_model(tmp_path / "model")
        got = training.logprobs(data[:1])[0]
        torch.testing.assert_close(plain_logprobs(model, data[0]), got, rtol=0, atol=1e-4)
        assert (tmp_path / "model/adapter/adapter_model.safetensors").is_file()


GOOD = Datum([5, 6, 7], [6, 7, 8], [1, 1, 0], [-1.0, -2.0, -3.0], [0.5, 0.5, 0.5])
BAD: dict[str, tuple[Any, str]] = {
    "nothing": ([], "data is empty: give at least one"),
    "one datum": (GOOD, "data is a Datum: give a list"),
    "another type": ([GOOD, {"inputs": [1]}], "datum 1 is a dict: give a hotbunk.Datum"),
    "no inputs": ([Datum([], [])], "datum 0 has 0 inputs: give at least one, and at most"),
    "too long": ([Datum([5] * 5000, [5] * 5000)], "datum 0 has 5000 inputs: give at least one, and at"),
    "lengths": ([GOOD, Datum([5, 6], [7])], "datum 1: targets has 1 entries, but inputs has 2"),
    "weights": ([replace(GOOD, weights=[1.0])], "datum 0: weights has 1 entries, but inputs has 3"),
    "fractions": ([Datum([5.0], [6])], "datum 0: inputs has the dtype torch.float32: give ids"),
    "bools": ([Datum([True], [6])], "datum 0: inputs has the dtype torch.bool: give ids"),
    "text": ([Datum("abc", [6])], "datum 0: inputs is 'abc': give a list of ids"),
    "outside": (
        [GOOD, Datum([5], [10**6])],
        "datum 1: targets contains 1000000, but the vocabulary has",
    ),
    "negative": ([Datum([-1], [6])], "datum 0: inputs contains -1, but the vocabulary has the ids 0 to"),
    "NaN": (
        [replace(GOOD, weights=[1, math.nan, 1])],
        "datum 0: weights is nan at entry 1: give finite",
    ),
    "infinity": ([replace(GOOD, advantages=[1, 1, math.inf])], "datum 0: advantages is inf at entry 2"),
    "two dimensions": ([Datum([[5]], [[6]])], r"datum 0: inputs has the shape \[1, 1\]: give a list"),
    "missing": ([replace(GOOD, logprobs=None)], "datum 0 has no logprobs, which this loss needs"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data_ends_in_a_sentence_and_leaves_gradients_as_they_were(
    training: Training, what: str
) -> None:
    data, sentence = BAD[what]
    training.forward_backward([GOOD], "ppo")
    expected = gradients_of(training)
    with pytest.raises(UserError, match=sentence):
        training.forward_backward(data, "ppo")
    assert not training._failed
    assert_equal(gradients_of(training), expected)


@pytest.mark.parametrize(
    ("loss", "options", "sentence"),
    [
        ("pppo", {}, "there is no loss 'pppo': name one of cross_entropy, importance_sampling"),
        ("ppo", {"beta": 1.0}, "the loss ppo has no option beta: it takes clip_low, clip_high"),
        ("ppo", {"clip_low": "x"}, "clip_low is 'x': give a number"),
        ("ppo", {"ratio_level": "x"}, "ratio_level is 'x': name one of token, geometric, sequence"),
        ("ppo", {"temperature": 0.0}, "temperature is 0.0: give a finite number above 0"),
        (lambda data, p: 1 / 0, {}, "the loss <lambda> raised ZeroDivisionError: division by zero"),
        (lambda data, p: 1.0, {}, "the loss <lambda> returned float: return a scalar tensor"),
        (lambda data, p: p[0].sum() * math.nan, {}, "the loss <lambda>, or its gradient, is not finite"),
        (lambda data, p: p[0].sum(), {"clip_low": 1}, "a function as the loss takes no options"),
    ],
)
def test_a_wrong_loss_ends_in_a_sentence(
    training: Training, loss: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        training.forward_backward([GOOD], loss, **options)
    assert not training._failed


def test_after_a_failed_call_the_next_step_fails_and_the_one_after_it_works(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_data(12)
    with make(tiny_qwen3) as training:
        with pytest.raises(UserError, match="optim_step applied nothing, since there are no gradients"):
            training.optim_step()
        training.forward_backward(data)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            original = NamedLoss.__call__
            batches: list[Any] = []

            def second(loss: NamedLoss, batch: Any, outputs: Any) -> Any:
                batches.append(batch)
                if len(batches) == 2:
                    raise KeyboardInterrupt
                return original(loss, batch, outputs)

            patch.setattr(NamedLoss, "__call__", second)
            training.forward_backward(data)
        with pytest.raises(UserError, match="since forward_backward has failed since the last"):
            training.optim_step(1e-3)
        assert training.version == 0
        training.forward_backward(data)
        training.optim_step(1e-3)
        got = weights_of(training)
    with make(tiny_qwen3) as training:  # a second one in this process
        training.forward_backward(data)
        training.optim_step(1e-3)
        assert_equal(got, weights_of(training))


def test_gradients_that_are_not_finite_are_dropped(tiny_qwen3: Path) -> None:
    huge = replace(GOOD, weights=[3e38, 3e38, 3e38])
    with make(tiny_qwen3) as training:
        before = copy.deepcopy(weights_of(training))
        with pytest.raises(UserError, match="the loss is inf: look at the data's values"):
            training.forward_backward([huge])
        with pytest.raises(UserError, match="since forward_backward has failed"):
            training.optim_step()
        training.forward_backward([replace(GOOD, weights=[1e37, 1e37, 1e37])])
        with pytest.raises(UserError, match="the loss or the gradient is not finite"):
            training.optim_step()
        assert_equal(weights_of(training), before)
        training.forward_backward([GOOD])
        assert training.optim_step()["version"] == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"policy": {"backend": "deepspeed"}}, "policy.backend: deepspeed works in hotbunk train alone"),
        ({"sync": {"way": "zero_copy"}}, "sync.way: zero_copy works in hotbunk train alone"),
        ({"policy": {"sequence_parallel": 2}}, "policy.sequence_parallel works in hotbunk train alone"),
        ({"model": {"routes": "engine"}}, "model.routes: engine works in hotbunk train alone"),
        ({"model": {"routes": "recorded"}}, "model.routes: recorded works in hotbunk train alone"),
        ({"engine": {"placement": "ranks"}}, "engine.placement: ranks works in hotbunk train alone"),
        ({"policy": {"learning_rate": 1.0}}, "policy.learning_rate is not a known key"),
        ({"policy": 3}, "policy is 3: give the keys of a section"),
    ],
)
def test_modes_that_do_not_work_are_refused(
    tiny_qwen3: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        Training(tiny_qwen3, **settings)
