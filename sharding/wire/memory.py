"""Memory of this process, the trainer's or a worker's: giving it back to the system, and how much there is.

vLLM's CPU build has no sleep mode (vllm/platforms/interface.py, is_sleep_mode_available), so a
sleeping worker frees its pages here. Addresses stay what they are; the pages return as zeros when touched.
"""

import ctypes
import gc
from collections.abc import Iterable

import psutil
import torch

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def release_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Free the whole pages inside each distinct storage; returns the bytes given back. Contents become zeros.

    Only pages that belong to one storage entirely are freed: a small tensor shares its page with others.
    """
    freed = 0
    for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values():
        start = -(-storage.data_ptr() // _PAGE) * _PAGE
        length = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE - start
        if length <= 0:
            continue
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise could not free {length} bytes of a sleeping engine")
        # A wish, which the system may not know: pages that come back in large pieces come back several times as fast.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
        freed += length
    return freed


def release_weights(model: torch.nn.Module, reprocessed: list[torch.nn.Module]) -> None:
    """Free all weights of a sleeping engine; a complete weight update brings them back.

    Args:
        reprocessed: modules that are loaded layerwise; oneDNN's packed copies, which live in each layer's `cpu_linear`,
            are dropped, and made again then.
    """
    for module in (inner for outer in reprocessed for inner in outer.modules()):
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = None  # type: ignore[assignment]
    release_pages(p.data for p in model.parameters() if p.numel())
    gc.collect()
    return_free_pages()


def return_free_pages() -> None:
    """Give back what malloc keeps of freed memory, which after a training step may be gigabytes."""
    if hasattr(_libc, "malloc_trim"):  # of glibc alone
        _libc.malloc_trim(0)


def resident_bytes() -> int:
    """Physical memory of this process that is its own: code and other mapped files are left out."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
