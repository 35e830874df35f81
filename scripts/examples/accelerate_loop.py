"""REINFORCE in a custom training loop with Accelerate: each rank has an engine, which sleeps during updates.

    accelerate launch --num_processes 2 scripts/examples/accelerate_loop.py MODEL [--steps 3]
    torchrun --nproc-per-node 2 scripts/examples/accelerate_loop.py MODEL           # the same without GPUs

Accelerate may prepare the model with DDP, FSDP2 or DeepSpeed. The reward is the share of different tokens in an answer.
"""

import argparse
import asyncio
import os

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from generation.engine.engine import Engine, Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from sharding import WORKER_EXTENSION, ShardingManager, SyncSettings
from trainer import PreparedPolicy

PROMPT, ANSWERS, SECONDS = [5, 6, 7], 8, 300


async def sample(engine: Engine, version: int, seeds: range) -> list:
    """Sample one answer for each seed with the weights of `version`."""
    sampling = SamplingSettings(max_tokens=8)
    return await asyncio.gather(
        *(engine.complete(PROMPT, sampling, seed=seed, policy_version=version) for seed in seeds)
    )


def loss_of(
    model: torch.nn.Module, answers: list, device: torch.device
) -> tuple[torch.Tensor, float, float]:
    """Return loss, mean reward, and the largest gap (nats) between log-probabilities of the engine and the model."""
    rewards = torch.tensor(
        [len(set(answer.token_ids)) / len(answer.token_ids) for answer in answers], device=device
    )
    advantages, losses, gap = rewards - rewards.mean(), [], 0.0
    for answer, advantage in zip(answers, advantages, strict=True):
        ids = torch.tensor([PROMPT + answer.token_ids], device=device)
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        logprobs = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(PROMPT) - 1 :]
        gap = max(gap, (logprobs.detach().cpu() - torch.tensor(answer.logprobs)).abs().max().item())
        losses.append(-advantage * logprobs.sum())
    return torch.stack(losses).mean(), rewards.mean().item(), gap


def main() -> None:
    """Train the model for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model in Hugging Face format")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    accelerator = Accelerator()
    # Without GPUs, `accelerate launch` starts one process, for which it sets these variables only.
    asked_for_more = {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys()
    if accelerator.num_processes == 1 and asked_for_more:
        parser.error(
            "without GPUs accelerate launch starts one process, whatever --num_processes says: use torchrun"
        )
    if (
        deepspeed := accelerator.state.deepspeed_plugin
    ) is not None:  # DeepSpeed needs it where there is no data loader
        deepspeed.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    policy = PreparedPolicy(model, optimizer)
    settings = EngineSettings(
        arguments.model,
        64,
        kv_cache_bytes=64 << 20,
        worker_extension=WORKER_EXTENSION,
        plain_cpu_weights=True,
        device_indices=(accelerator.local_process_index,) if accelerator.device.type == "cuda" else (),
    )
    engine = Engine(settings)
    leader = Leader.start(engine, SECONDS)  # vLLM in separate processes, and a thread that talks to them
    source = policy.weight_source(torch.float32)
    manager = ShardingManager(
        source, accelerator.device, SyncSettings("full"), engine.folder, leader=leader
    )
    try:
        manager.connect()
        manager.sleep()
        for step in range(arguments.steps):
            first = ANSWERS * (step * accelerator.num_processes + accelerator.process_index)
            with manager.generation_shift(policy):  # the engine is awake, at the policy's version
                job = sample(engine, policy.version, range(first, first + ANSWERS))
                answers = leader.thread.run(job, SECONDS, "sampling")
            loss, reward, gap = loss_of(model, answers, accelerator.device)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            rewards, gaps = accelerator.gather(
                torch.tensor([[reward, gap]], device=accelerator.device)
            ).T
            figures = (
                f"reward {rewards.mean():.3f} gap {gaps.max():.1e} verified {manager.report.verified}"
            )
            accelerator.print(f"step {step} version {policy.version} {figures}", flush=True)
    finally:
        manager.close()
        leader.close()
        accelerator.end_training()


if __name__ == "__main__":
    main()
