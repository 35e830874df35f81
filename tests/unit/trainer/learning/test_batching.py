"""Micro-batches: nothing lost, nothing doubled, never above the budget, the same on every rank."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.learning_steps import TablePolicy
from tests.support.recipes import make_config
from trainer.learning.batching import TABLE, Batcher, assign_to_ranks, micro_batches, pack, pack_padded
from trainer.policy.packing import make_layout
from trainer.types import Sample

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def sample(length: int, seed: int = 0) -> Sample:
    ids = [1 + (seed * 31 + i) % 9 for i in range(length)]
    mask = [int(i >= length // 2) for i in range(length)]
    return Sample(ids, mask, [-0.25 * (i + 1) * m for i, m in enumerate(mask)])


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 80))
def test_pack_keeps_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = pack(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in group) for group in groups]
    assert all(len(group) == 1 or load <= budget for group, load in zip(groups, loads, strict=True))
    longest = [max(lengths[i] for i in group) for group in groups]
    opened = [min(lengths[i] for i in groups[n]) for n in range(1, len(groups))]
    fuller = [loads[n] + short > budget for n, short in enumerate(opened)]
    taller = [
        (len(group) + 1) * width > TABLE * budget for group, width in zip(groups, longest, strict=True)
    ]
    assert all(a or b for a, b in zip(fuller, taller, strict=False)), (
        "what came later would have fitted before"
    )
    assert longest == sorted(longest, reverse=True)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 80))
def test_pack_padded_keeps_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    groups = pack_padded(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget
    widths = [max(lengths[i] for i in group) for group in groups]
    assert widths == sorted(widths, reverse=True)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_assignment_is_balanced_and_complete(lengths: list[int], ranks: int) -> None:
    assigned = assign_to_ranks(lengths, ranks)
    assert len(assigned) == ranks
    assert sorted(i for rank in assigned for i in rank) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in rank) for rank in assigned]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    plain: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first of several
        min(plain, key=lambda indices: sum(lengths[i] for i in indices)).append(index)
    assert assigned == [sorted(indices) for indices in plain]


@settings(deadline=None, max_examples=50)
@given(LENGTHS, st.integers(1, 100), st.integers(0, 3), st.booleans())
def test_micro_batches_have_the_contents_of_samples(
    lengths: list[int], budget: int, extra: int, packing: bool
) -> None:
    """Each row, read back position by position, is its sample; everything else is padding without weight."""
    samples = [sample(length, seed) for seed, length in enumerate(lengths)]
    count = len((pack if packing else pack_padded)(lengths, budget)) + extra
    batches = micro_batches(samples, budget, pad_id=0, device="cpu", count=count, packing=packing)
    assert len(batches) == count
    seen: list[int] = []
    for batch in batches:
        seen += batch.rows
        assert (batch.layout.pack is not None) == packing
        height, width = batch.input_ids.shape
        assert width >= 2 and batch.loss_mask.shape == batch.engine_logprobs.shape == (height, width - 1)
        if not batch.rows:
            assert not batch.loss_mask.any()
        for r, index in enumerate(batch.rows):
            s, n = samples[index], len(samples[index].input_ids)
            assert batch.input_ids[r].tolist() == s.input_ids + [0] * (width - n)
            for column in range(width - 1):
                inside = column + 1 < n
                assert float(batch.loss_mask[r, column]) == (s.loss_mask[column + 1] if inside else 0)
                assert float(batch.engine_logprobs[r, column]) == (
                    s.engine_logprobs[column + 1] if inside else 0.0
                )
            assert batch.lengths[r] == len(s.input_ids)
    assert sorted(seen) == list(range(len(samples)))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(0, 3))
@example([8, 8, 9, 47, 48], 63, 0)  # the first pack is not the fullest
def test_packed_micro_batches_are_level_where_the_budget_allows(
    lengths: list[int], budget: int, extra: int
) -> None:
    """A rank that has to run more micro-batches than it needs has smaller ones; never more than the budget."""
    samples = [sample(length) for length in lengths]
    count = max(1, len(pack(lengths, budget)) + extra)
    batches = micro_batches(samples, budget, 0, "cpu", count, packing=True)
    loads = [sum(batch.lengths) if batch.rows else 0 for batch in batches]
    assert loads == sorted(loads, reverse=True)
    assert all(
        len(batch.rows) <= 1 or load <= budget for batch, load in zip(batches, loads, strict=True)
    )
    if lengths and count * budget >= sum(lengths) + count * max(lengths):
        assert loads[0] - loads[-1] <= max(lengths)
    if extra and len(lengths) >= count and budget >= sum(lengths):
        assert all(batch.rows for batch in batches), "no fillers where there is work for all"


def test_one_long_answer_and_many_short_ones_are_not_in_one_table() -> None:
    lengths, budget = [900, *[10] * 60], 1024
    for count in (2, 5):
        batches = micro_batches(
            [sample(length) for length in lengths], budget, 0, "cpu", count, packing=True
        )
        assert sorted(i for batch in batches for i in batch.rows) == list(range(61))
        assert all(batch.loss_mask.numel() <= TABLE * budget for batch in batches)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 5))
def test_ranks_that_share_a_pack_have_every_token_and_target_once(lengths: list[int], ways: int) -> None:
    """Ranks have tokens in order and equal numbers of them up to one; a single rank has the pack unchanged."""
    (batch,) = micro_batches(
        [sample(n, seed) for seed, n in enumerate(lengths)], 10**4, 0, "cpu", 1, packing=True
    )
    layout = batch.layout
    cuts = [make_layout(batch.loss_mask, batch.lengths, True, ways, place) for place in range(ways)]
    assert layout.pack is not None and layout.pack.parts == [len(layout.pack.tokens)]
    states, missing, begin = [], max(0, ways - len(layout.pack.tokens)), 0
    for place, cut in enumerate(cuts):
        assert (
            cut.pack is not None
            and cut.pack.parts == cuts[0].pack.parts
            and len(cut.targets) == len(cut.states)
        )
        assert len(cut.pack.tokens) == len(cut.pack.positions) == cut.pack.parts[place] > 0
        assert cut.pack.lengths == layout.pack.lengths + [missing] * bool(missing)
        assert cut.pack.starts.tolist() == layout.pack.starts.tolist() + [ways] * bool(missing)
        states += (cut.states + begin).tolist()
        begin += cut.pack.parts[place]
    assert max(cuts[0].pack.parts) - min(cuts[0].pack.parts) <= 1
    for name in ("tokens", "positions"):
        joined = torch.cat([getattr(cut.pack, name) for cut in cuts])
        assert torch.equal(joined[: len(joined) - missing], getattr(layout.pack, name))
    assert (
        torch.equal(torch.cat([cut.targets for cut in cuts]), layout.targets)
        and states == layout.states.tolist()
    )


def test_balanced_work_includes_attention() -> None:
    """One sequence of 60 is as much work as three of 30, where attention counts as much as the rest at 60."""
    samples = [sample(n) for n in (60, 30, 30, 30)]

    def rows(**options: Any) -> list[list[int]]:
        return sorted(
            sorted(b.rows) for b in micro_batches(samples, 10**4, 0, "cpu", 2, packing=True, **options)
        )

    assert rows() == [[0, 3], [1, 2]]
    assert rows(worth=lambda length: length + length * length // 60) == [[0], [1, 2, 3]]


def test_a_sampled_pad_token_stays_in_the_loss() -> None:
    """The mask is by position: a token the policy sampled counts, whatever its id."""
    pad = 0
    batches = micro_batches(
        [Sample([5, 6, pad, pad], [0, 0, 1, 1], [0, 0, -1, -2]), sample(6)], 100, pad, "cpu", 1
    )
    row = batches[0].rows.index(0)
    assert batches[0].loss_mask[row].tolist() == [0, 1, 1, 0, 0]


def test_awkward_inputs_are_packed_or_refused() -> None:
    one = micro_batches([Sample([7], [1], [0.0])], 10, 0, "cpu", None)
    assert one[0].input_ids.tolist() == [[7, 0]] and one[0].loss_mask.tolist() == [[0.0]]
    nothing = micro_batches([], 10, 0, "cpu", None)
    assert len(nothing) == 1 and nothing[0].rows == [] and not nothing[0].loss_mask.any()
    assert len(micro_batches([sample(50)], 10, 0, "cpu", None)) == 1
    with pytest.raises(ValueError, match="2 samples need 2 micro-batches"):
        micro_batches([sample(50), sample(50)], 10, 0, "cpu", 1)
    with pytest.raises(ValueError, match="equally many"):
        Sample([1, 2], [1], [0.0])
    with pytest.raises(ValueError, match="at least one"):
        Sample([], [], [])


def test_right_padding_needs_no_attention_mask() -> None:
    """Real tokens' outputs are the same with and without padding on their right."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    padded = micro_batches([sample(5, 1), sample(9, 2)], 100, 0, "cpu", 1)[0]
    with torch.no_grad():
        together = model(padded.input_ids).logits
        alone = model(torch.tensor([sample(5, 1).input_ids])).logits
    torch.testing.assert_close(together[padded.rows.index(0), :5], alone[0], atol=1e-6, rtol=0)


def test_a_batcher_follows_the_recipe_and_the_policy() -> None:
    batch = {
        "tokens_per_micro_batch": 12,
        "packing": True,
        "share_prefixes": True,
        "shared_tokens_min": 3,
    }
    config = make_config(batch=batch)
    policy = TablePolicy()
    samples = [sample(length, first) for length in (5, 7, 9, 11) for first in (1, 2)]
    made = Batcher.of(config, policy, pad_id=4).micro_batches(samples)  # type: ignore[arg-type]
    sizes = policy.work.of
    wanted = micro_batches(samples, 12, 4, "cpu", None, True, worth=sizes.tokens_worth, shared_min=3)
    assert [b.rows for b in made] == [b.rows for b in wanted] and len(made) > 1
    for one, other in zip(made, wanted, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(
            one.loss_mask, other.loss_mask
        )
    assert any(batch.layout.pack is not None and batch.layout.pack.tree is not None for batch in made)
    padded = make_config(batch={"packing": False, "share_prefixes": False})
    assert all(b.layout.pack is None for b in Batcher.of(padded, policy, 4).micro_batches(samples))  # type: ignore[arg-type]
