"""New weights for an `AsyncVLLM`: by broadcast from a trainer, or from a folder. The carriers and their rules (every
weight accounted for, none cast in silence) live in the package `sharding`, which the service is given.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generation.compat.torchrl.arguments import gpus_per_replica, results_of
from generation.compat.torchrl.replicas import Replica, ray_module
from generation.engine.settings import EngineSettings

if TYPE_CHECKING:
    import torch

NO_DEVICE_LEFT = "every GPU of this machine has an engine, and NCCL cannot join two processes on one"

UPDATE_SECONDS = 300.0
"""Longest single wait of an update: for requests in flight to end, for a worker, for a bucket."""


class _CurrentSource:
    """The stream of the update that is under way; its sender outlives it."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def parameters(self) -> list[Any]:
        return self.source.parameters()

    @property
    def repeatable(self) -> bool:
        return getattr(self.source, "repeatable", True)

    def gather_into(self, names: list[str], slots: "list[torch.Tensor]") -> None:
        self.source.gather_into(names, slots)

    def gather_part(self, name: str, start: int, slot: "torch.Tensor") -> None:
        self.source.gather_part(name, start, slot)


class WeightUpdates:
    """The weight methods of `AsyncVLLM`. Whatever the way, requests in flight end with the old weights, later ones wait
    for the new ones, prefix caches are emptied, and engines that missed an update refuse to generate.
    """

    actors: list[Replica]
    settings: EngineSettings
    backend: str
    weight_version: int
    _require_launched: Callable[[str], None]

    def __init__(self, carriers: Any) -> None:
        self._carriers = carriers
        self._taken: set[int] = set()  # devices of this machine that have an engine
        self._sender: Any = None
        self._source: _CurrentSource | None = None

    def get_model_metadata(self) -> "dict[str, tuple[torch.dtype, torch.Size]]":
        """(dtype, shape) of every weight that an update must bring, by its name in the checkpoint."""
        import torch

        return {name: (getattr(torch, dtype), torch.Size(shape)) for name, (shape, dtype) in self._manifest().items()}

    def check_model_metadata(self, trainer: "Mapping[str, tuple[torch.dtype, Iterable[int]]]") -> None:
        """Raise ValueError naming the weights that a trainer would send and the engines cannot take, or miss."""
        sent = {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (dtype, shape) in trainer.items()}
        manifest = self._manifest()
        if complaints := self._carriers.differences(sent, manifest):
            raise ValueError("the trainer's weights are not the engines': " + "; ".join(complaints))

    def _manifest(self) -> dict[str, list[Any]]:
        self._require_carriers("asking for model metadata")
        calls = [replica.submit("ask_workers", "hotbunk_model_metadata") for replica in self.actors]
        outcomes = [outcome for each in results_of(calls, UPDATE_SECONDS, "model metadata") for outcome in each]
        manifests = [outcome["weights"] for outcome in outcomes]
        if any(manifest != manifests[0] for manifest in manifests):
            raise RuntimeError("the engines hold different models: their weights' names, shapes or dtypes differ")
        return manifests[0]

    def _require_carriers(self, action: str) -> None:
        self._require_launched(action)
        if self._carriers is None:
            remedy = "import sharding, and start the service with AsyncVLLM(..., carriers=sharding)"
            raise RuntimeError(f"{action} needs the package that carries weights: {remedy}")

    def get_master_address(self) -> str:
        """The address at which this process listens for the engines: loopback, unless a Ray cluster has other nodes."""
        if self.backend == "local" or len([node for node in ray_module().nodes() if node["Alive"]]) == 1:
            return "127.0.0.1"
        return str(ray_module().util.get_node_ip_address())

    def get_master_port(self) -> int:
        """The port of `update_weights`' group, as the system chose it; RuntimeError before there is a group."""
        if self._sender is None:
            raise RuntimeError("there is no weights group yet: the first update_weights makes it")
        return int(self._sender.port)

    def init_weight_update_group(self, master_address: str, master_port: int | str) -> list[Future[Any]]:
        """Let all workers join the group of a trainer's own `sharding.CollectiveSender`, whose `ip` and `port` these
        are: rank 0 is the trainer, workers follow in the engines' order. One future an engine, for its `connect`; they
        end when the whole group stands.
        """
        self._require_launched("initializing weight update group")
        size = gpus_per_replica(self.settings)
        address = master_address, int(master_port), 1 + size * len(self.actors), 1, UPDATE_SECONDS
        return [
            replica.submit("ask_workers", "init_collective", number * size, *address)
            for number, replica in enumerate(self.actors)
        ]

    def receive_weights(self) -> list[Future[int]]:
        """Let all engines take one update from the group they joined: futures of its version, for the sender."""
        return self._updates("update_weights_from_collective")

    def _updates(self, method: str, *arguments: Any) -> list[Future[int]]:
        self._require_launched("updating weights")
        call = method, (*arguments, UPDATE_SECONDS), UPDATE_SECONDS
        return [replica.submit("update_weights", *call) for replica in self.actors]

    def update_weights(self, weights: Any, version: int | None = None) -> Any:
        """Broadcast new weights from this process to all engines, bucket by bucket; blocks. Returns a `SyncReport`.

        Args:
            weights: (name, tensor) pairs, by names of the checkpoint and in any order, none held longer than needed;
                or a `sharding.WeightSource`.
            version: of these weights; one more than the last by default.

        Raises:
            RemoteError: naming what is missing, unknown, sent twice or of the wrong shape, and the engine that failed.
                Engines whose weights cannot be trusted refuse to generate until an update succeeds.
        """
        self._require_carriers("updating weights")
        version = self.weight_version + 1 if version is None else version
        is_source = hasattr(weights, "gather_into")
        source = weights if is_source else self._carriers.StreamSource(self._manifest(), weights)
        try:
            return self._connected_sender(source).send(version, self.receive_weights())
        except BaseException:
            self.close_weights_group()
            raise
        finally:
            self.weight_version = version  # engines that hold older weights must not be asked any more

    def _connected_sender(self, source: Any) -> Any:
        """The sender of the updates before, or a new one that all workers have joined."""
        if self._sender is not None and self._source is not None:
            self._source.source = source
            return self._sender
        self._source = _CurrentSource(source)
        settings = self._carriers.SyncSettings(timeout=UPDATE_SECONDS)
        workers = len(self.actors) * gpus_per_replica(self.settings)
        self._sender = self._carriers.CollectiveSender(
            self._source, self._sending_device(), settings, workers, host=self.get_master_address()
        )
        calls = self.init_weight_update_group(self._sender.ip, self._sender.port)
        self._sender.connect(calls)
        results_of(calls, UPDATE_SECONDS, "joining the weights group")
        return self._sender

    def _sending_device(self) -> "torch.device":
        """A GPU that none of this machine's engines is on, the current one if it can be."""
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        current = torch.cuda.current_device()
        free = [index for index in range(torch.cuda.device_count()) if index not in self._taken]
        if not free:
            raise RuntimeError(f"{NO_DEVICE_LEFT}: start fewer replicas, or use load_weights_from_storage")
        return torch.device("cuda", current if current in free else free[0])

    def close_weights_group(self) -> None:
        """Stop listening for the engines; the next update makes a new group."""
        if self._sender is not None:
            self._sender.close()
        self._sender = self._source = None

    def load_weights_from_storage(self, path: Path | str, num_threads: int = 1) -> int:
        """Let all engines load the latest complete update in a folder of a `sharding.StorageWriter`; gives its version.
        Each worker reads `num_threads` buckets at a time, and has memory for one more. RuntimeError names the engine
        and the weight; that engine refuses to generate until an update succeeds.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, but must be at least 1")
        calls = self._updates("load_weights_from_storage", str(path), num_threads)
        wait(calls, 2 * UPDATE_SECONDS)  # also where one has failed: the next update finds none at it still
        versions = results_of(calls, 2 * UPDATE_SECONDS, "loading weights")
        if len(set(versions)) > 1:  # the trainer wrote meanwhile
            raise RuntimeError(f"engines loaded versions {sorted(set(versions))}, since the folder changed: load again")
        self.weight_version = versions[0]
        return self.weight_version
