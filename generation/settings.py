"""What one engine is started with."""

from dataclasses import dataclass, field
from typing import Any

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM makes room for; a smaller one leaves part of it empty."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one vLLM engine.

    Attributes:
        model: folder or hub name; only its configuration is read when `load_format` is "dummy".
        dtype: "float32" or "bfloat16".
        max_model_len: tokens, prompt and response together.
        kv_cache_bytes: size of the KV cache on each device; None lets vLLM take what `gpu_memory_utilization` leaves
            it.
        device_indices: CUDA devices of the engine group's workers, in rank order; empty on CPU.
        cpu_threads: OpenMP threads of each worker on CPU.
        cpu_cores: on CPU with tensor parallelism, the core each worker is bound to (two unbound workers fight for one
            core).
        plain_cpu_weights: keep weights on CPU in the layout of the checkpoint instead of packed for oneDNN: in-place
            updates, as on CUDA; faster for models of a few million parameters, slower from about 100 million on
            (VLLM.md).
        sleep: free the engine's memory while the trainer works.
        shared_weights: the trainer computes with this engine's weights (`sharding.sharing`), so that they cannot sleep.
        fp32_head: compute logits in float32 whatever `dtype` is.
        lora_rank: answer with a LoRA adapter of at most this rank, once the trainer has sent one; 0: none.
        extra: further vLLM engine arguments, by vLLM's own names.
    """

    model: str
    max_model_len: int
    dtype: str = "float32"
    tokenizer: str | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int = 64
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.3
    enforce_eager: bool = True
    load_format: str = "auto"
    seed: int = 0
    sleep: bool = True
    shared_weights: bool = False
    trust_remote_code: bool = False
    device_indices: tuple[int, ...] = ()
    cpu_threads: int = 1
    cpu_cores: tuple[int, ...] = ()
    plain_cpu_weights: bool = False
    fp32_head: bool = False
    lora_rank: int = 0
    worker_extension: str = "sharding.worker_extension.VllmInternalWorkerExtension"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether this engine runs on the CPU build."""
        return not self.device_indices
