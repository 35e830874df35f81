"""Fork the engines of these tests, as those of ranks are."""

import sys

import pytest

from generation.engine.vllm_compat import fork_engines
from sharding import WORKER_EXTENSION


@pytest.fixture(scope="session", autouse=True)
def _forked_engines() -> None:
    extension = WORKER_EXTENSION.rpartition(".")[0]
    imported = sys.modules.pop(extension, None)  # an engine imports it again, in its own environment
    fork_engines()
    if imported is not None:
        sys.modules[extension] = imported
