"""Common parts of the benchmarks: random models that never touch a disk, engines for them, tables and JSON."""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import Lfm2Config, Qwen2Config, Qwen3_5TextConfig, Qwen3MoeConfig

from generation.engine.engine import Engine, Leader
from generation.engine.settings import EngineSettings
from sharding import SHARING_WORKER, WORKER_EXTENSION
from sharding.manager import ShardingManager
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource
from sharding.transports.base import Transport
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.distributed import destroy_process_group, init_process_group
from trainer.policy import hf_format
from trainer.policy.fsdp import FsdpPolicy
from trainer.policy.hf_format import CheckpointView, checkpoint_views
from trainer.policy.in_place import InPlacePolicy
from trainer.run import processes

# Hidden size, intermediate size, layers, heads, key-value heads, vocabulary; all with tied
# embeddings
PRESETS = {
    "1M": (128, 512, 4, 4, 2, 288),
    "10M": (256, 1024, 6, 4, 2, 16384),
    "100M": (768, 2048, 12, 12, 4, 32768),
    "0.1B": (512, 1408, 8, 8, 4, 151936),  # small, with the vocabulary of the large
    "0.2B": (768, 3072, 12, 12, 4, 151936),
    "0.5B": (896, 4864, 24, 14, 2, 151936),  # Qwen2.5-0.5B
    "1B": (1536, 8960, 16, 12, 2, 151936),  # Qwen2.5-1.5B with 16 of its 28 layers
    "7B": (3584, 18944, 28, 28, 4, 152064),  # Qwen2.5-7B, except for its separate output head
}

# The same with the sizes of an expert, in Qwen3-MoE's form: experts, and how many a token is sent
# to
MIXTURES = {
    "10M mixture": ((256, 128, 6, 4, 2, 4096), 16, 4),
    "0.2B mixture": ((768, 256, 12, 12, 4, 32768), 24, 4),
}

TIMEOUT = 600.0
"""Seconds that a benchmark waits for a call before it gives up."""

# bytes; larger copies are made of such pieces: far beyond any cache, and room is scarce
COPIED_AT_ONCE = 512 << 20


def command_line(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks that start an engine."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measurements of each kind (default: {rounds})"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def add_model(parser: argparse.ArgumentParser, preset: str) -> None:
    """Add the options of a benchmark of one model."""
    parser.add_argument(
        "--preset", choices=PRESETS, default=preset, help=f"size of the model (default: {preset})"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="the engine's weights"
    )


def start(
    benchmark: Callable[[argparse.Namespace], None], options: argparse.Namespace, ranks: bool = False
) -> None:
    """Run a benchmark as training is run, so that no process outlives it; with a process group if `ranks`."""

    def main() -> int:
        if ranks:
            init_process_group(600)
        processes.install_signal_handlers(lambda: "benchmark")
        torch.manual_seed(0)
        benchmark(options)
        if ranks:
            destroy_process_group()
        return 0

    processes.start_guardian()
    processes.run(main)


def write_config(folder: Path, preset: str, dtype: str, hybrid: str = "") -> Path:
    """Return a model folder that holds a configuration and nothing else; returns it."""
    sizes, experts, top_k = MIXTURES.get(preset) or (PRESETS[preset], 0, 0)
    hidden, intermediate, layers, heads, kv_heads, vocabulary = sizes
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "dtype": dtype,
    }
    dense: dict[str, Any]
    if experts:
        moe = {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": intermediate,
        }
        moe |= {"head_dim": hidden // heads, "tie_word_embeddings": False}
        Qwen3MoeConfig(**shape, **moe, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    elif hybrid:
        mixer = {"lfm2": "conv", "qwen3_5": "linear_attention"}[hybrid]
        dense = {"intermediate_size": intermediate, "tie_word_embeddings": True}
        dense["layer_types"] = [mixer if layer % 4 < 3 else "full_attention" for layer in range(layers)]
        if hybrid == "lfm2":
            dense |= {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": False}
            Lfm2Config(**shape, **dense).save_pretrained(folder)
            return folder
        # The values of gated delta rules are twice as wide as the hidden state, as in Qwen3.5
        dense |= {"linear_num_key_heads": heads // 2, "linear_num_value_heads": heads}
        dense |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2 * hidden // heads)
        dense |= {"head_dim": hidden // heads, "architectures": ["Qwen3_5ForCausalLM"]}
        Qwen3_5TextConfig(**shape, **dense).save_pretrained(folder)
    else:
        dense = {"intermediate_size": intermediate, "tie_word_embeddings": True}
        Qwen2Config(**shape, **dense, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


class _RandomWeights:
    """Stands in for the safetensors files of a folder that has none."""

    def __init__(self, folder: Path) -> None:
        self.names: set[str] = set()
        self.used: set[str] = set()

    def read(
        self, views: list[CheckpointView], begin: int, end: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        values = torch.empty(end - begin, dtype=dtype, device=device)
        return values.fill_(1.0) if "norm" in views[0].name else values.uniform_(-0.05, 0.05)


def random_policy(
    folder: Path, dtype: str, device: torch.device, in_place: bool = False, **settings: Any
) -> FsdpPolicy:
    """Return the trainer's own policy, float32 masters sharded over the ranks, with random weights.

    `in_place`: one that computes with an engine's weights. `settings` are further keys of the section `policy`.
    """
    config = PolicyConfig.model_validate({"dtype": dtype} | settings)
    with mock.patch.object(hf_format, "SafetensorsFolder", _RandomWeights):
        return (InPlacePolicy if in_place else FsdpPolicy)(ModelConfig(path=str(folder)), config, device)


def start_engine(
    folder: Path, device: torch.device, extra: dict[str, Any] | None = None, **settings: Any
) -> Leader:
    """Return an engine with random weights of its own, as this rank's leader holds it; `extra` are arguments of vLLM's."""
    defaults: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_bytes": 256 << 20}
    defaults["device_indices"] = (device.index,) if device.type == "cuda" else ()
    defaults |= {"cpu_threads": torch.get_num_threads(), "worker_extension": WORKER_EXTENSION}
    if settings.get("shared_weights") and device.type == "cuda":
        defaults["worker_class"] = SHARING_WORKER
    engine = Engine(
        EngineSettings(
            model=str(folder),
            load_format="dummy",
            extra={"skip_tokenizer_init": True} | (extra or {}),
            **(defaults | settings),
        )
    )
    return Leader.start(engine, TIMEOUT)


def add_engine(
    parser: argparse.ArgumentParser, prompt_tokens: int, max_tokens: int, max_num_seqs: int
) -> None:
    """Add the options of a benchmark of one engine's rollouts."""
    sizes = {
        "prompt-tokens": (prompt_tokens, "length of the prompts"),
        "max-tokens": (max_tokens, "longest answer"),
        "max-num-seqs": (max_num_seqs, "sequences the engine runs at once"),
        "kv-cache-mib": (512, "size of the KV cache"),
    }
    for name, (default, meaning) in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})"
        )


@contextmanager
def engine_for(options: argparse.Namespace, **settings: Any) -> Iterator[Leader]:
    """Return a context with an engine of version 0 by the options of `add_model` and `add_engine`."""
    leader = start_engine(
        write_config(Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype),
        this_device(),
        dtype=options.dtype,
        max_model_len=options.prompt_tokens + options.max_tokens,
        max_num_seqs=options.max_num_seqs,
        kv_cache_bytes=options.kv_cache_mib << 20,
        sleep=False,
        **settings,
    )
    try:
        leader.engine.state.adopt_checkpoint(0)
        yield leader
    finally:
        leader.close()


def ask_worker(leader: Leader, method: str, *args: Any) -> Any:
    """Return the first worker's result of a method of the worker extension."""
    return leader.thread.run(leader.engine.call_workers(method, *args), TIMEOUT, method)[0]


def weight_source(policy: FsdpPolicy, dtype: str) -> FsdpWeightSource:
    """Return the trainer's source of the policy's weights."""
    parameters: list[tuple[str, torch.Tensor]] = [*policy.named_parameters()]
    layout = partial(checkpoint_views, policy.model)
    return FsdpWeightSource(parameters, getattr(torch, dtype), layout)


def connected_manager(
    source: FsdpWeightSource,
    device: torch.device,
    settings: SyncSettings,
    leader: Leader | None,
    way: Transport | None = None,
    tensor_parallel_size: int = 1,
) -> ShardingManager:
    """Connect a sharding manager to policy and engine, as training does; without a `way`, weights are staged."""
    folder = Path(tempfile.mkdtemp(dir=processes.private_folder()))
    manager = ShardingManager(source, device, settings, folder, tensor_parallel_size, leader, way=way)
    manager.connect()
    return manager


def this_device() -> torch.device:
    """CUDA device LOCAL_RANK where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that an action takes, including its work on the device."""
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def seconds(action: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Time `rounds` calls, after one that does not count; return the seconds of each."""
    return [timed(action, device) for _ in range(rounds + 1)][1:]


def in_turns(
    actions: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Time several actions as `seconds` does, in turns, so that other work on the machine slows all of them alike."""
    times = [
        {name: timed(action, device) for name, action in actions.items()} for _ in range(rounds + 1)
    ][1:]
    return {name: [of_round[name] for of_round in times] for name in actions}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain_copy(nbytes: int, device: torch.device) -> Callable[[], None]:
    """Return an action that copies so many bytes between two buffers that are mapped already: the floor of any transfer."""
    size = min(nbytes, COPIED_AT_ONCE)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    pieces = [min(size, nbytes - begin) for begin in range(0, nbytes, size)]

    def copy() -> None:
        for piece in pieces:
            target[:piece].copy_(source[:piece])

    return copy


def total(tensors: Iterable[torch.Tensor]) -> float:
    """Return the sum of all elements, in float64."""
    return sum(tensor.sum(dtype=torch.float64).item() for tensor in tensors)


def origin() -> dict[str, Any]:
    """Origin of the figures: command, commit (with + where files differ from it), machine, versions, load."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True
    ).stdout.strip()
    names = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    cpu = f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"
    gpu = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, "
        if torch.cuda.is_available()
        else ""
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit + "+" * bool(changed),
        "machine": gpu + cpu,
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


class PeakMemory:
    """A context that measures peak memory of the device, or resident host memory, in bytes beyond those before it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.nbytes = device, 0

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        peak = (
            torch.cuda.max_memory_allocated(self._device)
            if self._device.type == "cuda"
            else _status("VmHWM")
        )
        self.nbytes = peak - self._before


def _status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations a second in a product of two large square matrices, the best of several."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        best = min(best, timed(lambda: a @ b, device))
    return 2 * size**3 / best


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def show(title: str, columns: list[str], rows: list[list[str]], notes: list[str]) -> None:
    """Print a table with its title above, and its notes and origin below."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=120, highlight=False)
    console.print(table)
    where = origin()
    for note in [
        *notes,
        f"{where['machine']}, load {where['load']:.1f}, torch {where['torch']}, commit {where['commit']}",
    ]:
        console.print(f"  {note}", style="dim")


def show_rounds(
    file: Path | None,
    title: str,
    columns: list[str],
    formats: Sequence[str],
    rounds: list[list[float]],
    notes: list[str],
) -> None:
    """Print and save the figures of all rounds, [rounds, columns], and their medians; each column has its format."""
    middle = [median(column) for column in zip(*rounds, strict=True)]
    cells = [
        [format(value, f) for value, f in zip(line, formats, strict=True)] for line in (*rounds, middle)
    ]
    names = [*map(str, range(1, len(rounds) + 1)), "median"]
    show(
        title,
        ["round", *columns],
        [[name, *line] for name, line in zip(names, cells, strict=True)],
        notes,
    )
    save(file, {"title": title, "columns": columns, "rounds": rounds, "median": middle})


def save(file: Path | None, results: dict[str, Any]) -> None:
    """Write results and origin as JSON, if a file was named."""
    if file is not None:
        file.write_text(json.dumps(origin() | results, indent=2) + "\n")
