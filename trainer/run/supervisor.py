"""Restart a failed run, so that a run that fails at night has continued by the morning.

    python -m trainer.run.supervisor RESTARTS LAUNCHER-ARGUMENTS …

`RESTARTS=N hotbunk train RECIPE` becomes this process, once on each node. Each attempt has a new
launcher and a new store, and resumes from the newest sound checkpoint. torchrun's own
`--max-restarts` is not used, since it restarts whatever the cause, ends with its launcher, and
gives the old store with its counters to the new ranks.

Restarts on: a rank, an engine or a launcher that was killed; an exceeded deadline; an exception.

Does not restart on: errors that would recur (a mistake in the recipe, a run that diverges, too many
failed rewards or episodes); a request to end (SIGINT, SIGTERM); a step that has failed three times.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generation import guardian
from trainer.errors import counted

OUTCOME = "HOTBUNK_OUTCOME"
"""Environment variable with the path of a file in memory, to which a launcher writes its `Outcome`
as JSON.
"""

_MOST_FAILURES = 3  # failures of the same step
_ASKED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
_LASTING = ("UserError", "Damaged", "TrainingDiverged", "NotFiniteError", "RewardError", "RolloutError")
_LONGEST_PAUSE = 60.0  # seconds
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Outcome:
    """The end of one attempt, as reported by its launcher."""

    step: int = 0  # the step under way; 0 if unknown
    kinds: Sequence[str] = ()  # class names of the exceptions that ended ranks
    reasons: Sequence[str] = ()  # lines of the launcher's summary
    saved: bool = False  # True if the attempt has written a checkpoint
    checkpoints: str = ""  # the folder of checkpoints; empty if the launcher died before it could report
    before: Sequence[str] = ()  # `marks` of that folder when the attempt began


def marks(checkpoints: Path) -> list[str]:
    """Return a text for each complete checkpoint that changes when it is written again: its name
    and the digest of its marker file.

    The marker lists the digests of all files. Modification times are not compared, since the clocks
    of two machines may differ.
    """
    # The import takes a second, which most runs need not wait for
    from trainer.config.resuming import COMPLETE_MARKER

    lines = []
    for file in checkpoints.glob(f"step_*/{COMPLETE_MARKER}"):
        with suppress(OSError):  # deleted meanwhile
            lines.append(f"{file.parent.name} {hashlib.sha256(file.read_bytes()).hexdigest()}")
    return lines


def supervise(launcher: list[str], restarts: int, pause: Callable[[int], float] | None = None) -> int:
    """Run the command `launcher` until it succeeds or must not be restarted, and return the last
    exit code.

    It is restarted at most `restarts` times, after a pause of `pause(consecutive failures of the
    same step)` seconds.
    """
    pause = pause or (lambda failures: min(2.0**failures, _LONGEST_PAUSE))
    attempt = _Attempt()
    for number in _SIGNALS:
        signal.signal(number, attempt.hand_on)
    first = Outcome()
    command = launcher
    step = -1
    failures = 0
    for left in range(restarts, -1, -1):
        code, outcome = attempt.run(command)
        if code == 0 or attempt.asked:
            return code
        failures = failures + 1 if outcome.step and outcome.step == step else 1
        step = outcome.step
        where = f"step {step}" if step else "an unknown step"
        wait = pause(failures)
        after = f"{counted(left - 1, 'restart')} left after that"
        stays = _why_not(code, outcome, failures, where, left)
        line = stays or f"failed in {where}, exit code {code}: starting again in {wait:.0f} s, {after}"
        print(f"[hotbunk] {line}", file=sys.stderr, flush=True)
        if stays:
            return code
        if asked := attempt.sleep(wait):
            return 128 + asked
        first = first if first.checkpoints else outcome
        if outcome.saved or (first.checkpoints and {*marks(Path(first.checkpoints))} - {*first.before}):
            # From the newest checkpoint, not from the one that the first attempt resumed from.
            command = [*launcher, "--resume", "auto"]
    raise AssertionError("the last attempt has none left")


def _why_not(code: int, outcome: Outcome, failures: int, where: str, left: int) -> str:
    """Return a sentence that says why a failed run is not started again, or "" if it is started
    again.
    """
    if code in _ASKED:
        return "not started again: the run was asked to end"
    lasting = [kind for kind in outcome.kinds if kind in _LASTING]
    if code == 2 or lasting:
        what = lasting[0] if lasting else "a mistake in the recipe or the machine"
        return f"not started again: {what} would recur"
    if failures == _MOST_FAILURES:
        return (
            f"not started again: {where} has failed {failures} times, the last time as "
            f"{'; '.join(outcome.reasons)}"
        )
    return "" if left else f"not started again: no restarts left, {where} failed last"


class _Attempt:
    """Runs one launcher at a time. `asked` is the number of the signal that asked this process to
    end, or 0.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._child: subprocess.Popen[bytes] | None = None

    def hand_on(self, number: int, _: Any) -> None:
        """Record a signal and send it to the launcher."""
        self.asked = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def run(self, command: list[str]) -> tuple[int, Outcome]:
        """Run the command, and return its exit code and its outcome.

        The command has a session of its own, so that Ctrl-C reaches it only through this process,
        and only once.
        """
        outcome = os.memfd_create("hotbunk-outcome")
        here = os.getpid()
        environment = os.environ | {OUTCOME: f"/proc/{here}/fd/{outcome}"}
        # A signal that comes before the child exists would be lost.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            guardian.die_with(here)

        self._child = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=begin
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if self.asked:
            self._child.send_signal(self.asked)
        code = self._child.wait()
        with os.fdopen(outcome, "rb") as file:
            report = file.read()
        return code if code >= 0 else 128 - code, Outcome(**json.loads(report)) if report else Outcome()

    def sleep(self, seconds: float) -> int:
        """Wait until the time is over or a signal comes; return the signal's number, or 0."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return self.asked


if __name__ == "__main__":
    sys.exit(supervise([sys.executable, "-m", "trainer.launcher", *sys.argv[2:]], int(sys.argv[1])))
