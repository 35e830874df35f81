"""The settings that an engine is started with, and the checks before its start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.recipes import make_config
from trainer import engines
from trainer.policy import hf_format


def test_a_hub_model_is_fetched_once_on_a_machine_and_the_engine_is_given_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched: list[dict[str, Any]] = []
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")

    def snapshot_download(name: str, **patterns: Any) -> str:
        fetched.append({"name": name} | patterns)
        return str(tmp_path)

    monkeypatch.setattr(hf_format, "snapshot_download", snapshot_download)
    config = make_config(model={"path": "mistralai/Some-7B"})
    for rank in range(8):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        engines.fetch_model(config)
    assert [call["name"] for call in fetched] == ["mistralai/Some-7B"]
    assert fetched[0]["ignore_patterns"] == ["consolidated*"], "the same weights in another layout"
    assert engines.engine_settings(config, on_cuda=False).model == str(tmp_path)
