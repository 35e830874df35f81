"""Bring new weights to an `AsyncVLLM`, by broadcast from a trainer or from a folder.

The package `sharding`, which is imported by its name, carries the weights. It checks that none is
missing or silently cast.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generation.compat.torchrl.arguments import gpus_per_replica, results_of
from generation.compat.torchrl.replicas import UPDATE_SECONDS, ServiceReplica
from generation.engine.ray_cluster import ray_module
from generation.engine.settings import EngineSettings
from generation.undoing import undone_by

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

NO_DEVICE_LEFT = "every GPU of this machine has an engine, and NCCL cannot join two processes on one"


class WeightUpdates:
    """The methods of `AsyncVLLM` that update weights.

    During any update, requests in flight end with the old weights, and later requests wait for the
    new ones. Prefix caches are emptied. Engines that missed an update refuse to generate.
    """

    actors: list[ServiceReplica]
    settings: EngineSettings
    backend: str
    weight_version: int
    _require_launched: Callable[..., None]

    def __init__(self, carriers: Any = None) -> None:
        # No import statement: `sharding` imports `generation`
        self._carriers = carriers or import_module("sharding")
        self._taken: set[int] = set()  # devices of this machine that have an engine
        self._sender: Any = None
        self._joined: list[Future[Any]] = []  # the engines' calls to join the sender's group

    def get_model_metadata(self) -> "dict[str, tuple[torch.dtype, torch.Size]]":
        """Return (dtype, shape) of every weight that an update must bring, by its name in the
        checkpoint.
        """
        import torch

        return {
            name: (getattr(torch, dtype), torch.Size(shape))
            for name, (shape, dtype) in self._manifest().items()
        }

    def check_model_metadata(self, trainer: "Mapping[str, tuple[torch.dtype, Iterable[int]]]") -> None:
        """Raise ValueError naming a trainer's weights that the engines cannot take, and weights
        that are missing.
        """
        sent = {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (dtype, shape) in trainer.items()
        }
        manifest = self._manifest()
        if complaints := self._carriers.differences(sent, manifest):
            raise ValueError("the trainer's weights are not the engines': " + "; ".join(complaints))

    def _manifest(self) -> dict[str, list[Any]]:
        self._require_launched("asking for model metadata")
        calls = [replica.submit("ask_workers", "hotbunk_model_metadata") for replica in self.actors]
        outcomes = [
            outcome
            for by_worker in results_of(calls, UPDATE_SECONDS, "model metadata")
            for outcome in by_worker
        ]
        manifests = [outcome["weights"] for outcome in outcomes]
        if any(manifest != manifests[0] for manifest in manifests):
            raise RuntimeError(
                "the engines hold different models: their weights' names, shapes or dtypes differ"
            )
        return manifests[0]

    def get_master_address(self) -> str:
        """Return the address where this process listens for engines: loopback, unless a Ray cluster
        has more nodes.
        """
        if self.backend == "local":
            return "127.0.0.1"
        alive = [node for node in ray_module().nodes() if node["Alive"]]
        if len(alive) == 1:
            return "127.0.0.1"
        return str(ray_module().util.get_node_ip_address())

    def get_master_port(self) -> int:
        """Return the port of the group for `update_weights`, on which this process listens from
        this call on.
        """
        return int(self._listening("asking for the port").port)

    def init_weight_update_group(
        self, master_address: str | None = None, master_port: int | str | None = None
    ) -> list[Future[Any]]:
        """Have all workers join a group for weights. Return a future per engine; they end when the
        group is complete.

        Rank 0 listens at the address: a `sharding.CollectiveSender` or
        `stateless_init_process_group` of a trainer. The workers follow in the engines' order.
        Without an address, or with this service's address, the service is rank 0 itself, for
        `update_weights`, and the futures have ended when this method returns.
        """
        self._require_launched("initializing weight update group", owner=True)
        if (master_address is None) != (master_port is None):
            raise ValueError(
                "init_weight_update_group takes both master_address and master_port, or neither"
            )
        if master_port is None or (self._sender is not None and int(master_port) == self._sender.port):
            return self._join_own_group()
        return self._join("refer", master_address, int(master_port))

    def _join(self, way: str, *address: Any) -> list[Any]:
        size = gpus_per_replica(self.settings)
        group = *address, 1 + size * len(self.actors), 1, UPDATE_SECONDS
        return [
            getattr(replica, way)("ask_workers", "init_collective", number * size, *group)
            for number, replica in enumerate(self.actors)
        ]

    def _listening(self, action: str) -> Any:
        """Return the sender of all updates, which listens for the engines."""
        self._require_launched(action, owner=True)
        if self._sender is None:
            settings = self._carriers.SyncSettings(timeout=UPDATE_SECONDS)
            nothing = self._carriers.StreamSource({}, ())
            workers = len(self.actors) * gpus_per_replica(self.settings), self.get_master_address()
            self._sender = self._carriers.CollectiveSender(
                nothing, self._sending_device(), settings, *workers
            )
        return self._sender

    def _join_own_group(self) -> list[Future[Any]]:
        sender = self._listening("joining the weights group")
        if not self._joined:
            with undone_by(self.close_weights_group):
                calls = self._join("submit", sender.ip, sender.port)
                sender.connect(calls)
                results_of(calls, UPDATE_SECONDS, "joining the weights group")
            self._joined = calls
        return self._joined

    def receive_weights(self) -> list[Future[int]]:
        """Have all engines receive one update from their group. Return futures of its version, for
        the sender.
        """
        return self._updates("update_weights_from_collective")

    def _updates(self, method: str, *arguments: Any) -> list[Future[int]]:
        self._require_launched("updating weights", owner=True)
        call = method, (*arguments, UPDATE_SECONDS), UPDATE_SECONDS
        return [replica.submit("update_weights", *call) for replica in self.actors]

    def update_weights(self, weights: Any, version: int | None = None) -> Any:
        """Broadcast new weights from this process to all engines, bucket by bucket, and blocks
        until they are there.

        Returns a `SyncReport`; where there are no weights, logs a warning and returns None.

        Args: weights: (name, tensor) pairs in any order, by their names in the checkpoint, each
            held no longer than needed; or a `sharding.WeightSource`. A tied head may be among them
            if it equals the embedding. version: the version of these weights; by default, one more
            than the last.

        Raises: RemoteError: names weights that are missing, unknown, sent twice or of the wrong
            shape, and the engine that failed. Engines with incomplete weights refuse to generate
            until an update succeeds.
        """
        self._require_launched("updating weights", owner=True)
        if not hasattr(weights, "gather_into"):
            stream = iter(weights)
            if not (begun := [*islice(stream, 1)]):
                log.warning("No weights provided for update")
                return None
            manifest = self._manifest()
            stream = chain(begun, stream)
            del begun  # otherwise the first weight would be held until the end
            weights = self._carriers.StreamSource(manifest, _untied(stream, manifest))
        version = self.weight_version + 1 if version is None else version
        try:
            with undone_by(self.close_weights_group):
                self._join_own_group()
                self._sender.use(weights)
                return self._sender.send(version, self.receive_weights())
        finally:
            self.weight_version = version  # engines with older weights must not answer any more

    def _sending_device(self) -> "torch.device":
        """Return a GPU without an engine, if possible the current one; the CPU on a machine without
        GPUs.
        """
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        current = torch.cuda.current_device()
        free = [index for index in range(torch.cuda.device_count()) if index not in self._taken]
        if not free:
            raise RuntimeError(
                f"{NO_DEVICE_LEFT}: start fewer replicas, or use load_weights_from_storage"
            )
        return torch.device("cuda", current if current in free else free[0])

    def close_weights_group(self) -> None:
        """Close the group for weights; the next update makes a new group."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._joined = []

    def load_weights_from_storage(self, path: Path | str, num_threads: int = 1) -> int:
        """Have all engines load the latest complete update of a `sharding.StorageWriter`. Return
        its version.

        `path` is the writer's folder. Each worker reads `num_threads` buckets at a time, and needs
        memory for one more. Raises RuntimeError naming an engine that failed and the weight; that
        engine refuses to generate until an update succeeds.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, but must be at least 1")
        calls = self._updates("load_weights_from_storage", str(path), num_threads)
        # For all, even if one has failed, so that none still loads in the next update
        wait(calls, 2 * UPDATE_SECONDS)
        versions = results_of(calls, 2 * UPDATE_SECONDS, "loading weights")
        if len(set(versions)) > 1:  # the trainer has written an update meanwhile
            raise RuntimeError(
                f"engines loaded versions {sorted(set(versions))}, since the folder changed: load again"
            )
        self.weight_version = versions[0]
        return self.weight_version


def _untied(weights: Iterator[Any], names: Collection[str]) -> Iterator[Any]:
    """Yield weights without an output head that is not among `names`. State dicts of Transformers
    have a tied head and its embedding, but the engine has one weight for both. Raises ValueError at
    the end unless they are equal.
    """
    embedding = head = None
    for name, weight in weights:
        if name == "lm_head.weight" and name not in names and head is None:
            head = weight
            continue
        embedding = weight if name.endswith(_EMBEDDINGS) else embedding
        yield name, weight
    import torch

    if head is not None and (embedding is None or not torch.equal(head, embedding)):
        raise ValueError(
            "lm_head.weight differs from the embedding, but the engine's model has one weight for both"
        )
