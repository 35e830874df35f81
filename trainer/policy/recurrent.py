"""Recurrent mixers (linear attention, state-space models, short convolutions) for sequences that
are laid end to end.

Such a mixer hands a state from token to token, so in a pack it would hand one sequence's to the
next. Transformers has arguments for the ends of sequences (`cu_seqlens`, `seq_idx`), under
different names from family to family, and its functions without CUDA kernels drop them in silence.
Here a mixer gets each sequence of a pack in a row of its own, padded behind, where a causal mixer
never looks: exact for every family, on CPUs and GPUs alike. Rows whose lengths have the same number
of binary digits share a call, so that less than half of what is computed is padding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from trainer.model_structure import decoder

_OF_A_PACK = frozenset(
    (
        "attention_mask",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "position_ids",
        "seq_idx",
        "sequence_lengths",
    )
)
"""Arguments that describe the pack or mask it, and that a mixer of whole rows does without."""


def recurrent_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the decoder layers that hand a state from token to token.

    They are those with a causal convolution of their own, as all of them have in Transformers 5.
    """
    mixers = []
    for layer in getattr(decoder(model), "layers", ()):
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                mixers.append(module)
    return mixers


class SequenceRows:
    """The wrapped mixers of a model, with the lengths of the sequences that it computes.

    Attributes: lengths: the lengths of a pack's sequences; empty if each sequence has a row of its
        own already. They are kept until the next pass, as a layer that checkpointing recomputes in
        backward needs them again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap the model's mixers; a model without any is left as it is."""
        self.lengths: Sequence[int] = ()
        for mixer in recurrent_mixers(model):
            self._wrap(mixer)

    def _wrap(self, mixer: nn.Module) -> None:
        inner: Callable[..., Any] = mixer.forward

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.lengths:
                return inner(hidden_states, *args, **kwargs)
            return self._row_by_row(inner, hidden_states, args, kwargs)

        mixer.forward = forward  # type: ignore[method-assign]

    @torch.compiler.disable  # lengths differ from pack to pack
    def _row_by_row(
        self, inner: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the mixer's result for a pack, [1, N, H], computed with a row for each
        sequence.
        """
        if hidden.shape[:2] != (1, sum(self.lengths)):
            shape = list(hidden.shape)
            tokens = sum(self.lengths)
            raise ValueError(
                f"a recurrent layer got {shape} where the pack has {tokens} tokens in one row"
            )
        kwargs = {name: None if name in _OF_A_PACK else value for name, value in kwargs.items()}
        sequences = hidden[0].split(list(self.lengths))
        results = dict[int, Tensor]()
        rest: tuple[Any, ...] | None = None
        for digits in sorted({length.bit_length() for length in self.lengths}):
            numbers = [n for n, length in enumerate(self.lengths) if length.bit_length() == digits]
            rows = pad_sequence([sequences[n] for n in numbers], batch_first=True)
            output = inner(rows, *args, **kwargs)
            if isinstance(output, tuple):
                output, rest = output[0], output[1:]
            results |= {n: row[: self.lengths[n]] for n, row in zip(numbers, output, strict=True)}
        packed = torch.cat([results[n] for n in range(len(sequences))]).unsqueeze(0)
        return packed if rest is None else (packed, *rest)
