"""What trainer and engine make of single tokens, for people to look at: of some of a step's answers."""

from dataclasses import dataclass, field

from torch import Tensor

from sharding.ranks import is_main
from trainer.learning.answers import Answer
from trainer.learning.groups import MiniBatch
from trainer.types import MicroBatch, Outputs

_LONGEST = 2000  # tokens of an answer that are kept


@dataclass
class Watched:
    """One trajectory on the way through its update; K is the number of its tokens from the first trained one on."""

    answer: Answer
    ids: list[int] = field(default_factory=list)  # K
    figures: dict[str, list[float | None]] = field(default_factory=dict)  # K each; None where nothing was trained


class TokenFigures:
    """Keeps the figures of the first trajectories that rank 0 trains on in a step, as its first pass leaves them.

    It only reads: what is computed is the same with and without it. On other ranks it does nothing.
    """

    def __init__(self, count: int, minibatches: list[MiniBatch]) -> None:
        """Watch up to `count` trajectories, of the step's first update."""
        self._wanted: dict[int, Watched] = {}
        self._found: list[tuple[Watched, list[Tensor]]] = []
        if is_main() and count and minibatches:
            answers = [t for group in minibatches[0].groups for episode in group for t in episode]
            self._wanted = {place: Watched(answers[place]) for place in minibatches[0].shares[0][:count]}

    def note(self, batch: MicroBatch, outputs: Outputs) -> None:
        """Take what there is of a micro-batch of the first update; tensors stay on the device until `take`."""
        for row, place in enumerate(batch.rows):
            if (watched := self._wanted.pop(place, None)) is not None:
                tensors = (batch.input_ids[:, 1:], batch.loss_mask, batch.engine_logprobs, batch.advantages)
                own = [each[row, : batch.lengths[row] - 1] for each in (*tensors, outputs.logprobs, outputs.entropy)]
                self._found.append((watched, [each.detach().clone() for each in own]))

    def take(self) -> list[Watched]:
        """Gap (nats, trainer less engine), entropy (nats) and advantage of each token that was trained."""
        for watched, tensors in self._found:
            ids, mask, engine, advantages, logprobs, entropy = (each.tolist() for each in tensors)
            start = next((place for place, trained in enumerate(mask) if trained), len(mask))
            part = slice(start, start + _LONGEST)
            gaps = [own - other for own, other in zip(logprobs, engine, strict=True)]
            watched.ids = ids[part]
            for name, values in (("gap", gaps), ("entropy", entropy), ("advantage", advantages)):
                told = zip(values[part], mask[part], strict=True)
                watched.figures[name] = [value if trained else None for value, trained in told]
        return [watched for watched, _ in self._found]
