"""Losses, gradients and advantages against TRL's own code, on the same numbers.

TRL's trainers are made without their constructors: what they would ask of a model is given to them.
"""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
    # 10 s for what is not used here
    from trl.trainer import grpo_trainer, rloo_trainer
from trl.rewards.other_rewards import get_soft_overlong_punishment

from trainer.algorithms import advantages, aggregation, corrections, kl, losses, shaping
from trainer.algorithms.losses import log_ratio
from trainer.config.algorithm import AlgorithmConfig
from trainer.learning.groups import MiniBatch
from trainer.learning.learner import mark_high_entropy
from trainer.learning.policy_loss import PolicyLoss
from trainer.policy.packing import make_layout
from trainer.types import MicroBatch, Outputs

Tensor = torch.Tensor
LENGTHS = [7, 1, 4, 0, 1, 6]  # a fully masked row and rows of length one among them
LONGEST = 9


def batch(spread: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    """Six sequences in float64, with tool tokens in the first; `old` and `engine` deviate by `spread` from `new`."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)

    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).double()
    mask[0, 2:4] = 0
    new = -noise(2.0).abs()
    return {
        "mask": mask,
        "new": (new * mask).requires_grad_(),
        "old": (new + noise(spread)) * mask,
        "engine": (new + noise(spread)) * mask,
        "reference": (new + noise(0.5)) * mask,
        # TRL's threshold is a float32
        "entropy": (noise(1.0).abs().float().double() * mask).requires_grad_(),
        "advantages": torch.tensor([1.5, -0.7, -1.1, 2.0, 0.4, 0.0], dtype=torch.float64),
    }


def awkward(kind: str) -> dict[str, Tensor]:
    """Return ratios far from 1, upwards and downwards, under advantages of both signs; "huge" ones only where they are
    cut.
    """
    data = batch()
    far = torch.tensor([[12.0], [12.0], [-12.0], [12.0], [-12.0], [12.0]], dtype=torch.float64)
    if kind == "huge":
        far = torch.tensor([[40.0], [-40.0], [-40.0], [40.0], [40.0], [-40.0]], dtype=torch.float64)
    data["old"] = (data["new"].detach() - far) * data["mask"]
    return data


def accelerator() -> SimpleNamespace:
    """Return an accelerator of one process, which gathers only its own values."""
    return SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        num_processes=1,
        pad_across_processes=lambda x, **_: x,
        device=torch.device("cpu"),
        process_index=0,
        sync_gradients=True,
    )


def grpo(**settings: Any) -> Any:
    """Return a GRPOTrainer with the attributes that `_compute_loss` uses."""
    trainer = grpo_trainer.GRPOTrainer.__new__(grpo_trainer.GRPOTrainer)
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    arguments |= {key: settings.pop(key) for key in list(settings) if key in arguments}
    fields = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LONGEST,
        "args": SimpleNamespace(**arguments),
        "accelerator": accelerator(),
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
    } | settings
    trainer.__dict__.update(fields)
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0.0
    return trainer


def trl_loss(data: dict[str, Tensor], trainer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return TRL's loss and its gradients with respect to log-probabilities and entropies."""
    ids = torch.zeros(data["mask"].shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"],
        "sampling_per_token_logps": data["engine"],
        "num_items_in_batch": data["mask"].sum(),
        "old_logps": data["old"].sum(dim=1),
        "importance_sampling_ratio": data.get("ratio"),
    }
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (data["new"], data["entropy"], None)
    return differentiated(trainer._compute_loss(None, inputs), data)


def differentiated(loss: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (data["new"], data["entropy"])
    return loss.detach(), *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def our_loss(data: dict[str, Tensor], per_token: Tensor, name: str, denominator: float) -> Tensor:
    return (per_token * aggregation.weights(data["mask"], name, denominator, denominator, LONGEST)).sum()


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert any(bool(other.any()) for other in theirs)


TOKENS, ROWS = float(sum(LENGTHS) - 2), float(len(LENGTHS))


def learners_loss(data: dict[str, Tensor], config: AlgorithmConfig) -> Tensor:
    """Return the value of `PolicyLoss` for the batch, with the recipe's keys."""
    mask, ids = data["mask"], torch.zeros(len(LENGTHS), max(LENGTHS) + 1, dtype=torch.long)
    advantages_, reference = data["advantages"].unsqueeze(1).expand_as(mask), data["reference"]
    rows = list(range(len(LENGTHS)))
    layout, beside = make_layout(mask, LENGTHS), reference if config.kl_coef else None
    micro_batch = MicroBatch(
        ids, mask, data["engine"], advantages_, LENGTHS, layout, rows, data["old"], beside
    )
    if config.high_entropy_share < 1:
        before = Outputs(data["new"].detach(), data["entropy"].detach())
        mark_high_entropy([micro_batch], [before], config.high_entropy_share)
    loss = PolicyLoss(config, MiniBatch([], [micro_batch], int(TOKENS), int(ROWS)), LONGEST)
    return loss(micro_batch, Outputs(data["new"], data["entropy"]))[0]


BATCHES = {"ordinary": batch, "far": lambda: awkward("far"), "huge": lambda: awkward("huge")}


def surrogate(kind: str, data: dict[str, Tensor]) -> Tensor:
    """Compute our loss under TRL's name for it."""
    new, advantage = data["new"], data["advantages"]
    level = "geometric" if kind in ("gspo", "luspo") else "token"
    ratio = log_ratio(new, data["old"], data["mask"], level)
    if kind == "cispo":
        return losses.cispo(ratio, new, advantage, 1.0, 4.0)[0]
    if kind == "sapo":
        return losses.sapo(ratio, advantage)[0]
    return losses.clipped_surrogate(ratio, advantage, 0.2, 0.28, 3.0 if kind == "dual_clip" else None)[0]


@pytest.mark.parametrize("data", BATCHES)
@pytest.mark.parametrize(
    ("kind", "aggregate", "denominator", "settings"),
    [
        ("grpo", "sequence_mean", ROWS, {}),
        ("bnpo", "token_mean", TOKENS, {"loss_type": "bnpo"}),
        ("dapo", "token_mean", TOKENS, {"loss_type": "dapo"}),
        ("dr_grpo", "fixed_length", ROWS, {"loss_type": "dr_grpo"}),
        ("dual_clip", "token_mean", TOKENS, {"loss_type": "dapo", "delta": 3.0}),
        ("gspo", "sequence_mean", ROWS, {"importance_sampling_level": "sequence"}),
        ("luspo", "sequence_sum", ROWS, {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
        ("cispo", "token_mean", TOKENS, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("sapo", "sequence_mean", ROWS, {"loss_type": "sapo"}),
    ],
)
def test_policy_losses_are_trls(
    data: str, kind: str, aggregate: str, denominator: float, settings: dict[str, Any]
) -> None:
    numbers = BATCHES[data]()
    ours = our_loss(numbers, surrogate(kind, numbers), aggregate, denominator)
    assert_same(differentiated(ours, numbers), trl_loss(numbers, grpo(**settings)))


@pytest.mark.parametrize("data", BATCHES)
@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("grpo", {"epsilon_high": 0.2, "beta": 0.04}),
        ("dr_grpo", {"loss_type": "dr_grpo", "epsilon_high": 0.2}),
        ("dapo", {"loss_type": "dapo"}),
        ("gspo", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("sapo", {"loss_type": "sapo"}),
    ],
)
def test_the_learners_loss_under_a_preset(data: str, preset: str, settings: dict[str, Any]) -> None:
    """The whole loss, assembled from the recipe's keys, equals TRL's, without the correction, which TRL's defaults
    lack.
    """
    numbers = BATCHES[data]()
    config = AlgorithmConfig(preset=preset, tis_cap=None)  # type: ignore[arg-type]
    ours = learners_loss(numbers, config)
    assert_same(differentiated(ours, numbers), trl_loss(numbers, grpo(**settings)))


@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_in_the_loss_is_trls(unbiased: bool) -> None:
    data = batch()
    estimator = "unbiased_k3" if unbiased else "k3"
    estimate = kl.divergence(estimator, data["new"], data["old"], data["reference"])
    ours = our_loss(data, surrogate("grpo", data) + 0.3 * estimate, "sequence_mean", ROWS)
    theirs = trl_loss(data, grpo(beta=0.3, use_bias_correction_kl=unbiased))
    assert_same(differentiated(ours, data), theirs)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_high_entropy_tokens_are_chosen_as_in_trl(share: float) -> None:
    data = batch()
    config = AlgorithmConfig(preset="dapo", tis_cap=None, high_entropy_share=share)
    theirs = trl_loss(data, grpo(loss_type="dapo", top_entropy_quantile=share))
    assert_same(differentiated(learners_loss(data, config), data), theirs)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize(("preset", "loss_type"), [("dapo", "dapo"), ("grpo", "grpo")])
def test_the_entropy_bonus_differs_only_by_the_averaging(
    preset: str, loss_type: str, share: float
) -> None:
    """Ours goes over all trainable tokens, averaged as the loss is; TRL's is the mean over the tokens of high entropy.

    docs/algorithms.md has both formulas. They are one where all tokens count and the loss is their mean.
    """
    data = batch()
    settings = {
        "preset": preset,
        "kl_coef": 0.0,
        "tis_cap": None,
        "clip_high": 0.28,
        "high_entropy_share": share,
    }
    config = AlgorithmConfig(**settings, entropy_coef=0.1)
    ours = differentiated(learners_loss(data, config), data)
    theirs = trl_loss(data, grpo(loss_type=loss_type, entropy_coef=0.1, top_entropy_quantile=share))
    mask, entropies = data["mask"], data["entropy"].detach()
    cut = torch.quantile(entropies[mask.bool()].float(), 1 - share)
    chosen = mask * (entropies.float() >= cut)
    own_weights = (
        mask / TOKENS if preset == "dapo" else mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / ROWS
    )
    difference = -0.1 * (own_weights - chosen / chosen.sum())  # of the weights of each token's entropy
    expected = (theirs[0] + (difference * entropies).sum(), theirs[1], theirs[2] + difference)
    assert_same(ours, expected)
    assert (preset == "dapo" and share == 1) == (difference.abs().max().item() < 1e-12)


@pytest.mark.parametrize("threshold", [0.01, 0.2])
def test_off_policy_sequences_are_masked_as_in_trl(threshold: float) -> None:
    data = batch(spread=1.0)
    keep = corrections.not_stale(
        data["new"], data["engine"], data["advantages"], data["mask"], threshold
    )
    assert not keep[data["mask"].bool()].all()
    ours = our_loss(data, surrogate("grpo", data) * keep, "sequence_mean", ROWS)
    assert_same(differentiated(ours, data), trl_loss(data, grpo(off_policy_mask_threshold=threshold)))


def test_a_correction_multiplies_the_loss_before_kl_is_added() -> None:
    data = batch()
    data["ratio"] = corrections.rollout_ratios(data["old"], data["engine"], data["mask"]).clamp(max=1.2)
    policy = surrogate("grpo", data) * data["ratio"] + 0.3 * kl.k3(data["new"], data["reference"])
    ours = our_loss(data, policy, "sequence_mean", ROWS)
    theirs = trl_loss(data, grpo(beta=0.3, use_vllm=True, vllm_importance_sampling_correction=True))
    assert_same(differentiated(ours, data), theirs)


def test_rloo_takes_the_ratio_of_whole_sequences() -> None:
    """The sequence's loss counts once as a value; its gradient is the sum over its tokens."""
    data = batch(spread=0.05)
    trainer = rloo_trainer.RLOOTrainer.__new__(rloo_trainer.RLOOTrainer)
    trainer.__dict__.update(grpo().__dict__)
    theirs = trl_loss(data, trainer)
    ratio = log_ratio(data["new"], data["old"], data["mask"], "sequence")
    per_token = losses.clipped_surrogate(ratio, data["advantages"], 0.2, 0.28)[0]
    # TRL's fully masked row has a ratio of 1 and a loss of -A, without a gradient.
    value = our_loss(data, per_token, "sequence_mean", ROWS) - data["advantages"][3] / ROWS
    gradient = differentiated(our_loss(data, per_token, "sequence_sum", ROWS), data)[1]
    assert_same((value.detach(), gradient), theirs[:2])


def scored(trainer: Any, data: dict[str, Tensor], rewards: Tensor) -> dict[str, Any]:
    """Return the result of `_generate_and_score_completions` for completions of the batch's lengths and rewards [N,
    R].
    """
    lengths = [max(1, n) for n in LENGTHS]
    rows = [[1] * n for n in lengths]
    sampled = [data["engine"][i, :n].tolist() for i, n in enumerate(lengths)]
    generated = ([[1]] * 6, rows, None, ["x"] * 6, sampled, {}, None, None)
    answers = (
        generated
        if isinstance(trainer, grpo_trainer.GRPOTrainer)
        else (generated[0], rows, generated[3])
    )
    logprobs = iter([(data["old"], None, None), (data["reference"], None, None)])
    fields = {
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "pad_to_multiple_of": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "num_generations": 3,
        "_generate": lambda prompts: answers,
        "_calculate_rewards": lambda *_: rewards,
        "_get_per_token_logps_and_entropies": lambda *_, **__: next(logprobs),
        "reward_weights": torch.ones(rewards.shape[1]),
        "reward_funcs": [None] * rewards.shape[1],
        "reward_func_names": [str(i) for i in range(rewards.shape[1])],
        "reward_clip_range": None,
        "_logs": defaultdict(lambda: defaultdict(list))
        | {"prompt": [], "completion": [], "advantages": []},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
        "ref_model": object(),
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "normalize_advantages": False,
    }
    trainer.__dict__.update(fields | trainer.__dict__)
    trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps = 6, 1
    trainer.args.gradient_checkpointing_kwargs = trainer.args.gradient_checkpointing = None
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.gradient_checkpointing_disable = trainer.model.gradient_checkpointing_enable = (
        lambda *_: None
    )
    module = grpo_trainer if len(answers) > 3 else rloo_trainer
    with mock.patch.object(module, "disable_gradient_checkpointing", return_value=nullcontext()):
        return trainer._generate_and_score_completions([{"prompt": "x"}] * 6)


REWARDS = {
    "random": torch.tensor([0.3, 1.0, -2.0, 0.5, 0.1, 7.0]),
    "binary": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]),
    "one group without signal": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 4.0]),
}
UNBIASED = (3 / 2) ** 0.5  # TRL's standard deviation of three over the population's


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("scale", ["group", "none"])
def test_group_advantages_are_trls(rewards: str, scale: str) -> None:
    numbers = REWARDS[rewards]
    theirs = scored(grpo(scale_rewards=scale), batch(), numbers.unsqueeze(1))["advantages"]
    if scale == "group":
        ours = advantages.group_relative(numbers.view(2, 3), epsilon=1e-4 / UNBIASED) / UNBIASED
    else:
        ours = advantages.group_relative(numbers.view(2, 3), normalize_std=False)
    assert_same((ours.flatten(),), (theirs,))


def trl_whitened(values: Tensor) -> Tensor:
    """Compute `whiten` with TRL's sample standard deviation and epsilon."""
    bessel = (len(values) / (len(values) - 1)) ** 0.5
    total = advantages.moments(values)
    return advantages.whiten(values, torch.ones_like(values), total, epsilon=1e-4 / bessel) / bessel


def test_several_rewards_normalised_then_summed() -> None:
    rewards = torch.stack([REWARDS["random"], 100.0 * REWARDS["binary"]])
    trainer = grpo(
        multi_objective_aggregation="normalize_then_sum", reward_weights=torch.tensor([1.0, 0.5])
    )
    theirs = scored(trainer, batch(), rewards.T)["advantages"]
    weights = torch.tensor([1.0, 0.5])
    summed = (
        advantages.normalize_then_sum(rewards.view(2, 2, 3), weights, epsilon=1e-4 / UNBIASED) / UNBIASED
    )
    assert_same((trl_whitened(summed.flatten()),), (theirs,))


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("rewards", REWARDS)
def test_leave_one_out_with_kl_in_the_reward(rewards: str, whitened: bool) -> None:
    data = batch()
    trainer = rloo_trainer.RLOOTrainer.__new__(rloo_trainer.RLOOTrainer)
    trainer.__dict__.update(grpo(beta=0.2).__dict__ | {"normalize_advantages": whitened})
    theirs = scored(trainer, data, REWARDS[rewards].unsqueeze(1))["advantages"]
    mask = (
        torch.arange(max(LENGTHS)) < torch.tensor([max(1, n) for n in LENGTHS]).unsqueeze(1)
    ).double()
    charged = REWARDS[rewards] + kl.penalty(kl.k1(data["old"], data["reference"]), mask, 0.2).sum(dim=1)
    ours = advantages.leave_one_out(charged.view(2, 3)).flatten()
    assert_same((trl_whitened(ours) if whitened else ours,), (theirs.float(),))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_rollout_correction_is_trls(mode: str) -> None:
    data = batch(spread=0.5)
    settings = {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
    }
    bounds = {"vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_clip_min": None}
    if mode.endswith("mask"):
        bounds["vllm_importance_sampling_clip_min"] = 0.5
    theirs = scored(grpo(**settings, **bounds), data, REWARDS["binary"].unsqueeze(1))[
        "importance_sampling_ratio"
    ]
    mask = (
        torch.arange(max(LENGTHS)) < torch.tensor([max(1, n) for n in LENGTHS]).unsqueeze(1)
    ).double()
    level = "sequence" if mode.startswith("sequence") else "token"
    ratios = corrections.rollout_ratios(data["old"], data["engine"], mask, level)
    keep = corrections.within(ratios, 0.5, 1.5)
    ours = ratios * keep if mode.endswith("mask") else ratios.clamp(max=1.5)
    trained = mask.bool()
    assert_same((ours[trained].float(),), (theirs.expand(mask.shape)[trained].float(),))


@pytest.mark.parametrize("margin", [0, 4, 10])
def test_the_soft_overlong_penalty_is_trls(margin: int) -> None:
    lengths = list(range(14))
    theirs = get_soft_overlong_punishment(10, margin)([[1] * n for n in lengths])
    ours = shaping.soft_overlong_penalty(torch.tensor(lengths), 10, margin)
    assert ours.tolist() == pytest.approx(theirs)
