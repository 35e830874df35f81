"""Kill, interrupt and stop a run at random moments, and check that it resumes each time, bit for bit.

    python tests/support/killed_run.py FOLDER [--kills 60] [--stops 10] [--ranks 1] [--seed 0]
                                           [--runs 1] [--slices N] [--lora R]
                                           [--mixture [--split N] | --images | --family NAME]
                                           [--then RANKS | --alone [--apart [--delta]]]
                                           [--rollouts] [--pull] [--share]

A tiny model is trained once without disturbance, and once with signals to a random process (the launcher, a rank, an
engine, a guardian, a reward worker) at a random moment, from the start to the export; a run that has ended is started
again by the same command. 20 s after each end no process or file of it may be left, and both runs must end alike, bit
for bit. With `--slices N` answers grow by N tokens at a time, and most are unfinished when they are saved. With `--then
RANKS` the second half of the signals goes to a run on RANKS ranks, and the undisturbed run changes to RANKS ranks at
the same step: the last bits of sums depend on the number of ranks. `--lora R` trains adapters of rank R, which engines
apply. `--mixture` trains a mixture of experts by the routes of an engine in bfloat16, with a balance loss, and
`--split N` splits its experts over N ranks. `--images` trains a multimodal model on rows with 0 to 2 images.

With `--alone` this script starts nothing again: all signals are SIGKILL, at most two a step, and the run has to reach
its end by itself, with engines that are restarted in place, and a supervisor (RESTARTS) for everything else. It prints
the seconds that each kill has cost. With `--apart` the last of the ranks only generates, with weights of the previous
step; with `--delta` it gets them as changes of those before. With `--pull` engines read the ranks' shards, adapters
merged. Both are in bfloat16: with plain weights in float32, MKL's last bit depends on which requests happen to be
decoded together.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from tests.support.real_run import Run, differences, multimodal_sections, write_recipe  # noqa: E402

MOMENTS = ("start", "engine start", "sync", "rollout", "update", "checkpoint", "export")
STARTS = MOMENTS[:2]
VICTIMS = ("launcher", "rank", "engine", "guardian", "reward worker")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
# Seconds from the beginning of the moment; of the other moments:
LONGEST_DELAY = {"start": 8.0, "engine start": 8.0}
DELAY = 0.15
QUICKER = 8  # the factor by which a forked run starts faster
END_SECONDS = 90.0  # from a signal to the launcher's end; an interrupted rank has time to save
STOPPED_SECONDS = 5.0
NOTHING = "nothing"
REWARD = f"{ROOT}/tests/support/digit_reward.py:LeavesProcesses"


@dataclass
class Disturbance:
    """A signal to send: to which kind of process, and after how many more rows in which moment."""

    moment: str
    victim: str
    number: signal.Signals
    rows: int
    delay: float


def draw(kills: int, stops: int, seed: int) -> list[Disturbance]:
    """Draw the signals to send, in order; those during exports come last."""
    dice = random.Random(seed)
    signals = [dice.choice(SIGNALS) for _ in range(kills)] + [signal.SIGSTOP] * stops
    dice.shuffle(signals)
    drawn = []
    for number in signals:
        moment = dice.choice(MOMENTS)
        delay = dice.uniform(0, LONGEST_DELAY.get(moment, DELAY))
        drawn.append(Disturbance(moment, dice.choice(VICTIMS), number, dice.choice([0, 1]), delay))
    return sorted(drawn, key=lambda disturbance: disturbance.moment == "export")


class Survivor:
    """A run under a supervisor, which restarts whatever is killed below it."""

    def __init__(self, recipe: Path, ranks: int, name: str, restarts: int, **run_options: Any) -> None:
        self.phases = recipe.parent / f"{name}-phases"
        self.phases.mkdir(exist_ok=True)
        os.environ["RESTARTS"] = str(restarts)
        try:
            most = ["--engine.restarts", str(restarts)]
            self.run = Run(recipe, *most, ranks=ranks, name=name, phases=self.phases, **run_options)
        finally:
            del os.environ["RESTARTS"]
        self.lost: list[float] = []  # seconds that each kill has cost
        self.missed = 0  # kills that came too late

    def victims(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind; an engine's workers are in its core."""
        run = self.run
        by_kind = {"rank": run.ranks, "engine": run.engines, "guardian": run.guardians}
        if kind == "launcher":
            above = psutil.Process(run.process.pid)
            return [
                child for child in above.children() if "trainer.launcher" in " ".join(child.cmdline())
            ]
        return by_kind.get(kind, run.reward_workers)()

    def kill(self, kind: str, step: int, moment: str, delay: float) -> str:
        """Kill a process of this kind in this moment of a step, or before the step's end; return what was done."""
        deadline = time.monotonic() + 10
        while (
            not self.phase().endswith(moment)
            and time.monotonic() < deadline
            and self.run.process.poll() is None
        ):
            time.sleep(0.001)
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline and (moment or len(self.run.rows()) < step):
            time.sleep(0.01)
        deadline = time.monotonic() + 120
        while self.run.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                if processes := self.victims(kind):
                    self.run.note_private_folders()
                    phase, victim = self.phase(), random.Random(delay).choice(processes)
                    victim.kill()
                    return f"{kind} in {phase or 'start'}"
            time.sleep(0.01)
        return NOTHING

    def phase(self) -> str:
        """Return the phase of rank 0, or its last one if it has ended."""
        file = self.phases / "0"
        return file.read_text() if file.exists() else ""

    def go_through(self, kills: list[tuple[int, str, str, float]], usual: float) -> None:
        """Kill in order: (step, victim, moment, delay in s). `usual` is the time of an undisturbed step."""
        for number, (step, kind, moment, delay) in enumerate(kills, 1):
            while len(self.run.rows()) < step - 1 and self.run.process.poll() is None:
                time.sleep(0.002)
            rows, began = len(self.run.rows()), time.monotonic()
            done = self.kill(kind, step, moment, delay)
            if number == len(kills) or kills[number][0] > step:
                # a second kill comes in the recovery from the first
                while len(self.run.rows()) <= rows and self.run.process.poll() is None:
                    time.sleep(0.01)
            self.lost.append(max(0.0, time.monotonic() - began - usual))
            self.missed += done == NOTHING
            print(f"{number:>2} step {step}: {done}; {self.lost[-1]:.1f} s lost", flush=True)


def draw_kills(count: int, steps: int, seed: int, most: int = 2) -> list[tuple[int, str, str, float]]:
    """Draw kills for `Survivor.go_through`: at most `most` a step, the second within a start's length after the first.

    Remote engines are a step ahead, so that the death of one fails the next step; a third failure would end the run.
    """
    dice, drawn = random.Random(seed), []
    for step in sorted(dice.sample([step for step in range(1, steps) for _ in range(most)], count)):
        second = bool(drawn) and drawn[-1][0] == step
        moment = "" if second else dice.choice(["generation shift", "rollout", "update", "checkpoint"])
        victim = dice.choice(["engine", "engine", "rank", "launcher", "guardian", "reward worker"])
        drawn.append((step, victim, moment, dice.uniform(0, 8.0 if second else DELAY)))
    return drawn


def survived(
    recipe: Path,
    kills: list[tuple[int, str, str, float]],
    straight: Run,
    ranks: int,
    name: str,
    **run_options: Any,
) -> list[str]:
    """List all that is wrong with a run that had to survive these kills. `run_options` is passed to `Run`."""
    usual = [row["time/step"] for row in straight.rows() if "time/step" in row]
    began = time.monotonic()
    survivor = Survivor(recipe, ranks, name, restarts=60, **run_options)
    survivor.go_through(kills, sum(usual) / len(usual))
    failures = [] if survivor.run.wait(1200) == 0 else [survivor.run.output()]
    seconds = time.monotonic() - began
    survivor.run.assert_gone()
    failures += [f"{survivor.missed} kills came too late"] * (survivor.missed > 0)
    # A death in an update is often noticed a step later: the total includes that time, the single figures do not.
    print(
        json.dumps(
            {
                "kills": len(kills),
                "whole, s": round(seconds),
                "each": [round(s, 1) for s in survivor.lost],
            }
        )
    )
    return failures + unequal(straight, survivor.run)


class DisturbedRun:
    """A run that is started again as often as its recipe takes."""

    def __init__(self, recipe: Path, ranks: int, name: str, **run_options: Any) -> None:
        self.recipe, self.ranks, self.name, self.run_options = recipe, ranks, name, run_options
        self.phases = recipe.parent / f"{name}-phases"
        self.phases.mkdir(exist_ok=True)
        self.failures: list[str] = []
        self.longest = 0.0  # seconds from an end until everything was gone
        self.runs: list[tuple[int, Run]] = []  # every start, with its ranks
        self.start()

    def start(self) -> None:
        for file in self.phases.iterdir():
            file.unlink()
        self.run = Run(
            self.recipe, ranks=self.ranks, name=self.name, phases=self.phases, **self.run_options
        )
        self.runs.append((self.ranks, self.run))

    def done_on(self, ranks: int) -> int:
        """Return the steps that were complete when the run first started on another number of ranks."""
        output = "\n".join(run.output() for number, run in self.runs if number != ranks)
        resumed = re.search(r"resuming from .*, after step (\d+)", output)
        return int(resumed[1]) if resumed else 0

    def phase(self) -> str:
        """Return the phase of rank 0."""
        file = self.phases / "0"
        return file.read_text() if file.exists() else ""

    def moment(self) -> str:
        """Return the current one of MOMENTS, or the phase."""
        phase = self.phase()
        ends = {
            "generation shift": "sync",
            "rollout": "rollout",
            "update": "update",
            "checkpoint": "checkpoint",
        }
        if phase.startswith("finish"):
            return "export"
        if phase in ("", "start-up"):
            return "engine start" if "engine(s) for" in self.run.output() else "start"
        return ends.get(phase.rpartition(" > ")[2], phase)

    def ended(self) -> bool:
        return self.run.process.poll() is not None

    def wait_for(self, wanted: Disturbance) -> None:
        """Wait until the moment has come or the run has ended. A step's moments come once the wanted rows exist."""
        rows = len(self.run.rows()) + wanted.rows
        while not self.ended():
            moment = self.moment()
            early = wanted.moment in (*STARTS, "export")
            if moment == wanted.moment and (early or len(self.run.rows()) >= rows):
                break
            if wanted.moment in STARTS and moment not in STARTS:
                break  # the start is over
            time.sleep(0.003)
        if wanted.moment in (*STARTS, "export"):
            time.sleep(
                wanted.delay
                / (QUICKER if "preloaded" in self.run_options and wanted.moment in STARTS else 1)
            )

    def hit(self, wanted: Disturbance, victim: psutil.Process) -> str:
        """Send the signal, within a step as soon as the moment recurs; return the moment in which it was sent."""
        deadline = time.monotonic() + 10
        if wanted.moment not in (*STARTS, "export"):
            while self.moment() != wanted.moment and not self.ended() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(wanted.delay)
        moment = self.moment()
        victim.send_signal(wanted.number)
        return moment

    def victims(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind."""
        if kind == "launcher":
            return [psutil.Process(self.run.process.pid)]
        if kind == "rank":
            return self.run.ranks()
        if kind == "engine":
            return self.run.engines()
        if kind == "guardian":
            return self.run.guardians()
        return self.run.reward_workers()

    def disturb(self, wanted: Disturbance, dice: random.Random) -> str:
        """Send the signal, to another kind of process if there is none of this kind yet; return what was done."""
        self.wait_for(wanted)
        if self.ended() and wanted.moment == "export":
            self.ended_by_itself()  # too late: there is another export after the next start
            self.wait_for(wanted)
        kinds = [wanted.victim, *dice.sample(VICTIMS, len(VICTIMS))]
        for kind in kinds:
            try:
                processes = [] if self.ended() else self.victims(kind)
                if not processes:
                    continue
                victim = dice.choice(processes)
                self.run.note_private_folders()
                moment = self.hit(wanted, victim)
            except psutil.NoSuchProcess:
                continue
            return self.follow(kind, wanted.number, moment, victim, at_once=dice.random() < 0.3)
        self.ended_by_itself()
        return "none: the run had ended"

    def follow(
        self, kind: str, number: signal.Signals, moment: str, victim: psutil.Process, at_once: bool
    ) -> str:
        """Check that the run ends or continue as it should; if it ended, start it again, perhaps `at_once`."""
        done = f"{number.name} to {kind} in {moment}"
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_SECONDS)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
            self.goes_on(done)
            return done
        if kind in ("reward worker", "engine"):  # the run itself starts both again
            self.goes_on(done)
            return done
        hurt = self.run
        try:
            code = hurt.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            self.failures.append(f"{done}: no end within {END_SECONDS:.0f} s: {hurt.output()}")
            hurt.kill_everything()
        if code == 0 and moment != "export":
            self.failures.append(f"{done}: exit code 0")
        if at_once:
            self.start()
        self.check_nothing_left(hurt, done)
        if not at_once:
            self.start()
        return f"{done}, exit {code}" + (", started again at once" if at_once else "")

    def goes_on(self, done: str) -> None:
        """Wait for another row, or for a successful end, at most two minutes and a start."""
        rows, deadline = len(self.run.rows()), time.monotonic() + 420
        while (
            not self.ended() and len(self.run.rows()) == rows and not self.phase().startswith("finish")
        ):
            if time.monotonic() > deadline:
                self.failures.append(f"{done}: the run makes no progress")
                self.run.kill_everything()
                self.run.process.wait(10)
                break
            time.sleep(0.05)
        if self.ended():
            self.ended_by_itself(done)

    def ended_by_itself(self, done: str = NOTHING) -> None:
        """Record a failure unless the run has ended successfully, and start it again."""
        if self.run.process.returncode != 0:
            self.failures.append(
                f"after {done} the run ended with {self.run.process.returncode}: {self.run.output()}"
            )
        self.check_nothing_left(self.run, done)
        self.start()

    def check_nothing_left(self, run: Run, done: str) -> None:
        """Record a failure if processes or files of the run stay."""
        began = time.monotonic()
        try:
            run.assert_gone()
        except AssertionError as left:
            self.failures.append(f"{done}: {left}")
            run.kill_everything()
        self.longest = max(self.longest, time.monotonic() - began)

    def finish(self) -> Run:
        """Wait for the end of the run."""
        if self.run.wait(900) != 0:
            self.failures.append(
                f"the last start ended with {self.run.process.returncode}: {self.run.output()}"
            )
        self.check_nothing_left(self.run, "the end")
        return self.run


def disturbed(
    recipe: Path,
    drawn: list[Disturbance],
    ranks: int,
    seed: int,
    name: str = "broken",
    then: int = 0,
    **run_options: Any,
) -> DisturbedRun:
    """Send all signals that were drawn, the second half of them on `then` ranks, and wait for the end.

    `run_options` is passed to `Run`.
    """
    dice, run = random.Random(seed), DisturbedRun(recipe, ranks, name, **run_options)
    half = (len(drawn) + 1) // 2
    for number in range(1, len(drawn) + 1):
        run.ranks = then if then and number >= half else ranks  # for the next start
        began = time.monotonic()
        # A signal for a start waits until the run starts again.
        starting = run.moment() in STARTS
        wanted = next((one for one in drawn if starting or one.moment not in STARTS), drawn[0])
        drawn = [one for one in drawn if one is not wanted]
        done = run.disturb(wanted, dice)
        line = f"{number:>2} {done}; {len(run.run.rows())} rows, {time.monotonic() - began:.0f} s"
        print(line + (f"; {len(run.failures)} FAILURES" if run.failures else ""), flush=True)
    run.finish()
    return run


def undisturbed(recipe: Path, ranks: int, name: str = "straight", until: int = 0, then: int = 0) -> Run:
    """Run without any signal, on `then` ranks after step `until`."""
    starts = [(ranks, ["--run.steps", str(until)])] if until else []
    began = time.monotonic()
    for number, arguments in [*starts, (then or ranks, [])]:
        run = Run(recipe, *arguments, ranks=number, name=name)
        assert run.wait(1200) == 0, run.output()
        run.assert_gone()
    change = f", from step {until + 1} on on {then} rank(s)" if then else ""
    print(f"undisturbed: {len(run.rows())} rows{change}, {time.monotonic() - began:.0f} s", flush=True)
    return run


class Finished(Protocol):
    """A run that has ended, on whatever machines."""

    folder: Path

    def comparable_rows(self) -> list[dict[str, Any]]: ...


def unequal(one: Finished, other: Finished) -> list[str]:
    """List where two finished runs differ, bit for bit, in metrics, answer and exported weights."""
    lines = differences(one.comparable_rows(), other.comparable_rows())
    for name in ("completions.jsonl",):
        lines += [name] * ((one.folder / name).read_bytes() != (other.folder / name).read_bytes())
    first, second = (load_file(run.folder / "model" / "model.safetensors") for run in (one, other))
    return lines + [name for name in first | second if not first[name].equal(second[name])]


def main() -> int:
    """Run undisturbed and disturbed, and print what the two differ in."""
    from tests.support.families import make_family
    from trainer.commands.tiny_model import make_tiny_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in {
        "kills": 60,
        "stops": 10,
        "ranks": 1,
        "seed": 0,
        "runs": 1,
        "slices": 0,
        "then": 0,
        "lora": 0,
        "split": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--steps", type=int, help="steps of the run; by default as many as the signals take"
    )
    parser.add_argument("--alone", action="store_true", help="this script starts nothing again")
    parser.add_argument(
        "--mixture", action="store_true", help="a mixture of experts, with its engine's routes"
    )
    parser.add_argument("--images", action="store_true", help="a multimodal model, and rows with images")
    parser.add_argument(
        "--family", help="a family of tests/support/families.py; gated delta rules in bfloat16"
    )
    parser.add_argument(
        "--apart", action="store_true", help="the last rank only generates, a step ahead; with --alone"
    )
    parser.add_argument(
        "--rollouts", action="store_true", help="keep answers on disk until a checkpoint has them"
    )
    parser.add_argument(
        "--pull", action="store_true", help="engines read the ranks' shards; adapters are merged"
    )
    parser.add_argument("--share", action="store_true", help="common beginnings are computed once")
    parser.add_argument("--delta", action="store_true", help="only changed weights travel; with --apart")
    options = parser.parse_args()
    if options.apart and not options.alone:
        parser.error(
            "--apart needs --alone: an engine's death ends such a run, which its supervisor starts again"
        )
    if options.delta and not options.apart:
        parser.error("--delta needs --apart: nothing travels to engines on the training devices")
    plain = options.pull or options.delta
    folder = options.folder
    all_drawn = [draw(options.kills, options.stops, options.seed + run) for run in range(options.runs)]
    folder.mkdir(parents=True)  # fails if it exists: a run in it would be resumed
    kind: dict[str, Any] = {"architecture": "qwen3_moe", "tied": False} if options.mixture else {}
    seen: dict[str, dict[str, Any]] = {}
    if options.images:
        model, seen = multimodal_sections(folder)
    elif options.family:
        config = make_family(options.family, model := folder / "model").config
        # MKL's bits depend on the batch
        alone = {"max_num_seqs": 1} if getattr(config, "kv_lora_rank", None) else {}
        seen = {
            "engine": alone | ({"dtype": "bfloat16"} if hasattr(config, "linear_key_head_dim") else {})
        }
    else:
        model = make_tiny_model(folder / "model", layers=2, intermediate_size=128, **kind)
    routed: dict[str, Any] = {"model": {"routes": "engine"}, "algorithm": {"balance_coef": 0.01}}
    # Each disturbance within the steps may need one row before it and one after it.
    steps = options.steps or 5 + 2 * max(
        sum(one.moment != "export" for one in drawn) for drawn in all_drawn
    )
    recipe = write_recipe(
        folder,
        model,
        run={"steps": steps, "step_deadline_s": 600, "first_step_deadline_s": 600},
        checkpoint={"every": 3 if options.rollouts else 1, "keep": 2, "rollouts": options.rollouts},
        eval={"every": 0},
        data=seen.get("data", {}),
        engine={"restarts": 1000, "placement": "ranks" if options.apart else "shared"}
        | seen.get("engine", {})
        | ({} if options.lora else {"load_format": "dummy"})
        | ({"plain_cpu_weights": True} if plain else {})
        | ({"dtype": "bfloat16"} if options.mixture else {}),
        lora={"rank": options.lora, "sync": "merged" if options.pull else "adapter"},
        sync={"way": "pull" if options.pull else "auto", "delta": options.delta},
        # The low rate leaves something to learn in every step.
        policy={
            "lr": 1e-4,
            "dtype": "bfloat16" if plain else "float32",
            "expert_parallel": options.split,
        },
        reward={"functions": [{"name": REWARD}]},
        sampling={"max_tokens": 24 if options.slices else 6},
        batch={"share_prefixes": options.share, "shared_tokens_min": 2},
        rollout=({"slice_tokens": options.slices, "ahead": 1.0} if options.slices else {})
        | {"lag": int(options.apart)},
        **(routed if options.mixture else {}),
    )
    ranks, then, failures = options.ranks, options.then, 0
    straight = None if then else undisturbed(recipe, ranks)
    for seed in range(options.seed, options.seed + options.runs) if options.alone else ():
        assert straight is not None, "--then needs runs that this script starts again"
        most = 1 if options.apart else 2
        problems = survived(
            recipe, draw_kills(options.kills, steps, seed, most), straight, ranks, f"alone-{seed}"
        )
        if options.apart and options.rollouts:
            # a step that is read from disk sends no weights to remote engines
            problems = [line for line in problems if " sync/verified: " not in line]
        if options.delta:
            # A run that starts again has to send all weights first
            problems = [line for line in problems if " sync/bytes: " not in line]
        print("\n".join(problems) or "equal, bit for bit: rows, answers, weights", flush=True)
        failures += len(problems)
    for seed, drawn in enumerate([] if options.alone else all_drawn, options.seed):
        broken = disturbed(recipe, drawn, ranks, seed, f"broken-{seed}", then)
        if then:
            straight = undisturbed(recipe, ranks, f"straight-{seed}", broken.done_on(ranks), then)
        assert straight is not None
        problems = broken.failures + unequal(straight, broken.run)
        print(
            "\n".join(problems) or f"equal, bit for bit: {len(broken.run.rows())} rows, answers, weights"
        )
        figures = {
            "seed": seed,
            "disturbances": len(drawn),
            "failures": len(problems),
            "until gone, s": broken.longest,
        }
        print(json.dumps(figures), flush=True)
        failures += len(problems)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
