"""Tools with tensor parallelism: a tool is called once, and every rank gets the same result."""

import os
import uuid
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch.distributed as dist
import yaml

from generation.compat.object_broadcast import broadcast_across_tp
from generation.engine.sampling import SamplingSettings
from generation.rollouts.episodes import RolloutSettings
from sharding.ranks import agreed, all_reduce_sum, exchange, rank
from tests.support.launch import run_ranks
from trainer.config.recipe import load_config
from trainer.data import Prompt, load_tokenizer
from trainer.distributed import destroy_process_group, init_process_group, store
from trainer.engines import start_engine, stop_engine
from trainer.rewards.reward_pool import RewardPool
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.pool import Pool, Terms

if TYPE_CHECKING:
    from tests.conftest import TinyModel

TURNS = 50
CALLS = {"tool": 0}


class RandomTool:
    """Plays fifty turns with a tool that never repeats a result, so that ranks that each called it would differ."""

    HOME = "tests.distributed.generation.test_tool_ranks"

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        outputs = llm.generate(prompts, sampling_params)
        for _ in range(TURNS - 1):
            texts = [output.prompt + output.outputs[0].text + tool_result() for output in outputs]
            outputs = llm.generate(texts, sampling_params)
        return outputs


def tool_result() -> str:
    CALLS["tool"] += 1
    return uuid.uuid4().hex


@pytest.mark.timeout(900)
def test_a_random_tool_for_fifty_turns_leaves_two_ranks_with_the_same_ids(
    tiny_model: "TinyModel", tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    sections = {
        "model": {"path": str(tiny_model())},
        "data": {"path": str(tmp_path)},
        "engine": {
            "tensor_parallel_size": 2,
            "max_model_len": 2048,
            "kv_cache_gib": 0.0625,
            "plain_cpu_weights": True,
        },
        "policy": {"dtype": "float32"},
        "rollout": {"sampler": f"{RandomTool.HOME}:RandomTool"},
    }
    recipe.write_text(yaml.safe_dump(sections))
    output = run_ranks(rollout_on_two_ranks, 2, timeout=800, arguments=[str(recipe)])
    assert output.count("the same on both ranks") == 2


def rollout_on_two_ranks(recipe: str) -> None:
    """Run a rollout on an engine that both ranks share, and compare what the ranks have."""
    config = load_config(Path(recipe), [])
    init_process_group(500, device="cpu")
    tokenizer = load_tokenizer(config.model)
    plan = RolloutLevel(config, tokenizer)
    with agreed("starting the engine"):
        leader = start_engine(config, on_cuda=False)
    assert (leader is not None) == (rank() == 0)  # one engine for both; its tools run on its rank
    if leader is not None:
        leader.engine.state.adopt_checkpoint(0)
    prompts = [Prompt(0, tuple(range(20, 24)), {"prompt": "go", "answer": ""})]
    settings = RolloutSettings(2, SamplingSettings(max_tokens=1), policy_version=0, seed=0, step=1)
    try:
        ended = Pool(leader, tokenizer, RewardPool(config.reward), store(), plan).run(
            prompts, settings, Terms(500)
        )
    finally:
        stop_engine(leader)
    assert [(t.turns, t.error) for t in ended] == [(TURNS, "")] * 2, [(t.turns, t.error) for t in ended]
    here = [t.trajectory for t in ended if t.trajectory is not None]  # only on the engine's rank
    masked = [
        tokenizer.decode([i for i, m in zip(t.response_ids, t.loss_mask, strict=True) if not m])
        for t in here
    ]
    assert all(len(text) >= 32 * (TURNS - 1) for text in masked)
    assert len(set(masked)) == (2 if rank() == 0 else 0)
    mine, other = exchange(msgspec.msgpack.encode([replace(t, trajectory=None) for t in ended]))
    assert mine == other
    # This file is loaded twice: as a script, and by the recipe
    calls = import_module(RandomTool.HOME).CALLS["tool"]
    assert all_reduce_sum({"calls": calls}) == {"calls": 2 * (TURNS - 1)}
    assert calls == (2 * (TURNS - 1) if rank() == 0 else 0)
    print("the same on both ranks", flush=True)
    destroy_process_group()


def test_objects_of_every_kind_reach_all_ranks_of_a_group() -> None:
    run_ranks(broadcasts, 4)


def broadcasts() -> None:
    """Broadcast every kind of value in the group of all ranks, and in two groups side by side."""
    init_process_group(60, device="cpu")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank() // 2]
    values: list[Any] = [None, "", {"prompts": ["a", b"\x00\xff", [1, 2.5, True]]}, [], "x" * 100_000]
    for value in values:  # empty values are broadcast, too
        assert (
            broadcast_across_tp(value, src=0) == value
            if rank() == 0
            else broadcast_across_tp(src=0) == value
        )
    assert broadcast_across_tp([rank()], src=3) == [3]
    # Two groups side by side, as engine groups are: `src` counts within the group.
    assert broadcast_across_tp({"from": rank()}, src=1, group=group) == {"from": 2 * (rank() // 2) + 1}
    pid = broadcast_across_tp(os.getpid(), group=group)
    assert (pid == os.getpid()) == (rank() % 2 == 0)
    with pytest.raises(TypeError, match="rank 0 has an object that cannot be broadcast"):
        broadcast_across_tp(object() if rank() == 0 else None)
    assert broadcast_across_tp("after" if rank() == 0 else None) == "after"  # no rank is left waiting
    destroy_process_group()
    assert broadcast_across_tp("alone") == "alone"
