"""Writing a sharded model in Hugging Face format: gathered one parameter at a time, written by rank 0."""

import copy
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.distributed import agree, is_main
from trainer.policy.checkpoint_names import checkpoint_views, parameter_names
from trainer.policy.lora import is_adapter, low_rank

SHARD_BYTES = 5 << 30


def save_pretrained(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, source: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write weights in `dtype` under checkpoint names, adapters merged, and the configuration; a collective call.

    Tied copies are left out, as from_pretrained and vLLM expect them to be. A rank 0 that cannot write keeps
    taking part in the gathering and then fails on all ranks. Memory on rank 0: one file's worth of tensors; elsewhere
    one parameter.

    Args:
        source: the folder the model came from; its generation_config.json is copied.
    """
    writer = _Writer(folder, shard_bytes)
    error: Exception | None = None
    adapters = low_rank(model)
    for name, parameter in parameter_names(model).items():
        if is_adapter(name):
            continue
        if name in adapters:
            whole = adapters[name].added_to(_gather(parameter, parameter.dtype)).to(dtype)
        else:
            whole = _gather(parameter, dtype)
        if not is_main() or error is not None:
            continue
        try:
            writer.add(_in_checkpoint(model, name, whole.cpu()))
        except (OSError, SafetensorError) as caught:
            error = caught
    if is_main() and error is None:
        try:
            for name in sorted(model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()):
                writer.add(_in_checkpoint(model, name, model.get_buffer(name).cpu()))
            writer.close()
            _write_configuration(model, folder, dtype, source)
        except (OSError, SafetensorError) as caught:
            error = caught
    agree(error, f"writing the model to {folder}")


def _gather(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole parameter on every rank, cast before it travels where the backend lets us."""
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to(dtype, copy=True)
    local = parameter.detach().to(dtype)
    return local.full_tensor() if isinstance(local, DTensor) else local


def _in_checkpoint(model: PreTrainedModel, name: str, whole: Tensor) -> dict[str, Tensor]:
    """A parameter's tensors by their names in a checkpoint: views of it."""
    flat = whole.reshape(-1)
    return {
        view.name: flat[view.offset : view.offset + math.prod(view.shape)].view(view.shape)
        for view in checkpoint_views(model, name, whole.shape)
    }


def _write_configuration(model: PreTrainedModel, folder: Path, dtype: torch.dtype, source: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    generation = source / "generation_config.json"
    if generation.exists() and source.resolve() != folder.resolve():
        shutil.copyfile(generation, folder / generation.name)


class _Writer:
    """Collects tensors and writes a file whenever more would exceed `limit` bytes; names the files at the end."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.parts: list[list[str]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take a parameter's tensors; they go into the same file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.pending and self.pending_bytes + size > self.limit:
            self._flush()
        self.pending |= tensors
        self.pending_bytes += size
        self.total_bytes += size

    def close(self) -> None:
        """Write what is left, give the files their final names, and the index if there are several."""
        self._flush()
        count = len(self.parts)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.parts):
            final = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(self.pending, self._part(len(self.parts)), metadata={"format": "pt"})
        self.parts.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"model.part{number}.safetensors"
