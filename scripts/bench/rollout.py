#!/usr/bin/env python3
"""What our rollouts cost on top of a bare AsyncLLM: the same engine, prompts, sampling parameters and seeds, in turn.

    python scripts/bench/rollout.py [--preset 10M] [--prompts 32] [--group 8] [--max-tokens 64] [--rounds 5] [--json FILE]

bare    every request of the batch handed to AsyncLLM.generate at once, in one asyncio.gather
ours    generation.rollout.rollout, with a reward that costs nothing

Both must sample exactly the same tokens, or there is no table. The prefix cache is emptied before each measurement, and
which of the two goes first alternates.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import PRESETS, median, save, show, start_engine, this_device, write_config

from generation.rollout import RolloutSettings, rollout
from generation.sampling import SamplingSettings, sample_seed, vllm_sampling_params
from generation.trajectory import Trajectory
from generation.worker_async import VllmAsyncGenerationWorker
from trainer import lifetime

Tokens = dict[tuple[int, int], list[int]]
"""(prompt, sample) -> what was sampled."""


async def bare(engine: VllmAsyncGenerationWorker, prompts: list[list[int]], settings: RolloutSettings) -> Tokens:
    """vLLM by itself."""

    async def one(prompt: int, sample: int) -> list[int]:
        seed = sample_seed(settings.seed, settings.step, prompt, sample)
        params = vllm_sampling_params(settings.sampling, seed)
        request = f"bare-{settings.step}-{prompt}-{sample}"
        async for output in engine.engine.generate({"prompt_token_ids": prompts[prompt]}, params, request):
            final = output
        return list(final.outputs[0].token_ids)

    places = [(p, s) for p in range(len(prompts)) for s in range(settings.group_size)]
    return dict(zip(places, await asyncio.gather(*(one(*place) for place in places)), strict=True))


async def ours(engine: VllmAsyncGenerationWorker, prompts: list[list[int]], settings: RolloutSettings) -> Tokens:
    """The training loop's way."""
    unclaimed = iter(range(len(prompts)))

    async def score(trajectory: Trajectory) -> None:
        trajectory.reward = 1.0

    trajectories = await rollout(engine, prompts, settings, lambda: next(unclaimed, None), score)
    return {(t.prompt_index, t.sample_index): t.response_ids for t in trajectories}


async def compare(
    engine: VllmAsyncGenerationWorker, prompts: list[list[int]], options: argparse.Namespace
) -> list[dict[str, float]]:
    """Tokens and seconds of each round; the first one does not count."""
    sampling = SamplingSettings(options.max_tokens)
    results = []
    for step in range(options.rounds + 1):
        settings = RolloutSettings(options.group, sampling, policy_version=0, seed=0, step=step)
        order = [bare, ours] if step % 2 else [ours, bare]
        sampled: list[Tokens] = []
        times: dict[str, float] = {}
        for way in order:
            await engine.reset_prefix_cache_async()
            start = time.perf_counter()
            sampled.append(await way(engine, prompts, settings))
            times[way.__name__] = time.perf_counter() - start
        if sampled[0] != sampled[1]:
            raise RuntimeError("both ways were given the same seeds but did not sample the same tokens")
        results.append(times | {"tokens": sum(map(len, sampled[0].values()))})
    return results[1:]


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    lifetime.install_signal_handlers(lambda: "benchmark")
    device = this_device()
    folder = write_config(Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype)
    length = options.prompt_tokens + options.max_tokens
    leader = start_engine(
        folder, device, dtype=options.dtype, max_model_len=length, max_num_seqs=options.max_num_seqs,
        kv_cache_bytes=options.kv_cache_mib << 20, plain_cpu_weights=options.plain, sleep=False,
        cpu_threads=torch.get_num_threads(),
    )  # fmt: skip
    try:
        leader.engine.state.adopt_checkpoint(0)
        choice = random.Random(0)
        prompts = [
            choice.choices(range(PRESETS[options.preset][-1]), k=options.prompt_tokens) for _ in range(options.prompts)
        ]
        rounds = leader.thread.run(compare(leader.engine, prompts, options), 3600, "the benchmark")
    finally:
        leader.engine.shutdown()
    present(options, rounds)
    return 0


def present(options: argparse.Namespace, rounds: list[dict[str, float]]) -> None:
    """Print the table, write the JSON."""
    ratios = [r["bare"] / r["ours"] for r in rounds]
    rows = []
    for number, (r, ratio) in enumerate(zip(rounds, ratios, strict=True), 1):
        rows.append(
            [
                str(number),
                f"{r['tokens']:.0f}",
                f"{r['tokens'] / r['bare']:.0f}",
                f"{r['tokens'] / r['ours']:.0f}",
                f"{ratio:.3f}",
            ]
        )
    speeds = {way: median([r["tokens"] / r[way] for r in rounds]) for way in ("bare", "ours")}
    rows.append(["median", "", f"{speeds['bare']:.0f}", f"{speeds['ours']:.0f}", f"{median(ratios):.3f}"])
    title = f"{options.preset} {options.dtype}: {options.prompts} prompts x {options.group} samples, up to {options.max_tokens} tokens each"
    note = f"tokens/s; {options.max_num_seqs} sequences at a time, {torch.get_num_threads()} thread(s)"
    show(title, ["round", "tokens", "bare tok/s", "ours tok/s", "ours / bare"], rows, [note])
    save(options.json, {"title": title, "rounds": rounds, "ratio": median(ratios)})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="10M", help="size of the model (default: 10M)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--plain", action="store_true", help="CPU: weights not packed for oneDNN, as small models like it"
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a batch (default: 32)")
    parser.add_argument("--group", type=int, default=8, help="samples of each (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="length of the prompts (default: 64)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences the engine runs at once (default: 64)")
    parser.add_argument("--kv-cache-mib", type=int, default=512, help="size of the KV cache (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    lifetime.start_guardian()
    lifetime.run(lambda: main(arguments))
