#!/usr/bin/env python3
"""Cost of choosing an engine, in microseconds, for each strategy; the floor is reading every engine's count once.

python scripts/bench/load_balancer.py [--engines 64] [--rounds 20000] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import save, show

from generation.compat.load_balancer import EngineLoad, LoadBalancer

REPEATS = 7
"""The median of this many measurements is reported."""


def microseconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median time of one call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(rounds // REPEATS):
            call()
        times.append((time.perf_counter() - start) / (rounds // REPEATS) * 1e6)
    return statistics.median(times)


def measure(engines: int, rounds: int) -> dict[str, float]:
    """Return the microseconds that a choice takes, by strategy, among engines with different loads."""
    loads = [EngineLoad() for _ in range(engines)]
    for index, load in enumerate(loads):
        load.cache_usage = index * 37 % 64 / 64
        for _ in range(index * 29 % 50):
            load.submitted()
    ids, text = list(range(2000)), "word " * 2000
    cases: dict[str, tuple[str, Any]] = {
        "requests": ("requests", None),
        "kv-cache": ("kv-cache", None),
        "round-robin": ("round-robin", None),
        "prefix-aware, ids": ("prefix-aware", ids),
        "prefix-aware, text": ("prefix-aware", text),
        "prefix-aware, dictionary": ("prefix-aware", {"prompt_token_ids": ids}),
    }
    results = {
        "floor": microseconds(lambda: [load.get_num_unfinished_requests() for load in loads], rounds)
    }
    for name, (strategy, prompt) in cases.items():
        balancer = LoadBalancer(loads, strategy)
        results[name] = microseconds(lambda b=balancer, p=prompt: b.select_actor(p), rounds)  # type: ignore[misc]
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.engines, arguments.rounds)
    rows = [[name, f"{cost:.1f}", f"{cost / results['floor']:.1f}"] for name, cost in results.items()]
    notes = ["floor: reading every engine's count of unfinished requests once"]
    show(f"Choosing one of {arguments.engines} engines", ["strategy", "µs", "× floor"], rows, notes)
    save(arguments.json, {"engines": arguments.engines, "microseconds": results})


if __name__ == "__main__":
    main()
