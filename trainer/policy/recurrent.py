"""Recurrent mixers (linear attention, state-space models, short convolutions) for sequences that
are laid end to end.

Such a mixer hands a state from token to token, so in a pack it would hand one sequence's to the
next. Transformers has arguments for the ends of sequences (`cu_seqlens`, `seq_idx`), under
different names from family to family, and its functions without CUDA kernels drop them in silence.
Here a mixer gets each sequence of a pack in a row of its own, padded behind, where a causal mixer
never looks: exact for every family, on CPUs and GPUs alike. Rows whose lengths have the same number
of binary digits share a call, so that less than half of what is computed is padding.

Where common beginnings are computed once, the row is a path from the trie's root to a leaf: all
other layers see a shared token once, and mixers once for each leaf below it. A shared token's
result is that of the first of these rows; all have the same. Mixers whose kernels take an initial
state (those of flash-linear-attention on CUDA) could compute each node once and hand the state and
the convolution's last inputs to its children, but only level after level of the trie, and with
gradients of states: for 8 answers of 128 tokens to a prompt of 1,024, a mixer would compute 2,048
tokens instead of 9,216.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from trainer.model_structure import recurrent_mixers
from trainer.policy.paths import Paths, RowPaths, leaf_paths

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
        "tree",
    )
)
"""Arguments that describe the pack or mask it, and that a mixer of whole rows does without."""


class SequenceRows:
    """The wrapped mixers of a model, with the rows that they compute.

    Attributes: paths: the rows of a pack's tokens; None if each sequence has a row of its own
        already, or if there are no mixers. They are kept until the next pass, as a layer that
        checkpointing recomputes in backward needs them again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap the model's mixers; a model without any is left as it is."""
        self.paths: RowPaths | None = None
        self._mixers = recurrent_mixers(model)
        for mixer in self._mixers:
            self._wrap(mixer)

    def begin(self, packing: dict[str, Any]) -> None:
        """Set the rows of the next pass, from the arguments that keep the sequences of a pack
        apart.
        """
        self.paths = None
        if packing and self._mixers:
            lengths = packing["sequence_lengths"]
            tree = packing.get("tree")
            self.paths = RowPaths(lengths, lengths, []) if tree is None else leaf_paths(tree)

    def _wrap(self, mixer: nn.Module) -> None:
        inner: Callable[..., Any] = mixer.forward

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.paths is None:
                return inner(hidden_states, *args, **kwargs)
            return self._row_by_row(self.paths, inner, hidden_states, args, kwargs)

        mixer.forward = forward  # type: ignore[method-assign]

    @torch.compiler.disable  # lengths differ from pack to pack
    def _row_by_row(
        self,
        paths: RowPaths,
        inner: Callable[..., Any],
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the mixer's result for a pack, [1, N, H], computed with a row for each path."""
        lengths = paths.lengths
        if hidden.shape[:2] != (1, sum(paths.last)):
            shape = list(hidden.shape)
            tokens = sum(paths.last)
            raise ValueError(
                f"a recurrent layer got {shape} where the pack has {tokens} tokens in one row"
            )
        kwargs = {name: None if name in _OF_A_PACK else value for name, value in kwargs.items()}
        gathered = Paths.apply(hidden[0], paths.ranges) if paths.ranges else hidden[0]
        sequences = gathered.split(list(lengths))
        results = dict[int, Tensor]()
        rest: tuple[Any, ...] | None = None
        for digits in sorted({length.bit_length() for length in lengths}):
            numbers = [n for n, length in enumerate(lengths) if length.bit_length() == digits]
            rows = pad_sequence([sequences[n] for n in numbers], batch_first=True)
            output = inner(rows, *args, **kwargs)
            if isinstance(output, tuple):
                output, rest = output[0], output[1:]
            for n, row in zip(numbers, output, strict=True):
                results[n] = row[lengths[n] - paths.last[n] : lengths[n]]
        packed = torch.cat([results[n] for n in range(len(sequences))]).unsqueeze(0)
        return packed if rest is None else (packed, *rest)
