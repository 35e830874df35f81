#!/usr/bin/env python3
"""Time to send weights to an engine that stands apart, against a bare broadcast of the same bytes in the same run.

    python scripts/bench/collective.py --preset 100M [--dtype bfloat16] [--rounds 5] [--json FILE]

    memcpy       a copy of the same bytes between two resident buffers in one process
    broadcast    the floor: the same buckets broadcast to another process that does nothing with them
    send         CollectiveSender.send into a real engine, nothing compared, then with everything compared
    folder       StorageWriter.write, and load_weights_from_storage in the engine

On CUDA the engine takes the second GPU. One thread on either side unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import multiprocessing
import os
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import (
    TIMEOUT,
    add_model,
    command_line,
    median,
    plain_copy,
    random_policy,
    save,
    seconds,
    show,
    start,
    start_engine,
    this_device,
    weight_source,
    write_config,
)

from sharding.remote.broadcast import CollectiveSender
from sharding.remote.storage import StorageWriter
from sharding.report import SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.wire.group import BroadcastGroup, GroupStore, connect_store, listen

GIB = 2**30
HOST = "127.0.0.1"


def receive_bare(port: int, sizes: list[int], rounds: int, device: torch.device) -> None:
    """Receives every bucket of every round, in the other process of the floor."""
    group = BroadcastGroup(GroupStore(connect_store(HOST, port, TIMEOUT), "bench"), 1, 2, device, HOST, TIMEOUT)
    buffer = torch.ones(max(sizes), dtype=torch.uint8, device=device)
    for size in sizes * rounds:
        group.wait(group.start(buffer[:size]), "bucket")


def bare_broadcast(plan: BucketPlan, rounds: int, device: torch.device, other: torch.device) -> list[float]:
    """Returns the seconds of each round."""
    sizes = [bucket.nbytes for bucket in plan.buckets]
    store = listen(HOST, 0, TIMEOUT)
    arguments = (store.port, sizes, rounds + 1, other)
    process = multiprocessing.get_context("spawn").Process(target=receive_bare, args=arguments, daemon=True)
    process.start()
    group = BroadcastGroup(GroupStore(store, "bench"), 0, 2, device, HOST, TIMEOUT)
    buffer = torch.ones(max(sizes), dtype=torch.uint8, device=device)

    def send() -> None:
        for size in sizes:
            group.wait(group.start(buffer[:size]), "bucket")

    times = seconds(send, rounds, device)
    process.join(60)
    group.close()
    return times


class SendBench:
    """One policy, one engine apart, and the measurements: name -> seconds of each round."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, this_device()
        self.other = torch.device("cuda", 1) if self.device.type == "cuda" else self.device
        folder = write_config(Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype)
        self.leader = start_engine(folder, self.other, dtype=options.dtype, plain_cpu_weights=not options.packed)
        self.policy = random_policy(folder, options.dtype, self.device)
        self.source = weight_source(self.policy, options.dtype)
        self.plan = BucketPlan(self.source.parameters(), options.bucket_mib << 20)
        self.times: dict[str, list[float]] = {}

    def call(self, method: str, *arguments: Any) -> list[Future[Any]]:
        """Starts a coroutine of the engine."""
        return [self.leader.thread.submit(getattr(self.leader.engine, method)(*arguments))]

    def run(self) -> None:
        """Measures everything, cheapest first."""
        rounds = self.options.rounds
        self.times["memcpy"] = seconds(plain_copy(self.plan.nbytes, self.device), rounds, self.device)
        self.times["broadcast"] = bare_broadcast(self.plan, rounds, self.device, self.other)
        self.send("send", "off")
        self.send("send, everything compared", "full")
        with tempfile.TemporaryDirectory() as folder:
            writer = StorageWriter(folder, self.source, self.device, self.options.bucket_mib << 20)
            self.times["write to a folder"] = seconds(lambda: writer.write(1), rounds, self.device)
            load = lambda: self.call("load_weights_from_storage_async", folder)[0].result(TIMEOUT)  # noqa: E731
            self.times["load from a folder"] = seconds(load, rounds, self.device)

    def send(self, name: str, verify: Literal["off", "full"]) -> None:
        """Times the updates of a new sender."""
        settings = SyncSettings(verify, self.options.bucket_mib << 20, TIMEOUT)
        with CollectiveSender(self.source, self.device, settings, workers=1) as sender:
            sender.connect(self.call("init_collective_async", 0, sender.ip, sender.port, sender.world_size, 1))
            update = lambda: sender.send(1, self.call("update_weights_from_collective_async"))  # noqa: E731
            self.times[name] = seconds(update, self.options.rounds, self.device)


def present(bench: SendBench) -> None:
    """Prints the table and writes the JSON."""
    options, nbytes = bench.options, bench.plan.nbytes
    floor = median(bench.times["broadcast"])
    rows = []
    for name, times in bench.times.items():
        middle = median(times)
        speed, ratio = f"{nbytes / middle / GIB:.2f}", f"{middle / floor:.2f}"
        rows.append([name, f"{middle * 1e3:.1f}", f"{min(times) * 1e3:.1f}", speed, ratio])
    title = f"{options.preset} {options.dtype}, engine apart, {'packed' if options.packed else 'plain'} weights"
    notes = [
        f"{nbytes / 2**20:.1f} MiB in {len(bench.plan.buckets)} buckets, medians of {options.rounds} rounds, "
        f"{torch.get_num_threads()} thread(s) on either side"
    ]
    show(title, ["what", "ms", "best ms", "GiB/s", "x broadcast"], rows, notes)
    save(options.json, {"title": title, "nbytes": nbytes, "seconds": bench.times})


def benchmark(options: argparse.Namespace) -> None:
    """Measures and prints."""
    bench = SendBench(options)
    try:
        bench.run()
        present(bench)
    finally:
        bench.leader.engine.close()


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line(__doc__)
    add_model(parser, "100M")
    parser.add_argument("--packed", action="store_true", help="CPU: let vLLM pack its weights for oneDNN")
    parser.add_argument("--bucket-mib", type=int, default=64, help="size of a staging buffer (default: 64)")
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse(), ranks=True)
