"""A run that is killed again and again, and goes on each time: by hand twenty times, in the tests twice.

    python tests/distributed/killed_run.py FOLDER [KILLS [STEPS [RANKS [SEED]]]]

It trains a tiny model once without disturbance and once with SIGKILLs at random moments, of the launcher or of a random
rank: while the run starts, while it samples, updates or writes a checkpoint. The end must be the same, bit for bit.
"""

import random
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from real_run import Run, differences, write_recipe  # noqa: E402

START_SECONDS, STEP_SECONDS = 20.0, 0.5  # the longest that is waited within a start, and after a row


def kill_at_random(run: Run, draw: random.Random) -> str:
    """Kill the launcher or a rank, while the run starts or up to half a second after its first or second new row.

    Returns what was hit, and when; "" if the run had ended by then.
    """
    before, steps = len(run.rows()), draw.choice([0, 1, 1, 2])
    delay = draw.uniform(0, STEP_SECONDS if steps else START_SECONDS)
    began = time.monotonic()
    while run.process.poll() is None and (len(run.rows()) < before + steps or not run.processes("trainer")):
        time.sleep(0.02)
    time.sleep(delay)
    ranks = run.ranks() if run.process.poll() is None else []
    victim = draw.choice(["launcher", "rank"]) if ranks else "launcher"
    if run.process.poll() is not None:
        return ""
    (draw.choice(ranks) if victim == "rank" else run.process).send_signal(signal.SIGKILL)
    return f"{victim} {time.monotonic() - began:6.1f} s after the start, {len(run.rows()) - before} rows on"


def go_through(recipe: Path, kills: int, draw: random.Random, ranks: int, name: str) -> Run:
    """Start the recipe, kill it, and start it again until it ends by itself; the last start."""
    for number in range(kills):
        run = Run(recipe, ranks=ranks, name=name)
        hit = kill_at_random(run, draw)
        code = run.wait(600)
        wait_until_gone(run)
        print(
            f"kill {number + 1:>2}: {hit or 'none, the run has ended'}; {len(run.rows())} rows, exit {code}", flush=True
        )
        if not hit:
            return run
    run = Run(recipe, ranks=ranks, name=name)
    assert run.wait(600) == 0, run.output()
    return run


def wait_until_gone(run: Run) -> None:
    """Two starts of one run must not overlap, and guardians are still at work when their launcher is gone."""
    while run.processes():
        time.sleep(0.1)


def unequal(one: Run, other: Run) -> list[str]:
    """Where two finished runs differ, bit for bit, in metrics, answers, and exported weights."""
    found = differences(one.comparable_rows(), other.comparable_rows())
    for name in ("completions.jsonl",):
        found += [name] * ((one.folder / name).read_bytes() != (other.folder / name).read_bytes())
    weights, others = (load_file(run.folder / "model" / "model.safetensors") for run in (one, other))
    return found + [name for name in weights | others if not weights[name].equal(others[name])]


def main(folder: Path, kills: int = 20, steps: int = 30, ranks: int = 1, seed: int = 0) -> int:
    """The undisturbed run, the disturbed one, and what they differ in."""
    from make_tiny import make_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(folder / "model", layers=2, intermediate_size=128)
    settings = {"steps": steps, "step_deadline_s": 600, "first_step_deadline_s": 600}
    recipe = write_recipe(
        folder,
        model,
        run=settings,
        checkpoint={"every": 1},
        eval={"every": 5},
        engine={"load_format": "dummy"},
        policy={"lr": 1e-4},  # so slowly that there is something to learn in all steps
    )
    straight = Run(recipe, ranks=ranks, name="straight")
    assert straight.wait(1200) == 0, straight.output()
    print(f"undisturbed: {len(straight.rows())} rows", flush=True)
    broken = go_through(recipe, kills, random.Random(seed), ranks, name="broken")
    found = unequal(straight, broken)
    print("\n".join(found) or f"equal, bit for bit: {len(broken.rows())} rows, answers, weights")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
