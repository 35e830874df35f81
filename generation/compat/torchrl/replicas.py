"""The engines of an `AsyncVLLM`, in child processes or in Ray actors. Ray is imported when the
first actor is made.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from generation.compat.load_balancer import EngineLoad
from generation.engine.devices import device_count
from generation.engine.engine import WorkerError
from generation.engine.ray_cluster import ray_module
from generation.engine.ray_replicas import Actor, ActorEngine
from generation.engine.settings import EngineSettings
from generation.engine.thread import EngineThread
from generation.engine.vllm_compat import log_throughput, step_logger

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

log = logging.getLogger(__name__)

UPDATE_SECONDS = 300.0
"""The longest single wait of an update in seconds: for requests in flight, for a worker, or for a
bucket.
"""


class UpdateGate:
    """A lock that requests share and a weight update has exclusively, so that no answer has tokens
    of two versions.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._updated: asyncio.Event | None = None  # not None during an update

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Enter as one of many requests, after an update that is under way."""
        while self._updated is not None:
            await self._updated.wait()
        self._requests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._empty.set()

    @asynccontextmanager
    async def update(self, timeout: float) -> AsyncIterator[None]:
        """Enter exclusively, after the requests that are inside; later requests wait.

        Raises RuntimeError during another update, TimeoutError where requests do not end within
        `timeout` seconds.
        """
        if self._updated is not None:
            raise RuntimeError("a weight update is under way already")
        self._updated = asyncio.Event()
        try:
            try:
                await asyncio.wait_for(self._empty.wait(), timeout)
            except TimeoutError as error:
                late = f"{self._requests} requests did not end within {timeout:.0f} s"
                raise TimeoutError(f"{late}, so no weights were updated") from error
            yield
        finally:
            updated = self._updated
            self._updated = None
            updated.set()


class ServiceEngine(ActorEngine):
    """An engine with the methods that `AsyncVLLM` calls. All coroutines run on one event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._gate = UpdateGate()
        self._cache_usage = 0.0  # as of the last scheduler step
        self._by_weight = False  # True during an update whose weights arrive one by one
        self._one_weight = asyncio.Lock()
        self._statistics: asyncio.Task[None] | None = None

    async def start(self, stat_loggers: list[Any] | None = None) -> None:
        """Start the engine, and have it generate one token, to be sure that it is ready."""
        from vllm import SamplingParams

        def note(scheduler: Any, _: Any) -> None:
            if scheduler is not None:
                self._cache_usage = scheduler.kv_cache_usage

        await super().start([*(stat_loggers or ()), step_logger(note)])
        if not self.settings.extra.get("disable_log_stats", True):
            self._statistics = asyncio.ensure_future(log_throughput(self.llm))
        if self.settings.load_format != "dummy":
            self.state.adopt_checkpoint(0)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        async for _ in self.submit({"prompt_token_ids": [0]}, params, "the first request"):
            pass

    async def generate(
        self,
        prompt: dict[str, Any],
        params: "SamplingParams",
        version: int,
        timeout: float | None = None,
        lora_request: Any = None,
    ) -> "RequestOutput":
        """Answer one prompt. The output's `weight_version` is the version of the weights it was
        sampled with.

        Args: prompt: a prompt dictionary of vLLM's. params: vLLM's sampling parameters. version:
            the oldest acceptable version of the weights. Raises EngineStateError where the engine
            has an older one, or none. timeout: seconds after which the request is aborted and
            TimeoutError raised; the wait for an update counts. None: no limit. lora_request: the
            adapter to answer with, as for `AsyncLLM.generate`.
        """
        try:
            async with asyncio.timeout(timeout), self._gate.request():
                held = self.state.usable_version()
                version = max(held, version)
                output = await self.request(
                    prompt, params, policy_version=version, lora_request=lora_request
                )
        except TimeoutError as error:
            raise TimeoutError(f"vLLM generation timed out after {timeout} seconds") from error
        output.weight_version = held  # type: ignore[attr-defined]
        return output

    def get_cache_usage(self) -> float:
        """Return the share of the KV cache in use, 0 to 1, after the last scheduler step; aborts do
        not update it.
        """
        return self._cache_usage if self.llm.get_num_unfinished_requests() else 0.0

    async def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests that vLLM counts; the service has a separate
        count.
        """
        return int(self.llm.get_num_unfinished_requests())

    async def call_workers(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker, and return the results.

        From the first call of `update_weight` until the last weight has arrived, the engine has no
        version; then its version is one more than before. An error among the outcomes ends the
        update. `load_weights_from_storage` is a complete update.
        """
        if method == "load_weights_from_storage" and not self.state.syncing:
            return await self._load(method, *args, timeout=timeout, **kwargs)
        if method != "update_weight":
            return await super().call_workers(method, *args, timeout=timeout, **kwargs)
        async with self._one_weight:
            if not self._by_weight:
                async with self._gate.update(timeout or UPDATE_SECONDS):  # requests in flight end first
                    self.state.begin_sync()
                self._by_weight = True
            left = -1
            try:
                outcomes = await super().call_workers(method, *args, timeout=timeout, **kwargs)
                left = -1 if any(outcome["error"] for outcome in outcomes) else outcomes[0]["left"]
                if left == 0:
                    await self.reset_prefix_cache()
                    self.state.finish_sync(self.state.latest + 1)
                    outcomes = [outcome | {"version": self.state.version} for outcome in outcomes]
            finally:
                if left < 1:
                    self._end_by_weight()
            return outcomes

    async def _load(self, *call: Any, timeout: float | None, **kwargs: Any) -> list[Any]:
        """Return the workers' outcomes of a complete update; after an error among them the engine
        has no version.

        Raises WorkerError, and the engine keeps its version, where the folder cannot be loaded.
        """
        folder = call[1] if len(call) > 1 else kwargs["storage_path"]
        await self.ask_workers("hotbunk_check_storage", folder)
        outcomes: list[Any] = []
        with suppress(WorkerError):
            async with self._gate.update(timeout or UPDATE_SECONDS):
                self._end_by_weight()
                async with self.update() as update:
                    outcomes = await super().call_workers(*call, timeout=timeout, **kwargs)
                    if any(outcome["error"] for outcome in outcomes):
                        raise WorkerError
                    update.version = outcomes[0]["version"]
        return outcomes

    def _end_by_weight(self) -> None:
        if self._by_weight and self.state.syncing:
            self.state.fail_sync()
        self._by_weight = False

    async def update_weights(
        self, method: str, arguments: tuple[Any, ...], timeout: float
    ) -> int | None:
        """Have the workers receive weights by a method of their extension, while there is no
        request in the engine.

        Returns the sender's version. After a `WorkerError` of the workers, the engine has no
        version.
        """
        async with self._gate.update(timeout):
            self._end_by_weight()
            await self.receive(method, *arguments)
        return self.state.version

    async def shutdown(self) -> None:
        """Stop the engine's processes; safe to call twice."""
        if self._statistics is not None:
            self._statistics.cancel()
        await super().shutdown()


_TORCHRL_SCHEME = ("init_weight_transfer_engine", "update_weights_native", "sleep", "wake_up")


class ServiceReplica(EngineLoad, ABC):
    """An engine of the service. It counts the engine's load, as requests are submitted and end."""

    def __getattr__(self, name: str) -> Any:
        if name in _TORCHRL_SCHEME:
            remedy = "call update_weights of the service, or use TorchRL's vLLMUpdaterV2"
            scheme = "TorchRL's VLLMWeightSyncScheme, whose weights have neither versions nor digests"
            raise NotImplementedError(f"{name} is a method for {scheme}: {remedy}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def launch(self) -> Future[Any]:
        """Start the engine on the service's event loop. The future is done when the engine can
        generate.
        """
        return self.submit("start")

    @abstractmethod
    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a coroutine method of the replica's `ServiceEngine`. Cancelling the future cancels
        the coroutine.
        """

    def refer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Do the same as `submit`, but return an ObjectRef where the engine is on Ray."""
        return self.submit(method, *args, **kwargs)

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine's processes, in any state."""


class LocalReplica(ServiceReplica):
    """An engine whose processes are children of this process, on the service's event loop."""

    def __init__(self, settings: EngineSettings, thread: EngineThread) -> None:
        super().__init__()
        self._engine = ServiceEngine(settings)
        self._thread = thread

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a coroutine method of the engine on the service's event loop."""
        return self._thread.submit(getattr(self._engine, method)(*args, **kwargs))

    def get_cache_usage(self) -> float | None:
        """Return the share of the KV cache in use, in 0..1; None if it is unknown."""
        return self._engine.get_cache_usage()

    async def close(self) -> None:
        """Stop the engine's processes; safe to call twice."""
        await self._engine.shutdown()


class RayReplica(ServiceReplica):
    """An engine in a Ray actor, on a node of the cluster that has enough free devices. `actor` is
    its handle.
    """

    def __init__(self, actor: Actor, thread: EngineThread, name: str) -> None:
        super().__init__()
        self.actor = actor
        self._thread = thread
        self.name = name
        self._watcher: asyncio.Task[None] | None = None

    def launch(self) -> Future[Any]:
        """Start the engine in the actor."""
        return self._thread.submit(self._start())

    async def _start(self) -> None:
        await self.actor.call("start")
        await self.watch()

    async def watch(self) -> None:
        """Start to poll the share of the KV cache in use."""
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Poll the actor every half second for the share of the KV cache in use."""
        try:
            while True:
                self.cache_usage = await self.actor.call("get_cache_usage")
                await asyncio.sleep(0.5)
        except ray_module().exceptions.RayError as error:
            # Callers get the same error from their requests
            log.warning("Actor %s no longer reports its load: %s", self.name, error)
        finally:
            self.cache_usage = None

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a coroutine method of the actor's engine."""
        return self._thread.submit(self.actor.call(method, *args, **kwargs))

    def refer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the actor's engine, and return Ray's ObjectRef."""
        return self.actor.submit(method, *args, **kwargs)

    async def close(self) -> None:
        """Stop the engine's processes, then the actor; a dead actor is not an error."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self.actor.close()


def gpu_count(backend: str) -> int:
    """Return the number of GPUs of this machine, or of the whole Ray cluster."""
    return int(ray_module().cluster_resources().get("GPU", 0)) if backend == "ray" else device_count()
