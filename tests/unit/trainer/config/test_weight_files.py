"""Files that are pointers, cut, missing or something else than a model: one sentence before anything loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support.real_run import write_recipe
from trainer.cli import main
from trainer.commands.generate import engine_settings
from trainer.config.checks import check_config, find_problems
from trainer.config.model_file import embedding_rows
from trainer.config.recipe import load_config
from trainer.config.weight_files import read_header, stored_tensors
from trainer.engines import fetch_model
from trainer.errors import UserError
from trainer.policy import hf_format

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11421896\n"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING = "model.embed_tokens.weight"
Spoil = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path, tiny_qwen2: Path) -> Path:
    """Return a copy of a tied model of one file."""
    return Path(shutil.copytree(tiny_qwen2, tmp_path / "model"))


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    return write_recipe(
        tmp_path, model, run={"output_dir": str(tmp_path / "runs"), "device": "cpu", "steps": 1}
    )


def shard(model: Path) -> None:
    """Split the one file in two, with an index."""
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[:5], names[5:]), strict=True))
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, model / file, metadata={"format": "pt"})
    file_of = {name: file for file, part in parts.items() for name in part}
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def change(model: Path, **tensors: Any) -> None:
    """Add or replace tensors of the one file, `__` in a name being a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(model / WEIGHTS) | named, model / WEIGHTS, metadata={"format": "pt"})


def of_shards(spoil: Spoil) -> Spoil:
    return lambda model: (shard(model), spoil(model))


def write(name: str, content: str | bytes) -> Spoil:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda model: (model / name).write_bytes(data)


def cut(name: str) -> Spoil:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:-1])


def only(name: str, content: bytes = b"x") -> Spoil:
    """Return a folder with a file of this name in place of the weights."""
    return lambda model: (model / WEIGHTS).unlink() or write(name, content)(model)


def lose_from_a_shard(model: Path) -> None:
    tensors = load_file(model / SHARDS[1])
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, model / SHARDS[1], metadata={"format": "pt"})


def adapter_alone(model: Path) -> None:
    for file in list(model.iterdir()):
        file.unlink()
    (model / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    )


def adapters_tensors(model: Path) -> None:
    change(
        model, base_model__model__model__layers__0__self_attn__q_proj__lora_A__weight=torch.zeros(2, 64)
    )


PULL = "run `git lfs pull` in {0}, or download the model with `hf download`"
POINTS = f"is a pointer of Git LFS, not the file itself: {PULL}"
FAULTS: dict[str, tuple[Spoil, str]] = {
    "weights are a pointer": (write(WEIGHTS, POINTER), f"{{0}}/{WEIGHTS} {POINTS}"),
    "a shard is a pointer": (of_shards(write(SHARDS[1], POINTER)), f"{{0}}/{SHARDS[1]} {POINTS}"),
    "the index is a pointer": (of_shards(write(INDEX, POINTER)), f"{{0}}/{INDEX} {POINTS}"),
    "config.json is a pointer": (write("config.json", POINTER), f"{{0}}/config.json {POINTS}"),
    "tokenizer.json is a pointer": (write("tokenizer.json", POINTER), f"{{0}}/tokenizer.json {POINTS}"),
    "weights are cut": (cut(WEIGHTS), "bytes, but its header describes"),
    "a shard is cut": (of_shards(cut(SHARDS[0])), f"{{0}}/{SHARDS[0]} has"),
    "weights are empty": (
        write(WEIGHTS, b""),
        f"{{0}}/{WEIGHTS} is not a safetensors file, or is damaged",
    ),
    "weights are a web page": (
        write(WEIGHTS, "<html>" * 99),
        f"{{0}}/{WEIGHTS} is not a safetensors file",
    ),
    "a header is not JSON": (
        write(WEIGHTS, (8).to_bytes(8, "little") + b"{{{{{{{{"),
        "is not a safetensors file",
    ),
    "a header has no offsets": (
        write(WEIGHTS, (8).to_bytes(8, "little") + b'{"a": 1}'),
        "is not a safetensors file",
    ),
    "a shard is missing": (
        of_shards(lambda model: (model / SHARDS[1]).unlink()),
        f"{{0}}/{INDEX} names {SHARDS[1]}, which {{0}} lacks (1 missing): download it again",
    ),
    "a shard lacks a tensor": (
        of_shards(lose_from_a_shard),
        f"in {SHARDS[1]}, which lacks it: download the index",
    ),
    "the index is missing": (
        of_shards(lambda model: (model / INDEX).unlink()),
        f"{{0}} holds {SHARDS[0]}, but not {INDEX}, which lists the shards: download it as well",
    ),
    "the index is broken": (of_shards(write(INDEX, "{}")), f"{{0}}/{INDEX} is not an index of shards"),
    "an adapter beside a model": (
        write("adapter_config.json", "{}"),
        "{0} holds a model and, in adapter_config.json, an adapter, which would not be read: move the adapter's files",
    ),
    "an adapter's tensors in a model": (
        adapters_tensors,
        "a tensor of an adapter: name the model itself",
    ),
    "an adapter alone": (
        adapter_alone,
        "{0} is a LoRA adapter without its model: set model.path to org/base and lora.start to {0} to go on with it",
    ),
    "GGUF": (
        only("model.gguf"),
        "{0} holds GGUF, which is llama.cpp's format: name the model that it was made from",
    ),
    "pickled weights": (
        only("pytorch_model.bin"),
        "{0} holds pytorch_model.bin, but only *.safetensors are",
    ),
    "checkpoints of torch": (
        only("consolidated.00.pth"),
        "{0} holds consolidated.00.pth, but only *.safetensors",
    ),
    "no weights": (
        lambda model: (model / WEIGHTS).unlink(),
        "{0} holds no *.safetensors with the model's weights",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_not_a_model_are_named_before_anything_loads(
    recipe: Path, model: Path, fault: str
) -> None:
    spoil, sentence = FAULTS[fault]
    config = load_config(recipe, [])
    check_config(config, "train")
    spoil(model)
    for command in ("train", "sft", "eval"):
        with pytest.raises(UserError) as caught:
            check_config(config, command)  # type: ignore[arg-type]
        (line,) = caught.value.args
        assert line.startswith("model.path: ") and sentence.format(model) in line
    with pytest.raises(UserError) as caught:  # of `hotbunk generate` and `serve`
        engine_settings(str(model))
    assert sentence.format(model) in str(caught.value) and "model.path:" not in str(caught.value)


def test_a_file_in_place_of_a_folder_is_named(recipe: Path, model: Path) -> None:
    (model / "m.gguf").write_bytes(b"GGUF")
    for file, sentence in {
        "m.gguf": "holds GGUF",
        WEIGHTS: "is a file: name the folder that holds it",
    }.items():
        with pytest.raises(UserError, match=f"model.path: {model}/{file} {sentence}"):
            check_config(load_config(recipe, [f"model.path={model}/{file}"]), "train")


@pytest.mark.parametrize("key", ["algorithm.teacher", "critic.path"])
def test_the_files_of_other_models_are_looked_at_too(
    recipe: Path, model: Path, tmp_path: Path, key: str
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    preset = "distill" if key == "algorithm.teacher" else "ppo"
    config = load_config(recipe, [f"{key}={other}", f"algorithm.preset={preset}"])
    check_config(config, "train")
    cut(WEIGHTS)(other)
    with pytest.raises(
        UserError, match=f"^{key}: {other}/{WEIGHTS} has .* it is cut, so download it again"
    ):
        check_config(config, "train")
    check_config(config, "sft")
    (other / "config.json").unlink()
    with pytest.raises(UserError, match=f"^{key}: {other} is a run, or a part of one"):
        check_config(config, "train")


def test_a_tokenizer_of_its_own_may_not_be_a_pointer(recipe: Path, model: Path, tmp_path: Path) -> None:
    tokenizer = Path(shutil.copytree(model, tmp_path / "tokenizer"))
    (tokenizer / "tokenizer.json").write_text(POINTER)
    with pytest.raises(
        UserError, match=f"^model.tokenizer: {tokenizer}/tokenizer.json is a pointer of Git LFS"
    ):
        check_config(load_config(recipe, [f"model.tokenizer={tokenizer}"]), "train")


def test_a_head_beside_tied_embeddings_is_refused_where_it_differs(recipe: Path, model: Path) -> None:
    config, table = load_config(recipe, []), load_file(model / WEIGHTS)[EMBEDDING]
    change(model, lm_head__weight=table.clone())
    check_config(config, "train")
    head = table.clone()
    head[-1, -1] += 1
    for different in (head, table.bfloat16()):
        change(model, lm_head__weight=different)
        for command in ("train", "sft"):
            with pytest.raises(UserError) as caught:
                check_config(config, command)  # type: ignore[arg-type]
            assert "has lm_head.weight, which differs from the embedding, but tie_word_embed" in str(
                caught.value
            )
    check_config(config, "eval")  # the engine alone unties it
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
    check_config(config, "train")


def test_a_downloaded_model_is_checked_as_well(
    recipe: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hf_format, "snapshot_download", lambda *_, **__: str(model))
    config = load_config(recipe, ["model.path=org/model"])
    fetch_model(config)
    cut(WEIGHTS)(model)
    with pytest.raises(UserError, match="it is cut"):
        fetch_model(config)


def test_weights_of_another_name_are_refused_for_training(recipe: Path, model: Path) -> None:
    (model / WEIGHTS).rename(model / "mine.safetensors")
    config = load_config(recipe, [])
    check_config(config, "eval")  # the engine takes any name
    with pytest.raises(
        UserError, match=f"{model} has neither {WEIGHTS} nor {INDEX}, which training reads"
    ):
        check_config(config, "train")


def test_a_plan_needs_no_weights(recipe: Path, model: Path) -> None:
    (model / WEIGHTS).unlink()
    assert not find_problems(load_config(recipe, []), "train", {})


def test_headers_say_what_safetensors_itself_reads(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    content = (model / WEIGHTS).read_bytes()
    stored = read_header(model / WEIGHTS)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].shape == tuple(tensor.shape)
        data = torch.frombuffer(
            bytearray(content[stored[name].begin : stored[name].end]), dtype=tensor.dtype
        )
        assert torch.equal(data.view(tensor.shape), tensor)
    shard(model)
    assert {name: entry.shape for name, entry in stored_tensors(model).items()} == {
        name: entry.shape for name, entry in stored.items()
    }
    assert embedding_rows(str(model)) == tensors[EMBEDDING].shape[0]


@pytest.mark.parametrize("fault", ["missing", "fewer rows"])
def test_tensors_that_do_not_fit_config_json_are_named_dry(
    recipe: Path, model: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    tensors = load_file(model / WEIGHTS)
    rows, width = tensors[EMBEDDING].shape
    if fault == "missing":
        del tensors["model.norm.weight"]
        sentence = f"{model} has no tensor model.norm.weight, which the model in its config.json needs"
    else:
        tensors[EMBEDDING] = tensors[EMBEDDING][:-1].clone()
        needed = (
            f"but the model in its config.json needs [{rows}, {width}]: correct the one or the other"
        )
        sentence = f"{EMBEDDING} in {model} has shape [{rows - 1}, {width}], {needed}"
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    assert main(["train", str(recipe), "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


def tokenizer_with(model: Path, folder: Path, *tokens: str, template: str = "", **ends: str) -> Path:
    """Return a tokenizer like the model's with further tokens, in a folder of its own."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(list(tokens))
    for name, token in ends.items():
        setattr(tokenizer, name, token)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def refusal(
    capsys: pytest.CaptureFixture[str], recipe: Path, *overrides: str, command: str = "train"
) -> str:
    assert main([command, str(recipe), *overrides, "--dry-run"]) in (0, 2)
    return "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("hotbunk: "))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_tokens_without_an_embedding_are_named_where_they_occur(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    rows = embedding_rows(str(model)) or 0
    count = rows - len(AutoTokenizer.from_pretrained(model)) + 1
    added = [f"<new{number}>" for number in range(count)]
    larger = tokenizer_with(model, tmp_path / "larger", *added)
    new = f"'{added[-1]}' with the id {rows}, but the embedding of {model} has {rows} rows: name the model's own in"
    data = tmp_path / "new.jsonl"
    data.write_text(
        json.dumps({"prompt": "1+1=", "answer": "2"})
        + "\n"
        + json.dumps({"prompt": f"2{added[-1]}", "answer": "3"})
        + "\n"
    )
    usual = refusal(capsys, recipe, "--model.tokenizer", str(larger), command=command)
    assert usual == ""  # nothing has the token
    inside = refusal(
        capsys, recipe, "--model.tokenizer", str(larger), "--data.path", str(data), command=command
    )
    assert f"row 1 of {data} holds {new}" in inside
    tokenizer_with(model, model, *added)
    assert f"row 1 of {data} holds {new}" in refusal(
        capsys, recipe, "--data.path", str(data), command=command
    )


@pytest.mark.parametrize("use", ["template", "eos_token", "bos_token", "pad_token"])
def test_a_tokenizer_that_needs_tokens_without_an_embedding_is_refused(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str
) -> None:
    rows = embedding_rows(str(model)) or 0
    count = rows - len(AutoTokenizer.from_pretrained(model)) + 1
    added = [f"<new{number}>" for number in range(count)]
    uses = (
        {"template": f"{{{{ messages[0].content }}}}{added[-1]}"}
        if use == "template"
        else {use: added[-1]}
    )
    larger = tokenizer_with(model, tmp_path / "larger", *added, **uses)
    line = refusal(capsys, recipe, "--model.tokenizer", str(larger))
    needs = f"the tokenizer of {larger} needs '{added[-1]}' with the id {rows}, but the embedding of {model} has {rows}"
    assert (needs in line) == (use != "pad_token") and bool(line) == (use != "pad_token")
