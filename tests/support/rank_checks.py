"""Checks by name, all of which a group of ranks runs: it is launched once, and each is a test of its own.

    @pytest.fixture(scope="module")
    def two_ranks(models: Path) -> Failures:
        return failures_of(checks_of, 2, models)

    @pytest.mark.parametrize("what", checks_of(Path()))
    def test_two_ranks_compute_as_one(two_ranks: Failures, what: str) -> None:
        assert two_ranks[what] == ""

`checks_of` is importable, takes the folder of the models, and does nothing but name the checks.
"""

import gc
import json
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sharding.ranks import agree, rank
from tests.support.launch import run_ranks
from trainer.distributed import destroy_process_group, init_process_group

Checks = dict[str, Callable[[], None]]


class Failures(dict[str, str]):
    """What went wrong in each check, on any rank: an empty string where nothing did."""

    printed = ""
    """What the ranks printed."""


def failures_of(checks_of: Callable[[Path], Checks], ranks: int, folder: Path) -> Failures:
    """Run the checks of this folder's models on so many ranks."""
    with tempfile.TemporaryDirectory() as results:
        file = Path(results) / "failures.json"
        printed = run_ranks(partial(_run_checks_of, checks_of, folder, file), ranks, timeout=280)
        failures = Failures(json.loads(file.read_text()))
    failures.printed = printed
    return failures


def run_checks(checks: Checks, results: Path) -> None:
    """Run checks on the ranks of this process group, which ends; write what went wrong to a file."""
    failures = {}
    for name, check in checks.items():
        error: BaseException | None = None
        gc.freeze()
        try:
            check()
        except Exception as caught:
            error = caught
            traceback.print_exc()
        gc.collect()  # models are large, and DeepSpeed's engines are cycles
        try:
            agree(error, name)
            failures[name] = ""
        except RuntimeError as everywhere:
            failures[name] = str(everywhere)
    if rank() == 0:
        results.write_text(json.dumps(failures))
    destroy_process_group()


def _run_checks_of(checks_of: Callable[[Path], Checks], folder: Path, results: Path) -> None:
    init_process_group(60, "cpu")
    run_checks(checks_of(folder), results)
