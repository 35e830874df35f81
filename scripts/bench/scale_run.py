"""One rank of the run that `scale.py` counts: a real one, or rank 0 of any number of simulated ones.

It runs the step of `trainer.loop` with a policy on FSDP2: the sync of its weights to a worker, the exchange of answers,
the update, the figures and a checkpoint. Only the engine's answers come from a list. A real rank is in a process group
of gloo. A simulated one is rank 0 alone in PyTorch's fake process group, whose other ranks send what it sends itself;
answers, samples and parts of a checkpoint, which differ from rank to rank, are made up for each. In both, calls and
bytes are counted when torch.distributed dispatches them; those of gathers and sums are the bytes of a ring.
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

PROMPTS, GROUP = 2, 8  # prompts of each rank in a step, and samples of each
STEPS = 2  # the last is counted, since the first sync differs from all others
DEADLINE = 600.0
WIDTH: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
}


class Counted(TorchDispatchMode):
    """Counts this thread's collectives by kind: calls, bytes sent and bytes received.

    A kind is the name of the function of `sharding.ranks` that was called, or torch.distributed's name of a gather,
    scatter or sum of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, list[int]] = {}
        # In a simulation: the payloads that the next exchange of bytes receives
        self.coming: list[bytes] | None = None

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
        """Return the counts since the last call."""
        counts, self.counts = self.counts, {}
        return counts


def asked_by() -> str | None:
    """Return the function of `sharding.ranks` through which this collective was called; None if there is none."""
    frame: FrameType | None = sys._getframe(2)
    name: str | None = None
    while frame is not None:
        if frame.f_code.co_filename == exchanges.__file__:
            name = frame.f_code.co_name
        elif name and "contextlib" not in frame.f_code.co_filename:
            return "agree" if name == "agreed" else name
        frame = frame.f_back
    return name


def traffic(name: str, args: Any) -> tuple[int, int]:
    """Return the bytes that a collective sends and receive on this rank."""
    if name == "alltoall_base":
        output, outgoing, coming, going = args[0], args[1], args[3], args[4]
        me, count = dist.get_rank(), dist.get_world_size()
        sent = outgoing.nbytes - (going[me] * outgoing.itemsize if going else outgoing.nbytes // count)
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
        raise NotImplementedError(f"the bytes that {name} sends are not known here: add it to traffic()")
    return around, around


class Loaded(nn.Module):
    """An engine's model that keeps weights in the checkpoint's layout."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        """Copy weights by name; vLLM's models have this method."""
        parameters = dict(self.model.named_parameters())
        for name, weight in weights:
            parameters[name].copy_(weight)


class ListedPool(Pool):
    """A pool in which every rank's engine takes `PROMPTS` prompts and answers them from a list."""

    requests: ClassVar[Counter[str]] = Counter()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._store = CountedStore(self._store, self.requests)  # type: ignore[assignment]

    async def _sample(self, leader: Leader, prompts: Any, settings: Any, *rest: Any) -> list[Trajectory]:
        for _ in range(PROMPTS + 1):  # after the last prompt, one request in vain
            self._store.add(f"rollout/{self._rounds}", 1)
        answers = listed(rank(), settings.policy_version)
        for trajectory in answers:
            await self.score(trajectory, prompts[trajectory.prompt_index])
        return answers


class CountedStore:
    """The ranks' store, which counts requests by their kind."""

    def __init__(self, store: Any, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        return getattr(self._store, name)


def listed(number: int, version: int) -> list[Trajectory]:
    """Make the answers of a rank's engine; their lengths differ from rank to rank."""
    answers = []
    for place in range(PROMPTS * GROUP):
        ids = [8 + (number + place * step) % 200 for step in range(8 + (5 * place + 7 * number) % 17)]
        prompt, sample = divmod(place, GROUP)
        sampled = ids[6:]
        mask, logprobs = [1] * len(sampled), [-5.0] * len(sampled)
        answer = Trajectory(prompt + number * PROMPTS, sample, ids[:6], sampled, mask, logprobs)
        answer.reward, answer.versions, answer.weight_version = (
            float(sample % 2),
            [(version, 0)],
            version,
        )
        answers.append(answer)
    return answers


def without_engine(start: Start, _: contextlib.ExitStack) -> None:
    """Make, in place of `trainer.start.start_engine`, an engine in this process that only receives weights."""
    sizes = SimpleNamespace(dtype=torch.float32, tensor_parallel_size=1)
    worker = Worker(
        Loaded(start.config.model.path), SimpleNamespace(model_config=sizes, parallel_config=sizes)
    )
    start.leader = Leader(OneWorker(worker), Thread())  # type: ignore[arg-type]


def recipe(folder: Path, ranks: int) -> TrainConfig:
    """Make the recipe of a run on `ranks` ranks, with a tiny model and data in `folder`."""
    return TrainConfig.model_validate(
        {
            "run": {
                "name": f"ranks_{ranks}",
                "output_dir": str(folder),
                "steps": STEPS + 1,
                "device": "cpu",
            },
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "data.jsonl"), "max_prompt_tokens": 16},
            "sampling": {"max_tokens": 32},
            "engine": {"max_model_len": 64},
            # log-probabilities are made up
            "sync": {"way": "staged", "bucket_mib": 1, "first_gap_limit": None},
            "policy": {"dtype": "float32"},
            "algorithm": {"group_size": GROUP},
            # No rank is simulated that would compare beginnings of its answers.
            "batch": {
                "prompts_per_step": PROMPTS * ranks,
                "tokens_per_micro_batch": 4096,
                "share_prefixes": False,
            },
            # One to each of rank 0's prompts, which come first: no answer of a simulated rank is shown.
            "tracking": {"wandb": "disabled", "completions_per_step": PROMPTS},
        }
    )


def make_inputs(folder: Path) -> None:
    """Write a tiny model and prompts into `folder`."""
    from trainer.commands.tiny_model import make_tiny_model

    make_tiny_model(folder / "model", vocab_size=288, **WIDTH)
    rows = ({"prompt": f"{number:04d}", "answer": ""} for number in range(1000))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def count_run(folder: Path, simulated: bool = False) -> dict[str, Any]:
    """Count the start, a step and a checkpoint of this rank, which has joined a process group."""
    config, counted, ranks = recipe(folder, world_size()), Counted(), world_size()
    counts: dict[str, Any] = {"ranks": ranks}
    with contextlib.ExitStack() as resources:
        watchdog = resources.enter_context(Watchdog(distributed.store(), rank(), ranks))
        sockets = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        for place in (
            mock.patch("trainer.build.Pool", ListedPool),
            mock.patch("trainer.start.start_engine", without_engine),
            mock.patch.object(extension, "_PLAIN_ON_CPU", True),
            mock.patch.object(processes, "private_folder", return_value=sockets),
            mock.patch.object(
                checkpoint, "write", functools.partial(timed_writing, counts, checkpoint.write)
            ),
            simulated_ranks(counted) if simulated else contextlib.nullcontext(),
        ):
            resources.enter_context(place)
        with counted:
            trainer = RLTrainer(config, watchdog, resources)
        counts["start"] = counted.take()
        for step in range(1, STEPS + 1):
            ListedPool.requests.clear()
            began = time.perf_counter()
            with counted:
                trainer.train_step(step)
            counts |= {"step": counted.take(), "seconds": time.perf_counter() - began}
            counts["requests"] = ListedPool.requests["add"]
        counts["peak"] = peak_bytes()
        trainer.keeper.finish()
        [saved] = (config.run.folder / "checkpoints").glob("step_*")
        names = [file.name for file in saved.iterdir()]
        of_rank_0 = [name for name in names if name.startswith(("__0_", "rank_0."))]
        of_any_rank = [name for name in names if name.startswith(("__", "rank_"))]
        counts["files"] = len(names) + simulated * (ranks * len(of_rank_0) - len(of_any_rank))
        counts["table"] = (saved / checkpoint.METADATA).stat().st_size
    return counts


def peak_bytes() -> int:
    """Return the peak memory of this process so far, without that of mapped files."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(sizes["VmHWM"].split()[0]) - int(sizes["RssFile"].split()[0])) << 10


def timed_writing(counts: dict[str, Any], write: Callable[..., Path], *arguments: Any) -> Path:
    """Write a checkpoint, on its thread, and add the seconds to `counts`."""
    began = time.perf_counter()
    path = write(*arguments)
    counts["writing"] = time.perf_counter() - began
    return path


# Simulated ranks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone_of(ranks: int) -> Iterator[None]:
    """Return a context in which this process is rank 0 of `ranks`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    new_group = dist.new_group
    with (
        mock.patch.object(distributed, "_store", dist.HashStore()),
        mock.patch.object(
            dist, "new_group", lambda **options: new_group(**(options | {"backend": "fake"}))
        ),
    ):
        yield
    dist.destroy_process_group()


@contextlib.contextmanager
def simulated_ranks(counted: Counted) -> Iterator[None]:
    """Return a context in which the other ranks send what they would, where that differs from what rank 0 sends."""
    exchange_samples, to_all = answers_of.exchange_samples, answers_of.send_to_all

    def show(payloads: list[bytes]) -> list[bytes]:
        # Rank 0 shows its answers first
        shown_by_others = [msgspec.msgpack.encode({})] * (world_size() - 1)
        counted.coming = [payloads[0], *shown_by_others]
        return exchanges.all_to_all_bytes(payloads)

    def send_to_all(packed: bytes) -> list[bytes]:
        counted.coming = [of_rank(packed, number) for number in range(world_size())]
        return to_all(packed)

    def handing_over(answers: Any, shares: Any, sample: Any, routes: Any = None) -> Any:
        def exchange(payloads: list[bytes]) -> list[bytes]:
            incoming = [bytearray() for _ in range(world_size())]
            for step, by_rank in zip(answers, shares, strict=True):
                for answer in (step[position] for position in by_rank[0]):
                    simulated = listed(answer.rank, 0)[
                        answer.prompt_index % PROMPTS * GROUP + answer.sample_index
                    ]
                    incoming[answer.rank] += answers_of._packed(sample(simulated))
            counted.coming = [bytes(part) for part in incoming]
            return exchanges.all_to_all_bytes(payloads)

        with mock.patch.object(answers_of, "all_to_all_bytes", exchange):
            return exchange_samples(answers, shares, sample, routes)

    with (
        mock.patch.object(exchanges, "_swap", swap),
        mock.patch.object(answers_of, "send_to_all", send_to_all),
        mock.patch("trainer.learning.groups.exchange_samples", handing_over),
        mock.patch("trainer.learning.answer_rows.all_to_all_bytes", show),
        # Only rank 0's shards were gathered
        mock.patch("sharding.verify.Verification.different", return_value=[]),
        mock.patch.object(_DistWrapper, "gather_object", plans_of_all),
        mock.patch.object(_DistWrapper, "scatter_object", lambda _, objects: objects[0]),
        mock.patch.object(default_planner, "_validate_global_plan", return_value=[]),
    ):
        yield


def swap(payload: list[Any], peer: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Do what `sharding.ranks._swap` does, between ranks that all send the same."""
    channel: Any = group or dist.group.WORLD
    for part in exchanges._framed(msgspec.msgpack.encode(payload)):
        channel.recv([torch.empty_like(part)], peer, 0)
        channel.send([part], peer, 0)
    return payload


def of_rank(packed: bytes, number: int) -> bytes:
    """Return the rows of answers that rank `number` sends; `packed` are rank 0's."""
    _, *rest = msgspec.msgpack.decode(packed)
    rows = np.array([answers_of._row(answer) for answer in listed(number, 0)], dtype=answers_of.ROW)
    return msgspec.msgpack.encode((rows.tobytes(), *rest))


def plans_of_all(_: _DistWrapper, plan: Any) -> list[Any]:
    """Return every rank's part of a checkpoint, pickled and unpickled, as rank 0 receives them."""
    if not isinstance(plan, SavePlan):
        return [plan] * world_size()
    pickled = [pickle.dumps(of_shard(plan, number)) for number in range(world_size())]
    return [pickle.loads(part) for part in pickled]


def of_shard(plan: SavePlan, number: int) -> SavePlan:
    """Return the part that rank `number` would write: rank 0's, with the rows of its shards moved up."""
    items = []
    for item in plan.items:
        if item.type == WriteItemType.SHARD:
            data = item.tensor_data
            assert data is not None
            chunk = data.chunk
            offsets = torch.Size([number * chunk.sizes[0], *chunk.offsets[1:]])
            index = replace(item.index, offset=offsets)
            item = replace(
                item, index=index, tensor_data=replace(data, chunk=replace(chunk, offsets=offsets))
            )
        items.append(item)
    return replace(plan, items=items)


def simulate(folder: str, ranks: str, output: str) -> None:
    """Write the counts of rank 0, of each number of ranks in `ranks`, into a file."""
    counts = []
    for number in map(int, ranks.split(",")):
        with alone_of(number):
            counts.append(count_run(Path(folder), simulated=True))
    Path(output).write_text(json.dumps(counts))


def really(folder: str, output: str) -> None:
    """Run the rank of torchrun's variables; rank 0 writes its counts into a file."""
    distributed.init_process_group(DEADLINE, "cpu")
    counts = count_run(Path(folder))
    if is_main():
        Path(output).write_text(json.dumps(counts))
    distributed.destroy_process_group()
