"""Which choices of the `algorithm` section go together; each check yields a sentence for everything that does not."""

from collections.abc import Iterator

from trainer.config.algorithm import LOSS_KEYS, AlgorithmConfig
from trainer.config.schema import TrainConfig

_WITHOUT_GROUPS = ("reinforce_pp", "gae", "distill")
_TURNS = ("group", "reinforce_pp", "reinforce_pp_baseline", "gae")
_SEVERAL_REWARDS = ("group", "reinforce_pp_baseline")


def check_algorithm(config: TrainConfig) -> Iterator[str]:
    """Sentences that name the keys and the remedy."""
    algorithm = config.algorithm
    yield from _check_loss(algorithm, config.batch.updates_per_step * algorithm.num_iterations)
    yield from _check_advantages(algorithm)
    yield from _check_rewards(algorithm)
    yield from _check_kl(algorithm)
    yield from _check_other_models(config)
    yield from _check_correction(algorithm)
    if algorithm.at_bound == "fill" and algorithm.sampling_rounds == 1 and algorithm.oversampling == 1:
        yield "algorithm.at_bound is fill, but all groups are kept: set sampling_rounds or oversampling above 1"


def _check_loss(algorithm: AlgorithmConfig, updates: int) -> Iterator[str]:
    loss = algorithm.loss
    for key in sorted({key for keys in LOSS_KEYS.values() for key in keys}):
        if key not in LOSS_KEYS[loss] and getattr(algorithm, key) is not None:
            owners = " or ".join(name for name, keys in LOSS_KEYS.items() if key in keys)
            yield f"algorithm.{key} is set, but algorithm.loss is {loss}: it belongs to {owners}, so leave it out"
        elif LOSS_KEYS[loss].get(key) is not None and getattr(algorithm, key) is None:
            yield f"algorithm.{key} is null, but the loss {loss} needs it: leave it out, or give a number"
    if loss == "reinforce" and updates > 1:
        yield (
            f"algorithm.loss is reinforce, but batch.updates_per_step * algorithm.num_iterations = {updates}: "
            "without ratios only the first update is that of the policy that sampled, so make it 1"
        )
    if loss == "reinforce" and algorithm.ratio_level != "token":
        yield f"algorithm.ratio_level is {algorithm.ratio_level}, but the loss reinforce has no ratios: leave it out"
    highest = 1 + (algorithm.clip_high or 0)
    if algorithm.dual_clip is not None and algorithm.dual_clip <= highest:
        yield f"algorithm.dual_clip is {algorithm.dual_clip:g}, but must be above 1 + clip_high = {highest:g}"


def _check_advantages(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, size = algorithm.advantage, algorithm.group_size
    if size < 2 and advantage not in _WITHOUT_GROUPS:
        yield (
            f"algorithm.group_size is {size}, but answers are compared within their group (advantage: {advantage}): "
            "it must be at least 2"
        )
    if size < 2 and (algorithm.sampling_rounds > 1 or algorithm.oversampling > 1 or algorithm.drop_zero_variance):
        yield "algorithm.group_size is 1, so rewards differ in no group: train on all, without choosing groups by that"
    if algorithm.credit == "turns" and advantage not in _TURNS:
        yield f"algorithm.credit is turns, which goes with the advantages {', '.join(_TURNS)}, not with {advantage}"
    if advantage == "max_rl" and algorithm.overlong_margin is not None:
        yield "algorithm.overlong_margin makes rewards negative, and max_rl divides by their mean: leave out one"


def _check_rewards(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.combine_rewards == "sum":
        return
    if algorithm.advantage not in _SEVERAL_REWARDS:
        yield (
            "algorithm.combine_rewards is normalize_then_sum, which goes with the advantages "
            f"{' and '.join(_SEVERAL_REWARDS)}, not with {algorithm.advantage}"
        )
    for key, off in (("credit", "outcome"), ("length_strength", 0), ("kl_in", "loss")):
        if getattr(algorithm, key) != off:
            yield f"algorithm.{key} and combine_rewards: normalize_then_sum both change what is compared: leave out one"


def _check_other_models(config: TrainConfig) -> Iterator[str]:
    algorithm = config.algorithm
    distill = algorithm.advantage == "distill"
    if config.critic.shared and algorithm.advantage != "gae":
        yield f"critic.shared is set, but algorithm.advantage is {algorithm.advantage}: only gae has a critic"
    if distill and algorithm.teacher is None:
        yield "algorithm.teacher is missing: name the model to distill from"
    if not distill and algorithm.teacher is not None:
        yield f"algorithm.teacher is set, but algorithm.advantage is {algorithm.advantage}: only distill has a teacher"
    if distill and algorithm.kl_coef > 0:
        yield "algorithm.kl_coef is set, but the teacher takes the reference's place: set it to 0"
    if distill and (algorithm.sampling_rounds > 1 or algorithm.oversampling > 1 or algorithm.drop_zero_variance):
        yield "algorithm.advantage is distill, which no reward decides: train on all groups, whatever their rewards"


def _check_kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    estimator = algorithm.kl_estimator
    if algorithm.kl_coef == 0:
        return
    if algorithm.kl_in == "reward":
        if estimator != "k1":
            yield f"algorithm.kl_estimator is {estimator}, but in the reward only k1 has the right mean: set it to k1"
        if algorithm.advantage == "max_rl":
            yield "algorithm.kl_in is reward, which makes some negative, and max_rl divides by their mean: use loss"
        if algorithm.credit == "turns" and algorithm.advantage not in _WITHOUT_GROUPS:
            yield "algorithm.kl_in is reward, but turns are compared by what they themselves were given: set it to loss"
    elif estimator == "k1":
        yield "algorithm.kl_estimator is k1, whose gradient in the loss is 0 on average: set it to k2 or k3"


def _check_correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    band = algorithm.keep_band
    if band is not None and not band[0] <= 1 <= band[1]:
        yield f"algorithm.keep_band is {list(band)}, but must have 1, the ratio of equals, between its bounds"
