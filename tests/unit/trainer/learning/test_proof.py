"""Shortcuts that no GPU has confirmed: a fault in one is found before the first update, and a run can do without it."""

import copy
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from generation.trajectory import Trajectory
from tests.support.learning_steps import TablePolicy, as_step, on_ranks
from tests.support.recipes import make_config
from tests.unit.trainer.policy.test_shared_prefixes import KINDS, VOCABULARY
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.learning import Learner, proof
from trainer.policy import attention, logprobs, module, paths
from trainer.policy.fused import fuse
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.shortcuts import Shortcut, in_use, leave_out
from trainer.run.keeper import RunState
from trainer.types import LossFn, MicroBatch, Outputs, UpdateStats

PROMPT = 12  # tokens that the answers of a group have in common


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let shortcuts be tried on the CPU, too."""
    monkeypatch.setattr(proof, "needs_proof", lambda device: True)
    yield
    leave_out([])


class ModulePolicy:
    """A small model that learns by gradient descent, in this process."""

    device = torch.device("cpu")
    routing = None
    version = 0

    def __init__(self, config: PretrainedConfig) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        self.model.set_attn_implementation(attention.implementation("sdpa", self.model))
        self.module = PolicyModule(self.model)
        self.work = self.module.work
        self.scored: list[int] = []  # tokens of each call
        self.passed_back: list[int] = []  # the same of passes with gradients

    @torch.no_grad()
    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        packs = [batch.layout.pack for batch in batches]
        self.scored.append(sum(len(pack.tokens) for pack in packs if pack is not None))
        return [outputs(self.module, batch, temperature) for batch in batches]

    def gradient_norms(self, batches: list[MicroBatch], temperature: float) -> Tensor:
        self.passed_back.append(sum(len(batch.layout.targets) for batch in batches))
        for batch in batches:
            result = outputs(self.module, batch, temperature)
            (result.logprobs + result.entropy).sum().backward()
        norms = [parameter.grad.double().norm() for parameter in self.module.parameters()]
        self.module.zero_grad()
        return torch.stack(norms)

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float
    ) -> UpdateStats:
        assert all(parameter.grad is None for parameter in self.module.parameters())
        for batch in batches:
            loss_fn(batch, outputs(self.module, batch, temperature))[0].backward()
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        self.module.zero_grad()
        return UpdateStats(0.0, 1.0, 0.1, False)


def steps(prompts: int = 3, size: int = 4, seed: int = 0) -> list[Trajectory]:
    """Return a step of groups of answers of unlike lengths, with unlike rewards."""
    draw = random.Random(seed)
    rows = []
    for prompt in range(prompts):
        beginning = draw.choices(range(VOCABULARY), k=PROMPT)
        for sample in range(size):
            answer = draw.choices(range(VOCABULARY), k=3 + 2 * sample)
            likely = [-4.0] * len(answer)
            rows.append(
                Trajectory(
                    prompt, sample, beginning, answer, [1] * len(answer), likely, reward=sample % 3
                )
            )
    return rows


def recipe(**batch: Any) -> TrainConfig:
    """Return a recipe whose answers share their prompts; float32, in which scores agree within 1e-4."""
    sections = {"share_prefixes": True, "shared_tokens_min": 4, "tokens_per_micro_batch": 400} | batch
    return make_config(batch=sections, policy={"dtype": "float32"})


def learn(
    policy: Any, shortcuts: dict[str, bool], config: TrainConfig | None = None, **fields: Any
) -> Learner:
    """Learns from one step, and returns the learner."""
    learner = Learner(config or recipe(), policy, None, 0, shortcuts=shortcuts, **fields)
    learner.learn(*as_step(steps()), step=1)
    return learner


def kernel(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, settings: Any) -> Tensor:
    """Return the kernel with sinks, from plain operations: sequences end to end, of unlike lengths of queries and keys."""
    (starts_q, starts_k), _, scale, (left, _) = settings
    ends, past = starts_q.tolist(), starts_k.tolist()
    parts = []
    for row in range(len(ends) - 1):
        queries = q[ends[row] : ends[row + 1]].transpose(0, 1).unsqueeze(0)
        keys, values = (x[past[row] : past[row + 1]].transpose(0, 1).unsqueeze(0) for x in (k, v))
        window = None if left < 0 else left + 1
        out = attention._by_blocks(queries, keys, values, sinks, None, 0.0, scale, window)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def with_kernel(monkeypatch: pytest.MonkeyPatch, fault: float = 0.0) -> None:
    """Put a kernel in place that takes sinks on a CPU."""
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_: True)

    def faulty(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, settings: Any) -> Tensor:
        return kernel(q, k, v, sinks + fault, settings)

    monkeypatch.setattr(attention._KernelWithSinks, "apply", faulty)


def fault_in_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of each path are one token late, as with a wrong start of a sequence."""
    gather = paths.Paths.apply
    monkeypatch.setattr(paths.Paths, "apply", lambda rows, ranges: gather(rows, ranges).roll(1, 0))


def fault_in_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's products are summed without their last column of the hidden state."""
    exact = logprobs._logits
    monkeypatch.setattr(
        logprobs, "_logits", lambda hidden, weight, *rest: exact(hidden[:, :-1], weight[:, :-1], *rest)
    )


def fault_in_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel(monkeypatch, fault=1.0)


FAULTS = {
    Shortcut.PREFIXES: ("qwen2", fault_in_prefixes, "common beginnings"),
    Shortcut.HEAD: ("qwen2", fault_in_head, "the output head in blocks"),
    Shortcut.SINKS: ("sinks and experts", fault_in_sinks, "attention sinks in the kernel"),
}


@pytest.mark.parametrize("faulty", FAULTS)
def test_a_fault_is_found_before_the_first_update_which_does_without(
    faulty: Shortcut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, break_it, label = FAULTS[faulty]
    policies = [ModulePolicy(KINDS[kind]()) for _ in range(2)]
    if kind != "qwen2":
        with_kernel(monkeypatch)
    break_it(monkeypatch)
    shortcuts: dict[str, bool] = {}
    learner = learn(policies[0], shortcuts)
    assert {name for name, stays in shortcuts.items() if not stays} == {faulty}
    assert len(shortcuts) == 2 + (kind != "qwen2")
    assert (learner.config.batch.shared_min is None) == (faulty is Shortcut.PREFIXES)
    assert in_use(faulty) is False
    said = capsys.readouterr().err
    assert (
        f"nats with {label} and" in said and "float32 explains 0.0001" in said and "does without" in said
    )
    assert "same log-probabilities with and without" in said
    # A run that has never used it learns the same.
    learn(policies[1], dict(shortcuts))
    assert not capsys.readouterr().err
    for one, other in zip(policies[0].module.parameters(), policies[1].module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["qwen2", "soft caps", "sinks and experts"])
def test_a_run_whose_shortcuts_are_right_is_the_same_bit_for_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "sinks and experts":
        with_kernel(monkeypatch)
    policies = [ModulePolicy(KINDS[kind]()) for _ in range(2)]
    shortcuts: dict[str, bool] = {}
    states = []
    for policy, decided in zip(policies, ({}, dict.fromkeys(Shortcut, True)), strict=True):
        learn(policy, decided)
        shortcuts |= decided
        states.append((torch.get_rng_state(), random.getstate()))
    assert all(shortcuts.values())
    assert capsys.readouterr().err.count("\n") == 1
    assert torch.equal(states[0][0], states[1][0]) and states[0][1] == states[1][1]
    for one, other in zip(policies[0].module.parameters(), policies[1].module.parameters(), strict=True):
        assert torch.equal(one, other) and one.grad is None


def test_the_proof_costs_a_pass_for_each_shortcut_and_a_bounded_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "TOKENS", 40)
    policy = ModulePolicy(KINDS["qwen2"]())
    learner = learn(policy, {})
    assert len(policy.scored) == 3 and max(policy.scored) <= 40
    # The last is without common beginnings
    assert policy.scored[0] == policy.scored[1] < policy.scored[2]
    learner.learn(*as_step(steps(seed=1)), step=2)
    assert len(policy.scored) == 3


@pytest.mark.parametrize("fault", ["none", "forward", "backward"])
def test_a_fault_in_fused_kernels_is_found_in_outputs_and_in_gradients(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler is put in place whose kernels are 1 % off, forward or backward alone."""

    def compile_with_fault(body: Any, **options: Any) -> Any:
        def kernel(*args: Any, **options: Any) -> Any:
            result = body(*args, **options)
            if fault == "forward" and isinstance(result, Tensor):
                return result * 1.01
            if fault == "backward" and isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(lambda gradient: gradient * 1.01)
            return result

        return kernel

    monkeypatch.setattr(torch, "compile", compile_with_fault)
    policies = [ModulePolicy(KINDS["qwen3"]()) for _ in range(2)]
    assert not fuse(policies[0].model)
    config = make_config(batch=recipe().batch.model_dump(), policy={"dtype": "float32", "compile": True})
    shortcuts: dict[str, bool] = {}
    learn(policies[0], shortcuts, config)
    assert shortcuts == {"head": True, "prefixes": True, "fused": fault == "none"}
    assert in_use(Shortcut.FUSED) is (fault == "none")
    assert len(policies[0].scored) == 4 and len(policies[0].passed_back) == 2
    said = capsys.readouterr().err
    expected = {
        "none": "with and without the output head in blocks",
        "forward": "nats with fused kernels and",
        "backward": "norms of gradients with fused kernels and without are 0.0",
    }
    assert expected[fault] in said and ("does without" in said) is (fault != "none")
    # A run that has never fused anything learns the same.
    learn(policies[1], dict(shortcuts), config)
    for one, other in zip(policies[0].module.parameters(), policies[1].module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_few_answers_are_those_within_a_number_of_tokens_and_two_at_least() -> None:
    lengths = [1000, 2000, 1096, 1, 9000, 9000]
    assert proof.first_few([0, 1, 2, 3], lengths) == [0, 1, 2]
    assert proof.first_few([4, 5, 0], lengths) == [4, 5]
    assert proof.first_few([4], lengths) == [4] and proof.first_few([], lengths) == []


def test_what_the_recipe_asks_for_by_name_is_refused_in_every_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault_in_prefixes(monkeypatch)
    message = r"^batch.share_prefixes is true, but on this device, .* apart, where float32 explains 0.0001: set it to"
    for earlier in ({}, {"prefixes": False, "head": True}):
        with pytest.raises(UserError, match=message):
            learn(ModulePolicy(KINDS["qwen2"]()), earlier, sharing_required=True)


def test_answers_without_a_common_beginning_leave_the_question_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = ModulePolicy(KINDS["qwen2"]())
    shortcuts: dict[str, bool] = {}
    learner = learn(policy, shortcuts, recipe(shared_tokens_min=50))
    assert shortcuts == {"head": True} and len(policy.scored) == 2
    learner.learn(*as_step(steps(seed=1)), step=2)
    assert len(policy.scored) == 2


def test_the_rank_that_is_furthest_off_decides_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(TablePolicy):
        """Scores of shared beginnings are off, of which one rank has some."""

        model = torch.nn.Module()
        version = 0

        def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
            results = super().score(batches, temperature)
            for batch, result in zip(batches, results, strict=True):
                if batch.layout.pack is not None and batch.layout.pack.tree is not None:
                    result.logprobs = result.logprobs + 0.5 * batch.loss_mask
            return results

    def rank() -> tuple[dict[str, bool], int | None]:
        shortcuts: dict[str, bool] = {}
        learner = Learner(recipe(), Odd(), None, 0, shortcuts=shortcuts)  # type: ignore[arg-type]
        together = steps(prompts=1, size=2)
        alone = [Trajectory(1, 0, [3] * 30, [4, 5], [1, 1], [-4.0] * 2, reward=1.0)]
        for trajectory in together + alone:
            trajectory.prompt_ids = [token % 11 for token in trajectory.prompt_ids]
            trajectory.response_ids = [token % 11 for token in trajectory.response_ids]
        learner.learn(*as_step(together + alone), step=1)
        return shortcuts, learner.config.batch.shared_min

    assert on_ranks(2, rank) == [({"prefixes": False, "head": True}, None)] * 2
    assert "0.5 apart" in capsys.readouterr().err


def test_a_checkpoint_keeps_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    fault_in_head(monkeypatch)
    state = RunState()
    learn(ModulePolicy(KINDS["qwen2"]()), state.shortcuts)
    saved = msgspec.json.decode(msgspec.json.encode(asdict(state)))
    leave_out([])
    resumed = msgspec.convert(saved, RunState, str_keys=True)
    assert resumed.shortcuts == {"head": False, "prefixes": True}
    policy = ModulePolicy(KINDS["qwen2"]())
    learn(policy, resumed.shortcuts)
    assert not in_use(Shortcut.HEAD) and not policy.scored


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    policy = ModulePolicy(KINDS["qwen2"]())
    shortcuts: dict[str, bool] = {}
    learn(policy, shortcuts)
    assert not shortcuts and not policy.scored
    assert proof.needs_proof(torch.device("cuda", 0)) and not proof.needs_proof(torch.device("cpu"))


def test_a_head_without_blocks_has_the_gradients_of_one_with_blocks() -> None:
    """Also where the model caps its logits, and in rows that backward computes again."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 8, generator=draw), torch.randn(23, 8, generator=draw)
    targets = torch.randint(23, (30,), generator=draw)
    for head in (module.Logits(), module.Logits(factor=0.5, cap=2.0, before=1.5)):
        results = []
        for without in ([], [Shortcut.HEAD]):
            leave_out(without)
            leaves = [copy.deepcopy(x).requires_grad_() for x in (hidden, weight)]
            values = logprobs.target_logprobs(*leaves, None, targets, 0.7, (7, 10), head=head)
            total = values[0].sum() + 0.3 * values[1].sum()
            results.append([*values, *torch.autograd.grad(total, leaves)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    empty = logprobs.target_logprobs(hidden[:0], weight, None, targets[:0])
    assert empty[0].shape == empty[1].shape == (0,)
