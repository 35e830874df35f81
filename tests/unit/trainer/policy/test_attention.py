"""Attention with sinks and soft caps against a softmax over all scores, one sequence and one head at a time."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.policy import attention
from trainer.policy.shortcuts import Shortcut, without

LENGTHS = [7, 7, 3, 1, 12]
STARTS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
PACK: dict[str, Any] = {
    "cu_seq_lens_q": STARTS,
    "max_length_q": max(LENGTHS),
    "sequence_lengths": LENGTHS,
}
HEADS, GROUPS, SIZE = 4, 2, 8


def leaves(dtype: torch.dtype = torch.float64, value_size: int = SIZE) -> list[Tensor]:
    """Query, key, value and sinks of a pack; scores are a few units large, and so are sinks."""
    draw, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = [
        (1, HEADS, tokens, SIZE),
        (1, GROUPS, tokens, SIZE),
        (1, GROUPS, tokens, value_size),
        (HEADS,),
    ]
    return [(torch.randn(shape, generator=draw) * 1.5).to(dtype).requires_grad_() for shape in shapes]


def plain(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, cap: float | None, window: int
) -> Tensor:
    sequences = []
    for start, stop in itertools.pairwise(STARTS.tolist()):
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = query[0, head, start:stop] @ key[0, group, start:stop].T * 0.4
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            scores = scores.masked_fill((back < 0) | (back >= window), -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(stop - start, 1)], dim=1)
            heads.append(scores.softmax(1)[:, : stop - start] @ value[0, group, start:stop])
        sequences.append(torch.stack(heads, dim=1))
    return torch.cat(sequences).unsqueeze(0)


def results(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("scores", [1 << 24, 60])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("sinks", "cap", "value_size"), [(True, None, 8), (True, 2.0, 6), (False, 2.0, 8)]
)
def test_a_pack_has_the_values_and_gradients_of_a_plain_softmax(
    scores: int,
    window: int | None,
    sinks: bool,
    cap: float | None,
    value_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one block, and in blocks of five rows and fewer; values as large as keys, and smaller ones."""
    monkeypatch.setattr(attention, "_SCORES", scores)
    *heads, column = leaves(value_size=value_size)
    tensors = [*heads, column] if sinks else heads
    extra = {"s_aux": column if sinks else None, "softcap": cap}
    out, _ = attention.attention(
        torch.nn.Identity(), *heads, None, scaling=0.4, sliding_window=window, **PACK, **extra
    )
    expected = plain(*heads, column if sinks else None, cap, window or 99)
    for one, other in zip(results(out, tensors), results(expected, tensors), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *settings: Any, **options: Any) -> tuple[Tensor, ...]:
    """Return a second computation of PyTorch's kernel for sequences end to end: result, log-sum-exp [heads, N], and others."""
    shares, lse = kernel_shares(q, k, None, settings, options)
    out = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(HEADS // GROUPS, 1))
    return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """As FlashAttention-2 has it (arXiv:2307.08691, algorithm 2): it reads `out` and `lse`, and no softmax."""
    # The two others of the forward pass
    assert rest[6:] and all(isinstance(tensor, Tensor) for tensor in rest[6:])
    shares, _ = kernel_shares(q, k, lse, rest, options)
    k, v = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (k, v))
    of_shares = torch.einsum("qhd,khd->hqk", grad, v)
    of_scores = shares * (of_shares - (grad * out).sum(2).T.unsqueeze(2)) * options["scale"]
    grads = (
        torch.einsum("hqk,khd->qhd", of_scores, k),
        torch.einsum("hqk,qhd->khd", of_scores, q),
        torch.einsum("hqk,qhd->khd", shares, grad),
    )
    return grads[0], *(one.unflatten(1, (GROUPS, -1)).sum(2) for one in grads[1:])


def kernel_shares(
    q: Tensor, k: Tensor, lse: Tensor | None, settings: Any, options: Any
) -> tuple[Tensor, Tensor]:
    starts, _, longest, _, dropout, causal = settings[:6]
    assert (
        longest == max(LENGTHS) and dropout == 0.0 and not causal and options["window_size_right"] == 0
    )
    sequence = torch.repeat_interleave(starts.diff())
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    left = len(q) if options["window_size_left"] == -1 else options["window_size_left"]
    hidden = (back < 0) | (back > left) | (sequence[:, None] != sequence)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // GROUPS, 1)) * options["scale"]
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse.unsqueeze(2)), lse


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_need_no_more_of_the_kernel_than_its_log_sum_exp(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_: True)
    monkeypatch.setattr(attention, "_flash_forward", flash_forward)
    monkeypatch.setattr(attention, "_flash_backward", flash_backward)
    *heads, sinks = leaves(torch.float32)
    out, _ = attention.attention(
        torch.nn.Identity(), *heads, None, scaling=0.4, sliding_window=window, s_aux=sinks, **PACK
    )
    expected = plain(*heads, sinks, None, window or 99)
    for one, other in zip(
        results(out, [*heads, sinks]), results(expected, [*heads, sinks]), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_ranks_that_share_sequences_use_the_sinks_of_their_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks, one after the other; what they would exchange is cut out of all heads here."""
    *heads, sinks = leaves()
    settings: dict[str, Any] = {"scaling": 0.4, "s_aux": sinks, **PACK}
    full, _ = attention.attention(torch.nn.Identity(), *heads, None, **settings)
    monkeypatch.setattr(attention, "tokens_for_heads", lambda parts, result: result)
    for number in (0, 1):
        monkeypatch.setattr(attention, "rank", lambda number=number: number)
        monkeypatch.setattr(
            attention,
            "heads_for_tokens",
            lambda parts, *tensors, number=number: [
                tensor.chunk(2, dim=1)[number] for tensor in tensors
            ],
        )
        out, _ = attention.attention(torch.nn.Identity(), *heads, None, token_parts=(15, 15), **settings)
        torch.testing.assert_close(out, full.chunk(2, dim=2)[number])


@pytest.mark.parametrize(("major", "there"), [(9, True), (9, False), (8, True)])
def test_a_hopper_takes_flashattention_3_if_its_package_is_there(
    major: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and torch's own again where the run does without."""
    active: list[str | None] = [None]
    monkeypatch.setattr(attention.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention.torch.cuda, "get_device_capability", lambda *_: (major, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: name if there else None)
    monkeypatch.setattr(attention.flash, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(attention.flash, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention.flash, "restore_flash_attention_impl", lambda: active.append(None))
    takes = SimpleNamespace(shape=(1, 64), is_cuda=True, device=None, dtype=torch.bfloat16)
    for _ in range(2):
        assert attention._kernel_takes(takes, takes, 0.0)
    with without(Shortcut.FLASH3):
        assert attention._kernel_takes(takes, takes, 0.0)
    assert active == ([None, "FA3", None] if major == 9 and there else [None])
