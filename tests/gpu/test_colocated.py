"""The CUDA side: CuMem sleep, IPC handles, device memory. Skipped without a GPU.

The first test has run on an H100, all have on the GPU in software (docs/state-of-testing.md).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from generation.engine.sampling import SamplingSettings
from tests.support.colocated import Colocated, assert_as_close_as_bfloat16
from trainer.commands.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    return make_tiny_model(folder, hidden_size=512, heads=8, kv_heads=4, layers=8)


@contextmanager
def asleep(model: Path, **settings: object) -> Iterator[Colocated]:
    """Policy and engine on one GPU, the engine asleep."""
    settings |= {"device_indices": (0,), "kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    with Colocated(model, device="cuda:0", dtype=torch.bfloat16, bucket=16 << 20, **settings) as both:
        both.manager.sleep()
        yield both


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[ExitStack, list[Colocated]]]:
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def both(
    model: Path, kept: tuple[ExitStack, list[Colocated]], request: pytest.FixtureRequest
) -> Iterator[Colocated]:
    """One policy and engine for several tests; after a test that failed they are made anew."""
    stack, started = kept
    if not started:
        started.append(stack.enter_context(asleep(model)))
    failures = request.session.testsfailed
    yield started[0]
    if request.session.testsfailed > failures:
        started.clear()
        stack.close()


def test_logprobs_after_sleep_wake_and_sync_are_the_trainers(both: Colocated) -> None:
    for seed in (1, 2):
        both.policy.randomise(seed)
        with both.manager.generation_shift(both.policy):
            assert both.manager.report.verified in ("full", "probe")
            sampled = both.complete(PROMPT, SAMPLING, seed)
        assert_as_close_as_bfloat16(both.policy, PROMPT, sampled)


def test_twenty_cycles_leave_device_memory_flat(both: Colocated) -> None:
    asleep = []
    before = both.manager.report
    for _ in range(20):
        with both.manager.generation_shift(both.policy):
            both.complete(PROMPT, SAMPLING)
        free, _total = torch.cuda.mem_get_info()
        asleep.append(free)
    after = both.manager.report
    assert (
        after.staging_opened - before.staging_opened
        == after.staging_closed - before.staging_closed
        == 20
    )
    assert abs(asleep[-1] - asleep[2]) < 64 << 20


def test_sleep_gives_weights_and_kv_cache_back(both: Colocated) -> None:
    before, _total = torch.cuda.mem_get_info()
    both.manager.wake(both.policy)
    awake, _total = torch.cuda.mem_get_info()
    both.manager.sleep()
    after, _total = torch.cuda.mem_get_info()
    assert before - awake > 1 << 30
    assert abs(after - before) < 64 << 20


def test_weights_in_one_memory_under_cuda_graphs_beside_a_kv_cache_that_sleeps(model: Path) -> None:
    free = []
    with asleep(model, shared=True, enforce_eager=False) as both:
        for seed in range(20):
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                report = both.manager.report
                assert report.verified == "full" and (
                    seed == 0 or report.nbytes == report.staging_bytes == 0
                )
                sampled = both.complete(PROMPT, SAMPLING, seed)
                awake, _total = torch.cuda.mem_get_info()
            free.append(torch.cuda.mem_get_info()[0])
            assert free[-1] - awake > 1 << 29
            assert_as_close_as_bfloat16(both.policy, PROMPT, sampled)
    assert abs(free[-1] - free[2]) < 64 << 20
