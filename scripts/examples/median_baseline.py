"""A custom advantage, as `advantage: scripts/examples/median_baseline.py:median_baseline` in a recipe.

An advantage without a parameter `mask` compares the answers of a group. It gets their rewards [1, G], and keys of the
section `algorithm` by name. An advantage with `mask` works on tokens, all [B, T]: rewards, on the last token of a turn
or of the episode; old_logprobs; values, which need a critic; teacher_logprobs, which need a teacher.
"""

from torch import Tensor


def median_baseline(rewards: Tensor, normalize_std: bool) -> Tensor:
    """Return rewards minus the group's median, over the mean distance from it. An outlier does not move the median.

    Returns:
        [1, G]; 0 where all rewards are equal.
    """
    distance = rewards - rewards.quantile(0.5, dim=1, keepdim=True)
    spread = distance.abs().mean(dim=1, keepdim=True)
    return distance / (spread + 1e-6) if normalize_std else distance
