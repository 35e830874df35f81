"""Write a model in Hugging Face format: every rank gathers, and rank 0 writes."""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
)

from sharding.ranks import agreed, is_main
from sharding.send.source import unsharded
from trainer.policy.buffers import saved_buffers
from trainer.policy.lora import is_adapter, low_rank
from trainer.surroundings import follow_umask

if TYPE_CHECKING:
    pass
from trainer.policy.hf_format import COPIED, SHARD_BYTES, checkpoint_views, parameter_names


def save_pretrained(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights in `dtype` under checkpoint names, adapters merged, and the configuration.
    Collective.

    Tied copies are left out, as from_pretrained and vLLM expect. If rank 0 cannot write, it keeps
    taking part in the gathers, and the call then fails on all ranks. Rank 0 needs memory for the
    tensors of one file, other ranks for one parameter. The files `COPIED` are copied from `source`,
    the folder that the model came from. A file has at most `shard_bytes`, unless one parameter is
    larger.
    """
    writer = _Writer(folder, shard_bytes)
    for name, tensor in _full_tensors(model, dtype):
        if is_main() and writer.error is None:
            flat = tensor.cpu().reshape(-1)
            views = checkpoint_views(model, name, tensor.shape)
            writer.add(
                {v.name: flat[v.offset : v.offset + math.prod(v.shape)].view(v.shape) for v in views}
            )
    with agreed(f"writing the model to {folder}"):
        if not is_main():
            return
        writer.close()
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(folder)
        for name in COPIED if source.resolve() != folder.resolve() else ():
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)


def _full_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter, with its adapter added, then each saved buffer, by name in memory.
    Collective.
    """
    adapters = low_rank(model)
    for name, parameter in parameter_names(model).items():
        if name in adapters:
            yield name, adapters[name].added_to(_gather(parameter, parameter.dtype)).to(dtype)
        elif not is_adapter(name):
            yield name, _gather(parameter, dtype)
    yield from saved_buffers(model).items()


def _gather(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unsharded parameter on every rank, cast before it is gathered if the backend
    allows that.
    """
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to(dtype, copy=True)
    local = parameter.detach().to(dtype)
    return unsharded(local) if isinstance(local, DTensor) else local


class _Writer:
    """A writer that collects tensors, writes a file before they exceed `limit` bytes, and names
    files at the end.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.error: Exception | None = None  # the first one of `add`, which `close` raises
        self.pending: dict[str, Tensor] = {}
        self.total_bytes = 0
        self.parts: dict[Path, list[str]] = {}  # the names of the tensors in each file

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take the tensors of a parameter, which go into the same file."""
        size = sum(tensor.nbytes for tensor in (self.pending | tensors).values())
        try:
            if self.pending and size > self.limit:
                self._flush()
        except (OSError, SafetensorError) as error:
            self.error = error
        self.pending |= tensors

    def close(self) -> None:
        """Write the rest, give the files their final names, and write the index if there are
        several.
        """
        if self.error is not None:
            raise self.error
        self._flush()
        count = len(self.parts)
        weight_map: dict[str, str] = {}
        for number, (part, names) in enumerate(self.parts.items(), start=1):
            final = (
                "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            )
            part.rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2), "utf-8"
            )

        follow_umask(self.folder)

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"model.part{len(self.parts)}.safetensors"
        save_file(self.pending, part, metadata={"format": "pt"})
        self.parts[part] = list(self.pending)
        self.total_bytes += sum(tensor.nbytes for tensor in self.pending.values())
        self.pending = {}
