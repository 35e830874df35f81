"""Generation on vLLM: engines with an explicit life cycle, rollouts from one answer to agents, servers and services.

Nothing here imports the trainer or the weight path. The names below are loaded on first use, so that importing the
package (a reward worker does, the command line does) costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AsyncVLLM": "service.async_vllm",
    "BatchedDataDict": "interface.batch",
    "ChatHistory": "chat_history",
    "Conversation": "rollouts.conversation",
    "EngineLifecycle": "engine_state",
    "EngineSettings": "settings",
    "EngineStateError": "engine_state",
    "EngineThread": "event_loop",
    "FnCallRolloutSampler": "rollouts.sampler",
    "GenerationConfig": "interface.specs",
    "GenerationDatumSpec": "interface.specs",
    "GenerationInterface": "interface.specs",
    "GenerationOutputSpec": "interface.specs",
    "LoadBalancer": "service.load_balancer",
    "OneShotRolloutSampler": "rollouts.sampler",
    "OpenAIServer": "openai_server",
    "PolicyLLM": "rollouts.llm",
    "RolloutFunction": "rollouts.llm",
    "RolloutSampler": "rollouts.sampler",
    "SamplingSettings": "sampling",
    "ServerSettings": "openai_server",
    "Trajectory": "trajectory",
    "VLLMModule": "chatlearn.module",
    "VllmAsyncGenerationWorker": "worker_async",
    "VllmConfig": "interface.vllm_config",
    "VllmGeneration": "interface.vllm_generation",
    "VllmGenerationWorker": "interface.worker",
    "broadcast_across_tp": "broadcast",
    "configure_generation_config": "interface.vllm_config",
    "make_async_vllm_engine": "service.async_vllm",
    "replace_prefix_tokens": "prefix_tokens",
    "verify_right_padding": "interface.batch",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
