"""Operations and rates equal torch's own counter, and figures of a step computed by hand."""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from trainer.config.schema import LoraConfig
from trainer.estimates.gpus import peak_flops
from trainer.learning.batching import micro_batches
from trainer.model_structure import Work, attended, model_flops
from trainer.policy.lora import add_adapters
from trainer.policy.module import PolicyModule, outputs
from trainer.run import meters
from trainer.run.meters import MemoryMeter, PhaseMeter, StepProfiler
from trainer.types import Sample

TOKENS = 24


def counted(model: Any, ids: torch.Tensor) -> tuple[int, int]:
    """Return torch's counts of FLOPs of a forward pass, and of the backward pass after it."""
    with FlopCounterMode(display=False) as forward:
        loss = model(ids).logits.float().square().sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3_moe", True), ("deepseek_v2", False)],
)
def test_operations_are_those_that_torch_counts(architecture: str, tied: bool, tiny_model: Any) -> None:
    # torch does not count the product of a mixture's groups, but each expert's own.
    eager = {"attn_implementation": "eager"}
    eager |= {"experts_implementation": "eager"} if architecture in ("qwen3_moe", "deepseek_v2") else {}
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model(architecture=architecture, tied=tied), **eager
    )
    flops = model_flops(model)
    # Eager attention computes all pairs of positions, and the model all logits; rotary frequencies are a product, too.
    forward, backward = counted(model, torch.arange(TOKENS).unsqueeze(0))
    assert flops.forward(TOKENS, TOKENS, TOKENS**2) == pytest.approx(forward, rel=0.005)
    assert flops.backward(TOKENS, TOKENS, TOKENS**2) == pytest.approx(backward, rel=0.005)


def test_frozen_matrices_have_no_gradients_of_their_own(tiny_qwen2_untied: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2_untied, attn_implementation="eager")
    add_adapters(model, LoraConfig(rank=4), torch.float32, "cpu")
    model.enable_input_require_grads()  # as an adapter in a layer below the first would
    flops = model_flops(model)
    assert flops.backward(TOKENS, TOKENS, TOKENS**2) == pytest.approx(
        counted(model, torch.arange(TOKENS).unsqueeze(0))[1], rel=0.005
    )


def test_a_sequences_cost_is_its_compute_in_tokens_without_attention(tiny_qwen2: Path) -> None:
    flops = model_flops(AutoModelForCausalLM.from_pretrained(tiny_qwen2))
    alone = flops.forward(1, 0, 0)
    for length in (1, 100, 5000):
        assert flops.tokens_worth(length) == int(flops.forward(length, 0, attended([length])) / alone)
    assert flops.tokens_worth(10) == 10 and flops.tokens_worth(5000) > 10_000


def test_a_module_counts_real_tokens_targets_and_pairs_whether_packed_or_padded(
    tiny_qwen2: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    samples = [Sample([5] * n, [0] * (n - 3) + [1] * 3, [0.0] * n) for n in (7, 4)]
    flops = model_flops(model)
    for packing, lengths in ((True, [6, 3]), (False, [6, 6])):  # a last token is not computed
        module = PolicyModule(model)
        [batch] = micro_batches(samples, 100, 0, "cpu", count=1, packing=packing)
        outputs(module, batch, 1.0)
        amount = (sum(lengths), 6, sum(n * (n + 1) / 2 for n in lengths))
        assert attended(lengths) == amount[2]
        assert module.work.tokens == amount[0]
        assert module.work.flops == flops.forward(*amount) + flops.backward(*amount)
        with torch.no_grad():
            outputs(module, batch, 1.0)
        assert module.work.tokens == amount[0], "a score learns from none"
        assert module.work.flops == 2 * flops.forward(*amount) + flops.backward(*amount)


def meter(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    works: list[Any],
    name: str = "",
    dtype: str = "bfloat16",
):
    """Return a meter with phases of two seconds, for two equal ranks."""
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(meters.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(
        meters, "all_reduce_sum", lambda values: {key: 2 * value for key, value in values.items()}
    )
    monkeypatch.setattr(meters, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    watchdog = SimpleNamespace(phase=lambda name, deadline, waits_for: nullcontext())
    run, policy = SimpleNamespace(first_step_deadline_s=60), SimpleNamespace(dtype=dtype)
    config = SimpleNamespace(run=run, policy=policy)
    return PhaseMeter(config, torch.device(device), None, watchdog, *works)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "name", "dtype", "mfu"),
    [
        ("cpu", "", "bfloat16", None),
        ("cuda", "NVIDIA H100 80GB HBM3", "bfloat16", 3e15 / 2 / 989.4e12),
        ("cuda", "NVIDIA H100 80GB HBM3", "float32", None),
        ("cuda", "NVIDIA GeForce GTX 1080", "bfloat16", None),
    ],
)
def test_a_step_says_what_a_device_did_in_its_updates(
    device: str, name: str, dtype: str, mfu: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [Work(None), Work(None)]  # type: ignore[arg-type]
    measured = meter(monkeypatch, device, works, name, dtype)
    for _ in range(2):
        with measured.phase("rollout"):
            works[0].flops += 1e18  # the probe of a sync, say
        with measured.phase("update"):
            works[0].flops, works[0].tokens = works[0].flops + 2e15, works[0].tokens + 300
            works[1].flops += 1e15
        row = measured.take()
        assert row["time/update"] == 2 and row["throughput/update_tokens_per_s_per_device"] == 150
        assert row.get("throughput/mfu") == (None if mfu is None else pytest.approx(mfu))
    assert "throughput/update_tokens_per_s_per_device" not in measured.take(), "no update since"


def test_peaks_are_known_by_the_drivers_names() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    for other in (
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "Tesla T4",
        "AMD MI300X",
    ):
        assert peak_flops(other) is None


def test_the_allocators_peaks_are_those_of_the_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA, simulated here, counters give peaks since a reset, and retries since the start."""
    now = {"allocated_bytes.all.peak": 100, "reserved_bytes.all.peak": 200, "num_alloc_retries": 3}

    def reset(device: object) -> None:
        now.update({"allocated_bytes.all.peak": 100, "reserved_bytes.all.peak": 200})

    monkeypatch.setattr(meters.torch.cuda, "memory_stats", lambda device: now)
    monkeypatch.setattr(meters.torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(
        meters.torch.cuda, "max_memory_reserved", lambda device: now["reserved_bytes.all.peak"]
    )
    measured = MemoryMeter(torch.device("cuda"))
    with measured.phase("rollout"):
        now["allocated_bytes.all.peak"] = 500
    now["reserved_bytes.all.peak"] = 900  # a sync, between the phases
    with measured.phase("update"):
        now["allocated_bytes.all.peak"], now["num_alloc_retries"] = 300, 5
    row = measured.metrics()
    assert row["memory/peak_allocated_bytes"] == 500 and row["memory/peak_reserved_bytes"] == 900
    assert row["memory/alloc_retries"] == 5
    now["num_alloc_retries"] = 6
    assert measured.metrics()["memory/alloc_retries"] == 1


@pytest.mark.parametrize(
    ("steps", "begins", "recorded"),
    [((2, 3), 1, [2, 3]), ((2, 3), 3, [3]), ((2, 2), 1, [2]), (None, 1, [])],
)
def test_the_steps_asked_for_are_traced(
    steps: tuple[int, int] | None, begins: int, recorded: list[int], tmp_path: Path
) -> None:
    profiler = StepProfiler(steps, tmp_path / "profile", torch.device("cpu"), enabled=True)
    for number in range(begins, 5):
        with profiler.step(number):
            torch.ones(3, number) @ torch.ones(number, 2)
    files = list(tmp_path.rglob("*.gz"))
    assert [file.name for file in files] == (
        [f"steps_{recorded[0]}_{recorded[-1]}.json.gz"] if recorded else []
    )
    events = [
        event
        for file in files
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ]
    assert sorted({e["name"] for e in events if e["name"].startswith("step ")}) == [
        f"step {n}" for n in recorded
    ]
    products = [e["args"]["Input Dims"][0] for e in events if e["name"] == "aten::mm"]
    assert products == [[3, n] for n in recorded]


def test_other_ranks_trace_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler((1, 1), tmp_path / "profile", torch.device("cpu"), enabled=False)
    with profiler.step(1):
        pass
    assert not [*tmp_path.iterdir()]
