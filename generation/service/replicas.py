"""The two kinds of replicas of an `AsyncVLLM`, seen from the service: child processes, and Ray actors.

Ray is imported when the first actor is made, and not before.
"""

import asyncio
import logging
from concurrent.futures import Future
from typing import Any, Protocol

from ..devices import device_count
from ..event_loop import EngineThread
from ..settings import EngineSettings
from .engine import ServiceEngine
from .load_balancer import EngineLoad

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
"""How often a Ray actor is asked, in the background, how full its KV cache is."""

ACTOR_NAMESPACE = "hotbunk"

CONCURRENT_CALLS = 1 << 16
"""Requests that an actor takes at the same time; queueing them is its engine's work, not Ray's."""


class Replica(Protocol):
    """One engine as the service sees it; its load is counted here, at submit and finish."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a coroutine method of the replica's `ServiceEngine`; cancelling the future cancels it there."""

    def launch(self) -> Future[Any]:
        """Start the engine; the future is done when it can generate."""

    async def close(self) -> None:
        """Stop the engine's processes, whatever state it is in."""

    def submitted(self) -> None:
        """See `EngineLoad`."""

    def finished(self) -> None:
        """See `EngineLoad`."""

    def get_num_unfinished_requests(self) -> int:
        """See `EngineLoad`."""

    def get_cache_usage(self) -> float | None:
        """See `EngineLoad`."""


class LocalReplica(EngineLoad):
    """An engine whose processes are children of this one, served by the service's event loop."""

    def __init__(self, settings: EngineSettings, thread: EngineThread) -> None:
        super().__init__()
        self._engine, self._thread = ServiceEngine(settings), thread

    def launch(self) -> Future[Any]:
        """Start the engine; blocks the service's event loop meanwhile."""
        return self.submit("start")

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a coroutine method of the engine on the service's event loop."""
        return self._thread.submit(getattr(self._engine, method)(*args))

    def get_cache_usage(self) -> float | None:
        """Share of the KV cache in use after the scheduler's latest step."""
        return self._engine.cache_usage_now()

    async def close(self) -> None:
        """Stop the engine's processes."""
        await self._engine.shutdown()


class RayReplica(EngineLoad):
    """An engine in a Ray actor, on a node of the cluster that has its devices free."""

    def __init__(
        self, settings: EngineSettings, thread: EngineThread, name: str, actor_class: type = ServiceEngine
    ) -> None:
        super().__init__()
        self._settings, self._thread, self._name, self._class = settings, thread, name, actor_class
        self._actor: Any = None
        self._watcher: asyncio.Task[None] | None = None

    def launch(self) -> Future[Any]:
        """Create the actor and start the engine in it."""
        # One actor takes all devices of its engine, so they are on one node; Ray tells it which by
        # CUDA_VISIBLE_DEVICES, and the engine's workers are the actor's children.
        self._actor = (
            ray_module()
            .remote(self._class)
            .options(
                name=self._name,
                namespace=ACTOR_NAMESPACE,
                num_cpus=1,
                num_gpus=len(self._settings.device_indices),
                max_concurrency=CONCURRENT_CALLS,
            )
            .remote(self._settings)
        )
        return self._thread.submit(self._start())

    async def _start(self) -> None:
        await self._call("start")
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        try:
            while True:
                self.cache_usage = await self._call("cache_usage")
                await asyncio.sleep(WATCH_SECONDS)
        except ray_module().exceptions.RayError as error:  # requests fail with the same error, where somebody sees it
            log.warning("Actor %s no longer reports its load: %s", self._name, error)
        finally:
            self.cache_usage = None

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a coroutine method of the actor."""
        return self._thread.submit(self._call(method, *args))

    async def _call(self, method: str, *args: Any) -> Any:
        answer = getattr(self._actor, method).remote(*args)
        try:
            return await answer
        except asyncio.CancelledError:
            ray_module().cancel(answer)
            raise
        except ray_module().exceptions.RayTaskError as error:
            raise error.cause from error  # what was raised in the actor, as a local replica raises it

    async def close(self) -> None:
        """Stop the engine's processes, then the actor; one that is dead already is no error."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        ray = ray_module()
        if self._watcher is not None:
            self._watcher.cancel()
        try:
            await actor.shutdown.remote()
        except ray.exceptions.RayError as error:
            log.warning("Actor %s did not stop its engine: %s", self._name, error)
        finally:
            ray.kill(actor)


def ray_module() -> Any:
    """Ray, imported now.

    Raises:
        ImportError: with the remedy, where it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("ray is not installed. Please install it with `pip install ray`.") from error
    return ray


def make_replicas(
    backend: str, settings: list[EngineSettings], thread: EngineThread, service_id: str, actor_class: type | None
) -> list[Replica]:
    """A replica for each of `settings`, none of them started."""
    if backend == "local":
        return [LocalReplica(each, thread) for each in settings]
    names = [f"async-vllm-replica-{service_id}-{i}" for i in range(len(settings))]
    return [
        RayReplica(each, thread, name, actor_class or ServiceEngine) for each, name in zip(settings, names, strict=True)
    ]


def local_address(backend: str) -> str:
    """The address under which replicas reach this process: loopback, unless a Ray cluster has other nodes."""
    if backend == "local" or len([node for node in ray_module().nodes() if node["Alive"]]) == 1:
        return "127.0.0.1"
    return str(ray_module().util.get_node_ip_address())


def gpu_count(backend: str) -> int:
    """Devices there are: of this machine, or of the whole Ray cluster.

    Raises:
        RuntimeError: there is no cluster.
    """
    if backend == "ray":
        if not ray_module().is_initialized():
            raise RuntimeError("there is no Ray cluster: call ray.init() first, which starts one or connects to one")
        return int(ray_module().cluster_resources().get("GPU", 0))
    return device_count()
