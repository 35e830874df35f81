#!/usr/bin/env python3
"""A mixture's experts, forward and backward: grouped products against a loop over experts, in turn and in one run.

    python scripts/bench/experts.py [--tokens 2048] [--hidden 256] [--width 128] [--experts 32] [--top-k 4]

    grouped   Transformers' grouped_mm, its default where torch has it: a token's experts sorted, one product for all
    batched   its batched_mm: a copy of the weights for each token and expert
    loop      its eager experts: a product for each expert that any token goes to

Routes are even, or all tokens go to experts drawn with weights 1, 1/2, 1/3 …, as an unbalanced router's do. The last
column relates the arithmetic (6 operations for each weight and token) to what the machine does in a plain product.
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch
from common import command_line, in_turns, median, save, show, this_device
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

WAYS = {"grouped": "grouped_mm", "batched": "batched_mm", "loop": "eager"}
COPIES_GIB = 1.0  # of weights that batched_mm may make; it is left out beyond


def make(options: argparse.Namespace, device: torch.device) -> dict[str, Qwen3MoeExperts]:
    """Makes equal experts for each way to compute them."""
    layers = {}
    for name, way in WAYS.items():
        config = Qwen3MoeConfig(
            hidden_size=options.hidden, moe_intermediate_size=options.width, num_experts=options.experts
        )
        config._experts_implementation = way
        layers[name] = experts = Qwen3MoeExperts(config).to(device, getattr(torch, options.dtype))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * options.hidden**-0.5)
    copied = options.tokens * options.top_k * 3 * options.hidden * options.width * layers["loop"].down_proj.itemsize
    if copied > COPIES_GIB * 2**30:
        del layers["batched"]
    return layers


def routes(options: argparse.Namespace, even: bool) -> Tensor:
    """Draws the experts [tokens, top_k] of each token."""
    weights = torch.ones(options.experts) if even else 1 / torch.arange(1, options.experts + 1)
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(weights.expand(options.tokens, -1), options.top_k, generator=generator)


def pass_of(experts: Qwen3MoeExperts, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Callable[[], None]:
    """Returns an action that runs forward and backward once."""

    def run() -> None:
        hidden.grad = None
        experts.zero_grad()
        experts(hidden, chosen, scores).sum().backward()

    return run


def main() -> None:
    """Measures and prints."""
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=128, help="width of an expert's hidden layer")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    device = this_device()
    dtype, ways = getattr(torch, options.dtype), make(options, device)
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    scores = torch.full((options.tokens, options.top_k), 1 / options.top_k, device=device, dtype=dtype)
    side = torch.randn(1024, 1024, device=device, dtype=dtype)
    rate = 2 * 1024**3 / median(in_turns({"product": lambda: side @ side}, options.rounds, device)["product"])
    operations = 6 * 3 * options.hidden * options.width * options.tokens * options.top_k
    rows, figures = [], {}
    for spread, even in (("even", True), ("uneven", False)):
        chosen = routes(options, even).to(device)
        results = {name: experts(hidden, chosen, scores) for name, experts in ways.items()}
        for name, result in results.items():
            assert torch.allclose(result, results["loop"], atol=0.05, rtol=0.05), name
        times = in_turns({n: pass_of(e, hidden, chosen, scores) for n, e in ways.items()}, options.rounds, device)
        figures[spread] = times
        for name, taken in times.items():
            seconds = median(taken)
            ratio = median(times["loop"]) / seconds
            share = operations / seconds / rate
            rows.append([spread, name, f"{options.tokens / seconds:,.0f}", f"{ratio:.2f} x", f"{share:.0%}"])
    sizes = f"{options.experts} experts of {options.hidden} x {options.width}, {options.dtype}"
    title = f"{sizes}; {options.tokens} tokens, {options.top_k} experts for each"
    show(title, ["routes", "experts", "tokens/s", "against the loop", "of a plain product"], rows, [])
    save(options.json, {"options": vars(options) | {"json": None}, "seconds": figures})


if __name__ == "__main__":
    main()
