"""vLLM's worker on CUDA, which writes down what keeps it from starting. Importing it takes seconds."""

from vllm.v1.worker import gpu_worker

from generation.engine.start_errors import reporting_start_errors


@reporting_start_errors
class CudaWorker(gpu_worker.Worker):
    """The worker of an engine on CUDA."""
