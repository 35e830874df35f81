"""Other projects' ways to bring the same weights to the same engine; bench_worker.py has the worker's half.

TRL          its own code, colocated: each parameter by itself into `load_weights`, in one process, so nothing is sent
verl         the same calls as its bucketed transfer makes, in this order: each parameter gathered whole and cast,
             into a buffer of 2 GiB that is made anew each time; bucket by bucket, one buffer, into `load_weights`
vLLM         its packed IPC engine: its own code, except for the few lines that hand chunks to the engine. CUDA only
"""

import base64
import pickle
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from common import TIMEOUT, ask_worker, seconds, total
from torch.distributed.tensor import DTensor

from generation.engine.engine import Leader
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource
from sharding.wire.channel import Listener
from sharding.wire.manifest import NamedTensors
from sharding.wire.staging import make_staging, wait_for_writes
from trainer.run import processes

VERL_BUCKET = 2 << 30
"""Bytes; the default of `update_weights_bucket_megabytes`."""

VLLM_BUFFER = 1 << 30
"""Bytes; vLLM's default, and more where a weight is larger."""

IPC_ARGUMENTS = {"weight_transfer_config": {"backend": "ipc"}}
IPC_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # handles travel pickled


@dataclass
class Way:
    """One way to bring weights to an engine, as it was measured.

    Attributes:
        seconds: of each round.
        staging: peak bytes of buffers between policy and engine, of both sides together; None: nothing was moved.
        messages: the number of messages from the trainer to the worker.
        floor: seconds of a memcpy in each of the same rounds; None: the row `memcpy` is the floor.
    """

    seconds: list[float]
    staging: int | None = None
    messages: int | None = None
    floor: list[float] | None = None


def trl(leader: Leader, rounds: int) -> Way:
    """Measure TRL's `sync_weights` in the worker."""
    return Way(ask_worker(leader, "bench_trl", rounds), 0, 0)


@torch.no_grad()
def gathered(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathers a parameter from all ranks and then casts it, in the order in which all peers do. Collective."""
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()).to(dtype)


class Verl:
    """The update as verl makes it: every rank gathers, and every rank sends to the worker on its device."""

    def __init__(
        self, leader: Leader, weights: NamedTensors, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.leader, self.weights, self.dtype, self.device = leader, dict(weights), dtype, device
        self.plan = BucketPlan(FsdpWeightSource(weights, dtype).parameters(), VERL_BUCKET)
        self.channel = Listener(Path(tempfile.mkdtemp(dir=processes.private_folder())), "verl")

    def measure(self, rounds: int) -> Way:
        """Time `rounds` updates."""
        ask_worker(self.leader, "bench_connect", self.channel.endpoint, self.channel.secret)
        self.channel.accept(TIMEOUT, "bench")
        times = seconds(self.update, rounds, self.device)
        self.channel.close()
        self.check()
        copies = 2 if self.device.type == "cuda" else 1
        return Way(times, copies * self.plan.capacity, 1 + len(self.plan.buckets))

    def check(self) -> None:
        """Raise RuntimeError unless the engine has the policy's weights: a way that fails must not be timed."""
        sent = total(gathered(weight, self.dtype) for weight in self.weights.values())
        held = ask_worker(self.leader, "bench_sum")
        if abs(sent - held) > 1e-6 * abs(sent):
            raise RuntimeError(
                f"the policy's weights add up to {sent}, the engine's after verl's calls to {held}"
            )

    def update(self) -> None:
        """Send one update."""
        call = self.leader.thread.submit(self.leader.engine.call_workers("bench_verl"))
        staging = make_staging(self.plan.capacity, self.device)
        staging.export()
        self.channel.send("memory", handle=staging.handle)
        self.channel.receive(TIMEOUT, "answer")
        for bucket in self.plan.buckets:
            for slot in bucket.slots:
                weight = (
                    gathered(self.weights[slot.parameter.name], self.dtype).reshape(-1).view(torch.uint8)
                )
                staging.buffers[0][slot.offset : slot.offset + len(weight)].copy_(weight)
            wait_for_writes(self.device)
            pieces = [[p.name, p.dtype, p.shape, p.offset] for p in bucket.pieces()]
            self.channel.send("bucket", pieces=pieces, last=bucket is self.plan.buckets[-1])
            self.channel.receive(TIMEOUT, "answer")
        call.result(TIMEOUT)
        staging.close()


class VllmIpc:
    """The update by vLLM's IPC engine. It must have been started with `IPC_ARGUMENTS` and in `IPC_ENVIRONMENT`."""

    def __init__(
        self, leader: Leader, weights: NamedTensors, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.leader, self.weights, self.dtype, self.device = leader, weights, dtype, device
        self.chunks = 0

    def measure(self, rounds: int) -> Way:
        """Time `rounds` updates."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={"packed": True} if packed_at_start() else {})
        self.leader.thread.run(
            self.leader.engine.llm.init_weight_transfer_engine(request), TIMEOUT, "vLLM's IPC engine"
        )
        times = seconds(
            lambda: self.leader.thread.run(self.update(), TIMEOUT, "vLLM's IPC engine"),
            rounds,
            self.device,
        )
        return Way(times, self.buffer_bytes, self.chunks)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of vLLM's buffer, which must hold the largest weight."""
        return max(VLLM_BUFFER, *(weight.numel() * self.dtype.itemsize for _, weight in self.weights))

    async def update(self) -> None:
        """Send one update, on the engine's event loop, where nothing else runs meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        engine, uuid = self.leader.engine.llm, str(torch.cuda.get_device_properties(self.device).uuid)
        pairs = ((name, gathered(weight, self.dtype)) for name, weight in self.weights)
        self.chunks = 0
        await engine.start_weight_update()
        with torch.cuda.device(self.device):
            for chunk in packed_ipc_producer(pairs, uuid, lambda item: item[1], self.buffer_bytes):
                info = {"names": chunk.names, "shapes": chunk.shapes, "dtype_names": chunk.dtype_names}
                info |= {"tensor_sizes": chunk.tensor_sizes} | (
                    {} if packed_at_start() else {"packed": True}
                )
                info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(chunk.ipc_handle)).decode()
                await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
                self.chunks += 1
        await engine.finish_weight_update()


def packed_at_start() -> bool:
    """Return True if vLLM learns once that updates are packed, as from about 0.27 on, rather than with each chunk."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo

    return "packed" in {field.name for field in fields(IPCWeightTransferInitInfo)}
