"""The trials of `hotbunk doctor` on this machine: real engines and syncs, and every finding is fine."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from generation.engine import forkserver
from tests.support.launch import run_ranks
from tests.support.rows import read_rows
from trainer.commands import doctor_trials
from trainer.distributed import destroy_process_group, init_process_group
from trainer.run import processes


def one_trial(name: str, findings: str) -> None:
    """Run a trial on one rank."""
    processes.start_guardian()
    forkserver.start()
    assert doctor_trials.main(name, "cpu", Path(findings)) == 0


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("one engine", 1, ["engine", "sleep", "first sync", "memory over 10 shifts"]),
        ("pull", 1, ["pull: first sync", "pull: sync after an optimizer step", "pull: sync"]),
        (
            "zero copy",
            1,
            ["zero copy: first sync", "zero copy: gap at temperature 0.7", "zero copy: sync"],
        ),
        (
            "tensor parallel",
            2,
            ["tensor parallel: engine of two ranks", "tensor parallel: sync after an optimizer step"],
        ),
    ],
)
def test_every_trial_finds_this_machine_in_order(
    name: str, ranks: int, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "findings.jsonl"
    run_ranks(one_trial, ranks, 300, [name, str(path)])
    findings = {finding["what"]: finding for finding in read_rows(path)}
    assert set(expected) <= set(findings)
    assert {what: f for what, f in findings.items() if f["verdict"] != "ok" or f["remedy"]} == {}


def collectives(broken: str) -> None:
    """Run the trial of FSDP2's collectives by gloo, where one of them does nothing."""
    init_process_group(60, "cpu")
    called, findings = list[str](), list[tuple[object, ...]]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            work = getattr(dist, name)

            def noted(first: Any, *others: Any, name: str = name, work: Any = work, **named: Any) -> Any:
                called.append(name)
                return first.zero_() if name == broken else work(first, *others, **named)

            patch.setattr(dist, name, noted)
        doctor_trials.report_collectives(torch.device("cpu"), lambda *finding: findings.append(finding))
    assert {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} <= {*called}
    [(what, _fact, _wanted, fine, _remedy)] = findings
    assert (what, fine) == ("collectives of FSDP2", broken == "none")
    destroy_process_group()


@pytest.mark.parametrize(
    "broken", ["none", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]
)
def test_a_collective_that_does_nothing_is_found(broken: str) -> None:
    run_ranks(collectives, 1, 120, [broken])
