"""A run's rows after a kill, a full disk or a power cut: a run goes on with the whole ones, and a report shows them."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.children import in_child
from trainer.commands.report_page import page_data
from trainer.commands.report_record import read_record, state
from trainer.config.schema import TrackingConfig
from trainer.run import records
from trainer.run.tracking import make_tracker

FILES = ("metrics.jsonl", "completions.jsonl")
STEPS, CHECKPOINT = 7, 5
STRANGE_STEPS = (None, "3", 3.0, True, [3], {"step": 3}, 2**70, -0.5)
NOT_ROWS = (
    b"",
    b"\x00" * 9,
    b"3",
    b"[]",
    b'{"text": "no step"}',
    b"[" * 100_000,
    b"9" * 5000,
    b'{"train/step": 3, "text": "\xc3"}',
)


def record(folder: Path, steps: range, resumed_from: int | None = None, patience: float = 0.0) -> None:
    """Write a run's rows of these steps, with two answers a step and characters of one to four bytes."""
    tracker = make_tracker(
        folder, {}, "demo", TrackingConfig(wandb="disabled"), resumed_from, patience=patience
    )
    try:
        for step in steps:
            # The one in the middle is half a pair
            texts = ("naïve \u2028 answer", f"{step} 😀 = \ud83d ∞")
            tracker.completions(step, [{"prompt": "é?", "text": text, "reward": 1.0} for text in texts])
            tracker.log(step, {"reward/mean": step / 3, "time/step": 0.1})
    finally:
        tracker.close()


@pytest.fixture
def finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an undisturbed run."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of them would take their time
    record(tmp_path / "finished", range(STEPS))
    return tmp_path / "finished"


def lines_of(content: bytes) -> list[tuple[int, int, bytes]]:
    """Return the begin, the end, and the bytes of each line."""
    lines, start = [], 0
    for line in content.splitlines(keepends=True):
        lines.append((start, start + len(line) - 1, line))
        start += len(line)
    return lines


def tears(content: bytes) -> Iterator[tuple[bytes, Callable[[int, int], bool]]]:
    """Return files that a crash may leave, each with a test whether a line from start to end is still whole in it."""
    size = len(content)
    for at in range(size - 150, size):  # the file ends here
        yield content[:at], lambda start, end, at=at: end <= at
    for at in range(size - 48, size):  # what is behind never came to the disk
        yield content[:at] + bytes(size - at), lambda start, end, at=at: end < at
    for at in range(0, size, size // 11):
        yield content[:at] + b"\0" + content[at:], lambda start, end, at=at: not start <= at <= end


def strange_lines(content: bytes) -> Iterator[bytes]:
    """Return files with a line that is not a row with a step."""
    half = content.index(b"\n", len(content) // 2) + 1
    for line in (
        *(json.dumps({"train/step": step, "text": "x"}).encode() for step in STRANGE_STEPS),
        *NOT_ROWS,
    ):
        yield content[:half] + line + b"\n" + content[half:]


@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_with_exactly_the_whole_rows_up_to_its_checkpoint(
    finished_run: Path, tmp_path: Path, name: str
) -> None:
    contents = {file: (finished_run / file).read_bytes() for file in FILES}
    cases = list(tears(contents[name]))
    cases += [(torn, lambda start, end: True) for torn in strange_lines(contents[name])]
    assert len(cases) >= 222
    folder = tmp_path / "torn"
    folder.mkdir()
    for number, (torn, is_whole) in enumerate(cases):
        for file in FILES:
            (folder / file).write_bytes(torn if file == name else contents[file])
        if any(is_whole(start, end) for start, end, _ in lines_of(contents["metrics.jsonl"])):
            assert page_data([read_record(folder)])
        record(folder, range(CHECKPOINT + 1, STEPS), resumed_from=CHECKPOINT)
        for file in FILES:
            kept = [
                line
                for start, end, line in lines_of(contents[file])
                if json.loads(line)["train/step"] > CHECKPOINT or file != name or is_whole(start, end)
            ]
            assert (folder / file).read_bytes() == b"".join(kept), (number, file)


def run_on_a_full_disk(folder: Path, limit: int) -> int:
    """Run in a child, no file of which may exceed `limit` bytes; return the last recorded step, or -1."""
    reader, writer = os.pipe()

    def run() -> None:
        done = -1
        with suppress(OSError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            for step in range(STEPS):
                record(folder, range(step, step + 1), resumed_from=step - 1 if step else None)
                done = step
        os.write(writer, str(done).encode())

    assert in_child(run) == 0
    os.close(writer)
    with os.fdopen(reader) as stream:
        return int(stream.read())


def test_a_run_that_met_a_full_disk_goes_on_once_there_is_room(
    finished_run: Path, tmp_path: Path
) -> None:
    size = (finished_run / "completions.jsonl").stat().st_size
    ends = set()
    for limit in range(1, size, size // 47):
        folder = tmp_path / str(limit)
        folder.mkdir()
        done = run_on_a_full_disk(folder, limit)
        assert done < STEPS - 1
        ends.add(done)
        if (folder / "metrics.jsonl").is_file() and done >= 0:
            assert page_data([read_record(folder)])
        record(folder, range(done + 1, STEPS), resumed_from=done if done >= 0 else None)
        for name in FILES:
            assert (folder / name).read_bytes() == (finished_run / name).read_bytes(), (limit, name)
    assert len(ends) >= 5


def test_a_run_waits_for_room_on_a_full_disk_and_writes_every_line_once(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A limit on files fails a write in the middle of a line, until the run waits for it."""
    unlimited, size = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        (finished_run / "completions.jsonl").stat().st_size,
    )
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert (tmp_path / "own" / "completions.jsonl").read_bytes()[-1:] in (b"", b"\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 3 * (len(waited) + 1), unlimited[1]))

    monkeypatch.setattr(records, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(records, "_MAY_PASS", {errno.EFBIG})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 3, unlimited[1]))
        record(tmp_path / "own", range(STEPS), patience=60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert len(waited) >= 2 and set(waited) == {10.0}
    for name in FILES:
        assert (tmp_path / "own" / name).read_bytes() == (finished_run / name).read_bytes()
    assert (
        "completions.jsonl cannot be written: [Errno 27] File too large; trying again for 60 s"
        in capsys.readouterr().err
    )


def test_a_report_is_written_of_a_run_whose_recipe_is_torn(finished_run: Path, tmp_path: Path) -> None:
    for torn in (
        b"",
        b"run:\n",
        b"run:\n  steps: [",
        b"\x00" * 20,
        b"run: {name: \xc3",
        b"- 1",
        b"run: 3",
    ):
        (finished_run / "config.yaml").write_bytes(torn)
        assert f"{STEPS - 1} steps in" in state(read_record(finished_run))
