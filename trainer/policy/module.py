"""What is trained: a causal language model that answers with log-probabilities, a trunk that answers with values."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.batching import MicroBatch
from trainer.flops import Work, model_flops
from trainer.logprobs import target_logprobs
from trainer.policy.attention import require_packing
from trainer.policy.base import Outputs


class PolicyModule(nn.Module):
    """A causal language model whose forward gives log-probabilities instead of logits.

    Its output head is called with hidden states and targets, and answers as `target_logprobs`: a call, so that the
    hooks of FSDP and ZeRO gather the head's weight when it is needed.

    Attributes:
        work: what it has computed so far.
        value_head: [1, H], from zeros; None: values are another model's, or nobody's. No part of `model`, so that
            neither the engine nor an export ever sees it.
    """

    def __init__(self, model: PreTrainedModel, fp32_head: bool = False, value_head: bool = False) -> None:
        super().__init__()
        self.model, self.work = model, Work(model_flops(model))
        answer_with_logprobs(model.get_output_embeddings(), fp32_head)
        self.value_head = zero_head(model.config.get_text_config().hidden_size) if value_head else None

    def forward(
        self, input_ids: Tensor, mask: Tensor, temperature: float, lengths: list[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropy of the targets `input_ids[:, 1:]` where `mask` is true, 0 elsewhere.

        The output head, by far the largest matrix, runs only on positions whose target counts.

        Args:
            input_ids: [B, T], right-padded.
            mask: [B, T-1] bool.
            lengths: as in `target_states`.

        Returns:
            two tensors [B, T-1] float32, nats; with a value head a third, the values.
        """
        hidden = target_states(self.model.base_model, input_ids, mask, lengths)
        self.work.count(_rows(input_ids, lengths), len(hidden))
        found: tuple[Tensor, ...] = self.model.get_output_embeddings()(hidden, input_ids[:, 1:][mask], temperature)
        if self.value_head is not None:
            found = (*found, values_of(hidden, self.value_head))
        return tuple(spread(mask, each) for each in found)


def answer_with_logprobs(head: nn.Linear, fp32_head: bool) -> None:
    """Let an output head, where it is called with targets and a temperature as well, answer as `target_logprobs`."""
    logits = head.forward

    def forward(hidden: Tensor, *asked: Any) -> Any:
        if not asked:
            return logits(hidden)
        targets, temperature = asked
        return target_logprobs(hidden, head.weight, head.bias, targets, temperature, fp32_head=fp32_head)

    head.forward = forward  # type: ignore[assignment, method-assign]


class ValueModule(nn.Module):
    """A trunk and a head that tell what return is expected of the state in which a target is sampled: a critic."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: a Transformers model for sequence classification with one label, as reward models are."""
        super().__init__()
        self.model, self.work = model, Work(model_flops(model))

    def forward(self, input_ids: Tensor, mask: Tensor, lengths: list[int] | None = None) -> Tensor:
        """Values [B, T-1] float32 where `mask` is true, 0 elsewhere; arguments as `PolicyModule`'s."""
        hidden = target_states(self.model.base_model, input_ids, mask, lengths)
        self.work.count(_rows(input_ids, lengths), len(hidden))
        return spread(mask, values_of(hidden, self.model.score))


def target_states(trunk: PreTrainedModel, input_ids: Tensor, mask: Tensor, lengths: list[int] | None = None) -> Tensor:
    """Hidden states from which the targets `input_ids[:, 1:]` where `mask` is true are predicted, row by row.

    A last token predicts nothing, so the trunk does not see it.

    Args:
        trunk: a Transformers model without a head.
        input_ids: [B, T], right-padded.
        mask: [B, T-1] bool, true for K targets.
        lengths: of each row without padding: the trunk runs on these tokens alone, end to end in one row. None: it runs
            on padding, too.

    Returns:
        [K, H].

    Raises:
        UserError: the trunk's layers cannot keep the sequences of a row apart.
    """
    inputs = input_ids[:, :-1]
    if lengths is None:
        padded: Tensor = trunk(input_ids=inputs, use_cache=False).last_hidden_state
        return padded[mask]
    require_packing(trunk)
    sizes = torch.tensor([max(1, length - 1) for length in lengths], dtype=torch.int32, device=inputs.device)
    columns = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    real = columns < sizes.unsqueeze(1)
    starts = nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(1, max(lengths) - 1)
    packed: Tensor = trunk(
        input_ids=inputs[real].unsqueeze(0),
        position_ids=columns[real].unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state
    return packed[0, mask[real]]


def _rows(input_ids: Tensor, lengths: list[int] | None) -> list[int]:
    """How long each sequence is that a trunk runs on; padding is a part of it where it is not told the lengths."""
    return [input_ids.shape[1] - 1] * len(input_ids) if lengths is None else [max(1, each - 1) for each in lengths]


def outputs(module: nn.Module, batch: MicroBatch, temperature: float) -> Outputs:
    """What a PolicyModule, wrapped or not, says of a micro-batch."""
    return Outputs(*module(batch.input_ids, batch.loss_mask.bool(), temperature, batch.packed_lengths))


def zero_head(hidden_size: int) -> nn.Linear:
    """A value head, [1, H], that expects nothing of any state."""
    head = nn.Linear(hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


def values_of(hidden: Tensor, head: nn.Linear) -> Tensor:
    """[K] float32 from hidden states [K, H]: returns are too fine for bfloat16, in which 0.996 is followed by 1."""
    return nn.functional.linear(hidden.float(), head.weight.float()).squeeze(1)


def spread(mask: Tensor, values: Tensor) -> Tensor:
    """The K values back where `mask` is true, in its shape; 0 elsewhere."""
    return torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values)
