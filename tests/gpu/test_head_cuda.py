"""The output head by blocks on a GPU, beside the same in float64 on the CPU. Skipped without a GPU.

It has run on the GPU in software (tests/softgpu), unfused, and on no real one yet.
"""

import os
from functools import lru_cache

import pytest
import torch

from trainer.policy.fused import Fused
from trainer.policy.logprobs import block_shape, cuda_block_elements, target_logprobs

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, VOCABULARY = 600, 64, 20000
BLOCK = (256, 2048)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fp32_head"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_head_by_blocks_is_that_of_float64_in_the_memory_of_a_few_blocks(
    dtype: torch.dtype, fp32_head: bool, fused: bool
) -> None:
    if fused and "TORCHDYNAMO_DISABLE" in os.environ:
        pytest.skip("needs torch.compile")
    make = {"make": lru_cache(maxsize=None)(Fused)} if fused else {}
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw).mul_(0.1).to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)

    def results(device: str, dtype: torch.dtype, block: tuple[int, int] | None) -> list[torch.Tensor]:
        leaves = [operand.to(device, dtype).requires_grad_() for operand in (hidden, weight)]
        places = targets.to(device)
        before = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        values = target_logprobs(
            *leaves,
            None,
            places,
            0.8,
            block,
            fp32_head=fp32_head and dtype is torch.bfloat16,
            **(make if device == "cuda" else {}),
        )
        gradients = torch.autograd.grad(values[0].sum() + values[1].sum(), leaves)
        if device == "cuda" and block is not None:
            needed = (
                sum(gradient.nbytes for gradient in gradients)
                + TOKENS * HIDDEN * 4
                + BLOCK[1] * HIDDEN * 4
            )
            assert torch.cuda.max_memory_allocated() - before <= needed + 4 * 4 * BLOCK[0] * BLOCK[1]
        return [tensor.detach().cpu().double() for tensor in (*values, *gradients)]

    exact = results("cpu", torch.float64, None)
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    for block in (BLOCK, None):
        for value, expected in zip(results("cuda", dtype, block), exact, strict=True):
            assert (value - expected).norm() / expected.norm() <= limit


def test_a_block_has_its_share_of_the_gpu() -> None:
    rows, columns = block_shape(
        cuda_block_elements(torch.cuda.get_device_properties(0).total_memory), 151936
    )
    assert 4 * rows * columns <= torch.cuda.get_device_properties(0).total_memory / 640
