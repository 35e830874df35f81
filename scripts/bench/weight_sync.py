#!/usr/bin/env python3
"""How long the policy's weights take into the engine, against a plain copy of the same bytes in the same run.

    python scripts/bench/weight_sync.py --preset 100M [--dtype bfloat16] [--packed] [--rounds 7] [--json FILE]
    torchrun --standalone --nproc-per-node 2 scripts/bench/weight_sync.py ...     (two ranks, two engines)

One engine a rank is started with random weights (nothing is read from disk) and serves every measurement:

    memcpy       the floor: a copy of the same bytes between two resident buffers in one process
    transport    staging filled by us and copied out by another process, two buffers in turn; neither trainer nor vLLM
    gather       the policy's shards, cast and gathered into staging; nobody reads them
    loaders      what is in staging into the engine's model by vLLM's own loaders; nothing is gathered
    replay       the same by repeating the copies that the loaders were seen to make
    sync         all of it as in training, for each setting of sync.verify; the engine stays awake
    after sleep  the same, but the engine has given its memory back before, as in training

Threads: as many as OMP_NUM_THREADS says on either side, 1 if it says nothing.
"""

import argparse
import dataclasses
import multiprocessing
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import PRESETS, median, random_policy, save, seconds, show, start_engine, this_device, write_config

from sharding.channel import Listener, connect
from sharding.collectives import is_main, world_size
from sharding.manager import ShardingManager, SyncReport, SyncSettings
from sharding.plan import BucketPlan
from sharding.source import FsdpWeightSource
from sharding.transport import BUFFERS, Staging, make_staging, open_staging
from trainer import lifetime
from trainer.distributed import destroy_process_group, init_process_group
from trainer.policy.checkpoint_names import checkpoint_views

FLOOR_BYTES = 512 << 20  # larger copies are made of pieces of this size: far beyond any cache, and room is scarce
GIB = 2**30


class Resident(FsdpWeightSource):
    """A source that leaves in staging what is there."""

    def gather_into(self, names: list[str], slots: list[torch.Tensor]) -> None:
        return


class Bench:
    """One policy, one engine, and what was measured on them: name -> seconds of each round."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, this_device()
        folder = write_config(Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype)
        settings = {"dtype": options.dtype, "max_model_len": 128, "max_num_seqs": 4, "kv_cache_bytes": 256 << 20}
        settings |= {"plain_cpu_weights": not options.packed, "cpu_threads": torch.get_num_threads()}
        self.leader = start_engine(folder, self.device, **settings)
        self.policy = random_policy(folder, options.dtype, self.device)
        self.source = self.make_source(FsdpWeightSource)
        self.plan = BucketPlan(self.source.parameters(), options.bucket_mib << 20)
        self.times: dict[str, list[float]] = {}
        self.report = SyncReport(-1)
        self.shift: dict[str, list[float]] = {}

    def make_source(self, kind: type[FsdpWeightSource]) -> FsdpWeightSource:
        """The trainer's own way to the weights, or a variation of it."""
        model, dtype = self.policy.model, getattr(torch, self.options.dtype)
        return kind(list(self.policy.named_parameters()), dtype, partial(checkpoint_views, model))

    def measure(self, name: str, action: Any) -> None:
        """Time an action under a name."""
        self.times[name] = seconds(action, self.options.rounds, self.device)

    def run(self) -> None:
        """Everything, cheapest first."""
        self.measure("memcpy", plain_copy(self.plan.nbytes, self.device))
        staging = make_staging(self.plan.capacity, self.device)
        with Reader(staging, self.device) as reader:
            self.measure("transport", lambda: reader.push(self.plan))
        self.measure("gather", lambda: gather(self.source, self.plan, staging))
        staging.close()
        self.sync("loaders", "off", Resident, replay=False)
        self.sync("replay", "off", Resident)
        for verify in ("off", "sample", "full"):
            self.sync(f"sync, verify {verify}", verify)
        self.sync("after sleep, verify off", "off", sleep=True)

    def sync(
        self,
        name: str,
        verify: Any,
        kind: type[FsdpWeightSource] = FsdpWeightSource,
        sleep: bool = False,
        replay: bool = True,
    ) -> None:
        """Time syncs of a manager of their own; the first one, which maps the staging memory, does not count."""
        engine = self.leader.engine
        engine.settings = dataclasses.replace(engine.settings, sleep=sleep)
        settings = SyncSettings(verify, self.options.bucket_mib << 20, replay=replay)
        folder = Path(tempfile.mkdtemp(dir=lifetime.private_folder()))
        manager = ShardingManager(self.make_source(kind), self.device, settings, folder, leader=self.leader)
        manager.connect()
        reports = []
        for _ in range(self.options.rounds + 1):
            self.policy.updates.applied += 1
            manager.sleep()
            went_to_sleep = manager.report.seconds["sleep"]
            manager.wake(self.policy)
            manager.report.seconds["sleep"] = went_to_sleep
            reports.append(manager.report)
        manager.close()
        phases = {p: [r.seconds.get(p, 0.0) for r in reports[1:]] for p in ("sleep", "wake", "sync", "verify")}
        self.times[name] = [sum(parts) for parts in zip(phases["wake"], phases["sync"], phases["verify"], strict=True)]
        if sleep:
            self.shift = phases
        if verify == "off":
            self.report = reports[-1]


class Reader:
    """Another process that copies out of staging what it is told to, over the weight path's own channel."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        self.staging = staging
        folder = Path(tempfile.mkdtemp(dir=lifetime.private_folder()))
        self.channel = Listener(folder, "bench")
        arguments = (self.channel.endpoint, self.channel.secret, device, staging.handle)
        self.process = multiprocessing.get_context("spawn").Process(target=read_staging, args=arguments, daemon=True)
        self.source = torch.ones(staging.handle["nbytes"], dtype=torch.uint8, device=device)

    def __enter__(self) -> "Reader":
        self.process.start()
        self.channel.accept(60, "bench")
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.send("end")
        self.process.join(60)
        self.channel.close()

    def push(self, plan: BucketPlan) -> None:
        """Every bucket of the plan through staging, one being filled while the other is read."""
        for number, bucket in enumerate(plan.buckets):
            if number >= BUFFERS:
                self.channel.receive(60, "answer")
            buffer = self.staging.buffers[number % BUFFERS]
            buffer[: bucket.nbytes].copy_(self.source[: bucket.nbytes])
            self.staging.flush()
            self.channel.send("bucket", buffer=number % BUFFERS, nbytes=bucket.nbytes)
        for _ in plan.buckets[-BUFFERS:]:
            self.channel.receive(60, "answer")


def read_staging(endpoint: str, secret: str, device: torch.device, handle: dict[str, Any]) -> None:
    """The other process: copy each bucket into memory of its own."""
    channel = connect(endpoint, secret, "bench", os.getpid())
    buffers = open_staging(handle, device)
    target = torch.ones(handle["nbytes"], dtype=torch.uint8, device=device)
    while (message := channel.receive(600, "bucket"))["kind"] == "bucket":
        count = message["nbytes"]
        target[:count].copy_(buffers[message["buffer"]][:count])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        channel.send("done")
    del buffers


def plain_copy(nbytes: int, device: torch.device) -> Any:
    """An action that copies so many bytes between two buffers that are mapped already."""
    size = min(nbytes, FLOOR_BYTES)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    pieces = [min(size, nbytes - begin) for begin in range(0, nbytes, size)]

    def copy() -> None:
        for piece in pieces:
            target[:piece].copy_(source[:piece])

    return copy


def gather(source: FsdpWeightSource, plan: BucketPlan, staging: Staging) -> None:
    """Fill staging with every bucket in turn."""
    for number, bucket in enumerate(plan.buckets):
        buffer = staging.buffers[number % BUFFERS]
        slots = [buffer[s.offset : s.offset + s.parameter.nbytes] for s in bucket.slots]
        source.gather_into([s.parameter.name for s in bucket.slots], slots)
    staging.flush()


def present(bench: Bench) -> None:
    """Print the table, write the JSON."""
    options, nbytes = bench.options, bench.plan.nbytes
    floor = median(bench.times["memcpy"])
    rows = []
    for name, times in bench.times.items():
        middle = median(times)
        speed, ratio = f"{nbytes / middle / GIB:.2f}", f"{middle / floor:.2f}"
        rows.append([name, f"{middle * 1e3:.1f}", f"{min(times) * 1e3:.1f}", speed, ratio])
    layout = "packed" if options.packed else "plain"
    title = f"{options.preset} {options.dtype}, {layout} weights, {world_size()} rank(s)"
    notes = [
        f"{nbytes / 2**20:.1f} MiB in {len(bench.plan.buckets)} buckets, {bench.report.messages} messages, "
        f"staging {bench.report.staging_bytes / 2**20:.1f} MiB",
        f"medians of {options.rounds} rounds, {torch.get_num_threads()} thread(s) on either side",
        "after sleep: " + ", ".join(f"{phase} {median(times) * 1e3:.1f} ms" for phase, times in bench.shift.items()),
    ]
    show(title, ["what", "ms", "best ms", "GiB/s", "x memcpy"], rows, notes)
    results = {"title": title, "nbytes": nbytes, "bucket_mib": options.bucket_mib, "seconds": bench.times}
    results |= {"messages": bench.report.messages, "staging_bytes": bench.report.staging_bytes, "shift": bench.shift}
    save(options.json, results)


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    init_process_group(600)
    lifetime.install_signal_handlers(lambda: "benchmark")
    torch.manual_seed(0)
    bench = Bench(options)
    try:
        bench.run()
        if is_main():
            present(bench)
    finally:
        bench.leader.engine.close()
    destroy_process_group()
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="100M", help="size of the model (default: 100M)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="the engine's weights")
    parser.add_argument("--packed", action="store_true", help="CPU: let vLLM pack its weights for oneDNN")
    parser.add_argument("--bucket-mib", type=int, default=64, help="size of a staging buffer (default: 64)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each kind (default: 7)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    lifetime.start_guardian()
    lifetime.run(lambda: main(arguments))
