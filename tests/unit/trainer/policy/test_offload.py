"""Memory that is given back and filled again: every tensor is as it was, and nothing is copied or kept needlessly."""

import gc

import pytest
import torch

from trainer.policy.offload import Offload, Offloadable, host_buffers


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_views_are_freed_once_and_all_come_back() -> None:
    flat = torch.arange(12.0)
    view, other = flat[3:6].view(3, 1), torch.randn(2, 2, dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in (flat, view, other)]
    offload = Offload(lambda: [view, flat, other, torch.empty(0)])
    assert offload.release() == 12 * 4 + 4 * 2
    assert sizes(flat, view, other) == [0, 0, 0]
    assert offload.release() == 0, "released already"
    offload.restore()
    assert all(torch.equal(now, then) for now, then in zip((flat, view, other), before, strict=True))
    view += 1
    assert flat[3:6].tolist() == [4, 5, 6], "still a view of it"
    offload.restore()


def test_a_hundred_shifts_have_the_host_memory_of_one() -> None:
    tensor = torch.zeros(1000)
    offload = Offload(lambda: [tensor])
    places = set()
    for number in range(100):
        tensor += 1
        offload.release()
        places.update(buffer.data_ptr() for buffer in offload._buffers)
        offload.restore()
        assert (tensor == number + 1).all()
    assert len(places) == 1


def test_constant_tensors_are_copied_once_or_after_they_moved() -> None:
    tensors = [torch.ones(3)]
    offload = Offload(lambda: tensors, constant=True)
    offload.release()
    offload._buffers[0].zero_()  # only a second copy could bring the ones back
    offload.restore()
    assert not tensors[0].any()
    offload.release()
    offload.restore()
    assert not tensors[0].any()
    tensors[0] = torch.full((5,), 2.0)  # FSDP pads an uneven shard at its first forward pass
    offload.release()
    offload.restore()
    assert (tensors[0] == 2).all() and len(tensors[0]) == 5


def test_the_recipe_decides_what_is_offloaded() -> None:
    for what, expected in [("none", (0, 0)), ("optimizer", (8, 0)), ("all", (8, 4))]:
        state, weights = torch.ones(2), torch.ones(1)
        memory = Offloadable(what, lambda s=state: [s], lambda w=weights: [w])  # type: ignore[misc, arg-type]
        assert (memory.release(weights=False), memory.release(weights=True)) == expected
        assert sizes(state, weights) == [8 - expected[0], 4 - expected[1]]
        memory.restore()
        assert state.tolist() == [1, 1] and weights.tolist() == [1]


def test_page_locked_memory_is_one_allocation_of_the_sum_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: dict[int, int] = {}

    class Runtime:
        """A fake of CUDA's runtime, which records memory that is locked."""

        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
            assert flags == 0 and pointer not in locked
            locked[pointer] = nbytes
            return 0

        def cudaHostUnregister(self, pointer: int) -> int:
            del locked[pointer]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    sizes = [33_947_648 // 64, 3, 512, 70_001]
    buffers = host_buffers(sizes, page_locked=True)
    assert [buffer.nbytes for buffer in buffers] == sizes
    [nbytes] = locked.values()
    assert sum(sizes) <= nbytes < sum(sizes) + 512 * len(sizes), "not powers of two"
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [int(buffer.long().sum()) for buffer in buffers] == [
        n * size for n, size in enumerate(sizes)
    ], "apart"
    last = buffers.pop()
    del buffers, buffer
    gc.collect()
    assert locked, "one of them is in use"
    del last
    gc.collect()
    assert not locked
    host_buffers([7], page_locked=False)
    host_buffers([], page_locked=True)
    assert not locked
