#!/usr/bin/env python3
"""Messages, bytes and files of one rank in a step, by the number of ranks: 1, 2 and 4 real ones, and simulated ones.

    PYTHONPATH=. python scripts/bench/scale.py [--ranks 1,2,4,64,512,4096] [--write docs/scale.md]

Each rank brings as many answers to a step as any other, so that the step grows with the ranks and a rank's share of it
does not. `scale_run.py` says what is counted, and how ranks are simulated. For FSDP2 the figures are those that
`hotbunk plan` computes with, which tests compare with real collectives.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import scale_run
from transformers import Qwen2Config

from tests.support import forked
from tests.support.launch import run_ranks
from trainer.config.schema import PolicyConfig, TrainConfig
from trainer.estimates.model_sizes import ModelSizes, model_sizes
from trainer.estimates.time import update_traffic

REAL = (1, 2, 4)
RANKS = (*REAL, 64, 512, 4096)
CONTROL = ("agree", "exchange", "all_reduce_sum", "all_reduce_max", "allreduce_objects")
"""The functions of `sharding.ranks` whose messages settle what all ranks do next."""
BEGIN, END = "<!-- made by scripts/bench/scale.py -->", "<!-- end of what it made -->"


def counts_of(folder: Path, ranks: list[int]) -> list[dict[str, Any]]:
    """Count with real ranks where there are few, else with rank 0 alone, which simulates the others."""
    counts: list[dict[str, Any]] = []
    for number in (number for number in ranks if number in REAL):
        run_ranks(
            scale_run.really,
            number,
            scale_run.DEADLINE,
            [str(folder), str(output := folder / f"{number}.json")],
        )
        counts.append(json.loads(output.read_text()))
    if simulated := [str(number) for number in ranks if number not in REAL]:
        output = folder / "simulated.json"
        command = [
            sys.executable,
            __file__,
            "--simulated",
            str(folder),
            ",".join(simulated),
            str(output),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        counts += json.loads(output.read_text())
    return counts


def qwen(folder: Path) -> ModelSizes:
    """Return the sizes of Qwen2.5-7B."""
    sizes = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    }
    shape: dict[str, Any] = sizes | {
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    Qwen2Config(architectures=["Qwen2ForCausalLM"], **shape).save_pretrained(folder)
    return model_sizes(
        TrainConfig.model_validate({"model": {"path": str(folder)}, "data": {"path": "d"}}), str(folder)
    )


def table(columns: list[dict[str, Any]], model: ModelSizes) -> str:
    """Return all figures as a table in Markdown, with a column for each number of ranks."""

    def bytes_of(*kinds: str) -> Callable[[dict[str, Any]], str]:
        return lambda c: size(sum(c["step"].get(kind, (0, 0, 0))[2] for kind in kinds))

    def tensors(c: dict[str, Any], policy: PolicyConfig) -> str:
        volume = update_traffic(policy, model, c["ranks"], 1)
        shards = (
            policy.shard_size if policy.shard_size and c["ranks"] > policy.shard_size else c["ranks"]
        )
        return size((volume.gathered + volume.scattered) * (shards - 1) // shards)

    bf16, rows = PolicyConfig(dtype="bfloat16", activation_checkpointing="full"), model.shapes.values()
    by_eight = bf16.model_copy(update={"shard_size": 8})
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "": lambda c: f"{c['ranks']:,}",
        "control messages, sent and received": lambda c: str(
            sum(c["step"].get(k, [0])[0] for k in CONTROL)
        ),
        "bytes of control messages": bytes_of(*CONTROL),
        "rows of all answers": bytes_of("send_to_all"),
        "samples to train on": bytes_of("all_to_all_bytes"),
        "Qwen2.5-7B: weights and gradients, a micro-batch": lambda c: tensors(c, bf16),
        "the same with policy.shard_size: 8": lambda c: tensors(c, by_eight) if c["ranks"] >= 8 else "",
        "Qwen2.5-7B: weights, a sync": lambda c: size(
            sum(2 * math.ceil(s[0] / c["ranks"]) * math.prod(s[1:]) for s in rows) * (c["ranks"] - 1)
        ),
        "rank 0: extra host memory": lambda c: size(max(0, c["peak"] - columns[0]["peak"])),
        "rank 0: seconds of the step": lambda c: f"{c['seconds']:.1f}",
        "files of a checkpoint": lambda c: f"{c['files']:,}",
        "rank 0: table of a checkpoint": lambda c: size(c["table"]),
        "rank 0: seconds to write it": lambda c: f"{c['writing']:.1f}",
    }
    body = [f"| {name} | {' | '.join(line(c) for c in columns)} |" for name, line in lines.items()]
    return "\n".join([body[0], "|---" + "|---:" * len(columns) + "|", *body[1:]])


def size(nbytes: float) -> str:
    """Return a number of bytes in the first unit in which it is below 1,000, as in 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if nbytes >= 10 or unit == "B" else f"{nbytes:.1f} {unit}"


def main() -> None:
    """Count, and print the table or write it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", default=",".join(map(str, RANKS)), help="real ones up to 4, simulated beyond"
    )
    parser.add_argument("--write", type=Path, help="a page that has a table between two marks")
    parser.add_argument("--simulated", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulated:
        scale_run.simulate(*options.simulated)
        return
    forked.start_server()  # the real ranks are forked from them
    with tempfile.TemporaryDirectory() as folder:
        scale_run.make_inputs(Path(folder))
        columns = counts_of(Path(folder), [int(number) for number in options.ranks.split(",")])
        made = table(columns, qwen(Path(folder) / "qwen"))
    print(made)
    if options.write:
        before, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
