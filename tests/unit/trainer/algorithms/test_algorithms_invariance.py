"""Whatever way a step is cut into micro-batches and padded, loss and gradient are the same.

Every loss with every aggregation is tried on each example; corrections and KL are drawn. Padding and masked positions
hold arbitrary numbers.
"""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms import advantages, aggregation, corrections, kl, losses
from trainer.algorithms.losses import log_ratio

Tensor = torch.Tensor
Rows = dict[str, Tensor]
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")


def clipped(level: str, dual_clip: float | None = None) -> Any:
    def loss(b: Rows) -> Tensor:
        ratio = log_ratio(b["new"], b["old"], b["mask"], level)
        return losses.clipped_surrogate(ratio, b["advantages"], 0.2, 0.28, dual_clip)[0]

    return loss


LOSSES = {
    "clipped": clipped("token"),
    "dual clip": clipped("token", 2.0),
    "gspo": clipped("geometric"),
    "whole sequence": clipped("sequence"),
    "cispo": lambda b: losses.cispo(
        log_ratio(b["new"], b["old"], b["mask"]), b["new"], b["advantages"], 1.0, 0.5
    )[0],
    "sapo": lambda b: losses.sapo(log_ratio(b["new"], b["old"], b["mask"]), b["advantages"])[0],
    "reinforce": lambda b: losses.reinforce(b["new"], b["advantages"])[0],
    "value": lambda b: losses.clipped_value_loss(b["new"], b["old"], b["engine"], 0.3)[0],
}
CORRECTIONS = {
    "none": lambda b: torch.ones_like(b["mask"]),
    "tokens": lambda b: corrections.rollout_ratios(b["old"], b["engine"], b["mask"]).clamp(max=1.5),
    "sequences": lambda b: corrections.rollout_ratios(
        b["old"], b["engine"], b["mask"], "sequence"
    ).clamp(max=1.5),
    "icepop": lambda b: (
        (r := corrections.rollout_ratios(b["old"], b["engine"], b["mask"]))
        * corrections.within(r, 0.5, 2.0)
    ),
    "geometric": lambda b: corrections.within(
        corrections.rollout_ratios(b["old"], b["engine"], b["mask"], "geometric"), 0.8, 1.2
    ),
    "stale": lambda b: corrections.not_stale(b["new"], b["engine"], b["advantages"], b["mask"], 0.1),
    "high entropy": lambda b: losses.high_entropy_mask(b["entropy"], b["mask"], 0.5),
}


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int], int]:
    """Draw sequences as lists of mask bits, their micro-batches, the padding of each, and a seed."""
    sequences = draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5)
    )
    sequences.append([1])
    bins = draw(st.lists(st.integers(0, 3), min_size=len(sequences), max_size=len(sequences)))
    parts = [[i for i, b in enumerate(bins) if b == k] for k in range(4)]
    return (
        sequences,
        parts,
        draw(st.lists(st.integers(0, 3), min_size=4, max_size=4)),
        draw(st.integers(0, 10**6)),
    )


def tensors(sequences: list[list[int]], seed: int) -> Rows:
    """Return the whole step in one batch; `new` and `entropy` are the leaves that gradients are taken of."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, sequences))
    mask = torch.tensor([row + [0] * (width - len(row)) for row in sequences], dtype=torch.float64)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    new = noise(1.0) - 2.0
    rows = {
        "mask": mask,
        "new": new,
        "entropy": noise(1.0).abs(),
        "advantages": noise(1.0),
        "reference": new + noise(0.3),
    }
    rows |= {"old": new + noise(0.3), "engine": new + noise(0.3)}
    rows["new"].requires_grad_()
    rows["entropy"].requires_grad_()
    return rows


def part(rows: Rows, indices: list[int], lengths: list[int], extra: int, garbage: float) -> Rows:
    """Return a micro-batch: some rows, wider than the longest of them, with garbage where there is no sequence."""
    width = max((lengths[i] for i in indices), default=1) + extra
    cut: Rows = {}
    for name, tensor in rows.items():
        padded = torch.nn.functional.pad(tensor[indices], (0, max(0, width - tensor.shape[1])))[
            :, :width
        ]
        outside = torch.arange(width) >= torch.tensor([lengths[i] for i in indices]).unsqueeze(1)
        cut[name] = padded if name == "mask" else torch.where(outside, garbage, padded)
    return cut


def loss_of(
    batch: Rows, name: str, correction: str, estimator: str, how: str, counts: dict[str, float]
) -> Tensor:
    loss = LOSSES[name](batch)
    if name != "value":
        loss = loss * CORRECTIONS[correction](batch) + losses.entropy_bonus(batch["entropy"], 0.1)
        estimate = kl.divergence(estimator, batch["new"], batch["old"], batch["reference"], clamp=1.0)
        loss = loss + 0.2 * estimate
    return (loss * aggregation.weights(batch["mask"], how, counts[how], counts[how], 6)).sum()


@settings(max_examples=10, deadline=None, database=None)
@given(
    step=steps(),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    estimator=st.sampled_from(["k1", "k2", "k3", "unbiased_k3"]),
    garbage=st.sampled_from([0.0, -50.0, 3.0]),
)
def test_no_split_and_no_padding_changes_loss_or_gradient(step, correction, estimator, garbage) -> None:
    sequences, parts, padding, seed = step
    rows, lengths = tensors(sequences, seed), [len(row) for row in sequences]
    leaves = [rows["new"], rows["entropy"]]
    batches = [
        part(rows, indices, lengths, extra, garbage)
        for indices, extra in zip(parts, padding, strict=True)
    ]
    tokens, sequences = float(rows["mask"].sum()), float(rows["mask"].any(dim=1).sum())
    counts = {how: tokens if how == "token_mean" else sequences for how in AGGREGATIONS}
    for name in LOSSES:
        for how in AGGREGATIONS:
            full_loss = loss_of(rows, name, correction, estimator, how, counts)
            pieces = torch.stack(
                [loss_of(b, name, correction, estimator, how, counts) for b in batches]
            ).sum()
            torch.testing.assert_close(pieces, full_loss, rtol=1e-6, atol=1e-9)
            gradients = [
                torch.autograd.grad(
                    total, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                for total in (pieces, full_loss)
            ]
            for split, one in zip(*gradients, strict=True):
                torch.testing.assert_close(split, one, rtol=1e-6, atol=1e-9)
                assert not one[rows["mask"] == 0].any()


@settings(max_examples=15, deadline=None, database=None)
@given(step=steps(), discount=st.sampled_from([1.0, 0.9]), trace=st.sampled_from([1.0, 0.95, 0.0]))
def test_token_advantages_do_not_depend_on_the_split(step, discount: float, trace: float) -> None:
    """Advantages are whitened over the step from moments of its parts; padding and masked positions have no effect."""
    sequences, parts, padding, seed = step
    rows, lengths = tensors(sequences, seed), [len(row) for row in sequences]
    batches = [
        part(rows, indices, lengths, extra, 9.0) for indices, extra in zip(parts, padding, strict=True)
    ]

    def estimate(batch: Rows) -> Tensor:
        return advantages.gae(batch["reference"], batch["old"], batch["mask"], discount, trace)[0]

    estimates = estimate(rows)
    total = torch.stack([advantages.moments(estimate(b), b["mask"]) for b in batches]).sum(dim=0)
    torch.testing.assert_close(total, advantages.moments(estimates, rows["mask"]), rtol=1e-5, atol=1e-5)
    expected = advantages.whiten(estimates, rows["mask"], total)
    for indices, batch in zip(parts, batches, strict=True):
        got = advantages.whiten(estimate(batch), batch["mask"], total)
        for row, index in enumerate(indices):
            length = lengths[index]
            torch.testing.assert_close(got[row, :length], expected[index, :length], rtol=1e-4, atol=1e-5)
            assert not got[row, length:].any()
