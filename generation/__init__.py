"""Generation on vLLM: engines with an explicit life cycle, rollouts from single answers to agents,
and servers.

Nothing here imports the trainer or the weight path. The names below are loaded on first use, so
that importing the package, as reward workers and the command line do, costs nothing.
"""

from importlib import import_module
from typing import Any

from generation import shims

shims.install()

_NAMES = {
    "compat.object_broadcast": ["broadcast_across_tp"],
    "compat.chatlearn.vllm_module": ["PromptPipeline", "VLLMModule", "get_model", "print_rank_0"],
    "compat.load_balancer": ["LoadBalancer"],
    "compat.nemo.async_worker": ["VllmAsyncGenerationWorker"],
    "compat.nemo.batch": [
        *(
            "BatchedDataDict",
            "GenerationConfig",
            "GenerationDatumSpec",
            "GenerationInterface",
            "GenerationOutputSpec",
        ),
        "verify_right_padding",
    ],
    "compat.nemo.config": ["VllmConfig", "configure_generation_config"],
    "compat.nemo.generation": ["VllmGeneration", "VllmGenerationWorker"],
    "compat.torchrl.service": ["AsyncVLLM", "make_async_vllm_engine"],
    "engine.engine": ["Engine"],
    "engine.lifecycle": ["EngineLifecycle", "EngineStateError"],
    "engine.sampling": ["SamplingSettings"],
    "engine.settings": ["EngineSettings"],
    "engine.thread": ["EngineThread"],
    "exact_ids": ["ChatHistory", "replace_prefix_tokens"],
    "rollouts.episode": ["Conversation", "PolicyLLM", "RolloutFunction"],
    "rollouts.sampler": ["FnCallRolloutSampler", "OneShotRolloutSampler", "RolloutSampler"],
    "server": ["OpenAIServer", "ServerSettings"],
    "trajectory": ["Trajectory"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
