"""Noise keyed by position: what vLLM's model runner V2 does on CUDA, for V1, which is what runs on
CPU.
"""

import hashlib
from typing import Any

from torch import Generator, Tensor


def key_noise(runner: Any) -> None:
    """Sample the token at each position of a seeded request with noise that is a function of (seed,
    position) alone. Called once; a runner V2 does so by itself
    (vllm/v1/worker/gpu/sample/gumbel.py).

    V1 gives each request a generator, which starts with its seed, and draws from it for one token
    after the other (vllm/v1/sample/ops/topk_topp_sampler.py): a request that goes on with another's
    tokens would start anew.
    """
    if runner.vllm_config.use_v2_model_runner:
        return
    sampler = runner.sampler.topk_topp_sampler
    draw = sampler.forward

    def forward(
        logits: Tensor, generators: dict[int, Generator], k: Tensor | None, p: Tensor | None
    ) -> Any:
        tokens = runner.input_batch.num_tokens_no_spec  # of each row, all before the one that is sampled
        return draw(
            logits,
            {row: keyed(generator, int(tokens[row])) for row, generator in generators.items()},
            k,
            p,
        )

    sampler.forward = forward


def keyed(generator: Generator, position: int) -> Generator:
    """Return a generator for one position of the request that `generator` was seeded for, of 32
    bits on CPU.
    """
    key = hashlib.blake2b(f"{generator.initial_seed()}/{position}".encode(), digest_size=4).digest()
    return Generator(generator.device).manual_seed(int.from_bytes(key, "little"))
