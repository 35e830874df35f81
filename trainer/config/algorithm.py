"""The `algorithm` section of a recipe: every choice a key, and presets that set the keys as papers do.

What the names stand for is in `trainer.algorithms`, with formulas and sources; which choices go together is checked by
`trainer.config.algorithm_checks`. No torch is imported here.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.algorithms.names import Aggregation, AtBound, Estimator, Level
from trainer.config.section import Held, NotNegative, Portion, Positive, Section, Share, Softness, Text

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "sapo",
    "distill",
]

Advantage = Literal["group", "leave_one_out", "max_rl", "reinforce_pp", "reinforce_pp_baseline", "gae", "distill"]

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024 (arXiv:2402.03300), section 4.2 for the coefficient of KL; the bounds are PPO's.
    "grpo": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence_mean",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
    },
    # Liu et al. 2025 (arXiv:2503.20783): neither of GRPO's two divisions, and no KL.
    "dr_grpo": {"normalize_std": False, "clip_low": 0.2, "clip_high": 0.2, "aggregation": "fixed_length"},
    # Yu et al. 2025 (arXiv:2503.14476), section 4.1. The bound on rounds is that of the authors' recipe.
    "dapo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "sampling_rounds": 10,
        "overlong_margin": 0.2,
    },
    # Zheng et al. 2025 (arXiv:2507.18071), section 5.1; there a step's batch is cut into four updates.
    "gspo": {"ratio_level": "geometric", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    # MiniMax 2025 (arXiv:2506.13585), section 3.1: no bound below; the one above, tuned there, is not given.
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"},
    # Ahmadian et al. 2024 (arXiv:2402.14740), equation 8; the coefficient of KL is TRL's.
    "rloo": {
        "advantage": "leave_one_out",
        "loss": "reinforce",
        "aggregation": "sequence_sum",
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # Hu et al. 2025 (arXiv:2501.03262), section 3; the coefficients of KL are those of OpenRLHF's examples.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token_mean",
        "kl_coef": 1e-3,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token_mean",
        "kl_coef": 1e-3,
        "kl_estimator": "k2",
    },
    # Schulman et al. 2017 (arXiv:1707.06347), table 3; episodes end, so rewards are not discounted, as in Ziegler et
    # al. 2019 (arXiv:1909.08593), section 2.2.
    "ppo": {
        "advantage": "gae",
        "discount": 1.0,
        "trace": 0.95,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "value_clip": 0.2,
        "aggregation": "token_mean",
    },
    # Gao et al. 2025 (arXiv:2511.20347), section 3.
    "sapo": {"loss": "sapo", "sapo_temperatures": (1.0, 1.05), "aggregation": "sequence_mean"},
    # Lu et al. 2025, "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation).
    "distill": {"advantage": "distill", "loss": "reinforce", "aggregation": "token_mean"},
}

LOSS_KEYS: dict[str, dict[str, Any]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"sapo_temperatures": (1.0, 1.05)},
    "reinforce": {},
}
"""The keys that only some losses have, with the values they have there unless set: null everywhere else."""

PRESET_KEYS = {key for keys in [*PRESETS.values(), *LOSS_KEYS.values()] for key in keys}
"""What a preset may set."""


class AlgorithmConfig(Section):
    """How rewards become a loss. A preset sets keys as its paper does; what is set beside it counts more."""

    preset: Preset | None = Field(default=None, description="start from a paper's choices; null: from those below")
    group_size: Held = Field(default=8, description="answers for each prompt; 1 only where nobody compares them")
    num_iterations: Held = Field(default=1, description="passes over each step's batch")

    advantage: Advantage = Field(
        default="group",
        description="reward against the group's mean, against the others' mean, or by the mean (for success rates); "
        "against the step's mean, or the group's mean and then the step's spread; by a critic (PPO); without any "
        "reward, how much likelier a teacher finds each token",
    )
    teacher: Text | None = Field(
        default=None, description="model of the same tokenizer to learn from (advantage: distill)"
    )
    normalize_std: bool = Field(
        default=True, description="divide a group's advantages by their standard deviation (advantage: group)"
    )
    combine_rewards: Literal["sum", "normalize_then_sum"] = Field(
        default="sum", description="weighted sum of rewards; or each made relative to its group first (GDPO)"
    )
    credit: Literal["outcome", "turns"] = Field(
        default="outcome", description="one reward for the episode; or a turn's own rewards and those after it"
    )
    discount: Share = Field(
        default=1.0, description="of rewards from turn to turn, or token to token where those count"
    )
    trace: Share = Field(default=0.95, description="lambda of generalised advantage estimation (advantage: gae)")

    loss: Literal["clip", "cispo", "sapo", "reinforce"] = Field(
        default="clip", description="clipped ratios (PPO), clipped weights, soft gates, or the plain policy gradient"
    )
    ratio_level: Level = Field(
        default="token", description="ratios of tokens, their geometric mean over an answer (GSPO), or their product"
    )
    clip_low: Share | None = Field(
        default=None, description="ratios below 1 - clip_low are bounded; null: 0.2 for clip, 1 for cispo"
    )
    clip_high: NotNegative | None = Field(
        default=None, description="ratios above 1 + clip_high are bounded; null: 0.28 for clip, 4 for cispo"
    )
    dual_clip: Positive | None = Field(
        default=None,
        description="where advantages are negative, a bound of the ratio from above, such as 3; null: none",
    )
    sapo_temperatures: tuple[Softness, Softness] | None = Field(
        default=None, description="of positive and other advantages; null: 1 and 1.05 for sapo"
    )
    value_clip: Positive | None = Field(
        default=0.2, description="how far a value may move from its old one, in rewards; null: any (advantage: gae)"
    )
    value_coef: Positive = Field(default=0.5, description="weight of the value loss in a trunk shared with the policy")
    aggregation: Aggregation = Field(
        default="token_mean",
        description="each token weighs the same, or each answer, by the mean, sum, or sum / longest of its tokens",
    )

    kl_coef: NotNegative = Field(default=0.0, description="weight of KL to the initial policy; 0 loads no reference")
    kl_estimator: Estimator = Field(default="k3", description="k1 in the reward; one of the others in the loss")
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="where KL counts")
    kl_clamp: Positive | None = Field(default=None, description="bound of a token's KL estimate, nats; null: none")
    entropy_coef: NotNegative = Field(default=0.0, description="weight of the entropy bonus")
    high_entropy_share: Portion = Field(
        default=1.0, description="share of tokens, those of the highest entropy, that the policy loss counts"
    )

    tis_cap: Positive | None = Field(
        default=2.0, description="cap of the importance weight trainer/engine; null: no correction"
    )
    tis_level: Level = Field(default="token", description="importance weights of tokens or of whole answers")
    keep_band: tuple[NotNegative, Positive] | None = Field(
        default=None, description="leave out what has a ratio trainer/engine outside of it, such as [0.5, 5]"
    )
    keep_level: Level = Field(default="token", description="keep_band judges tokens (IcePop) or whole answers")
    stale_threshold: Positive | None = Field(
        default=None, description="leave out bad answers this far from the engine, nats a token; null: none"
    )

    sampling_rounds: Held = Field(
        default=1, description="rounds of sampling until enough groups have rewards that differ; 1: train on any"
    )
    oversampling: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=1.0, description="prompts sampled for each group that is wanted; those over are dropped"
    )
    at_bound: AtBound = Field(
        default="fewer", description="after the last round: fewer groups, or fill up with groups that are all alike"
    )
    drop_zero_variance: bool = Field(
        default=False, description="leave groups whose rewards are all equal out of the loss"
    )
    overlong_filter: bool = Field(default=False, description="learn nothing from answers that were cut off")
    overlong_margin: Share | None = Field(
        default=None, description="last share of the longest answer over which the reward falls by 1; null: none"
    )
    length_strength: NotNegative = Field(
        default=0.0, description="divide rewards by 1 + this * the answer's length / the group's mean length"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """The preset's keys where none are given. Those of a loss hold only with that loss."""
        if not isinstance(given, dict) or not all(
            isinstance(given.get(key, ""), str | None) for key in ("preset", "loss")
        ):
            return given  # what is wrong with it is told later
        preset: dict[str, Any] = PRESETS.get(given.get("preset") or "", {})
        loss = given.get("loss", preset.get("loss", "clip"))
        if loss != preset.get("loss", "clip"):
            preset = {
                key: value for key, value in preset.items() if all(key not in keys for keys in LOSS_KEYS.values())
            }
        return LOSS_KEYS.get(loss, {}) | preset | given
