"""What a run is: the data, the model and the algorithm that a checkpoint of it belongs to, and no other run's.

Kept beside every checkpoint, compared when a run goes on. Keys that change how a run is computed but not what is
computed (ranks, micro-batches, backend, engine) are left out, and so are those that people change on purpose between
two sessions (run.steps, policy.lr, evaluation).
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config import TrainConfig
from trainer.config_checks import IDENTITY_KEYS, IDENTITY_SECTIONS
from trainer.errors import shortened
from trainer.policy.loading import resolve_folder

_FLEETING = ("_name_or_path", "transformers_version")  # what saving a model again changes in its config.json
_SAMPLE_BYTES = 1 << 16

Identity = dict[str, Any]
"""JSON values by key: data, model and tokenizer as digests, recipe keys by their dotted paths as they stand."""


def run_identity(config: TrainConfig, fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> Identity:
    """The identity of a run; `fingerprint` is that of its training data (`PromptDataset`)."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return {
        "data": fingerprint,
        "model": model_digest(resolve_folder(config.model.path)),
        "tokenizer": _digest(vocabulary),
        **_compared_keys(config),
    }


def model_digest(folder: Path) -> str:
    """Of config.json and of some of the weights: size, beginning, middle and end of each file, so that it is quick."""
    config = json.loads((folder / "config.json").read_text())
    pieces = [json.dumps({key: config[key] for key in sorted(config.keys() - set(_FLEETING))}).encode()]
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        pieces.append(str(size).encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                pieces.append(stream.read(_SAMPLE_BYTES))
    return _digest(b"".join(pieces))


def differences(saved: Identity, current: Identity, allowed: list[str]) -> list[tuple[str, str]]:
    """What differs and may not: each key, and a phrase with both values.

    A key that the recipe did not have yet when the checkpoint was saved counts as its default.

    Args:
        allowed: keys, or sections of keys, that may differ (`checkpoint.resume_anyway`).
    """
    defaults = _compared_keys(TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}}))
    saved = {key: value for key, value in defaults.items() if key in current} | saved
    keys = [key for key in (saved | current) if key not in allowed and _section(key) not in allowed]
    changed = [key for key in keys if saved.get(key, "unknown") != current.get(key, "unknown")]
    return [(key, f"{key} = {_shown(saved, key)} (now {_shown(current, key)})") for key in changed]


def _compared_keys(config: TrainConfig) -> dict[str, Any]:
    recipe = dict(_flat(config.model_dump(mode="json")))
    del recipe["algorithm.preset"]  # the keys that it sets are there
    return {key: value for key, value in recipe.items() if key in IDENTITY_KEYS or _section(key) in IDENTITY_SECTIONS}


def _flat(sections: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in sections.items():
        for name, value in values.items():
            yield f"{section}.{name}", value


def _section(key: str) -> str:
    return key.partition(".")[0]


def _shown(identity: Identity, key: str) -> str:
    return shortened(json.dumps(identity[key]), 50) if key in identity else "unknown"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
