"""The routes that an engine reports are those it took, and with them the trainer is closer to the engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny import make_tiny_model
from transformers import AutoModelForCausalLM

from generation.engine.engine import Engine, Leader, WorkerError
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings, check_routes
from generation.engine.slices import Turnstile
from generation.engine.vllm_compat import engine_arguments
from generation.exact_ids import Generation
from generation.rollouts.episode import PolicyLLM
from generation.rollouts.episodes import EpisodeSetup, RolloutSettings, rollout
from generation.trajectory import Trajectory
from tests.support.colocated import assert_replay_helps, gaps, start_engine, stop
from tests.support.sliced import Episodes
from trainer.config.schema import ModelConfig
from trainer.policy.hf_format import build_meta_model
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.routing import Routing, find_routers

LAYERS, EXPERTS = 4, 16
BLOCK_BYTES = 128 * 2 * 2 * 32 * LAYERS * 2  # 128 tokens' keys and values of 2 heads of 32, in bfloat16
PREEMPTED: list[int] = []


class Watched(Engine):
    """An engine that records the number of requests preempted in each step."""

    async def start(self, stat_loggers: list[Any] | None = None) -> None:
        from vllm.v1.metrics.loggers import StatLoggerBase

        class Preemptions(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if iteration_stats is not None:
                    PREEMPTED.append(iteration_stats.num_preempted_reqs)

            def log_engine_initialized(self) -> None:
                pass

        await super().start([Preemptions])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    return make_tiny_model(folder, architecture="qwen3_moe", tied=False, layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def leader(model: Path) -> Iterator[Leader]:
    """Yield an engine in bfloat16 with room for 20 KV cache blocks: 16 answers that begin a second block do not fit."""
    settings = {
        "dtype": "bfloat16",
        "routes": True,
        "kv_cache_bytes": 20 * BLOCK_BYTES,
        "max_num_seqs": 16,
    }
    leader = start_engine(model, plain=False, kind=Watched, keyed_noise=True, **settings)
    leader.engine.state.adopt_checkpoint(0)
    yield leader
    stop(leader)


def complete(leader: Leader, prompts: list[list[int]], tokens: int) -> list[Generation]:
    """Sample answers to all prompts at the same time."""

    async def run() -> list[Generation]:
        sampling = SamplingSettings(max_tokens=tokens)
        calls = [
            leader.engine.complete(p, sampling, seed=n, policy_version=0) for n, p in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    return leader.thread.run(run(), 120, "completions")


def forget(leader: Leader) -> None:
    leader.thread.run(leader.engine.reset_prefix_cache(), 60, "a reset")


def prefilled(leader: Leader, ids: list[int]) -> np.ndarray:
    """Return the routes of a request that prefills all of these ids except the last at once."""
    forget(leader)
    [alone] = complete(leader, [ids[:-1]], 1)
    assert alone.routes is not None and len(alone.routes) == len(ids) - 1
    return alone.routes


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(10, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("length", [20, 120])
def test_routes_are_those_of_a_prefill_even_of_cached_or_preempted_tokens(
    leader: Leader, length: int
) -> None:
    """There are 16 answers to four prompts, and a second round, whose prompts are in the cache."""
    prompts = [random_prompt(length, seed // 4) for seed in range(16)]
    forget(leader)
    PREEMPTED.clear()
    first = complete(leader, prompts, 40)
    longer = [g.ids + random_prompt(3, 9) for g in first[::5]]
    second = complete(leader, longer, 10)
    assert (sum(PREEMPTED) > 0) == (length == 120)
    for answer in (*first[::3], *second):
        assert answer.routes is not None and answer.routes.dtype == np.uint8
        assert answer.routes.shape == (len(answer.ids) - 1, LAYERS, 2)
        assert np.array_equal(answer.routes, prefilled(leader, answer.ids))
    assert len({answer.routes.tobytes() for answer in first if answer.routes is not None}) == 16


def test_tokens_that_were_not_sampled_have_routes_as_well(leader: Leader) -> None:
    """Two turns have a tool's result between them; one trajectory is assembled by the user's function."""
    tool_ids = random_prompt(5, 3)

    async def by_hand_rollout(
        llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> list[Trajectory]:
        chat = llm.conversation()
        await chat.sample(sampling)
        chat.add_ids(tool_ids)
        await chat.sample(sampling)
        chat.add_ids(tool_ids)
        by_hand = llm.trajectory()
        by_hand.extend(chat.response_ids)
        return [chat, by_hand]

    class Tokenizer:
        eos_token_id = 2

    async def run() -> list[Trajectory]:
        settings = RolloutSettings(2, SamplingSettings(max_tokens=8), policy_version=0, seed=1, step=1)
        left = [0]

        async def note(_: Trajectory) -> None:
            pass

        prompts, setup = [random_prompt(9, 1)], EpisodeSetup(by_hand_rollout, Tokenizer())  # type: ignore[arg-type]
        return await rollout(
            leader.engine, prompts, settings, lambda: left.pop() if left else None, note, setup
        )

    trajectories = leader.thread.run(run(), 60, "a rollout")
    assert len(trajectories) == 4
    for trajectory in trajectories:
        ids = trajectory.prompt_ids + trajectory.response_ids
        assert trajectory.error == "" and trajectory.routes is not None
        assert len(trajectory.routes) == len(ids) - 1 - len(tool_ids)
        assert np.array_equal(trajectory.routes, prefilled(leader, ids[: -len(tool_ids)]))


def test_an_answer_in_slices_has_the_routes_of_an_uncut_one(leader: Leader) -> None:
    """The routes come from the last slice, whose prompt is everything before it."""

    async def answer(turnstile: Turnstile | None) -> Generation:
        sampling, place = SamplingSettings(max_tokens=40), {"seed": 5, "policy_version": 0}
        return await leader.engine.complete(random_prompt(9, 8), sampling, turnstile=turnstile, **place)  # type: ignore[arg-type]

    uncut = leader.thread.run(answer(None), 60, "an answer")
    forget(leader)
    with Episodes(leader, 7, [answer]) as episodes:
        [cut] = episodes.results()
    assert cut == uncut and cut.routes is not None and uncut.routes is not None
    assert len(uncut.token_ids) > 7 and np.array_equal(cut.routes, uncut.routes)


def test_an_engine_that_cannot_report_routes_is_refused_before_it_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="on CPU routes need worker_extension"):
        check_routes(EngineSettings(str(model), 64, routes=True))
    on_cuda = EngineSettings(str(model), 64, routes=True, device_indices=(0,))
    check_routes(on_cuda)
    assert engine_arguments(on_cuda)["enable_return_routed_experts"] is True
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(
        ValueError, match="unset VLLM_USE_V2_MODEL_RUNNER, or set model.routes to recorded"
    ):
        check_routes(on_cuda)


def test_a_dense_engine_has_no_routes_to_report(tiny_qwen2: Path) -> None:
    with pytest.raises(
        WorkerError, match="Qwen2ForCausalLM has no routers that tell their choices: set model.routes"
    ):
        start_engine(tiny_qwen2, routes=True)


def test_each_of_several_answers_to_a_request_has_its_own_routes(leader: Leader) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        n=3, max_tokens=12, seed=4, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
    )
    prompt = random_prompt(7, 2)
    request = leader.engine.request({"prompt_token_ids": prompt}, params, policy_version=0)
    output = leader.thread.run(request, 60, "a request")
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        assert np.array_equal(answer.routed_experts, prefilled(leader, [*prompt, *answer.token_ids]))


def test_the_engines_routes_bring_the_trainer_closer_to_it(leader: Leader, model: Path) -> None:
    """The engine is in bfloat16, the trainer in float32, where some tokens are routed differently.

    The largest gap falls to a quarter or less, and the 95th percentile to a half or less.
    """
    prompts = [random_prompt(12, seed) for seed in range(16)]
    forget(leader)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    meta = build_meta_model(model, ModelConfig(path=str(model)), torch.float32, torch.device("cpu"))
    routing = Routing(policy, find_routers(meta))
    module = PolicyModule(policy, routing=routing)
    answers = complete(leader, prompts, 100)
    gaps_by_replay = gaps(lambda batch: outputs(module, batch, 1.0).logprobs, answers, routing.format)
    _, differ, _ = routing.take_counts()
    share = differ / (LAYERS * sum(len(answer.ids) - 1 for answer in answers))
    print(f"routed differently: {share:.1%}")
    assert share > 0.01
    assert_replay_helps(gaps_by_replay)
