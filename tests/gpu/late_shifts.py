"""Shifts whose work runs late, by seeds, against the same shifts at once; then with one wait at a time left out.

    python -m tests.gpu.late_shifts SEEDS|waits [WAY ...]

in the environment of tests/softgpu/environment.sh. A shift: an optimizer step, the engine awake, a verified sync,
answers, the engine asleep. Policy and engine are started once for each way. With `waits`: at which seed of 20 a shift
differs or fails without one of the waits that it has in Python, for each of those of this process and of the engine's
worker, and without those together that stand in for one another. Where a tensor is read (`item`, `tolist`, `cpu`), the
wait is left out by a copy to pinned memory that nobody waits for. Exit code 1: a seed gave other bits, or fewer than
ten places were seen.
"""

import ctypes
import gc
import hashlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sharding.send.source import local_part
from trainer.commands import doctor_trials
from trainer.commands.tiny_model import make_tiny_model
from trainer.distributed import destroy_process_group, init_process_group
from trainer.run import processes

WAYS = ("staged", "pull", "zero_copy")
CYCLE = 5  # shifts, after which the policy begins anew
TRIES = 20  # seeds for a wait that is left out
# Functions whose waits stand in for one another.
TOGETHER = (
    ("post_backward", "finalize_backward", "_root_post_backward_final_callback"),
    ("stamp", "send"),
    ("transfer", "finish"),
    ("_pull", "_serve"),
    ("release", "restore"),
    ("__init__", "get_output"),
)
WAITS: list[tuple[Any, str]] = [
    *((torch.cuda.Stream, name) for name in ("synchronize", "wait_stream", "wait_event")),
    *((torch.cuda.Event, name) for name in ("synchronize", "wait")),
    *((module, "synchronize") for module in (torch.cuda, torch.accelerator)),
]

READS = ("item", "tolist", "cpu")  # methods of tensors on a device that wait for its work
sites: dict[str, str] = {}
"""Where this process has waited: FILE:LINE, with the function."""
left_out: list[str] = []
"""The sites at which this process does not wait."""


def watch_waits() -> None:
    """From now on this process notes its waits, and leaves one out."""
    for owner, name in WAITS:
        setattr(owner, name, noting(getattr(owner, name)))
    for name in READS:
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
    gc.freeze()  # a shift collects garbage, which would look at all that is imported


def noting(wait: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        return None if note_site() in left_out else wait(*arguments, **options)

    return noted


def reading(read: Callable[..., Any]) -> Callable[..., Any]:
    def noted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if type(tensor) is torch.Tensor and tensor.is_cuda and note_site() in left_out:
            host = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor.detach(), non_blocking=True)
        return read(tensor, *arguments, **options)

    return noted


def note_site() -> str:
    """Note and return where this process waits: FILE:LINE of the code that called torch."""
    frame = sys._getframe(2)
    while "/torch/cuda/" in frame.f_code.co_filename or frame.f_code.co_name in (
        "wait_for_writes",
        "_wait",
        "noted",
    ):
        frame = frame.f_back
    site = f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"
    sites[site] = frame.f_code.co_name
    return site


def delay(seed: int) -> None:
    """From now on this process's work runs late by that seed; 0: at once."""
    ctypes.CDLL("libcudart.so.13").sg_delay(ctypes.c_long(seed))


class Shifts:
    """A policy and an engine, and the outcomes of their first shifts, at once."""

    def __init__(self, way: str, shifts: int = 20) -> None:
        """`shifts`: the number of those over which the device's free bytes are compared."""
        self.way, self.resources = way, ExitStack()
        doctor_trials.PROMPTS, doctor_trials.TOKENS = 2, 4
        folder = Path(self.resources.enter_context(tempfile.TemporaryDirectory()))
        make_tiny_model(folder, vocab_size=512, hidden_size=256, heads=4, kv_heads=2, layers=3)
        config = doctor_trials.recipe(folder, "cuda", way, 1)
        config = config.model_copy(
            update={"sync": config.sync.model_copy(update={"timeout_s": 20, "bucket_mib": 1})}
        )
        self.trial = doctor_trials.Trial(config, self.resources)
        sites.clear()  # those of another way
        self.in_worker("watch_waits()")
        with self.trial.manager.generation_shift(self.trial.policy):
            self.batch = self.trial.sample(1.0)
        self.trial.learn(self.batch)  # makes the optimizer's state
        state = self.trial.policy.state_dict()
        self.start = {
            key: {name: t.clone() for name, t in state[key].items()} for key in ("model", "optimizer")
        }
        self.start["counters"] = state["counters"]
        self.expected = [self.outcome(number) for number in range(CYCLE)]
        free = [self.outcome(number)[-2:] for number in range(shifts)]
        print(
            f"{way}: bytes free, awake and asleep, over {shifts} shifts: {sorted(set(free))}", flush=True
        )

    def outcome(self, number: int) -> tuple[Any, ...]:
        """Run a shift; return answers, log-probabilities, the weights' digest, and free bytes awake and asleep."""
        trial = self.trial
        if number % CYCLE == 0:
            trial.policy.load_state_dict(self.start)
        trial.learn(self.batch)
        with trial.manager.generation_shift(trial.policy):
            batch = trial.sample(1.0)
            awake = torch.cuda.mem_get_info()[0]
        shards = (
            local_part(parameter.detach()).cpu() for _, parameter in trial.policy.named_parameters()
        )
        held = b"".join(shard.view(torch.uint8).numpy().tobytes() for shard in shards)
        answers = (
            batch.input_ids.tolist(),
            batch.engine_logprobs.tolist(),
            hashlib.sha256(held).hexdigest(),
        )
        return *answers, awake, torch.cuda.mem_get_info()[0]

    def in_worker(self, code: str) -> Any:
        """Return the value of an expression in the engine's worker, in this module."""
        leader = self.trial.leader
        return leader.thread.run(leader.engine.ask_workers("softgpu", __spec__.name, code), 60, code)[0][
            "value"
        ]

    def delay(self, seed: int) -> None:
        delay(seed)
        self.in_worker(f"delay({seed})")

    def differs(self, number: int, seed: int) -> str:
        """Name the results in which a shift with delayed work differs from one without; empty if there are none."""
        try:
            self.delay(seed)
            outcome = self.outcome(number)
            self.delay(0)
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:120]
        parts = zip(
            ("answers", "log-probabilities", "weights"),
            outcome,
            self.expected[number % CYCLE],
            strict=False,
        )
        return ", ".join(name for name, one, other in parts if one != other)

    def without(self, left: list[str], here: bool) -> str:
        """Name the first seed at which a shift without these waits differs, and its results; empty if none differs."""
        leave_out = partial(globals().__setitem__, "left_out") if here else self.leave_out_in_worker
        leave_out(left)
        numbered = ((number, self.differs(number, number + 1)) for number in range(TRIES))
        seen = next(
            (f"seed {number + 1}: {difference}" for number, difference in numbered if difference), ""
        )
        with suppress(Exception):  # the engine has ended
            leave_out([])
        return seen

    def leave_out_in_worker(self, left: list[str]) -> None:
        self.in_worker(f"globals().__setitem__('left_out', {left!r})")

    def mended(self) -> bool:
        """Return whether policy and engine compute as before once the engine has slept again."""
        with suppress(Exception):
            self.trial.manager.sleep()
            self.delay(0)
            return all(self.outcome(number)[:3] == self.expected[number][:3] for number in range(2))
        return False


def main(what: str, ways: list[str]) -> int:
    """Return the exit code."""
    watch_waits()
    init_process_group(300, "cuda")
    failures, seen = 0, set()
    for way in ways:
        shifts = Shifts(way)
        seeds = int(what) if what.isdecimal() else 0
        differences = [shifts.differs(number, number + 1) for number in range(seeds)]
        failures += sum(map(bool, differences))
        print(f"{way}: {seeds} seeds, unlike at once: {[d for d in differences if d]}", flush=True)
        for here, named in ((True, dict(sites)), (False, shifts.in_worker("sites"))):
            groups = [[site] for site in named]
            groups += [
                left
                for names in TOGETHER
                if len(left := [site for site in named if named[site] in names]) > 1
            ]
            for left in groups if what == "waits" else ():
                outcome = shifts.without(left, here)
                seen |= {tuple(left)} if outcome and len(left) == 1 else set()
                who, text = (
                    "trainer" if here else "worker",
                    ", ".join(f"{site} ({named[site]})" for site in left),
                )
                print(f"{way}, {who}: without {text}: {outcome or 'not seen'}", flush=True)
                if outcome and not shifts.mended():
                    shifts.resources.close()
                    shifts = Shifts(way)
        shifts.resources.close()
    destroy_process_group()
    print(f"seen, one at a time: {len(seen)} places", flush=True)
    return int(failures > 0 or (what == "waits" and len(seen) < 10))


if __name__ == "__main__":
    processes.start_guardian()
    processes.run(lambda: main(sys.argv[1], sys.argv[2:] or list(WAYS)))
