"""The record of a run: metrics.jsonl, completions.jsonl, tokens.jsonl, summary.json, and copies in other trackers.

One writer, one line and one W&B call a step. The files are the record: floats are written so that they read back
bit-equal, and a resumed run first drops the lines behind its checkpoint, so that its file equals an uninterrupted
one's. In W&B it continues as the same run with every step once: steps that W&B lacks are sent from the file, others are
not sent again, since they cannot be overwritten. W&B lives on a thread of its own behind a bounded queue: it starts
while the model loads, and whether it is missing, slow, broken or off the network, training does not notice.
"""

import json
import math
import netrc
import os
import queue
import re
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from urllib.parse import urlparse

from generation.images import Image
from sharding.ranks import is_main
from trainer.config.schema import TrackingConfig
from trainer.errors import UserError, shortened
from trainer.run.other_trackers import OTHER_TRACKERS, OtherTracker
from trainer.run.records import Rows, patiently, whole_rows, write_whole

_FILES = ("metrics.jsonl", "completions.jsonl", "tokens.jsonl")
_ANSWER_COLUMNS = ("prompt", "text", "answer", "finish_reason")  # of the table in W&B, besides step and reward
_TEXT_LIMIT = 4000  # characters of one answer in completions.jsonl
_QUEUE_LIMIT = 1000  # steps that W&B may lag behind
_FINISH_SECONDS = 60.0  # for W&B to upload the rest
_GAP_STEPS = 5  # whose mean gap is compared
_GAP_TIMES = 4.0  # as large as at first is grown
_GAP_NOISE = 1e-4  # nats; a gap below is rounding, however it moves


class NullTracker:
    """The tracker of every rank except 0: takes everything, writes nothing."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record a step's metrics; once a step, in rising order."""

    def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record some of a step's answers."""

    def tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record the figures of some answers' tokens."""

    def summary(self, values: dict[str, Any]) -> None:
        """Add to the figures of the whole run."""

    def close(self) -> None:
        """Finish. Safe to call twice."""


class Tracker(NullTracker):
    """Writes a run's folder, on rank 0."""

    def __init__(
        self, folder: Path, last: int, completions_per_step: int, copies: Sequence["Copy"], patience: float
    ) -> None:
        """`last` is the last step that the files hold; `copies` are those in other trackers; `patience`: seconds to
        wait for room on a full disk.
        """
        self._patience = patience
        self._folder = folder
        self._last = last
        self._completions_per_step = completions_per_step
        self._copies = copies
        self._summary: dict[str, Any] = {}
        self._unwritten: dict[str, list[str]] = {name: [] for name in _FILES[1:]}  # until their step's metrics are
        self._files = {name: (folder / name).open("ab", buffering=0) for name in _FILES}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's figures to disk and to the copies. Raises ValueError for a step that was logged before."""
        if step <= self._last:
            raise ValueError(f"step {step} is logged after step {self._last}; each step is logged once, in order")
        self._check_folder()
        self._last = step
        row = {"train/step": step} | metrics
        line = json.dumps({key: _finite(value) for key, value in row.items()}) + "\n"
        self._write_rest()  # all before a checkpoint says that the step is done
        patiently(partial(_append, self._files["metrics.jsonl"], line), "metrics.jsonl", self._patience)
        for copy in self._copies:
            copy.put("log", row)

    def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write a step's first answers, as many as `tracking` asks for, long texts cut."""
        # A small image is as it is, or it could not be decoded.
        lines = [
            {"train/step": step} | _cut(row) | {key: row[key] for key in ("images",) if key in row}
            for row in rows[: self._completions_per_step]
        ]
        said = [json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines]
        self._unwritten["completions.jsonl"] += said
        for copy in self._copies:
            copy.put("completions", {"train/step": step, "rows": lines})

    def tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of some answers' tokens."""
        said = [json.dumps({"train/step": step} | row, ensure_ascii=False) + "\n" for row in rows]
        self._unwritten["tokens.jsonl"] += said

    def _write_rest(self) -> None:
        for name, lines in self._unwritten.items():
            if lines:
                text = "".join(lines)
                lines.clear()
                patiently(partial(_append, self._files[name], text), name, self._patience)

    def summary(self, values: dict[str, Any]) -> None:
        """Add to summary.json, which is replaced as a whole."""
        self._check_folder()
        self._summary |= {key: _finite(value) for key, value in values.items()}
        write_whole(self._folder / "summary.json", json.dumps(self._summary, indent=2) + "\n")
        for copy in self._copies:
            copy.put("summary", values)

    def _check_folder(self) -> None:
        """Raise UserError when the folder was deleted, moved or replaced meanwhile: what is written would be lost."""
        path = self._folder / "metrics.jsonl"
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(self._files["metrics.jsonl"].fileno())):
                return
        raise UserError(
            f"{self._folder} was deleted, moved or replaced while the run was writing to it, with the record of "
            f"{max(self._last, 0)} steps and its checkpoints: put it back, or start over by the same command, and "
            "leave it alone until the run has ended"
        )

    def close(self) -> None:
        """Close the files and the copies."""
        self._write_rest()
        for file in self._files.values():
            file.close()
        for copy in self._copies:
            copy.close()


class Copy:
    """A copy elsewhere, on a thread of its own. The first failure ends it, with one warning."""

    def __init__(self, name: str) -> None:
        """`name` is that of the tracker."""
        self.name = name
        self._queue: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(_QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait, with a deadline, until the tracker has everything."""
        self.put("finish", {})
        self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            self._warn(f"not finished after {_FINISH_SECONDS:.0f} s")

    def put(self, what: Literal["log", "completions", "summary", "finish"], values: dict[str, Any]) -> None:
        """Copy a step's metrics, train/step included, or figures of the whole run; answers before their step's."""
        if self._thread.is_alive():
            with suppress(queue.Full):  # a network that hangs; the files have it all
                self._queue.put_nowait((what, values))

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        """Take what there is from the queue until it says `finish`."""
        raise NotImplementedError

    def _warn(self, reason: str) -> None:
        print(f"[hotbunk] no further copy in {self.name} ({reason}); metrics.jsonl has everything", file=sys.stderr)


class OtherCopy(Copy):
    """The copy in one of the trackers of `tracking.also`."""

    def __init__(self, name: str, start: Callable[[], OtherTracker], earlier: Rows) -> None:
        """`start` makes the tracker of that name, on this copy's thread, and gives it `earlier` rows that it lacks."""
        self._start, self._earlier = start, earlier
        super().__init__(name)

    def _work(self) -> None:
        tracker = self._start()
        for row in self._earlier:
            tracker.log(row)
        while (item := self._queue.get())[0] != "finish":
            if item[0] == "log":
                tracker.log({key: _finite(value) for key, value in item[1].items()})
        tracker.close()


class Alarms:
    """What a run's figures should wake somebody for: a divergence, and a gap between trainer and engine that grows.

    It sees every row of metrics.jsonl in order, and tells of each kind of trouble once.
    """

    def __init__(self, earlier: Rows) -> None:
        """`earlier` are rows that have been looked at before."""
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=_GAP_STEPS)
        self._told: set[str] = set()
        for row in earlier:
            list(self.heed(row))

    def heed(self, row: dict[str, float | None]) -> Iterator[tuple[str, str]]:
        """A title and a sentence for each trouble that this row is the first to show."""
        step = row["train/step"]
        troubles = {}
        figures = {key: row[key] for key in ("loss", "grad_norm", "gap/mean") if key in row}
        broken = [key for key, value in figures.items() if value is None or not math.isfinite(value)]
        if broken or row.get("skipped_steps"):
            what = f"{', '.join(broken)} not finite" if broken else "an update was skipped, its loss not finite"
            troubles["Divergence"] = f"step {step}: {what}"
        gap = row.get("gap/mean")
        if gap is not None and math.isfinite(gap):
            self._latest.append(gap)
            if len(self._first) < _GAP_STEPS:
                self._first.append(gap)
            first, latest = fmean(self._first), fmean(self._latest)
            if latest > max(_GAP_TIMES * first, _GAP_NOISE):
                troubles["The gap grows"] = (
                    f"step {step}: trainer and engine are {latest:.1e} nats apart on average, {first:.1e} at first"
                )
        yield from ((title, text) for title, text in troubles.items() if title not in self._told)
        self._told |= troubles.keys()


class WandbCopy(Copy):
    """The copy in Weights & Biases: figures, some answers of each step, alerts, and the curves at the end."""

    def __init__(self, settings: dict[str, Any], earlier: Rows, answers: Rows) -> None:
        """Continue or begin a run with these `settings`, keyword arguments of `wandb.init`.

        `earlier` are the steps that a resumed run has behind it, in order, with their `answers`; W&B gets those that it
        lacks.
        """
        self._settings = settings
        self._earlier = earlier
        self._answers: dict[int, Rows] = {}
        for row in answers:
            self._answers.setdefault(row["train/step"], []).append(row)
        super().__init__("Weights & Biases")

    def _work(self) -> None:
        replaced = list(Path(self._settings["dir"]).glob(f"wandb/offline-run-*-{self._settings['id']}/*.wandb"))
        run = _start(self._settings)
        last = run.summary.get("train/step", -1) if run.resumed else -1
        for row in self._earlier:
            if row["train/step"] > last:
                run.log(row | self._table(row["train/step"]))
        # An upload of one folder replaces what another of the same run has brought (wandb#5865), and this folder
        # begins with all steps: `wandb sync` is to leave the others out.
        for file in replaced:
            file.with_suffix(".wandb.synced").touch()
        alarms = Alarms(self._earlier)
        while True:
            what, values = self._queue.get()
            if what == "completions":
                self._answers[values["train/step"]] = values["rows"]
            elif what == "log":
                table = self._table(values["train/step"])
                if values["train/step"] > last:
                    run.log(values | table)
                for title, text in alarms.heed(values):
                    run.alert(title, f"{self._settings['name']}, {text}", level="ERROR")
            elif what == "summary":
                run.summary.update(values)
            else:
                if (curves := Path(self._settings["dir"]) / "curves.png").is_file():
                    run.log({"curves": sys.modules["wandb"].Image(str(curves))})
                run.finish()
                sys.modules["wandb"].teardown()  # ends its service process, too
                return

    def _table(self, step: int) -> dict[str, Any]:
        """The step's answers, under the name of the table; nothing where there are none."""
        if not (rows := self._answers.pop(step, [])):
            return {}
        data = [[step, *(str(row.get(key, "")) for key in _ANSWER_COLUMNS), row.get("reward")] for row in rows]
        columns, wandb = ["step", *_ANSWER_COLUMNS, "reward"], sys.modules["wandb"]
        shown = [row.get("images") or [] for row in rows]
        for n in range(max(map(len, shown))):
            columns.append(f"image {n + 1}")
            for line, own in zip(data, shown, strict=True):
                line.append(wandb.Image(Image.read(own[n]).open()) if n < len(own) else None)
        return {"completions": wandb.Table(columns=columns, data=data)}


def make_tracker(
    folder: Path,
    config: dict[str, Any],
    name: str,
    tracking: TrackingConfig,
    resumed_from: int | None = None,
    patience: float = 0.0,
) -> NullTracker:
    """This rank's tracker; only rank 0's writes.

    `config` is the resolved configuration, for W&B and other trackers. `resumed_from` is the step of the
    checkpoint that the run continues from; without it, files of an earlier run in the folder are begun anew.
    """
    if not is_main():
        return NullTracker()
    folder.mkdir(parents=True, exist_ok=True)
    last = -1 if resumed_from is None else resumed_from
    earlier, answers, _ = [_keep_until(folder / file, last) for file in _FILES]
    given = {"folder": folder, "config": config, "earlier": earlier, "name": name, "project": tracking.project}
    copies: list[Copy] = [OtherCopy(each, partial(OTHER_TRACKERS[each], **given), earlier) for each in tracking.also]
    if (mode := _resolve(tracking.wandb)) != "disabled":
        resumed = {} if resumed_from is None else {"resumed_from": resumed_from}
        settings: dict[str, Any] = {"project": tracking.project, "name": name, "dir": str(folder), "mode": mode}
        # The run's name in W&B's own records, kept beside its files; a run that starts over gets another.
        file = folder / "wandb_id"
        if resumed_from is None or not file.exists() or not re.fullmatch(rb"[0-9a-f]{8}", file.read_bytes()):
            write_whole(file, secrets.token_hex(4))
        settings |= {"config": config | resumed, "id": file.read_text("utf-8"), "resume": "allow"}
        copies.append(WandbCopy(settings, earlier, answers))
    return Tracker(folder, last, tracking.completions_per_step, copies, patience)


def _resolve(wanted: str) -> str:
    """The mode for auto: WANDB_MODE's, else online where there is a login, else offline; it never asks the user."""
    if wanted != "auto":
        return wanted
    if chosen := os.environ.get("WANDB_MODE"):
        return {"dryrun": "offline", "run": "online"}.get(chosen, chosen)
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:  # `wandb login` leaves a key in ~/.netrc; asking W&B itself would import it
        return "online" if netrc.netrc(os.environ.get("NETRC")).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


def _start(settings: dict[str, Any]) -> Any:
    """Import W&B and begin a run of metrics only; offline where its server does not answer. The step is a metric like
    others, since W&B's own counter only rises and drops rows that are behind it (https://docs.wandb.ai/models/track/log).
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # the setting of this name comes too late for some of its lines
    import wandb

    lean = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
    )
    try:
        run = wandb.init(**settings, settings=lean)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:  # no network; no login
        if settings["mode"] == "offline":
            raise
        print(
            f"[hotbunk] Weights & Biases is not to be had online ({shortened(' '.join(str(error).split()), 120)}): the "
            f"copy goes to {settings['dir']}/wandb, for `wandb sync` later",
            file=sys.stderr,
        )
        wandb.teardown()  # its service still has the run, under the same id
        run = wandb.init(**(settings | {"mode": "offline"}), settings=lean)
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run


def _append(file: FileIO, text: str) -> None:
    """Add all of it to the file, on disk, or nothing where that fails."""
    # Half of a surrogate pair, which answers may hold, has no UTF-8: in JSON its escape means the same.
    content, begin = text.encode(errors="backslashreplace"), os.fstat(file.fileno()).st_size
    try:
        while content:
            content = content[file.write(content) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), begin)
        raise


def _keep_until(path: Path, last: int) -> Rows:
    """Leave the whole rows of steps up to `last` in the file, and nothing else; returns them."""
    kept = [(line, row) for line, row in whole_rows(path) if row["train/step"] <= last]
    if path.exists():
        write_whole(path, b"".join(line + b"\n" for line, _ in kept))
    return [row for _, row in kept]


def _cut(value: Any) -> Any:
    """Texts of more than so many characters without their ends, in lists and mappings too."""
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each) for each in value]
    if isinstance(value, str) and len(value) > _TEXT_LIMIT:
        return f"{value[:_TEXT_LIMIT]} … ({len(value)} characters)"
    return value


def _finite(value: Any) -> Any:
    """NaN and infinities have no spelling in JSON: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
