"""scripts/try_gpu.py: deadlines, skips with reasons, and results that are written check by check."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import try_gpu
from tests.conftest import ROOT
from tests.support.rows import read_rows

FACTS = dict.fromkeys(try_gpu.LACKS, True)


def check(name: str, *command: str, seconds: int = 100, **fields: Any) -> Any:
    return try_gpu.Check(name, seconds, fields.pop("needs", ()), "", command, **fields)


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    rows = read_rows(folder / "results.jsonl")
    return {row["name"]: row for row in rows}


def test_each_check_ends_by_its_deadline_and_leaves_a_line_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second check reads what the first has left; `hangs` starts a process, and neither of these ends by itself."""
    left = f"import json; print(json.loads(open({str(tmp_path / 'results.jsonl')!r}).readline())['results'])"
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    checks = (
        check("prints", "-c", "print('one'); print('two')"),
        check("reads", "-c", left),
        check("fails", "-c", "import sys; sys.exit('broken')"),
        check("imports", "-c", "import sys; print(sys.flags.safe_path)"),
        check("unfit", "-c", "", needs=("gpu",)),
        check("hangs", "-c", f"{child}; print('began', flush=True); time.sleep(600)", seconds=5),
        check("late", "-c", "", seconds=10_000),
    )
    monkeypatch.setattr(try_gpu, "CHECKS", checks)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setattr(try_gpu, "LEAST_SECONDS", 20)
    monkeypatch.setattr(try_gpu, "PROBE", f"print({json.dumps(json.dumps(FACTS | {'gpu': False}))})")
    arguments = argparse.Namespace(names=[], minutes=10, cpu=True, output=tmp_path)
    assert try_gpu.main(arguments) == 1
    rows = outcomes(tmp_path)
    assert list(rows) == ["prints", "reads", "fails", "imports", "unfit", "hangs", "late"]
    assert (rows["prints"]["outcome"], rows["prints"]["results"]) == ("ok", ["two"])
    assert (
        rows["reads"]["results"] == ["['two']"] and (tmp_path / "prints.log").read_text() == "one\ntwo\n"
    )
    assert (rows["fails"]["outcome"], rows["fails"]["results"]) == ("failed", ["broken"])
    assert rows["imports"]["results"] == ["False"]  # else scripts/bench could not import its neighbours
    assert rows["unfit"]["results"] == ["there is no GPU, or --cpu leaves it alone"]
    assert (rows["hangs"]["outcome"], rows["hangs"]["results"]) == ("deadline", ["began"])
    assert rows["late"]["outcome"] == "skipped" and "--minutes" in rows["late"]["results"][0]
    table = capsys.readouterr().out
    assert all(name in table for name in rows) and str(tmp_path) in table


def test_the_table_has_a_checks_result_beside_public_figures(capsys: pytest.CaptureFixture[str]) -> None:
    output = [
        "One step",
        "a step   tokens/s",
        "padded   0.8 s   32643",
        "packed   0.6 s   44276",
        "commit 486aa5f",
    ]
    results = try_gpu.results(output, r"^(padded|packed) ")
    assert results == output[2:4]
    assert try_gpu.results(output, "^TRL ") == try_gpu.results(output, "") == output[-1:]
    assert try_gpu.results([], "") == ["it printed nothing"]
    assert len(try_gpu.results(["packed " + "x" * 999] * 50, "^packed")) == try_gpu.LINES
    row = {"name": "long", "outcome": "ok", "seconds": 61, "results": results, "expected": "much"}
    skipped = {
        "name": "trl_step",
        "outcome": "skipped",
        "results": ["there is no TRL"],
        "expected": "little",
    }
    try_gpu.print_table([row | {"public": ["prime-rl: 11,896 tokens/s"]}, skipped])
    assert capsys.readouterr().out.splitlines() == [
        "long      ok           61  padded   0.8 s   32643",
        " " * 27 + "packed   0.6 s   44276",
        " " * 27 + "expected: much",
        " " * 27 + "public: prime-rl: 11,896 tokens/s",
        "trl_step  skipped          there is no TRL",
    ]


def test_checks_come_in_the_order_kernels_engines_peers() -> None:
    engines = ["vllm" in check.needs for check in try_gpu.CHECKS[:10]]
    assert engines == sorted(engines)
    assert [check.name for check in try_gpu.CHECKS[10:]] == ["long", "trl_step", "trl_sync"]
    assert [check.name for check in try_gpu.chosen(["start", "facts"])] == ["facts", "start"]
    with pytest.raises(SystemExit, match="there is no check kernel: name some of facts, kernels"):
        list(try_gpu.chosen(["kernel"]))


def test_what_a_machine_lacks_is_named_and_nothing_else_is_left_out() -> None:
    lacking = FACTS | {"vllm": False, "new_torch": False}
    reasons = {check.name: try_gpu.why_not(check, lacking, 1000.0) for check in try_gpu.CHECKS}
    assert {name for name, reason in reasons.items() if reason} == {
        *("float32", "shifts", "graphs", "start", "trl_sync")
    }
    assert reasons["start"] == "torch is older than 2.13; there is no vLLM"


def test_the_files_that_checks_name_exist() -> None:
    words = [word for check in try_gpu.CHECKS for word in (*check.command, *(check.on_cpu or ()))]
    files = [word for word in words if word.endswith(".py")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_it_needs_python_alone() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts/try_gpu.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "only these: facts, kernels, head" in done.stdout
