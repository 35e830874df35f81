"""`hotbunk eval`: measure a model on held-out prompts."""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from torch.distributed import HashStore

from generation.engine.engine import Leader
from generation.engine.sampling import NotFiniteError
from generation.trajectory import by_episode
from trainer.chat_template import end_tokens, unread_keys
from trainer.commands.generate import add_model_arguments, model_folder, run_folder
from trainer.config.checks import check_config
from trainer.config.machine import resolve_device, unwritable
from trainer.config.recipe import load_config
from trainer.config.schema import HeldOutConfig, TrainConfig
from trainer.config.section import path_argument
from trainer.data import check_token_ids, load_tokenizer
from trainer.distributed import say
from trainer.engines import engine_settings, on_checkpoint, start_server
from trainer.errors import UserError
from trainer.evaluation import accuracies, dataset_metrics, load_held_outs, standard_error
from trainer.learning.answer_rows import answer_rows, failure_lines
from trainer.learning.answers import Answer
from trainer.learning.metrics import reward_errors
from trainer.rewards.reward_pool import RewardPool
from trainer.rewards.trial import check_rewards
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.local import sample_held_out
from trainer.rollouts.pool import Pool
from trainer.run import processes
from trainer.run.screen import make_console

Results = dict[str, Any]  # the contents of eval.json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Sample answers to the recipe's held-out prompts (eval.datasets; without them data.path), "
        "score them with its rewards, and write eval.json and completions.jsonl. Keys of the recipe "
        "are overridden by --section.key value, such as --eval.samples 16 --eval.temperature 0.8 "
        "--eval.k '[1, 4, 16]'; hotbunk train --help lists them."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "recipe", nargs="?", type=path_argument, help="YAML file (default: the recipe of the run)"
    )
    parser.add_argument(
        "--output",
        type=path_argument,
        help="output folder (default: MODEL/eval for a run, or runs/eval/MODEL)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises UserError before anything is started; after that it ends the process
    itself.
    """
    config = evaluation_config(arguments.model, arguments.recipe, arguments.overrides, arguments.step)
    check_config(config, "eval")
    model = run_folder(arguments.model)  # a run's results go to its folder, a model's to runs/eval
    default = model / "eval" if (model / "config.yaml").is_file() else Path("runs/eval") / model.name
    output = arguments.output or default
    if reason := unwritable(output):
        raise UserError(f"--output: {output} cannot be made or written to, as {reason}: name another")
    evaluation = Evaluation(config)
    processes.start_guardian()
    processes.run(lambda: evaluate(evaluation, output))


def evaluation_config(
    model: str, recipe: Path | None, overrides: list[str], step: int | None = None
) -> TrainConfig:
    """Return the recipe (None: that of the run) with `model` in place of its model, and an engine
    without a trainer beside it.

    If it names no held-out prompts, its training prompts are evaluated.
    """
    run = run_folder(model) / "config.yaml"
    if recipe is None and not run.is_file():
        raise UserError(
            f"{model} is not a run's folder: name a recipe after it, which has the data and rewards"
        )
    fixed = {"model.path": str(model_folder(model, step)), "lora.rank": 0, "lora.start": None}
    fixed |= {"engine.sleep": False, "engine.load_format": "auto"}
    if run.is_file():
        fixed["model.tokenizer"] = None  # the run has saved its tokenizer with the model
    config = load_config(
        recipe or run, [*(f"{key}={json.dumps(value)}" for key, value in fixed.items()), *overrides]
    )
    if config.eval.datasets:
        return config
    data = config.data
    datasets = {"data": HeldOutConfig(path=data.path, subset=data.subset, split=data.split)}
    return config.model_copy(update={"eval": config.eval.model_copy(update={"datasets": datasets})})


class Evaluation:
    """An evaluation's data, rewards and rollout, which are loaded and checked before the engine is
    started.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Load everything except the engine. Raises UserError."""
        self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.level = RolloutLevel(config, self.tokenizer, start_server)
        self.rewards = RewardPool(config.reward)
        self.level.data = self.rewards.columns(self.level.data)
        chosen = config.sampling.stop_token_ids
        self.ends = end_tokens(config.model.path, self.tokenizer, self.level.data, chosen)
        for line in (*unread_keys(self.tokenizer, self.level.data), *self.ends.remarks):
            say(line)
        self.held_outs = load_held_outs(config, self.level, self.tokenizer, self.ends.ids)
        datasets = {
            config.eval.datasets[held_out.name].path: held_out.prompts for held_out in self.held_outs
        }
        check_token_ids(datasets, self.tokenizer, config.model)
        datasets = {f"eval.datasets.{held_out.name}": held_out.prompts for held_out in self.held_outs}
        seed = config.run.seed
        timeout_s = config.reward.timeout_s
        for line in check_rewards(self.rewards, datasets, self.tokenizer, seed, timeout_s):
            say(line)

    def answers(self, leader: Leader) -> dict[str, list[Answer]]:
        """Sample and score the answers of every dataset, by an engine that has the model's weights
        as version 0.
        """
        most = self.config.rollout.max_error_rate
        pool = Pool(
            leader,
            self.tokenizer,
            self.rewards,
            HashStore(),
            self.level,
            max_error_rate=most,
            ends=self.ends,
        )
        with closing(pool), self.rewards:
            # These are the samples that a training run with this seed would draw before its first
            # step.
            return {
                held_out.name: sample_held_out(self.config, pool, held_out)
                for held_out in self.held_outs
            }

    def results(self, answers: dict[str, list[Answer]]) -> Results:
        """Return the metrics of every dataset, with its sampling settings."""
        labels = self.rewards.labels
        datasets = {}
        for held_out in self.held_outs:
            trajectories = answers[held_out.name]
            sampling = asdict(held_out.sampling)
            datasets[held_out.name] = {
                "path": self.config.eval.datasets[held_out.name].path,
                "prompts": len(held_out.prompts),
                "prompts_dropped": held_out.prompts.dropped,
                "samples": held_out.samples,
                "answers": len(by_episode(trajectories)),
                **{key: sampling[key] for key in ("temperature", "top_p", "max_tokens")},
                **dataset_metrics(trajectories, labels, self.config.eval, name=held_out.name),
                "accuracy_standard_error": standard_error(accuracies(trajectories, labels)),
            }
        return {"model": self.config.model.path, "seed": self.config.run.seed, "datasets": datasets}

    def rows(self, answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
        """Return the rows of completions.jsonl, one for every answer."""
        rows = []
        for held_out in self.held_outs:
            trajectories = answers[held_out.name]
            described = answer_rows(trajectories, list(held_out.prompts), self.tokenizer)
            for answer, row in zip(trajectories, described, strict=True):
                rows.append({"dataset": held_out.name} | row | {"vote": answer.vote})
        return rows


def evaluate(evaluation: Evaluation, folder: Path) -> int:
    """Start the engine, sample, and write results to `folder` and to the screen."""
    config = evaluation.config
    began = time.perf_counter()
    answers: dict[str, list[Answer]] = {}

    def job(leader: Leader) -> int:
        try:
            answers.update(evaluation.answers(leader))
        except NotFiniteError as error:
            raise UserError(
                f"{error}: look at the weights of {config.model.path} and at engine.dtype"
            ) from error
        return 0

    settings = engine_settings(config, resolve_device(config) == "cuda")
    if status := on_checkpoint("eval", settings, job, config.engine.start_timeout_s):
        return status
    results = evaluation.results(answers) | {"seconds": round(time.perf_counter() - began, 3)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", "utf-8")
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in evaluation.rows(answers))
    (folder / "completions.jsonl").write_text("".join(lines), "utf-8", "backslashreplace")
    console = make_console()
    console.print(f"{results['model']}, {results['seconds']:.0f} s", soft_wrap=True, markup=False)
    for table in tables(results, console.width):
        console.print(table)
    for name, dataset in answers.items():
        for line in failure_lines(dataset, reward_errors(dataset), "count as wrong"):
            console.print(f"{name}: {line}", soft_wrap=True, markup=False)
    console.print(
        f"{folder / 'eval.json'}, and every answer in {folder / 'completions.jsonl'}", soft_wrap=True
    )
    return 0


def tables(results: Results, width: int) -> Iterator[Table]:
    """Yield tables with a row for each metric and a column for each dataset, as many as `width`
    characters hold.
    """
    names = list(results["datasets"])
    metrics = {name: _shown(results["datasets"][name]) for name in names}
    titles = list(metrics[names[0]])
    cells = list(names)
    for texts in metrics.values():
        cells += texts.values()
    column = 3 + max(map(len, cells))
    room = width - 4 - max(map(len, titles))
    count = max(1, room // column)
    for first in range(0, len(names), count):
        chosen = names[first : first + count]
        columns = [Column(name, justify="right", no_wrap=True) for name in chosen]
        table = Table(Column("", no_wrap=True), *columns, header_style="bold")
        for title in titles:
            table.add_row(title, *(metrics[name][title] for name in chosen))
        yield table


def _shown(metrics: dict[str, Any]) -> dict[str, str]:
    """Return the metrics of a dataset as the screen shows them, by their titles."""
    estimates = [key for key in metrics if key.startswith(("pass@", "majority@"))]
    return {
        "prompts": str(metrics["prompts"]),
        "answers": str(metrics["answers"]),
        "accuracy": f"{metrics['accuracy']:.3f} ± {metrics['accuracy_standard_error']:.3f}",
        **{key: f"{metrics[key]:.3f}" for key in estimates},
        "reward": f"{metrics['reward']:.3f}",
        "length": f"{metrics['length']:.1f}",
        "cut": f"{metrics['truncated']:.0%}",
    }
