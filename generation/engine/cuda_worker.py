"""vLLM's worker on CUDA, which says what keeps it from starting or waking. Importing it takes seconds."""

from vllm.v1.worker import gpu_worker

from generation.engine.start_errors import reporting_start_errors


@reporting_start_errors
class CudaWorker(gpu_worker.Worker):
    """The worker of an engine on CUDA."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back. An error names the GPU, which vLLM's allocator does not."""
        try:
            super().wake_up(tags)
        except Exception as error:
            raise RuntimeError(f"on {self.device}: {error}") from error
