"""`hotbunk plan`: what a recipe needs and what stands against it."""

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.table import Column, Table

from generation.engine.devices import cuda_problem
from generation.engine.images import KEPT_BYTES
from trainer.config.checks import find_problems
from trainer.config.machine import host_gib, rank_count, resolve_device
from trainer.config.model_file import EXPERT_KEYS, model_config
from trainer.config.placement import engine_workers, generating_ranks, training_ranks
from trainer.config.recipe import load_config
from trainer.config.schema import TrainConfig
from trainer.config.slices import oldest_age, prompts_ahead
from trainer.config.ways import local_ranks, with_chosen_way
from trainer.errors import UserError
from trainer.estimates.gpus import GPUS, Gpu
from trainer.estimates.layouts import comparison
from trainer.estimates.memory import GIB, engine_parts, over_budget, trainer_parts
from trainer.estimates.model_sizes import ModelSizes, answers_per_update, longest, model_sizes
from trainer.estimates.time import Lengths, step_costs, step_flops
from trainer.run.screen import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.description = (
        "Show ranks, engines, the arithmetic of a step and the memory of a device, worked out from the model's "
        "config.json: no weights and no data are loaded. What would be refused is said last, and makes exit code 2."
    )
    parser.add_argument("recipe", type=Path, help="YAML file; keys are overridden by --section.key value")
    parser.add_argument("--ranks", type=int, help="how many there would be (default: $WORLD_SIZE, or 1)")
    kind = "plan for this kind, and say how long a step would take, by a model"
    parser.add_argument("--gpu", choices=GPUS, help=kind)
    parser.add_argument("--prompt-tokens", type=float, help="of a prompt on average (default: half of the most)")
    parser.add_argument("--answer-tokens", type=float, help="of an answer on average (default: half of the most)")
    parser.add_argument("--device-gib", type=float, help="memory of a device (default: of the one that is here)")


def main(arguments: argparse.Namespace) -> int:
    """Show the plan, then raise UserError with the objections to it, if there are any."""
    ranks = rank_count(os.environ) if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise UserError("--ranks must be at least 1")
    gpu = GPUS.get(arguments.gpu)
    device = [] if gpu is None else ["run.device=cuda"]  # wherever the plan is made
    config = load_config(arguments.recipe, [*arguments.overrides, *device])
    problems = find_problems(config, "train", os.environ | {"WORLD_SIZE": str(ranks)})
    if gpu is not None:
        problems = [problem for problem in problems if not problem.startswith("run.device")]
    if any(problem.startswith("model.path") and "*.safetensors" not in problem for problem in problems):
        raise UserError(*problems)  # nothing can be worked out without the model's sizes
    config, _ = with_chosen_way(config, ranks, local_ranks(os.environ, ranks))
    total = arguments.device_gib or (gpu.memory_gib if gpu else None)
    if total is None:
        cuda = resolve_device(config) == "cuda" and cuda_problem() is None
        total = torch.cuda.mem_get_info()[1] / GIB if cuda else host_gib()
    console = make_console()
    table = Table(title=f"{config.run.name}: {config.model.path}", title_justify="left", show_header=False)
    for line in batch_lines(config, ranks):
        table.add_row(*line)
    console.print(table)
    model = model_sizes(config, config.model.path, config.lora)
    training = training_ranks(config, ranks)
    console.print(memory_table(config, model, training, total))
    if gpu is not None:
        lengths = answer_tokens(config, arguments)
        console.print(seconds_table(config, model, ranks, gpu, lengths))
        for sentence in comparison(config, model, ranks, gpu, lengths) if ranks > 1 else ():
            console.print(sentence)
    if resolve_device(config) == "cuda":
        problems += over_budget(config, model, training, total)
    if problems:
        raise UserError(*problems)
    return 0


def batch_lines(config: TrainConfig, ranks: int) -> Iterator[tuple[str, str]]:
    """The arithmetic of a step."""
    batch, algorithm, training = config.batch, config.algorithm, training_ranks(config, ranks)
    engines = engine_workers(config, ranks) // config.engine.tensor_parallel_size
    answers, share = batch.prompts_per_step * algorithm.group_size, answers_per_update(config, training)
    flying = answers + prompts_ahead(config) * algorithm.group_size
    updates = batch.updates_per_step * algorithm.num_iterations
    largest = math.ceil(share / max(1, batch.tokens_per_micro_batch // longest(config)))
    generating = generating_ranks(config)
    apart = f", of which {generating} only generate" if generating else ""
    yield "ranks", f"{ranks}, on {resolve_device(config)}{apart}"
    yield "engines", f"{engines} of {config.engine.tensor_parallel_size} rank(s)"
    yield "answers a step", f"{batch.prompts_per_step} prompts x {algorithm.group_size} = {answers}"
    if config.rollout.slice_tokens is not None:
        age = f"each begins at most {oldest_age(config)} step(s) before it is trained"
        yield "answers in flight", f"{flying} with rollout.ahead; {age}"
    yield "answers an engine", f"{math.ceil(flying / max(engines, 1))}, {config.engine.max_num_seqs} at a time"
    yield "tokens a step", f"at most {answers * longest(config):,}, prompts included"
    if config.model.routes == "engine":
        rows, copies = answers * longest(config) * route_bytes(config.model.path), 2 / max(engines, 1) + 2 / training
        yield "routes", f"at most {rows * copies / GIB:.2f} GiB of a rank's host memory, {rows / GIB:.2f} a step"
    if most := config.data.max_images:
        pixels = 3 * 4 * config.data.max_image_pixels / GIB  # of three colours in float32
        host = min(share * most * pixels, batch.prompts_per_step * most * pixels)
        kept = KEPT_BYTES / GIB
        yield "images", f"at most {answers * most:,} a step; {pixels:.3f} GiB each as the model takes it"
        yield "images in host memory", f"at most {host:.2f} GiB of a rank's share, and {kept:.2f} of an engine's"
        rollout, episode = config.rollout, config.rollout.max_image_mib / 1024
        if rollout.tools or rollout.mcp or rollout.code:
            begun, trained = math.ceil(flying / max(engines, 1)), math.ceil(answers / max(training, 1))
            asking = min(begun, config.engine.max_num_seqs + algorithm.group_size) * (rollout.client is not None)
            came = f"at most {begun * episode:.2f} GiB of an engine's episodes, "
            came += f"{3 * asking * episode:.2f} of requests to its server, in base64, "
            yield "images that come up", came + f"and {trained * episode:.2f} of a rank that trains"
    yield "updates", f"{updates} a step, {updates * config.run.steps} in {config.run.steps} steps"
    ways = config.policy.sequence_parallel
    who = "rank" if ways == 1 else f"{ways} ranks that share them"
    yield f"answers an update and {who}", f"{share}, in at most {largest} micro-batch(es)"


def route_bytes(path: str) -> int:
    """Bytes of a token's row of routes, as an engine gives it, with layers that have no experts.

    A leader holds the rows of its answers, and packs them for the ranks that train on them; each of those holds its
    own as they came, and in micro-batches.
    """
    model = model_config(path)
    experts = next((model[key] for key in EXPERT_KEYS if model.get(key)), 0)
    return int(model["num_hidden_layers"] * model.get("num_experts_per_tok", 1) * (1 if experts <= 256 else 2))


def memory_table(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> RenderableType:
    """All parts and their sums, which a CPU's ranks share and a CUDA device has to itself."""
    parts = [*trainer_parts(config, model, ranks, device_gib), *engine_parts(config, model, ranks, device_gib)]
    columns = [Column(heading, justify="right") for heading in ("generating", "training")]
    title = f"GiB of a rank; {model.total:,} parameters"
    table = Table("", *columns, "", title=title, title_justify="left", header_style="bold")
    for part in parts:
        table.add_row(part.name, _gib(part.generating), _gib(part.training), part.remark)
    table.add_section()
    of = f"of {device_gib:.1f} GiB" if resolve_device(config) == "cuda" else f"times {ranks}, of {device_gib:.1f} GiB"
    table.add_row("sum", _gib(sum(p.generating for p in parts)), _gib(sum(p.training for p in parts)), of)
    return table


def answer_tokens(config: TrainConfig, arguments: argparse.Namespace) -> Lengths:
    """Assumed average lengths of prompts and answers: half of the longest by default."""
    most = {"prompt": config.data.max_prompt_tokens, "answer": config.sampling.max_tokens}
    found = {name: getattr(arguments, f"{name}_tokens") or limit / 2 for name, limit in most.items()}
    for name, value in found.items():
        if not 1 <= value <= most[name]:
            raise UserError(f"--{name}-tokens is {value:g}, but the recipe has 1 to {most[name]} of them")
    return Lengths(**found)


def seconds_table(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> RenderableType:
    """All parts of a step, their sum, and the share of the peak it reaches."""
    costs = step_costs(config, model, ranks, gpu, lengths)
    title = f"Seconds of a step, modelled; prompts of {lengths.prompt:g} and answers of {lengths.answer:g} tokens"
    columns = [Column(heading, justify="right") for heading in ("seconds", "overlapped")]
    table = Table("", *columns, "", title=title, title_justify="left", header_style="bold")
    for cost in costs:
        table.add_row(cost.name, f"{cost.seconds:.2f}", f"{cost.hidden:.2f}" if cost.hidden else "", cost.remark)
    flops = step_flops(config, model, ranks, lengths) / gpu.flops
    whole = sum(cost.seconds for cost in costs)
    update = sum(cost.seconds for cost in costs if cost.name.startswith("update"))
    table.add_section()
    table.add_row("update", f"{update:.2f}", "", f"MFU {flops / update:.1%} of {gpu.flops / 1e12:.0f} TFLOP/s")
    table.add_row("step", f"{whole:.2f}", "", f"MFU {flops / whole:.1%}")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.3f}" if size else ""
