"""The verdict on a run: if its reward did not rise, a sentence that says so, and the likeliest
causes.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from trainer.run.records import Rows, series

FEWEST_STEPS = 20
"""The smallest number of steps from which a change can be distinguished from scatter."""
_CAUSES = 3
# Sum of learning rates below which policy.lr is small; weights of language models are around 0.02
_MOVED = 1e-3


def verdict(rows: Rows, recipe: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence that says that the run has not learned, and at most three likely causes; []
    if it has.

    `rows` are those of metrics.jsonl. Returns [] too if fewer than `FEWEST_STEPS` steps have a
    reward, or if a teacher replaces the reward.

    The reward rose if its mean over n steps changed by more than two standard errors, 2 sigma
    sqrt(2 / n), from the first third of the run to the last, or if held-out accuracy rose by more
    than sigma. sigma^2 is half the mean squared difference of neighbouring steps, on which a trend
    has little effect (von Neumann 1941, Annals of Mathematical Statistics 12).
    """
    rewards = series(rows, "reward/mean")[1]
    if len(rewards) < FEWEST_STEPS or recipe.get("algorithm", {}).get("teacher") is not None:
        return []
    count = len(rewards) // 3
    before = fmean(rewards[:count])
    after = fmean(rewards[-count:])
    sigma = fmean((one - other) ** 2 / 2 for one, other in pairwise(rewards)) ** 0.5
    scatter = 2 * sigma * (2 / count) ** 0.5
    change = after - before
    accuracy = series(rows, "eval/accuracy")[1]
    if change > scatter or (accuracy and accuracy[-1] - accuracy[0] > sigma):
        return []
    fell = change < -scatter
    sentence = (
        f"This run has not learned: its mean reward {'fell' if fell else 'went'} from {before:.3g} in "
        f"the first third of {len(rewards)} steps to {after:.3g} in the last, and scatter alone "
        f"explains ± {scatter:.1g}"
    )
    if len(accuracy) > 1:
        sentence += f"; held-out accuracy went from {accuracy[0]:.3g} to {accuracy[-1]:.3g}"
    advice = "no metric shows a cause: more steps, a larger policy.lr or algorithm.group_size may help"
    return [sentence, *([*_causes(rows, recipe, fell)][:_CAUSES] or [advice])]


def _causes(rows: Rows, recipe: Mapping[str, Mapping[str, Any]], fell: bool) -> Iterator[str]:
    """Yield likely causes, the likeliest first; `fell` is True if the reward fell."""

    def values(key: str) -> list[float]:
        return series(rows, key)[1]

    def setting(section: str, key: str) -> Any:
        return recipe.get(section, {}).get(key, 0)

    rewards = values("reward/mean")
    steps = len(rewards)
    updates = sum(values("updates"))
    answers = steps * setting("batch", "prompts_per_step") * setting("algorithm", "group_size")
    if answers and (failures := sum(values("reward/errors"))) > 0.05 * answers:
        yield (
            f"{failures / answers:.0%} of the answers have no reward, since reward functions failed on "
            "them"
        )
    if answers and (unjudged := sum(values("reward/abstained"))) > 0.05 * answers:
        yield (
            f"{unjudged / answers:.0%} of the answers have no reward, since all reward functions "
            "abstained from them"
        )
    idle = sum(values("no_signal_steps"))
    if min(rewards) == max(rewards) and not any(values("reward/std")):
        yield (
            f"every answer got the same reward, {rewards[0]:g}: look at answers and rewards in "
            "completions.jsonl"
        )
    elif idle >= steps / 2:
        yield (
            f"in {idle:.0f} of {steps} steps no group had answers with different rewards to learn "
            "from: use prompts that the model sometimes solves, or raise algorithm.group_size"
        )
    if (cut := fmean(values("length/truncated") or [0.0])) >= 0.5:
        limit = setting("sampling", "max_tokens")
        long = f"{cut:.0%} of the answers were cut off at the length limit"
        if (past := fmean(values("length/past_end") or [0.0])) >= 0.5:
            yield (
                f"{long}, and {past:.0%} of these went on after a token with which the chat template "
                "ends a turn: name it in sampling.stop_token_ids, or set that to null"
            )
        else:
            yield f"{long}: raise sampling.max_tokens ({limit})"
    if (skipped := sum(values("skipped_steps"))) > 0.1 * updates:
        yield (
            f"{skipped:.0f} of {updates:.0f} updates were skipped, since their loss or gradient was not "
            "finite"
        )
    if not (norms := values("grad_norm")):
        return
    distance = sum(row["lr"] * row["updates"] for row in rows if row.get("lr") is not None)
    if max(norms) == 0:
        yield "the gradient was 0 in every update"
    elif fell:
        yield (
            f"policy.lr may be too large: gradient norms were {median(norms):.2g}, and {max(norms):.2g} "
            "at most"
        )
    elif distance < _MOVED:
        yield (
            f"policy.lr is small: its sum over {updates:.0f} updates, roughly how far Adam can move a "
            f"weight, is {distance:.1g} (gradient norm {median(norms):.2g}): raise it, or train for "
            "longer"
        )
