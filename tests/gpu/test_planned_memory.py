"""Device memory of a start, a shift and an update, beside what `hotbunk plan` says. Skipped without a GPU.

It has run on the GPU in software (tests/softgpu), and on no real one yet.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sharding.manager import ShardingManager
from trainer.build import build_models, build_sharding
from trainer.commands.doctor_trials import Trial, recipe
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.schema import TrainConfig
from trainer.distributed import destroy_process_group, init_process_group, store
from trainer.engines import rank_device, stop_engine
from trainer.estimates.memory import GIB, engine_parts, trainer_parts
from trainer.estimates.model_sizes import longest, model_sizes
from trainer.learning.batching import micro_batches
from trainer.restarts import EngineRestarts
from trainer.run import processes
from trainer.run.watchdog import Watchdog
from trainer.types import Sample

pytestmark = pytest.mark.gpu

ANSWERS = 8
PAIR = re.compile(r": ([\d.]+) GiB.*planned.* ([\d.]+)$", re.MULTILINE)
ESTIMATED = "CUDA and NCCL"  # what the plan works out from nothing
# What exists once an engine sleeps and the trainer has a context
STARTED = (ESTIMATED, "engine: CUDA, graphs, NCCL")


@contextmanager
def most_used(peaks: list[int]) -> Iterator[None]:
    """Append the largest number of bytes in use on the device during the block, by all processes."""
    used, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            free, total = torch.cuda.mem_get_info()
            used[0] = max(used[0], total - free)

    thread = threading.Thread(target=look)
    thread.start()
    yield
    ended.set()
    thread.join()
    peaks.append(used[0])


def compare_start(folder: str, way: str, keys: str) -> int:
    """Print what a start takes and what is planned, in a process that has a GPU to itself."""
    make_tiny_model(
        Path(folder), hidden_size=1024, intermediate_size=4096, heads=8, kv_heads=4, vocab_size=16384
    )
    sections = recipe(Path(folder), "cuda", way, 1).model_dump(exclude_unset=True)
    for name, values in json.loads(keys).items():
        sections[name] = sections.get(name, {}) | values
    config = TrainConfig.model_validate(sections)
    init_process_group(300, "cuda")
    model, device_gib = model_sizes(config, folder), torch.cuda.mem_get_info()[1] / GIB
    parts = [*trainer_parts(config, model, 1, device_gib), *engine_parts(config, model, 1, device_gib)]
    planned = sum(part.starting for part in parts if part.name not in STARTED)
    generating = sum(part.generating for part in parts if part.name not in STARTED)
    device = rank_device(config)
    torch.zeros(1, device=device)  # the trainer's context
    peaks = list[int]()
    with ExitStack() as resources:
        watchdog = resources.enter_context(Watchdog(store(), 0, 1))
        with most_used(peaks):
            leader = EngineRestarts(config, device, watchdog).first_start()
        assert leader is not None
        resources.callback(stop_engine, leader)
        free, total = torch.cuda.mem_get_info()
        held = total - free
        wake, building = leader.engine.wake, resources.enter_context(ExitStack())
        building.enter_context(most_used(peaks))

        async def wake_after_looking(tags: Sequence[str]) -> None:
            if "kv_cache" in tags:  # the first sync is over
                building.close()
            await wake(tags)

        leader.engine.wake = wake_after_looking  # type: ignore[method-assign]
        policy, reference, critic = build_models(config, device)
        manager = build_sharding(config, policy, leader)
        assert isinstance(manager, ShardingManager)
        resources.enter_context(closing(manager)).connect()
        with manager.generation_shift(policy, *([critic] if critic else [])):
            assert manager.report.verified == "full"
        del reference
    engine = peaks[0] - held
    starting = peaks[1] - held
    print(f"engine alone: {engine / GIB:.3f} GiB, planned with the trainer {generating / GIB:.3f}")
    print(f"start: {starting / GIB:.3f} GiB at most, planned {planned / GIB:.3f}")
    destroy_process_group()
    return 0


def compare(folder: str, way: str, policy: str) -> int:
    """Print what an update and a shift take and what is planned, in a process that has a GPU to itself."""
    make_tiny_model(
        Path(folder), hidden_size=512, intermediate_size=2048, heads=8, kv_heads=4, vocab_size=8192
    )
    config = recipe(Path(folder), "cuda", way, 1)
    keys = {"offload": "none"} | json.loads(policy)
    sizes = {"prompts_per_step": 1, "tokens_per_micro_batch": 4096, "packing": True}
    config = config.model_copy(
        update={
            "batch": config.batch.model_copy(update=sizes),
            "algorithm": config.algorithm.model_copy(update={"group_size": ANSWERS}),
            "data": config.data.model_copy(update={"max_prompt_tokens": 64}),
            "policy": config.policy.model_copy(update=keys),
            "sampling": config.sampling.model_copy(update={"max_tokens": 192}),
        }
    )
    init_process_group(300, "cuda")
    model, device_gib = model_sizes(config, folder), torch.cuda.mem_get_info()[1] / GIB
    engine = {part.name: part for part in engine_parts(config, model, 1, device_gib)}
    answer = [1] * config.sampling.max_tokens
    prompt = [0] * (longest(config) - len(answer))
    samples = [Sample([5] * longest(config), prompt + answer, [0.0] * longest(config))] * ANSWERS
    with ExitStack() as resources:
        trial = Trial(config, resources)
        with trial.manager.generation_shift(trial.policy):
            pass  # from its end on, `zero_copy` shares the weights
        asleep_bytes = trial.engine_bytes()
        (batch,) = micro_batches(
            samples, config.batch.tokens_per_micro_batch, 0, trial.device, packing=True
        )
        for _ in range(2):  # the first makes the optimizer's state
            torch.cuda.reset_peak_memory_stats()
            # The second micro-batch finds the gradients of the first, which the plan counts
            trial.learn(batch, batch)
        peak = torch.cuda.max_memory_allocated()
        with trial.manager.generation_shift(trial.policy):
            shift_bytes = trial.engine_bytes() - asleep_bytes
    awake = [engine[name] for name in ("engine: weights", "engine: KV cache")]
    planned = sum(part.generating - part.training for part in awake)
    print(f"engine: {shift_bytes / GIB:.3f} GiB between asleep and awake, planned {planned / GIB:.3f}")
    training = sum(
        part.training for part in trainer_parts(config, model, 1, device_gib) if part.name != ESTIMATED
    )
    print(f"trainer: {peak / GIB:.3f} GiB at most in an update, planned {training / GIB:.3f}")
    destroy_process_group()
    return 0


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        ("pull", {}),
        ("staged", {"update_on": "host"}),
        ("zero_copy", {"update_on": "host"}),
    ],
)
def test_an_update_and_a_shift_need_the_memory_that_is_planned(
    tmp_path: Path, way: str, policy: Any
) -> None:
    for measured, planned in run("compare", tmp_path, way, policy):
        assert measured == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(
    ("way", "keys"),
    [
        ("staged", {}),
        ("staged", {"policy": {"offload": "all"}, "algorithm": {"preset": "ppo", "kl_coef": 0.1}}),
        ("staged", {"policy": {"update_on": "host", "offload": "none"}, "algorithm": {"kl_coef": 0.1}}),
        ("pull", {"policy": {"offload": "optimizer", "optimizer": "muon"}}),
        ("zero_copy", {"policy": {"offload": "none"}}),
    ],
)
def test_a_start_needs_the_memory_that_is_planned(tmp_path: Path, way: str, keys: Any) -> None:
    """The KV cache is as large as the trainer's state, so that both together would exceed the plan by far."""
    for measured, planned in run(
        "compare_start", tmp_path, way, keys | {"engine": {"kv_cache_gib": 1.0}}
    ):
        assert measured <= 1.05 * planned


def run(check: str, folder: Path, way: str, keys: Any) -> list[tuple[float, float]]:
    """Run one of the comparisons above in a process of its own; return its two pairs, measured and planned GiB."""
    module = "tests.gpu.test_planned_memory"
    command = [sys.executable, "-m", module, check, str(folder / "model"), way, json.dumps(keys)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    pairs = [(float(one), float(other)) for one, other in PAIR.findall(done.stdout)]
    assert len(pairs) == 2
    return pairs


if __name__ == "__main__":
    processes.start_guardian()
    check = {"compare": compare, "compare_start": compare_start}[sys.argv[1]]
    processes.run(lambda: check(*sys.argv[2:]))
