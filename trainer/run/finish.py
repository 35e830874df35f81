"""The end of a run: the model in Hugging Face format, curves, summary, and the last screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharding.ranks import agreed, is_main
from trainer.policy.lora import save_adapter
from trainer.run.plots import plot_curves
from trainer.run.records import read_rows, series
from trainer.run.screen import Report

if TYPE_CHECKING:
    from trainer.loop import RLTrainer


def export_and_report(run: "RLTrainer") -> None:
    """Write everything that outlives a run, then say where it is. Collective; rank 0 writes."""
    folder = run.config.run.folder
    model = folder / "model" if run.config.checkpoint.export_hf else None
    if model is not None:
        run.policy.save_pretrained(model)
        if run.config.lora.rank:
            save_adapter(run.policy.model, run.config.lora, run.config.model.path, folder / "adapter")
    with agreed("writing the results"):
        if is_main():
            if model is not None:
                run.tokenizer.save_pretrained(model)
            curves = plot_curves(folder)
            run.tracker.summary(_summary(run))
            run.screen.report(_report(run, folder, model, curves))


def _summary(run: "RLTrainer") -> dict[str, Any]:
    state = run.state
    return {
        "steps": state.step,
        "train_seconds": round(state.seconds, 3),
        "eval_reward_before": state.eval_before,
        "eval_reward_after": state.eval_after,
        "max_logprob_gap": state.largest_gap,
        "syncs_verified": state.syncs_verified,
        "updates": run.policy.version,
        "prompts": len(run.prompts),
        "prompts_dropped": run.prompts.dropped,
    }


def _report(run: "RLTrainer", folder: Path, model: Path | None, curves: Path) -> Report:
    rows = read_rows(folder / "metrics.jsonl")
    accuracy = series(rows, "eval/accuracy")[1]
    paths = {"curves": curves, "metrics": folder / "metrics.jsonl", "answers": folder / "completions.jsonl"}
    if model is not None:
        paths = {"model": model} | paths
    return Report(
        steps=run.state.step,
        seconds=run.state.seconds,
        before=accuracy[0] if accuracy else None,
        after=accuracy[-1] if accuracy else None,
        rewards=series(rows, "reward/mean")[1],
        answers=run.last_answers,
        memory=_memory(rows),
        paths=paths | {"checkpoints": folder / "checkpoints"},
        checkpoint=model,
        max_gap=run.state.largest_gap,
    )


def _memory(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Largest figures of all steps, in GiB."""

    def largest(prefix: str) -> float:
        return max((v for row in rows for k, v in row.items() if k.startswith(prefix) and v is not None), default=0.0)

    return {
        "trainer": {"at its peak": largest("memory/trainer_gib")},
        "engine": {"awake": largest("memory/engine_gib_awake"), "asleep": largest("memory/engine_gib_asleep")},
    }
