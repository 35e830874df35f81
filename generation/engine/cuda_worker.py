"""vLLM's worker on CUDA, which says what keeps it from starting or waking. Importing it takes
seconds.
"""

from vllm.v1.worker import gpu_worker

from generation.engine.start_errors import reporting_start_errors

INCREASED = "Memory usage increased after sleeping."
"""The message of vLLM's assertion about the device's free memory."""


@reporting_start_errors
class CudaWorker(gpu_worker.Worker):
    """The worker of an engine on CUDA."""

    def sleep(self, level: int = 1) -> None:
        """Give memory back, also where another process takes more of the device meanwhile.

        vLLM asserts, when all is done, that the device has more free memory than before
        (`Worker.sleep` in vllm/v1/worker/gpu_worker.py). A neighbour that starts at that moment
        would end the engine.
        """
        try:
            super().sleep(level)
        except AssertionError as error:
            if str(error) != INCREASED:
                raise

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back. An error names the GPU, which vLLM's allocator does not."""
        try:
            super().wake_up(tags)
        except Exception as error:
            raise RuntimeError(f"on {self.device}: {error}") from error
