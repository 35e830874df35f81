"""Each benchmark runs with one command, measures everything that it names, and prints a table."""

import json
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support.launch import run_script


def run(script: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark of the smallest model; return its figures and its output."""
    file = folder / "figures.json"
    printed = run_script(
        ROOT / "scripts" / "bench" / script, [*arguments, "--json", str(file)], folder, timeout=800
    )
    return json.loads(file.read_text()), printed


def test_weight_sync_measures_every_way_of_the_same_bytes(tmp_path: Path) -> None:
    picture = tmp_path / "growth.png"
    figures, printed = run(
        "weight_sync.py", tmp_path, "--presets", "1M", "--rounds", "2", "--plot", str(picture)
    )
    (size,) = figures["sizes"]
    for name in ("memcpy", "load: replay", "transport", "sync, verify full", "verl's sequence of calls"):
        assert len(size["ways"][name]["seconds"]) == 2 and name in printed
    assert any(name.startswith("TRL") for name in size["ways"])
    parameters = 1_019_264
    assert 4 * parameters <= size["nbytes"] < 4.1 * parameters
    sync = size["ways"]["sync, verify off"]
    # begin, one bucket, finish, end
    assert sync["staging"] == 2 * size["nbytes"] and sync["messages"] == 4
    assert picture.stat().st_size > 0


def test_shift_accounts_for_every_phase_and_side(tmp_path: Path) -> None:
    figures, printed = run("shift.py", tmp_path, "--preset", "1M", "--rounds", "3")
    assert len(figures["seconds"]) == len(figures["memory"]) == 3
    for cycle in figures["seconds"]:
        assert all(cycle[phase] > 0 for phase in ("release", "wake", "sync", "sleep", "restore", "step"))
    for cycle in figures["memory"]:
        assert cycle["engine off"] < cycle["engine on"]
    assert "growth" in printed


def test_experts_are_compared_with_a_loop_under_even_and_uneven_routes(tmp_path: Path) -> None:
    sizes = (
        "--tokens",
        "64",
        "--hidden",
        "32",
        "--width",
        "16",
        "--experts",
        "8",
        "--top-k",
        "2",
        "--rounds",
        "2",
    )
    figures, printed = run("experts.py", tmp_path, *sizes)
    for routes in ("even", "uneven"):
        assert figures["seconds"][routes].keys() == {"grouped", "batched", "loop"}
        assert all(len(times) == 2 for times in figures["seconds"][routes].values())
    assert "against the loop" in printed and "grouped" in printed


def test_lockstep_does_the_same_work_either_way(tmp_path: Path) -> None:
    """The script itself checks that both variants have sampled the same number of tokens."""
    small = ("--trajectories", "8", "--calls", "2", "--seconds", "0.05", "--rounds", "2")
    figures, printed = run("lockstep.py", tmp_path, *small)
    assert len(figures["rounds"]) == 2 and "lock-step" in printed
    for alone, together, ratio in figures["rounds"]:
        assert alone > 0 and ratio == together / alone


def test_toggles_measures_an_engine_for_each_setting(tmp_path: Path) -> None:
    small = (
        "--preset",
        "1M",
        "--prompts",
        "4",
        "--prompt-tokens",
        "8",
        "--max-tokens",
        "8",
        "--rounds",
        "2",
    )
    figures, printed = run("toggles.py", tmp_path, *small)
    assert figures["figures"].keys() == {"eager", "graphs"}
    assert all(len(times) == 3 and min(times) > 0 for times in figures["figures"].values())
    assert "against eager" in printed


def test_routes_are_exchanged_and_their_share_of_a_step_is_printed(tmp_path: Path) -> None:
    """There is one rank here, whose answers come back to it."""
    sizes = ("--tokens", "128", "--experts", "8", "--top-k", "2", "--layers", "2", "--rounds", "2")
    figures, printed = run("routes.py", tmp_path, *sizes)
    assert all(len(figures["seconds"][name]) == 2 for name in ("answers", "routes", "update"))
    assert figures["row_bytes"] == 4 and 0 < figures["share"] < 1
    assert "of the step" in printed


def test_slices_are_compared_with_steps_that_wait_for_their_longest_answer(tmp_path: Path) -> None:
    sizes = (
        "--prompts",
        "4",
        "--group",
        "2",
        "--mean",
        "8",
        "--max-tokens",
        "32",
        "--slice",
        "8",
        "--rounds",
        "2",
    )
    figures, printed = run("carry.py", tmp_path, *sizes)
    assert figures["rows"].keys() == {"whole", "slices"}
    assert all(row["tokens"] > 0 for rows in figures["rows"].values() for row in rows)
    ages = [row["stale/age_max"] for row in figures["rows"]["slices"]]
    assert 0 < max(ages) <= 4 and "at most 4 steps old" in printed


def test_a_hybrids_prompts_are_counted_for_each_answer_in_its_mixers_alone(tmp_path: Path) -> None:
    sizes = ("--hybrid", "lfm2", "--preset", "1M", "--shapes", "4:128:16", "--rounds", "1")
    figures, printed = run("prefixes.py", tmp_path, *sizes)
    assert figures["4:128:16"]["tokens"] == {"packed": 4 * 143, "shared": 128 + 4 * 15}
    assert 1.2 < figures["4:128:16"]["theory"] < 2.5 and "1M lfm2" in printed


def test_prompts_computed_once_are_counted_timed_and_compared_with_theory(tmp_path: Path) -> None:
    """The script itself checks that both variants have the same gradient."""
    sizes = ("--preset", "1M", "--shapes", "4:128:16", "nothing in common", "--rounds", "1")
    figures, printed = run("prefixes.py", tmp_path, *sizes)
    assert figures["4:128:16"]["tokens"] == {"packed": 4 * 143, "shared": 128 + 4 * 15}
    assert 2 < figures["4:128:16"]["theory"] < 572 / 188 and figures["nothing in common"]["theory"] == 1
    assert "theory" in printed and "MiB" in printed
