"""A vLLM worker on CUDA whose weights lie in memory that other processes can open.

In a file of its own, as importing vLLM's worker takes seconds.
"""

from contextlib import AbstractContextManager, nullcontext

from generation.engine.cuda_worker import CudaWorker

if not hasattr(CudaWorker, "_maybe_get_memory_pool_context"):
    raise ImportError(
        "this vLLM's worker chooses its memory in another way: sync.way: zero_copy needs vLLM 0.32"
    )


class SharingWorker(CudaWorker):
    """A worker whose weights come from torch's own allocator: memory of vLLM's sleeping pool has no
    CUDA IPC handle (https://github.com/vllm-project/vllm/pull/45611). The pool still holds the KV
    cache, which is all that sleep frees.
    """

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:  # type: ignore[type-arg]
        return nullcontext() if tag == "weights" else super()._maybe_get_memory_pool_context(tag)
