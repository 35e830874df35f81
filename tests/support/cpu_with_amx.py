"""Run engines on a processor that claims AMX and bfloat16 instructions. Not a test: test_cpu_kernels.py starts it.

`python -m tests.support.cpu_with_amx FOLDER` prints a line of JSON for each architecture: the processor and the kernels
that its worker sees (`KernelReport`), and how its two updates were verified.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = {"qwen2": torch.bfloat16, "qwen3_moe": torch.bfloat16, "deepseek_v2": torch.float32}
PROMPT = [14, 50, 77, 120, 9]


def report(folder: Path, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """Update an engine twice, and return what its worker reports of processor and kernels."""
    from generation.engine.sampling import SamplingSettings
    from tests.support.colocated import Colocated
    from trainer.commands.tiny_model import make_tiny_model

    model = make_tiny_model(folder / architecture, architecture=architecture, tied=False, layers=2)
    extension = "tests.support.kernel_report.KernelReport"
    with Colocated(model, dtype=dtype, worker_extension=extension) as both:
        both.manager.sleep()
        verified = []
        for seed in (1, 2):
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                verified.append(both.manager.report.verified)
                both.complete(PROMPT, SamplingSettings(max_tokens=8))
                [seen] = both.leader.thread.run(
                    both.leader.engine.llm.collective_rpc("hotbunk_kernels"), 60, "a report"
                )
    return seen | {"verified": verified, "front": torch.cpu._is_amx_tile_supported()}


if __name__ == "__main__":
    import vllm._custom_ops  # noqa: F401 - loads the library of kernels for the real processor

    from generation.engine.vllm_compat import fork_engines

    for name in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported"):
        setattr(torch.cpu, name, lambda: True)
    capabilities = torch.cpu.get_capabilities()
    torch.cpu.get_capabilities = lambda: capabilities | {"bf16": True}
    fork_engines()
    for architecture, dtype in ARCHITECTURES.items():
        print(json.dumps(report(Path(sys.argv[1]), architecture, dtype)), flush=True)
