"""NeMo RL's methods for weights, on engines with settings for which a `VllmConfig` has no keys."""

from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.engine.engine import Engine
from generation.engine.settings import EngineSettings


class NemoWorker(VllmAsyncGenerationWorker):
    """A worker made from `EngineSettings`: it takes weights, and has no sampling settings."""

    def __init__(self, settings: EngineSettings) -> None:
        Engine.__init__(self, settings)
