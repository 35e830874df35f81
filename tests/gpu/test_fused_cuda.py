"""Kernels that Inductor makes of norms, rotary embeddings and gates on a GPU, against float64 on the CPU.

No GPU has run it yet, and the one in software has no compiler.
"""

import os

import pytest
import torch

from tests.unit.trainer.policy.test_fused import distance, make_tiny, passed
from trainer.policy.fused import fuse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("TORCHDYNAMO_DISABLE" in os.environ, reason="needs torch.compile"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_as_near_to_float64_as_eager_ones(dtype: torch.dtype) -> None:
    exact = passed(make_tiny(dtype).double())
    model = make_tiny(dtype).cuda()
    eager = distance(passed(model), exact)
    with torch._dynamo.config.patch(disable=False):
        assert not fuse(model)
        assert 0 < distance(passed(model), exact) <= 1.2 * eager
