"""The checkpoint interval that minimises the cost of saving plus expected loss (Young, Daly; `checkpoint.every: auto`).

Failures are counted over all sessions of a run, in `sessions.jsonl` in its folder. A session that neither finished nor
ended on request has failed. A restarted engine costs one step at most and does not count.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

_DAY = 86_400.0
_DEVICE_HOURS = 50_000.0
"""GPU-hours between failures: 419 in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, arXiv:2407.21783, 3.3.4)."""


def best_interval(cost: float, apart: float) -> float:
    """Returns the seconds of training between checkpoints that cost `cost` seconds, if failures are `apart` s apart.

    The formula is from J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (Future
    Generation Computer Systems 22, 2006). Its first term is J. W. Young's, sqrt(2 · cost · apart) (Communications of
    the ACM 17, 1974).
    Example: 10 s and a day: 1,308 s.
    """
    if cost >= 2 * apart:
        return apart
    part = cost / (2 * apart)
    return math.sqrt(2 * cost * apart) * (1 + math.sqrt(part) / 3 + part / 9) - cost


class Intervals:
    """Decides on rank 0 when the next checkpoint is due, from the last one's cost and the run's failures so far."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Reads the earlier sessions of the run in `folder`, which has this number of ranks, and begins a new one."""
        self._file = folder / "sessions.jsonl"
        trained, failures = _history(self._file)
        # The prior: one failure a day, or the failure rate of machines with this number of GPUs, if that is higher.
        assumed = min(_DAY, _DEVICE_HOURS * 3600 / ranks)
        self._assumed = assumed
        self._trained = trained
        self._failures = failures
        self._began = self._last = time.monotonic()
        self._cost: float | None = None
        self.note("begin")

    @property
    def between_failures(self) -> float:
        """The estimated mean seconds between failures, from the prior and all sessions so far."""
        seen = self._trained + time.monotonic() - self._began
        return (self._assumed + seen) / (1 + self._failures)

    def is_over(self) -> bool:
        """Returns True if it is time to save. The first checkpoint is due at once, to measure its cost."""
        if self._cost is None:
            return True
        return time.monotonic() - self._last >= best_interval(self._cost, self.between_failures)

    def saved(self, cost: float) -> None:
        """Records that training has waited `cost` seconds for a checkpoint."""
        self._cost = max(cost, 1e-3)
        self._last = time.monotonic()
        self.note("saved")

    def note(self, what: str) -> None:
        """Adds an event to the file: "begin", "saved", or "end" for a session that ends properly."""
        line = json.dumps({"what": what, "seconds": round(time.monotonic() - self._began, 3)})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _history(file: Path) -> tuple[float, int]:
    """Returns the total seconds of all sessions, up to their last events, and the number of failed ones."""
    seconds, failures, session = 0.0, 0, dict[str, Any]()
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
            what, lasted = str(row["what"]), float(row["seconds"])
        except (ValueError, KeyError, TypeError):  # a killed process has left half a line
            continue
        if what == "begin":
            failures += bool(session) and session["what"] != "end"
            session = {"what": what, "before": seconds}
        elif session:
            session["what"] = what
            seconds = session["before"] + lasted
    return seconds, failures + (bool(session) and session["what"] != "end")
