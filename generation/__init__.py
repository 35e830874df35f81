"""Generation on vLLM: engines with an explicit life cycle, rollouts from one answer to agents, servers and services.

Nothing here imports the trainer or the weight path. The names below are loaded on first use, so that importing the
package (a reward worker does, the command line does) costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AsyncVLLM": "compat.torchrl.service",
    "BatchedDataDict": "compat.nemo.batch",
    "ChatHistory": "exact_ids",
    "Conversation": "rollouts.episode",
    "Engine": "engine.engine",
    "EngineLifecycle": "engine.lifecycle",
    "EngineSettings": "engine.settings",
    "EngineStateError": "engine.lifecycle",
    "EngineThread": "engine.thread",
    "FnCallRolloutSampler": "rollouts.sampler",
    "GenerationConfig": "compat.nemo.batch",
    "GenerationDatumSpec": "compat.nemo.batch",
    "GenerationInterface": "compat.nemo.batch",
    "GenerationOutputSpec": "compat.nemo.batch",
    "LoadBalancer": "compat.load_balancer",
    "OneShotRolloutSampler": "rollouts.sampler",
    "OpenAIServer": "server",
    "PolicyLLM": "rollouts.episode",
    "PromptPipeline": "compat.chatlearn.module",
    "RolloutFunction": "rollouts.episode",
    "RolloutSampler": "rollouts.sampler",
    "SamplingSettings": "engine.sampling",
    "ServerSettings": "server",
    "Trajectory": "trajectory",
    "VLLMModule": "compat.chatlearn.module",
    "VllmAsyncGenerationWorker": "compat.nemo.async_worker",
    "VllmConfig": "compat.nemo.config",
    "VllmGeneration": "compat.nemo.generation",
    "VllmGenerationWorker": "compat.nemo.generation",
    "broadcast_across_tp": "compat.broadcast",
    "configure_generation_config": "compat.nemo.config",
    "get_model": "compat.chatlearn.module",
    "make_async_vllm_engine": "compat.torchrl.service",
    "print_rank_0": "compat.chatlearn.module",
    "replace_prefix_tokens": "exact_ids",
    "verify_right_padding": "compat.nemo.batch",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
