"""A checkpoint of one process is complete or invisible, at whatever write the process dies."""

import builtins
import io
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support.children import in_child
from trainer.errors import UserError
from trainer.run import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VOCABULARY = 257
# Or pytest collects its thousands of lines
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)


class TinyPolicy:
    """A head over a vocabulary that divides by nothing, and its optimizer; its state is tensors."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self.model = torch.nn.Linear(4, vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.learn(torch.zeros(1, 4))

    def learn(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs).square().sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})


class WeightsOnly(TinyPolicy):
    """A policy of fewer tensors, so that there are fewer writes to be killed at."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def constant(value: float) -> WeightsOnly:
    """Return a policy whose every weight is `value`."""
    policy = WeightsOnly()
    for parameter in policy.model.parameters():
        torch.nn.init.constant_(parameter, value)
    return policy


def test_a_loaded_checkpoint_equals_the_saved_one_random_states_included(tmp_path: Path) -> None:
    policy = TinyPolicy()
    saved = {key: value.clone() for key, value in policy.model.state_dict().items()}
    path = checkpoint.save(
        tmp_path, 3, {"policy": policy}, {"fingerprint": "abc", "counters": {"skipped": 2}}
    )
    drawn = (random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1))
    inputs = torch.arange(8.0).view(2, 4)
    policy.learn(inputs)

    other = TinyPolicy()
    assert path == tmp_path / "step_3" == checkpoint.latest_complete(tmp_path)
    extra = checkpoint.load(path, {"policy": other})
    standard_fields = {"step": 3, "world_size": 1}
    assert (
        extra
        == {"fingerprint": "abc", "counters": {"skipped": 2}} | standard_fields
        == checkpoint.verify(path)
    )
    assert (random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1)) == drawn
    assert all(torch.equal(value, saved[key]) for key, value in other.model.state_dict().items())
    other.learn(inputs)  # Adam's moments and step count came along
    assert torch.equal(other.model.weight, policy.model.weight)


class DyingFiles:
    """Counts every call that changes the file system, and kills the process in the middle of number `last`."""

    def __init__(self, last: int) -> None:
        self.left = last

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.tick()
            return call(*arguments, **options)

        return counted

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Replace the calls for good, so only in a child that is about to die."""
        for name in ("rename", "replace", "mkdir", "fsync", "unlink", "rmdir"):
            setattr(os, name, self.before(getattr(os, name)))
        plain_open = io.open

        def counted_open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            stream = plain_open(file, mode, *arguments, **options)
            if "r" in mode and "+" not in mode:
                return stream
            self.tick()
            return DyingStream(stream, self)

        io.open = builtins.open = counted_open


class DyingStream:
    """A file whose every write may be cut off half way."""

    def __init__(self, stream: Any, files: DyingFiles) -> None:
        self.stream, self.files = stream, files

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __enter__(self) -> "DyingStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self.stream.write(data[:half])
        self.stream.flush()
        self.files.tick()
        self.stream.write(data[half:])
        return len(data)


def save_and_die(folder: Path, last: int) -> bool:
    """Save step 3 and prunes to two in a child, where step 1 and 2 exist; return whether the child was killed on the
    way.
    """
    policy = constant(3.0)  # beside a CUDA build autograd has threads, and refuses to work in a fork

    def save() -> None:
        DyingFiles(last).install()
        checkpoint.save(folder, 3, {"policy": policy}, {})
        checkpoint.prune(folder, keep=2)
        assert checkpoint.latest_complete(folder) == folder / "step_3"

    code = in_child(save)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_at_every_write_the_newest_complete_one_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda _: None
    )  # counted all the same; a killed process loses no page of the cache
    folder, backup = tmp_path / "checkpoints", tmp_path / "backup"
    for step in (1, 2):
        checkpoint.save(backup, step, {"policy": constant(step)}, {})
    policy, seen, killed = WeightsOnly(), [], True
    while killed:
        if not seen or seen[-1] == 3:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(backup, folder)
        killed = save_and_die(folder, last=len(seen) + 1)
        for complete in folder.glob("step_?/COMPLETE"):  # also one whose deletion was cut short
            checkpoint.verify(complete.parent)
            step = checkpoint.load(complete.parent, {"policy": policy})["step"]
            assert torch.equal(policy.model.weight, torch.full_like(policy.model.weight, step))
        newest = checkpoint.latest_complete(folder)
        assert newest is not None
        seen.append(int(newest.name[-1]))
        # The next run begins with this, and goes on from there: the child of the next round saves step 3 again.
        checkpoint.remove_unfinished(folder)
        assert all((path / "COMPLETE").exists() for path in folder.iterdir())
    assert len(seen) > 20, len(seen)
    # One moment at which it becomes visible, and never a step back
    assert seen == sorted(seen) and set(seen) == {2, 3}


def test_unfinished_checkpoints_are_invisible_refused_and_named_when_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path, 9, {"policy": constant(9.0)}, {})
    checkpoint.save(tmp_path, 10, {"policy": constant(10.0)}, {})
    (tmp_path / "step_10" / "COMPLETE").unlink()
    (tmp_path / "step_11.tmp").mkdir()
    (tmp_path / "step_11.tmp" / "COMPLETE").touch()
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest_complete(tmp_path) == tmp_path / "step_9"
    assert checkpoint.latest_complete(tmp_path / "nowhere") is None
    for name in ("step_10", "step_11.tmp", "step_12"):
        with pytest.raises(
            UserError, match=rf"{name} does not exist or was not finished; the newest .*step_9$"
        ):
            checkpoint.load(tmp_path / name, {"policy": TinyPolicy()})
    checkpoint.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_9"]
    lines = capsys.readouterr().err.splitlines()
    removed = [tmp_path / name for name in ("step_10", "step_11.tmp")]
    assert lines == [
        f"[hotbunk] removing {path}, which a killed run has left unfinished" for path in removed
    ]
    checkpoint.remove_unfinished(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("keep", "kept"), [(0, [10]), (1, [10]), (2, [9, 10]), (3, [2, 9, 10]), (9, [1, 2, 9, 10])]
)
def test_pruning_counts_complete_checkpoints_and_spares_the_newest(
    tmp_path: Path, keep: int, kept: list[int]
) -> None:
    for step in (1, 2, 9, 10, 11):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "COMPLETE").touch()
    (tmp_path / "step_11" / "COMPLETE").unlink()  # incomplete: neither counted nor taken for the newest
    checkpoint.prune(tmp_path, keep)
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{step}" for step in [*kept, 11]}


def save_scores(folder: Path, scores: dict[int, float | None]) -> None:
    """Save complete checkpoints that hold only the figure they were saved with."""
    for step, score in scores.items():
        path = folder / f"step_{step}"
        path.mkdir()
        metrics = {} if score is None else {"score": score}
        (path / "extra.json").write_text(json.dumps({"metrics": metrics, "step": step, "world_size": 1}))
        digest_again(path)


def digest_again(path: Path) -> None:
    (path / "COMPLETE").write_text(checkpoint._digest_line(path, "extra.json"))


@pytest.mark.parametrize(
    ("keep", "best", "metric", "kept"),
    [
        (1, 1, "score", [2, 9]),
        (1, 2, "score", [2, 3, 9]),  # of two equals the newer
        (1, 3, "score", [1, 2, 3, 9]),
        (2, 1, "-score", [4, 8, 9]),  # 8 and 9 are the newest
        (1, 9, "score", [1, 2, 3, 4, 9]),  # 7 has no score and 8 has NaN
        (1, 2, "absent", [9]),
        (3, 0, "score", [7, 8, 9]),
    ],
)
def test_neither_the_newest_nor_the_best_are_deleted(
    tmp_path: Path, keep: int, best: int, metric: str, kept: list[int]
) -> None:
    save_scores(
        tmp_path, {1: 0.5, 2: 0.9, 3: 0.5, 4: -1.0, 5: 2.0, 6: 2.0, 7: None, 8: math.nan, 9: 0.1}
    )
    # Of damaged ones nothing is known
    (tmp_path / "step_5" / "extra.json").write_text('{"metrics": {"score": 2.0')
    (tmp_path / "step_6" / "extra.json").write_text('{"metrics": [], "step": 6, "world_size": 1}')
    digest_again(tmp_path / "step_6")
    checkpoint.prune(tmp_path, keep, best, metric)
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{step}" for step in kept}


def test_a_run_that_starts_over_leaves_its_former_checkpoints_behind(tmp_path: Path) -> None:
    save_scores(tmp_path, {1: 0.0, 2: 0.0, 10: 0.0})
    (tmp_path / "step_11.tmp").mkdir()
    checkpoint.drop_later(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2", "step_11.tmp"}


def linked(folder: Path) -> Path:
    """Make four checkpoints, of which the first has been moved away with a link in its place; return where it is."""
    for step in (2, 4, 6, 8):
        checkpoint.save(folder / "run", step, {"policy": constant(1.0)}, {})
    (folder / "run" / "step_2").rename(folder / "archived")
    (folder / "run" / "step_2").symlink_to(folder / "archived")
    return folder / "archived"


@pytest.mark.parametrize(
    "delete", [partial(checkpoint.prune, keep=2), partial(checkpoint.drop_later, step=0)]
)
def test_deleting_a_linked_checkpoint_deletes_only_the_link(
    delete: Callable[[Path], None], tmp_path: Path
) -> None:
    archived = linked(tmp_path)
    before = {file.name: file.read_bytes() for file in archived.iterdir()}
    delete(tmp_path / "run")
    assert (
        not os.path.lexists(tmp_path / "run" / "step_2") and not (tmp_path / "run" / "step_4").exists()
    )
    assert {file.name: file.read_bytes() for file in archived.iterdir()} == before
    checkpoint.remove_unfinished(tmp_path / "run")  # the next start


def test_links_that_lead_nowhere_or_to_what_is_unfinished_do_no_harm(tmp_path: Path) -> None:
    run, archived = tmp_path / "run", linked(tmp_path)
    (archived / "COMPLETE").unlink()
    checkpoint.remove_unfinished(run)
    assert (archived / "extra.json").is_file() and (run / "step_2").is_symlink()
    archived.rename(tmp_path / "away")  # an archive that is not mounted
    (run / "step_9.tmp").symlink_to(tmp_path / "nowhere")
    (run / "step_2.old.tmp").symlink_to(tmp_path / "away")
    checkpoint.remove_unfinished(run)
    checkpoint.prune(run, keep=9)
    assert checkpoint.latest_complete(run) == run / "step_8"
    for step in (2, 9):  # a run that comes to such a step writes its own
        assert checkpoint.load(
            checkpoint.save(run, step, {"policy": constant(1.0)}, {}), {"policy": WeightsOnly()}
        )
    assert (
        not any(path.is_symlink() for path in run.iterdir())
        and (tmp_path / "away" / "extra.json").is_file()
    )


def test_training_does_not_change_a_snapshot_on_the_host(tmp_path: Path) -> None:
    policy = TinyPolicy()
    wanted = {key: value.clone() for key, value in policy.model.state_dict().items()}
    snapshot = checkpoint.Snapshot.take(1, {"policy": policy}, {}).on_host()
    drawn = torch.rand(1)
    for _ in range(3):
        policy.learn(torch.ones(1, 4))
    path = checkpoint.write(tmp_path, snapshot)
    other = TinyPolicy()
    checkpoint.load(path, {"policy": other})
    assert torch.equal(torch.rand(1), drawn)  # random states, too, are those of the moment
    assert all(torch.equal(value, wanted[key]) for key, value in other.model.state_dict().items())
    assert int(other.optimizer.state_dict()["state"][0]["step"]) == 1


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"policy": constant(1.0)}, {"attempt": 1})
    path = checkpoint.save(tmp_path, 1, {"policy": constant(5.0)}, {"attempt": 2})
    policy = WeightsOnly()
    assert checkpoint.load(path, {"policy": policy})["attempt"] == 2
    assert policy.model.weight[0, 0] == 5.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]


def test_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"policy": TinyPolicy()}, {})
    with pytest.raises(
        UserError, match="does not fit this model: policy.model.weight is .*size"
    ) as caught:
        checkpoint.load(path, {"policy": TinyPolicy(vocabulary=256)})
    assert len(str(caught.value).splitlines()) == 1


def test_a_full_disk_is_an_ordinary_error_and_spares_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, {"policy": TinyPolicy()}, {})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match="checkpoint.*No space left on device"):
        checkpoint.save(tmp_path, 2, {"policy": TinyPolicy()}, {})
    assert checkpoint.latest_complete(tmp_path) == tmp_path / "step_1"


def test_the_small_files_are_plain_json(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"policy": TinyPolicy()}, {"a": 0.1})
    assert json.loads((path / "extra.json").read_text())["a"] == 0.1
    assert set(json.loads((path / "rank_0.json").read_text())) == {"python", "numpy", "torch"}


def test_only_tensors_are_kept(tmp_path: Path) -> None:
    policy = TinyPolicy()
    policy.state_dict = lambda: {"model": {"rate": 0.1}}  # type: ignore[method-assign]
    with pytest.raises(
        TypeError, match="policy.model.rate is a float, but a checkpoint can only contain tensors"
    ):
        checkpoint.save(tmp_path, 1, {"policy": policy}, {})


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_the_marker_is_a_list_that_sha256sum_checks(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"policy": TinyPolicy()}, {})
    done = subprocess.run(["sha256sum", "-c", "COMPLETE"], cwd=path, capture_output=True, text=True)
    expected = [f"{name}: OK" for name in (".metadata", "__0_0.distcp", "extra.json", "rank_0.json")]
    assert sorted(done.stdout.splitlines()) == expected and done.returncode == 0
