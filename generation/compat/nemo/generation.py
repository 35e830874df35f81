"""Blocking generation on vLLM: one engine (`VllmGenerationWorker`), or several behind NeMo RL's
interface.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, aclosing
from typing import Any, Self, TypeVar

from generation.compat.load_balancer import EngineLoad, LoadBalancer
from generation.compat.nemo import batch
from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.compat.nemo.batch import GenerationInterface, Prompts, Responses, Row, Texts
from generation.compat.nemo.config import (
    VllmConfig,
    check_config,
    colocated,
    counted_gpus,
    has_tokenizer,
    on_ray,
)
from generation.engine.devices import device_count
from generation.engine.lifecycle import EngineStateError
from generation.engine.ray_cluster import join_once
from generation.engine.ray_replicas import Actor
from generation.engine.thread import EngineThread, as_ready
from generation.undoing import undone_by

T = TypeVar("T")


class _Batches:
    """Generation for batches on one or several workers; `_choose` returns the index of the worker
    for a prompt.
    """

    workers: "list[VllmGenerationWorker]"
    _choose: Callable[[Any], int]
    shutdown: Callable[[], Any]

    def __init__(self, config: VllmConfig, timeout: float) -> None:
        check_config(config)
        self.config = config
        self.timeout = timeout
        self._pad = batch.pad_token_id(config)
        self._calls = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _begin(
        self, method: str, rows: Sequence[Row], greedy: bool
    ) -> tuple[list[int], list[Future[Any]]]:
        """Start a method of the asynchronous worker for each sample. Return the workers' indices,
        and the futures. Raises EngineStateError unless all engines can generate.
        """
        for worker in self.workers:
            worker.check_usable()
        engines = list[int]()
        futures = list[Future[Any]]()
        call = next(self._calls)
        for row in rows:
            engines.append(self._choose(row.text or row.token_ids))
            futures.append(self.workers[engines[-1]].begin(method, row, greedy, call))
        return engines, futures

    def generate(self, data: Prompts, greedy: bool = False) -> Responses:
        """Return one response to every prompt, in the order of the prompts; for an empty batch, an
        empty batch.

        A sample that fails has its error in `errors`, and does not affect other samples. Raises
        ValueError for a batch that is not right-padded or lacks a key, and EngineStateError where
        an engine is asleep or has no weights.
        """
        _, futures = self._begin("answer", batch.rows_of(data, self._pad), greedy)
        return batch.padded_output(data, collected(futures, self.timeout), self._pad)

    def generate_text(self, data: Texts, greedy: bool = False) -> Texts:
        """Return {"texts": responses, "errors": errors} for the texts in `data["prompts"]`."""
        _, futures = self._begin(
            "answer_text", batch.text_rows(data, has_tokenizer(self.config)), greedy
        )
        return batch.text_output(collected(futures, self.timeout))


class VllmGenerationWorker(_Batches, EngineLoad):
    """A started engine in child processes or in a Ray actor. Its methods block, for at most
    `timeout` seconds.

    They may be called from any thread except `thread`.

    Attributes:
        engine: the `VllmAsyncGenerationWorker` of this process; None with Ray.
        actor: the Ray actor that is such a worker; None without Ray.
        device_ids: the device of each worker of the engine.
        base_url: the base URL of the engine's server, if it has one.
    """

    def __init__(
        self,
        config: VllmConfig,
        bundle_indices: Sequence[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Start the engine. Arguments are as for `VllmAsyncGenerationWorker`, but with Ray without
        `bundle_indices`.
        """
        _Batches.__init__(self, config, timeout)
        EngineLoad.__init__(self)
        self.workers = [self]
        self.engine: VllmAsyncGenerationWorker | None = None
        self.actor: Actor | None = None
        self._leave: Callable[[], None] = lambda: None
        gpus = counted_gpus(config, fraction_of_gpus)
        if not on_ray(config):
            self.engine = VllmAsyncGenerationWorker(config, bundle_indices, fraction_of_gpus, seed)
        elif bundle_indices is not None:
            raise ValueError(
                "bundle_indices: with vllm_cfg.backend ray, Ray chooses the devices: leave them out"
            )
        else:
            size = config["vllm_cfg"].get("tensor_parallel_size", 1)
            self._leave = join_once(size)
            with undone_by(self._leave):
                gpus = gpus if cluster_room()[0] == "GPU" else 0
                arguments = config, None, fraction_of_gpus, seed
                self.actor = Actor(VllmAsyncGenerationWorker, *arguments, cpus=size, gpus=gpus)
        # Runs the coroutines of the engine, or those that wait for the actor
        self.thread = EngineThread()
        with undone_by(self.shutdown):
            self._wait("post_init_async", f"starting the engine for {config['model_name']}")
            self.device_ids: list[str] = self.report_device_id()
            self.base_url: str | None = self._wait(
                "report_dp_openai_server_base_url", "asking for the server"
            )

    def _choose(self, _: Any) -> int:
        return 0

    def check_usable(self) -> None:
        """Raise EngineStateError where the engine cannot generate. With an actor, its answers raise
        that later.
        """
        if self.engine is not None:
            self.engine.state.usable_version()
        elif self.thread.loop.is_closed():
            raise EngineStateError("cannot generate: the engine is closed")

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method of the asynchronous worker. Return its future, or Ray's ObjectRef."""
        if self.actor is not None:
            return self.actor.submit(method, *args, **kwargs)
        return self.thread.submit(self._coroutine(method, *args, **kwargs))

    def _coroutine(self, method: str, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        if self.actor is not None:
            return self.actor.call(method, *args, **kwargs)
        return getattr(self.engine, method)(*args, **kwargs)  # type: ignore[no-any-return]

    def begin(self, method: str, row: Row, greedy: bool, call: int) -> Future[Any]:
        """Start to generate for one sample of a batch, by `answer` or `answer_text` of the
        asynchronous worker.

        The sample counts as a request until it ends.
        """
        self.submitted()
        future = self.thread.submit(self._coroutine(method, row, greedy, call))
        future.add_done_callback(lambda _: self.finished())
        return future

    def __getattr__(self, name: str) -> Any:
        """Return a blocking NAME for each `NAME_async` of the asynchronous worker:
        `report_device_id`, `init_collective`, `prepare_refit_info`, `update_weights_via_ipc_zmq`,
        `update_weights_from_collective`, `reset_prefix_cache`, `sleep`, `wake_up`.
        """
        if not hasattr(VllmAsyncGenerationWorker, method := f"{name}_async"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda *args, **kwargs: self._wait(method, name.replace("_", " "), *args, **kwargs)

    def shutdown(self) -> None:
        """Stop the server, the engine's processes, the actor and the event loop. Safe to call
        twice.
        """
        if self.thread.loop.is_closed():
            return
        try:
            if self.actor is not None:
                self.thread.run(self.actor.close(), self.timeout, "stopping the engine and its actor")
            elif self.engine is not None and not self.engine.is_closed:
                self._wait("shutdown", "stopping the engine and its server")
        finally:
            if self.engine is not None:
                self.engine.close()
            self.thread.close()
            self._leave()

    def _wait(self, method: str, what: str, *args: Any, **kwargs: Any) -> Any:
        return self.thread.run(self._coroutine(method, *args, **kwargs), self.timeout, what)


def collected(futures: Sequence[Future[T]], timeout: float) -> list[T]:
    """Return the results in order. The first error, or a timeout after `timeout` seconds, cancels
    the others.
    """
    done, unfinished = wait(futures, timeout, return_when=FIRST_EXCEPTION)
    for future in unfinished:
        future.cancel()
    results = [future.result() for future in futures if future in done]
    if unfinished:
        raise TimeoutError(
            f"{len(unfinished)} of {len(futures)} requests did not finish within {timeout:.0f} s"
        )
    return results


class VllmGeneration(_Batches, GenerationInterface):
    """The engines of a `VllmConfig`, in child processes or, with `vllm_cfg.backend` ray, in Ray
    actors.

    There are `num_replicas` engines, each on `tensor_parallel_size` CUDA devices, or on the CPU
    where there are none. Each request goes to the engine with the fewest unfinished requests. The
    choice does not change the samples: their seeds depend on the configuration's seed, the number
    of the call and the place in the batch. The object is a context manager; otherwise `shutdown`
    runs when the object is collected, or the process ends.
    """

    def __init__(self, config: VllmConfig, timeout: float = 1800.0) -> None:
        """Start the engines. Each wait ends after `timeout` seconds. Raises ValueError naming a
        wrong key.
        """
        super().__init__(config, timeout)
        self.workers = []
        size = config["vllm_cfg"].get("tensor_parallel_size", 1)
        count = config["vllm_cfg"].get("num_replicas", 1)
        leave = join_once(size * count) if on_ray(config) else lambda: None
        self._end = weakref.finalize(self, _stop, self.workers, leave)

        def start(bundle: range | None) -> None:
            self.workers.append(VllmGenerationWorker(config, bundle, timeout=timeout))

        with undone_by(self.shutdown):
            bundles = _bundles(size, count, on_ray(config))
            if on_ray(config):
                with ThreadPoolExecutor(count) as pool:
                    [*pool.map(start, bundles)]
            else:
                # One after the other, since starting an engine changes the environment variables of
                # this process
                [*map(start, bundles)]
        self._choose = LoadBalancer(self.workers, "requests").select_actor

    @property
    def device_uuids(self) -> list[list[str]]:
        """The device of each worker of each engine."""
        return [worker.device_ids for worker in self.workers]

    @property
    def dp_openai_server_base_urls(self) -> list[str | None]:
        """The base URL of each engine's OpenAI-compatible server; None without
        `expose_http_server`.
        """
        return [worker.base_url for worker in self.workers]

    async def generate_async(
        self, data: Prompts, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Responses]]:
        """Yield (place in the batch, output without padding) as responses are ready, on the
        caller's event loop.

        `gen_leader_worker_idx` in an output is the index of its engine.
        """
        rows = batch.rows_of(data, self._pad)
        engines, futures = self._begin("answer", rows, greedy)
        async with aclosing(as_ready(map(asyncio.wrap_future, futures), self.timeout)) as answers:
            async for index, completion in answers:
                output = batch.sequence_output(data, rows[index], completion, self._pad)
                output["gen_leader_worker_idx"] = [engines[index]]
                yield index, output

    async def generate_text_async(
        self, data: Texts, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Texts]]:
        """Yield (place in `data["prompts"]`, {"texts": [response], "errors": [""]}) as responses
        are ready.
        """
        _, futures = self._begin(
            "answer_text", batch.text_rows(data, has_tokenizer(self.config)), greedy
        )
        async with aclosing(as_ready(map(asyncio.wrap_future, futures), self.timeout)) as answers:
            async for index, answer in answers:
                yield index, batch.text_output([answer])

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Wake colocated engines with all memory, or with `["weights"]` before and `["kv_cache"]`
        after an update.
        """
        if colocated(self.config):
            for worker in self.workers:
                worker.wake_up(tags)
        return True

    def finish_generation(self, level: int = 2) -> bool:
        """Put colocated engines to sleep, at level 2 without their weights; other engines drop
        cached prefixes.
        """
        if not colocated(self.config):
            return self.invalidate_kv_cache()
        for worker in self.workers:
            worker.sleep(level)
        return True

    def invalidate_kv_cache(self) -> bool:
        """Drop all cached prefixes of all engines."""
        for worker in self.workers:
            worker.reset_prefix_cache()
        return True

    def init_collective(
        self, ip: str, port: int, world_size: int, train_world_size: int | None = None
    ) -> list[Future[None]]:
        """Have all engines' workers join a group for weights at `ip`:`port`. Return a future for
        each engine.

        The trainer's ranks come first; by default they are all ranks without a worker. Raises
        ValueError where `world_size` is not the sum of both.
        """
        size = self.config["vllm_cfg"].get("tensor_parallel_size", 1)
        left = world_size - size * len(self.workers)
        train_world_size = left if train_world_size is None else train_world_size
        if left < 1 or left != train_world_size:
            raise ValueError(
                f"a world of {world_size} with {train_world_size} of the trainer does not fit "
                f"{len(self.workers)} engines of {size} workers: it must be {world_size - left} more "
                "than the trainer's ranks, at least 1"
            )
        return [
            worker.submit("init_collective_async", number * size, ip, port, world_size, train_world_size)
            for number, worker in enumerate(self.workers)
        ]

    def connect_ipc(self, endpoints: Sequence[Mapping[str, Sequence[str]]]) -> list[Future[None]]:
        """Have all engines' workers connect to the trainer's ranks on their devices. Return a
        future for each engine.

        `endpoints` are the ranks' `ShardingManager.endpoints`. Raises ValueError where there are
        not as many ranks as workers.
        """
        if len(endpoints) != len(self.workers):
            raise ValueError(
                f"{len(endpoints)} groups of ranks cannot send to {len(self.workers)} engines: start "
                "as many ranks as engines have workers, and make their ShardingManagers with the "
                "engines' tensor_parallel_size"
            )
        groups = zip(self.workers, endpoints, strict=True)
        return [worker.submit("connect_ipc_async", group) for worker, group in groups]

    def prepare_refit_info(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce the weights of updates to all engines: name in the checkpoint -> (shape,
        dtype).
        """
        for worker in self.workers:
            worker.prepare_refit_info(state_dict_info)

    def update_weights_via_ipc_zmq(self) -> list[Future[bool]]:
        """Have all engines receive an update from the ranks on their machine. Return a future for
        each engine.
        """
        return [worker.submit("update_weights_via_ipc_zmq_async") for worker in self.workers]

    def update_weights_from_collective(self) -> list[Future[bool]]:
        """Have all engines receive an update from the group that they joined. Return a future for
        each engine.
        """
        return [worker.submit("update_weights_from_collective_async") for worker in self.workers]

    def shutdown(self) -> bool:
        """Stop all engines. Safe to call twice."""
        self._end()
        return True


def _stop(workers: list[VllmGenerationWorker], leave: Callable[[], None]) -> None:
    with ExitStack() as stack:
        stack.callback(leave)
        for worker in workers:
            stack.callback(worker.shutdown)


def _bundles(size: int, count: int, ray_chooses: bool) -> Sequence[range | None]:
    """Return each engine's CUDA devices, or its cores on a machine without CUDA; None where Ray
    chooses.
    """
    kind, available = cluster_room() if ray_chooses else ("GPU", device_count())
    if 0 < available < size * count:
        needed = f"{count} engines with tensor_parallel_size {size} need {size * count} {kind}s"
        remedy = "lower generation.vllm_cfg.num_replicas or tensor_parallel_size"
        raise ValueError(f"{needed}, but there are {available:.0f}: {remedy}")
    if ray_chooses:
        return [None] * count
    return [range(number * size, (number + 1) * size) for number in range(count)]


def cluster_room() -> tuple[str, float]:
    """Return the resource by which Ray counts engines, GPU or, where the cluster has none, CPU, and
    its amount.
    """
    import ray

    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU") else "CPU"
    return kind, resources.get(kind, 0)
