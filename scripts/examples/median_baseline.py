"""An advantage of one's own, as `advantage: scripts/examples/median_baseline.py:median_baseline` in a recipe.

One without a parameter `mask` compares the answers of a group: it is given their rewards [1, G], and by name keys of
the section `algorithm`. One with `mask` works on tokens, all [B, T]: rewards, on the last token of a turn or of the
episode; old_logprobs; values, which needs a critic; teacher_logprobs, which needs a teacher.
"""

from torch import Tensor


def median_baseline(rewards: Tensor, normalize_std: bool) -> Tensor:
    """Reward minus the group's median, which a single odd reward does not move, over the mean distance from it.

    Returns:
        [1, G]; 0 where all rewards are equal.
    """
    distance = rewards - rewards.quantile(0.5, dim=1, keepdim=True)
    spread = distance.abs().mean(dim=1, keepdim=True)
    return distance / (spread + 1e-6) if normalize_std else distance
