"""The service as TorchRL's own client classes see it: by name and base class."""

import sys
from typing import TypeVar

T = TypeVar("T")

_ENGINES = "torchrl.modules.llm.backends.vllm"


def engine_class(service_class: type[T]) -> type[T]:
    """The class to make a service of: where the program has imported TorchRL, one that its clients take for their own.

    `vLLMWrapper` looks for the name `AsyncVLLM` in a module of TorchRL's, `vLLMUpdaterV2` for an `RLvLLMEngine`, which
    is imported together with it. TorchRL is never imported here.
    """
    if "torchrl" not in sys.modules:
        return service_class
    if (base := sys.modules.get(f"{_ENGINES}.base")) is not None:
        base.RLvLLMEngine.register(service_class)
    return type("AsyncVLLM", (service_class,), {"__module__": _ENGINES})
