"""Tied embeddings that add to the head's gradient, against the gradients of the same model without that."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from trainer.policy.tied import add_rows_to_head

PADDING = 3
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def models(tied: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model with a padding token, and its copy with `add_rows_to_head`."""
    config = Qwen2Config(
        vocab_size=29, tie_word_embeddings=tied, pad_token_id=PADDING, num_key_value_heads=2, **SIZES
    )
    torch.manual_seed(0)
    plain = Qwen2ForCausalLM(config).double()
    changed = copy.deepcopy(plain)
    add_rows_to_head(changed)
    return plain, changed


def gradients(
    model: PreTrainedModel, batches: list[Tensor], head: bool = True
) -> dict[str, Tensor | None]:
    """Return the gradients of a loss summed over batches; without `head`, of one that does not depend on the logits."""
    for ids in batches:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        values = model.lm_head(hidden) if head else hidden
        values.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("tied", "head"), [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_the_plain_model(tied: bool, head: bool) -> None:
    """Tokens occur once, twice, and in both of two batches; the padding token has a row in the head's gradient only."""
    batches = [torch.tensor([[1, 5, 5, 28], [0, PADDING, PADDING, 7]]), torch.tensor([[5, 2, 1]])]
    expected, results = (gradients(model, batches, head) for model in models(tied))
    for name, gradient in expected.items():
        torch.testing.assert_close(results[name], gradient, atol=1e-12, rtol=1e-9, msg=name)


def test_backward_makes_no_second_gradient_of_the_vocabularys_size() -> None:
    """Autograd gets none from the embeddings: the weight's gradient consists of one contribution."""
    counts = []
    for model in models(tied=True):
        contributions: list[Tensor] = []
        embedding = model.get_input_embeddings()
        rows = embedding(torch.tensor([[1, 2]]))
        parents = [node for node, _ in rows.grad_fn.next_functions if node is not None]
        contributions += [node.variable for node in parents if node.variable is embedding.weight]
        counts.append(len(contributions))
    assert counts == [1, 0]


def test_frozen_embeddings_and_scoring_need_no_gradient() -> None:
    _, model = models(tied=True)
    ids = torch.tensor([[1, 2]])
    with torch.no_grad():
        assert not model.get_input_embeddings()(ids).requires_grad
    model.requires_grad_(False)
    assert not model.get_input_embeddings()(ids).requires_grad
