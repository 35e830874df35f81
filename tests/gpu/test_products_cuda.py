"""The precision of Triton's products of float32 matrices, with TRITON_F32_DEFAULT and without. Skipped without a GPU.

No real GPU has run it yet; on the GPU in software products are exact with any setting.
"""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

SIZE = 128


def main() -> int:
    """Print the largest relative error of a product of float32 matrices in a Triton kernel, compared with float64."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(a, b, c, size: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.arange(0, size)
        places = rows[:, None] * size + rows[None, :]
        tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))

    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=draw) for _ in range(2))
    c = torch.empty(SIZE, SIZE, device="cuda")
    product[(1,)](a.cuda(), b.cuda(), c, SIZE)
    exact = a.double() @ b.double()
    print(((c.cpu().double() - exact).abs().max() / exact.abs().max()).item())
    return 0


def test_products_are_exact_in_ieee_arithmetic() -> None:
    errors = {}
    for setting in ("", "ieee"):
        environ = dict(os.environ)
        environ.pop("TRITON_F32_DEFAULT", None)
        if setting:
            environ["TRITON_F32_DEFAULT"] = setting
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.test_products_cuda"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        errors[setting or "default"] = float(done.stdout)
    print("largest relative error:", errors)
    assert errors["ieee"] <= 1e-5


if __name__ == "__main__":
    sys.exit(main())
