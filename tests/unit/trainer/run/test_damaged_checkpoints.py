"""Damaged checkpoints are named with the damage and passed over; nothing in them is run."""

import io
import json
import logging
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.support.recipes import make_config
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.run import checkpoint, checkpoint_reading
from trainer.run.keeper import RunState, find_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Or pytest collects its thousands of lines
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)
IDENTITY = {"data": "rows"}
FILES = (".metadata", "COMPLETE", "__0_0.distcp", "extra.json", "rank_0.json")


class Numbers:
    """A part that learns: two tensors and a counter."""

    def __init__(self, value: float) -> None:
        self.tensors = {
            "weight": torch.full((7, 3), float(value)),
            "bias": torch.arange(5.0) + value,
            "count": torch.tensor(3),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state

    def values(self) -> list[Any]:
        return [value.tolist() for value in self.tensors.values()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sound checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        extra = {"state": vars(RunState(step=step)), "identity": IDENTITY, "metrics": {}}
        checkpoint.save(folder, step, {"part": Numbers(step)}, extra)
    return folder


@pytest.fixture
def run(tmp_path: Path, saved: Path) -> TrainConfig:
    """Return a run with copies of them."""
    shutil.copytree(saved, tmp_path / "run" / "checkpoints")
    return make_config(run={"output_dir": str(tmp_path), "name": "run"})


def digest_again(path: Path) -> None:
    """Give the files of a checkpoint matching digests, as somebody who tampers with it would."""
    names = [name for name in FILES if name != "COMPLETE"]
    (path / "COMPLETE").write_text("".join(checkpoint._digest_line(path, name) for name in names))


def rewrite(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def change(edit: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        content = bytearray(file.read_bytes())
        edit(content)
        file.write_bytes(content)

    return apply


def flip(share: float) -> Callable[[Path], None]:
    """Flips one bit of the byte at this share of the file."""

    def edit(content: bytearray) -> None:
        content[int(share * (len(content) - 1))] ^= 4

    return change(edit)


WAYS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": rewrite(b""),
    "cut in half": change(lambda content: content.__delitem__(slice(len(content) // 2, None))),
    "last byte gone": change(lambda content: content.pop()),
    "one byte more": change(lambda content: content.append(0)),
    "zeros at its end": change(lambda content: content.__setitem__(slice(-20, None), bytes(20))),
    "null": rewrite(b"null"),
    "other keys": rewrite(b'{"a": 1}'),
    "a list": rewrite(b"[]"),
    **{f"bit flipped at {share:.0%}": flip(share) for share in (0, 0.1, 0.35, 0.5, 0.8, 1)},
}
# Without its marker a checkpoint is not complete, which is another matter; an empty list of digests is tried.
CASES = [(file, way) for file in FILES for way in WAYS if (file, way) != ("COMPLETE", "gone")]


def one_sentence(error: UserError) -> str:
    text = str(error)
    assert "\n" not in text and len(text.replace(os.environ.get("TMPDIR", "/tmp"), "")) < 300, text
    return text


def named(run: TrainConfig, path: Path) -> TrainConfig:
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"resume": str(path)})})


@pytest.mark.parametrize(("file", "way"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    run: TrainConfig, capsys: pytest.CaptureFixture[str], file: str, way: str
) -> None:
    folder = run.run.folder / "checkpoints"
    WAYS[way](folder / "step_2" / file)
    path, state = find_checkpoint(run, IDENTITY)
    assert path == folder / "step_1" and state == RunState(step=1)
    first, second = capsys.readouterr().err.splitlines()
    assert "step_2 is damaged: " in first and first.endswith("; skipped")
    # A wrong digest is told as that of the file it is of
    assert file in first or file == "COMPLETE", first
    assert second == f"[hotbunk] resuming from {path}, the newest sound checkpoint, after step 1"
    part = Numbers(0)
    checkpoint.load(path, {"part": part})
    assert part.values() == Numbers(1).values()

    with pytest.raises(checkpoint.Damaged, match="step_2 is damaged: ") as refused:
        find_checkpoint(named(run, folder / "step_2"), IDENTITY)
    assert one_sentence(refused.value) in first
    shutil.rmtree(folder / "step_1")
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is sound .*: restore one.*checkpoint.resume=none"
    ) as none:
        find_checkpoint(run, IDENTITY)
    one_sentence(none.value)
    # Nothing is deleted of what may be all that there is
    assert (folder / "step_2" / "COMPLETE").exists()


@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_bit_of_a_file_of_tensors_is_overlooked(run: TrainConfig, seed: int) -> None:
    path, draw = run.run.folder / "checkpoints" / "step_2", random.Random(seed)
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    for _ in range(100):
        file.write_bytes(content)
        flip(draw.random())(file)
        with pytest.raises(
            checkpoint.Damaged, match=r"step_2 is damaged: __0_0.distcp is not what was written \(SHA-"
        ):
            checkpoint.verify(path)


class Hostile:
    """An object that creates a file when it is unpickled without restrictions."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def table(path: Path) -> Metadata:
    metadata: Metadata = FileSystemReader(path).read_metadata()
    return metadata


def hostile_tables(path: Path, mark: Path) -> Iterator[tuple[bytes, str]]:
    """Return `.metadata` files that an attacker may have made, each with its error message."""

    def changed(edit: Callable[[Metadata, TensorStorageMetadata], object]) -> bytes:
        metadata = table(path)
        weight = metadata.state_dict_metadata["part.weight"]
        assert isinstance(weight, TensorStorageMetadata)
        edit(metadata, weight)
        return pickle.dumps(metadata)

    def place(metadata: Metadata) -> Any:
        return metadata.storage_data[MetadataIndex("part.weight", [0, 0])]

    unknown = "names .*, which is not part of a table of tensors"
    yield pickle.dumps(Hostile(mark)), r"names posix.mkdir, which is"
    yield changed(lambda metadata, _: setattr(metadata, "planner_data", Hostile(mark))), unknown
    yield (
        b'cbuiltins\neval\n(S\'__import__("os").mkdir("' + str(mark).encode() + b"\")'\ntR.",
        "names builtins.eval",
    )
    yield b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.mkdir\x93.", unknown
    yield b"ctorch\nload\n.", "names torch.load"
    yield b"ctorch.distributed.checkpoint.filesystem\nFileSystem\n.", unknown
    as_bytes = changed(
        lambda m, _: m.state_dict_metadata.update({"part.weight": BytesStorageMetadata()})
    )
    yield as_bytes, "declares part.weight as something other than a tensor"
    yield (
        changed(lambda m, _: m.state_dict_metadata.update({"other": BytesStorageMetadata()})),
        "declares other as",
    )
    yield (
        changed(lambda m, _: setattr(place(m), "relative_path", "../step_1/__0_0.distcp")),
        "in another file",
    )
    yield changed(lambda m, _: setattr(place(m), "relative_path", mark)), "in another file"
    yield changed(lambda m, _: setattr(place(m), "offset", -5)), "does not say where part.weight lies"
    yield changed(lambda m, _: setattr(place(m), "transform_descriptors", ["zstd"])), "transformed"
    yield changed(lambda m, _: m.storage_data.clear()), "does not say where .* lies"
    yield changed(lambda _, w: w.chunks.clear()), "not all rows of part.weight once"
    yield changed(lambda _, w: w.chunks.append(w.chunks[0])), "not all rows of part.weight once"
    yield (
        changed(lambda _, w: setattr(w.chunks[0], "sizes", torch.Size([6, 3]))),
        "not all rows of part.weight once",
    )
    yield changed(lambda _, w: setattr(w, "size", (7, 3))), "no dtype and shapes for part.weight"
    yield (
        changed(lambda _, w: setattr(w.properties, "dtype", "float32")),
        "no dtype and shapes for part.weight",
    )


@pytest.mark.parametrize("number", range(18))
def test_a_hostile_table_is_refused_and_nothing_in_it_is_run(
    run: TrainConfig, tmp_path: Path, number: int
) -> None:
    path, mark = run.run.folder / "checkpoints" / "step_2", tmp_path / "mark"
    tables = list(hostile_tables(path, mark))
    assert len(tables) == 18
    content, message = tables[number]
    (path / ".metadata").write_bytes(content)
    # Where torch's own reader looks next
    (path / "__0.metadata").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(UserError, match=message) as refused:
        checkpoint.load(path, {"part": Numbers(0)})
    one_sentence(refused.value)
    digest_again(path)
    with pytest.raises(checkpoint.Damaged, match=f"step_2 is damaged: .metadata .*{message}"):
        checkpoint.verify(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(7, 3, dtype=torch.float64),
            "weight is torch.float32 .* there and torch.float64 of size",
        ),
        (torch.zeros(7, 4), r"weight is .*size \[7, 3\] there and .*size \[7, 4\] here"),
    ],
)
def test_other_shapes_and_dtypes_do_not_fit(run: TrainConfig, value: torch.Tensor, message: str) -> None:
    part = Numbers(0)
    part.tensors["weight"] = value
    with pytest.raises(UserError, match=f"step_2 does not fit this model: part.{message}") as refused:
        checkpoint.load(run.run.folder / "checkpoints" / "step_2", {"part": part})
    one_sentence(refused.value)
    part = Numbers(0)
    part.tensors["more"] = torch.zeros(2)
    with pytest.raises(UserError, match="does not fit this model: it lacks part.more"):
        checkpoint.load(run.run.folder / "checkpoints" / "step_2", {"part": part})
    part = Numbers(0)
    del part.tensors["bias"]
    with pytest.raises(
        UserError, match="does not fit this model: it has part.bias, which nothing would read here"
    ):
        checkpoint.load(run.run.folder / "checkpoints" / "step_2", {"part": part})


def test_a_part_that_is_not_asked_for_stays_in_its_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"policy": Numbers(1), "critic": Numbers(2)}, {})
    policy = Numbers(0)
    checkpoint.load(path, {"policy": policy})
    assert policy.values() == Numbers(1).values()


@pytest.mark.parametrize("declared", ["a tensor", "bytes"])
def test_a_hostile_file_of_tensors_is_refused_and_nothing_in_it_is_run(
    run: TrainConfig, tmp_path: Path, declared: str
) -> None:
    path, mark = run.run.folder / "checkpoints" / "step_2", tmp_path / "mark"
    metadata, stored = table(path), io.BytesIO()
    torch.save(Hostile(mark), stored)
    shards = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(shards + stored.getvalue())
    place = metadata.storage_data[MetadataIndex("part.weight", [0, 0])]
    place.offset, place.length = len(shards), len(stored.getvalue())
    message = "cannot be loaded: .*Weights only load failed"
    if declared == "bytes":  # which torch's own planner unpickles freely
        metadata.state_dict_metadata["part.weight"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("part.weight")] = place
        message = "cannot be loaded: .metadata declares part.weight as something other than a tensor"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    digest_again(path)  # whoever writes files writes digests, too
    with pytest.raises(UserError, match=f"step_2 {message}") as refused:
        checkpoint.load(path, {"part": Numbers(0)})
    one_sentence(refused.value)
    assert not mark.exists()


def test_the_planner_loads_no_bytes(tmp_path: Path) -> None:
    planner = checkpoint_reading._TensorPlanner(False, False)
    planner.set_up_planner(
        {"part.weight": torch.zeros(2)}, Metadata({"part.weight": BytesStorageMetadata()})
    )
    (item,) = planner.create_local_plan().items
    stored = io.BytesIO()
    torch.save(Hostile(tmp_path / "mark"), stored)
    with pytest.raises(ValueError, match="part.weight is not a tensor"):
        planner.load_bytes(item, stored)
    assert not (tmp_path / "mark").exists()


def test_the_state_of_another_version_is_refused_in_a_sentence(run: TrainConfig) -> None:
    path = run.run.folder / "checkpoints" / "step_2"
    for state, message in (
        ({"step": "2"}, "Expected `int`, got `str`"),
        (None, "Expected `object`, got `null`"),
    ):
        extra = json.loads((path / "extra.json").read_text()) | {"state": state}
        (path / "extra.json").write_text(json.dumps(extra))
        digest_again(path)
        with pytest.raises(UserError, match=re.escape(message)) as refused:
            find_checkpoint(run, IDENTITY)
        assert "step_2 was saved by another version of Hotbunk" in one_sentence(refused.value)
