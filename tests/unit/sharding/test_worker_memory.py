"""Memory that malloc keeps is given back to the system."""

import gc

import torch

from sharding.wire.staging import resident_bytes, return_free_pages


def test_freed_memory_that_malloc_keeps_is_returned_to_the_system() -> None:
    # 24 KB each: far below where malloc maps memory of its own
    kept = [torch.ones(6000) for _ in range(20_000)]
    kept = kept[::1000]  # and some in between that stay
    gc.collect()
    before = resident_bytes()
    return_free_pages()
    assert before - resident_bytes() > 240 << 20
    assert all(bool((tensor == 1).all()) for tensor in kept)
