"""A model's config.json, from a folder or the hub, with checked types, against which recipes are
checked.

The tables here have facts about model families that cannot be read off their weights: what is
refused, and why. A worker of the engine decides by its modules instead
(`sharding.worker.loader.reprocessed_modules`).
"""

import json
import os
import re
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.config.recipe import sentences
from trainer.config.weight_files import embedding, is_pointer, no_model, pointer_sentence, stored_tensors
from trainer.errors import UserError

HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?")

SHARED_LAYERS = ("full_attention", "sliding_attention", "attention", "mlp", "moe", "dense", "sparse")
"""Values of a model's `layer_types` for which ranks can share a sequence
(`trainer.policy.attention`).
"""

RECURRENT_LAYERS = ("linear_attention", "mamba", "mamba2", "conv")
"""Values of a model's `layer_types` for layers with a recurrent mixer in place of attention."""

PACKABLE_LAYERS = (*SHARED_LAYERS, *RECURRENT_LAYERS, "hybrid")
"""Values of a model's `layer_types` for which sequences can be kept apart in a pack, and
share the computation of a common beginning (`trainer.policy.recurrent`).
"""

REPROCESSED = {"cuda": (".experts.", ".kv_b_proj."), "cpu": (".kv_b_proj.",)}
"""Parts of the names of weights that engines do not keep as loaded, on CPU not even with
`engine.plain_cpu_weights`.

Some of CUDA's kernels shuffle experts, and MLA keeps products of weights.
"""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json by which a model is a mixture of experts. vLLM's CPU build applies no LoRA
adapters to one.
"""

SELECTIVE_SCANS = ("mamba", "falcon_mamba", "jamba")
"""Values of `model_type` of models with Mamba-1 layers, whose selective scan vLLM's CPU build
lacks.
"""

REPROCESSED_KEYS = dict.fromkeys(EXPERT_KEYS, "experts") | {"kv_lora_rank": "attention"}
"""Keys of config.json that say that a model has `REPROCESSED` weights, and the part that those
belong to.
"""

_OF_ALL_PARTS = ("quantization_config",)
"""Keys that a multimodal model's config.json has beside those for its language model, for all parts
together.
"""

_CONNECT_SECONDS = 5.0
# For all others, max_position_embeddings is the full length
_STRETCHING_ROPES = ("linear", "dynamic", "yarn")

_Size = Annotated[int, Field(ge=1, lt=2**31)]
_Number = Annotated[int, Field(ge=0, lt=2**31)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Rope(_Part):
    rope_type: str | None = None
    type: str | None = None
    factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    original_max_position_embeddings: _Size | None = None


class _ModelFile(_Part):
    """The keys that this module or callers of `model_config` read; all others are left as they
    are.
    """

    num_hidden_layers: _Size | None = None
    hidden_size: _Size | None = None
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size | None = None
    layer_types: list[str] | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    num_experts: _Number | None = None
    num_local_experts: _Number | None = None
    n_routed_experts: _Number | None = None
    moe_num_experts: _Number | None = None
    model_type: str | None = None
    kv_lora_rank: _Number | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def model_config(path: str) -> dict[str, Any]:
    """Read a model's config.json from a folder or the hub; of a multimodal model, the part for its
    language model.

    Raises UserError naming the path, and the keys of the file whose type is wrong.
    """
    folder = Path(path)
    if os.path.isdir(path):
        file = folder / "config.json"
        if not file.is_file():
            for model in (run / "model" for run in (folder, folder.parent, folder.parent.parent)):
                if (model / "config.json").is_file():
                    raise UserError(
                        f"model.path: {path} is a run, or a part of one: name its model, {model}"
                    )
            raise UserError(f"model.path: {no_model(folder)}")
    elif os.path.isfile(path):
        raise UserError(f"model.path: {no_model(folder)}")
    elif HUB_NAME.fullmatch(path):
        file = _config_from_hub(path)
    else:
        raise UserError(f"model.path: there is no folder {path}")
    try:
        loaded = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if is_pointer(file):
            raise UserError(f"model.path: {pointer_sentence(file)}") from error
        raise UserError(f"model.path: {file} is not valid JSON: {error}") from error
    if isinstance(loaded, dict):
        shared = {key: loaded[key] for key in _OF_ALL_PARTS if key in loaded}
        loaded = loaded.get("text_config") or loaded
        loaded = shared | loaded if isinstance(loaded, dict) else loaded
    try:
        return _ModelFile.model_validate(loaded).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise UserError(*(f"model.path: {file}: {one}" for one in sentences(error, loaded))) from error


def is_multimodal(path: str) -> bool:
    """Return True if the config.json of a folder, or the one fetched from the hub by
    `model_config`, has a part for images.

    False if there is no such file.
    """
    return bool(_raw_config(path).get("vision_config"))


def _raw_config(path: str) -> dict[str, Any]:
    """Return the unchecked config.json of a folder, or of a model in the hub's cache; empty if
    there is none.
    """
    file: Any = Path(path) / "config.json"
    try:
        if not os.path.exists(path) and HUB_NAME.fullmatch(path):
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(path, "config.json")
        loaded = json.loads(Path(file).read_bytes()) if isinstance(file, str | Path) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def embedding_rows(path: str) -> int | None:
    """Return the number of tokens for which a model has an embedding: rows in its weights, or
    `vocab_size` without weights.

    None if the files do not say it.
    """
    with suppress(UserError, OSError):
        stored = embedding(stored_tensors(Path(path)))
        if stored is not None:
            return stored.shape[0]
    loaded = _raw_config(path)
    rows = (loaded.get("text_config") or loaded).get("vocab_size")
    return rows if isinstance(rows, int) else None


def position_limit(model: dict[str, Any]) -> int | None:
    """Return the longest sequence that a model with this config.json takes, in tokens; None if the
    file does not say.
    """
    positions: int | None = model.get("max_position_embeddings")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if positions is None or (rope.get("rope_type") or rope.get("type")) not in _STRETCHING_ROPES:
        return positions
    return int((rope.get("original_max_position_embeddings") or positions) * (rope.get("factor") or 1.0))


def steady_positions(model: dict[str, Any]) -> tuple[str, int] | None:
    """Return the kind of a model's rotary positions and the sequence length up to which they depend
    on nothing else.

    Beyond that length, Transformers scales positions of the kinds longrope and dynamic by the
    longest sequence of a batch (transformers/modeling_rope_utils.py, dynamic_rope_update), and vLLM
    scales them by `max_model_len` or not at all. None if the model's positions are of another kind.
    """
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # Some files have parameters for each kind of layer.
        kind = part.get("rope_type") or part.get("type")
        positions = model.get("max_position_embeddings")
        if kind == "longrope":
            original = model.get("original_max_position_embeddings") or part.get(
                "original_max_position_embeddings"
            )
            return kind, original or positions or 0
        if kind == "dynamic":
            return kind, positions or 0
    return None


def _config_from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reason = out_of_reach()
    cause = None
    try:
        if not reason:
            return Path(hf_hub_download(name, "config.json"))
        if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            return Path(cached)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split()[:12])
        cause = error
    unavailable = f"is not a folder, and cannot be fetched from the Hugging Face hub ({reason})"
    raise UserError(f"model.path: {name} {unavailable}") from cause


def out_of_reach() -> str:
    """Return the reason why the hub, or the proxy before it, does not answer; empty if it does, or
    in offline mode.

    This comes before the hub's own library, which takes 24 s to give up, so that a mistyped folder
    is reported at once.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return ""
    proxies = getproxies()
    for kind in ("https", "http", "all"):  # httpx prepares for each of them, whichever it will use
        if proxies.get(kind, "").startswith("socks") and find_spec("socksio") is None:
            return f"{kind.upper()}_PROXY is a SOCKS proxy, which needs pip install 'httpx[socks]'"
    proxy = proxies.get("https") or proxies.get("all")
    url = urlsplit(proxy or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if url.scheme == "http":
        usual_port = 80
    elif url.scheme.startswith("socks"):
        usual_port = 1080
    else:
        usual_port = 443
    try:
        port = url.port or usual_port
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return f"{url.hostname} cannot be reached: {error}"
    return ""
