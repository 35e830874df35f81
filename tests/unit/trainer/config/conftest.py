"""A recipe that passes every check, which the tests of checks change."""

import json
from pathlib import Path
from typing import Any

import pytest

MODEL = {"max_position_embeddings": 2048, "num_attention_heads": 6}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Return a valid recipe."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "data.jsonl").touch()
    return {
        "run": {"device": "cpu"},
        "model": {"path": str(tmp_path)},
        "data": {"path": str(tmp_path / "data.jsonl")},
        "reward": {"functions": [{"name": "exact_match"}]},
    }
