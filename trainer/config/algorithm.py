"""The section `algorithm` of a recipe: its keys, the presets that set them as papers do, and the
checks between keys.

The names stand for the functions of `trainer.algorithms`, whose records say what each needs. No
torch is imported.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, methodcaller
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from generation.importing import load
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.catalogue import Advantage, Loss, Record
from trainer.algorithms.kl import ESTIMATORS
from trainer.algorithms.losses import LEVELS, LOSSES
from trainer.config.section import (
    Location,
    NotNegative,
    OneOf,
    Portion,
    Positive,
    Section,
    Share,
    Size,
    Softness,
    key,
)
from trainer.errors import UserError

R = TypeVar("R", bound=Record)


class Preset:
    """The choices of a paper: its citation, and the keys that it sets."""

    def __init__(self, meaning: str, **keys: Any) -> None:
        self.meaning = meaning
        self.keys = keys


PRESETS = {
    # Section 4.2 for the coefficient of KL; the bounds are PPO's.
    "grpo": Preset(
        "Shao et al. 2024 (arXiv:2402.03300)",
        clip_low=0.2,
        clip_high=0.2,
        aggregation="sequence_mean",
        kl_coef=0.04,
        kl_estimator="k3",
    ),
    "dr_grpo": Preset(
        "GRPO without its two divisions and without KL: Liu et al. 2025 (arXiv:2503.20783)",
        normalize_std=False,
        clip_low=0.2,
        clip_high=0.2,
        aggregation="fixed_length",
    ),
    # Section 4.1. The bound on rounds is that of the authors' recipe.
    "dapo": Preset(
        "Yu et al. 2025 (arXiv:2503.14476)",
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token_mean",
        sampling_rounds=10,
        overlong_margin=0.2,
    ),
    # Section 5.1; there a step's batch is cut into four updates.
    "gspo": Preset(
        "Zheng et al. 2025 (arXiv:2507.18071); set batch.updates_per_step to 4",
        ratio_level="geometric",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean",
    ),
    # Section 3.1: no lower bound; the paper does not state the upper one, which it tuned.
    "cispo": Preset(
        "MiniMax 2025 (arXiv:2506.13585)",
        loss="cispo",
        clip_low=1.0,
        clip_high=4.0,
        aggregation="token_mean",
    ),
    # Equation 8; the coefficient of KL is TRL's.
    "rloo": Preset(
        "Ahmadian et al. 2024 (arXiv:2402.14740)",
        advantage="leave_one_out",
        loss="reinforce",
        aggregation="sequence_sum",
        kl_coef=0.05,
        kl_estimator="k1",
        kl_in="reward",
    ),
    # Section 3; the coefficients of KL are those of OpenRLHF's examples.
    "reinforce_pp": Preset(
        "REINFORCE++, Hu et al. 2025 (arXiv:2501.03262)",
        advantage="reinforce_pp",
        clip_low=0.2,
        clip_high=0.2,
        aggregation="token_mean",
        kl_coef=1e-3,
        kl_estimator="k1",
        kl_in="reward",
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with the group's mean as baseline",
        advantage="reinforce_pp_baseline",
        clip_low=0.2,
        clip_high=0.2,
        aggregation="token_mean",
        kl_coef=1e-3,
        kl_estimator="k2",
    ),
    # Table 3; episodes end, so rewards are not discounted, as in Ziegler et al. 2019
    # (arXiv:1909.08593), section 2.2.
    "ppo": Preset(
        "Schulman et al. 2017 (arXiv:1707.06347), with a critic",
        advantage="gae",
        gamma=1.0,
        gae_lambda=0.95,
        clip_low=0.2,
        clip_high=0.2,
        value_clip=0.2,
        aggregation="token_mean",
    ),
    # Section 3.
    "sapo": Preset(
        "Gao et al. 2025 (arXiv:2511.20347)",
        loss="sapo",
        sapo_temperatures=(1.0, 1.05),
        aggregation="sequence_mean",
    ),
    "distill": Preset(
        "on-policy distillation from `teacher`, Lu et al. 2025 "
        "(thinkingmachines.ai/blog/on-policy-distillation)",
        advantage="distill",
        loss="reinforce",
        aggregation="token_mean",
    ),
}
"""The values of `algorithm.preset`."""

LOSS_KEYS = {name for loss in LOSSES.values() for name in loss.defaults}
"""The keys that only some losses have; they are null for all other losses."""

PRESET_KEYS = {name for preset in PRESETS.values() for name in preset.keys} | LOSS_KEYS
"""The keys that a preset may set."""

RatioLevel = Annotated[str, OneOf(LEVELS)]


class AlgorithmConfig(Section):
    """The algorithm that turns rewards into a loss. A preset sets keys as its paper does; keys set
    beside it win.
    """

    preset: Annotated[str, OneOf(PRESETS)] | None = key(
        None, "paper whose choices are the defaults; null: as below"
    )
    group_size: Size = key(8, "answers per prompt; 1 only if answers are not compared")
    num_iterations: Size = key(1, "passes over each step's batch")

    advantage: Annotated[str, OneOf(ADVANTAGES, custom=True)] = key(
        "group", "how rewards become advantages; or your own function"
    )
    teacher: Location | None = key(
        None, "model with the same tokenizer to learn from (advantage: distill)"
    )
    normalize_std: bool = key(
        True, "divide a group's advantages by their standard deviation (advantage: group)"
    )
    combine_rewards: Literal["sum", "normalize_then_sum"] = key(
        "sum",
        "how the rewards of several functions are combined",
        sum="by their weighted sum",
        normalize_then_sum="each is normalised within its group, then summed (GDPO)",
    )
    credit: Literal["outcome", "turns"] = key(
        "outcome",
        "unit of an episode that is rewarded",
        outcome="the episode, by one reward",
        turns="each turn, by its rewards and those of later turns",
    )
    gamma: Share = key(
        1.0, "discount of rewards per turn, or per token if advantages are computed per token"
    )
    gae_lambda: Share = key(0.95, "lambda of generalised advantage estimation (advantage: gae)")

    loss: Annotated[str, OneOf(LOSSES, custom=True)] = key(
        "clip", "loss of each token; or your own function"
    )
    ratio_level: RatioLevel = key(
        "token", "level of the importance ratio of policy to old policy in the loss"
    )
    clip_low: Share | None = key(
        None, "lower bound of ratios is 1 - clip_low; null: 0.2 for clip, 1 for cispo"
    )
    clip_high: NotNegative | None = key(
        None, "upper bound of ratios is 1 + clip_high; null: 0.28 for clip, 4 for cispo"
    )
    dual_clip: Positive | None = key(
        None, "upper bound of ratios for negative advantages, such as 3; null: none"
    )
    sapo_temperatures: tuple[Softness, Softness] | None = key(
        None, "temperatures for positive and for other advantages; null: 1 and 1.05 for sapo"
    )
    value_clip: Positive | None = key(
        0.2, "largest change of a value from its old one, in units of reward; null: any (advantage: gae)"
    )
    value_coef: Positive = key(0.5, "weight of the value loss in a trunk shared with the policy")
    aggregation: Annotated[str, OneOf(AGGREGATIONS)] = key(
        "token_mean", "how token losses are reduced to one number"
    )

    kl_coef: NotNegative = key(
        0.0, "weight of KL to the initial policy; 0: no reference model is loaded"
    )
    kl_estimator: Annotated[str, OneOf(ESTIMATORS)] = key(
        "k3", "estimator of KL from a token's log-probabilities"
    )
    kl_in: Literal["loss", "reward"] = key(
        "loss",
        "where KL is applied",
        loss="it is added to the loss",
        reward="it is subtracted from the reward",
    )
    kl_clamp: Positive | None = key(None, "bound of a token's KL estimate, in nats; null: none")
    entropy_coef: NotNegative = key(0.0, "weight of the entropy bonus")
    balance_coef: NotNegative = key(
        0.0,
        "weight of the load-balancing loss of a mixture of experts; needs model.routes other than own",
    )
    high_entropy_share: Portion = key(
        1.0, "share of tokens, by highest entropy, that the policy loss counts"
    )

    tis_cap: Positive | None = key(
        2.0, "cap of the importance weight of trainer to engine; null: no correction"
    )
    tis_level: RatioLevel = key("token", "level of the importance weight of trainer to engine")
    keep_band: tuple[NotNegative, Positive] | None = key(
        None,
        "ratios of trainer to engine at which tokens or answers are kept, such as [0.5, 5]; null: at "
        "all ratios",
    )
    keep_level: RatioLevel = key("token", "level of the ratio that keep_band bounds; token: IcePop")
    stale_threshold: Positive | None = key(
        None, "leave out bad answers that the policy is this far from, in nats a token; null: none"
    )

    sampling_rounds: Size = key(
        1, "most rounds of sampling for groups with unequal rewards; 1: train on any"
    )
    oversampling: Annotated[float, Field(ge=1, le=1000)] = key(
        1.0, "prompts sampled per group that is needed; surplus groups are dropped"
    )
    at_bound: Literal["fewer", "fill"] = key(
        "fewer",
        "what happens if groups are still missing after the last round",
        fewer="train on fewer groups",
        fill="fill up with groups whose rewards are all equal",
    )
    drop_zero_variance: bool = key(False, "leave groups whose rewards are all equal out of the loss")
    overlong_filter: bool = key(False, "leave answers that were cut off out of the loss")
    overlong_margin: Share | None = key(
        None, "last share of the longest possible answer, over which the reward falls by 1; null: none"
    )
    length_strength: NotNegative = key(
        0.0, "divide rewards by 1 + length_strength * the answer's length / the group's mean length"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Fill in the preset's keys where the recipe has none. The keys of a loss apply only with
        that loss.
        """
        if not isinstance(values, dict):
            return values
        chosen = [values.get("preset", ""), values.get("loss", "")]
        if not all(isinstance(name, str | None) for name in chosen):
            return values  # types are checked afterwards
        preset = PRESETS[values["preset"]].keys if values.get("preset") in PRESETS else {}
        loss = values.get("loss", preset.get("loss", "clip"))
        if loss != preset.get("loss", "clip"):
            preset = {name: value for name, value in preset.items() if name not in LOSS_KEYS}
        return (LOSSES[loss].defaults if loss in LOSSES else {}) | preset | values

    @property
    def advantage_record(self) -> Advantage:
        """The record of the advantage. Raises UserError if it is the user's function and cannot be
        loaded.
        """
        return _record("advantage", self.advantage, ADVANTAGES, Advantage)

    @property
    def loss_record(self) -> Loss:
        """The record of the loss. Raises UserError if it is the user's function and cannot be
        loaded.
        """
        return _record("loss", self.loss, LOSSES, Loss)

    @property
    def by_turns(self) -> bool:
        """True if each turn has rewards of its own."""
        return self.credit == "turns"

    @property
    def rewards_apart(self) -> bool:
        """True if the rewards of each function are normalised separately."""
        return self.combine_rewards == "normalize_then_sum"

    @property
    def kl_in_reward(self) -> bool:
        """True if KL is subtracted from rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def kl_in_loss(self) -> bool:
        """True if KL is a term of the loss."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def selects_groups(self) -> bool:
        """True if prompts are sampled until enough groups have rewards that differ."""
        return self.sampling_rounds > 1 or self.oversampling > 1


def _record(where: str, name: str, table: Mapping[str, R], kind: Callable[..., R]) -> R:
    if name in table:
        return table[name]
    try:
        record = kind(load(name), "your own", source=f"algorithm.{where}: {name}")
    except ValueError as error:
        raise UserError(f"algorithm.{where}: {error}") from error
    record.check_signature(AlgorithmConfig.model_fields)
    return record


def check_algorithm(algorithm: AlgorithmConfig, updates: int, shared_critic: bool) -> Iterator[str]:
    """Yield a sentence, with keys and remedy, for each combination that does not work; `updates` is
    per step.
    """
    try:
        loss = algorithm.loss_record
        advantage = algorithm.advantage_record
    except UserError as error:
        yield str(error)
        return
    yield from _check_loss(algorithm, loss, updates)
    yield from _check_advantage(algorithm, advantage)
    yield from _check_other_models(algorithm, advantage, shared_critic)
    if algorithm.rewards_apart:
        if not advantage.sums:
            yield _goes_with(algorithm, "combine_rewards", _names(ADVANTAGES, attrgetter("sums")))
        for name, off in (("credit", "outcome"), ("length_strength", 0), ("kl_in", "loss")):
            if getattr(algorithm, name) != off:
                both = f"algorithm.{name} and combine_rewards: normalize_then_sum both"
                yield f"{both} change the rewards that are compared: leave out one"
    yield from _check_kl(algorithm, advantage)
    band = algorithm.keep_band
    if band is not None and not band[0] <= 1 <= band[1]:
        yield (
            f"algorithm.keep_band is {list(band)}, but must include 1, the ratio of equal "
            "probabilities: widen it"
        )
    if algorithm.at_bound == "fill" and not algorithm.selects_groups:
        yield (
            "algorithm.at_bound is fill, but all groups are kept: set sampling_rounds or oversampling "
            "above 1"
        )


def _names(table: Mapping[str, R], fits: Callable[[R], Any], last: str = "and") -> str:
    *names, name = [name for name, record in table.items() if fits(record)]
    return f"{', '.join(names)} {last} {name}" if names else name


def _goes_with(algorithm: AlgorithmConfig, name: str, names: str) -> str:
    value = getattr(algorithm, name)
    return (
        f"algorithm.{name} is {value}, which works with the advantages {names}, not with "
        f"{algorithm.advantage}"
    )


def _check_loss(algorithm: AlgorithmConfig, loss: Loss, updates: int) -> Iterator[str]:
    name = algorithm.loss
    for key_name in sorted(LOSS_KEYS):
        if not loss.takes(key_name) and getattr(algorithm, key_name) is not None:
            owners = _names(LOSSES, methodcaller("takes", key_name), "or")
            yield (
                f"algorithm.{key_name} is set, but algorithm.loss is {name}: it belongs to {owners}, so "
                "leave it out"
            )
        elif (
            not loss.source
            and loss.defaults.get(key_name) is not None
            and getattr(algorithm, key_name) is None
        ):
            yield (
                f"algorithm.{key_name} is null, but the loss {name} needs it: leave it out, or give a "
                "number"
            )
    if not loss.has_ratios and updates > 1:
        yield (
            f"algorithm.loss is {name}, but batch.updates_per_step * algorithm.num_iterations = "
            f"{updates}: without ratios only the first update is on-policy, so make it 1"
        )
    if not loss.takes("log_ratio") and LEVELS[algorithm.ratio_level].by_answer:
        yield (
            f"algorithm.ratio_level is {algorithm.ratio_level}, but the loss {name} has no ratios: "
            "leave it out"
        )
    highest = 1 + (algorithm.clip_high or 0)
    if algorithm.dual_clip is not None and algorithm.dual_clip <= highest:
        yield (
            f"algorithm.dual_clip is {algorithm.dual_clip:g}, but must be above 1 + clip_high = "
            f"{highest:g}"
        )


def _check_advantage(algorithm: AlgorithmConfig, advantage: Advantage) -> Iterator[str]:
    name = algorithm.advantage
    size = algorithm.group_size
    selective = algorithm.selects_groups or algorithm.drop_zero_variance
    if size < 2 and advantage.compares:
        compared = f"answers are compared within their group (advantage: {name})"
        yield f"algorithm.group_size is {size}, but {compared}: it must be at least 2"
    if size < 2 and selective:
        yield (
            "algorithm.group_size is 1, so rewards differ in no group: train on all groups, without "
            "selecting any"
        )
    if selective and not advantage.takes("rewards"):
        yield (
            f"algorithm.advantage is {name}, which uses no rewards: train on all groups, without "
            "selecting any"
        )
    if algorithm.by_turns and not advantage.by_turn:
        yield _goes_with(algorithm, "credit", _names(ADVANTAGES, attrgetter("by_turn")))
    if advantage.nonnegative and algorithm.overlong_margin is not None:
        yield (
            f"algorithm.overlong_margin makes rewards negative, and {name} divides by their mean: leave "
            "out one"
        )


def _check_other_models(
    algorithm: AlgorithmConfig, advantage: Advantage, shared_critic: bool
) -> Iterator[str]:
    name = algorithm.advantage
    taught = advantage.takes("teacher_logprobs")
    if shared_critic and not advantage.takes("values"):
        names = _names(ADVANTAGES, methodcaller("takes", "values"))
        yield f"critic.shared is set, but algorithm.advantage is {name}: only {names} has a critic"
    if taught and algorithm.teacher is None:
        yield "algorithm.teacher is missing: name the model to distill from"
    if not taught and algorithm.teacher is not None:
        names = _names(ADVANTAGES, methodcaller("takes", "teacher_logprobs"))
        yield f"algorithm.teacher is set, but algorithm.advantage is {name}: only {names} has a teacher"
    if taught and algorithm.kl_coef > 0:
        yield "algorithm.kl_coef is set, but the teacher takes the reference's place: set it to 0"


def _check_kl(algorithm: AlgorithmConfig, advantage: Advantage) -> Iterator[str]:
    name = algorithm.kl_estimator
    estimator = ESTIMATORS[algorithm.kl_estimator]
    if algorithm.kl_in_reward:
        if not estimator.in_reward:
            right = _names(ESTIMATORS, attrgetter("in_reward"))
            remedy = f"in the reward only {right} is unbiased: set it to {right}"
            yield f"algorithm.kl_estimator is {name}, but {remedy}"
        if advantage.nonnegative:
            divides = f"{algorithm.advantage} divides by their mean"
            yield (
                f"algorithm.kl_in is reward, which makes some rewards negative, and {divides}: set it "
                "to loss"
            )
        if algorithm.by_turns and advantage.compares:
            yield (
                "algorithm.kl_in is reward, but turns are compared by their own rewards alone: set it "
                "to loss"
            )
    elif algorithm.kl_in_loss and not estimator.in_loss:
        right = _names(ESTIMATORS, attrgetter("in_loss"), "or")
        yield (
            f"algorithm.kl_estimator is {name}, whose gradient in the loss is 0 on average: set it to "
            f"{right}"
        )
