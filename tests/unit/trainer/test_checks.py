"""A model that Transformers cannot build is refused by name, before anything is loaded."""

import json
from pathlib import Path

import pytest

from trainer.checks import check_model
from trainer.config.schema import TrainConfig
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, r"{path} is of the type not_yet_vl, which Transformers 5[.\d]+ does not have: use another model"),
        (
            {"auto_map": {"AutoConfig": "configuration_not_yet_vl.NotYetConfig"}},
            r"{path} has code of its own: set model.trust_remote_code to true, or use another model",
        ),
    ],
)
def test_a_type_that_transformers_does_not_have_is_named(tmp_path: Path, keys: dict, sentence: str) -> None:
    """Such as Kimi-VL's, of which vLLM has a class."""
    file = {"model_type": "not_yet_vl", "text_config": {}, "vision_config": {}} | keys
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = TrainConfig.model_validate({"model": {"path": str(tmp_path)}, "data": {"path": "unread"}})
    with pytest.raises(UserError, match=f"^model.path: {sentence.format(path=tmp_path)}$"):
        check_model(config)
