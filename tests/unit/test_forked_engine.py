"""What an engine that is forked must leave alone of the process it comes from."""

import gc
import multiprocessing
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from generation.vllm_compat import inheritance_untouched


class Loop:
    """Goes with the garbage collector only, and a process group with it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.itself = group, self


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield [Loop(dist.group.WORLD)]
    dist.destroy_process_group()


def test_p24_a_process_group_that_is_inherited_is_not_collected(loops: list[Loop]) -> None:
    """Its end waits for threads that the child does not have: without the guard this child crashes, or hangs."""

    def collect() -> None:
        dist.destroy_process_group()
        loops.clear()
        gc.collect()

    with inheritance_untouched():
        child = multiprocessing.get_context("fork").Process(target=collect)
        child.start()
    child.join(30)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0
