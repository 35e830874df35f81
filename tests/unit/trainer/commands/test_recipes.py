"""The recipes for released models: their plans are those of the documentation, and each starts dry."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from tests.conftest import ROOT
from tests.support import released_models
from tests.support.pictures import picture
from tests.support.released_models import CONFIGS
from tests.unit.trainer.commands.test_plan import recipe
from trainer import start
from trainer.cli import main
from trainer.config.checks import models_of
from trainer.config.prefix_sharing import with_chosen_prefixes
from trainer.config.recipe import load_config
from trainer.config.sync_ways import with_chosen_way
from trainer.estimates.gpus import GPUS
from trainer.estimates.host_memory import host_part
from trainer.estimates.kv_cache import kv_answer_bytes
from trainer.estimates.memory import GIB
from trainer.estimates.model_sizes import model_sizes, shard
from trainer.run.keeper import RunState

RECIPES = [pytest.param(*recipe, id=recipe[0].stem) for recipe in released_models.recipes()]
PAGE = (ROOT / "docs" / "memory-and-scale.md").read_text()


def test_each_family_has_a_recipe_for_one_gpu_and_one_for_eight() -> None:
    planned = [(CONFIGS[name][0], gpus) for _, name, gpus in released_models.recipes()]
    assert sorted(planned) == sorted(
        itertools.product({family for family, *_ in CONFIGS.values()}, (1, 8))
    )


@pytest.mark.parametrize(("file", "name", "gpus"), RECIPES)
def test_a_plan_fits_the_gpus_and_is_the_tables(
    file: Path, name: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs config.json alone, whose sizes come to the published number of parameters. A run recomputes what it prints."""
    cells = released_models.plan(file, name, gpus, tmp_path)
    published = released_models.PARAMETERS[name]
    assert f"{int(cells['parameters'][0]) / 1e9:.{len(published.partition('.')[2])}f}" == published
    columns = released_models.sizes(cells, "sum")
    assert len(columns) == 3 and max(columns) <= 0.95 * GPUS["h100"].memory_gib
    assert released_models.row(file, gpus, cells) in PAGE
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    if file.stem == "gsm8k_qwen3_4b_8gpu":
        assert float(cells["update"][2].split("%")[0].removeprefix("MFU ")) >= 45, "of an H100's peak"
    device = [f"model.path={tmp_path}", "run.device=cuda"]
    gib = GPUS["h100"].memory_gib
    monkeypatch.setattr(start.torch.cuda, "mem_get_info", lambda: (0, round(gib * GIB)))
    monkeypatch.setattr(start, "world_size", lambda ranks: gpus)
    said: list[str] = []
    config, _ = with_chosen_way(load_config(file, device), gpus, gpus)
    config, _ = with_chosen_prefixes(config, models_of(config, "train"))
    start.with_settled_recomputation(config, RunState(), said.append)
    assert len(said) == 1 and said[0] in cells


def test_the_recipe_for_long_answers_fits_while_it_starts_and_runs(tmp_path: Path) -> None:
    """Qwen3-14B's sizes (arXiv:2505.09388, table 1); no other recipe has them."""
    sizes = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    }
    file = released_models.RECIPES / "long_answers_qwen3_14b_8gpu.yaml"
    cells = released_models.plan(
        file, "Qwen/Qwen3-4B", 8, tmp_path, head_dim=128, tie_word_embeddings=False, **sizes
    )
    assert max(released_models.sizes(cells, "sum")) <= 0.95 * GPUS["h100"].memory_gib
    planned = [file for file, _, _ in released_models.recipes()]
    assert sorted([*planned, file]) == sorted(released_models.RECIPES.glob("*gpu.yaml"))


@pytest.mark.parametrize(("file", "name", "gpus"), RECIPES)
def test_a_recipe_starts_dry(
    file: Path,
    name: str,
    gpus: int,
    tmp_path: Path,
    tiny_qwen3: Path,
    tiny_vlm: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights are the shapes alone; besides there are config.json, a small tokenizer or processor, and data."""
    config, data = yaml.safe_load(file.read_text()), tmp_path / "data"
    model = released_models.write_config(name, tmp_path / "model")
    released_models.write_weights(model)
    sees = "image_key" in config["data"]
    for part in (tiny_vlm(architecture="qwen3_vl") if sees else tiny_qwen3).iterdir():
        if part.name not in ("config.json", "model.safetensors"):
            shutil.copy(part, model)
    row = {"problem": "How many?", "solution": "<answer> 2 </answer>", "image": "a.png"}
    data.mkdir()
    picture(56, 56).save(data / "a.png")
    for split in ("train", "test"):
        text = json.dumps(row if sees else {"question": "1 + 1", "answer": "2"}) + "\n"
        (data / f"{split}.jsonl").write_text(text * (600 if sees else 1))
    words = ["--model.path", str(model), "--run.output_dir", str(tmp_path), "--data.path", str(data)]
    words += ["--data.subset", "null", "--reward.timeout_s", "300"]  # a busy machine judges slowly
    for dataset in config["eval"]["datasets"]:
        words += [
            f"--eval.datasets.{dataset}.path",
            str(data),
            f"--eval.datasets.{dataset}.subset",
            "null",
        ]
    # Adapters of mixtures are refused on a CPU
    words += ["--lora.sync", "merged"] if "lora" in config else []
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    assert main(["train", str(file), "--dry-run", *words]) == 0, capsys.readouterr().err
    assert f"path: {model}" in capsys.readouterr().out


def test_answers_take_as_much_of_the_kv_cache_as_vllm_says(tmp_path: Path) -> None:
    """gpt-oss has windows of 128 tokens in every other layer, Qwen3.5 states in three of four; two ranks halve both."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    def answer(name: str, tokens: int) -> tuple[float, dict[str, Any]]:
        model = released_models.write_config(name, tmp_path / name)
        config = recipe(model, policy={"dtype": "bfloat16"}, engine={"tensor_parallel_size": 2})
        sizes = model_sizes(config, str(model))
        return kv_answer_bytes(config, sizes, tokens), sizes.config

    def token(sizes: dict[str, Any]) -> int:
        heads, width, dtype = sizes["num_key_value_heads"] // 2, sizes["head_dim"], torch.bfloat16
        return FullAttentionSpec(
            block_size=1, num_kv_heads=heads, head_size=width, dtype=dtype
        ).page_size_bytes

    held, sizes = answer("unsloth/gpt-oss-20b-BF16", 1536)
    assert held == 12 * token(sizes) * (1536 + 128)
    assert answer("unsloth/gpt-oss-20b-BF16", 100)[0] == 24 * token(sizes) * 100
    held, sizes = answer("Qwen/Qwen3.5-9B", 1536)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(2, 16, 32, 128, 128, 4)
    state = MambaSpec(
        block_size=1, shapes=shapes, dtypes=(torch.bfloat16, torch.float32)
    ).page_size_bytes
    assert held == 8 * token(sizes) * 1536 + 24 * state


def test_host_memory_has_what_the_device_has_not(tiny_qwen3: Path) -> None:
    """By hand: bytes of a parameter of half the model, and what adapters leave of the base."""

    def host(**sections: Any) -> tuple[float, float, int, int]:
        config = recipe(tiny_qwen3, run={"device": "cuda"}, **sections)
        model = model_sizes(config, config.model.path, config.lora)
        part = host_part(config, model, 2)
        return part.generating, part.training, shard(model.trained, 2), model.total

    for policy, bytes_generating, bytes_training in (
        ({}, 0, 0),
        ({"offload": "optimizer"}, 8, 0),
        ({"offload": "all"}, 12, 0),
        ({"update_on": "host"}, 16, 16),
    ):
        generating, training, trained, _ = host(policy=policy)
        assert (generating, training) == (bytes_generating * trained, bytes_training * trained)
    generating, training, trained, total = host(
        policy={"offload": "all", "dtype": "bfloat16"}, lora={"rank": 4}
    )
    assert generating == pytest.approx(12 * trained + 2 * total / 2, rel=0.01) and training == 2 * total
    sizes = AutoConfig.from_pretrained(tiny_qwen3)
    kept = host(policy={"activation_checkpointing": "full", "offload_activations": True})[1]
    assert kept == 4 * 1000 * sizes.num_hidden_layers * sizes.hidden_size, "1,000 tokens in float32"
