"""Export of a checkpoint's policy as a model in Hugging Face format, for commands that open
models.
"""

import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.config.recipe import load_config
from trainer.config.resuming import COMPLETE_MARKER
from trainer.config.schema import TrainConfig
from trainer.data import load_tokenizer
from trainer.errors import UserError
from trainer.policy import hf_format, hf_saving
from trainer.policy.lora import add_adapters, start_value
from trainer.run.checkpoint import verify
from trainer.run.checkpoint_reading import read_metadata, read_tensors


def export(checkpoint: Path, run: Path) -> Path:
    """Write the checkpoint's model to `model_step_N` in the run's folder, unless it exists, and
    return that folder.

    Raises UserError if the checkpoint is damaged or belongs to another model, or if the folder
    cannot be written.
    """
    folder = run / f"model_{checkpoint.name}"
    kept = folder / COMPLETE_MARKER
    unfinished = folder.with_name(f"{folder.name}.tmp")
    try:
        marker = (checkpoint / COMPLETE_MARKER).read_bytes()
        if kept.is_file() and kept.read_bytes() == marker:
            # It was exported from this very checkpoint. Another marker means that the run was
            # restarted, and has reached the step a second time.
            return folder
        verify(checkpoint)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _write_model(checkpoint, load_config(run / "config.yaml", []), unfinished)
        (unfinished / COMPLETE_MARKER).write_bytes(marker)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"the model of {checkpoint} cannot be written to {folder}: {error}") from error
    return folder


def _write_model(checkpoint: Path, config: TrainConfig, folder: Path) -> None:
    """Write the model's weights, its configuration and its tokenizer to `folder`, as the policy's
    `save_pretrained` does. Weights that the checkpoint lacks, since they are not trained, are read
    from `model.path`.
    """
    metadata = read_metadata(checkpoint)

    def value(name: str, shape: torch.Size) -> Tensor | None:
        """Return the checkpoint's tensor of this name. If it has none: the start value of an
        adapter's factor, or None, so that the weight is read from `model.path`.
        """
        entry = metadata.state_dict_metadata.get(f"policy.model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            return start_value(name, shape, config.lora.seed)
        if entry.size != shape:
            raise UserError(
                f"{checkpoint} is not of the model {config.model.path}: {name} has another shape there"
            )
        tensor = torch.empty(shape)
        read_tensors(checkpoint, metadata, {f"policy.model.{name}": tensor})
        return tensor

    source = hf_format.resolve_folder(config.model.path)
    dtype = getattr(torch, config.policy.dtype)
    model = hf_format.build_meta_model(source, config.model, dtype, torch.device("cpu"))
    if config.lora.rank:
        add_adapters(model, config.lora, torch.float32, "meta")
    with warnings.catch_warnings(action="ignore"):
        # It warns of tensors in `model.path` that it does not read, since the checkpoint has them.
        hf_format.load_sharded(model, source, torch.device("cpu"), value)
    hf_saving.save_pretrained(model, folder, dtype, source)
    load_tokenizer(config.model).save_pretrained(folder)
