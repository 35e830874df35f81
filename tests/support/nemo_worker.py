"""NeMo RL's methods for weights, on engines with settings that a `VllmConfig` has no keys for."""

from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.engine.engine import Engine
from generation.engine.settings import EngineSettings


class NemoWorker(VllmAsyncGenerationWorker):
    """Made of settings: it takes weights, and has no sampling of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        Engine.__init__(self, settings)
