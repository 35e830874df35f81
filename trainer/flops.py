"""The floating-point operations of a model's forward and backward pass, for counts and estimates alike.

Counted as by Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B) for the model FLOPs utilisation (MFU): products
of matrices, two operations for each multiplication; recomputation in backward does not count. Unlike there, attention
is causal and within each sequence, and the output head runs at targets alone, as it does here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from sharding.send.source import whole_shape


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of the matrices that a token is multiplied by."""

    # elements of the matrices that every token passes; of a mixture's experts, those that a token is sent to
    trunk: int
    trunk_learned: int  # the elements among them that are trained
    head: int  # elements of the output head, which a target passes
    head_learned: int  # the same, or 0 where it is frozen
    attention: int  # layers * heads * size of a head

    def forward(self, tokens: float, targets: float, pairs: float) -> float:
        """Operations of a forward pass over this many tokens, targets and pairs (`attended`)."""
        return 2.0 * (self.trunk * tokens + self.head * targets) + 4.0 * self.attention * pairs

    def backward(self, tokens: float, targets: float, pairs: float) -> float:
        """Operations of the backward pass: gradients of all inputs, and of the matrices that are learned."""
        learned = 2.0 * (self.trunk_learned * tokens + self.head_learned * targets)
        return learned + 2.0 * (self.trunk * tokens + self.head * targets) + 8.0 * self.attention * pairs

    def tokens_worth(self, length: int) -> int:
        """Of how many tokens the trunk's products, without attention, are as much work as a sequence of this length.

        Example: in Qwen2.5's 7B model a sequence of 64k tokens is worth about 128k, and two of 32k together 96k.
        """
        return length + self.attention * length * (length + 1) // self.trunk  # 4 * attention * pairs / (2 * trunk)


def attended(lengths: Sequence[float]) -> float:
    """The number of pairs of a query and a key that it sees, in sequences of these lengths; windows are ignored."""
    return sum(length * (length + 1) / 2 for length in lengths)


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """The sizes of a Transformers model, with data or without, before it is sharded or under ZeRO."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(embedding.weight)} | ({id(head.weight)} if head is not None else set())
    trunk = learned = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in ends and len(shape := whole_shape(parameter)) > 1:
            experts = shape[0] if ".experts." in name and len(shape) > 2 else 0  # of which a token meets some
            share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
            used = int(shape.numel() * share)
            trunk, learned = trunk + used, learned + used * parameter.requires_grad
    size = 0 if head is None else whole_shape(head.weight).numel()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelFlops(
        trunk=trunk,
        trunk_learned=learned,
        head=size,
        head_learned=size if size and head.weight.requires_grad else 0,
        attention=config.num_hidden_layers * heads * width,
    )


@dataclass
class Work:
    """The work that a model has done on this rank so far."""

    of: ModelFlops
    tokens: int = field(default=0, init=False)  # the number it has learned from, those of prompts included
    flops: float = field(default=0.0, init=False)  # its operations, for these tokens and for those it only scored

    def count(self, tokens: int, targets: int, pairs: float) -> None:
        """Count a forward pass, arguments as `ModelFlops.forward`'s, and a backward pass if gradients are recorded."""
        amount = (tokens, targets, pairs)
        self.flops += self.of.forward(*amount)
        if torch.is_grad_enabled():
            self.flops += self.of.backward(*amount)
            self.tokens += tokens
