"""What a run's figures should wake somebody for: a divergence, and a gap between trainer and engine that grows."""

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean

from trainer.run.records import Rows

_STEPS = 5  # whose mean is compared
_TIMES = 4.0  # as large as at first is grown
_NOISE = 1e-4  # nats; a gap below is rounding, however it moves


class Alarms:
    """Sees every row of metrics.jsonl in order, and tells of each kind of trouble once."""

    def __init__(self, earlier: Rows) -> None:
        """`earlier` are rows that have been looked at before."""
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=_STEPS)
        self._told: set[str] = set()
        for row in earlier:
            list(self.heed(row))

    def heed(self, row: dict[str, float | None]) -> Iterator[tuple[str, str]]:
        """A title and a sentence for each trouble that this row is the first to show."""
        step = row["train/step"]
        troubles = {}
        broken = [key for key in ("loss", "grad_norm", "gap/mean") if key in row and not _finite(row[key])]
        if broken or row.get("skipped_steps"):
            what = f"{', '.join(broken)} not finite" if broken else "an update was skipped, its loss not finite"
            troubles["Divergence"] = f"step {step}: {what}"
        gap = row.get("gap/mean")
        if gap is not None and math.isfinite(gap):
            self._latest.append(gap)
            if len(self._first) < _STEPS:
                self._first.append(gap)
            first, latest = fmean(self._first), fmean(self._latest)
            if latest > max(_TIMES * first, _NOISE):
                troubles["The gap grows"] = (
                    f"step {step}: trainer and engine are {latest:.1e} nats apart on average, {first:.1e} at first"
                )
        yield from ((title, text) for title, text in troubles.items() if title not in self._told)
        self._told |= troubles.keys()


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
