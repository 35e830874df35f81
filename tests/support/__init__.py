"""What several test files share."""

import generation  # noqa: F401  # before Transformers: it makes way for torchvision
