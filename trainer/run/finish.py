"""The end of a run: the model in Hugging Face format, curves, summary, and the last screen."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sharding.ranks import agreed, is_main
from trainer.config.schema import TrainConfig
from trainer.data import PromptDataset
from trainer.policy.lora import save_adapter
from trainer.run.keeper import RunState
from trainer.run.plots import plot_curves
from trainer.run.records import read_rows, series
from trainer.run.screen import Progress, Report
from trainer.run.tracking import NullTracker
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
    """Write everything that outlives a run, then say where it is. Collective; rank 0 writes.

    Args:
        answers: rows of the latest evaluation or step, for the screen.
    """
    folder = config.run.folder
    model = folder / "model" if config.checkpoint.export_hf else None
    if model is not None:
        policy.save_pretrained(model)
        if config.lora.rank:
            save_adapter(policy.model, config.lora, config.model.path, folder / "adapter")
    with agreed("writing the results"):
        if is_main():
            if model is not None:
                tokenizer.save_pretrained(model)
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
            curves = plot_curves(folder)
            tracker.summary(summary)
            screen.report(_report(state, answers, folder, model, curves))


def _report(state: RunState, answers: list[dict[str, Any]], folder: Path, model: Path | None, curves: Path) -> Report:
    rows = read_rows(folder / "metrics.jsonl")
    accuracy = series(rows, "eval/accuracy")[1]
    paths = {"curves": curves, "metrics": folder / "metrics.jsonl", "answers": folder / "completions.jsonl"}
    if model is not None:
        paths = {"model": model} | paths
    return Report(
        steps=state.step,
        seconds=state.seconds,
        before=accuracy[0] if accuracy else None,
        after=accuracy[-1] if accuracy else None,
        rewards=series(rows, "reward/mean")[1],
        answers=answers,
        memory=_memory(rows),
        paths=paths | {"checkpoints": folder / "checkpoints"},
        checkpoint=model,
        max_gap=state.largest_gap,
    )


def _memory(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Largest figures of all steps, in GiB."""

    def largest(prefix: str) -> float:
        return max((v for row in rows for k, v in row.items() if k.startswith(prefix) and v is not None), default=0.0)

    return {
        "trainer": {"at its peak": largest("memory/trainer_gib")},
        "engine": {"awake": largest("memory/engine_gib_awake"), "asleep": largest("memory/engine_gib_asleep")},
    }
