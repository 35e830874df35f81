#!/usr/bin/env python3
"""Rollouts that wait for the longest answer against rollouts in slices: tokens a second of one engine, and ages.

    python scripts/bench/carry.py [--preset 1M] [--prompts 16] [--group 8] [--ahead 1] [--slice 160] [--json FILE]

A random model ends an answer at any token with the same small probability, so that lengths are geometric: the longest
of a step is several times the mean. The weights stay as they are, and nothing is trained.

whole           every step waits for all of its answers
slices          rollout.slice_tokens and rollout.ahead; steps in which answers in flight still gather do not count
"""

import argparse
import asyncio
import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import PRESETS, add_engine, add_model, command_line, engine_for, save, show, start
from torch.distributed import HashStore

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import RolloutSettings, one_shot
from trainer.config.answer_age import oldest_age
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, PromptDataset
from trainer.rollouts.carried import CarriedPool
from trainer.rollouts.pool import EpisodePool, Pool, Terms

Row = dict[str, float]


async def nothing() -> None:
    """Do nothing, since there is no server to stop."""


def recipe(options: argparse.Namespace, sliced: bool, prompts: int) -> TrainConfig:
    """Make a recipe with the keys that rollouts read."""
    cut: dict[str, Any] = {"slice_tokens": options.slice, "ahead": options.ahead} if sliced else {}
    return TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": cut,
            "batch": {"prompts_per_step": prompts},
            "algorithm": {"group_size": options.group},
            "sampling": {"max_tokens": options.max_tokens},
            "engine": {"max_model_len": options.prompt_tokens + options.max_tokens},
        }
    )


class Steps:
    """Steps of rollouts on one engine. Each takes the next prompts of the data."""

    def __init__(self, leader: Leader, options: argparse.Namespace, sliced: bool, prompts: int) -> None:
        self.config, self.leader, self.options = recipe(options, sliced, prompts), leader, options
        rewards: Any = SimpleNamespace(labels=[], take_counts=dict, check_error_rate=lambda counts: None)
        level: Any = SimpleNamespace(
            function=one_shot, messages=lambda _: None, aclose=nothing, image_rules=None
        )
        tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
        self.position, self.number = 0, 0
        vocabulary = PRESETS[options.preset][-1]
        self.ends = list(range(1, 1 + max(1, round(vocabulary / options.mean))))
        ids = tuple(range(100, 100 + options.prompt_tokens - 1))
        self.prompts = PromptDataset([Prompt(i, (i % (vocabulary - 1), *ids), {}) for i in range(4096)])
        take = partial(self.prompts.take, seed=0)
        engines = Pool(leader, tokenizer, rewards, HashStore(), level, prompts=take)
        self.pool: EpisodePool = CarriedPool(self.config, engines) if sliced else engines

    def step(self) -> Row:
        """Run a step and return its figures."""
        self.number += 1
        sampling = SamplingSettings(self.options.max_tokens, stop_token_ids=self.ends)
        settings = RolloutSettings(self.options.group, sampling, 0, seed=0, step=self.number)
        at, count = self.position, self.config.batch.prompts_per_step
        self.leader.thread.run(self.leader.engine.reset_prefix_cache(), 60, "resetting the prefix cache")
        prefill = self.prefill()
        began = time.perf_counter()
        taken = self.pool.take(at, count, settings, Terms(3600))
        seconds = time.perf_counter() - began
        answers = taken.answers()
        self.position = taken.position
        sampled = [answer.sampled for answer in answers]
        figures = {"seconds": seconds, "tokens": float(sum(sampled)), "longest": float(max(sampled))}
        figures["prefill"] = prefill
        return figures | {"rate": sum(sampled) / seconds} | taken.figures

    def prefill(self) -> float:
        """Return the seconds that the engine takes to compute the caches of all unfinished answers."""
        unfinished = [
            answer
            for group in self.pool.groups()
            for answer in group.unfinished.values()
            if answer.token_ids
        ]
        if not unfinished:
            return 0.0
        engine, sampling = self.leader.engine, SamplingSettings(1)

        async def compute() -> float:
            """Compute all of them at once, as a step does when it begins."""
            began = time.perf_counter()
            prompts = (answer.prompt_ids + answer.token_ids for answer in unfinished)
            await asyncio.gather(
                *(engine.complete(ids, sampling, seed=0, policy_version=0) for ids in prompts)
            )
            seconds = time.perf_counter() - began
            await engine.reset_prefix_cache()
            return seconds

        return self.leader.thread.run(compute(), 600, "computing caches again")


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print."""
    with engine_for(options, keyed_noise=True) as leader:
        waiting, sliced = (Steps(leader, options, cut, options.prompts) for cut in (False, True))
        waiting.step()  # does not count
        rows = {"whole": [waiting.step() for _ in range(options.rounds)]}
        for _ in range(oldest_age(sliced.config)):
            sliced.step()
        rows["slices"] = [sliced.step() for _ in range(options.rounds)]
        sliced.pool.close()
    present(options, sliced.config, rows)


def present(options: argparse.Namespace, config: TrainConfig, rows: dict[str, list[Row]]) -> None:
    """Print the table and write the JSON."""

    def total(name: str, key: str) -> float:
        """Add up a figure over all rounds of one kind."""
        return sum(row.get(key, 0.0) for row in rows[name])

    rates = {name: total(name, "tokens") / total(name, "seconds") for name in rows}
    ratios = {"slices": rates["slices"] / rates["whole"]}
    cells = []
    for name, steps in rows.items():
        longest = max(row["longest"] for row in steps)
        age = f"{total(name, 'stale/age_mean') / len(steps):.2f}, {max(r.get('stale/age_max', 0.0) for r in steps):.0f}"
        ratio = f"{ratios[name]:.2f}" if name in ratios else ""
        cells.append(
            [name, f"{rates[name]:.0f}", ratio, f"{longest:.0f}", age if name == "slices" else ""]
        )
    answers = options.prompts * options.group
    title = (
        f"{options.preset} {options.dtype}: {answers} answers a step of {options.mean} tokens on average"
    )
    extra = total("slices", "carry/slices") - options.rounds
    share = total("slices", "prefill") / total("slices", "seconds")
    notes = [
        f"slices of {options.slice} tokens, {options.ahead:g} step(s) ahead: at most {oldest_age(config)} steps old",
        f"{extra / options.rounds:.1f} slices a step beyond its first; {options.max_num_seqs} sequences at a time",
        f"{share:.1%} of the time for the caches of answers that go on",
        f"{total('slices', 'carry/preemptions'):.0f} preemptions",
    ]
    show(title, ["", "tok/s", "ratio", "longest", "age mean, max"], cells, notes)
    save(options.json, {"title": title, "rows": rows, "ratios": ratios, "prefill share": share})


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = command_line(__doc__, rounds=4)
    add_model(parser, "1M")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a step (default: 16)")
    parser.add_argument("--group", type=int, default=8, help="samples of each (default: 8)")
    parser.add_argument(
        "--mean", type=int, default=96, help="tokens of an answer on average (default: 96)"
    )
    parser.add_argument("--slice", type=int, default=160, help="rollout.slice_tokens (default: 160)")
    parser.add_argument("--ahead", type=float, default=1.0, help="rollout.ahead (default: 1)")
    add_engine(parser, prompt_tokens=16, max_tokens=768, max_num_seqs=256)
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse())
