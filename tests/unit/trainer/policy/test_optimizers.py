"""Optimizers other than AdamW: which parameters they have, what is refused before a run, and the planned bytes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support import optimizer_checks as checks
from tests.support import policy_checks
from tests.support.recipes import make_config
from trainer.config.optimizer_keys import check_optimizer
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.errors import UserError
from trainer.estimates.model_sizes import ModelSizes, model_sizes, optimizer_bytes
from trainer.estimates.time import newton_schulz_flops
from trainer.policy import FsdpPolicy, InPlacePolicy
from trainer.policy.critic import Critic
from trainer.policy.optimizer_choice import make_optimizer, try_optimizer

MUON: dict[str, Any] = {"optimizer": "muon", "dtype": "float32", "lr": 1e-3}


class Restless(torch.optim.SGD):
    """Counts its steps beside its state."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        """Steps less and less far."""
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and steps back after ten."""

    def step(self, closure: Any = None) -> Any:
        """Steps as SGD, but for every tenth step."""
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] *= -1 if group["count"] % 10 == 0 else 1
        return super().step(closure)


class Decaying(torch.optim.SGD):
    """Decays weights by a share that does not fall with the learning rate."""

    def step(self, closure: Any = None) -> Any:
        """Decays, then steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        return super().step(closure)


class Normed(torch.optim.SGD):
    """Divides gradients by the norm of their matrix."""

    def step(self, closure: Any = None) -> Any:
        """Steps along each gradient's direction."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm() + 1e-9
        return super().step(closure)


class Recalling(torch.optim.SGD):
    """Counts its steps in an attribute, and pulls weights back at every hundredth."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.done = {"steps": 0}

    def step(self, closure: Any = None) -> Any:
        """Steps as SGD, and pulls back at times."""
        self.done["steps"] += 1
        if self.done["steps"] % 100 == 0:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(0.5)
        return super().step(closure)


class Classwide(torch.optim.SGD):
    """Counts the steps of all its objects."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        """Steps as SGD."""
        type(self).count += 1
        return super().step(closure)


class Wrapping(torch.optim.SGD):
    """Leaves its steps to an optimizer that keeps its own second moments."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.inner = torch.optim.RMSprop(self.param_groups, lr=options["lr"])

    def step(self, closure: Any = None) -> Any:
        """Steps as the inner one."""
        return self.inner.step(closure)


class Late(torch.optim.Optimizer):
    """Divides by a second moment that begins after `warmup` steps."""

    def __init__(self, params: Any, lr: float, warmup: int = 5, shape: str = "weight") -> None:
        super().__init__(params, {"lr": lr, "warmup": warmup, "shape": shape})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps as SGD first, and later as RMSprop."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                direction = parameter.grad
                if state["step"] > group["warmup"]:
                    begun = (
                        torch.zeros_like(parameter)
                        if group["shape"] == "weight"
                        else parameter.new_zeros(7)
                    )
                    second = state.setdefault("second", begun)
                    if group["shape"] == "weight":
                        second.lerp_(direction.square(), 0.1)
                        direction = direction / (second.sqrt() + 1e-3)
                parameter.sub_(direction, alpha=group["lr"])


class Exiting(torch.optim.SGD):
    """Ends the process in its third step, or when it is made."""

    def __init__(self, params: Any, lr: float, at: int = 3) -> None:
        self.steps_left = at
        if not at:
            sys.exit(0)
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> Any:
        """End the process at last."""
        self.steps_left -= 1
        if not self.steps_left:
            sys.exit(0)
        return super().step(closure)


class Interrupting(torch.optim.SGD):
    """Raises what only Python itself should."""

    def step(self, closure: Any = None) -> Any:
        """Raise KeyboardInterrupt."""
        raise KeyboardInterrupt


def keys(policy: Any) -> dict[str, set[str]]:
    """Return the keys of each parameter's state that a checkpoint has."""
    saved: dict[str, set[str]] = {}
    for name in policy.state_dict()["optimizer"]:
        parameter, _, key = name.rpartition(".")
        saved.setdefault(parameter, set()).add(key)
    return saved


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "adapters", "critic", "value head"])
def test_muon_has_the_hidden_matrices_and_adamw_the_rest(
    one_rank: None, models: Path, kind: str
) -> None:
    folder = policy_checks.model_folder(
        models, *(("qwen3_moe", False) if "moe" in kind else ("qwen2", True))
    )
    model, more = (
        ModelConfig(path=str(folder)),
        {"lora": LoraConfig(rank=2)} if kind == "adapters" else {},
    )
    if kind == "critic":
        policy: Any = Critic(model, PolicyConfig(**MUON), policy_checks.CPU)
    else:
        policy = FsdpPolicy(
            model, PolicyConfig(**MUON), policy_checks.CPU, value_head="head" in kind, **more
        )
    for name, parts in keys(policy).items():
        hidden = name.endswith(checks.HIDDEN) or ".lora_" in name
        assert parts == ({"momentum_buffer"} if hidden else {"exp_avg", "exp_avg_sq"}), name
    config = make_config(model=model, policy=MUON)
    if kind in ("qwen2", "qwen3_moe", "adapters"):
        sizes = model_sizes(config, str(folder), more.get("lora", LoraConfig()))
        assert optimizer_bytes(config.policy, sizes, 1) == sum(
            tensor.nbytes for tensor in policy.state_dict()["optimizer"].values()
        )


def test_the_plan_counts_the_operations_of_muons_iterations() -> None:
    shapes = {"a": torch.Size([8, 4]), "b": torch.Size([3, 5]), "head": torch.Size([9, 4])}
    sizes = ModelSizes(config={}, shapes=shapes, layer=0, rest=0, matrices=frozenset("ab"))
    matrices = [nn.Parameter(torch.randn(shapes[name])) for name in "ab"]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(matrices, ns_steps=4).step()
    policy = PolicyConfig(optimizer="muon", optimizer_options={"ns_steps": 4})
    assert newton_schulz_flops(policy, sizes) == counter.get_total_flops() > 0
    assert newton_schulz_flops(PolicyConfig(), sizes) == 0


def test_frozen_layers_have_no_state_and_embeddings_alone_can_be_trained(
    one_rank: None, models: Path
) -> None:
    folder = policy_checks.model_folder(models)
    policy = policy_checks.make_policy(folder, **MUON | {"freeze": ["model.layers", "model.norm"]})
    assert keys(policy) == {"model.embed_tokens.weight": {"exp_avg", "exp_avg_sq"}}
    batches = policy_checks.own_batches(policy_checks.make_samples(), 60)
    assert not policy.update(
        batches, policy_checks.make_loss(batches), policy_checks.TEMPERATURE
    ).skipped


def test_a_policy_in_the_engines_memory_takes_muons_steps_bit_for_bit(
    one_rank: None, models: Path
) -> None:
    model = ModelConfig(path=str(policy_checks.model_folder(models)))
    results: list[dict[str, Tensor]] = []
    for kind in (FsdpPolicy, InPlacePolicy):
        policy = kind(model, PolicyConfig(**MUON | {"dtype": "bfloat16"}), policy_checks.CPU)
        batches = policy_checks.own_batches(policy_checks.make_samples(), 60)
        for _ in range(2):
            policy.update(batches, policy_checks.make_loss(batches), policy_checks.TEMPERATURE)
        results.append(checks.full_state(policy))
    assert all(torch.equal(results[1][name], tensor) for name, tensor in results[0].items())


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        (
            "muon",
            {"optimizer_options": {"ns_step": 3}},
            "muon refuses its arguments; correct policy.optimizer_options",
        ),
        (
            "torch.optim:SGD",
            {"optimizer_options": {"momentun": 1}},
            "SGD refuses its arguments; correct policy.opt",
        ),
        (
            "torch.optim:SDG",
            {},
            "policy.optimizer: 'torch.optim:SDG' cannot be loaded.*did you mean SGD",
        ),
        ("math:sqrt", {}, "math:sqrt is not a subclass of torch.optim.Optimizer"),
        (
            "torch.optim:Adafactor",
            {},
            r"keeps 'row_var', a tensor of shape \[6, 1\], for a weight of shape \[6, 4\]",
        ),
        ("torch.optim:SparseAdam", {}, r"SparseAdam cannot step a Tensor \(RuntimeError"),
        (
            "torch.optim:Rprop",
            {"weight_decay": 0.1},
            "policy.weight_decay is set, but torch.optim:Rprop takes no",
        ),
        ("torch.optim:Adagrad", {}, "torch.optim:Adagrad makes its state when it is built"),
        (
            "muon",
            {"optimizer_options": {"ns_steps": 100}},
            "muon fails in a trial on the CPU .ValueError",
        ),
        (
            "muon",
            {"optimizer_options": {"ns_steps": "5"}},
            "muon fails in a trial on the CPU .TypeError",
        ),
        (
            "muon",
            {"optimizer_options": {"ns_coefficients": [1, 2]}},
            "muon fails in .*: correct policy.optimizer_opt",
        ),
        ("muon", {"optimizer_options": {"eps": None}}, "muon fails in a trial on the CPU"),
        (
            f"{__name__}:Counting",
            {},
            "Counting changes 'count' of its groups in a step, which no checkpoint has",
        ),
        (
            f"{__name__}:Decaying",
            {},
            "Decaying changes weights in a step without gradients at a learning rate of 0",
        ),
        (f"{__name__}:Restless", {}, "Restless changes its attribute 'count' in a step"),
        (
            f"{__name__}:Recalling",
            {},
            "changes its attribute 'done' in a step, .*: keep it as a tensor in the state",
        ),
        (f"{__name__}:Classwide", {}, "Classwide changes its attribute 'count' in a step"),
        (f"{__name__}:Wrapping", {}, "Wrapping changes its attribute 'inner' in a step"),
        (f"{__name__}:Late", {}, "does not continue from the tensors in its state after 200 steps"),
        (
            f"{__name__}:Late",
            {"optimizer_options": {"warmup": 150}},
            "does not continue .* after 200 steps",
        ),
        (
            f"{__name__}:Late",
            {"optimizer_options": {"shape": "own"}},
            r"keeps 'second', a tensor of shape \[7\]",
        ),
        (f"{__name__}:Exiting", {}, "Exiting fails in a trial on the CPU .SystemExit: 0"),
        (
            f"{__name__}:Exiting",
            {"optimizer_options": {"at": 1}},
            "Exiting cannot step a Tensor .SystemExit: 0",
        ),
        (
            f"{__name__}:Exiting",
            {"optimizer_options": {"at": 0}},
            "Exiting refuses its arguments.*SystemExit: 0",
        ),
        (f"{__name__}:Interrupting", {}, "Interrupting cannot step a Tensor .KeyboardInterrupt"),
        (
            "torch.optim:SGD",
            {"optimizer_options": {"momentum": 5}},
            "reaches values that are not finite in 240 steps",
        ),
        (
            f"{__name__}:Normed",
            {},
            "Normed computes with whole matrices, of which each of 2 ranks has some rows",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_a_run(
    name: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        try_optimizer(PolicyConfig(optimizer=name, **more), 2)


def test_a_class_that_refuses_to_have_no_parameters_is_named() -> None:
    with pytest.raises(UserError, match="SGD refuses its arguments.*empty"):
        make_optimizer({}, (), PolicyConfig(optimizer="torch.optim:SGD"))


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        "muon",
        "torch.optim:NAdam",
        "torch.optim:RMSprop",
        "torch.optim:RAdam",
        "torch.optim:Adamax",
        f"{__name__}:Normed",
    ],
)
def test_other_optimizers_are_not_refused_and_a_trial_draws_no_random_numbers(name: str) -> None:
    before = torch.get_rng_state()
    try_optimizer(PolicyConfig(optimizer=name), 1 if "Normed" in name else 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            {"optimizer_options": {"ns_steps": 3}},
            "policy.optimizer_options is set, but policy.optimizer is adamw",
        ),
        (
            {"optimizer": "muon", "backend": "deepspeed"},
            "policy.optimizer is muon, but DeepSpeed's ZeRO is for adamw",
        ),
        (
            {"optimizer": "muon", "update_on": "host"},
            "policy.optimizer is muon, which is not for policy.update_on: host",
        ),
        (
            {"optimizer": "muon", "expert_parallel": 2},
            "policy.optimizer is muon, which is untried with policy.expert_",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"lr": 1}},
            "policy.optimizer_options has lr, which policy.lr",
        ),
        (
            {"optimizer": "a:B", "betas": [0.5, 0.9]},
            "policy.betas is set, but policy.optimizer is a:B: put",
        ),
        ({"optimizer": "muon", "betas": [0.5, 0.9]}, ""),
        (
            {"optimizer": "muon", "optimizer_options": {"ns_steps": -1}},
            "policy.optimizer_options: ns_steps is -1, but",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"ns_steps": 31}},
            "policy.optimizer_options: ns_steps is 31, but",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"ns_steps": 2.0}},
            "policy.optimizer_options: ns_steps is 2.0",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"momentum": 5.0}},
            "policy.optimizer_options: momentum is 5.0",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"momentum": 1}},
            "policy.optimizer_options: momentum is 1, but",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"eps": 0}},
            "policy.optimizer_options: eps is 0, but should be",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"nesterov": "no"}},
            "policy.optimizer_options: nesterov is 'no'",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"ns_coefficients": [1, 2]}},
            "policy.optimizer_options: ns_coeff",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"ns_coefficients": [1000, 1000, 1000]}},
            "policy.optimizer_options: ns_coefficients is [1000, 1000, 1000], but should be three numbers a, b, c such",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"ns_coefficients": [-3.4, 4.7, -2]}},
            "policy.optimizer_options",
        ),
        (
            {
                "optimizer": "muon",
                "optimizer_options": {"ns_coefficients": [1.5, -0.5, 0], "ns_steps": 9},
            },
            "",
        ),
        ({"optimizer": "muon", "optimizer_options": {"momentum": 0, "eps": 1e-9, "ns_steps": 30}}, ""),
    ],
)
def test_keys_that_do_not_go_together_are_refused(policy: dict[str, Any], sentence: str) -> None:
    problems = list(check_optimizer(PolicyConfig.model_validate(policy)))
    assert [problem.startswith(sentence) for problem in problems] == ([True] if sentence else [])


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="should be one of adamw, muon, or pkg.mod:Name"):
        PolicyConfig(optimizer="adam")
