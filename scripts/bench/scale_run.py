"""One rank of the run that `scale.py` counts: a real one, or one that stands for as many as one likes.

It is the step of `trainer.loop` with a policy on FSDP2, the sync of its weights to a worker, the exchange of answers,
the update, the figures and a checkpoint; only what an engine would say comes from a list. A real rank is in a process
group of gloo. A simulated one is rank 0 alone in PyTorch's fake process group, whose other ranks say what it says
itself; answers, samples and parts of a checkpoint, of which each rank has others, are written in their names. Calls and
bytes are counted as torch.distributed dispatches them, in either; bytes are those of a ring for gathers and sums.
"""

import contextlib
import functools
import json
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from generation.engine.engine import Leader
from generation.trajectory import Trajectory
from sharding import ranks as exchanges
from sharding.ranks import is_main, rank, world_size
from sharding.worker import extension
from tests.support.in_process import OneWorker, Thread, Worker
from trainer import distributed
from trainer.config.schema import TrainConfig
from trainer.learning import answers as answers_of
from trainer.loop import RLTrainer
from trainer.rollouts.pool import Pool
from trainer.run import checkpoint, processes
from trainer.run.watchdog import Watchdog
from trainer.start import Start

PROMPTS, GROUP = 2, 8  # of each rank in a step
STEPS = 2  # of which the last is counted: the first sync is another
DEADLINE = 600.0
WIDTH: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "heads": 4, "kv_heads": 2, "layers": 2}


class Counted(TorchDispatchMode):
    """Collectives of this thread: of each kind the calls, the bytes sent and the bytes received.

    A kind is the function of `sharding.ranks` that was called, or what torch.distributed calls a gather, scatter or sum
    of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, list[int]] = {}
        self.coming: list[bytes] | None = None  # in a simulation: what the next exchange of bytes brings

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_")
            if self.coming is not None and name == "alltoall_base":
                self._bring(args[0])
            sent, received = traffic(name, args)
            row = self.counts.setdefault(asked_by() or name, [0, 0, 0])
            row[:] = row[0] + 1, row[1] + sent, row[2] + received
        return done

    def _bring(self, output: Tensor) -> None:
        assert self.coming is not None
        if output.dtype == torch.int64:
            output.copy_(torch.tensor([len(part) for part in self.coming]))
        else:
            output.copy_(torch.frombuffer(bytearray().join(self.coming), dtype=torch.uint8))
            self.coming = None

    def take(self) -> dict[str, list[int]]:
        """The counts since the last time."""
        counts, self.counts = self.counts, {}
        return counts


def asked_by() -> str | None:
    """The function of `sharding.ranks` that was called from elsewhere, if any was."""
    frame: FrameType | None = sys._getframe(2)
    found: str | None = None
    while frame is not None:
        if frame.f_code.co_filename == exchanges.__file__:
            found = frame.f_code.co_name
        elif found and "contextlib" not in frame.f_code.co_filename:
            return "agree" if found == "agreed" else found
        frame = frame.f_back
    return found


def traffic(name: str, args: Any) -> tuple[int, int]:
    """Bytes that a collective sends and receives on this rank."""
    if name == "alltoall_base":
        output, own, coming, going = args[0], args[1], args[3], args[4]
        me, count = dist.get_rank(), dist.get_world_size()
        sent = own.nbytes - (going[me] * own.itemsize if going else own.nbytes // count)
        return sent, output.nbytes - (coming[me] * output.itemsize if coming else output.nbytes // count)
    if name == "allgather":
        around = sum(t.nbytes for t in args[0][0]) - args[1][0].nbytes
    elif name in ("allgather_base", "reduce_scatter_base"):
        around = abs(args[0].nbytes - args[1].nbytes)
    elif name == "allgather_into_tensor_coalesced":
        around = sum(t.nbytes for t in args[0]) - sum(t.nbytes for t in args[1])
    elif name == "allreduce":
        count = dist.ProcessGroup.unbox(args[1]).size()
        around = 2 * sum(t.nbytes for t in args[0]) * (count - 1) // count
    elif name in ("send", "recv"):
        there = args[0][0].nbytes
        return (there, 0) if name == "send" else (0, there)
    elif name == "barrier":
        around = 0
    else:
        raise NotImplementedError(f"nobody has said what {name} sends")
    return around, around


class Loaded(nn.Module):
    """An engine's model, which keeps every weight as the checkpoint has it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        """As vLLM calls it."""
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            own[name].copy_(weight)


class ListedPool(Pool):
    """Every rank's engine takes `PROMPTS` prompts and answers them from a list, alike on all ranks."""

    requests: ClassVar[Counter[str]] = Counter()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._store = CountedStore(self._store, self.requests)  # type: ignore[assignment]

    async def _sample(self, leader: Leader, prompts: Any, settings: Any, *others: Any) -> list[Trajectory]:
        for _ in range(PROMPTS + 1):  # the last finds that there are no more
            self._store.add(f"rollout/{self._rounds}", 1)
        found = listed(rank(), settings.policy_version)
        for trajectory in found:
            await self.score(trajectory, prompts[trajectory.prompt_index])
        return found


class CountedStore:
    """The ranks' store, with requests counted by their kind."""

    def __init__(self, store: Any, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        return getattr(self._store, name)


def listed(number: int, version: int) -> list[Trajectory]:
    """The answers of a rank's engine; their lengths are others on each rank."""
    found = []
    for place in range(PROMPTS * GROUP):
        ids = [8 + (number + place * step) % 200 for step in range(8 + (5 * place + 7 * number) % 17)]
        prompt, sample = divmod(place, GROUP)
        own = ids[6:]
        answer = Trajectory(prompt + number * PROMPTS, sample, ids[:6], own, [1] * len(own), [-5.0] * len(own))
        answer.reward, answer.versions, answer.weight_version = float(sample % 2), [(version, 0)], version
        found.append(answer)
    return found


def without_engine(start: Start, _: contextlib.ExitStack) -> None:
    """In the place of `trainer.start.start_engine`: an engine in this process that only takes weights."""
    sizes = SimpleNamespace(dtype=torch.float32, tensor_parallel_size=1)
    worker = Worker(Loaded(start.config.model.path), SimpleNamespace(model_config=sizes, parallel_config=sizes))
    start.leader = Leader(OneWorker(worker), Thread())  # type: ignore[arg-type]


def recipe(folder: Path, ranks: int) -> TrainConfig:
    """Of a run on so many ranks, with a tiny model and data in `folder`."""
    return TrainConfig.model_validate(
        {
            "run": {"name": f"ranks_{ranks}", "output_dir": str(folder), "steps": STEPS + 1, "device": "cpu"},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "data.jsonl"), "max_prompt_tokens": 16},
            "sampling": {"max_tokens": 32},
            "engine": {"max_model_len": 64},
            "sync": {"way": "staged", "bucket_mib": 1},
            "policy": {"dtype": "float32"},
            "algorithm": {"group_size": GROUP},
            "batch": {"prompts_per_step": PROMPTS * ranks, "tokens_per_micro_batch": 4096},
            "tracking": {"wandb": "disabled", "completions_per_step": 8},
        }
    )


def make_inputs(folder: Path) -> None:
    """A tiny model and prompts."""
    from trainer.commands.tiny_model import make_tiny_model

    make_tiny_model(folder / "model", vocab_size=288, **WIDTH)
    rows = ({"prompt": f"{number:04d}", "answer": ""} for number in range(1000))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def count_run(folder: Path, simulated: bool = False) -> dict[str, Any]:
    """One rank's counts of its start, a step, and a checkpoint, in a process group that it has joined."""
    config, counted, ranks = recipe(folder, world_size()), Counted(), world_size()
    found: dict[str, Any] = {"ranks": ranks}
    with contextlib.ExitStack() as resources:
        watchdog = resources.enter_context(Watchdog(distributed.store(), rank(), ranks))
        sockets = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        for place in (
            mock.patch("trainer.build.Pool", ListedPool),
            mock.patch("trainer.start.start_engine", without_engine),
            mock.patch.object(extension, "_PLAIN_ON_CPU", True),
            mock.patch.object(processes, "private_folder", return_value=sockets),
            mock.patch.object(checkpoint, "write", functools.partial(timed_writing, found, checkpoint.write)),
            others_speak(counted) if simulated else contextlib.nullcontext(),
        ):
            resources.enter_context(place)
        with counted:
            trainer = RLTrainer(config, watchdog, resources)
        found["start"] = counted.take()
        for step in range(1, STEPS + 1):
            ListedPool.requests.clear()
            began = time.perf_counter()
            with counted:
                trainer.train_step(step)
            found |= {"step": counted.take(), "seconds": time.perf_counter() - began}
            found["requests"] = ListedPool.requests["add"]
        found["peak"] = peak_bytes()
        trainer.keeper.finish()
        [saved] = (config.run.folder / "checkpoints").glob("step_*")
        names = [file.name for file in saved.iterdir()]
        own = [name for name in names if name.startswith(("__0_", "rank_0."))]
        others = [name for name in names if name.startswith(("__", "rank_"))]
        found["files"] = len(names) + simulated * (ranks * len(own) - len(others))
        found["table"] = (saved / checkpoint.METADATA).stat().st_size
    return found


def peak_bytes() -> int:
    """The most memory of this process so far, without that of files."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(sizes["VmHWM"].split()[0]) - int(sizes["RssFile"].split()[0])) << 10


def timed_writing(found: dict[str, Any], write: Callable[..., Path], *arguments: Any) -> Path:
    """On the checkpoint's thread."""
    began = time.perf_counter()
    path = write(*arguments)
    found["writing"] = time.perf_counter() - began
    return path


# Ranks that are not there ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone_of(ranks: int) -> Iterator[None]:
    """This process is rank 0 of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    new_group = dist.new_group
    with (
        mock.patch.object(distributed, "_store", dist.HashStore()),
        mock.patch.object(dist, "new_group", lambda **options: new_group(**(options | {"backend": "fake"}))),
    ):
        yield
    dist.destroy_process_group()


@contextlib.contextmanager
def others_speak(counted: Counted) -> Iterator[None]:
    """What the other ranks send, where it is not what rank 0 sends."""
    exchange_samples, to_all = answers_of.exchange_samples, answers_of.send_to_all

    def show(payloads: list[bytes]) -> list[bytes]:
        counted.coming = [payloads[0], *[msgspec.msgpack.encode({})] * (world_size() - 1)]  # rank 0's are the first
        return exchanges.all_to_all_bytes(payloads)

    def send_to_all(packed: bytes) -> list[bytes]:
        counted.coming = [of_rank(packed, number) for number in range(world_size())]
        return to_all(packed)

    def handing_over(answers: Any, shares: Any, sample: Any, routes: Any = None) -> Any:
        def exchange(payloads: list[bytes]) -> list[bytes]:
            incoming = [bytearray() for _ in range(world_size())]
            for step, by_rank in zip(answers, shares, strict=True):
                for answer in (step[position] for position in by_rank[0]):
                    own = listed(answer.rank, 0)[answer.prompt_index % PROMPTS * GROUP + answer.sample_index]
                    incoming[answer.rank] += answers_of._packed(sample(own))
            counted.coming = [bytes(part) for part in incoming]
            return exchanges.all_to_all_bytes(payloads)

        with mock.patch.object(answers_of, "all_to_all_bytes", exchange):
            return exchange_samples(answers, shares, sample, routes)

    with (
        mock.patch.object(exchanges, "_swap", swap),
        mock.patch.object(answers_of, "send_to_all", send_to_all),
        mock.patch("trainer.learning.groups.exchange_samples", handing_over),
        mock.patch("trainer.learning.answer_rows.all_to_all_bytes", show),
        mock.patch("sharding.send.push.DigestCheck.different", return_value=[]),  # what was gathered is rank 0's alone
        mock.patch.object(_DistWrapper, "gather_object", plans_of_all),
        mock.patch.object(_DistWrapper, "scatter_object", lambda _, objects: objects[0]),
        mock.patch.object(default_planner, "_validate_global_plan", return_value=[]),
    ):
        yield


def swap(told: list[Any], whom: int, group: dist.ProcessGroup | None) -> list[Any]:
    """As `sharding.ranks._swap` of ranks that all tell the same."""
    channel: Any = group or dist.group.WORLD
    for part in exchanges._framed(msgspec.msgpack.encode(told)):
        channel.recv([torch.empty_like(part)], whom, 0)
        channel.send([part], whom, 0)
    return told


def of_rank(packed: bytes, number: int) -> bytes:
    """What rank `number` tells of its answers; rank 0 tells `packed` of its own."""
    _, *others = msgspec.msgpack.decode(packed)
    rows = np.array([answers_of._row(answer) for answer in listed(number, 0)], dtype=answers_of.ROW)
    return msgspec.msgpack.encode((rows.tobytes(), *others))


def plans_of_all(_: _DistWrapper, own: Any) -> list[Any]:
    """Every rank's part of a checkpoint, unpickled as rank 0 gets it."""
    if not isinstance(own, SavePlan):
        return [own] * world_size()
    packed = [pickle.dumps(of_shard(own, number)) for number in range(world_size())]
    return [pickle.loads(plan) for plan in packed]


def of_shard(plan: SavePlan, number: int) -> SavePlan:
    """What rank `number` would write, if rows went on."""
    items = []
    for item in plan.items:
        if item.type == WriteItemType.SHARD:
            data = item.tensor_data
            assert data is not None
            chunk = data.chunk
            offsets = torch.Size([number * chunk.sizes[0], *chunk.offsets[1:]])
            index = replace(item.index, offset=offsets)
            item = replace(item, index=index, tensor_data=replace(data, chunk=replace(chunk, offsets=offsets)))
        items.append(item)
    return replace(plan, items=items)


def simulate(folder: str, ranks: str, output: str) -> None:
    """The counts of rank 0 of as many ranks as each of the numbers says, into a file."""
    found = []
    for number in map(int, ranks.split(",")):
        with alone_of(number):
            found.append(count_run(Path(folder), simulated=True))
    Path(output).write_text(json.dumps(found))


def really(folder: str, output: str) -> None:
    """One of the ranks that torchrun's variables tell of; rank 0 writes its counts into a file."""
    distributed.init_process_group(DEADLINE, "cpu")
    found = count_run(Path(folder))
    if is_main():
        Path(output).write_text(json.dumps(found))
    distributed.destroy_process_group()
