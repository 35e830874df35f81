"""REINFORCE in a custom training loop: an engine and an FSDP2 policy take turns on the same device.

    PYTHONPATH=. .venv/bin/python scripts/examples/reinforce_loop.py MODEL

`trainer/build.py` combines the same parts for a run. The reward is the share of different tokens in an answer.
"""

import argparse
from typing import Any

import torch

from generation.engine.engine import Engine, Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from sharding import WORKER_EXTENSION, FsdpWeightSource, ShardingManager, SyncSettings
from trainer import FsdpPolicy
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.distributed import destroy_process_group, init_process_group
from trainer.learning.batching import micro_batches
from trainer.policy.hf_format import checkpoint_views
from trainer.types import Sample

PROMPT, STEPS, CPU = [5, 6, 7], 3, torch.device("cpu")


def main() -> None:
    """Train the model for three steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a model in Hugging Face format")
    model = parser.parse_args().model
    init_process_group(120, "cpu")  # one process, or those of torchrun
    engine = Engine(
        EngineSettings(model, 64, kv_cache_bytes=64 << 20, worker_extension=WORKER_EXTENSION)
    )
    leader = Leader.start(engine, 120)  # vLLM in separate processes, and a thread that talks to them
    policy = FsdpPolicy(ModelConfig(path=model), PolicyConfig(dtype="float32", lr=1e-3), CPU, STEPS)
    source = FsdpWeightSource(
        [*policy.named_parameters()],
        torch.float32,
        lambda name, shape: checkpoint_views(policy.model, name, shape),
    )
    sharding = ShardingManager(source, CPU, SyncSettings(), engine.folder, leader=leader)
    try:
        sharding.connect()  # connects each rank with the worker on its device
        sharding.sleep()
        for step in range(STEPS):
            with sharding.generation_shift(policy):  # the engine is awake, at the policy's version
                answers = leader.thread.run(sample(engine, policy.version, step), 120, "sampling")
            print(step, policy.version, train(policy, answers))
    finally:
        sharding.close()
        leader.close()
        destroy_process_group()


async def sample(engine: Engine, version: int, step: int) -> list[Any]:
    """Sample eight answers one after another; `asyncio.gather` would sample them at once."""
    sampling, seeds = SamplingSettings(max_tokens=8), range(8 * step, 8 * step + 8)
    return [await engine.complete(PROMPT, sampling, seed=seed, policy_version=version) for seed in seeds]


def train(policy: FsdpPolicy, answers: list[Any]) -> dict[str, float]:
    """Take one optimizer step; return reward, loss, and the mean gap (nats) between engine and trainer."""
    rewards = [len(set(answer.token_ids)) / len(answer.token_ids) for answer in answers]
    mean, tokens = sum(rewards) / len(rewards), sum(len(answer.token_ids) for answer in answers)
    samples = []
    for answer in answers:
        mask = [0] * len(PROMPT) + [1] * len(answer.token_ids)  # 1 where a token was sampled
        logprobs = [0.0] * len(PROMPT) + answer.logprobs
        samples.append(Sample(PROMPT + answer.token_ids, mask, logprobs))
    batches = micro_batches(samples, 1024, 0, "cpu")
    for micro in batches:
        for row, sample in enumerate(micro.rows):
            micro.advantages[row] = rewards[sample] - mean

    def loss(micro: Any, outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        gap = (outputs.logprobs - micro.engine_logprobs).abs().sum()
        return -(micro.advantages * outputs.logprobs).sum() / tokens, {"gap": gap.detach() / tokens}

    stats = policy.update(batches, loss, temperature=1.0)
    return {"reward": mean, "loss": stats.loss} | stats.sums


if __name__ == "__main__":  # engines' processes import this file
    main()
