"""Device memory of a shift and of an update, beside what `hotbunk plan` says. Skipped without a GPU.

It has run on the GPU in software (tests/softgpu), and on no real one yet.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.commands.doctor_trials import Trial, recipe
from trainer.commands.tiny_model import make_tiny_model
from trainer.distributed import destroy_process_group, init_process_group
from trainer.estimates.memory import GIB, engine_parts, trainer_parts
from trainer.estimates.model_sizes import longest, model_sizes
from trainer.learning.batching import micro_batches
from trainer.run import processes
from trainer.types import Sample

pytestmark = pytest.mark.gpu

ANSWERS = 8
ESTIMATED = "CUDA and NCCL"  # what the plan works out from nothing


def compare(folder: str, way: str, policy: str) -> int:
    """The exit code of a process that has a GPU to itself: 1 where the plan is more than 5 % off."""
    make_tiny_model(Path(folder), hidden_size=512, intermediate_size=2048, heads=8, kv_heads=4, vocab_size=8192)
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
        trial.manager.sleep()
        with trial.manager.generation_shift(trial.policy):
            pass  # from its end on, `zero_copy` shares the weights
        asleep_bytes = trial.engine_bytes()
        (batch,) = micro_batches(samples, config.batch.tokens_per_micro_batch, 0, trial.device, packing=True)
        for _ in range(2):  # the first makes the optimizer's state
            torch.cuda.reset_peak_memory_stats()
            trial.learn(batch, batch)  # the second micro-batch finds the gradients of the first, which the plan counts
        peak = torch.cuda.max_memory_allocated()
        with trial.manager.generation_shift(trial.policy):
            shift_bytes = trial.engine_bytes() - asleep_bytes
    awake = [engine[name] for name in ("engine: weights", "engine: KV cache")]
    planned = sum(part.generating - part.training for part in awake)
    print(f"engine: {shift_bytes / GIB:.3f} GiB between asleep and awake, planned {planned / GIB:.3f}")
    training = sum(part.training for part in trainer_parts(config, model, 1, device_gib) if part.name != ESTIMATED)
    print(f"trainer: {peak / GIB:.3f} GiB at most in an update, planned {training / GIB:.3f}")
    destroy_process_group()
    return int(abs(shift_bytes - planned) > 0.05 * planned or abs(peak - training) > 0.05 * training)


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        ("pull", {}),
        ("staged", {"update_on": "host"}),
        ("zero_copy", {"update_on": "host"}),
    ],
)
def test_an_update_and_a_shift_need_the_memory_that_is_planned(tmp_path: Path, way: str, policy: Any) -> None:
    module = "tests.gpu.test_planned_memory"
    command = [sys.executable, "-m", module, str(tmp_path / "model"), way, json.dumps(policy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


if __name__ == "__main__":
    processes.start_guardian()
    processes.run(lambda: compare(*sys.argv[1:]))
