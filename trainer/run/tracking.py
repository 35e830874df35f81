"""Write a run's records (metrics.jsonl, completions.jsonl, tokens.jsonl, summary.json) and copies
them to trackers.

There is one writer, with one line and one W&B call for each step. The files are authoritative:
floats are written so that they read back bit-equal, and a resumed run first drops the lines after
its checkpoint, so that its files equal those of an uninterrupted run. In W&B a resumed run
continues with every step once: steps that W&B lacks are sent from the files; others are not sent
again, since W&B cannot overwrite them. W&B runs on a thread of its own behind a bounded queue and
starts while the model loads, so it does not affect training if it is missing, slow, broken or
offline.
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
from trainer.run.other_trackers import OTHER_TRACKERS, OtherTracker, TrackedRun
from trainer.run.records import Rows, patiently, whole_rows, write_whole

_FILES = ("metrics.jsonl", "completions.jsonl", "tokens.jsonl")
# Columns of the W&B table, besides step and reward
_ANSWER_COLUMNS = ("prompt", "text", "answer", "finish_reason")
_TEXT_LIMIT = 4000  # characters of one answer in completions.jsonl
_QUEUE_LIMIT = 1000  # number of steps that W&B may lag behind
_FINISH_SECONDS = 60.0  # time for W&B to upload the rest
_GAP_STEPS = 5  # number of first and of latest steps whose mean gaps are compared
_GAP_TIMES = 4.0  # the ratio from which the gap has grown
_GAP_NOISE = 1e-4  # nats; a smaller gap is rounding


class NullTracker:
    """The tracker of all ranks except 0, which writes nothing."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record a step's metrics, once for each step, in ascending order."""

    def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record some of a step's answers."""

    def tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record the metrics of some answers' tokens."""

    def summary(self, values: dict[str, Any]) -> None:
        """Add to the metrics of the entire run."""

    def close(self) -> None:
        """Finish the records. Safe to call twice."""


class Tracker(NullTracker):
    """The tracker of rank 0, which writes the records in the run's folder."""

    def __init__(
        self,
        folder: Path,
        last: int,
        completions_per_step: int,
        copies: Sequence["Copy"],
        patience: float,
    ) -> None:
        """Open the files.

        Args:
            last: the last step in the files.
            completions_per_step: number of answers of a step to record.
            copies: copies in other trackers.
            patience: seconds to wait for space on a full disk.
        """
        self._patience = patience
        self._folder = folder
        self._last = last
        self._completions_per_step = completions_per_step
        self._copies = copies
        self._summary: dict[str, Any] = {}
        # Until their step's metrics are
        self._unwritten: dict[str, list[str]] = {name: [] for name in _FILES[1:]}
        self._files = {name: (folder / name).open("ab", buffering=0) for name in _FILES}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics to disk and to the copies. Raises ValueError for a step that was
        logged before.
        """
        if step <= self._last:
            raise ValueError(
                f"step {step} is logged after step {self._last}; each step is logged once, in order"
            )
        self._check_folder()
        self._last = step
        row = {"train/step": step} | metrics
        line = json.dumps({key: _finite(value) for key, value in row.items()}) + "\n"
        self._write_rest()  # before a checkpoint can include the step
        patiently(partial(_append, self._files["metrics.jsonl"], line), "metrics.jsonl", self._patience)
        for copy in self._copies:
            copy.put("log", row)

    def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record a step's first answers, as many as the recipe asks for, with long texts cut."""
        lines = []
        for row in rows[: self._completions_per_step]:
            line: dict[str, Any] = {"train/step": step} | _cut(row)
            if "images" in row:  # they are not cut, since they could not be decoded then
                line["images"] = row["images"]
            lines.append(line)
        texts = [json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines]
        self._unwritten["completions.jsonl"] += texts
        for copy in self._copies:
            copy.put("completions", {"train/step": step, "rows": lines})

    def tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record the rows of some answers' tokens."""
        texts = [json.dumps({"train/step": step} | row, ensure_ascii=False) + "\n" for row in rows]
        self._unwritten["tokens.jsonl"] += texts

    def _write_rest(self) -> None:
        for name, lines in self._unwritten.items():
            if lines:
                text = "".join(lines)
                lines.clear()
                patiently(partial(_append, self._files[name], text), name, self._patience)

    def summary(self, values: dict[str, Any]) -> None:
        """Add to summary.json, which is replaced atomically."""
        self._check_folder()
        self._summary |= {key: _finite(value) for key, value in values.items()}
        write_whole(self._folder / "summary.json", json.dumps(self._summary, indent=2) + "\n")
        for copy in self._copies:
            copy.put("summary", values)

    def _check_folder(self) -> None:
        """Raise UserError if the folder was deleted, moved or replaced, since further records would
        be lost.
        """
        path = self._folder / "metrics.jsonl"
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(self._files["metrics.jsonl"].fileno())):
                return
        raise UserError(
            f"{self._folder} was deleted, moved or replaced while the run was writing to it, with the "
            f"record of {max(self._last, 0)} steps and its checkpoints: put it back, or start over by "
            "the same command, and leave it alone until the run has ended"
        )

    def close(self) -> None:
        """Close the files and the copies."""
        self._write_rest()
        for file in self._files.values():
            file.close()
        for copy in self._copies:
            copy.close()


class Copy:
    """A copy of the records in another tracker, on a thread of its own. Its first failure ends it,
    with one warning.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; `name` is the tracker's name."""
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

    def put(
        self, what: Literal["log", "completions", "summary", "finish"], values: dict[str, Any]
    ) -> None:
        """Copy a step's metrics with train/step, its answers before that, or metrics of the entire
        run.
        """
        if self._thread.is_alive():
            with suppress(queue.Full):  # the network hangs; the files have everything
                self._queue.put_nowait((what, values))

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        """Send items from the queue to the tracker until the item `finish`."""
        raise NotImplementedError

    def _warn(self, reason: str) -> None:
        print(
            f"[hotbunk] no further copy in {self.name} ({reason}); metrics.jsonl has everything",
            file=sys.stderr,
        )


class OtherCopy(Copy):
    """The copy in one of the trackers of `tracking.also`."""

    def __init__(self, name: str, start: Callable[[], OtherTracker], earlier: Rows) -> None:
        """Start the copy's thread. On it, `start` opens the tracker, which gets those of the
        `earlier` rows that it lacks.
        """
        self._start = start
        self._earlier = earlier
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
    """Detects a divergence, and a growing gap between trainer and engine, in a run's metrics.

    It takes all rows of metrics.jsonl in order, and reports each kind of problem once.
    """

    def __init__(self, earlier: Rows) -> None:
        """Begin after the rows `earlier`, whose problems have been reported."""
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=_GAP_STEPS)
        self._reported: set[str] = set()
        for row in earlier:
            list(self.heed(row))

    def heed(self, row: dict[str, float | None]) -> Iterator[tuple[str, str]]:
        """Yield a title and a sentence for each problem that appears in this row for the first
        time.
        """
        step = row["train/step"]
        troubles = {}
        metrics = {key: row[key] for key in ("loss", "grad_norm", "gap/mean") if key in row}
        broken = [key for key, value in metrics.items() if value is None or not math.isfinite(value)]
        if broken or row.get("skipped_steps"):
            what = "an update was skipped, its loss not finite"
            if broken:
                what = f"{', '.join(broken)} not finite"
            troubles["Divergence"] = f"step {step}: {what}"
        gap = row.get("gap/mean")
        if gap is not None and math.isfinite(gap):
            self._latest.append(gap)
            if len(self._first) < _GAP_STEPS:
                self._first.append(gap)
            first = fmean(self._first)
            latest = fmean(self._latest)
            if latest > max(_GAP_TIMES * first, _GAP_NOISE):
                troubles["The gap grows"] = (
                    f"step {step}: trainer and engine are {latest:.1e} nats apart on average, "
                    f"{first:.1e} at first"
                )
        yield from ((title, text) for title, text in troubles.items() if title not in self._reported)
        self._reported |= troubles.keys()


class WandbCopy(Copy):
    """The copy in Weights & Biases: metrics, some answers of each step, and alerts."""

    def __init__(self, settings: dict[str, Any], earlier: Rows, answers: Rows) -> None:
        """Continue or begin a run with these `settings`, keyword arguments of `wandb.init`.

        `earlier` are the rows of a resumed run's earlier steps, in order, with their `answers`; W&B
        gets those that it lacks.
        """
        self._settings = settings
        self._earlier = earlier
        self._answers: dict[int, Rows] = {}
        for row in answers:
            self._answers.setdefault(row["train/step"], []).append(row)
        super().__init__("Weights & Biases")

    def _work(self) -> None:
        replaced = list(
            Path(self._settings["dir"]).glob(f"wandb/offline-run-*-{self._settings['id']}/*.wandb")
        )
        run = _start(self._settings)
        last = run.summary.get("train/step", -1) if run.resumed else -1
        for row in self._earlier:
            if row["train/step"] > last:
                run.log(row | self._table(row["train/step"]))
        # Uploading one offline folder replaces the uploads of the run's other folders
        # (https://github.com/wandb/wandb/issues/5865). This folder begins with all steps, so `wandb
        # sync` is made to skip the others.
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
                run.finish()
                sys.modules["wandb"].teardown()  # also ends its service process
                return

    def _table(self, step: int) -> dict[str, Any]:
        """Return the step's answers as a table, under the table's name; {} if there are none."""
        if not (rows := self._answers.pop(step, [])):
            return {}
        data: list[list[Any]] = []
        for row in rows:
            texts = [str(row.get(key, "")) for key in _ANSWER_COLUMNS]
            data.append([step, *texts, row.get("reward")])
        columns = ["step", *_ANSWER_COLUMNS, "reward"]
        wandb = sys.modules["wandb"]
        images = [row.get("images") or [] for row in rows]
        for n in range(max(map(len, images))):
            columns.append(f"image {n + 1}")
            for line, files in zip(data, images, strict=True):
                line.append(wandb.Image(Image.read(files[n]).open()) if n < len(files) else None)
        return {"completions": wandb.Table(columns=columns, data=data)}


def make_tracker(
    folder: Path,
    config: dict[str, Any],
    name: str,
    tracking: TrackingConfig,
    resumed_from: int | None = None,
    patience: float = 0.0,
) -> NullTracker:
    """Open this rank's tracker; only that of rank 0 writes.

    `config` is the resolved configuration, for W&B and other trackers. `resumed_from` is the step
    of the checkpoint that the run continues from; if it is None, existing files in the folder are
    replaced.
    """
    if not is_main():
        return NullTracker()
    folder.mkdir(parents=True, exist_ok=True)
    last = -1 if resumed_from is None else resumed_from
    earlier, answers, _ = [_keep_until(folder / file, last) for file in _FILES]
    continues = not _is_copy(folder, resumed_from is None) and resumed_from is not None
    run = TrackedRun(
        folder, config, earlier, name, tracking.project, continues=continues and bool(earlier)
    )
    copies: list[Copy] = [
        OtherCopy(key, partial(OTHER_TRACKERS[key], run), earlier) for key in tracking.also
    ]
    if (mode := _resolve(tracking.wandb)) != "disabled":
        resumed = {} if resumed_from is None else {"resumed_from": resumed_from}
        settings: dict[str, Any] = {
            "project": tracking.project,
            "name": name,
            "dir": str(folder),
            "mode": mode,
        }
        # The run's id in W&B, kept beside its files; a run that starts over gets a new one.
        file = folder / "wandb_id"
        if not continues or not file.exists() or not re.fullmatch(rb"[0-9a-f]{8}", file.read_bytes()):
            write_whole(file, secrets.token_hex(4))
        settings |= {"config": config | resumed, "id": file.read_text("utf-8"), "resume": "allow"}
        copies.append(WandbCopy(settings, earlier, answers))
    return Tracker(folder, last, tracking.completions_per_step, copies, patience)


def _is_copy(folder: Path, starts_over: bool) -> bool:
    """Return True for a copy of a run's folder whose original is still where it was, and note where
    this folder is.

    Trackers take a copy for a run of its own. A folder that was moved, or whose original was
    deleted, is no copy.
    """
    file = folder / "folder.json"
    here = folder.resolve()
    note = _note(file)
    token = secrets.token_hex(8)
    copied = False
    if note and not starts_over:
        original = Path(note["folder"])
        copied = original != here and _note(original / file.name) == note and not original.samefile(here)
        token = token if copied else note["token"]
    write_whole(file, json.dumps({"folder": str(here), "token": token}))
    return copied


def _note(file: Path) -> dict[str, str]:
    """Read the place and the token of a run's folder; {} if there is none."""
    try:
        note = json.loads(file.read_bytes())
        return {key: str(note[key]) for key in ("folder", "token")}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _resolve(wanted: str) -> str:
    """Resolve the mode `auto`: WANDB_MODE, else online if there is a login, else offline. It never
    asks the user.
    """
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
    """Import W&B and begin a run that records metrics only, offline if its server does not answer.

    The step is an ordinary metric, since W&B's own counter drops rows that are behind it
    (https://docs.wandb.ai/models/track/log).
    """
    # The setting `silent` takes effect too late for some lines
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    lean = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
    )
    try:
        run = wandb.init(**settings, settings=lean)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:  # no network; no login
        if settings["mode"] == "offline":
            raise
        print(
            "[hotbunk] Weights & Biases cannot be used online "
            f"({shortened(' '.join(str(error).split()), 120)}): the copy goes to "
            f"{settings['dir']}/wandb, for `wandb sync` later",
            file=sys.stderr,
        )
        wandb.teardown()  # its service still has the run, under the same id
        run = wandb.init(**(settings | {"mode": "offline"}), settings=lean)
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run


def _append(file: FileIO, text: str) -> None:
    """Append the text to the file and sync it to disk; append nothing if that fails."""
    # Answers may contain lone surrogates, which UTF-8 cannot encode; in JSON their escapes mean the
    # same.
    content = text.encode(errors="backslashreplace")
    begin = os.fstat(file.fileno()).st_size
    try:
        while content:
            content = content[file.write(content) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), begin)
        raise


def _keep_until(path: Path, last: int) -> Rows:
    """Remove everything from a file except intact rows of steps up to `last`, and return these
    rows.
    """
    kept = [(line, row) for line, row in whole_rows(path) if row["train/step"] <= last]
    if path.exists():
        write_whole(path, b"".join(line + b"\n" for line, _ in kept))
    return [row for _, row in kept]


def _cut(value: Any) -> Any:
    """Return a value with texts cut after `_TEXT_LIMIT` characters, also in lists and mappings."""
    if isinstance(value, dict):
        return {key: _cut(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_cut(entry) for entry in value]
    if isinstance(value, str) and len(value) > _TEXT_LIMIT:
        return f"{value[:_TEXT_LIMIT]} … ({len(value)} characters)"
    return value


def _finite(value: Any) -> Any:
    """Return the value, or None for NaN and infinities, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
