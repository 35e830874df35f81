"""The data of a training call: sequences with a target for each input, checked and made into
micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.ranks import rank
from trainer.errors import UserError, quoted
from trainer.learning.batching import Batcher
from trainer.types import MicroBatch, Sample

_NUMBERS = ("weights", "logprobs", "advantages")


@dataclass
class Datum:
    """A sequence to learn from: N inputs, and for each of them a target and what a loss needs.

    All fields are lists, arrays or tensors of N entries. A target is the token whose probability
    after its input counts. Usually it is the next input, but it may be any token. Where the weight
    is 0, no log-probability is computed.

        Datum([5, 6, 7], [6, 7, 8], weights=[0, 1, 1])    # learns 7 after 5 6, and 8 after 5 6 7

    `Datum.answer(prompt, answer)` makes the datum of a sampled answer.
    """

    inputs: Any  # ids
    targets: Any  # ids
    weights: Any = None  # factors of the tokens' losses, of either sign; None: all 1
    logprobs: Any = None  # nats, by the policy that sampled the targets
    advantages: Any = None

    @classmethod
    def answer(
        cls,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        advantage: float | None = None,
        logprobs: Sequence[float] | None = None,
        weight: float = 1.0,
    ) -> "Datum":
        """Return the datum of an answer to a prompt, both ids. The prompt has the weight 0.

        `logprobs` has an entry for each token of the answer; `advantage` and `weight` hold for all.
        """
        return cls._joined(prompt, answer, [1] * len(answer), advantage, logprobs, weight)

    @classmethod
    def of(
        cls, trajectory: Trajectory, *, advantage: float | None = None, weight: float = 1.0
    ) -> "Datum":
        """Return the datum of a trajectory. Tokens that the policy has not sampled have the weight
        0.
        """
        ids = (trajectory.prompt_ids, trajectory.response_ids)
        return cls._joined(*ids, trajectory.loss_mask, advantage, trajectory.logprobs, weight)

    @classmethod
    def _joined(
        cls,
        prompt: Sequence[int],
        answer: Sequence[int],
        mask: Sequence[int],
        advantage: float | None,
        logprobs: Sequence[float] | None,
        weight: float,
    ) -> "Datum":
        ids = [*prompt, *answer]
        before = [0.0] * len(prompt)
        return cls(
            inputs=ids[:-1],
            targets=ids[1:],
            weights=[*before, *(weight * one for one in mask)][1:],
            logprobs=None if logprobs is None else [*before, *logprobs][1:],
            advantages=None if advantage is None else [*before, *(advantage * m for m in mask)][1:],
        )


@dataclass
class CheckedDatum:
    """A checked datum: its inputs as a list, and tensors [N]."""

    inputs: list[int]
    targets: Tensor  # int64
    weights: Tensor  # float32, as all that follow
    logprobs: Tensor | None = None
    advantages: Tensor | None = None

    def content(self) -> bytes:
        """Return the bytes of all fields, by which ranks compare their data."""
        values = [torch.tensor(self.inputs), self.targets, self.weights, self.logprobs, self.advantages]
        return b"|".join(b"" if value is None else value.numpy().tobytes() for value in values)

    def sample(self) -> Sample:
        """Return the sequence as the batcher takes it: the ids that enter the model, and one more
        that predicts nothing.
        """
        return Sample(
            input_ids=[*self.inputs, int(self.targets[-1])],
            loss_mask=[0, *self.weights.ne(0).int().tolist()],
            engine_logprobs=[0.0] * (len(self.inputs) + 1),
        )


AnyDatum = Datum | Trajectory


def as_data(data: Sequence[AnyDatum], advantages: Sequence[float] | None = None) -> Sequence[Datum]:
    """Return data in which trajectories have become datums, each with its advantage.

    Raises UserError for a trajectory that cannot be learned from, and for advantages that do not
    belong to trajectories.
    """
    if not isinstance(data, Sequence) or not any(isinstance(row, Trajectory) for row in data):
        if advantages is not None:
            raise UserError("advantages are those of trajectories: give a Datum its own")
        return data  # type: ignore[return-value]
    if advantages is not None and len(advantages) != len(data):
        counts = f"there are {len(advantages)} advantages of {len(data)} trajectories"
        raise UserError(f"{counts}: give one number for each")
    rows = []
    for number, row in enumerate(data):
        if isinstance(row, Trajectory) and (row.error or row.images):
            fault = f"failed ({row.error})" if row.error else "has images"
            raise UserError(f"datum {number} is of an episode that {fault}: leave it out")
        advantage = None if advantages is None else float(advantages[number])
        rows.append(Datum.of(row, advantage=advantage) if isinstance(row, Trajectory) else row)
    return rows


def checked(
    data: Sequence[Datum], vocabulary: int, longest: int, needs: Sequence[str] = ()
) -> list[CheckedDatum]:
    """Return the rows of data that a call can compute.

    `vocabulary` is the number of ids, `longest` the most inputs of a datum, and `needs` names the
    fields that the loss reads. Raises UserError, naming the first datum and field that is wrong.
    """
    if isinstance(data, Datum) or not isinstance(data, Sequence):
        raise UserError(f"data is a {type(data).__name__}: give a list of hotbunk.Datum")
    if not data:
        raise UserError("data is empty: give at least one hotbunk.Datum")
    return [_row(f"datum {n}", datum, vocabulary, longest, needs) for n, datum in enumerate(data)]


def _row(name: str, datum: Datum, vocabulary: int, longest: int, needs: Sequence[str]) -> CheckedDatum:
    if not isinstance(datum, Datum):
        raise UserError(f"{name} is a {type(datum).__name__}: give a hotbunk.Datum")
    tensors = {}
    for field in fields(datum):
        value = getattr(datum, field.name)
        if value is not None:
            tensors[field.name] = _vector(f"{name}: {field.name}", value, field.name not in _NUMBERS)
        elif field.name not in _NUMBERS:
            raise UserError(f"{name} has no {field.name}: give a list of ids")
    length = len(tensors["inputs"])
    for field_name, tensor in tensors.items():
        if len(tensor) != length:
            entries = f"{name}: {field_name} has {len(tensor)} entries, but inputs has {length}"
            raise UserError(f"{entries}: give one for each input")
    if not 0 < length <= longest:
        raise UserError(f"{name} has {length} inputs: give at least one, and at most {longest}")
    for field_name in ("inputs", "targets"):
        ids = tensors[field_name]
        outside = ids[(ids < 0) | (ids >= vocabulary)].tolist()
        if outside:
            ends = f"the vocabulary has the ids 0 to {vocabulary - 1}"
            raise UserError(f"{name}: {field_name} contains {outside[0]}, but {ends}: correct it")
    if missing := [need for need in needs if need not in tensors]:
        raise UserError(f"{name} has no {missing[0]}, which this loss needs: give one for each input")
    tensors.setdefault("weights", torch.ones(length))
    return CheckedDatum(tensors.pop("inputs").tolist(), **tensors)


def _vector(name: str, value: Any, are_ids: bool) -> Tensor:
    """Return a field as a tensor [N] on the CPU: int64 for ids, else float32."""
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = "ids" if are_ids else "numbers"
        raise UserError(f"{name} is {quoted(value)}: give a list of {kind}") from error
    if tensor.dim() != 1:
        raise UserError(f"{name} has the shape {list(tensor.shape)}: give a list with one dimension")
    if are_ids:
        if len(tensor) and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise UserError(f"{name} has the dtype {tensor.dtype}: give ids, which are integers")
        return tensor.to(torch.int64)
    tensor = tensor.to(torch.float32)
    bad = (~tensor.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise UserError(f"{name} is {tensor[bad[0]].item()} at entry {bad[0]}: give finite numbers")
    return tensor


def every_position(rows: Sequence[CheckedDatum]) -> list[CheckedDatum]:
    """Return the rows with weights 1, so that all log-probabilities are computed."""
    return [replace(row, weights=torch.ones_like(row.weights)) for row in rows]


def micro_batches(rows: Sequence[CheckedDatum], batcher: Batcher) -> list[MicroBatch]:
    """Return this rank's share of rows, the same on all ranks, in micro-batches. Collective.

    `MicroBatch.rows` are indices in `rows`.
    """
    samples = [row.sample() for row in rows]
    share = batcher.deal_samples(samples)[rank()]
    batches = batcher.micro_batches([samples[index] for index in share])
    for batch in batches:
        batch.rows = [share[place] for place in batch.rows]
        members = [rows[index] for index in batch.rows]
        batch.targets = _table(batch, [row.targets for row in members], batch.input_ids.dtype)
        batch.weights = _table(batch, [row.weights for row in members])
        batch.engine_logprobs = _table(batch, [row.logprobs for row in members])
        batch.advantages = _table(batch, [row.advantages for row in members])
    return batches


def _table(
    batch: MicroBatch, values: Sequence[Tensor | None], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return vectors as the rows of a table [B, T-1] with zeros behind them."""
    table = torch.zeros(batch.loss_mask.shape, dtype=dtype)
    for line, value in zip(table, values, strict=False):  # a zero-weight micro-batch has none
        if value is not None:
            line[: len(value)] = value
    return table.to(batch.loss_mask.device)
