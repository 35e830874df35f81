"""`allreduce_objects` among ranks that are threads: whatever their number, and whichever of them is gone."""

import operator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sharding import ranks
from sharding.ranks import RemoteError, agreed, allreduce_objects, rank
from tests.support.learning_steps import on_ranks

COUNTS = range(1, 10)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [1, 1000])
def test_every_rank_gets_the_reduction_of_all_in_rank_order(count: int, length: int) -> None:
    def together() -> Any:
        return allreduce_objects([f"{rank()}" * length], operator.add)

    assert on_ranks(count, together) == [[f"{who}" * length for who in range(count)]] * count


@pytest.mark.parametrize("count", COUNTS[1:])
def test_all_ranks_learn_of_a_rank_that_is_gone(count: int) -> None:
    swap = ranks._swap
    for dead in range(count):

        def error_message(dead: int = dead) -> str:
            if rank() == dead:
                return "gone"
            with pytest.raises(RuntimeError) as caught:
                allreduce_objects(None, lambda lower, higher: None)
            return str(caught.value)

        def broken(messages: list[Any], whom: int, group: Any, dead: int = dead) -> list[Any]:
            return ["gone", None] if whom == dead else swap(messages, whom, group)

        with patch.object(ranks, "_swap", broken):
            assert on_ranks(count, error_message) == ["gone"] * count


def test_an_error_on_a_gpu_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    message = r"phase sending weights failed on rank 0: OutOfMemoryError on cuda:1: CUDA out of memory"
    with pytest.raises(RemoteError, match=message), agreed("sending weights"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RemoteError, match="failed on rank 0: ValueError: 3"), agreed("sending weights"):
        raise ValueError(3)
