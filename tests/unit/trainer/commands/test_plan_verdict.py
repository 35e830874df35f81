"""The start of a run in `hotbunk plan`, its verdict, and the remedies that it names."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForSequenceClassification

from tests.unit.trainer.commands.test_plan import recipe
from trainer.cli import main
from trainer.commands.plan import batch_lines
from trainer.estimates.host_memory import host_part
from trainer.estimates.memory import GIB, engine_parts, over_budget, staging_bytes, trainer_parts
from trainer.estimates.model_sizes import model_sizes


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_a_start_needs_the_policys_and_the_engines_weights(tiny_qwen2: Path, offload: str) -> None:
    """What is away while engines are awake is built there, and the KV cache comes after the first sync."""
    config = recipe(
        tiny_qwen2,
        run={"device": "cuda"},
        policy={"offload": offload},
        algorithm={"advantage": "gae", "kl_coef": 0.1},
        engine={"kv_cache_gib": 60.0},
    )
    sizes = model_sizes(config, config.model.path)
    parts = [*trainer_parts(config, sizes, 1, 80.0), *engine_parts(config, sizes, 1, 80.0)]
    starting = {part.name: part.starting for part in parts}
    critic = sum(
        p.numel()
        for p in AutoModelForSequenceClassification.from_pretrained(
            tiny_qwen2, num_labels=1
        ).parameters()
    )
    stays = int(offload == "none")
    assert starting["policy: float32 weights"] == 4 * sizes.total == starting["engine: weights"]
    assert starting["policy: optimizer state"] == stays * 8 * sizes.total
    assert starting["critic: float32 weights"] == stays * 4 * critic
    assert starting["critic: optimizer state"] == stays * 8 * critic
    buffers = staging_bytes(config, sizes, 1, cut=False)
    assert starting["staging buffers"] == 1.5 * buffers, "a bucket is also cast, before it is copied"
    for absent in (
        "engine: KV cache",
        "reference: weights",
        "policy: gradients",
        "activations",
        "logits",
    ):
        assert starting[absent] == 0, absent


@pytest.mark.parametrize(
    ("keys", "awake", "asleep", "on_host"),
    [
        ({"enforce_eager": False}, 3.0, 3.0, 0.0),
        ({"enforce_eager": False, "tensor_parallel_size": 2}, 3.5, 3.5, 0.0),
        ({"enforce_eager": False, "tensor_parallel_size": 2, "deep_sleep": True}, 3.5, 0.5, 2.5),
        ({"enforce_eager": True, "deep_sleep": True}, 0.5, 0.5, 0.0),
        ({"enforce_eager": False, "deep_sleep": True, "sleep": False}, 3.0, 3.0, 0.0),
    ],
)
def test_what_stays_of_a_sleeping_engine_is_counted(
    tiny_qwen2: Path, keys: dict[str, Any], awake: float, asleep: float, on_host: float
) -> None:
    """In GiB: a context 0.5, graphs 2.5, and 0.5 for NCCL between the devices of an engine."""
    config = recipe(tiny_qwen2, run={"device": "cuda"}, engine=keys)
    sizes = model_sizes(config, config.model.path)
    part = {part.name: part for part in engine_parts(config, sizes, 2, 80.0)}[
        "engine: CUDA, graphs, NCCL"
    ]
    assert (part.starting, part.generating, part.training) == (awake * GIB, awake * GIB, asleep * GIB)
    assert host_part(config, sizes, 2).training == on_host * GIB


@pytest.mark.parametrize(
    ("local_ranks", "shard_size", "said"), [(2, None, True), (2, 2, False), (4, None, False)]
)
def test_a_plan_says_that_shards_are_gathered_from_several_machines(
    tiny_qwen2: Path,
    local_ranks: int,
    shard_size: int | None,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    config = recipe(tiny_qwen2, policy={"shard_size": shard_size})
    lines = dict(batch_lines(config, 4))
    assert ("shards" in lines) is said
    assert not said or lines["shards"].startswith(
        "weights are gathered from 2 machines; policy.shard_size: 2"
    )


def test_remedies_act_on_the_largest_parts_and_are_not_set_yet(tiny_qwen2: Path) -> None:
    def remedies(**sections: Any) -> str:
        config = recipe(tiny_qwen2, run={"device": "cuda"}, **sections)
        model = model_sizes(config, config.model.path, config.lora)
        *_, sentence = over_budget(config, model, 1, 0.01)
        assert sentence.startswith("while the policy is updated")
        return sentence.partition("): ")[2]

    long = {"prompts_per_step": 64, "tokens_per_micro_batch": 8000}
    first = remedies(batch=long)
    assert first.startswith(
        "set policy.activation_checkpointing: full, lower batch.tokens_per_micro_batch"
    )
    state = remedies(
        batch={"prompts_per_step": 1, "tokens_per_micro_batch": 100, "share_prefixes": False}
    )
    assert "set policy.update_on: host, set lora.rank" in state and "policy.offload" not in state
    done = {"activation_checkpointing": "full", "update_on": "host", "dtype": "bfloat16"}
    last = remedies(batch=long, policy=done, lora={"rank": 4})
    assert not any(key in last for key in ("checkpointing", "update_on", "lora.rank"))
    assert "lower batch.tokens_per_micro_batch" in last and "or use more ranks" in last


def test_a_plan_ends_with_a_verdict_and_a_code(tiny_qwen2: Path, tmp_path: Path, capsys: Any) -> None:
    """It fits, nearly fills the device, or does not fit; the sum that is compared is the table's own."""
    config = {"model": {"path": str(tiny_qwen2)}, "data": {"path": "d"}, "engine": {"kv_cache_gib": 1.0}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(config | {"reward": {"functions": ["exact_match"]}}))

    def plan(gib: float) -> tuple[int, str]:
        code = main(["plan", str(file), "--gpu", "h100", "--device-gib", f"{gib:.4f}"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, text = plan(80.0)
    assert (code, "It fits: no column takes more than 95% of the device" in text) == (0, True)
    [row] = [line for line in text.splitlines() if line.startswith("│ sum")]
    most = max(float(cell) for cell in row.strip("│").split("│")[1:4])
    code, text = plan(most * 1.02)
    assert code == 0 and "It fits with less than 5% to spare: while" in " ".join(text.split())
    code, text = plan(most * 0.99)
    assert code == 2 and "a rank needs" in text and "It fits" not in text
