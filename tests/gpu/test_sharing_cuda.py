"""One memory on a GPU: through CUDA IPC, under CUDA graphs, beside a KV cache that sleeps. Has not run on one yet."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from colocated import Colocated
from make_tiny import make_tiny_model

from generation.sampling import SamplingSettings

pytestmark = pytest.mark.gpu

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=64)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Colocated]:
    folder = make_tiny_model(tmp_path_factory.mktemp("gpu") / "model", hidden_size=512, heads=8, kv_heads=4, layers=8)
    settings = {"device_indices": (0,), "kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    with Colocated(
        Path(folder), device="cuda:0", dtype=torch.bfloat16, shared=True, enforce_eager=False, **settings
    ) as both:
        both.manager.sleep()
        yield both


def test_new_weights_are_the_engine_s_without_being_sent(both: Colocated) -> None:
    for seed in (1, 2, 3):
        both.policy.randomise(seed)
        with both.manager.generation_shift(both.policy):
            report = both.manager.report
            assert report.verified == "full" and (seed == 1 or report.nbytes == report.staging_bytes == 0)
            sampled = both.complete(PROMPT, SAMPLING, seed)
        own = both.policy.logprobs(PROMPT + sampled.token_ids)[len(PROMPT) - 1 :]
        gaps = sorted(abs(a - b) for a, b in zip(own, sampled.logprobs, strict=True))
        assert gaps[int(0.95 * len(gaps))] < 0.15


def test_p1_p2_the_kv_cache_sleeps_and_twenty_cycles_leave_device_memory_flat(both: Colocated) -> None:
    free = []
    for _ in range(20):
        with both.manager.generation_shift(both.policy):
            both.complete(PROMPT, SAMPLING)
            awake, _total = torch.cuda.mem_get_info()
        asleep, _total = torch.cuda.mem_get_info()
        assert asleep - awake > 1 << 29
        free.append(asleep)
    assert abs(free[-1] - free[2]) < 64 << 20
