"""The reward of docs/results.md."""

from typing import Any

from trainer.rewards.functions import reasoning_gym


def solved(completion: str, *, row: dict[str, Any]) -> float:
    """Return 1.0 if reasoning-gym takes the text between <answer> tags for right, and otherwise 0.0."""
    return float(reasoning_gym(completion, row=row) >= 1)
