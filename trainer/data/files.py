"""Files, folders and datasets of rows, and the sources that make rows as they are asked for."""

import json
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


def load_rows(path: str, subset: str | None, split: str, size: int | None = None) -> "Dataset":
    """Load the first `size` rows (None: all) of a dataset. Raises UserError. Collective.

    `path` names a jsonl or parquet file, a folder of such files, a dataset on the hub, `reasoning_gym:…` or
    `verifiers:…`. For verifiers, `subset` holds the settings in JSON.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    source, cache = Path(path), Path(datasets.config.HF_DATASETS_CACHE)
    try:
        if path.startswith("reasoning_gym:"):
            from generation.rollouts.environments import reasoning_gym

            rows = datasets.Dataset.from_list(reasoning_gym.rows(path))
        elif path.startswith("verifiers:"):
            rows = datasets.Dataset.from_list(_tasks(json.loads(subset or "{}")))
        elif not source.is_file():
            cached = (cache / path.replace("/", "___")).is_dir()
            if not source.is_dir() and not cached and (reason := out_of_reach()):
                here = f"{path} is not a file or folder"
                raise UserError(f"{here}, and cannot be fetched from the Hugging Face hub ({reason})")
            rows = datasets.load_dataset(path, subset, split=split)
        elif kind := _FILE_KINDS.get(source.suffix):
            if kind == "json":  # pyarrow 26 may crash on a null: https://github.com/apache/arrow/issues/47409
                with source.open("rb") as lines:
                    null = next((number for number, line in enumerate(lines, 1) if line.strip() == b"null"), None)
                if null is not None:
                    raise UserError(f"{source}: line {null} is null, but should be a row: leave it out")
            rows = datasets.load_dataset(kind, data_files={split.partition("[")[0]: path}, split=split)
        else:
            raise UserError(f"{path} is neither jsonl nor parquet, judging by its name")
    except StopIteration as error:  # raised for an empty file
        raise UserError(f"{path} holds no rows") from error
    except (datasets.exceptions.DatasetsError, ImportError, OSError, ValueError, RecursionError) as error:
        if isinstance(error.__cause__ or error, OSError) and (obstacle := unwritable(cache)):
            remedy = "set HF_DATASETS_CACHE, or HF_HOME, to a folder that can be written to"
            raise UserError(f"{path}: its rows are prepared in {cache}, but {obstacle}: {remedy}") from error
        raise UserError(f"{path} (split {split}) cannot be read: {one_line(error.__cause__ or error)}") from error
    if len(rows) == 0:
        raise UserError(f"{path} (split {split}) holds no rows")
    return rows if size is None else rows.select(range(min(size, len(rows))))


def _tasks(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Load the tasks of `rollout.verifiers` on rank 0, for all ranks. Raises ValueError on all ranks. Collective."""
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
