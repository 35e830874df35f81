"""The files of a model, judged by their names and by the headers of its weights, before anything
loads them.

A safetensors file begins with the length of its header, eight bytes in little endian, and the
header in JSON (https://huggingface.co/docs/safetensors). Offsets count from the end of the header:

    {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [100, 64], "data_offsets": [0, 12800]},
        …}
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""The file by which a folder is a PEFT adapter."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024  # most bytes of a pointer, by its specification
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # files of a model besides its weights
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
_PIECE = 16 << 20  # bytes that are compared at a time


class Stored(NamedTuple):
    """A tensor in a file: its dtype as the file names it, its shape, and its bytes [begin, end)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def is_pointer(file: Path) -> bool:
    """Return True if a file is a pointer of Git LFS, which a clone without Git LFS has in place of
    a large file.
    """
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def pointer_sentence(file: Path) -> str:
    """Return a sentence about a pointer of Git LFS, with the remedy."""
    remedy = f"run `git lfs pull` in {file.parent}, or download the model with `hf download`"
    return f"{file} is a pointer of Git LFS, not the file itself: {remedy}"


def no_model(path: Path) -> str:
    """Return the reason why a file, or a folder without a config.json, is not a model, with a
    remedy.
    """
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        return _gguf(path)
    if path.is_file():
        return f"{path} is a file: name the folder that holds it, with config.json and the tokenizer"
    if (path / ADAPTER).is_file():
        base = adapter_config(path).get("base_model_name_or_path") or "the model that it was trained on"
        start = f"set model.path to {base} and lora.start to {path} to go on with it"
        return f"{path} is a LoRA adapter without its model: {start}, or merge the two with PEFT"
    return f"{path} holds no config.json, so it is not a model in Hugging Face format"


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder. Raises UserError naming the file."""
    file = folder / ADAPTER
    try:
        loaded = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{file} is not a mapping of keys: download it again")
    return loaded


def require_no_pointers(folder: Path) -> None:
    """Raise UserError if a file of a model or tokenizer besides its weights is a pointer of Git
    LFS.
    """
    for file in sorted(folder.iterdir()):
        if (
            file.suffix in _READ
            and file.is_file()
            and file.stat().st_size <= _POINTER_BYTES
            and is_pointer(file)
        ):
            raise UserError(pointer_sentence(file))


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a model by name, from the headers of its safetensors files.

    Raises UserError, with a sentence that names the file and the remedy, if files are pointers, are
    missing, are cut or do not fit together, or if they hold something else than a model.
    """
    require_no_pointers(folder)
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder} holds a model and, in {ADAPTER}, an adapter, which would not be read: move the "
            "adapter's files to a folder of their own, and set lora.start to that folder to go on "
            "with it"
        )
    index = folder / INDEX
    if index.is_file():
        file_of = _weight_map(index)
        names = sorted(set(file_of.values()))
    else:
        file_of = {}
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        parts = [name for name in names if "-of-" in name]
        if parts:
            raise UserError(
                f"{folder} holds {parts[0]}, but not {INDEX}, which lists the shards: download it as "
                "well"
            )
        if not names:
            raise UserError(_unreadable(folder))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(
            f"{index} names {absent[0]}, which {folder} lacks ({len(absent)} missing): download it again"
        )
    headers = {name: read_header(folder / name) for name in names}
    for tensor, name in file_of.items():
        if tensor not in headers[name]:
            raise UserError(
                f"{index} has {tensor} in {name}, which lacks it: download the index and the shards "
                "again"
            )
    tensors = {tensor: stored for header in headers.values() for tensor, stored in header.items()}
    adapted = next((tensor for tensor in tensors if tensor.startswith("base_model.")), None)
    if adapted is not None:
        named = f"{tensors[adapted].file} holds {adapted}, a tensor of an adapter"
        raise UserError(f"{named}: name the model itself, and the adapter's folder in lora.start")
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name. Raises UserError if it is a pointer,
    damaged or cut.
    """
    if is_pointer(file):
        raise UserError(pointer_sentence(file))
    size = file.stat().st_size
    damaged = f"{file} is not a safetensors file, or is damaged: download it again"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise UserError(damaged)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(file, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(damaged) from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise UserError(
            f"{file} has {size:,} bytes, but its header describes {end:,}: it is cut, so download it "
            "again"
        )
    return tensors


def _stored(file: Path, data: int, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(file, entry["dtype"], tuple(entry["shape"]), data + int(begin), data + int(end))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        file_of = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in file_of.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not an index of shards: download it again") from error


def _gguf(folder: Path) -> str:
    return (
        f"{folder} holds GGUF, which is llama.cpp's format: name the model that it was made from, in "
        "safetensors"
    )


def _unreadable(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return _gguf(folder)
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        convert = "load it with Transformers and write it again by save_pretrained"
        return f"{folder} holds {pickled[0]}, but only *.safetensors are read: {convert}"
    return f"{folder} holds no *.safetensors with the model's weights"


def embedding(tensors: Mapping[str, Stored]) -> Stored | None:
    """Return the input embedding: parts for prediction of several tokens may have copies, under
    longer names.
    """
    names = [name for name in tensors if name.endswith(".weight") and name.split(".")[-2] in _EMBEDDINGS]
    return tensors[min(names, key=len)] if names else None


def require_trainable(folder: Path) -> None:
    """Raise UserError as `stored_tensors`, or if the head differs from the embedding although
    config.json ties the two.

    Transformers then computes with the embedding, and vLLM with the head
    (https://github.com/vllm-project/vllm/issues/51665).
    """
    tensors = stored_tensors(folder)
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX}, which training reads: rename the weights"
        )
    table = embedding(tensors)
    name = next((name for name in tensors if name.endswith("lm_head.weight")), None)
    if name is None or table is None or not _ties(folder) or _equal(tensors[name], table):
        return
    remedy = f"set it to false if {name} was trained, else take that tensor out of the file"
    untied = f"{tensors[name].file} has {name}, which differs from the embedding"
    raise UserError(f"{untied}, but tie_word_embeddings of config.json is true: {remedy}")


def _ties(folder: Path) -> bool:
    from transformers import AutoConfig  # knows the defaults of each family, but takes seconds to import

    try:
        return bool(getattr(AutoConfig.from_pretrained(folder), "tie_word_embeddings", False))
    except Exception:  # such as a model with code of its own; what builds it reports it
        return False


def _equal(first: Stored, second: Stored) -> bool:
    if first[1:3] != second[1:3]:
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.begin)
        other.seek(second.begin)
        for start in range(0, first.end - first.begin, _PIECE):
            size = min(_PIECE, first.end - first.begin - start)
            if one.read(size) != other.read(size):
                return False
    return True
