"""The record of a run on disk, and its copy in Weights & Biases."""

import json
import math
import shutil
import struct
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from generation.images import thumbnail
from tests.support.pictures import images
from tests.support.wandb_files import wandb_records
from trainer.config.schema import TrackingConfig
from trainer.run import tracking
from trainer.run.other_trackers import TrackedRun
from trainer.run.tracking import NullTracker, make_tracker


class FakeRun:
    """Records every call, in order."""

    def __init__(self, calls: list[tuple[Any, ...]], last: int | None = None) -> None:
        """`last`: the last step that the server has of this run, if it knows it."""
        self.calls, self.resumed = calls, last is not None
        last_logged = {"train/step": last} if self.resumed else {}
        self.summary = types.SimpleNamespace(
            update=lambda values: calls.append(("summary", values)), get=last_logged.get
        )

    def define_metric(self, *arguments: Any, **options: Any) -> None:
        self.calls.append(("define", *arguments, options))

    def log(self, *arguments: Any, **options: Any) -> None:
        self.calls.append(("log", *arguments, options))

    def alert(self, title: str, text: str, level: str) -> None:
        self.calls.append(("alert", title, text, level))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the calls of a stand-in for the `wandb` module."""
    recorded: list[tuple[Any, ...]] = []

    def init(**options: Any) -> FakeRun:
        recorded.append(("init", options))
        return FakeRun(recorded)

    errors = types.SimpleNamespace(CommError=ConnectionError, UsageError=PermissionError)
    parts: dict[str, Any] = {
        "Table": lambda columns, data: [columns, *data],
        "Image": Path,
        "teardown": lambda: None,
    }
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=dict, errors=errors, **parts)
    )
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return recorded


def metrics(step: int) -> dict[str, float]:
    return {"reward/mean": step / 3, "lr": 1e-300 * step, "time/rollout": 0.1}


def run(folder: Path, steps: range, resumed_from: int | None = None, evaluate_every: int = 2) -> None:
    """Train and evaluates; an evaluation is part of its step's single call."""
    tracker = make_tracker(
        folder, {"run": {"seed": 1}}, "demo", TrackingConfig(wandb="offline"), resumed_from
    )
    for step in steps:
        tracker.completions(step, [{"prompt": "1+1", "text": f"{step}\u2028"}])
        tracker.tokens(step, [{"tokens": ["\u2028", "é"], "gap": [0.5, None]}])
        tracker.log(step, metrics(step) | ({"eval/accuracy": 0.5} if step % evaluate_every == 0 else {}))
    tracker.summary({"steps": steps.stop - 1})
    tracker.close()


def read(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().split("\n")[:-1]]


def test_one_call_a_step_and_the_step_is_a_metric(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    run(tmp_path, range(5))
    run(tmp_path, range(3, 7), resumed_from=2)
    assert [call[0] for call in calls] == [
        *("init", "define", "define", *["log"] * 5, "summary", "finish"),
        *("init", "define", "define", *["log"] * 7, "summary", "finish"),
    ]
    assert [call[1:] for call in calls if call[0] == "define"][:2] == [
        ("train/step", {}),
        ("*", {"step_metric": "train/step"}),
    ]
    logs = [call for call in calls if call[0] == "log"]
    assert all(options == {} for _, _, options in logs)  # never step=
    # The server lacks all steps
    assert [row["train/step"] for _, row, _ in logs] == [*range(5), *range(7)]
    first, second = (call[1] for call in calls if call[0] == "init")
    assert first["config"] == {"run": {"seed": 1}} and second["config"] == {
        "run": {"seed": 1},
        "resumed_from": 2,
    }
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    run(tmp_path, range(2))  # starts over
    assert calls[-7][1]["id"] != first["id"]


def test_each_step_has_its_answers_as_a_table(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    run(tmp_path, range(3))
    calls.clear()
    run(tmp_path, range(2, 4), resumed_from=1)
    logs = [call[1] for call in calls if call[0] == "log"]
    columns = ["step", "prompt", "text", "answer", "finish_reason", "reward"]
    for step, row in enumerate(logs):  # those from before the checkpoint, too
        assert row["completions"] == [columns, [step, "1+1", f"{step}\u2028", "", "", None]]
    assert len(logs) == 4 and calls[-1] == ("finish",)


def test_the_table_has_a_column_for_each_image_of_an_answer(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["wandb"], "Image", lambda image: image.size)
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="offline"))
    thumbnails = [thumbnail(image) for image in images((30, 20), (40, 10))]
    tracker.completions(
        1, [{"text": "a", "images": thumbnails}, {"text": "b"}, {"text": "c", "images": thumbnails[1:]}]
    )
    tracker.log(1, metrics(1))
    tracker.close()
    [table] = [call[1]["completions"] for call in calls if call[0] == "log"]
    assert table[0][-2:] == ["image 1", "image 2"]
    assert [row[-2:] for row in table[1:]] == [[(30, 20), (40, 10)], [None, None], [(40, 10), None]]


def test_a_divergence_and_a_gap_that_grows_raise_one_alert_each(
    tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    # Four times as large, but still only rounding
    gaps = [2e-5] * 6 + [9e-5] * 6 + [5e-4] * 6 + [math.nan, 1.0]
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="offline"))
    for step, gap in enumerate(gaps, start=1):
        tracker.log(step, {"gap/mean": gap, "loss": 0.1, "skipped_steps": float(step == 20)})
    tracker.close()
    distance = "1.7e-04 nats apart on average, 2.0e-05 at first"
    assert [call for call in calls if call[0] == "alert"] == [
        ("alert", "The gap grows", f"demo, step 13: trainer and engine are {distance}", "ERROR"),
        ("alert", "Divergence", "demo, step 19: gap/mean not finite", "ERROR"),
    ]
    for resumed_from, titles in ((18, ["Divergence"]), (12, ["Divergence", "The gap grows"])):
        # told before, and not
        calls.clear()
        tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="offline"), resumed_from)
        tracker.log(resumed_from + 1, {"gap/mean": 5e-4, "loss": 0.1, "skipped_steps": 1.0})
        tracker.close()
        assert [call[1] for call in calls if call[0] == "alert"] == titles


@pytest.mark.parametrize(
    "error", [ConnectionError("run initialization has timed out"), PermissionError("no login")]
)
def test_wandb_online_without_a_network_or_a_login_goes_on_offline(
    tmp_path: Path,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    begin = sys.modules["wandb"].init

    def init(**options: Any) -> FakeRun:
        if options["mode"] == "online":
            raise error
        return begin(**options)

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="online"))
    tracker.log(1, metrics(1))
    tracker.close()
    message = capsys.readouterr().err
    assert (
        f"cannot be used online ({error}): the copy goes to {tmp_path}/wandb" in message
        and message.count("\n") == 1
    )
    assert [call[1]["mode"] for call in calls if call[0] == "init"] == ["offline"]
    assert [call[1]["train/step"] for call in calls if call[0] == "log"] == [1]


def test_real_wandb_without_a_network_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="online"))
    tracker.completions(1, [{"prompt": "1+1", "text": "2"}])
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    message = capsys.readouterr().err
    assert "Weights & Biases cannot be used online" in message and "no further copy" not in message
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert [row["reward/mean"] for row in read_wandb(record)] == [0.5]
    assert list(record.parent.glob("files/media/table/*.table.json"))


@pytest.mark.parametrize(
    ("last", "sent"), [(0, [1, 2, 3, 4, 5, 6]), (2, [3, 4, 5, 6]), (4, [5, 6]), (9, [])]
)
def test_a_resumed_run_sends_each_step_that_the_server_lacks_once(
    tmp_path: Path,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    last: int,
    sent: list[int],
) -> None:
    """A resumed run sends the missing steps, and only those, after a kill before W&B had the last steps as well as
    after one long after the last checkpoint.
    """
    run(tmp_path, range(5))
    calls.clear()
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: FakeRun(calls, last))
    run(tmp_path, range(3, 7), resumed_from=2)
    assert [call[1]["train/step"] for call in calls if call[0] == "log"] == sent


def test_a_step_is_logged_once_and_in_order(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="disabled"), resumed_from=4)
    for step in (4, 3):
        with pytest.raises(ValueError, match=f"step {step} is logged after step 4"):
            tracker.log(step, {})
    tracker.log(5, {})
    with pytest.raises(ValueError, match="step 5 is logged after step 5"):
        tracker.log(5, {})
    tracker.close()
    tracker.close()
    assert calls == []


@pytest.mark.parametrize("stopped_after", [3, 4, 5])
def test_a_resumed_file_equals_an_uninterrupted_one(
    tmp_path: Path, calls: list[tuple[Any, ...]], stopped_after: int
) -> None:
    run(tmp_path / "straight", range(8))
    run(tmp_path / "resumed", range(stopped_after + 1))
    for name in ("metrics.jsonl", "completions.jsonl", "tokens.jsonl"):
        with (tmp_path / "resumed" / name).open("a") as file:
            file.write('{"train/step": 6, "reward/me')  # killed in the middle of a line
    run(tmp_path / "resumed", range(4, 8), resumed_from=3)
    for name in ("metrics.jsonl", "completions.jsonl", "tokens.jsonl"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_floats_read_back_bit_equal_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    values = {
        "a": 0.1 + 0.2,
        "b": struct.unpack("f", struct.pack("f", 0.1))[0],
        "c": 5e-324,
        "d": 1e17 + 2,
        "e": -0.0,
    }
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="disabled"))
    tracker.log(1, values)
    tracker.log(2, {"loss": math.nan, "grad_norm": math.inf})
    tracker.close()
    first, second = read(tmp_path)
    assert {key: struct.pack("d", first[key]) for key in values} == {
        k: struct.pack("d", v) for k, v in values.items()
    }
    assert second == {"train/step": 2, "loss": None, "grad_norm": None}


def test_completions_are_bounded_in_number_and_length(tmp_path: Path) -> None:
    tracker = make_tracker(
        tmp_path, {}, "demo", TrackingConfig(wandb="disabled", completions_per_step=2)
    )
    tracker.completions(1, [{"text": "é" * 10_000, "reward": 1.0}] * 5)
    tracker.close()
    rows = read(tmp_path, "completions.jsonl")
    assert len(rows) == 2 and rows[0]["reward"] == 1.0 and rows[0]["train/step"] == 1
    assert rows[0]["text"].startswith("é" * 4000 + " …") and len(rows[0]["text"]) < 4100


def test_summary_grows_and_is_always_whole(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path, {}, "demo", TrackingConfig(wandb="disabled"))
    tracker.summary({"eval_reward_before": 0.25})
    tracker.summary({"eval_reward_after": 0.75, "max_logprob_gap": math.nan})
    tracker.close()
    expected = {"eval_reward_before": 0.25, "eval_reward_after": 0.75, "max_logprob_gap": None}
    assert json.loads((tmp_path / "summary.json").read_text()) == expected
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("where", ["import", "init", "log", "summary", "finish"])
def test_a_wandb_that_is_missing_or_raises_does_not_stop_training(
    tmp_path: Path,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise SystemExit("no network") if where == "init" else RuntimeError(f"{where} is broken")

    if where == "import":
        # What Python does for a module that cannot be imported
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif where == "init":
        monkeypatch.setattr(sys.modules["wandb"], "init", broken)
    elif where == "summary":
        monkeypatch.setattr(FakeRun, "log", lambda self, row: setattr(self.summary, "update", broken))
    else:
        monkeypatch.setattr(FakeRun, where, broken)
    run(tmp_path, range(4))
    assert [row["train/step"] for row in read(tmp_path)] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    assert capsys.readouterr().err.count("no further copy in Weights & Biases") == 1


def test_a_wandb_that_hangs_does_not_stop_training(
    tmp_path: Path,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: hang.wait() and FakeRun(calls))
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "_QUEUE_LIMIT", 3)
    run(tmp_path, range(10))
    assert len(read(tmp_path)) == 10
    assert "not finished after" in capsys.readouterr().err
    hang.set()


def test_ranks_other_than_0_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "is_main", lambda: False)
    tracker = make_tracker(tmp_path / "run", {}, "demo", TrackingConfig())
    assert type(tracker) is NullTracker
    tracker.completions(1, [{"text": "x"}])
    tracker.log(1, {"a": 1.0})
    tracker.summary({"a": 1.0})
    tracker.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wanted", "environment", "login", "mode"),
    [
        ("auto", {}, False, "offline"),
        ("auto", {}, True, "online"),
        ("auto", {"WANDB_API_KEY": "x"}, False, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, True, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, True, "disabled"),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example.org"}, True, "offline"),
        ("offline", {"WANDB_API_KEY": "x"}, True, "offline"),
        ("online", {}, False, "online"),
    ],
)
def test_automatic_wandb_is_online_only_with_a_login(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[tuple[Any, ...]],
    wanted: str,
    environment: dict[str, str],
    login: bool,
    mode: str,
) -> None:
    logins = tmp_path / "netrc"
    logins.write_text("machine api.wandb.ai login user password 0123\n" if login else "")
    monkeypatch.setenv("NETRC", str(logins))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    make_tracker(tmp_path / "run", {}, "demo", TrackingConfig(wandb=wanted)).close()
    assert [call[1]["mode"] for call in calls if call[0] == "init"] == (
        [] if mode == "disabled" else [mode]
    )


def test_real_wandb_writes_an_offline_run_that_holds_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    tracker = make_tracker(tmp_path, {"run": {"seed": 3}}, "demo", TrackingConfig(wandb="auto"))
    for step in range(5):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.summary({"steps": 4})
    tracker.close()
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows = read_wandb(record)
    assert [row["train/step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["reward/mean"] for row in rows] == [0, 0.25, 0.5, 0.75, 1]
    assert not list((tmp_path / "wandb").glob("*/files/output.log"))  # the console is not captured


def test_real_wandb_continues_an_offline_run_in_a_folder_that_holds_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wandb sync` uploads that folder alone; uploads of several would replace each other."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    for steps, resumed_from in ((range(5), None), (range(3, 8), 2)):
        tracker = make_tracker(
            tmp_path, {"run": {"seed": 3}}, "demo", TrackingConfig(wandb="auto"), resumed_from
        )
        for step in steps:
            tracker.log(step, {"reward/mean": step / 4, "loss": math.nan})
        tracker.close()
        time.sleep(1.1)  # W&B's folders are named by the second
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name == f"run-{(tmp_path / 'wandb_id').read_text()}.wandb"
    assert (
        first.with_suffix(".wandb.synced").exists() and not second.with_suffix(".wandb.synced").exists()
    )
    rows = read_wandb(second)
    assert [row["train/step"] for row in rows] == list(range(8))
    assert [row["reward/mean"] for row in rows] == [step / 4 for step in range(8)]


def read_wandb(file: Path) -> list[dict[str, Any]]:
    """Return the history in W&B's own file."""
    histories = [record.history.item for record in wandb_records(file) if record.HasField("history")]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in h}
        for h in histories
    ]


def interrupted(folder: Path, other: str) -> None:
    """Tracks six steps in two sessions: the first is killed after its fourth, and the second resumes from its
    second.
    """
    for steps, resumed_from in ((range(1, 5), None), (range(3, 7), 2)):
        tracker = make_tracker(
            folder,
            {"run": {"seed": 1}},
            "demo",
            TrackingConfig(wandb="disabled", also=[other]),
            resumed_from=resumed_from,
        )
        for step in steps:
            tracker.log(step, metrics(step) | {"gap/max": float("nan")})
        tracker.close()


def test_tensorboard_has_each_step_of_a_resumed_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(tmp_path, "tensorboard")
    assert capsys.readouterr().err == ""
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(step, pytest.approx(step / 3)) for step in range(1, 7)]
    assert "gap/max" not in events.Tags()["scalars"]


def test_mlflow_has_each_step_of_a_resumed_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    interrupted(tmp_path, "mlflow")
    assert "no further copy" not in capsys.readouterr().err
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tracked_run,) = client.search_runs([client.get_experiment_by_name("hotbunk").experiment_id])
    history = client.get_metric_history(tracked_run.info.run_id, "reward/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (step, step / 3) for step in range(1, 7)
    ]
    assert tracked_run.data.params == {"run.seed": "1"} and not (tmp_path / "mlruns").exists()
    assert tracked_run.info.status == "FINISHED" and tracked_run.info.run_name == "demo"


def test_trackio_has_each_step_of_a_resumed_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "store")
    interrupted(tmp_path / "run", "trackio")
    rows = sqlite_storage.SQLiteStorage.get_logs("hotbunk", "demo")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [
        (step, step / 3) for step in range(1, 7)
    ]
    assert all("gap/max" not in row for row in rows)


def test_a_further_tracker_that_fails_costs_its_copy_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = []

    class Failing:
        def __init__(self, run: TrackedRun) -> None:
            assert run == TrackedRun(
                tmp_path, {"run": {"seed": 1}}, [], "demo", "hotbunk", continues=False
            )

        def log(self, row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) == 2:
                raise ConnectionError("gone")

    monkeypatch.setitem(tracking.OTHER_TRACKERS, "failing", Failing)
    tracker = make_tracker(
        tmp_path,
        {"run": {"seed": 1}},
        "demo",
        TrackingConfig(wandb="disabled").model_copy(update={"also": ["failing"]}),
    )
    for step in range(1, 5):
        tracker.log(step, metrics(step) | {"gap/max": float("inf")})
    tracker.summary({"steps": 4})
    tracker.close()
    message = capsys.readouterr().err
    assert (
        message
        == "[hotbunk] no further copy in failing (ConnectionError: gone); metrics.jsonl has everything\n"
    )
    assert rows[0] == {"train/step": 1} | metrics(1) | {"gap/max": None}
    assert len(read(tmp_path)) == 4


def test_a_copied_folder_is_another_run_to_its_trackers_and_a_moved_one_is_the_same(
    tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    def start(folder: Path, resumed_from: int | None = 1) -> str:
        run(folder, range(2, 3), resumed_from)
        return str(next(call for call in reversed(calls) if call[0] == "init")[1]["id"])

    first = start(tmp_path / "a", None)
    assert start(tmp_path / "a") == first
    (tmp_path / "a").rename(tmp_path / "moved")
    assert start(tmp_path / "moved") == first
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copied = start(tmp_path / "copy")
    assert copied != first and start(tmp_path / "copy") == copied and start(tmp_path / "moved") == first
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert start(tmp_path / "link") == first
    shutil.copytree(tmp_path / "copy", tmp_path / "second")
    shutil.rmtree(tmp_path / "copy")  # a move to another file system
    assert start(tmp_path / "second") == copied
