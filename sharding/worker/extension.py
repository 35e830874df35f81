"""Hotbunk's methods of a vLLM worker. vLLM appends the class to its worker's bases, in the worker's
own process.

Methods are called through `collective_rpc` and return plain types only: anything else would end the
engine core's output thread (vllm/v1/engine/core.py, process_output_sockets), and every later call
would hang. Nothing of the trainer is imported here.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor
from vllm.platforms import current_platform

from generation.engine.cpu_kernels import PLAIN
from generation.importing import load
from sharding.wire import staging
from sharding.wire.channel import SyncError, connect
from sharding.wire.manifest import Manifest, check_manifest, first_names
from sharding.wire.staging import MemoryFile, cuda_handle, release_pages, release_weights, resident_bytes
from sharding.worker.group_member import CollectiveCarrier, Membership, Rendezvous
from sharding.worker.loader import WeightLoader, own_checkpoint, reprocessed_modules
from sharding.worker.noise import key_noise
from sharding.worker.receiver import (
    Buckets,
    Carrier,
    ChannelCarrier,
    Receiver,
    StagedBuckets,
    engine_dtypes,
)
from sharding.worker.recording import Recording, storage_key
from sharding.worker.repairs import keep_bias_of_head, keep_scalars_of_xielu, load_biases_of_experts
from sharding.worker.weight_folder import StorageBuckets, StorageCarrier, read_manifest

if TYPE_CHECKING:
    from sharding.worker.cpu import RouteRecorder

_PLAIN_ON_CPU = os.environ.get(PLAIN) == "1"
if current_platform.is_cpu():  # vLLM imports this module before it builds the model
    from sharding.worker.cpu import choose_with_biases, keep_weights_plain

    choose_with_biases()
    if _PLAIN_ON_CPU:
        keep_weights_plain()
load_biases_of_experts()
keep_scalars_of_xielu()
keep_bias_of_head()

READERS: dict[str, Callable[[Any], Buckets]]
READERS = {"staged": StagedBuckets, "storage": StorageBuckets}
"""The workers' halves of the transports, by the names that the trainer's halves give in
`reader`.
"""

WorkerOutcome = dict[str, Any]
"""The result of a method: plain types, "error" (None or a sentence that names the worker) among
them.
"""

P = ParamSpec("P")
_REMEDY = "so the trainer cannot compute with it: set sync.way to staged"


class SharedWeights:
    """The worker's parameters, handed out for the trainer to compute in, so that nothing is copied
    (`ZeroCopy`).

    Possible where both hold whole weights in one layout: one rank, one worker, weights that vLLM
    does not re-process. The record of the first update knows where each lies: queries, keys and
    values, say, one after another in one parameter. Made once; from then on the memory is the
    model's for as long as the engine runs. `handle`: from which the trainer opens the same memory
    (`open_memory`). `places`: weight -> number of the storage it lies in, and the byte at which it
    begins there; without the weights that go on being sent.
    """

    def __init__(
        self, model: torch.nn.Module, recording: Recording | None, device: torch.device
    ) -> None:
        """Export the parameters, on CPU from memory into which they are moved. Raises SyncError:
        naming the weights that the model does not keep as they are sent, in one piece each.
        """
        runs = contiguous_runs(model, recording)
        storages = {storage_key(run): run.untyped_storage() for run in runs.values()}
        numbers = {key: number for number, key in enumerate(storages)}
        first_byte = {name: int(run.storage_offset()) * run.element_size() for name, run in runs.items()}
        self.places = {name: (numbers[storage_key(run)], first_byte[name]) for name, run in runs.items()}
        if device.type == "cuda":
            self.handle = cuda_handle(list(storages.values()))
            return
        sizes = [storage.nbytes() for storage in storages.values()]
        remedy = "set sync.way to staged"
        self._file = MemoryFile("hotbunk-weights", sizes, "the engine's weights", remedy)
        self.handle = self._file.handle
        for old, new in zip(storages.values(), self._file.tensors, strict=True):
            new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))  # type: ignore[call-overload]
        assert recording is not None
        recording.move(
            model,
            {key: t.untyped_storage() for key, t in zip(storages, self._file.tensors, strict=True)},
        )


def contiguous_runs(model: torch.nn.Module, recording: Recording | None) -> dict[str, Tensor]:
    """Return the view of a parameter that each weight is copied to, without those that are
    `Recording.sent_apart`. Raises SyncError: naming the weights whose loaders do something else
    than copy them in one piece.
    """
    if recording is None or not recording.complete:
        raise SyncError(f"{type(model).__name__} re-processes its weights after loading, {_REMEDY}")
    runs = {}
    apart = []
    for name in recording.weights:
        run = recording.run(name)
        if run is not None:
            runs[name] = run
        elif not recording.sent_apart(name):
            apart.append(name)
    if apart:
        raise SyncError(
            f"{type(model).__name__} does not keep {first_names(apart)} as sent and in one piece, "
            f"{_REMEDY}"
        )
    return runs


def _never_raising(method: Callable[P, WorkerOutcome | None]) -> Callable[P, WorkerOutcome]:
    """Wrap a worker's method so that it always returns a `WorkerOutcome`, with the fields it
    returns itself.

    When one of several workers raises, vLLM's executor takes the others' answers for those of the
    next call (vllm/v1/executor/multiproc_executor.py, collective_rpc).
    """

    @wraps(method)
    def outcome(*arguments: P.args, **named: P.kwargs) -> WorkerOutcome:
        worker: Any = arguments[0]
        try:
            fields = method(*arguments, **named)
        except Exception as error:
            return worker._hotbunk_outcome(f"{type(error).__name__}: {error}")  # type: ignore[no-any-return]
        return worker._hotbunk_outcome(None, **(fields or {}))  # type: ignore[no-any-return]

    return outcome


class VllmInternalWorkerExtension:
    """Methods that a vLLM worker gains. Their names must not exist on vLLM's worker already, which
    is asserted there (vllm/v1/worker/worker_base.py, init_worker). Those that return an
    `WorkerOutcome` never raise.
    """

    hotbunk_rank: ChannelCarrier | None = None
    hotbunk_membership: Membership | None = None
    hotbunk_promised: Manifest | None = None
    hotbunk_weights: Manifest | None = None
    hotbunk_recording: Recording | None = None
    hotbunk_shared: SharedWeights | None = None
    hotbunk_routes: "RouteRecorder | None" = None
    hotbunk_joining: "Future[WorkerOutcome] | None" = None
    hotbunk_by_weight: WeightLoader | None = None

    def report_device_id(self) -> str:
        """Return the device this worker runs on: its UUID on CUDA, `cpu:<rank in the engine group>`
        on CPU.
        """
        return staging.device_id(self.device, self.rank)  # type: ignore[attr-defined]

    def hotbunk_connect(self, endpoints: dict[str, list[str]], reader: str = "staged") -> None:
        """Connect to the rank on this worker's device. `endpoints`: device id -> [address of the
        rank's socket, its secret]. `reader`: the worker's half of the transport: a key of
        `READERS`, or an import string of another `Buckets`.
        """
        device_id = self.report_device_id()
        if device_id not in endpoints:
            raise SyncError(
                f"no rank shares the device {device_id} of this worker; ranks are on {sorted(endpoints)}"
            )
        address, secret = endpoints[device_id]
        channel = connect(address, secret, device_id, os.getpid())
        buckets = (READERS.get(reader) or load(reader))(self)
        self.hotbunk_rank = ChannelCarrier(channel, buckets, "the trainer's rank", self.device)  # type: ignore[attr-defined]

    def update_weights_via_ipc_zmq(self, session: int | None, timeout_s: float) -> WorkerOutcome:
        """Receive one weight update from this worker's rank; success and failure are reported to
        the rank, too. `session`: the number that its messages carry; None: the next that begins,
        once the rank has heard of the call.
        """
        if self.hotbunk_rank is None:
            return self._hotbunk_outcome("no rank to receive from: hotbunk_connect comes first")
        self.hotbunk_rank.start(session, timeout_s)
        if session is None:
            self.hotbunk_rank.call_for_weights()
        return self._hotbunk_receive(self.hotbunk_rank)

    @_never_raising
    def hotbunk_share_weights(self) -> WorkerOutcome:
        """Export this model's parameters for the trainer to compute in, after an update that was
        recorded.
        `handle` and `places`: see `SharedWeights`.
        """
        if self.hotbunk_shared is None:
            self.hotbunk_shared = SharedWeights(self.get_model(), self.hotbunk_recording, self.device)  # type: ignore[attr-defined]
        return {"handle": self.hotbunk_shared.handle, "places": self.hotbunk_shared.places}

    @_never_raising
    def hotbunk_record_routes(self) -> None:
        """Keep the routes of a mixture's tokens from now on; on CPU."""
        from sharding.worker.cpu import RouteRecorder

        self.hotbunk_routes = RouteRecorder(self.model_runner, self.get_model())  # type: ignore[attr-defined]

    @_never_raising
    def hotbunk_take_routes(self, request: str) -> WorkerOutcome:
        """Return `routes`: see `RouteRecorder.take`; of the group's first worker only, since all
        have the same. `format`: layers, experts of a token in each, dtype.
        """
        assert self.hotbunk_routes is not None, "routes are not recorded"
        rows = self.hotbunk_routes.take(request)
        return {"routes": rows if self.rank == 0 else b"", "format": self.hotbunk_routes.format}  # type: ignore[attr-defined]

    @_never_raising
    def prepare_refit_info(self, info: Manifest) -> None:
        """Fix the weights of every update from now on: checkpoint name -> [shape, dtype]. {} allows
        any again.
        """
        if info:
            check_manifest(info, None, engine_dtypes(self))
        self.hotbunk_promised = info or None

    @_never_raising
    def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        """Join the group that a `CollectiveSender` at `ip:port` broadcasts weights in. Return when
        all members have. Joining a group that this worker is in already changes nothing; joining
        another one leaves the first. `rank_prefix`: workers of the engines before this one. Workers
        stand behind the trainer's members: rank = `train_world_size` + `rank_prefix` + rank in the
        engine.
        """
        rendezvous = Rendezvous(ip, port, world_size, train_world_size + rank_prefix + self.rank)  # type: ignore[attr-defined]
        if self.hotbunk_membership is None or not self.hotbunk_membership.stands(rendezvous):
            self._hotbunk_leave()
            device: torch.device = self.device  # type: ignore[attr-defined]
            self.hotbunk_membership = Membership(rendezvous, device, self.report_device_id(), timeout_s)

    def check_collective_ready(self) -> bool:
        """Return True if this worker is in a complete group. Never raises."""
        membership = self.hotbunk_membership
        return membership is not None and membership.stands(membership.rendezvous)

    def update_weights_from_collective(self, timeout_s: float = 300.0) -> WorkerOutcome:
        """Receive one update from the group; every wait ends after `timeout_s`."""
        if self.hotbunk_membership is None:
            return self._hotbunk_outcome("in no weights group: init_collective comes first")
        return self._hotbunk_receive(CollectiveCarrier(self, self.hotbunk_membership, timeout_s))

    def init_weight_update_group(
        self, master_address: str, master_port: int | str, rank_offset: int, world_size: int
    ) -> WorkerOutcome:
        """Begin to join a group in the background, as TorchRL's workers do; the first
        `update_weight` reports failures. Rank 0 is a `stateless_init_process_group` or a
        `CollectiveSender`. This worker's rank is its rank in the engine + `rank_offset`.
        """
        port = int(master_port)
        joining = self.hotbunk_joining
        if joining is not None and not joining.done():
            return self._hotbunk_outcome("it is joining a weights group already")
        self.hotbunk_joining = joining = Future()

        def join() -> None:  # it never raises
            joining.set_result(self.init_collective(rank_offset - 1, master_address, port, world_size))

        threading.Thread(target=join, name="weights-group-join", daemon=True).start()
        return self._hotbunk_outcome(None)

    check_nccl_group_ready = check_collective_ready

    @_never_raising
    @torch.no_grad()
    def update_weight(
        self, name: str, dtype_name: str, shape: list[int], timeout_s: float = 300.0
    ) -> WorkerOutcome:
        """Receive one weight that rank 0 of the group broadcasts now, and load it. `left`: the
        number yet to come. The first begins an update of all weights of the model; an error ends
        it.
        """
        left: list[str] = []
        try:
            joined = self.hotbunk_joining.result(timeout_s) if self.hotbunk_joining else {"error": None}
            if self.hotbunk_membership is None:
                raise RuntimeError(joined["error"] or "Weight update group not initialized")
            weight = torch.empty(list(shape), dtype=getattr(torch, dtype_name), device=self.device)  # type: ignore[attr-defined]
            # Even if it is not wanted
            self.hotbunk_membership.group.broadcast(weight, f"broadcast of {name}")
            loader = self.hotbunk_by_weight = self.hotbunk_by_weight or self._hotbunk_begin_by_weight()
            try:
                loader.load([(name, weight)])
            except SyncError as error:
                raise SyncError(
                    f"{error}; still to come: {first_names(loader.arrivals.missing())}"
                ) from error
            left = loader.arrivals.missing()
            if not left:
                loader.finish()
            self.hotbunk_recording = loader.recording
        finally:
            if not left:
                self._hotbunk_end_by_weight()
        return {"left": len(left)}

    def _hotbunk_begin_by_weight(self) -> WeightLoader:
        model = self.get_model()  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        loader = WeightLoader(
            model, config, reprocessed_modules(model, _PLAIN_ON_CPU), self.hotbunk_recording
        )
        loader.begin(
            self.hotbunk_promised or self.hotbunk_weights or own_checkpoint(config.model_config)
        )
        return loader

    def _hotbunk_end_by_weight(self) -> None:
        if self.hotbunk_by_weight is not None:
            self.hotbunk_by_weight.abort()  # nothing to give up after `finish`
        self.hotbunk_by_weight = None

    @_never_raising
    def close_collective(self) -> None:
        """Leave the group, if this worker is in one."""
        self._hotbunk_leave()

    def load_weights_from_storage(
        self, storage_path: str, num_threads: int = 1, timeout_s: float = 300.0, verify: bool = True
    ) -> WorkerOutcome:
        """Load the latest complete update that a `StorageWriter` has written to the folder
        `storage_path`. `num_threads`: number of buckets that are read at the same time. `verify`:
        read it again and compare, where weights are kept as they are sent; digests are always
        checked.
        """
        device: torch.device = self.device  # type: ignore[attr-defined]
        return self._hotbunk_receive(
            StorageCarrier(storage_path, device, timeout_s, verify, num_threads)
        )

    @_never_raising
    def hotbunk_check_storage(self, storage_path: str) -> None:
        """Raise SyncError where `load_weights_from_storage` cannot load this folder; it touches no
        weight.
        """
        weights = read_manifest(Path(storage_path))["weights"]
        check_manifest(weights, self.hotbunk_promised, engine_dtypes(self))
        expected = self.hotbunk_weights or own_checkpoint(self.vllm_config.model_config)  # type: ignore[attr-defined]
        shared = [name for name in weights if name in expected]
        misfits = [name for name in shared if weights[name][0] != expected[name][0]]
        if misfits or not shared:
            raise SyncError(
                f"{storage_path} has weights of another model, such as "
                f"{first_names(misfits or [*weights])}"
            )

    @_never_raising
    def hotbunk_model_metadata(self) -> WorkerOutcome:
        """Return `weights`: checkpoint name -> [shape, dtype] of everything an update must bring.
        As the latest update brought it; before the first one, as the checkpoint has it.
        """
        return {"weights": self.hotbunk_weights or own_checkpoint(self.vllm_config.model_config)}  # type: ignore[attr-defined]

    def _hotbunk_receive(self, carrier: Carrier) -> WorkerOutcome:
        self._hotbunk_end_by_weight()
        if self.hotbunk_routes is not None:
            self.hotbunk_routes.clear()
        reprocessed = reprocessed_modules(self.get_model(), _PLAIN_ON_CPU)  # type: ignore[attr-defined]
        receiver = Receiver(self, reprocessed, self.hotbunk_promised, self.hotbunk_recording)
        outcome = receiver.receive(carrier)
        self.hotbunk_recording = receiver.recording
        if outcome.error is None:
            self.hotbunk_weights = receiver.weights
        return self._hotbunk_outcome(**asdict(outcome))

    def _hotbunk_leave(self) -> None:
        membership = self.hotbunk_membership
        self.hotbunk_membership = None
        if membership is not None:
            membership.leave()

    def _hotbunk_outcome(self, error: str | None, **fields: Any) -> WorkerOutcome:
        rank = self.rank  # type: ignore[attr-defined]
        where = f"worker {rank} on {self.report_device_id()} (pid {os.getpid()})"
        return {"error": error and f"{where}: {error}", "rank": rank, **fields}

    @_never_raising
    def hotbunk_key_noise(self) -> None:
        """Sample from now on with noise that depends on a request's seed and on the position
        alone.
        """
        key_noise(self.model_runner)  # type: ignore[attr-defined]

    def hotbunk_release_memory(self, weights: bool) -> None:
        """CPU only: free the KV cache of the sleeping engine, and its weights if `weights`."""
        release_pages(_tensors(self.model_runner.kv_caches))  # type: ignore[attr-defined]
        if weights:
            model = self.get_model()  # type: ignore[attr-defined]
            release_weights(model, reprocessed_modules(model, _PLAIN_ON_CPU))

    def hotbunk_kv_cache_bytes(self) -> int:
        """Return the bytes of this worker's KV cache, asleep or awake: given as
        `EngineSettings.kv_cache_bytes`, they make a cache of as many blocks.
        """
        storages = [t.untyped_storage() for t in _tensors(self.model_runner.kv_caches)]  # type: ignore[attr-defined]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def hotbunk_memory_bytes(self) -> int:
        """Return the resident bytes of this process on CPU; bytes in use on the whole device on
        CUDA, whoever uses them.
        """
        if self.device.type == "cuda":  # type: ignore[attr-defined]
            free, total = torch.cuda.mem_get_info()
            return total - free
        return resident_bytes()


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for item in nested for tensor in _tensors(item)]
