"""Files, folders and datasets of rows, and the sources that make rows as they are asked for."""

import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharding.ranks import exchange, is_main
from trainer.config.machine import unwritable
from trainer.config.model_file import out_of_reach
from trainer.config.schema import VerifiersConfig
from trainer.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import Dataset

_FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_rows(
    path: str, subset: str | None, split: str, size: int | None = None, *, exact: Collection[str] = ()
) -> "Dataset":
    """Load the first `size` rows (None: all) of a dataset. Raises UserError. Collective.

    `path` names a jsonl or parquet file, a folder of such files or of `save_to_disk`, a dataset on
    the hub, `reasoning_gym:…` or `verifiers:…`. For verifiers, `subset` holds the settings in JSON.
    In columns named by `exact`, rows of JSON files keep their own nulls apart from those that Arrow
    puts in.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    source = Path(path)
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        if path.startswith("reasoning_gym:"):
            from generation.rollouts.environments import reasoning_gym

            rows = datasets.Dataset.from_list(reasoning_gym.rows(path))
        elif path.startswith("verifiers:"):
            rows = datasets.Dataset.from_list(_tasks(json.loads(subset or "{}")))
        elif (source / "state.json").is_file() or (source / "dataset_dict.json").is_file():
            rows = _saved(source, split)
        else:
            load = _loader(path, subset, split, cache)
            rows = load(features=None)
            if rows.info.builder_name == "json" and (changed := _changed_by_arrow(rows, exact)):
                rows = load(
                    features=datasets.Features(
                        dict(rows.features) | dict.fromkeys(changed, datasets.Json())
                    )
                )
    except StopIteration as error:  # raised for an empty file
        raise UserError(f"{path} holds no rows") from error
    except (
        datasets.exceptions.DatasetsError,
        ImportError,
        OSError,
        ValueError,
        RecursionError,
    ) as error:
        if isinstance(error.__cause__ or error, OSError) and (obstacle := unwritable(cache)):
            remedy = "set HF_DATASETS_CACHE, or HF_HOME, to a folder that can be written to"
            raise UserError(
                f"{path}: its rows are prepared in {cache}, but {obstacle}: {remedy}"
            ) from error
        raise UserError(
            f"{path} (split {split}) cannot be read: {one_line(error.__cause__ or error)}"
        ) from error
    if len(rows) == 0:
        raise UserError(f"{path} (split {split}) holds no rows")
    return rows if size is None else rows.select(range(min(size, len(rows))))


def _loader(path: str, subset: str | None, split: str, cache: Path) -> Callable[..., "Dataset"]:
    """Return the function that loads a file, a folder of files, or a dataset on the hub. Raises
    UserError.
    """
    import datasets

    source = Path(path)
    if source.is_file():
        kind = _FILE_KINDS.get(source.suffix)
        if kind is None:
            raise UserError(f"{path} is neither jsonl nor parquet, judging by its name")
        if kind == "json":
            _check_lines(source)
        return partial(
            datasets.load_dataset, kind, data_files={split.partition("[")[0]: path}, split=split
        )
    if source.is_dir():
        for file in sorted(source.rglob("*.json*")):
            if _FILE_KINDS.get(file.suffix) == "json":
                _check_lines(file)
    elif not (cache / path.replace("/", "___")).is_dir() and (reason := out_of_reach()):
        raise UserError(
            f"{path} is not a file or folder, and cannot be fetched from the Hugging Face hub ({reason})"
        )
    return partial(datasets.load_dataset, path, subset, split=split)


def _check_lines(file: Path) -> None:
    """Raise UserError naming a line of a JSON file that is not UTF-8, or null.

    pyarrow 26 may crash on a null: https://github.com/apache/arrow/issues/47409
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} ({line[error.start]:#x})"
                raise UserError(
                    f"{file}: line {number} is not UTF-8 at its {byte}: save the file as UTF-8"
                ) from error
            if line.strip() == b"null":
                raise UserError(f"{file}: line {number} is null, but should be a row: leave it out")


def _saved(folder: Path, split: str) -> "Dataset":
    """Load what `save_to_disk` has written; a dataset without splits is the split train."""
    import datasets

    saved = datasets.load_from_disk(str(folder))
    splits = saved if isinstance(saved, dict) else {"train": saved}
    lengths = {name: len(rows) for name, rows in splits.items()}
    selected = []
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(lengths):
        rows = splits[part.splitname]
        end = len(rows) if part.to is None else part.to
        selected.append(rows.select(range(part.from_ or 0, end)))
    return datasets.concatenate_datasets(selected)


def _changed_by_arrow(rows: "Dataset", exact: Collection[str]) -> list[str]:
    """Return the columns of a JSON file whose values Arrow may have changed.

    It reads a text such as 2024-05-01 as a time, and its null in an object may be the row's own or
    that of a key that only other rows have. Where a key holds texts in some rows and lists in
    others, `datasets` reads a text such as "42" as what it says in JSON.
    """
    changed = []
    for name in rows.column_names:
        column = rows.data.column(name)
        inner_nulls = name in exact and any(map(_has_inner_nulls, column.chunks))
        if inner_nulls or _has_changed_texts(column.type):
            changed.append(name)
    return changed


def _has_changed_texts(kind: Any) -> bool:
    """Return True if an Arrow type holds times, or values of several types within lists or
    objects.
    """
    import pyarrow

    if pyarrow.types.is_temporal(kind):
        return True
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(isinstance(part, pyarrow.JsonType) or _has_changed_texts(part) for part in inner)


def _has_inner_nulls(array: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        return _has_inner_nulls(array.flatten())
    if pyarrow.types.is_struct(array.type):
        return any(field.null_count or _has_inner_nulls(field) for field in array.flatten())
    return False


def _tasks(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Load the tasks of `rollout.verifiers` on rank 0, for all ranks. Raises ValueError on all
    ranks. Collective.
    """
    from generation.rollouts.environments import verifiers

    message: dict[str, Any] = {}
    if is_main():
        try:
            message["rows"] = verifiers.rows(VerifiersConfig.model_validate(settings).model_dump())
        except ValueError as error:
            message["error"] = str(error)
    message = exchange(message)[0]
    if "error" in message:
        raise ValueError(message["error"])
    return list(message["rows"])
