"""The engines of an `AsyncVLLM`, and the two ways to hold them: as child processes and in Ray actors. Ray is imported
when the first actor is made, and not before.
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
from generation.engine.replicas import Actor, ActorEngine, ray_module
from generation.engine.settings import EngineSettings
from generation.engine.thread import EngineThread
from generation.engine.vllm_compat import log_throughput, step_logger

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

log = logging.getLogger(__name__)

UPDATE_SECONDS = 300.0
"""Longest single wait of an update: for requests in flight to end, for a worker, for a bucket."""


class UpdateGate:
    """A gate that requests pass together and a weight update alone, so that no answer has tokens of two versions."""

    def __init__(self) -> None:
        self._requests = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._updated: asyncio.Event | None = None  # present while an update is under way

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Enter as one of many requests; wait while an update is under way."""
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
        """Enter alone, after the requests that are inside; those that come later wait. RuntimeError while another
        update is under way; TimeoutError where requests did not end within `timeout` seconds.
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
            updated, self._updated = self._updated, None
            updated.set()


class ServiceEngine(ActorEngine):
    """An engine with the methods that `AsyncVLLM` calls. All coroutines run on one event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._gate = UpdateGate()
        self._cache_usage = 0.0  # as of the last scheduler step
        self._by_weight = False  # an update is under way whose weights come one by one
        self._one_weight = asyncio.Lock()
        self._statistics: asyncio.Task[None] | None = None

    async def start(self, stat_loggers: list[Any] | None = None) -> None:
        """Start the engine, and let it generate one token: only then is it ready."""
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
        """Answer one prompt; the output's `weight_version` says with which weights.

        Args:
            version: the oldest weights that will do; EngineStateError where the engine has older ones, or none.
            timeout: seconds, waiting for an update included, then TimeoutError, and the engine aborts the request; None
                waits for as long as it takes.
            lora_request: the adapter to answer with, as of `AsyncLLM.generate`.
        """
        try:
            async with asyncio.timeout(timeout), self._gate.request():
                held = self.state.usable_version()
                version = max(held, version)
                output = await self.request(prompt, params, policy_version=version, lora_request=lora_request)
        except TimeoutError as error:
            raise TimeoutError(f"vLLM generation timed out after {timeout} seconds") from error
        output.weight_version = held  # type: ignore[attr-defined]
        return output

    def get_cache_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1, as of the last scheduler step; an abort does not count as one."""
        return self._cache_usage if self.llm.get_num_unfinished_requests() else 0.0

    async def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that vLLM counts; the service counts, too."""
        return int(self.llm.get_num_unfinished_requests())

    async def call_workers(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every worker.

        From the first `update_weight` until the last weight has come the engine holds no version, and then one more
        than before. An error among the outcomes ends the update. `load_weights_from_storage` is an update of its own.
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
        """The workers' outcomes; after an error among them the engine holds no version."""
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

    async def update_weights(self, method: str, arguments: tuple[Any, ...], timeout: float) -> int | None:
        """Let the workers take weights by one of the extension's methods, with no request in the engine.

        Returns the version that the sender says. After a `WorkerError` of the workers the engine holds no version.
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


class ServiceReplica(EngineLoad, ABC):
    """An engine of the service. Its load is counted here, when requests are submitted and when they end."""

    def launch(self) -> Future[Any]:
        """Start the engine, on the service's event loop; the future is done when it can generate."""
        return self.submit("start")

    @abstractmethod
    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a coroutine method of the replica's `ServiceEngine`; cancelling the future cancels it there."""

    def refer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Do as `submit` does, and return an ObjectRef where the engine is on Ray."""
        return self.submit(method, *args, **kwargs)

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine's processes, whatever state it is in."""


class LocalReplica(ServiceReplica):
    """An engine whose processes are children of this one, served by the service's event loop."""

    def __init__(self, settings: EngineSettings, thread: EngineThread) -> None:
        super().__init__()
        self._engine = ServiceEngine(settings)
        self._thread = thread

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._thread.submit(getattr(self._engine, method)(*args, **kwargs))

    def get_cache_usage(self) -> float | None:
        return self._engine.get_cache_usage()

    async def close(self) -> None:
        await self._engine.shutdown()


class RayReplica(ServiceReplica):
    """An engine in a Ray actor, on a node of the cluster that has its devices free. `actor`: its handle."""

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
        """Begin to ask how full the KV cache is."""
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Ask the actor every half second how full its KV cache is."""
        try:
            while True:
                self.cache_usage = await self.actor.call("get_cache_usage")
                await asyncio.sleep(0.5)
        except ray_module().exceptions.RayError as error:  # requests raise the same error to their callers
            log.warning("Actor %s no longer reports its load: %s", self.name, error)
        finally:
            self.cache_usage = None

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._thread.submit(self.actor.call(method, *args, **kwargs))

    def refer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.actor.submit(method, *args, **kwargs)

    async def close(self) -> None:
        """Stop the engine's processes, then the actor; a dead actor is not an error."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self.actor.close()


def gpu_count(backend: str) -> int:
    """Return the number of GPUs of this machine, or of the whole Ray cluster."""
    return int(ray_module().cluster_resources().get("GPU", 0)) if backend == "ray" else device_count()
