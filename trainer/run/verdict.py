"""Verdict on a run by its figures: a run whose reward did not rise says so, with the likeliest causes."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from trainer.run.records import Rows, series

FEWEST_STEPS = 20
"""With fewer rewards than this, a change cannot be told from scatter."""
_CAUSES = 3
_MOVED = 1e-3  # weights of language models are around 0.02


def verdict(rows: Rows, recipe: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence that says that the run has not learned, then at most three likely causes, from metrics.jsonl's `rows`.

    Nothing where the reward rose, where fewer than `FEWEST_STEPS` steps have one, or where a teacher takes its place.

    The change is that of the mean over n steps, from the first third of the run to the last. Scatter is sigma, with
    sigma^2 half the mean squared difference of neighbouring steps, in which a trend hardly counts (von Neumann 1941,
    Annals of Mathematical Statistics 12). A rise is a change by more than two standard errors, 2 sigma sqrt(2 / n), or
    one of held-out accuracy by more than sigma.
    """
    rewards = series(rows, "reward/mean")[1]
    if len(rewards) < FEWEST_STEPS or recipe.get("algorithm", {}).get("teacher") is not None:
        return []
    count = len(rewards) // 3
    before, after = fmean(rewards[:count]), fmean(rewards[-count:])
    sigma = fmean((one - other) ** 2 / 2 for one, other in pairwise(rewards)) ** 0.5
    scatter, change = 2 * sigma * (2 / count) ** 0.5, after - before
    accuracy = series(rows, "eval/accuracy")[1]
    if change > scatter or (accuracy and accuracy[-1] - accuracy[0] > sigma):
        return []
    fell = change < -scatter
    sentence = (
        f"This run has not learned: its mean reward {'fell' if fell else 'went'} from {before:.3g} in the first third "
        f"of {len(rewards)} steps to {after:.3g} in the last, where scatter alone makes ± {scatter:.1g}"
    ) + (f"; held-out accuracy went from {accuracy[0]:.3g} to {accuracy[-1]:.3g}" if len(accuracy) > 1 else "")
    advice = "none of its figures says why: more steps, a larger policy.lr or algorithm.group_size may help"
    return [sentence, *([*_causes(rows, recipe, fell)][:_CAUSES] or [advice])]


def _causes(rows: Rows, recipe: Mapping[str, Mapping[str, Any]], fell: bool) -> Iterator[str]:
    """The likeliest first; `fell`: the reward did."""

    def values(key: str) -> list[float]:
        return series(rows, key)[1]

    def setting(section: str, key: str) -> Any:
        return recipe.get(section, {}).get(key, 0)

    rewards = values("reward/mean")
    steps, updates = len(rewards), sum(values("updates"))
    answers = steps * setting("batch", "prompts_per_step") * setting("algorithm", "group_size")
    if answers and (failures := sum(values("reward/errors"))) > 0.05 * answers:
        yield f"{failures / answers:.0%} of the answers were not judged, since reward functions failed on them"
    idle = sum(values("no_signal_steps"))
    if min(rewards) == max(rewards) and not any(values("reward/std")):
        yield f"every answer got the same reward, {rewards[0]:g}: completions.jsonl has answers as they were judged"
    elif idle >= steps / 2:
        yield (
            f"in {idle:.0f} of {steps} steps no group had answers of different rewards to learn from: take prompts "
            "that the model solves now and then, or raise algorithm.group_size"
        )
    if (cut := fmean(values("length/truncated") or [0.0])) >= 0.5:
        limit = setting("sampling", "max_tokens")
        yield f"{cut:.0%} of the answers were cut off at their longest: raise sampling.max_tokens ({limit})"
    if (skipped := sum(values("skipped_steps"))) > 0.1 * updates:
        yield f"{skipped:.0f} of {updates:.0f} updates were skipped, their loss or gradient not being finite"
    if not (norms := values("grad_norm")):
        return
    distance = sum(row["lr"] * row["updates"] for row in rows if row.get("lr") is not None)
    if max(norms) == 0:
        yield "the gradient was 0 in every update"
    elif fell:
        yield f"policy.lr may be too large: gradient norms were {median(norms):.2g}, and {max(norms):.2g} at most"
    elif distance < _MOVED:
        yield (
            f"policy.lr is small: its sum over {updates:.0f} updates, about as far as Adam can move a weight, is "
            f"{distance:.1g} (gradient norm {median(norms):.2g}): raise it, or train for longer"
        )
