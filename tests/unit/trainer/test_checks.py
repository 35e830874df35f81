"""What the classes of a recipe's models allow, before anything is loaded."""

import json
from pathlib import Path

import pytest
from transformers import (
    BioGptConfig,
    GraniteMoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)
from transformers.distributed import tensor_parallel

from tests.support.recipes import make_config
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.model_checks import check_model


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {},
            r"{path} is of the type not_yet_vl, which Transformers 5[.\d]+ does not have: use another model",
        ),
        (
            {"auto_map": {"AutoConfig": "configuration_not_yet_vl.NotYetConfig"}},
            r"{path} has code of its own: set model.trust_remote_code to true, or use another model",
        ),
    ],
)
def test_a_type_that_transformers_does_not_have_is_named(
    tmp_path: Path, keys: dict, sentence: str
) -> None:
    """Such as Kimi-VL's, of which vLLM has a class."""
    file = {"model_type": "not_yet_vl", "text_config": {}, "vision_config": {}} | keys
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = make_config(model={"path": str(tmp_path)}, data={"path": "unread"})
    with pytest.raises(UserError, match=f"^model.path: {sentence.format(path=tmp_path)}$"):
        check_model(config)


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
PLAIN = Qwen2Config(**SMALL, num_attention_heads=2, num_key_value_heads=1)
HYBRID = Qwen3NextConfig(
    **SMALL,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
)
OWN = BioGptConfig(**SMALL, num_attention_heads=2)


@pytest.mark.parametrize(
    "models",
    [[PLAIN], [PLAIN, PLAIN], [HYBRID], [PLAIN, HYBRID], [HYBRID, OWN]],
    ids=["plain", "taught", "hybrid", "taught by a hybrid", "taught by one with its own attention"],
)
def test_beginnings_are_shared_unless_a_models_class_is_in_the_way(
    tmp_path: Path, models: list[PretrainedConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, config.json does not say which layers are recurrent; the second model is a teacher."""
    obstacle = "BioGptForCausalLM has its own attention" if OWN in models else ""
    paths = [str(tmp_path / str(number)) for number in range(len(models))]
    for path, model in zip(paths, models, strict=True):
        model.save_pretrained(path)
        file = Path(path) / "config.json"
        values = json.loads(file.read_text()).items()
        file.write_text(json.dumps({key: v for key, v in values if key != "layer_types"}))
    sections = {"model": {"path": paths[0]}, "data": {"path": "unread"}}
    sections["algorithm"] = {"teacher": paths[1]} if len(models) > 1 else {}
    config = check_model(TrainConfig.model_validate(sections))
    printed = capsys.readouterr().err
    wanted = f"[hotbunk] prefixes are computed for each answer, since {obstacle}"
    assert config.batch.share_prefixes == (not obstacle) and printed.count("\n") == bool(obstacle)
    assert printed.startswith(wanted if obstacle else "")
    asked = TrainConfig.model_validate(sections | {"batch": {"share_prefixes": True}})
    if not obstacle:
        assert check_model(asked) == asked
        return
    with pytest.raises(
        UserError, match=f"^batch.share_prefixes is true, but {obstacle}.*: set it to false or auto$"
    ):
        check_model(asked)


def test_a_critic_that_is_no_language_model_is_left_to_what_loads_it(
    tiny_qwen2: Path, tmp_path: Path
) -> None:
    T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=32, vocab_size=64).save_pretrained(tmp_path)
    sections = {"critic": {"path": str(tmp_path)}, "algorithm": {"preset": "ppo"}, "data": {"path": "d"}}
    config = check_model(TrainConfig.model_validate({"model": {"path": str(tiny_qwen2)}, **sections}))
    assert config.batch.share_prefixes is False


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ("", ".* no plan to split the experts of GraniteMoeForCausalLM: set it to 1"),
        (
            "resolve_parallel_plans",
            "Transformers 5.* set it to 1, or install Transformers 5.19 or later",
        ),
    ],
    ids=["a model without a plan", "a release that splits none"],
)
def test_experts_that_transformers_cannot_split_are_refused(
    lacks: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks:
        monkeypatch.delattr(tensor_parallel, lacks)
    mixture = GraniteMoeConfig(
        **SMALL, num_attention_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    mixture.architectures = ["GraniteMoeForCausalLM"]
    mixture.save_pretrained(tmp_path)
    sections = {
        "model": {"path": str(tmp_path)},
        "data": {"path": "d"},
        "policy": {"expert_parallel": 2},
    }
    with pytest.raises(UserError, match=f"^policy.expert_parallel is above 1, but {sentence}$"):
        check_model(TrainConfig.model_validate(sections))
