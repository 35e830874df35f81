#!/usr/bin/env python3
"""Time to bring the policy's weights into the engine, against a plain copy of the same bytes and against other
projects' ways, in the same run.

    python scripts/bench/weight_sync.py [--presets 1M 10M 0.2B] [--dtype bfloat16] [--packed] [--plot FILE.png] ...
    torchrun --standalone --nproc-per-node 2 scripts/bench/weight_sync.py ...     (two ranks, two engines)
    torchrun ... scripts/bench/weight_sync.py --tensor-parallel 2 --only sync pull     (two ranks, one engine of both)

One engine a rank and size is started with random weights (nothing is read from disk) and serves every measurement:

    memcpy       the floor: a copy of the same bytes between two resident buffers, in every worker at once
    load: ...    weights in the worker's memory into its model: by replaying recorded copies, by vLLM's loaders while
                 they are recorded, and by the loaders alone, one weight at a time. In turns with memcpy
    digest       the worker's half of sync.verify: full; in turns with memcpy, too
    transport    staging filled by us and copied out by another process, two buffers in turn; neither trainer nor vLLM
    gather       the policy's shards, cast and gathered into staging; no process reads them
    sync         a complete sync as in training, for each setting of sync.verify, in turns with memcpy; the engine is
                 awake
    after sleep  a sync after the engine has released its memory, as in training
    pull         sync.way pull: the worker reads the shards of all ranks, for each setting of sync.verify
    zero copy    sync.way zero_copy: the policy computes with the engine's own weights; one rank, unpacked weights
    TRL, ...     the ways of other projects, see peers.py

Either side has OMP_NUM_THREADS threads, by default one.
"""

import argparse
import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import (
    MIXTURES,
    PRESETS,
    TIMEOUT,
    ask_worker,
    command_line,
    connected_manager,
    median,
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
from peers import IPC_ARGUMENTS, IPC_ENVIRONMENT, Verl, VllmIpc, Way, trl

from generation.engine.engine import Leader
from sharding.ranks import exchange, is_main, rank, world_size
from sharding.report import SyncReport, SyncSettings, Verify
from sharding.send import buckets
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource
from sharding.transports.base import Transport
from sharding.transports.pull import Pull
from sharding.transports.zero_copy import ZeroCopy
from sharding.wire.channel import Listener, connect
from sharding.wire.staging import BUFFERS, Staging, make_staging, open_memory, wait_for_writes
from trainer.policy.in_place import InPlacePolicy
from trainer.run import processes

GIB = 2**30
VERIFY: tuple[Verify, ...] = ("off", "sample", "full")
SECTIONS = ["load", "move", "sync", "sleep", "peers", "pull", "zero copy"]
LOADS = {
    "digest": "digest",
    "replay": "load: replay",
    "loaders": "load: vLLM's, watched",
    "one by one": "load: vLLM's, one by one",
}


class SyncBench:
    """One policy and one engine of one size, and the measurements on them: name -> `Way`."""

    def __init__(self, options: argparse.Namespace, preset: str) -> None:
        self.options, self.preset, self.device = options, preset, this_device()
        self.mixture = preset in MIXTURES
        self.dtype = getattr(torch, options.dtype)
        self.folder = write_config(Path(tempfile.mkdtemp()) / "model", preset, options.dtype)
        on_cuda = self.device.type == "cuda"
        os.environ.update(IPC_ENVIRONMENT if on_cuda else {})
        self.begin(extra=IPC_ARGUMENTS if on_cuda else None, worker_extension="bench_worker.BenchWorker")
        # vLLM's loaders pack weights, which a bucket must not cut then
        uncut = None if options.packed else ()
        self.plan = BucketPlan(self.source.parameters(), options.bucket_mib << 20, uncut)
        self.ways: dict[str, Way] = {}
        self.shift: dict[str, list[float]] = {}

    def begin(self, shared: bool = False, **engine: Any) -> None:
        """Start the engine and build the policy; with `shared`, in one memory."""
        dtype, plain = self.options.dtype, not self.options.packed
        group = self.options.tensor_parallel
        self.leader: Leader | None = None
        if rank() % group == 0:
            self.leader = start_engine(
                self.folder,
                self.device,
                dtype=dtype,
                plain_cpu_weights=plain,
                shared_weights=shared,
                tensor_parallel_size=group,
                **engine,
            )
        self.policy = random_policy(self.folder, dtype, self.device, in_place=shared)
        self.source = weight_source(self.policy, dtype)

    def run(self) -> None:
        """Measure the sections that were asked for and are possible here."""
        self.update(1)  # from it the worker knows the weights, and which copies its loaders make
        unsplit, plain = self.options.tensor_parallel == 1, not self.options.packed
        sections: dict[str, tuple[Callable[[], None], bool]] = {
            "load": (self.load, unsplit),
            "move": (self.move, True),
            "sync": (lambda: self.sync("sync"), True),
            "sleep": (self.after_sleep, True),
            "peers": (self.peers, unsplit and plain and not self.mixture),
            "pull": (self.pull, plain),
            "zero copy": (self.share, world_size() == 1 and plain and not self.mixture),
        }
        for name in self.options.only:
            action, possible = sections[name]
            if possible:
                action()

    def load(self) -> None:
        """Measure the ways that need no trainer."""
        assert self.leader is not None
        times = ask_worker(self.leader, "bench_load", self.options.rounds)
        self.ways["memcpy"] = Way(times["memcpy"])
        self.ways |= {name: Way(times[way]) for way, name in LOADS.items() if way in times}

    def move(self) -> None:
        """Measure the ways that need no engine."""
        staging, rounds = make_staging(self.plan.capacity, self.device), self.options.rounds
        staging.export()
        room, messages = BUFFERS * self.plan.capacity, len(self.plan.buckets)
        with Reader(staging, self.device) as reader:
            times = seconds(lambda: reader.push(self.plan), rounds, self.device)
            self.ways["transport"] = Way(times, room, messages)
        self.ways["gather"] = Way(
            seconds(lambda: gather(self.source, self.plan, staging), rounds, self.device), room
        )
        staging.close()

    def sync(self, row: str, way: Transport | None = None) -> None:
        """Time syncs of each `verify` and the floor, in turns; the first ones, which map memory, do not count."""
        floors: list[float] = []
        reports = self.update(
            self.options.rounds + 1, VERIFY, way, between=lambda: floors.append(self.floor())
        )
        for number, verify in enumerate(VERIFY):
            chosen = reports[len(VERIFY) + number :: len(VERIFY)]
            self.ways[f"{row}, verify {verify}"] = Way(
                *seconds_of(chosen), floor=floors[1 : self.options.rounds + 1]
            )

    def after_sleep(self) -> None:
        """Time syncs as `sync` does, after engines have slept."""
        reports = self.update(self.options.rounds + 1, sleep=True)[1:]
        self.ways["after sleep, verify off"] = Way(*seconds_of(reports))
        self.shift = {
            p: [r.seconds.get(p, 0.0) for r in reports] for p in ("sleep", "wake", "sync", "verify")
        }

    def floor(self) -> float:
        """Return the seconds of a memcpy of a worker's weights in all workers at once: those of the slowest."""
        exchange(None)  # waits for all ranks
        nbytes = self.plan.nbytes // self.options.tensor_parallel
        times = [0.0]
        if self.leader is not None:
            call = self.leader.engine.call_workers("bench_copy", nbytes)
            times = self.leader.thread.run(call, TIMEOUT, "bench_copy")
        return max(max(of_rank) for of_rank in exchange(times))

    def update(
        self,
        count: int,
        verify: Sequence[Verify] = ("off",),
        way: Transport | None = None,
        sleep: bool = False,
        between: Callable[[], object] = lambda: None,
    ) -> list[SyncReport]:
        """Run `count` rounds, as in training: `between`, then a sync for each `verify`. Return all reports."""
        if self.leader is not None:
            engine = self.leader.engine
            engine.settings = dataclasses.replace(engine.settings, sleep=sleep)
        settings = SyncSettings("off", self.options.bucket_mib << 20)
        if isinstance(self.policy, InPlacePolicy):
            way = ZeroCopy(self.device, self.source.parameters(), self.policy.compute_in, TIMEOUT)
        group = self.options.tensor_parallel
        manager = connected_manager(self.source, self.device, settings, self.leader, way, group)
        reports = []
        for chosen in [None, *verify] * count:
            if chosen is None:
                between()
                continue
            manager._update.settings = dataclasses.replace(settings, verify=chosen)
            self.policy.updates.applied += 1
            manager.sleep()
            went_to_sleep = manager.report.seconds["sleep"]
            manager.wake(self.policy)
            manager.report.seconds["sleep"] = went_to_sleep
            reports.append(manager.report)
        manager.close()
        return reports

    def pull(self) -> None:
        """Time syncs by `sync.way: pull`. From then on the policy's shards are in memory that workers map."""
        self.sync(
            "pull", Pull(self.device, self.source, self.policy.shard_tensors(), [self.policy.optimizer])
        )

    def share(self) -> None:
        """Time syncs of a new engine and policy in one memory: the first sync copies weights, later ones nothing."""
        self.close()
        del self.policy, self.source
        self.begin(shared=True, worker_extension="bench_worker.BenchWorker")
        self.sync("zero copy")

    def close(self) -> None:
        """Stop the engine."""
        if self.leader is not None:
            self.leader.engine.close()

    def peers(self) -> None:
        """Measure the peers' ways that are possible here."""
        assert self.leader is not None
        rounds = self.options.rounds
        weights: list[tuple[str, torch.Tensor]] = [*self.policy.named_parameters()]
        if find_spec("trl") is not None:
            self.ways[f"TRL {version('trl')}, colocated"] = trl(self.leader, rounds)
        self.ways["verl's sequence of calls"] = Verl(
            self.leader, weights, self.dtype, self.device
        ).measure(rounds)
        if self.device.type == "cuda":
            engine = VllmIpc(self.leader, weights, self.dtype, self.device)
            self.ways[f"vLLM {version('vllm')}, packed IPC"] = engine.measure(rounds)


def seconds_of(reports: list[SyncReport]) -> tuple[list[float], int, int]:
    """Return the fields of a `Way` from reports of syncs: seconds of each, bytes of staging, messages."""
    times = [sum(r.seconds.get(phase, 0.0) for phase in ("wake", "sync", "verify")) for r in reports]
    return times, reports[-1].staging_bytes, reports[-1].messages


class Reader:
    """Another process that copies buckets out of staging on request, over the weight path's own channel."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        self.staging = staging
        folder = Path(tempfile.mkdtemp(dir=processes.private_folder()))
        self.channel = Listener(folder, "bench")
        arguments = (self.channel.endpoint, self.channel.secret, device, staging.handle)
        self.process = multiprocessing.get_context("spawn").Process(
            target=read_staging, args=arguments, daemon=True
        )
        self.source = torch.ones(staging.buffers[0].nbytes, dtype=torch.uint8, device=device)

    def __enter__(self) -> "Reader":
        self.process.start()
        self.channel.accept(TIMEOUT, "bench")
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.send("end")
        self.process.join(60)
        self.channel.close()

    def push(self, plan: BucketPlan) -> None:
        """Send every bucket of the plan through staging; one buffer is filled while the other is read."""
        for number, bucket in enumerate(plan.buckets):
            if number >= BUFFERS:
                self.channel.receive(TIMEOUT, "answer")
            buffer = self.staging.buffers[number % BUFFERS]
            buffer[: bucket.nbytes].copy_(self.source[: bucket.nbytes])
            wait_for_writes(self.source.device)
            self.channel.send("bucket", buffer=number % BUFFERS, nbytes=bucket.nbytes)
        for _ in plan.buckets[-BUFFERS:]:
            self.channel.receive(TIMEOUT, "answer")


def read_staging(endpoint: str, secret: str, device: torch.device, handle: dict[str, Any]) -> None:
    """Copy each bucket into memory of this process, which is the other one."""
    channel = connect(endpoint, secret, "bench", os.getpid())
    buffers = open_memory(handle, device)
    target = torch.ones(buffers[0].nbytes, dtype=torch.uint8, device=device)
    while (message := channel.receive(TIMEOUT, "bucket"))["kind"] == "bucket":
        count = message["nbytes"]
        target[:count].copy_(buffers[message["buffer"]][:count])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        channel.send("done")
    del buffers


def gather(source: FsdpWeightSource, plan: BucketPlan, staging: Staging) -> None:
    """Fill staging with every bucket in turn."""
    for number, bucket in enumerate(plan.buckets):
        buckets.gather(source, bucket, staging.buffers[number % BUFFERS], number)
    wait_for_writes(staging.buffers[0].device)


def present(bench: SyncBench) -> dict[str, Any]:
    """Print the table; return its figures."""
    options, nbytes, ways = bench.options, bench.plan.nbytes, bench.ways
    middle = {name: median(way.seconds) for name, way in ways.items()}
    rows = []
    for name, way in ways.items():
        floor = median(way.floor) if way.floor else middle.get("memcpy")
        ratio = f"{middle[name] / floor:.2f}" if floor else ""
        staging = "" if way.staging is None else f"{way.staging / 2**20:.1f}"
        messages = "" if way.messages is None else str(way.messages)
        cells = [
            f"{middle[name] * 1e3:.2f}",
            f"{min(way.seconds) * 1e3:.2f}",
            f"{nbytes / middle[name] / GIB:.2f}",
        ]
        rows.append([name, *cells, ratio, staging, messages])
    layout = "packed" if options.packed else "plain"
    engines = f"{world_size()} rank(s), TP {options.tensor_parallel}"
    title = f"{bench.preset} {options.dtype}, {layout} weights, {engines}"
    notes = [
        f"{nbytes / 2**20:.1f} MiB in {len(bench.plan.buckets)} buckets; medians of {options.rounds} rounds, "
        f"{torch.get_num_threads()} thread(s) on either side"
    ]
    if bench.shift:
        phases = (f"{phase} {median(times) * 1e3:.1f} ms" for phase, times in bench.shift.items())
        notes.append("after sleep: " + ", ".join(phases))
    if "memcpy" in middle and "transport" in middle:
        notes.append(f"transport at {middle['memcpy'] / middle['transport']:.0%} of memcpy's bandwidth")
    if "load: replay" in middle:
        gain = middle["load: vLLM's, one by one"] / middle["load: replay"]
        notes.append(f"replay {gain:.1f} x as fast as vLLM's load_weights of one weight at a time")
    if "peers" in options.only and not bench.mixture:
        notes += peers_notes(bench)
    show(title, ["what", "ms", "best ms", "GiB/s", "x memcpy", "staging MiB", "messages"], rows, notes)
    figures = {"title": title, "preset": bench.preset, "nbytes": nbytes, "shift": bench.shift}
    return figures | {"ways": {name: dataclasses.asdict(way) for name, way in ways.items()}}


def peers_notes(bench: SyncBench) -> list[str]:
    """Note on the peers' rows, and the reasons that some are missing."""
    if bench.options.packed:
        return ["peers: none, since their load_weights cannot write weights that are packed for oneDNN"]
    notes = ["TRL: model and engine in one process, whole and unsharded: nothing is gathered or sent"]
    if find_spec("trl") is None:
        notes = ["TRL: not installed"]
    if bench.device.type != "cuda":
        notes.append("vLLM's packed IPC engine: needs CUDA")
    return notes


def plot(sizes: list[dict[str, Any]], file: Path) -> None:
    """Draw seconds against bytes for each way, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    axes.set_prop_cycle(color=pyplot.color_sequences["tab20"])
    for name in sizes[-1]["ways"]:
        points = [
            (size["nbytes"], median(size["ways"][name]["seconds"]))
            for size in sizes
            if name in size["ways"]
        ]
        style = {"memcpy": "k--"}.get(name, "o:" if name[0].isupper() or "verl" in name else "o-")
        axes.loglog(*zip(*points, strict=True), style, label=name)
    axes.set(xlabel="bytes of the weights", ylabel="seconds", title="Weights into the engine")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print, size by size."""
    sizes = []
    for preset in options.presets:
        bench = SyncBench(options, preset)
        try:
            bench.run()
            if is_main():
                sizes.append(present(bench))
        finally:
            bench.close()
    if is_main():
        save(options.json, {"bucket_mib": options.bucket_mib, "sizes": sizes})
        if options.plot is not None:
            plot(sizes, options.plot)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, rounds=7)
    parser.add_argument(
        "--presets",
        nargs="+",
        choices=[*PRESETS, *MIXTURES],
        default=["100M"],
        help="sizes (default: 100M)",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="the engine's weights"
    )
    parser.add_argument(
        "--packed", action="store_true", help="CPU: let vLLM pack its weights for oneDNN"
    )
    parser.add_argument(
        "--bucket-mib", type=int, default=64, help="size of a staging buffer (default: 64)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=SECTIONS,
        metavar="SECTION",
        help=f"of {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks that share an engine (default: 1)"
    )
    parser.add_argument("--plot", type=Path, help="draw seconds against bytes into this file")
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse(), ranks=True)
