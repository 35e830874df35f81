"""In vLLM's workers: receiving weights, and loading them into the engine's model."""

import generation  # noqa: F401 - it adapts torchvision, which vLLM imports
