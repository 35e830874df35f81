"""What is trained: a causal language model that answers with log-probabilities."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.logprobs import target_logprobs


class PolicyModule(nn.Module):
    """A causal language model whose forward gives log-probabilities instead of logits.

    It is the module FSDP wraps at the root, so that the output head's weight, used here directly, is gathered when it
    is needed.
    """

    def __init__(self, model: PreTrainedModel, fp32_head: bool = False) -> None:
        super().__init__()
        self.model, self.fp32_head = model, fp32_head

    def forward(self, input_ids: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy of the targets `input_ids[:, 1:]` where `mask` is true, 0 elsewhere.

        The last position predicts nothing, so the model does not see it. The output head, by far the largest matrix,
        runs only on positions whose target counts.

        Args:
            input_ids: [B, T], right-padded.
            mask: [B, T-1] bool.

        Returns:
            two tensors [B, T-1] float32, nats.
        """
        hidden = self.model.base_model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        values = target_logprobs(
            hidden[mask], head.weight, head.bias, input_ids[:, 1:][mask], temperature, fp32_head=self.fp32_head
        )
        logprobs, entropy = (torch.zeros_like(mask, dtype=value.dtype).masked_scatter(mask, value) for value in values)
        return logprobs, entropy
