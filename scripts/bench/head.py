#!/usr/bin/env python3
"""The output head, forward and backward, on random weights: chunks of tokens, blocks, and TRL's fused head, in turn.

    python scripts/bench/head.py [--tokens 2048] [--hidden 512] [--vocabulary 151936] [--dtype float32] [--rounds 3]

    chunks  256 tokens at a time against the whole vocabulary, as it was before there were blocks
    blocks  `trainer.policy.logprobs.target_logprobs`
    TRL     `_ChunkedLogProbFunction` of TRL, 32,768 columns of the vocabulary at a time against all tokens

All give the log-probabilities of random targets, entropies, and the gradients of hidden states and weight, which must
agree. The last columns: operations (6 for each token and weight; recomputation is left out) a second, of those of a
plain product of two matrices, and peak memory beyond inputs and gradients.
"""

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch
from common import PeakMemory, command_line, in_turns, matmul_rate, median, save, show, this_device
from torch import Tensor

from trainer.policy.logprobs import target_logprobs

GIB = 2**30
CHUNK = 256
Results = tuple[Tensor, ...]
"""Log-probabilities and entropies [N], gradients of hidden states [N, H] and of the weight [V, H]."""


def chunks(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Results:
    """Chunks of tokens, with the logits of each computed once more for the gradients."""
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    logprobs, entropy, normaliser = (torch.empty_like(coefficients) for _ in range(3))
    parts = [slice(start, start + CHUNK) for start in range(0, len(hidden), CHUNK)]
    for rows in parts:
        logits = (hidden[rows] @ weight.t()).float()
        normaliser[rows] = logits.logsumexp(1)
        logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - normaliser[rows]
        logits -= normaliser[rows, None]
        entropy[rows] = -torch.linalg.vecdot(logits.exp(), logits)
    for rows in parts:
        grad = (
            (hidden[rows] @ weight.t())
            .float()
            .sub_(normaliser[rows, None])
            .exp_()
            .mul_(-coefficients[rows, None])
        )
        grad.scatter_add_(1, targets[rows, None], coefficients[rows, None])
        narrow = grad.to(hidden.dtype)
        torch.mm(narrow, weight, out=grad_hidden[rows])
        if weight.dtype is torch.float32:
            grad_weight.addmm_(narrow.t(), hidden[rows])
        else:
            grad_weight += narrow.t() @ hidden[rows]
    return logprobs, entropy, grad_hidden, grad_weight.to(weight.dtype)


def blocks(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Results:
    """Compute the head as the trainer does."""
    return differentiated(target_logprobs(hidden, weight, None, targets), hidden, weight, coefficients)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor) -> Results:
    """Compute the head as TRL does."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    outputs = ("log_probs", "entropy")
    arguments = (hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs)
    return differentiated(_ChunkedLogProbFunction.apply(*arguments)[:2], hidden, weight, coefficients)


def differentiated(
    values: tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor, coefficients: Tensor
) -> Results:
    gradients = torch.autograd.grad((values[0] * coefficients).sum(), (hidden, weight))
    return *(value.detach() for value in values), *gradients


def main() -> None:
    """Everything."""
    options = parse()
    device, dtype = this_device(), getattr(torch, options.dtype)
    draw = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(options.tokens, options.hidden, generator=draw)
        .mul_(0.5)
        .to(device, dtype)
        .requires_grad_()
    )
    weight = torch.randn(options.vocabulary, options.hidden, generator=draw).mul_(0.05)
    weight = weight.to(device, dtype).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=draw).to(device)
    coefficients = torch.randn(options.tokens, generator=draw).to(device)

    def with_inputs(way: Callable[..., Results]) -> Callable[[], Results]:
        gradients = torch.no_grad() if way is chunks else torch.enable_grad()
        return lambda: gradients(way)(hidden, weight, targets, coefficients)

    ways = {way.__name__: with_inputs(way) for way in (chunks, blocks, trl)}
    results, peaks = {}, {}
    for name, action in ways.items():
        with PeakMemory(device) as memory:
            results[name] = action()
        peaks[name] = memory.nbytes - sum(tensor.nbytes for tensor in results[name])
    limit = 2e-5 if dtype is torch.float32 else 2e-2
    for name, result in results.items():
        for value, expected in zip(result, results["chunks"], strict=True):
            if (distance := ((value - expected).norm() / expected.norm()).item()) > limit:
                sys.exit(f"{name} differs from chunks by {distance:.0e} of the norm")
    results.clear()
    rates = [matmul_rate(device, dtype)]
    times = in_turns(dict[str, Callable[[], object]](ways), options.rounds, device)
    rates.append(matmul_rate(device, dtype))
    floor = 6.0 * weight.numel() * options.tokens / max(rates)
    rows = []
    for name, seconds in times.items():
        ratios = [first / second for first, second in zip(times["chunks"], seconds, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        peak = f"{peaks[name] / GIB:.3f} GiB ({peaks[name] / peaks['chunks']:.2f})"
        rows.append([name, f"{median(seconds):.2f} s", spread, f"{floor / median(seconds):.0%}", peak])
    show(
        f"{options.tokens} tokens, {options.vocabulary} columns, hidden size {options.hidden}, {options.dtype}",
        ["", "time", "x chunks", "of the matmul rate", "peak (of chunks)"],
        rows,
        [],
    )
    save(options.json, {"seconds": times, "peak_bytes": peaks})


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
