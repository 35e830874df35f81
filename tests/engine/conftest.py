"""Fork the engines of these tests, as those of ranks are."""

import sys
from pathlib import Path

import pytest

from generation.engine.vllm_compat import fork_engines
from sharding import WORKER_EXTENSION
from tests.conftest import TinyModel


@pytest.fixture(scope="session", autouse=True)
def _forked_engines() -> None:
    extension = WORKER_EXTENSION.rpartition(".")[0]
    imported = sys.modules.pop(extension, None)  # an engine imports it again, in its own environment
    fork_engines()
    if imported is not None:
        sys.modules[extension] = imported


@pytest.fixture(scope="session")
def model(tiny_model: TinyModel) -> Path:
    """Return a model with tied embeddings."""
    return tiny_model()
