"""The worker's end of an update, for all transports: messages are read, buckets loaded, and every
weight accounted for.
"""

import gc
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from sharding.wire.channel import MessageLine, SyncError
from sharding.wire.digests import digests_of
from sharding.wire.manifest import Manifest, NamedTensors, Part, View, check_manifest
from sharding.wire.staging import open_memory, stamped_bucket, wait_for_writes
from sharding.worker.adapter import AdapterLoader
from sharding.worker.loader import WeightLoader
from sharding.worker.recording import Recording
from sharding.worker.shards import MappedShards


class Carrier(Protocol):
    """The carrier of an update to this worker: its messages in order, and the memory of each
    bucket.
    """

    def next(self) -> dict[str, Any]:
        """Return the next message. Its `kind` is one of these, in this order: `begin`; `bucket`
        repeatedly and perhaps a `pull`, or one `in_place`; `finish`; `compare` repeatedly, if
        weights are sent again to be compared; `end`. `abort` may come at any time instead.
        """

    def answer(self, **fields: Any) -> None:
        """Answer a message that was served."""

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Return the bucket that a message announces, uint8 [nbytes], checked; it stays so until
        the next call of `next`.
        """

    def leave(self, message: dict[str, Any]) -> None:
        """End the update after `end` or `abort`, when nothing refers to the memory any more."""

    def fail(self, error: Exception) -> None:
        """Tell the sender that this worker has failed, and let go of the memory."""


@dataclass
class UpdateOutcome:
    """The outcome of an update on this worker; the extension returns it as a dictionary. `error`:
    None when everything arrived and was accounted for; else what went wrong, and on which worker.
    `nbytes`: of the weights, without padding. `adapter`: the number of the LoRA adapter that came,
    not whole weights. `left_out`: weights that the model takes nothing of, on purpose.
    `unreplayable`: weights that went through vLLM's loaders, and always will, and why; None: they
    all did.
    """

    error: str | None = None
    version: int = -1
    tensors: int = 0
    nbytes: int = 0
    adapter: int | None = None
    unreplayable: dict[str, str] | None = None
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Receiver:
    """Serves one update to one worker's model: loads the buckets of a `Carrier`, and answers each
    of its messages.
    """

    def __init__(
        self,
        worker: Any,
        reprocessed: Sequence[torch.nn.Module],
        promised: Manifest | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.outcome = UpdateOutcome()
        self.weights: Manifest = {}
        self._verify: dict[str, Any] = {}
        self._sealed: dict[str, list[tuple[View, torch.Tensor]]] = {}
        self._worker = worker
        self._promised = promised
        self._new_loader = partial(WeightLoader, worker.get_model(), worker.vllm_config, reprocessed)
        self._loader: WeightLoader | AdapterLoader = self._new_loader(recording)

    def receive(self, carrier: Carrier) -> UpdateOutcome:
        """Serve messages until the sender ends the update or something fails. Never raises, or
        leaves half a model.
        """
        start = time.perf_counter()
        try:
            while (message := carrier.next())["kind"] not in ("end", "abort"):
                carrier.answer(**self._serve(carrier, message))
            self._loader.abort()  # nothing to give up after `finish`
            if message["kind"] == "abort":
                self.outcome.error = (
                    f"the trainer broke the update off: {message.get('reason') or 'another failed'}"
                )
            carrier.leave(message)
        except Exception as error:
            self._loader.abort()
            self.outcome.error = f"{type(error).__name__}: {error}"
            carrier.fail(error)
        self.outcome.seconds = time.perf_counter() - start
        return self.outcome

    @property
    def recording(self) -> Recording | None:
        """The record that later updates can replay."""
        return self._loader.recording

    @torch.no_grad()
    def _serve(self, carrier: Carrier, message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        match message["kind"]:
            case "begin":
                answer = self._begin(message)
            case "bucket":
                self._load(carrier.bucket(message), message)
            case "pull":
                self._pull(carrier, message)
            case "in_place":
                if self._worker.hotbunk_shared is None or not isinstance(self._loader, WeightLoader):
                    raise SyncError(
                        "weights were announced as shared, but this worker shares none with the trainer"
                    )
                self._loader.take_in_place()
            case "finish":
                self._loader.finish()
                self.outcome.unreplayable = self._loader.unreplayable()
                self.outcome.left_out = self._loader.left_out
                held = {}
                for name, copies in self._sealed.items():
                    held[name] = [target for _, target in copies]
                answer = {"digests": digests_of(held, self._verify.get("seed"))}
            case "compare":
                views = views_of(carrier.bucket(message), message)  # taken off the carrier in any case
                answer = {"different": self._loader.compare(views) if self._loader.plain else []}
            case other:
                raise SyncError(f"unknown message {other!r}")
        wait_for_writes(self._worker.device)
        return answer

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        self.weights = {
            name: [list(shape), dtype] for name, (shape, dtype) in message["weights"].items()
        }
        check_manifest(self.weights, self._promised, engine_dtypes(self._worker))
        self._loader = self._new_loader(self._loader.recording)
        self.outcome.nbytes = 0
        if (adapter := message.get("adapter")) is not None:
            self.outcome.adapter = adapter["number"]
            self._loader = AdapterLoader(self._worker.model_runner, adapter["number"], adapter["config"])
        self._loader.begin(self.weights, message.get("replay", True))
        self.outcome.version = message["version"]
        self.outcome.tensors = len(self.weights)
        self._verify = message.get("verify") or {"weights": []}
        recording = self._loader.recording
        if recording is not None and recording.complete:
            self._sealed = {
                n: recording.sealed[n] for n in self._verify["weights"] if recording.replayable(n)
            }
        unsplit = self._loader.whole()
        records = recording is not None and unsplit is None
        views = {}
        for name, copies in self._sealed.items():
            views[name] = [view for view, _ in copies]
        return {"plain": self._loader.plain, "views": views, "whole": unsplit, "records": records}

    def _load(self, buffer: torch.Tensor, message: dict[str, Any]) -> None:
        weights = views_of(buffer, message)
        parts = parts_of(buffer, message)
        self.outcome.nbytes += sum(weight.nbytes for _, weight in weights)
        self.outcome.nbytes += sum(values.nbytes for _, _, values in parts)
        self._loader.load(weights)
        if parts:
            self._loader.load_parts(parts)

    def _pull(self, carrier: Carrier, message: dict[str, Any]) -> None:
        if not isinstance(carrier, ChannelCarrier) or not isinstance(self._loader, WeightLoader):
            raise SyncError("shards were announced, but this worker cannot read any")
        shards = carrier.shards
        self.outcome.nbytes += self._loader.pull(shards.parts(message), shards.factors(message))
        wait_for_writes(self._worker.device)  # to this worker's own weights
        shards.check(message, "changed while they were read")


def views_of(buffer: torch.Tensor, message: dict[str, Any]) -> NamedTensors:
    """Return the weights that are whole in a bucket, as views of its memory.

    They have to be dropped before the bucket is acknowledged.
    """
    views = []
    for name, dtype, shape, offset in message["pieces"]:
        elements = _elements(buffer, dtype, offset, torch.Size(shape).numel())
        views.append((name, elements.view(shape)))
    return views


def parts_of(buffer: torch.Tensor, message: dict[str, Any]) -> list[Part]:
    """Return the parts of weights in a bucket, as views of its memory."""
    stretches = message.get("stretches", [])
    return [
        (name, first, _elements(buffer, dtype, at, count)) for name, dtype, first, count, at in stretches
    ]


def _elements(buffer: torch.Tensor, dtype_name: str, offset: int, count: int) -> torch.Tensor:
    """Return `count` elements of a bucket, from byte `offset` on."""
    dtype = getattr(torch, dtype_name)
    return buffer[offset : offset + count * dtype.itemsize].view(dtype)


def engine_dtypes(worker: Any) -> list[str]:
    """Return the dtypes of a worker's parameters, as torch names them without its prefix; first the
    one it computes in.
    """
    kept = {parameter.dtype for parameter in worker.get_model().parameters()}
    return [
        str(dtype).removeprefix("torch.") for dtype in (worker.vllm_config.model_config.dtype, *kept)
    ]


class Buckets(Protocol):
    """The worker's end of a transport (`sharding.transports.base`), which finds the bytes of
    buckets. It is made with the vLLM worker. The caller's lines for each bucket:

        buckets.expect(message)           # as soon as the message is read
        memory = buckets.bucket(message)  # valid until the next bucket is asked for
        buckets.close()                   # at the end of the update

    Attributes: ahead: True if the bytes of the next bucket may arrive while one is loaded, so that
        its message has to be read as soon as it is there. opened, closed: how often memory was
        mapped and unmapped; equal between updates that release it.
    """

    ahead: bool
    opened: int
    closed: int

    def expect(self, message: dict[str, Any]) -> None:
        """Note that this message announces a bucket."""

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Return the bucket that a message announces, as `Carrier.bucket` says."""

    def close(self, reason: str | None = None) -> None:
        """Release all memory. `reason`: why the update broke off, if it did."""


class StagedBuckets:
    """Buckets in memory of the rank on the same device, mapped once until `close`. It implements
    `Buckets`.
    """

    ahead = False

    def __init__(self, worker: Any) -> None:
        self.opened = self.closed = 0
        self._device: torch.device = worker.device
        self._handle: dict[str, Any] | None = None
        self._buffers: list[torch.Tensor] = []

    def expect(self, message: dict[str, Any]) -> None:
        """Do nothing: the bucket is there when it is announced."""

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Map the rank's buffers if they are new, and return the bucket in them. Raises SyncError
        if they hold another bucket than was announced.
        """
        if message["handle"] != self._handle:
            self.close()
            self._buffers = open_memory(message["handle"], self._device)
            self._handle = message["handle"]
            self.opened += 1
        return stamped_bucket(self._buffers[message["buffer"]], message)

    def close(self, reason: str | None = None) -> None:
        """Release the trainer's memory, if it is open."""
        if self._handle is None:
            return
        self._handle = None
        self._buffers = []
        self.closed += 1
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


class ChannelCarrier:
    """A `Carrier` that reads and answers messages on a channel. Its buckets come another way."""

    def __init__(
        self,
        channel: MessageLine,
        buckets: Buckets,
        waiting_for: str,
        device: torch.device | None = None,
    ) -> None:
        """Read messages from `channel`. `waiting_for` names the sender in the error of a wait that
        lasts too long.
        """
        self._channel = channel
        self._buckets = buckets
        self._waiting_for = f"message from {waiting_for}"
        self.shards = MappedShards(device or torch.device("cpu"))
        self._session: int | None = None
        self._over: int | None = None  # the session before
        self._timeout = 0.0
        self._ahead: deque[dict[str, Any]] = deque()

    def start(self, session: int | None, timeout: float) -> None:
        """Expect the messages of `session`, or of any new one; silence for `timeout` seconds is a
        failure.
        """
        self._over = self._session
        self._session = session
        self._timeout = timeout
        self._ahead.clear()

    def call_for_weights(self) -> None:
        """Tell the sender that its next session is awaited, before it begins one."""
        self._channel.send("ready")

    def next(self) -> dict[str, Any]:
        """Return the next message of the session, as `Carrier.next` does. Raises TimeoutError after
        a silence of `timeout` seconds.
        """
        return self._ahead.popleft() if self._ahead else self._read()

    def _read(self) -> dict[str, Any]:
        while True:
            message = self._channel.receive(self._timeout, self._waiting_for)
            if self._session is None and message["session"] != self._over:
                self._session = message["session"]
            if message["session"] == self._session:
                # Older ones are left over from an update that broke off
                break
        if "stamp" in message:
            self._buckets.expect(message)
        return message

    def answer(self, **fields: Any) -> None:
        """Answer the sender that a message was served."""
        self._channel.send("done", session=self._session, **fields)

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Return the bucket that a message announces. If buckets may come ahead, also read a
        message that is waiting, so that the next bucket arrives meanwhile.
        """
        memory = self._buckets.bucket(message)
        if self._buckets.ahead and self._channel.waiting():
            self._ahead.append(self._read())
        return memory

    def leave(self, message: dict[str, Any]) -> None:
        """Release the memory that `message` says to release, and answer that this worker has left
        the update.
        """
        if message.get("close", True):
            self._buckets.close(
                "the trainer broke the update off" if message["kind"] == "abort" else None
            )
        if message["kind"] == "abort":
            self.shards.close()
        self.answer(opened=self._buckets.opened, closed=self._buckets.closed, left=True)

    def fail(self, error: Exception) -> None:
        """Release the trainer's memory and answer with the error."""
        reason = f"{type(error).__name__}: {error}"
        cause: BaseException | None = error
        while cause is not None:
            # They hold views of the memory, which would stay mapped
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self._buckets.close(reason)
        self.shards.close()
        with suppress(SyncError):  # a trainer that has gone needs no answer
            self._channel.send("failed", session=self._session, error=reason, left=True)
