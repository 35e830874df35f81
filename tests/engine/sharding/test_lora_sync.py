"""Adapters on a real engine: sent alone they change log-probabilities as PEFT does, and wrong ones are named."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from generation.engine.engine import Leader
from generation.engine.lifecycle import EngineStateError
from generation.engine.sampling import SamplingSettings
from generation.engine.slices import Turnstile
from generation.exact_ids import Generation
from sharding.manager import ShardingManager
from sharding.ranks import RemoteError
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource, WeightSource, one_piece
from tests.support.colocated import assert_replay_helps, gaps, start_engine, stop
from tests.support.sliced import Episodes
from trainer.build import adapter_source, weight_source
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.policy import FsdpPolicy
from trainer.policy.lora import adapter_format, factors, save_adapter

LORA = LoraConfig(rank=4, alpha=8)
PROMPT = [14, 50, 77, 120, 9]


@pytest.fixture(scope="module")
def leaders(tiny_qwen2: Path) -> Iterator[tuple[Leader, Leader]]:
    """Yield an engine that applies adapters, and one without; they are forked, as there is no process group yet."""
    leaders = start_engine(tiny_qwen2, lora_rank=LORA.rank, keyed_noise=True), start_engine(tiny_qwen2)
    yield leaders
    for leader in leaders:
        stop(leader)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leader]:
    """Yield an engine large enough that bfloat16 routes more than one in twenty tokens differently."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("mixture"), architecture="qwen3_moe", tied=False, layers=4, experts=16
    )
    leader = start_engine(folder, dtype="bfloat16", routes=True, max_num_seqs=16)
    yield leader
    stop(leader)


@pytest.fixture(scope="module")
def policy(
    tiny_qwen2: Path, leaders: tuple[Leader, Leader], mixture: Leader, one_rank: None
) -> FsdpPolicy:
    return FsdpPolicy(
        ModelConfig(path=str(tiny_qwen2)), PolicyConfig(dtype="float32"), torch.device("cpu"), lora=LORA
    )


@torch.no_grad()
def learn(policy: FsdpPolicy, seed: int, scale: float = 0.2) -> None:
    """Give the adapters random values, B not 0, and the next version."""
    generator = torch.Generator().manual_seed(seed)
    for factor in factors(policy.model).values():
        factor.to_local().copy_(torch.randn(factor.shape, generator=generator) * scale)
    policy.updates.applied += 1


@contextmanager
def manager(
    leader: Leader, policy: FsdpPolicy, source: WeightSource, alone: bool
) -> Iterator[ShardingManager]:
    """Return a manager with buckets far smaller than the adapter."""
    adapter = adapter_format(policy.model, LORA) if alone else None
    with tempfile.TemporaryDirectory(prefix="hotbunk-test-") as folder:
        shifts = ShardingManager(
            source,
            policy.device,
            SyncSettings("full", 1 << 14, 60),
            Path(folder),
            leader=leader,
            adapter=adapter,
        )
        shifts.connect()
        try:
            yield shifts
        finally:
            shifts.close()


def peft_logprobs(
    policy: FsdpPolicy, base: Path, folder: Path, token_ids: list[int]
) -> tuple[list[float], list[float]]:
    """Return log-probabilities of `token_ids[1:]` from PEFT with the exported adapter, and from the base model."""
    save_adapter(policy.model, LORA, str(base), folder)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()

    @torch.no_grad()
    def logprobs() -> list[float]:
        table = torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)
        return [table[i, token].item() for i, token in enumerate(token_ids[1:])]

    with model.disable_adapter():
        base_logprobs = logprobs()
    return logprobs(), base_logprobs


def largest(first: list[float], second: list[float]) -> float:
    """Return the largest absolute difference."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def check_shifts(
    shifts: ShardingManager, leader: Leader, policy: FsdpPolicy, base: Path, folder: Path
) -> None:
    """Two versions agree with PEFT on the same prompt, whose cached prefix the second must not use."""
    for seed in (1, 2):
        learn(policy, seed)
        with shifts.generation_shift(policy):
            settings = SamplingSettings(max_tokens=40, temperature=1.0)
            coroutine = leader.engine.complete(PROMPT, settings, seed=0, policy_version=policy.version)
            sampled = leader.thread.run(coroutine, 60, "a completion")
            token_ids = PROMPT + sampled.token_ids
            held = leader.thread.run(leader.engine.prompt_logprobs(token_ids), 60, "log-probabilities")
        adapted, plain = peft_logprobs(policy, base, folder, token_ids)
        assert largest(adapted, plain) > 0.1
        assert largest(held, adapted) < 1e-4
        assert largest(sampled.logprobs, adapted[len(PROMPT) - 1 :]) < 1e-4


def test_an_adapter_sent_alone_gives_pefts_log_probabilities(
    leaders: tuple[Leader, Leader], policy: FsdpPolicy, tiny_qwen2: Path, tmp_path: Path
) -> None:
    leader, _ = leaders
    with manager(leader, policy, adapter_source(policy, torch.float32), alone=True) as shifts:
        shifts.sleep()
        check_shifts(shifts, leader, policy, tiny_qwen2, tmp_path)
        assert shifts.report.verified == "probe"
        assert shifts.report.nbytes < 100_000, "only the adapter may be sent"
        held = leader.thread.run(leader.engine.llm.list_loras(), 60, "the adapters held")
        assert held == [2], "one adapter, whose number is never reused"
        with shifts.generation_shift(policy):
            check_slices(leader, policy.version)
    check_prefix_mismatch(leader, policy)


def check_slices(leader: Leader, version: int) -> None:
    """An answer with the adapter is the same in slices: its cached prefix belongs to the adapter, too."""

    async def answer(turnstile: Turnstile | None) -> Generation:
        settings = SamplingSettings(max_tokens=60)
        return await leader.engine.complete(
            PROMPT, settings, seed=5, policy_version=version, turnstile=turnstile
        )

    uncut = leader.thread.run(answer(None), 60, "a completion")
    with Episodes(leader, 7, [answer]) as episodes:
        (cut,) = episodes.results(version)
    assert (cut.token_ids, cut.finish_reason, cut.versions) == (
        uncut.token_ids,
        uncut.finish_reason,
        [(version, 0)],
    )
    assert cut.logprobs == pytest.approx(uncut.logprobs, abs=1e-4)


def check_prefix_mismatch(leader: Leader, policy: FsdpPolicy) -> None:
    """Name that vLLM has in no module raise; elsewhere such adapters silently have no effect."""
    wrong = FsdpWeightSource(
        list(factors(policy.model).items()),
        torch.float32,
        lambda name, shape: one_piece(
            "base_model.model.transformer." + name.replace(".default.", "."), shape
        ),
    )
    with manager(leader, policy, wrong, alone=True) as shifts:
        with pytest.raises(
            RemoteError, match="read by no part of the engine's model: base_model.model.transformer"
        ):
            shifts.wake(policy)
    with pytest.raises(EngineStateError, match="no version"):
        leader.engine.state.usable_version()


def test_merged_copies_give_pefts_log_probabilities(
    leaders: tuple[Leader, Leader], policy: FsdpPolicy, tiny_qwen2: Path, tmp_path: Path
) -> None:
    _, leader = leaders
    with manager(leader, policy, weight_source(policy, torch.float32), alone=False) as shifts:
        shifts.sleep()
        check_shifts(shifts, leader, policy, tiny_qwen2, tmp_path)
        assert shifts.report.verified == "full"


def test_adapters_on_a_mixture_are_merged_and_replay_the_engines_routes(
    mixture: Leader, one_rank: None
) -> None:
    """The engine is in bfloat16, and the float32 trainer is closer to it with its routes."""
    lora = LoraConfig(rank=4, alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = ModelConfig(path=mixture.engine.settings.model, routes="engine")
    policy = FsdpPolicy(model, PolicyConfig(dtype="float32"), torch.device("cpu"), lora=lora)
    assert policy.routing is not None
    sampled: list[Generation] = []
    with manager(mixture, policy, weight_source(policy, torch.bfloat16), alone=False) as shifts:
        shifts.sleep()
        for seed in (1, 2):
            learn(policy, seed, scale=0.05)  # with larger ones, rounding would hide the effect of routes
            with shifts.generation_shift(policy):
                sampled = mixture.thread.run(answers(mixture, policy.version), 60, "answers")
        assert shifts.report.verified == "full" and shifts.report.unreplayable == {}
    gaps_by_replay = gaps(
        lambda batch: policy.score([batch], 1.0)[0].logprobs, sampled, policy.routing.format
    )
    assert_replay_helps(gaps_by_replay)


async def answers(leader: Leader, version: int) -> list[Generation]:
    """Sample 16 answers at the same time."""
    settings, prompts = SamplingSettings(max_tokens=100), [[14, 50, 77, n] for n in range(120, 136)]
    calls = [
        leader.engine.complete(p, settings, seed=n, policy_version=version)
        for n, p in enumerate(prompts)
    ]
    return await asyncio.gather(*calls)
