"""What tests of sharded models share: tiny random models, and a process group of this process alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import policy_checks as checks
from trainer.distributed import destroy_process_group, init_process_group


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of `policy_checks.KINDS`."""
    return checks.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one, without torchrun."""
    init_process_group(60, "cpu")
    yield
    destroy_process_group()
