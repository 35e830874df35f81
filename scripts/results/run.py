"""Make the base model of docs/results.md, and train its settings with several seeds; scripts/results/run.sh calls it.

Runs that are finished are not run again, and runs that were stopped continue. A finished run's figures are kept in
docs/results/, from which `draw.py` makes the picture and the table.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from scripts.results import task
from trainer.run.records import read_rows, write_whole

RECIPES = Path("scripts/results")
RUNS = Path("runs/results")
START = RUNS / "start"
FIGURES = Path("docs/results")
STEPS, SHORT_STEPS = 30, 10
KEPT = (
    "train/step",
    "eval/accuracy",
    "reward/mean",
    "entropy",
    "grad_norm",
    "gap/max",
    "stale/",
    "correction/",
    "time/step",
    "time/rollout",
    "time/update",
    "time/sync",
    "rollout_tokens",
    "length/",
)
"""Beginnings of the names of the figures that are kept."""
BFLOAT16 = {"engine.dtype": "bfloat16"}
SETTINGS: dict[str, dict[str, str]] = {
    "grpo": {},
    "dr_grpo": {"algorithm.preset": "dr_grpo"},
    "rloo": {"algorithm.preset": "rloo"},
    "ppo": {"algorithm.preset": "ppo"},
    "bfloat16": BFLOAT16,
    "bfloat16_uncorrected": BFLOAT16 | {"algorithm.tis_cap": "null"},
    "slices": {"rollout.slice_tokens": "32", "rollout.ahead": "1.0"},
    "apart": {"engine.placement": "ranks", "rollout.lag": "1"},
}
"""What each setting changes in recipe.yaml."""


def finish(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command to its end, and end this program if the command fails.

    The command has a process group of its own. SIGINT and SIGTERM are passed on to it, and it has the time to save.
    """
    started: list[int] = []

    def pass_on(number: int, _: object) -> None:
        for group in started:
            os.killpg(group, number)

    earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    child = subprocess.Popen(command, env=environment, process_group=0)
    started.append(child.pid)
    code = child.wait()
    started.clear()
    for number, handler in earlier.items():
        signal.signal(number, handler)
    if code:
        print(
            f"results: `{' '.join(command)}` ended with exit code {code}; the same command goes on",
            file=sys.stderr,
        )
        sys.exit(code if code > 0 else 128 - code)


def hotbunk(*words: str) -> None:
    """Run scripts/train.sh on two ranks, and end this program if it fails."""
    finish(["bash", "scripts/train.sh", *words], {"NPROC_PER_NODE": "2"} | os.environ)


def start() -> None:
    """Make what every run begins with: data, tokenizer, and a model that was warm-started on mistaken solutions."""
    if not START.exists():
        print("· making a random model and its data", flush=True)
        part = START.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)  # of a call that was stopped
        try:
            task.make(part)
            part.rename(START)
        except ModuleNotFoundError as error:
            sys.exit(f"results: {error.name} is not installed: scripts/results/run.sh installs it")
        except OSError as error:
            sys.exit(
                f"results: {part} could not be written ({error}); when that is mended, the same command goes on"
            )
    if not (START / "summary.json").exists():
        print("· warm-starting it on worked solutions with mistakes", flush=True)
        hotbunk("sft", str(RECIPES / "sft.yaml"))


def train(setting: str, seed: int, steps: int) -> None:
    """Train a setting with a seed, unless it is finished, and keep the figures of a complete run."""
    name = f"{setting}-{seed}"
    if not is_finished(RUNS / name, steps):
        print(f"· {setting}, seed {seed}", flush=True)
        keys = {"run.name": name, "run.seed": str(seed), "run.steps": str(steps)} | SETTINGS[setting]
        overrides = [word for key, value in keys.items() for word in (f"--{key}", value)]
        hotbunk(str(RECIPES / "recipe.yaml"), *overrides)
    if steps == STEPS:
        keep(RUNS / name, FIGURES / f"{name}.jsonl")


def race(seeds: list[int]) -> None:
    """Run the race against TRL, and keep both sides' figures."""
    command = [
        sys.executable,
        "scripts/bench/race.py",
        "--steps",
        str(STEPS),
        "--seeds",
        *map(str, seeds),
    ]
    finish(command)
    for seed in seeds:
        for side in ("race_hotbunk", "race_trl"):
            keep(RUNS / f"{side}-{seed}", FIGURES / f"{side}-{seed}.jsonl")


def is_finished(run: Path, steps: int) -> bool:
    """Return whether a run has trained all steps and evaluated the last."""
    rows = read_rows(run / "metrics.jsonl")
    return bool(rows) and rows[-1]["train/step"] >= steps and (run / "summary.json").exists()


def keep(run: Path, file: Path) -> None:
    """Write those of a run's figures that the page shows, with five digits."""
    lines = []
    for row in read_rows(run / "metrics.jsonl"):
        kept = {key: value for key, value in row.items() if key.startswith(KEPT) and value is not None}
        rounded = {
            key: value if isinstance(value, int) else float(f"{value:.5g}")
            for key, value in kept.items()
        }
        lines.append(json.dumps(rounded) + "\n")
    file.parent.mkdir(exist_ok=True)
    write_whole(file, "".join(lines))


def main() -> None:
    """Train what the command line names."""
    parser = argparse.ArgumentParser(prog="scripts/results/run.sh", description=__doc__.splitlines()[0])
    names = ["start", "short", *SETTINGS, "race"]
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help=f"{', '.join(names)}; default: all settings and the race"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.what) - set(names)):
        parser.error(f"{unknown[0]} is no setting; there are {', '.join(names)}")
    start()
    if options.what == ["short"]:
        train("grpo", 0, SHORT_STEPS)
        finish([sys.executable, "-m", "hotbunk", "report", str(RUNS / "grpo-0")])
        return
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
    for seed in seeds:
        for setting in options.what or SETTINGS:
            if setting in SETTINGS:
                train(setting, seed, STEPS)
    if "race" in options.what or not options.what:
        race(seeds)


if __name__ == "__main__":
    main()
