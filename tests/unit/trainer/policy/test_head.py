"""What a model does to its head's products: read off its forward pass, and equal to Transformers' own logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.support.families import BASE, FAMILIES
from trainer.errors import UserError
from trainer.policy.head import Logits, logits_of
from trainer.policy.logprobs import target_logprobs
from trainer.policy.module import PolicyModule

TEMPERATURE = 0.7
CHANGES = {
    "gemma2": Logits(cap=4.0),
    "gemma3n": Logits(cap=4.0),
    "granite3": Logits(factor=1 / 6),
    "granite4_moe": Logits(factor=0.25),
    "cohere2": Logits(factor=0.25),
    "falcon_h1_mup": Logits(factor=0.5),
    "minicpm3": Logits(before=0.5),
    "llama": Logits(),
}
SETTINGS = {
    "gemma2": {"final_logit_softcapping": 4.0},
    "gemma3n": {"final_logit_softcapping": 4.0},
    "granite3": {"logits_scaling": 6.0},
    "minicpm3": {"dim_model_base": 64},
}


def make_model(family: str) -> PreTrainedModel:
    model_type, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        **BASE | settings | {"tie_word_embeddings": False} | SETTINGS.get(family, {})
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def numbers(change: Logits) -> tuple[float, float, float]:
    return change.factor, change.cap or 0.0, change.before


def result_of(logprobs: Tensor, entropy: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return values and the gradients of their weighted sum, in float64."""
    weights = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(2))
    total = (logprobs * weights[0] + entropy * weights[1]).sum()
    return [
        tensor.detach().double() for tensor in (logprobs, entropy, *torch.autograd.grad(total, leaves))
    ]


@pytest.mark.parametrize("family", CHANGES)
def test_values_and_gradients_are_those_of_transformers_logits(family: str) -> None:
    """Transformers computes in float64 from the same hidden states; ours within 1e-6 of the norm, by blocks."""
    model, draw = make_model(family), torch.Generator().manual_seed(1)
    assert numbers(logits_of(model)) == pytest.approx(numbers(CHANGES[family]), rel=1e-11)
    ids = torch.randint(BASE["vocab_size"], (2, 24), generator=draw)
    hidden = torch.randn(2, 24, BASE["hidden_size"], generator=draw)
    model.lm_head.weight.data = torch.randn(model.lm_head.weight.shape, generator=draw) * 0.15
    leaves = [hidden.flatten(0, 1).requires_grad_(), model.lm_head.weight]
    values = target_logprobs(
        leaves[0], leaves[1], None, ids.flatten(), TEMPERATURE, block=(20, 100), head=logits_of(model)
    )
    got = result_of(*values, leaves)

    exact = hidden.double().requires_grad_()

    def answer(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = exact
        return output

    model.lm_head.double()
    model.base_model.register_forward_hook(answer)
    log_p = (model(input_ids=ids, use_cache=False).logits / TEMPERATURE).log_softmax(-1).flatten(0, 1)
    expected_values = log_p.gather(1, ids.view(-1, 1)).squeeze(1), -(log_p.exp() * log_p).sum(1)
    expected = result_of(*expected_values, [exact, model.lm_head.weight])
    for one, other in zip(got, expected, strict=True):
        assert (one - other.view(one.shape)).norm() <= 1e-6 * other.norm()


def test_a_policy_applies_what_its_model_does_to_its_logits() -> None:
    model, ids = make_model("granite3"), torch.arange(10, 30).view(1, 20)
    logits = model(input_ids=ids).logits.detach()
    model.set_attn_implementation("sdpa")
    states, targets = torch.arange(20), torch.arange(11, 31)
    logprobs = PolicyModule(model)(ids, states, targets, TEMPERATURE, {})[0]
    expected = (logits[0] / TEMPERATURE).log_softmax(-1)[states, targets]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def qwen2_with(change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    class Changed(Qwen2ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            return output

    config = Qwen2Config(
        vocab_size=60, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        return Changed(config)


def test_a_factor_goes_with_a_cap_in_any_order_and_in_float32() -> None:
    model = qwen2_with(lambda logits: 15 * torch.tanh(logits.float() * 0.3 / 15))
    assert numbers(logits_of(model)) == pytest.approx((0.3, 15.0, 1.0), rel=1e-6)
    model = qwen2_with(lambda logits: 0.5 * (20 * torch.tanh(logits / 20)))
    assert numbers(logits_of(model)) == pytest.approx((0.5, 10.0, 1.0), rel=1e-11)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert logits_of(qwen2_with(Tensor.float)) == Logits()


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.clamp(-30, 30),
        lambda logits: logits + 1,
        lambda logits: logits.index_fill(-1, torch.tensor([3]), -1e4),
        lambda logits: torch.cat([logits, logits], -1),
        lambda logits: logits.log_softmax(-1),
        lambda logits: 1 / 0,
    ],
)
def test_other_changes_are_refused_in_one_sentence(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        UserError, match="^Changed makes its logits in a way that .* not compute: use another model$"
    ):
        logits_of(qwen2_with(change))
