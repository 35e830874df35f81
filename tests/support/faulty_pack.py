"""Pack whose boundaries are off by one, a fault put in on purpose."""

from torch import Tensor

from trainer.policy.module import Packing, trunk_inputs
from trainer.types import MicroBatch


def shifted_inputs(batch: MicroBatch) -> tuple[Tensor, Packing]:
    """Return what `trunk_inputs` does, but each boundary inside a pack is one token later."""
    inputs, packing = trunk_inputs(batch)
    lengths = packing.get("sequence_lengths", [])
    if len(lengths) > 1:
        lengths = [lengths[0] + 1, *lengths[1:-1], lengths[-1] - 1]
        starts = packing["cu_seq_lens_q"].clone()
        starts[1:-1] += 1
        packing |= {"sequence_lengths": lengths, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        packing |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return inputs, packing
