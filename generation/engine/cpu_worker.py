"""vLLM's worker on a CPU, whose import decides which kernels the models of this process are built with."""

import os

from vllm import _custom_ops  # noqa: F401
from vllm.v1.worker.cpu_worker import CPUWorker as CPUWorker

from generation.engine.cpu_kernels import PLAIN, hide_instructions

hide_instructions(plain=os.environ.get(PLAIN) == "1")
