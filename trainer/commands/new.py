"""`hotbunk new`: write a recipe, a reward and data to begin with."""

import argparse
import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from generation.engine.devices import cuda_problem
from trainer.config.section import path_argument
from trainer.errors import UserError
from trainer.estimates.gpus import GPUS
from trainer.run.screen import Progress, own_command

REWARD = '''\
def asked_for(completion: str, *, answer: str) -> float:
    """Share of the completion's characters that occur in the answer."""
    return sum(character in answer for character in completion) / max(1, len(completion))
'''
ROWS = [
    {"prompt": "digits, please", "answer": "0123456789"},
    {"prompt": "vowels, please", "answer": "aeiou"},
    {"prompt": "capital letters, please", "answer": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
]
RECIPE = """\
# Every key with its meaning: hotbunk train --help
run: {{name: {name}, steps: 40}}
model: {{path: {model}}}  # a folder in Hugging Face format, or a hub name
data: {{path: {data}, max_prompt_tokens: {prompt}}}
sampling: {{max_tokens: {answer}}}
engine: {{max_model_len: {length}, {engine}}}
policy: {{{policy}}}{further}
algorithm: {{group_size: {group}}}
batch: {{prompts_per_step: 3}}
checkpoint: {{every: 10}}  # the same command continues from here after Ctrl-C
reward: {{functions: [{reward}]}}
"""
TINY = {
    "prompt": 64,
    "answer": 8,
    "length": 128,
    "group": 16,
    "engine": "kv_cache_gib: 0.0625, plain_cpu_weights: true",
    "policy": "dtype: float32, lr: 5.0e-4",
    "further": "",
}
RELEASED = {
    "prompt": 256,
    "answer": 64,
    "length": 512,
    "group": 8,
    "engine": "kv_cache_gib: 1",
    "policy": "lr: 2.0e-6",
    "further": "",
}

ALL_WEIGHTS = {"policy": "lr: 2.0e-6"}
ON_HOST = {"policy": "lr: 2.0e-6, update_on: host"}
ADAPTERS = {"policy": "lr: 2.0e-5", "further": "\nlora: {rank: 32}"}
ADAPTERS_ON_HOST = ADAPTERS | {"policy": "lr: 2.0e-5, update_on: host"}
LADDER = (ALL_WEIGHTS, ON_HOST, ADAPTERS, ADAPTERS_ON_HOST)
"""Settings to try in this order: each needs less of a device than the one before, and is slower or
trains less.
"""
CACHE_SHARE = 0.9  # of a device, up to which the KV cache is enlarged
NODE = (1, 2, 4, 8)  # numbers of GPUs that are tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Write recipe.yaml, reward.py and data.jsonl to a folder. The recipe can be trained at once, "
        "and all three are meant to be changed. Without --model a tiny model is made, too, which "
        "trains on two CPU cores in a minute."
    )
    parser.add_argument(
        "folder", type=path_argument, help="folder for the files; it may exist, but not the files"
    )
    parser.add_argument(
        "--model", help="folder in Hugging Face format, or a hub name, to train instead of a tiny one"
    )
    kind = "kind of GPU that the recipe for --model is to fit (default: this machine's, if it has one)"
    parser.add_argument("--gpu", choices=GPUS, help=kind)


def main(arguments: argparse.Namespace) -> int:
    """Write the files, and print the commands to use them with. Raises UserError if one of the
    files exists.
    """
    folder: Path = arguments.folder
    names = ["recipe.yaml", "reward.py", "data.jsonl"]
    if arguments.model is None:
        names.append("model")
    if there := next((folder / name for name in names if (folder / name).exists()), None):
        raise UserError(f"{there} exists already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from error
    if arguments.model is None:
        with Progress(0, enabled=True).follow(lambda: "making a tiny model"):
            # Transformers loads DeepSpeed, which warns without a GPU
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            from transformers.utils import logging

            from trainer.commands.tiny_model import make_tiny_model

            logging.disable_progress_bar()
            make_tiny_model(folder / "model")
    paths = {"data": folder / "data.jsonl", "reward": f"{folder / 'reward.py'}:asked_for"}
    paths |= {"model": arguments.model or folder / "model"}
    paths |= {"name": re.sub(r"[^\w.-]|^\.+", "-", folder.resolve().name, flags=re.ASCII) or "new"}
    texts = {name: json.dumps(str(path)) for name, path in paths.items()}
    (folder / "reward.py").write_text(REWARD, "utf-8")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    recipe = folder / "recipe.yaml"
    keys, sentence = (TINY, "") if arguments.model is None else fitted(texts, arguments.gpu)
    recipe.write_text(RECIPE.format(**texts, **keys), "utf-8")
    if sentence:
        print(sentence)
    print(f"{folder} now has {', '.join(names)}. To train, and to look at the result:\n")
    print(f"  {own_command()} train {shlex.quote(str(recipe))}")
    print(f"  {own_command()} report runs/{paths['name']}")
    print(f"  {own_command()} generate runs/{paths['name']} --prompt 'digits, please'")
    return 0


def fitted(texts: dict[str, str], kind: str | None) -> tuple[dict[str, Any], str]:
    """Return keys of a recipe that fits a GPU, and a sentence about what it was planned for.

    The first settings of `LADDER` that fit are taken, on as few GPUs as possible, with the KV cache
    that is left room for. `kind` is one of `GPUS`; None means this machine's.
    """
    if kind is None and cuda_problem() is not None:
        return (
            RELEASED,
            "The recipe was fitted to no GPU, as there is none here: --gpu names the kind to fit it to.",
        )
    from trainer.estimates.fitting import TIGHT, planned_gib, this_device  # slow to import

    name, gib = this_device() if kind is None else (kind, GPUS[kind].memory_gib)
    for gpus, settings in itertools.product(NODE, LADDER):
        for engine_ranks in sorted({1, gpus}):
            split = "" if engine_ranks == 1 else f", tensor_parallel_size: {engine_ranks}"
            keys = RELEASED | settings | {"engine": "kv_cache_gib: 1" + split}
            try:
                sums = planned_gib(yaml.safe_load(RECIPE.format(**texts, **keys)), gpus, gib)
            except UserError as error:
                return (
                    RELEASED,
                    f"The recipe was fitted to no GPU, since nothing can be planned: {error}",
                )
            if max(sums.values()) > TIGHT * gib:
                continue
            cache = 1 + max(0, int(CACHE_SHARE * gib - sums["generating"]))
            keys["engine"] = f"kv_cache_gib: {cache}{split}"
            start = f" Start it with NPROC_PER_NODE={gpus}." if gpus > 1 else ""
            return keys, f"By its plan the recipe fits {gpus} x {name} ({gib:.1f} GiB).{start}"
    return (
        RELEASED,
        f"The recipe does not fit {NODE[-1]} x {name}, not even with adapters alone: use more GPUs.",
    )
