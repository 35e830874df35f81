#!/usr/bin/env python3
"""Try model families with tiny random checkpoints, and write the table of docs/models.md.

    python scripts/try_models.py [FAMILY ...] [--results runs/models.jsonl] [--write docs/models.md]

Each family of tests/support/families.py is a process of its own, which adds one line to the results. A line has:

    refused   why nothing of the family can be trained; else
    padded    the largest difference between log-probabilities of padded sequences and plain Transformers', nats
    packed    the same for a pack, or why packing is refused
    leak      the largest change in a pack's other sequences when the first is replaced, nats
    sharing, lora, routes   "ok", or why sequence parallelism, lora.target_modules: all-linear, model.routes are refused
    gaps      an engine's mean and largest difference from the trainer after the first sync and after a step of AdamW
    p95       the 95th percentile of both together
    dense     in bfloat16: the same percentile of a dense model, Qwen3, of that width and depth in bfloat16
    dtype     the engine's, float32 unless vLLM's CPU build has none for the family
    engine    why no engine starts, or a sync is not verified

Without FAMILY all are tried, some 20 minutes on two cores. `--write` only draws the families of the results into the
table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
LENGTHS = [60, 20, 17, 9]
SECONDS = 300
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
Row = dict[str, Any]

KNOWN = {
    "deepseek_v4": "Transformers attends eagerly only, which cannot be packed, and vLLM's class of its configuration "
    "refuses the mlp_layer_types that Transformers writes",
    "gemma3n": "vLLM does not compute its inputs per layer, so that the gap is wide once they matter",
    "glm5_next": "Transformers has its class for images alone, and vLLM's sparse attention no code for CPUs "
    "(read, not run)",
    "longcat_flash": "vLLM refuses the weights that Transformers has for experts that compute nothing",
    "qwen4_exp": "sequences of a pack would not be kept apart in its indexed attention, and vLLM has no code of "
    "it for CPUs (read, not run)",
}
"""Family -> the reason why it does not train, where errors do not say it in a sentence."""


def reason(error: BaseException) -> str:
    """Return the first line of an error, with its type unless it is meant for users."""
    text = " ".join(str(error).split())[:400]
    return (
        text
        if type(error).__name__ in ("UserError", "RemoteError")
        else f"{type(error).__name__}: {text}"
    )


def outcome(check: Callable[[], object]) -> str:
    """Return "ok", or the reason why a check fails."""
    try:
        check()
    except Exception as error:  # a model's own code may raise anything
        return reason(error)
    return "ok"


def try_family(family: str) -> Row:
    """Return the line of one family."""
    row: Row = {"family": family, "date": datetime.now(UTC).date().isoformat()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            from tests.support.families import make_family

            row["class"] = type(make_family(family, folder)).__name__
        except Exception as error:  # Transformers' own
            return row | {"refused": f"no tiny checkpoint: {reason(error)}"}
        try:
            row |= _trainer(folder)
            row |= _engine(folder, "leak" in row)
            if row["dtype"] == "bfloat16" and "p95" in row:
                make_family("qwen3", folder / "dense")
                row["dense"] = _engine(folder / "dense", True, "bfloat16")["p95"]
            return row
        except Exception as error:
            return row | {"refused": reason(error).removeprefix(f"{folder}: ")}


def _samples(first: int) -> list[Any]:
    import torch

    from trainer.types import Sample

    seeds = [first, *range(100, 99 + len(LENGTHS))]
    ids = [
        torch.randint(4, 270, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        for length, seed in zip(LENGTHS, seeds, strict=True)
    ]
    return [Sample(tokens, [1] * len(tokens), [0.0] * len(tokens)) for tokens in ids]


def _settings(folder: Path) -> Any:
    """Return the settings of the model, with eager attention if it has no other."""
    import torch

    from trainer.config.schema import ModelConfig
    from trainer.policy.hf_format import build_meta_model

    settings = ModelConfig(path=str(folder))
    built = outcome(lambda: build_meta_model(folder, settings, torch.float32, torch.device("cpu")))
    return (
        ModelConfig(path=str(folder), attn_implementation="eager")
        if "set it to eager" in built
        else settings
    )


def _policy(folder: Path) -> Any:
    import torch

    from trainer.config.schema import PolicyConfig
    from trainer.policy.fsdp import FsdpPolicy

    return FsdpPolicy(_settings(folder), PolicyConfig(dtype="float32", lr=1e-3), torch.device("cpu"))


def _scores(policy: Any, samples: list[Any], packing: bool) -> list[Any]:
    """Return each sample's log-probabilities of its targets."""
    from trainer.learning.batching import micro_batches

    (batch,) = micro_batches(samples, 10**6, 0, "cpu", 1, packing=packing)
    table = policy.score([batch], 1.0)[0].logprobs
    places = {number: row for row, number in enumerate(batch.rows)}
    return [table[places[n], : len(s.input_ids) - 1] for n, s in enumerate(samples)]


def _trainer(folder: Path) -> Row:
    """Try what the trainer does by itself."""
    import torch
    from transformers import AutoConfig

    from trainer.config.schema import LoraConfig
    from trainer.policy.attention import require_packing, require_sharing
    from trainer.policy.hf_format import build_meta_model, model_kind
    from trainer.policy.lora import add_adapters
    from trainer.policy.routing import asked_routers

    policy, samples, row = _policy(folder), _samples(1), dict[str, Any]()
    plain = model_kind(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
    if plain.config._attn_implementation == "sdpa":  # which leaves out soft caps of attention's scores
        plain.set_attn_implementation("eager")
    plain.eval()
    with torch.no_grad():
        alone = []
        for sample in samples:
            ids = torch.tensor([sample.input_ids])
            log_p = plain(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            alone.append(log_p.gather(1, ids[0, 1:, None])[:, 0])

    def furthest(ones: list[Any], others: list[Any]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(ones, others, strict=True))

    row["padded"] = furthest(_scores(policy, samples, packing=False), alone)
    row["packed"] = outcome(lambda: require_packing(policy.model))
    if row["packed"] == "ok":
        packed = _scores(policy, samples, packing=True)
        row["packed"] = furthest(packed, alone)
        row["leak"] = furthest(packed[1:], _scores(policy, _samples(2), packing=True)[1:])
    settings = _settings(folder)

    def meta() -> Any:
        return build_meta_model(folder, settings, torch.float32, torch.device("cpu"))

    row["sharing"] = outcome(lambda: require_sharing(meta()))
    row["lora"] = outcome(lambda: add_adapters(meta(), LoraConfig(rank=4), torch.float32, "meta"))
    row["routes"] = outcome(lambda: asked_routers(meta(), "recorded"))
    return row


def _engine(folder: Path, packing: bool, asked: str | None = None) -> Row:
    """Try two syncs of a real engine, with a step of AdamW between them."""
    import torch

    from generation.engine.sampling import SamplingSettings
    from tests.support.colocated import Colocated
    from trainer.build import weight_source
    from trainer.config.model_file import model_config

    row: Row = {
        "dtype": asked
        or ("bfloat16" if model_config(str(folder)).get("linear_key_head_dim") else "float32")
    }
    dtype = getattr(torch, row["dtype"])
    prompts = [list(range(20 + 10 * n, 25 + 10 * n + 5 * (n % 2))) for n in range(8)]
    try:
        policy = _policy(folder)
        with Colocated(folder, dtype=dtype, policy=policy, source=weight_source(policy, dtype)) as both:
            both.manager.sleep()
            row["gaps"], differences = [], []
            for seed in (0, 1):
                with both.manager.generation_shift(policy):
                    row["verified"] = both.manager.report.verified
                    answers = [both.complete(p, SamplingSettings(max_tokens=24), seed) for p in prompts]
                differences.append(_differences(policy, prompts, answers, packing))
                row["gaps"].append([float(differences[-1].mean()), float(differences[-1].max())])
                _learn(policy, packing)
            row["p95"] = float(torch.cat(differences).quantile(0.95))
    except Exception as error:
        row["engine"] = reason(error)
    return row


def _differences(policy: Any, prompts: list[list[int]], answers: list[Any], packing: bool) -> Any:
    """Return the absolute differences between the engine's and the trainer's log-probabilities, of all answers."""
    import torch

    from trainer.types import Sample

    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, known = prompt + answer.token_ids, [0] * len(prompt)
        samples.append(
            Sample(ids, known + [1] * len(answer.token_ids), [0.0] * len(prompt) + answer.logprobs)
        )
    scores = _scores(policy, samples, packing)
    return torch.cat(
        [
            (score[len(p) - 1 :] - torch.tensor(answer.logprobs)).abs()
            for score, p, answer in zip(scores, prompts, answers, strict=True)
        ]
    )


def _learn(policy: Any, packing: bool) -> None:
    from trainer.learning.batching import micro_batches

    batches = micro_batches(_samples(3), 10**6, 0, "cpu", 1, packing=packing)
    policy.update(batches, lambda batch, outputs: (-outputs.logprobs.sum() / 100, {}), 1.0)


def cell(value: Any) -> str:
    """Return a figure or an outcome for the table."""
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.0e}"
    return "yes" if value == "ok" else "–" if value is None else "no"


HEADER = [
    "| family | class | packed | leak | gap in step 1, 2 | engine | sequence parallel | LoRA | routes |",
    "|---|---|---|---|---|---|---|---|---|",
]


def line(row: Row) -> str:
    """Return a family's line in the table of docs/models.md."""
    gaps = ", ".join(f"{largest:.0e}" for _, largest in row.get("gaps") or ()) or "–"
    trained = {name: cell(row.get(name)) for name in ("packed", "leak", "sharing", "lora", "routes")}
    dense = "no router" if "has no experts" in str(row.get("routes")) else trained["routes"]
    return (
        f"| {row['family']} | {row.get('class', '–')} | {trained['packed']} | {trained['leak']} | {gaps} | "
        f"{row.get('dtype', '–')} | {trained['sharing']} | {trained['lora']} | {dense} |"
    )


def reasons(row: Row) -> list[str]:
    """Return the lines below the table that say why something is refused."""
    if row["family"] in KNOWN:
        return [f"- {row['family']}: {KNOWN[row['family']]}"]
    texts = [row.get(key) for key in ("refused", "packed", "engine", "lora", "routes")]
    given = dict.fromkeys(text for text in texts if isinstance(text, str) and text != "ok")
    if "dense" in row:
        width = f"{row['p95'] / row['dense']:.1f} × the {row['dense']:.1e} of a dense model of its width"
        given |= {f"in bfloat16, 95 % of the gaps are at most {row['p95']:.1e}, {width}": None}
    return [f"- {row['family']}: {text}" for text in given if "has no experts" not in text]


def write(page: Path, rows: list[Row]) -> None:
    """Replace the families' lines between the marks of the page, and keep those of other families."""
    begin, end = "<!-- scripts/try_models.py -->\n", "<!-- the end of the table -->\n"
    text = page.read_text("utf-8")
    first, last = text.index(begin) + len(begin), text.index(end)
    lines, notes = dict[str, str](), dict[str, list[str]]()
    for old in text[first:last].splitlines():
        if old.startswith("| ") and old not in HEADER:
            lines[old.split("|")[1].strip()] = old
        elif old.startswith("- "):
            notes.setdefault(old[2:].partition(":")[0], []).append(old)
    lines |= {row["family"]: line(row) for row in rows}
    notes |= {row["family"]: reasons(row) for row in rows}
    why = [note for _, some in sorted(notes.items()) for note in some]
    table = [*HEADER, *(one for _, one in sorted(lines.items())), "", "Reasons:", "", *why]
    page.write_text(text[:first] + "\n".join(table) + "\n" + text[last:], "utf-8")


def main() -> int:
    """Try the families, or draw the table. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "runs/models.jsonl", help="file of results, added to"
    )
    parser.add_argument(
        "--write", type=Path, help="page in whose table the latest line of each family is drawn"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _one(options.families[0], options.results)
    if options.write:
        lines = map(json.loads, options.results.read_text("utf-8").splitlines())
        write(options.write, list({row["family"]: row for row in lines}.values()))
        return 0
    from tests.support.families import FAMILIES

    options.results.parent.mkdir(parents=True, exist_ok=True)
    for family in options.families or FAMILIES:
        start = time.monotonic()
        command = [sys.executable, __file__, family, "--one", "--results", str(options.results)]
        try:
            code = subprocess.run(command, timeout=SECONDS, env=os.environ | ENVIRONMENT).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            row = {
                "family": family,
                "refused": f"no result after {SECONDS} s" if code < 0 else f"exit {code}",
            }
            _add(options.results, row)
        print(f"{family}: {time.monotonic() - start:.0f} s", flush=True)
    return 0


def _one(family: str, results: Path) -> int:
    from generation.engine.vllm_compat import fork_engines
    from trainer.distributed import destroy_process_group, init_process_group

    stop = fork_engines()
    init_process_group(SECONDS, "cpu")
    row = try_family(family)
    destroy_process_group()
    stop()
    _add(
        results,
        row | {name: sys.modules[name].__version__ for name in ("vllm", "transformers", "torch")},
    )
    return 0


def _add(results: Path, row: Row) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
