"""The end of a run: the model in Hugging Face format, summary, and the last screen."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from sharding.ranks import agreed, is_main
from trainer.config.schema import TrainConfig
from trainer.data import PromptDataset
from trainer.policy.lora import save_adapter
from trainer.run.keeper import RunState
from trainer.run.records import read_rows, series
from trainer.run.screen import Progress, Report
from trainer.run.tracking import NullTracker
from trainer.run.verdict import verdict
from trainer.types import Policy


def export_and_report(
    config: TrainConfig,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    state: RunState,
    tracker: NullTracker,
    screen: Progress,
    answers: list[dict[str, Any]],
) -> None:
    """Export the model, write the summary, and print the report. Collective; rank 0 writes.

    `answers` are rows of the latest evaluation or step, for the report.
    """

    def tell() -> None:
        summary = {
            "steps": state.step,
            "train_seconds": round(state.seconds, 3),
            "eval_reward_before": state.eval_before,
            "eval_reward_after": state.eval_after,
            "max_logprob_gap": state.largest_gap,
            "syncs_verified": state.syncs_verified,
            "updates": policy.version,
            "prompts": len(prompts),
            "prompts_dropped": prompts.dropped,
        }
        tracker.summary(summary)
        screen.report(_report(config, state, answers))

    export(config, policy, tokenizer, tell)


def export(
    config: TrainConfig, policy: Policy, tokenizer: PreTrainedTokenizerBase, tell: Callable[[], None]
) -> None:
    """Write the model, and then call `tell` on rank 0. Collective; rank 0 writes."""
    folder = config.run.folder
    if config.checkpoint.export_hf:
        policy.save_pretrained(folder / "model")
        if config.lora.rank:
            save_adapter(policy.model, config.lora, config.model.path, folder / "adapter")
    with agreed("writing the results"):
        if is_main():
            if config.checkpoint.export_hf:
                tokenizer.save_pretrained(folder / "model")
            tell()


def _report(config: TrainConfig, state: RunState, answers: list[dict[str, Any]]) -> Report:
    folder = config.run.folder
    paths = {"model": folder / "model"} if config.checkpoint.export_hf else {}
    paths |= {"metrics": folder / "metrics.jsonl"}
    paths |= {"answers": folder / "completions.jsonl", "checkpoints": folder / "checkpoints"}
    rows = read_rows(paths["metrics"])
    accuracy = series(rows, "eval/accuracy")[1]

    def largest(prefix: str) -> float:
        numbers: list[float] = []
        for row in rows:
            numbers += [v for key, v in row.items() if key.startswith(prefix) and v is not None]
        return max(numbers, default=0.0)

    return Report(
        steps=state.step,
        seconds=state.seconds,
        before=accuracy[0] if accuracy else None,
        after=accuracy[-1] if accuracy else None,
        rewards=series(rows, "reward/mean")[1],
        answers=answers,
        memory={
            "trainer": {"at its peak": largest("memory/trainer_gib")},
            "engine": {
                "awake": largest("memory/engine_gib_awake"),
                "asleep": largest("memory/engine_gib_asleep"),
            },
        },
        paths=paths,
        max_gap=state.largest_gap,
        verdict=verdict(rows, config.model_dump()),
    )
