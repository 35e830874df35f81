"""The optimizer's step in host memory (`policy.update_on: host`) beside the device's, on one rank and on two.

Here the device is the host, and only the way is FSDP2's other one; tests/gpu/test_host_update_cuda.py has a GPU.
"""

import json
from pathlib import Path

import pytest

from tests.support import host_update_checks as checks
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> dict[str, str]:
    """Return the errors of each check on two ranks."""
    run_ranks(checks.two_ranks, 2, timeout=240, arguments=[str(models), str(models / "host.json")])
    return json.loads((models / "host.json").read_text())


@pytest.mark.parametrize("case", [case for case in checks.CASES if case != "replicas"])
def test_one_rank_updates_on_the_host_as_on_the_device(one_rank: None, models: Path, case: str) -> None:
    checks.check_host_update(models, case)


@pytest.mark.parametrize("case", [case for case in checks.CASES if not case.startswith("in place")])
def test_two_ranks_update_on_the_host_as_on_the_device(two_ranks: dict[str, str], case: str) -> None:
    assert two_ranks[case] == ""
