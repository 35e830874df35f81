"""torch's allocator of device memory: expandable segments in a trainer, plain ones for what other
processes map.

Batches of unlike sizes leave gaps between plain segments that no later tensor fits. Expandable
segments grow in place and leave none. But CUDA IPC exports them only where processes may take over
each other's files, as in few containers (https://github.com/pytorch/pytorch/issues/165685), and
vLLM's sleeping pool cannot consist of them (https://github.com/pytorch/pytorch/issues/147851).
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables from which torch reads the allocator's settings."""

_OPTION = "expandable_segments"


def without_expandable_segments(settings: str) -> str:
    """Return allocator settings without this option:
    `max_split_size_mb:64,expandable_segments:True` gives `max_split_size_mb:64`. They are returned
    as they are if they do not have it.
    """
    options = re.split(r",(?![^\[]*\])", settings)  # lists in brackets hold commas, too
    remaining = [option for option in options if option.partition(":")[0].strip() != _OPTION]
    return settings if len(remaining) == len(options) else ",".join(remaining)


def use_expandable_segments() -> None:
    """Allocate expandable segments in this process from now on, unless its environment has the
    option, on or off.
    """
    if not any(_OPTION in os.environ.get(variable, "") for variable in ALLOCATOR_VARIABLES):
        _allocate(expandable=True)


@contextmanager
def plain_segments() -> Iterator[None]:
    """Allocate plain segments in the block, for memory to be exported. Change nothing where all are
    plain anyway.

    torch does not hand out cached memory of expandable segments in the block (`get_free_block` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp).
    """
    import torch

    settings = torch._C._accelerator_getAllocatorSettings()
    if without_expandable_segments(settings) == settings:
        yield
        return
    _allocate(expandable=False)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocate(*, expandable: bool) -> None:
    """Change this option alone: torch resets every option that the settings it is given leave
    out.
    """
    import torch

    other_options = without_expandable_segments(torch._C._accelerator_getAllocatorSettings())
    options = [other_options] if other_options else []
    options.append(f"{_OPTION}:{expandable}")
    torch._C._accelerator_setAllocatorSettings(",".join(options))
