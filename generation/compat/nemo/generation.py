"""Blocking generation on vLLM: one engine (`VllmGenerationWorker`), or several behind NeMo RL's interface."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import aclosing
from typing import Any, Self, TypeVar

from generation.compat.load_balancer import EngineLoad, LoadBalancer
from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.compat.nemo.batch import (
    BatchedDataDict,
    GenerationInterface,
    Prompts,
    Responses,
    Row,
    padded_output,
    rows_of,
    sequence_output,
    text_output,
    text_rows,
)
from generation.compat.nemo.config import VllmConfig, check_config, colocated, pad_token_id, replicas
from generation.engine.devices import device_count
from generation.engine.engine import Leader
from generation.engine.thread import as_ready
from generation.exact_ids import Generation

T = TypeVar("T")


class _Batches:
    """Batches on one worker or on several; `_choose` gives the place of a prompt's worker among `workers`."""

    workers: "list[VllmGenerationWorker]"
    timeout: float
    _pad: int
    _calls: Iterator[int]
    _choose: Callable[[Any], int]
    shutdown: Callable[[], Any]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _rows(self, data: Prompts) -> tuple[list[Row], int]:
        """The samples of a batch of ids, and the number of this call; raises unless all engines can generate."""
        rows = rows_of(data, self._pad)
        for worker in self.workers:
            worker.engine.state.usable_version()
        return rows, next(self._calls)

    def _texts(self, data: BatchedDataDict[Any], greedy: bool) -> list[Future[tuple[str, str]]]:
        rows, call = text_rows(data, self.workers[0].engine.has_tokenizer), next(self._calls)
        for worker in self.workers:
            worker.engine.state.usable_version()
        return [self.workers[self._choose(row.text)].answer_text(row, greedy, call) for row in rows]

    def generate(self, data: Prompts, greedy: bool = False) -> Responses:
        """One response to every prompt, in the order of the prompts; an empty batch gives an empty batch.

        A sample that fails has its error in `errors`, and does not affect the others. Raises ValueError for a batch
        that is not right-padded, or lacks something, and EngineStateError where an engine is asleep, or has no weights.
        """
        rows, call = self._rows(data)
        futures = [self.workers[self._choose(row.token_ids)].answer(row, greedy, call) for row in rows]
        return padded_output(data, collected(futures, self.timeout), self._pad)

    def generate_text(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """{"texts": responses, "errors": what went wrong} for the texts in `data["prompts"]`."""
        return text_output(collected(self._texts(data, greedy), self.timeout))


class VllmGenerationWorker(_Batches, EngineLoad):
    """A started engine. Its methods may be called from any thread except the engine's, and wait `timeout` seconds."""

    def __init__(
        self,
        config: VllmConfig,
        bundle_indices: Sequence[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Start the engine; arguments as `VllmAsyncGenerationWorker`'s."""
        super().__init__()
        self.timeout, self.workers = timeout, [self]
        self._pad, self._calls = pad_token_id(config), itertools.count()
        self.engine = VllmAsyncGenerationWorker(config, bundle_indices, fraction_of_gpus, seed)
        self._leader = Leader.start(self.engine, timeout)
        self.thread = self._leader.thread  # on its loop run the coroutines of `engine`
        try:
            self._wait(self.engine.post_init_async(), "preparing the engine")
        except BaseException:
            self.shutdown()
            raise

    def _choose(self, _: Any) -> int:
        return 0

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start one of the asynchronous worker's methods."""
        return self.thread.submit(getattr(self.engine, method)(*args, **kwargs))

    def _counted(self, method: str, *args: Any) -> Future[Any]:
        """The same, counted as a request until it ends."""
        self.submitted()
        future = self.submit(method, *args)
        future.add_done_callback(lambda _: self.finished())
        return future

    def answer(self, row: Row, greedy: bool, call: int) -> Future[Generation]:
        """Start to generate for one sample of a batch; see `VllmAsyncGenerationWorker.answer`."""
        return self._counted("answer", row, greedy, call)

    def answer_text(self, row: Row, greedy: bool, call: int) -> Future[tuple[str, str]]:
        """Start to generate for one text."""
        return self._counted("answer_text", row, greedy, call)

    def __getattr__(self, name: str) -> Any:
        """The asynchronous worker's `NAME_async` for NAME, blocking: `report_device_id`, `init_collective`,
        `prepare_refit_info`, `update_weights_via_ipc_zmq`, `update_weights_from_collective`, `reset_prefix_cache`,
        `sleep`, `wake_up`.
        """
        method = None if "engine" not in self.__dict__ else getattr(self.engine, f"{name}_async", None)
        if method is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda *args, **kwargs: self._wait(method(*args, **kwargs), name.replace("_", " "))

    def shutdown(self) -> None:
        """Stop the server, the engine's processes and the loop; safe to call twice."""
        try:
            if self.engine.server is not None:
                self._wait(self.engine.shutdown(), "stopping the engine and its server")
        finally:
            self._leader.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self.thread.run(coroutine, self.timeout, what)


def collected(futures: Sequence[Future[T]], timeout: float) -> list[T]:
    """The results in their order. The first error, or `timeout` seconds, end the others."""
    done, unfinished = wait(futures, timeout, return_when=FIRST_EXCEPTION)
    for future in unfinished:
        future.cancel()
    results = [future.result() for future in futures if future in done]
    if unfinished:
        raise TimeoutError(f"{len(unfinished)} of {len(futures)} requests did not finish within {timeout:.0f} s")
    return results


class VllmGeneration(_Batches, GenerationInterface):
    """Engines for a `VllmConfig`, as children of this process: `num_replicas` of them, each on
    `tensor_parallel_size` CUDA devices of its own, or on the CPU where there are none.

    Each request goes to the engine with the fewest unfinished ones. The choice does not change what is sampled: seeds
    depend on the configuration's, the number of the call and the place in the batch. A context manager; without one,
    `shutdown` runs when the object is collected, or the process ends.
    """

    def __init__(self, config: VllmConfig, timeout: float = 1800.0) -> None:
        """Start the engines; `timeout` (s) bounds every wait. ValueError names a key that is missing or cannot be."""
        check_config(config)
        self.config, self.timeout = config, timeout
        self.workers = []
        self._pad, self._calls = pad_token_id(config), itertools.count()
        self._end = weakref.finalize(self, _stop, self.workers)
        try:
            for bundle in _bundles(config):
                # One after the other: an engine is started with an environment of its own, and there is only one.
                self.workers.append(VllmGenerationWorker(config, bundle, timeout=timeout))
        except BaseException:
            self.shutdown()
            raise
        self._choose = LoadBalancer(self.workers, "requests").select_actor

    @property
    def device_uuids(self) -> list[list[str]]:
        """The device of each worker of each engine."""
        return [worker.engine.device_ids for worker in self.workers]

    @property
    def dp_openai_server_base_urls(self) -> list[str | None]:
        """The base URL of each engine's OpenAI-compatible server; None without `expose_http_server`."""
        servers = [worker.engine.server for worker in self.workers]
        return [None if server is None else server.base_url for server in servers]

    async def generate_async(self, data: Prompts, greedy: bool = False) -> AsyncIterator[tuple[int, Responses]]:
        """Yields (place in the batch, its output without padding) as responses are ready, on the caller's own loop.

        `gen_leader_worker_idx` in an output is the number of the engine that it came from.
        """
        rows, call = self._rows(data)
        engines, futures = list[int](), list[Future[Generation]]()
        for row in rows:
            engines.append(self._choose(row.token_ids))
            futures.append(self.workers[engines[-1]].answer(row, greedy, call))
        async with aclosing(as_ready(map(_awaited, futures), self.timeout)) as answers:
            async for place, completion in answers:
                output = sequence_output(data, rows[place], completion, self._pad)
                output["gen_leader_worker_idx"] = [engines[place]]
                yield place, output

    async def generate_text_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yields (place in `data["prompts"]`, {"texts": [response], "errors": [""]}) as responses are ready."""
        calls = map(_awaited, self._texts(data, greedy))
        async with aclosing(as_ready(calls, self.timeout)) as answers:
            async for place, answer in answers:
                yield place, text_output([answer])

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Wake colocated engines: all memory, or `["weights"]` before an update and `["kv_cache"]` after it."""
        if colocated(self.config):
            for worker in self.workers:
                worker.wake_up(tags)
        return True

    def finish_generation(self, level: int = 2) -> bool:
        """Put colocated engines to sleep, at level 2 without their weights; others forget cached prefixes."""
        if not colocated(self.config):
            return self.invalidate_kv_cache()
        for worker in self.workers:
            worker.sleep(level)
        return True

    def invalidate_kv_cache(self) -> bool:
        """Forget every cached prefix, on all engines."""
        for worker in self.workers:
            worker.reset_prefix_cache()
        return True

    def init_collective(
        self, ip: str, port: int, world_size: int, train_world_size: int | None = None
    ) -> list[Future[None]]:
        """Let every engine's workers join a weights group at `ip`:`port`; a future for each engine. The trainer's ranks
        come first, by default all that engines leave; ValueError for a world that does not divide so.
        """
        size = self.config["vllm_cfg"].get("tensor_parallel_size", 1)
        left = world_size - size * len(self.workers)
        train_world_size = left if train_world_size is None else train_world_size
        if left < 1 or left != train_world_size:
            raise ValueError(
                f"a world of {world_size} with {train_world_size} of the trainer does not fit {len(self.workers)} "
                f"engines of {size} workers: world_size must be the trainer's, 1 or more, and {world_size - left}"
            )
        return [
            worker.submit("init_collective_async", number * size, ip, port, world_size, train_world_size)
            for number, worker in enumerate(self.workers)
        ]

    def connect_ipc(self, endpoints: Sequence[Mapping[str, Sequence[str]]]) -> list[Future[None]]:
        """Let every engine's workers connect to the trainer's ranks on their devices, whose `ShardingManager.endpoints`
        these are; a future for each engine. ValueError where there are more or fewer ranks than workers.
        """
        if len(endpoints) != len(self.workers):
            raise ValueError(
                f"{len(endpoints)} groups of ranks cannot send to {len(self.workers)} engines: start as many ranks as "
                "engines have workers, and make their ShardingManagers with the engines' tensor_parallel_size"
            )
        groups = zip(self.workers, endpoints, strict=True)
        return [worker.submit("connect_ipc_async", group) for worker, group in groups]

    def prepare_refit_info(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Tell all engines what weights come: checkpoint name -> (shape, dtype)."""
        for worker in self.workers:
            worker.prepare_refit_info(state_dict_info)

    def update_weights_via_ipc_zmq(self) -> list[Future[bool]]:
        """Let all engines take an update from the ranks of their machine; a future for each."""
        return [worker.submit("update_weights_via_ipc_zmq_async") for worker in self.workers]

    def update_weights_from_collective(self) -> list[Future[bool]]:
        """Let all engines take an update from the group they joined; a future for each."""
        return [worker.submit("update_weights_from_collective_async") for worker in self.workers]

    def shutdown(self) -> bool:
        """End all engines; safe to call twice."""
        self._end()
        return True


async def _awaited(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


def _stop(workers: list[VllmGenerationWorker]) -> None:
    for worker in workers:
        worker.shutdown()


def _bundles(config: VllmConfig) -> list[range]:
    """Each engine's CUDA devices; its cores, on a machine without any."""
    size, count = config["vllm_cfg"].get("tensor_parallel_size", 1), replicas(config)
    available = device_count()
    if 0 < available < size * count:
        raise ValueError(
            f"{count} engines with tensor_parallel_size {size} need {size * count} devices, here are {available}: "
            "lower generation.vllm_cfg.num_replicas or tensor_parallel_size"
        )
    return [range(number * size, (number + 1) * size) for number in range(count)]
