"""`hotbunk plan`: show the memory and time that a recipe needs, and its problems."""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.console import RenderableType
from rich.table import Column, Table

from generation.engine.devices import cuda_problem
from generation.engine.image_inputs import KEPT_BYTES
from trainer.config.answer_age import oldest_age, prompts_ahead
from trainer.config.checks import find_problems, models_of
from trainer.config.machine import host_gib, rank_count, resolve_device
from trainer.config.model_file import EXPERT_KEYS, model_config
from trainer.config.placement import engine_workers, generating_ranks, training_ranks
from trainer.config.prefix_sharing import with_chosen_prefixes
from trainer.config.recipe import load_config
from trainer.config.schema import TrainConfig
from trainer.config.section import path_argument
from trainer.config.sync_ways import local_ranks, with_chosen_way
from trainer.errors import UserError
from trainer.estimates.gpus import GPUS, Gpu
from trainer.estimates.host_memory import host_part
from trainer.estimates.kernels import count_kernels
from trainer.estimates.layouts import comparison
from trainer.estimates.memory import COLUMNS, GIB, TIGHT, engine_parts, over_budget, trainer_parts
from trainer.estimates.model_sizes import ModelSizes, answers_per_update, longest, model_sizes
from trainer.estimates.recomputation import with_chosen_recomputation
from trainer.estimates.time import Lengths, step_costs, step_flops, update_amount
from trainer.run.screen import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Show ranks, engines, the sizes of a step and the memory of a device, calculated from the "
        "model's config.json without loading weights or data. Problems of the recipe are printed "
        "last, and the exit code is then 2."
    )
    parser.add_argument(
        "recipe", type=path_argument, help="YAML file; keys are overridden by --section.key value"
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks to plan for (default: $WORLD_SIZE, or 1)"
    )
    kind = "kind of GPU to plan for; a cost model then estimates the seconds of a step"
    parser.add_argument("--gpu", choices=GPUS, help=kind)
    parser.add_argument(
        "--prompt-tokens", type=float, help="average tokens of a prompt (default: half of the most)"
    )
    parser.add_argument(
        "--answer-tokens", type=float, help="average tokens of an answer (default: half of the most)"
    )
    parser.add_argument(
        "--device-gib", type=float, help="GiB of a device's memory (default: of this machine's device)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises UserError with the recipe's problems after that, if there are any."""
    ranks = rank_count(os.environ) if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise UserError("--ranks must be at least 1")
    gpu = GPUS.get(arguments.gpu)
    device = [] if gpu is None else ["run.device=cuda"]  # whatever the machine that plans has
    config = load_config(arguments.recipe, [*arguments.overrides, *device])
    problems = find_problems(config, "train", os.environ | {"WORLD_SIZE": str(ranks)})
    if gpu is not None:
        problems = [problem for problem in problems if not problem.startswith("run.device")]
    if any(problem.startswith("model.path") for problem in problems):
        raise UserError(*problems)  # nothing can be calculated without the model's sizes
    config, _ = with_chosen_way(config, ranks, local_ranks(os.environ, ranks))
    config, unshared = with_chosen_prefixes(config, models_of(config, "train"))
    total = arguments.device_gib or (gpu.memory_gib if gpu else None)
    if total is None:
        cuda = resolve_device(config) == "cuda" and cuda_problem() is None
        total = torch.cuda.mem_get_info()[1] / GIB if cuda else host_gib()
    console = make_console()
    training = training_ranks(config, ranks)
    config, recomputed = with_chosen_recomputation(config, training, total)
    table = Table(
        title=f"{config.run.name}: {config.model.path}", title_justify="left", show_header=False
    )
    for line in batch_lines(config, ranks):
        table.add_row(*line)
    console.print(table)
    model = model_sizes(config, config.model.path, config.lora)
    console.print(memory_table(config, model, training, total))
    if recomputed:
        console.print(recomputed)
    lengths = answer_tokens(config, arguments)
    if config.batch.share_prefixes or unshared:
        console.print(unshared or sharing(config, model, training, lengths))
    if gpu is not None:
        model = with_kernels(config, model, lengths)
        console.print(seconds_table(config, model, ranks, gpu, lengths))
        for sentence in comparison(config, model, ranks, gpu, lengths) if ranks > 1 else ():
            console.print(sentence)
    if resolve_device(config) == "cuda":
        exceeded = list(over_budget(config, model, training, total, share=1.0))
        problems += exceeded
        if not exceeded:
            console.print(verdict(config, model, training, total))
    if problems:
        raise UserError(*problems)
    return 0


def verdict(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> str:
    """Return a sentence about a plan that fits a GPU, which warns of columns that take nearly all
    of it.
    """
    tight = list(over_budget(config, model, ranks, device_gib, share=TIGHT))
    if not tight:
        return f"It fits: no column takes more than {TIGHT:.0%} of the device"
    return "\n".join(
        f"It fits with less than {1 - TIGHT:.0%} to spare: {sentence}" for sentence in tight
    )


def batch_lines(config: TrainConfig, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield names and values of a step's sizes."""
    batch = config.batch
    algorithm = config.algorithm
    training = training_ranks(config, ranks)
    engines = engine_workers(config, ranks) // config.engine.tensor_parallel_size
    answers = batch.prompts_per_step * algorithm.group_size
    share = answers_per_update(config, training)
    flying = answers + prompts_ahead(config) * algorithm.group_size
    updates = batch.updates_per_step * algorithm.num_iterations
    largest = math.ceil(share / max(1, batch.tokens_per_micro_batch // longest(config)))
    generating = generating_ranks(config)
    apart = f", of which {generating} only generate" if generating else ""
    yield "ranks", f"{ranks}, on {resolve_device(config)}{apart}"
    machine = local_ranks(os.environ, training)
    if config.policy.backend == "fsdp" and config.policy.shard_size is None and training > machine:
        advice = f"policy.shard_size: {machine} gathers them inside a machine, and needs more memory"
        yield "shards", f"weights are gathered from {math.ceil(training / machine)} machines; {advice}"
    yield "engines", f"{engines} of {config.engine.tensor_parallel_size} rank(s)"
    yield "answers a step", f"{batch.prompts_per_step} prompts x {algorithm.group_size} = {answers}"
    if config.rollout.slice_tokens is not None:
        age = f"each begins at most {oldest_age(config)} step(s) before it is trained on"
        yield "answers in flight", f"{flying} with rollout.ahead; {age}"
    yield (
        "answers an engine",
        f"{math.ceil(flying / max(engines, 1))}, {config.engine.max_num_seqs} at a time",
    )
    yield "tokens a step", f"at most {answers * longest(config):,}, prompts included"
    if config.model.routes == "engine":
        rows = answers * longest(config) * route_bytes(config.model.path)
        copies = 2 / max(engines, 1) + 2 / training
        yield (
            "routes",
            f"at most {rows * copies / GIB:.2f} GiB of a rank's host memory, {rows / GIB:.2f} a step",
        )
    if most := config.data.max_images:
        pixels = 3 * 4 * config.data.max_image_pixels / GIB  # three colours in float32
        host = min(share * most * pixels, batch.prompts_per_step * most * pixels)
        kept = KEPT_BYTES / GIB
        yield "images", f"at most {answers * most:,} a step; {pixels:.3f} GiB each as input of the model"
        yield (
            "images in host memory",
            f"at most {host:.2f} GiB of a rank's share, and {kept:.2f} of an engine's",
        )
        rollout = config.rollout
        episode = config.rollout.max_image_mib / 1024
        if rollout.tools or rollout.mcp or rollout.code:
            begun = math.ceil(flying / max(engines, 1))
            trained = math.ceil(answers / max(training, 1))
            asking = 0  # requests with images on their way to the engine's server
            if rollout.client is not None:
                asking = min(begun, config.engine.max_num_seqs + algorithm.group_size)
            added = f"at most {begun * episode:.2f} GiB of an engine's episodes, "
            added += f"{3 * asking * episode:.2f} of requests to its server, in base64, "
            yield (
                "images added in rollouts",
                added + f"and {trained * episode:.2f} of a rank that trains",
            )
    yield "updates", f"{updates} a step, {updates * config.run.steps} in {config.run.steps} steps"
    ways = config.policy.sequence_parallel
    who = "rank" if ways == 1 else f"{ways} ranks that share them"
    yield f"answers an update and {who}", f"{share}, in at most {largest} micro-batch(es)"


def route_bytes(path: str) -> int:
    """Return the bytes of a token's row of routes in the engine's output, which includes layers
    without experts.

    A leader holds the rows of its answers, and a packed copy for the ranks that train on them; each
    of those ranks holds its rows as received, and a copy in micro-batches.
    """
    model = model_config(path)
    experts = next((model[key] for key in EXPERT_KEYS if model.get(key)), 0)
    itemsize = 1 if experts <= 256 else 2
    return int(model["num_hidden_layers"] * model.get("num_experts_per_tok", 1) * itemsize)


def memory_table(
    config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float
) -> RenderableType:
    """Return a table of all parts of a rank's memory and their sums, which all ranks share on CPU,
    and none does on CUDA.
    """
    parts = [
        *trainer_parts(config, model, ranks, device_gib),
        *engine_parts(config, model, ranks, device_gib),
    ]
    columns = [Column(heading, justify="right") for heading in COLUMNS]
    title = f"GiB of a rank; {model.total:,} parameters"
    table = Table("", *columns, "", title=title, title_justify="left", header_style="bold")
    for part in parts:
        table.add_row(part.name, *(_gib(getattr(part, column)) for column in COLUMNS), part.remark)
    table.add_section()
    of = f"of {device_gib:.1f} GiB"
    if resolve_device(config) != "cuda":
        of = f"times {ranks}, {of}"
    sums = []
    for column in COLUMNS:
        sums.append(_gib(sum(getattr(part, column) for part in parts)))
    table.add_row("sum", *sums, of)
    host = host_part(config, model, ranks)
    if host.generating or host.training:
        table.add_row(host.name, *(_gib(getattr(host, column)) for column in COLUMNS), host.remark)
    return table


def answer_tokens(config: TrainConfig, arguments: argparse.Namespace) -> Lengths:
    """Return the assumed average lengths of prompts and answers, by default half of the longest."""
    most = {"prompt": config.data.max_prompt_tokens, "answer": config.sampling.max_tokens}
    means = {name: getattr(arguments, f"{name}_tokens") or limit / 2 for name, limit in most.items()}
    for name, value in means.items():
        if not 1 <= value <= most[name]:
            raise UserError(
                f"--{name}-tokens is {value:g}, but the recipe allows 1 to {most[name]}: choose from "
                "these"
            )
    return Lengths(**means)


def sharing(config: TrainConfig, model: ModelSizes, ranks: int, lengths: Lengths) -> str:
    """Return a sentence about what updates compute if prompts are computed once for all answers of
    a group.
    """
    unshared = config.model_copy(
        update={"batch": config.batch.model_copy(update={"share_prefixes": False})}
    )
    tokens, logical = (update_amount(recipe, ranks, lengths)[0] for recipe in (config, unshared))
    ratio = step_flops(unshared, model, ranks, lengths) / step_flops(config, model, ranks, lengths)
    return (
        f"Prompts of {lengths.prompt:g} tokens computed once for answers of {lengths.answer:g}: "
        f"{tokens:,.0f} of a rank's {logical:,.0f} tokens in a step ({logical / tokens:.2f} x fewer), "
        f"{ratio:.2f} x fewer operations"
    )


def with_kernels(config: TrainConfig, model: ModelSizes, lengths: Lengths) -> ModelSizes:
    """Return the sizes with the kernels of a micro-batch of average sequences."""
    length = math.ceil(lengths.prompt + lengths.answer)
    rows = max(1, config.batch.tokens_per_micro_batch // length)
    return replace(model, kernels=count_kernels(config, config.model.path, rows, length))


def seconds_table(
    config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths
) -> RenderableType:
    """Return a table of the times of all parts of a step, their sum, and the share of the peak rate
    that it reaches.
    """
    costs = step_costs(config, model, ranks, gpu, lengths)
    title = (
        f"Seconds of a step, modelled; prompts of {lengths.prompt:g} and answers of {lengths.answer:g} "
        "tokens"
    )
    columns = [Column(heading, justify="right") for heading in ("seconds", "overlapped")]
    table = Table("", *columns, "", title=title, title_justify="left", header_style="bold")
    for cost in costs:
        table.add_row(
            cost.name, f"{cost.seconds:.2f}", f"{cost.hidden:.2f}" if cost.hidden else "", cost.remark
        )
    flops = step_flops(config, model, ranks, lengths) / gpu.flops
    step = sum(cost.seconds for cost in costs)
    update = sum(cost.seconds for cost in costs if cost.name.startswith("update"))
    table.add_section()
    table.add_row(
        "update", f"{update:.2f}", "", f"MFU {flops / update:.1%} of {gpu.flops / 1e12:.0f} TFLOP/s"
    )
    table.add_row("step", f"{step:.2f}", "", f"MFU {flops / step:.1%}")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.3f}" if size else ""
