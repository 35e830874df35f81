"""The optimizer's step in host memory (`policy.update_on: host`) beside the device's, on one rank and on two.

Here the device is the host, and only the way is FSDP2's other one; tests/gpu/test_host_update_cuda.py has a GPU.
"""

from pathlib import Path

import pytest

from tests.support import host_update_checks as checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    return failures_of(checks.two_ranks, 2, models)


@pytest.mark.parametrize("case", [case for case in checks.CASES if case != "replicas"])
def test_one_rank_updates_on_the_host_as_on_the_device(one_rank: None, models: Path, case: str) -> None:
    checks.check_host_update(models, case)


@pytest.mark.parametrize("what", checks.two_ranks(Path()))
def test_two_ranks_update_on_the_host_as_on_the_device(two_ranks: Failures, what: str) -> None:
    assert two_ranks[what] == ""
