"""What Hotbunk adds to a vLLM worker. vLLM appends the class to its worker's bases, in the worker's own process.

Methods are called through `collective_rpc` and return plain types only: anything else would kill the engine core's
output thread (VLLM.md 1.3). Nothing of the trainer is imported here.
"""

import gc
import os
from typing import Any

import torch
from vllm import _custom_ops

from . import channel as channels
from .transport import open_staging, stamped
from .weight_loader import NamedTensors, WeightLoader, holds_plain_weights
from .worker_memory import release_engine_memory, resident_bytes

# vLLM imports this module before it builds the model: without oneDNN, linear layers keep their weights as they are
# loaded.
_PLAIN_ON_CPU = os.environ.get("HOTBUNK_PLAIN_CPU_WEIGHTS") == "1"
if _PLAIN_ON_CPU:
    _custom_ops._supports_onednn = False


class _Receiver:
    """The worker's end of the weight path: one channel to its rank, and the rank's staging buffers while they are open.

    Attributes:
        opened, closed: how often staging memory was mapped and let go; equal between syncs that free it (P4).
    """

    def __init__(self, channel: channels.Channel, worker: Any) -> None:
        self.opened = self.closed = 0
        self._channel = channel
        self._worker = worker
        self._handle: dict[str, Any] | None = None
        self._buffers: list[torch.Tensor] = []

    def receive(self, session: int, timeout: float) -> None:
        """Serve one update: `begin`, any number of `bucket`s, `finish`, `compare`s, `end`. Every message is answered.

        A failure is answered, too, and ends the update; so does `abort`, or silence for `timeout` seconds.
        """
        loader = WeightLoader(self._worker.get_model(), self._worker.vllm_config, self._plain())
        try:
            while (message := self._next(session, timeout))["kind"] not in ("end", "abort"):
                self._channel.send("done", session=session, **self._serve(loader, message))
        except Exception as error:
            loader.abort()
            self._channel.send("failed", session=session, error=f"{type(error).__name__}: {error}")
            self._close_buffers()
            return
        loader.abort()
        if message.get("close", True):
            self._close_buffers()
        self._channel.send("done", session=session, opened=self.opened, closed=self.closed)

    def _plain(self) -> bool:
        return holds_plain_weights(self._worker.get_model(), _PLAIN_ON_CPU)

    def _next(self, session: int, timeout: float) -> dict[str, Any]:
        while True:
            message = self._channel.receive(timeout, "message from the trainer's rank")
            if message["session"] == session:
                return message  # older ones are left over from an update that broke off

    @torch.no_grad()
    def _serve(self, loader: WeightLoader, message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        match message["kind"]:
            case "begin":
                self._open_buffers(message["handle"])
                loader.begin(message["names"])
                answer = {"plain": loader.plain}
            case "bucket":
                loader.load(self._views(message))
            case "finish":
                loader.finish()
            case "compare":
                answer = {"different": loader.compare(self._views(message))}
            case other:
                raise channels.SyncError(f"unknown message {other!r}")
        if self._worker.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return answer

    def _views(self, message: dict[str, Any]) -> NamedTensors:
        """The tensors of a bucket: views into the staging buffer, dropped before the bucket is acknowledged."""
        buffer = self._buffers[message["buffer"]]
        if (found := stamped(buffer)) != message["stamp"]:
            raise channels.SyncError(
                f"the staging buffer holds bucket {found} where bucket {message['stamp']} was announced"
            )
        views = []
        for name, dtype_name, shape, offset in message["pieces"]:
            dtype = getattr(torch, dtype_name)
            elements = torch.Size(shape).numel()
            views.append((name, buffer[offset : offset + elements * dtype.itemsize].view(dtype).view(shape)))
        return views

    def _open_buffers(self, handle: dict[str, Any]) -> None:
        if handle == self._handle:
            return
        self._close_buffers()
        self._buffers = open_staging(handle, self._worker.device)
        self._handle = handle
        self.opened += 1

    def _close_buffers(self) -> None:
        if self._handle is None:
            return
        self._handle, self._buffers = None, []
        self.closed += 1
        gc.collect()
        if self._worker.device.type == "cuda":
            torch.cuda.ipc_collect()


class VllmInternalWorkerExtension:
    """Methods that a vLLM worker gains. Their names must not exist on vLLM's worker already; it asserts that."""

    def report_device_id(self) -> str:
        """The device this worker runs on: its UUID on CUDA, `cpu:<rank in the engine group>` on CPU."""
        device = self.device  # type: ignore[attr-defined]
        if device.type == "cuda":
            return str(torch.cuda.get_device_properties(device).uuid)
        return f"cpu:{self.rank}"  # type: ignore[attr-defined]

    def hotbunk_connect(self, endpoints: dict[str, list[str]]) -> None:
        """Connect to the rank on this worker's device.

        Args:
            endpoints: device id -> [address of the rank's socket, its secret].
        """
        device_id = self.report_device_id()
        if device_id not in endpoints:
            raise channels.SyncError(
                f"no rank shares the device {device_id} of this worker; ranks are on {sorted(endpoints)}"
            )
        address, secret = endpoints[device_id]
        self.hotbunk_receiver = _Receiver(channels.connect(address, secret, device_id, os.getpid()), self)

    def update_weights_via_ipc_zmq(self, session: int, timeout_s: float) -> None:
        """Receive one weight update from this worker's rank; success and failure are reported to the rank."""
        self.hotbunk_receiver.receive(session, timeout_s)

    def hotbunk_release_memory(self) -> None:
        """CPU only: free KV cache and weights of the sleeping engine."""
        model = self.get_model()  # type: ignore[attr-defined]
        release_engine_memory(model, _tensors(self.model_runner.kv_caches), holds_plain_weights(model, _PLAIN_ON_CPU))  # type: ignore[attr-defined]

    def hotbunk_memory_bytes(self) -> int:
        """Resident bytes of this process on CPU; bytes in use on the whole device on CUDA, whoever uses them."""
        if self.device.type == "cuda":  # type: ignore[attr-defined]
            free, total = torch.cuda.mem_get_info()
            return total - free
        return resident_bytes()


def _tensors(nested: Any) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [tensor for item in nested for tensor in _tensors(item)]
