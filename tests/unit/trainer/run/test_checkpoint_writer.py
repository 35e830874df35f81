"""Checkpoints written by a thread: their content, the time of errors, and the waits. One rank, with a fake disk."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.config.schema import CheckpointConfig
from trainer.errors import UserError
from trainer.run import checkpoint, records
from trainer.run.keeper import CheckpointWriter, check_best_metric


class Counter:
    """A part whose state is one tensor."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Disk:
    """Stands for `checkpoint.write`: waits until it may write, then records its arguments or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.written: list[tuple[int, float]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(checkpoint, "write", self.write)

    def write(self, folder: Path, snapshot: checkpoint.Snapshot, group: object) -> Path:
        assert self.may_write.wait(120)
        if self.error is not None:
            raise self.error
        self.written.append((snapshot.step, snapshot.tensors["counter.value"].item()))
        return folder


@pytest.fixture
def disk(group: None, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def writer(folder: Path, timeout: float = 20, **settings: Any) -> CheckpointWriter:
    return CheckpointWriter(folder, CheckpointConfig(**({"patience_s": 0.0} | settings)), timeout)


def test_training_goes_on_while_the_moment_of_the_call_is_written(tmp_path: Path, disk: Disk) -> None:
    counter, saving = Counter(), writer(tmp_path)
    saving.save(1, {"counter": counter}, {}, {})
    counter.value += 1  # returned before anything is written
    disk.may_write.set()
    saving.wait()
    saving.save(2, {"counter": counter}, {}, {})
    saving.close()
    assert disk.written == [(1, 0.0), (2, 1.0)]


def test_a_checkpoint_is_written_when_save_returns_if_not_in_the_background(
    tmp_path: Path, disk: Disk
) -> None:
    disk.may_write.set()
    writer(tmp_path, background=False).save(1, {"counter": Counter()}, {}, {})
    assert disk.written == [(1, 0.0)]


def test_at_most_one_checkpoint_is_being_written(tmp_path: Path, disk: Disk) -> None:
    counter, saving = Counter(), writer(tmp_path)
    saving.save(1, {"counter": counter}, {}, {})
    threading.Timer(0.2, disk.may_write.set).start()
    saving.save(2, {"counter": counter}, {}, {})
    assert disk.written[:1] == [(1, 0.0)]
    saving.wait()


@pytest.mark.parametrize("told_by", ["wait", "save"])
def test_an_error_of_the_writer_is_raised_once_by_the_next_call(
    tmp_path: Path, disk: Disk, told_by: str
) -> None:
    disk.error = OSError(28, "No space left on device")
    saving = writer(tmp_path)
    saving.save(1, {"counter": Counter()}, {}, {})
    assert not saving.failed
    disk.may_write.set()
    while not saving.failed:
        time.sleep(0.01)
    with pytest.raises(OSError, match="No space left"):
        saving.wait() if told_by == "wait" else saving.save(2, {"counter": Counter()}, {}, {})
    saving.wait()


def test_a_full_disk_is_waited_for_and_training_goes_on(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writing thread waits alone; the checkpoint has the state of the call."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            disk.error = None

    monkeypatch.setattr(records, "time", SimpleNamespace(sleep=pause))
    disk.error = RuntimeError(
        "phase checkpoint (write) failed on rank 1: OSError: [Errno 28] No space left on device"
    )
    counter, saving = Counter(), writer(tmp_path, patience_s=600.0, timeout=60)
    saving.save(1, {"counter": counter}, {}, {})
    disk.may_write.set()
    saving.wait()
    assert pauses == [10.0, 10.0] and disk.written == [(1, 0.0)]
    assert (
        "step_1 cannot be written: phase checkpoint (write) failed on rank 1" in capsys.readouterr().err
    )
    disk.error = OSError(13, "Permission denied")
    saving.save(2, {"counter": counter}, {}, {})
    with pytest.raises(OSError, match="Permission"):
        saving.wait()
    assert len(pauses) == 2  # waiting does not mend that


def test_a_disk_that_hangs_has_a_deadline(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = writer(tmp_path, timeout=0.1)
    for waits in (saving.wait, lambda: saving.save(2, {}, {}, {})):
        saving.save(1, {"counter": Counter()}, {}, {})
        with pytest.raises(TimeoutError, match="not written after 0 s"):
            waits()
    saving.save(3, {"counter": Counter()}, {}, {})
    saving.close()  # the run ends for another reason
    assert "the last checkpoint was not written" in capsys.readouterr().err
    disk.may_write.set()


def test_checkpoints_are_kept_by_recency_and_by_the_best_figure(tmp_path: Path, group: None) -> None:
    counter, saving = Counter(), writer(tmp_path, keep=1, keep_best=1, best_metric="-loss")
    for step, loss in enumerate([0.5, 0.2, 0.9, 0.4]):
        saving.save(step, {"counter": counter}, {"state": step}, {"loss": loss})
    saving.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_3"}
    assert checkpoint.read_extra(tmp_path / "step_1")["state"] == 1
    saving.save(0, {"counter": counter}, {}, {"loss": 0.3})  # the run has started over
    saving.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"step_0"}


@pytest.mark.parametrize(
    ("metric", "metrics", "refused"),
    [
        ("eval/accuracy", {"loss": 1.0}, False),  # a step without evaluation
        ("eval/accuracy", {"eval/accuracy": 1.0}, False),
        ("eval/acuracy", {"loss": 1.0, "eval/accuracy": 1.0}, True),
        ("-loss", {"loss": 1.0}, False),
        ("-los", {"loss": 1.0}, True),
        ("los", {}, False),  # nothing was done yet
    ],
)
def test_a_figure_that_no_step_has_is_refused(
    metric: str, metrics: dict[str, float], refused: bool
) -> None:
    config = CheckpointConfig(keep_best=1, best_metric=metric)
    if not refused:
        check_best_metric(config, 3, metrics)
        return
    with pytest.raises(
        UserError, match=f"checkpoint.best_metric: step 3 has no metric '{metric.lstrip('-')}'; there"
    ):
        check_best_metric(config, 3, metrics)
