"""An adapter to go on from (`lora.start`): its settings and its files, in PEFT's format, read
without torch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generation.paths import UnsetVariable, expanded
from trainer.config.schema import LoraConfig
from trainer.config.weight_files import ADAPTER, Stored, adapter_config, read_header, require_no_pointers
from trainer.errors import UserError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of the names of tensors in PEFT's files."""

_TRANSLATED = {"rank": "r", "alpha": "lora_alpha", "use_rslora": "use_rslora"}
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "fan_in_fan_out",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "loftq_config",
)
"""Keys of adapter_config.json by which an adapter is more than two factors for each layer, with one
scale.
"""

_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")  # ways to begin that change the base model as well


def layer_name(path: str) -> str:
    """Return the name by which PEFT finds a layer: the last part of its path; for a place in a list
    the list's, too.
    """
    parts = path.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def adapter_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of an adapter by name. Raises UserError naming a file that is missing, cut
    or a pointer.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS}: save the adapter with PEFT, which writes it by default"
        )
    return read_header(file)


def adapted_layers(tensors: dict[str, Stored]) -> list[str]:
    """Return the names of the layers to which the tensors of an adapter belong, as in
    lora.target_modules.
    """
    paths = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    return sorted({layer_name(path) for path in paths})


def adapter_keys(start: str) -> dict[str, Any]:
    """Return the keys of `lora` that the adapter in a folder sets; none if it cannot be read (see
    `check_start`).
    """
    try:
        folder = Path(expanded(start))
        settings = adapter_config(folder)
        keys: dict[str, Any] = {
            key: settings[name] for key, name in _TRANSLATED.items() if name in settings
        }
        return keys | {"target_modules": adapted_layers(adapter_tensors(folder))}
    except (UserError, UnsetVariable):
        return {}


def check_start(lora: LoraConfig) -> Iterator[str]:
    """Yield a sentence for each reason why a run cannot go on from the adapter in `lora.start`."""
    if lora.start is None:
        return
    folder = Path(lora.start)
    if not (folder / ADAPTER).is_file():
        yield (
            f"lora.start: {folder} is not the folder of an adapter, since it has no {ADAPTER}: name one"
        )
        return
    try:
        require_no_pointers(folder)
        settings = adapter_config(folder)
        adapter_tensors(folder)
    except UserError as error:
        yield f"lora.start: {error}"
        return
    plain = "go on from a plain LoRA adapter, or merge this one into its model with PEFT"
    if settings.get("peft_type") != "LORA":
        yield f"lora.start: {folder} is of PEFT's type {settings.get('peft_type')}, not LORA: {plain}"
    refused = {key: settings[key] for key in _UNSUPPORTED if settings.get(key)}
    if settings.get("bias", "none") != "none":
        refused["bias"] = settings["bias"]
    if str(settings.get("init_lora_weights")).startswith(_CHANGED_BASES):
        refused["init_lora_weights"] = settings["init_lora_weights"]
    for key, value in refused.items():
        yield f"lora.start: {folder} has {key}: {value}, which is not supported: {plain}"
    for key, name in _TRANSLATED.items():
        value = getattr(lora, key)
        theirs = settings.get(name, False)  # older files have no use_rslora
        if value != theirs:
            yield (
                f"lora.{key} is {value}, but the adapter in lora.start has {theirs}: leave lora.{key} "
                "out"
            )
