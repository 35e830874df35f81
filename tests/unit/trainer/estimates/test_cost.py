"""The model of cost: its arithmetic by hand, what must hold however large model and machine are, and its table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.recipes import merged
from tests.unit.trainer.commands.test_plan import recipe
from trainer.cli import main
from trainer.config.schema import TrainConfig
from trainer.estimates.gpus import GPUS, Gpu
from trainer.estimates.kernels import KernelCounts, PassCount
from trainer.estimates.layouts import RankSplit, compared, comparison
from trainer.estimates.model_sizes import ModelSizes
from trainer.estimates.time import Cost, Lengths, step_costs, step_flops, update_amount, update_traffic
from trainer.model_structure import ModelFlops

GPU = Gpu(flops=1e15, memory_gib=80, memory_rate=4e12, link_rate=4e11, network_rate=5e10, pattern="")
LENGTHS = Lengths(prompt=100, answer=300)
BILLION = ModelSizes(
    config={
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "hidden_size": 2048,
        "vocab_size": 100_000,
    },
    shapes={"embeddings": torch.Size([100_000, 2048]), "head": torch.Size([100_000, 2048])}
    | {f"layers.{i}": torch.Size([20_000, 4096]) for i in range(10)},
    layer=20_000 * 4096,
    rest=2 * 100_000 * 2048,
    units={"embeddings": [torch.Size([100_000, 2048])], "head": [torch.Size([100_000, 2048])]}
    | {f"layers.{i}": [torch.Size([20_000, 4096])] for i in range(10)},
    head=100_000 * 2048,
    normed=4096,
    flops=ModelFlops(819_200_000, 819_200_000, 204_800_000, 204_800_000, 10 * 16 * 128),
)


def config(model: Path, **sections: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "run": {"device": "cuda"},
        "batch": {"prompts_per_step": 64, "tokens_per_micro_batch": 8000, "updates_per_step": 1},
        "algorithm": {"group_size": 8},
        "policy": {"dtype": "bfloat16", "activation_checkpointing": "full"},
    }
    return recipe(model, **merged(base, sections))


def by_name(costs: list[Cost]) -> dict[str, Cost]:
    return {cost.name: cost for cost in costs}


def test_the_time_of_products_follows_from_their_operations(tiny_qwen2: Path) -> None:
    """512 answers of 400 tokens on 4 ranks, 51,200 tokens each; the head at 300 of 400."""
    plan = config(tiny_qwen2)
    tokens, targets, pairs = 51_200, 38_400, 128 * 400 * 401 / 2
    once = 2 * (819_200_000 * tokens + 204_800_000 * targets) + 4 * 20_480 * pairs
    assert step_flops(plan, BILLION, 4, LENGTHS) == pytest.approx(3 * once)
    products = by_name(step_costs(plan, BILLION, 4, GPU, LENGTHS))["update: products"].seconds
    assert products == pytest.approx(4 * once / 0.68e15), "all is computed again"
    kept = config(tiny_qwen2, policy={"activation_checkpointing": "none"})
    again = 2 * 204_800_000 * targets  # logits are, in any case
    products = by_name(step_costs(kept, BILLION, 4, GPU, LENGTHS))["update: products"].seconds
    assert products == pytest.approx((3 * once + again) / 0.68e15)
    assert step_flops(kept, BILLION, 4, LENGTHS) == pytest.approx(3 * once)


def test_kept_products_are_not_computed_again_and_everything_else_is(tiny_qwen2: Path) -> None:
    forward = PassCount(kernels=50, token_bytes=7000, products=20)
    model = replace(BILLION, kernels=KernelCounts(forward, forward.times(2)))
    none, products, full = (
        by_name(
            step_costs(
                config(tiny_qwen2, policy={"activation_checkpointing": layers}), model, 4, GPU, LENGTHS
            )
        )
        for layers in ("none", "products", "full")
    )
    assert products["update: products"].seconds == none["update: products"].seconds
    assert products["update: elementwise"] == full["update: elementwise"]
    # 51,200 tokens of a rank are seven micro-batches of 8,000
    launched = [costs["update: launches"] for costs in (none, products, full)]
    kernels = [(cost.seconds + cost.hidden) / 10e-6 for cost in launched]
    assert kernels[1] - kernels[0] == pytest.approx(7 * (50 - 20))
    assert kernels[2] - kernels[0] == pytest.approx(7 * 50)


def test_prompts_computed_once_cost_their_operations_once(tiny_qwen2: Path) -> None:
    """64 prompts of 100 tokens instead of 512, on 4 ranks; 100 are fewer than shared_tokens_min in the second."""
    plan = config(tiny_qwen2, batch={"share_prefixes": True})
    tokens, targets = 16 * 100 + 128 * 300, 38_400
    pairs = 16 * 100 * 101 / 2 + 128 * (400 * 401 - 100 * 101) / 2
    once = 2 * (819_200_000 * tokens + 204_800_000 * targets) + 4 * 20_480 * pairs
    assert step_flops(plan, BILLION, 4, LENGTHS) == pytest.approx(3 * once)
    short = config(tiny_qwen2, batch={"share_prefixes": True, "shared_tokens_min": 101})
    assert step_flops(short, BILLION, 4, LENGTHS) == step_flops(config(tiny_qwen2), BILLION, 4, LENGTHS)


def test_mixers_of_a_hybrid_compute_prompts_once_for_each_answer(tiny_qwen2: Path) -> None:
    """As above, with a quarter of the matrices in mixers: 512 prompts in these, 64 in all others."""
    hybrid = replace(BILLION, flops=replace(BILLION.flops, recurrent=204_800_000))
    plan = config(tiny_qwen2, batch={"share_prefixes": True})
    whole = config(tiny_qwen2, batch={"share_prefixes": False})
    prompts = 2 * 204_800_000 * (128 - 16) * 100
    forward = step_flops(plan, BILLION, 4, LENGTHS) / 3 + prompts
    # Mixers are frozen here, so backward has no gradients of their matrices
    assert step_flops(plan, hybrid, 4, LENGTHS) == pytest.approx(3 * forward - prompts)
    assert step_flops(whole, hybrid, 4, LENGTHS) == step_flops(whole, BILLION, 4, LENGTHS)
    times = [by_name(step_costs(plan, model, 4, GPU, LENGTHS)) for model in (BILLION, hybrid)]
    added = times[1]["update: products"].seconds - times[0]["update: products"].seconds
    assert added == pytest.approx(3 * prompts / 0.68e15), "forward twice, and backward"


def test_an_engine_reads_its_weights_for_each_token_and_more_slots_take_fewer_steps(
    tiny_qwen2: Path,
) -> None:
    slow = replace(GPU, memory_rate=1e11)  # so that nothing else counts
    weights = 2 * BILLION.total / 0.85e11

    def seconds(slots: int, ranks: int) -> float:
        plan = config(tiny_qwen2, engine={"max_num_seqs": slots})
        return by_name(step_costs(plan, BILLION, ranks, slow, LENGTHS))["rollout"].seconds

    assert seconds(128, 4) == pytest.approx(600 * (weights + 1e-3), rel=0.1), "to twice the mean length"
    assert seconds(64, 4) == pytest.approx(900 * (weights + 1e-3), rel=0.1), (
        "and the mean once more to begin with"
    )
    assert seconds(128, 8) < seconds(128, 4), "fewer answers have fewer keys and values to read"


def test_gathers_are_hidden_by_work_and_waited_for_where_links_are_slow(tiny_qwen2: Path) -> None:
    plan = config(tiny_qwen2)
    fast = by_name(step_costs(plan, BILLION, 8, GPU, LENGTHS))["update: gathers"]
    assert fast.seconds < 0.2 * fast.hidden
    slow = by_name(step_costs(plan, BILLION, 8, replace(GPU, link_rate=4e9), LENGTHS))
    busy = slow["update: products"].seconds + slow["update: elementwise"].seconds
    gathers = slow["update: gathers"]
    traffic = update_traffic(plan.policy, BILLION, 8, 4)  # 25,600 tokens are four micro-batches
    sent = (traffic.gathered + traffic.scattered) * 7 / 8 / (0.75 * 4e9)
    assert gathers.seconds + gathers.hidden == pytest.approx(sent, rel=0.01)
    assert gathers.hidden == pytest.approx(busy)
    assert "update: gathers" not in by_name(step_costs(plan, BILLION, 1, GPU, LENGTHS))


def test_gradients_alone_go_between_replicas_once_an_update(tiny_qwen2: Path) -> None:
    plan = config(tiny_qwen2, policy={"shard_size": 8})
    costs = by_name(step_costs(plan, BILLION, 64, GPU, LENGTHS))
    assert costs["update: between replicas"].seconds == pytest.approx(
        2 * 4 * BILLION.total / 8 / (0.75 * 5e10)
    )
    assert "update: between replicas" not in by_name(
        step_costs(config(tiny_qwen2), BILLION, 64, GPU, LENGTHS)
    )


def test_only_adapters_are_reduced_where_adapters_are_trained(tiny_qwen2: Path) -> None:
    slow = replace(GPU, link_rate=4e9)
    adapters = replace(BILLION, adapters={"a": torch.Size([1_000_000])})
    plan = config(tiny_qwen2)
    gathers = by_name(step_costs(plan, adapters, 8, slow, LENGTHS))["update: gathers"]
    sent = (update_traffic(plan.policy, BILLION, 8, 4).gathered + 4 * 4_000_000) * 7 / 8 / (0.75 * 4e9)
    assert gathers.seconds + gathers.hidden == pytest.approx(sent, rel=0.01)


def test_shared_memory_needs_no_sync_and_offloading_takes_time(tiny_qwen2: Path) -> None:
    costs = by_name(step_costs(config(tiny_qwen2), BILLION, 1, GPU, LENGTHS))
    assert costs["sync"].seconds == pytest.approx(3 * 2 * BILLION.total / (0.85 * 4e12))
    assert "sync" not in by_name(
        step_costs(config(tiny_qwen2, sync={"way": "zero_copy"}), BILLION, 1, GPU, LENGTHS)
    )
    away = by_name(
        step_costs(config(tiny_qwen2, policy={"offload": "optimizer"}), BILLION, 1, GPU, LENGTHS)
    )
    more = away["sleep and wake"].seconds - costs["sleep and wake"].seconds
    assert more == pytest.approx(2 * 8 * BILLION.total / 50e9)


def test_updates_on_the_host_take_time_for_copies_beside_the_work(tiny_qwen2: Path) -> None:
    """FSDP2 copies float32 weights twice and gradients once, a policy in place rounded ones once each."""
    size = BILLION.total
    sharded = by_name(
        step_costs(config(tiny_qwen2, policy={"update_on": "host"}), BILLION, 1, GPU, LENGTHS)
    )
    copies = sharded["update: host copies"]
    count = round((copies.seconds + copies.hidden) * 50e9 / (12 * size))
    assert count and copies.seconds + copies.hidden == pytest.approx(count * 12 * size / 50e9)
    keys: dict[str, Any] = {"policy": {"update_on": "host"}, "sync": {"way": "zero_copy"}}
    shared = by_name(step_costs(config(tiny_qwen2, **keys), BILLION, 1, GPU, LENGTHS))
    assert shared["update: host copies"].seconds == pytest.approx((count + 1) * 2 * size / 50e9)
    assert shared["update: optimizer"].seconds == pytest.approx(40 * size / 100e9)


def test_activations_go_to_the_host_and_back(tiny_qwen2: Path) -> None:
    policy = {"activation_checkpointing": "every_second", "offload_activations": True}
    costs = by_name(step_costs(config(tiny_qwen2, policy=policy), BILLION, 1, GPU, LENGTHS))
    tokens = update_amount(config(tiny_qwen2), 1, LENGTHS)[0]
    layers, hidden = (BILLION.layers + 1) // 2, BILLION.config["hidden_size"]
    assert costs["update: activations"].seconds == pytest.approx(2 * tokens * layers * hidden * 2 / 50e9)


def test_engines_apart_share_the_answers_among_fewer_and_never_sleep(tiny_qwen2: Path) -> None:
    """Six of eight ranks train, two generate; weights are gathered and broadcast."""
    apart = config(tiny_qwen2, engine={"placement": "ranks", "ranks": 2})
    costs = by_name(step_costs(apart, BILLION, 8, GPU, LENGTHS))
    six, two = (
        by_name(step_costs(config(tiny_qwen2), BILLION, ranks, GPU, LENGTHS)) for ranks in (6, 2)
    )
    assert costs["rollout"] == two["rollout"] and "sleep and wake" not in costs
    assert [cost for name, cost in costs.items() if name.startswith("update")] == [
        cost for name, cost in six.items() if name.startswith("update")
    ]
    sent = 2 * BILLION.total
    gathered, broadcast, loaded = sent * 5 / 6 / 3e11 + 12 * 5 * 3e-6, sent / 3e11, 2 * sent / 3.4e12
    assert costs["sync"].seconds == pytest.approx(gathered + broadcast + loaded)
    far = by_name(step_costs(apart, BILLION, 16, GPU, LENGTHS))["sync"].seconds
    assert far > sent / (0.75 * 5e10), "between nodes"


@pytest.mark.parametrize("longer", ["update", "rollout"])
def test_a_step_with_a_lag_takes_the_longer_of_rollout_and_update(tiny_qwen2: Path, longer: str) -> None:
    apart = config(tiny_qwen2, engine={"placement": "ranks", "ranks": 4}, rollout={"lag": 1})
    without = config(tiny_qwen2, engine={"placement": "ranks", "ranks": 4})
    gpu = (
        replace(GPU, memory_rate=1e14, flops=1e14)
        if longer == "update"
        else replace(GPU, memory_rate=1e12, flops=1e17)
    )
    costs, one = (
        step_costs(run_plan, BILLION, 8, gpu, Lengths(prompt=100, answer=300))
        for run_plan in (apart, without)
    )
    rollout, update = one[0].seconds, sum(cost.seconds for cost in one[2:])
    assert (rollout > update) == (longer == "rollout")
    assert sum(cost.seconds for cost in costs) == pytest.approx(one[1].seconds + max(rollout, update))
    assert costs[0].hidden == pytest.approx(min(rollout, update))


def test_rank_splits_that_fit_are_compared_and_the_fastest_is_named(tiny_qwen2: Path) -> None:
    lengths = Lengths(100, 100)
    plan = config(tiny_qwen2, policy={"offload": "all"}, sync={"way": "pull"})

    def seconds(apart: int, lag: int) -> float:
        keys: dict[str, Any] = {"policy": {"offload": "none" if apart else "all"}}
        keys |= {
            "engine": {"placement": "ranks", "ranks": apart} if apart else {},
            "rollout": {"lag": lag},
        }
        recipe = config(tiny_qwen2, **keys, sync={"way": "auto" if apart else "pull"})
        return sum(cost.seconds for cost in step_costs(recipe, BILLION, 8, GPU, lengths))

    together, without, ahead = compared(plan, BILLION, 8, GPU, lengths)
    assert together == RankSplit(0, 0, seconds(0, 0))
    assert without.seconds == min(seconds(apart, 0) for apart in range(1, 8)) and without.lag == 0
    assert ahead.seconds == min(seconds(apart, 1) for apart in range(1, 8)) and ahead.lag == 1
    lines = list(comparison(plan, BILLION, 8, GPU, lengths))
    change = together.seconds / ahead.seconds - 1
    assert lines[0] == f"every rank does both: {together.seconds:.2f} s a step"
    assert lines[2].startswith(
        f"engine.placement: ranks, engine.ranks: {ahead.apart}, rollout.lag: 1: {ahead.seconds:.2f} s a step"
    )
    assert lines[2].endswith(f"{abs(change):.0%} {'faster' if change > 0 else 'slower'}")
    assert [split.apart % 8 for split in compared(plan, BILLION, 32, GPU, lengths)] == [0, 0, 0], (
        "whole nodes"
    )
    assert not any(compared(plan, BILLION, 8, replace(GPU, memory_gib=1.0), lengths)), "none fits"
    three = config(tiny_qwen2, engine={"tensor_parallel_size": 3})
    assert (
        "cannot form engines of engine.tensor_parallel_size = 3"
        in list(comparison(three, BILLION, 8, GPU, lengths))[-1]
    )


def test_a_plan_for_a_gpu_has_seconds_and_mfu(
    tiny_qwen2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(config(tiny_qwen2, run={"device": "auto"}).model_dump(mode="json")))
    for gpu in GPUS:
        assert main(["plan", str(path), "--ranks", "8", "--gpu", gpu, "--answer-tokens", "50"]) == 0
        output = capsys.readouterr().out
        assert (
            "8, on cuda" in output and f"of {GPUS[gpu].memory_gib:.1f} GiB" in output and "MFU" in output
        )
        assert "every rank does both: " in output and "rollout.lag: 1: " in output
        assert (
            "prompts of 50 and answers of 50 tokens" in output
            and max(map(len, output.splitlines())) <= 120
        )
    assert main(["plan", str(path), "--ranks", "8", "--gpu", "h100", "--answer-tokens", "101"]) == 2
    assert (
        "--answer-tokens is 101, but the recipe allows 1 to 100: choose from these"
        in capsys.readouterr().err
    )
    assert main(["plan", str(path), "--gpu", "h1000"]) == 2
    assert "invalid choice" in capsys.readouterr().err
