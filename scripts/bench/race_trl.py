#!/usr/bin/env python3
"""TRL's side of race.py: its GRPOTrainer on the settings in a JSON file, up to a step, from its newest checkpoint.

    python scripts/bench/race_trl.py SETTINGS UNTIL

Answers come from Transformers, since TRL's vLLM needs a GPU. The trainer is TRL's own; this file adds a clock around
its generation, and an evaluation outside the clock. A line of `metrics.jsonl` has the names that Hotbunk gives its
figures.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from trainer.rewards.functions import reasoning_gym
from trainer.run.records import read_rows

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
    # it would import vLLM, which is not used
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer


def grpo_config(settings: dict[str, Any], **options: Any) -> GRPOConfig:
    """Return TRL's configuration: `settings` (lr, betas, eps, clip, group, max_tokens) and further `options`."""
    return GRPOConfig(
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        adam_epsilon=settings["eps"],
        weight_decay=0.0,
        num_generations=settings["group"],
        max_completion_length=settings["max_tokens"],
        beta=0.0,
        epsilon=settings["clip"],
        loss_type="grpo",
        scale_rewards="group",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )


def solved(completions: list[str], **columns: Any) -> list[float]:
    """Return the reward of scripts/results/reward.py for each completion."""
    rows = [
        dict(zip(("path", "entry"), values, strict=True))
        for values in zip(columns["path"], columns["entry"], strict=True)
    ]
    return [
        float(reasoning_gym(text, row=row) >= 1) for text, row in zip(completions, rows, strict=True)
    ]


class Timed(GRPOTrainer):
    """TRL's trainer, which keeps the seconds and the tokens of the last rollout, rewards included."""

    seconds = tokens = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        outputs = super()._generate_and_score_completions(inputs)
        self.seconds += time.perf_counter() - began
        self.tokens += float(outputs["completion_mask"].sum())
        return outputs


class Clock(TrainerCallback):
    """Writes a line a step, and evaluates where one is due."""

    def __init__(self, settings: dict[str, Any], held_out: list[dict[str, Any]]) -> None:
        self.settings, self.held_out, self.began = settings, held_out, 0.0
        self.trainer: Timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.trainer.seconds = self.trainer.tokens = 0.0
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, and write the line."""
        spent, rollout = time.perf_counter() - self.began, self.trainer.seconds
        row = {"train/step": state.global_step, "time/step": spent, "time/rollout": rollout}
        row |= {"time/update": spent - rollout, "rollout_tokens": self.trainer.tokens}
        self.write(row, state.global_step)

    def write(self, row: dict[str, float], step: int) -> None:
        """Append a line, with the held-out accuracy if it is due."""
        if step % self.settings["every"] == 0:
            row["eval/accuracy"] = self.accuracy()
        with (Path(self.settings["folder"]) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of held-out problems that greedy decoding solves."""
        model, tokenizer = self.trainer.model.eval(), self.trainer.processing_class
        rewards: list[float] = []
        for start in range(0, len(self.held_out), 128):
            rows = self.held_out[start : start + 128]
            prompts = tokenizer(
                [row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left"
            )
            length = self.settings["max_tokens"]
            answers = model.generate(**prompts, max_new_tokens=length, do_sample=False)[
                :, prompts.input_ids.shape[1] :
            ]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            rewards += solved(
                texts, path=[row["path"] for row in rows], entry=[row["entry"] for row in rows]
            )
        model.train()
        return sum(rewards) / len(rewards)


def main(file: Path, until: int) -> None:
    """Train up to a step."""
    settings = json.loads(file.read_text())
    folder, answers = Path(settings["folder"]), settings["prompts"] * settings["group"]
    files = {name: Path(settings[name]).read_text().splitlines() for name in ("train", "eval")}
    rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    arguments = grpo_config(
        settings,
        output_dir=str(folder / "checkpoints"),
        max_steps=until,
        save_steps=until,
        save_total_limit=1,
        seed=settings["seed"],
        max_grad_norm=1.0,
        per_device_train_batch_size=settings["rows"],
        gradient_accumulation_steps=answers // settings["rows"],
        temperature=1.0,
    )
    clock = Clock(settings, rows["eval"])
    clock.trainer = Timed(
        model=settings["model"],
        reward_funcs=solved,
        args=arguments,
        train_dataset=Dataset.from_list(rows["train"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[clock],
    )
    saved = sorted((folder / "checkpoints").glob("checkpoint-*"))
    reached = int(saved[-1].name.removeprefix("checkpoint-")) if saved else -1
    written = read_rows(folder / "metrics.jsonl")  # those after the checkpoint are written again
    lines = [json.dumps(row) + "\n" for row in written if row["train/step"] <= reached]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if not saved:
        clock.write({"train/step": 0}, 0)
    clock.trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
