"""`VllmGeneration`: one or several vLLM engines behind the blocking generation interface."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, Self

from generation.compat.load_balancer import LoadBalancer
from generation.compat.nemo.batch import (
    BatchedDataDict,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    padded_output,
    rows_of,
    sequence_output,
    text_output,
    text_rows,
)
from generation.compat.nemo.config import VllmConfig, check_config, colocated, pad_token_id, replicas
from generation.compat.nemo.worker import VllmGenerationWorker, collected
from generation.engine.devices import device_count
from generation.engine.thread import as_ready
from generation.exact_ids import Generation


class VllmGeneration(GenerationInterface):
    """Engines for a `VllmConfig`, as children of this process: `num_replicas` of them, each on
    `tensor_parallel_size` CUDA devices of its own, or on the CPU where there are none.

    Each request goes to the engine with the fewest unfinished ones. The choice does not change what is sampled: seeds
    depend on the configuration's, the number of the call and the place in the batch.

    A context manager. Without one, `shutdown` runs when the object is collected, or the process ends.

    Attributes:
        workers: one for each engine.
    """

    def __init__(self, config: VllmConfig, timeout: float = 1800.0) -> None:
        """Start the engines; `timeout` (s) bounds every wait.

        Raises:
            ValueError: a configuration that is incomplete or contradicts itself, naming the key.
        """
        check_config(config)
        self.config, self.timeout = config, timeout
        self.workers: list[VllmGenerationWorker] = []
        self._pad, self._calls = pad_token_id(config), itertools.count()
        self._end = weakref.finalize(self, _stop, self.workers)
        try:
            for devices in _devices(config):
                # One after the other: an engine is started with an environment of its own, and there is only one.
                self.workers.append(VllmGenerationWorker(config, devices, timeout=timeout))
        except BaseException:
            self.shutdown()
            raise
        self._balancer = LoadBalancer(self.workers, "requests")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def device_uuids(self) -> list[list[str]]:
        """The device of each worker of each engine."""
        return [worker.engine.device_ids for worker in self.workers]

    @property
    def dp_openai_server_base_urls(self) -> list[str | None]:
        """Where each engine's OpenAI-compatible server answers; None without `expose_http_server`."""
        servers = [worker.engine.server for worker in self.workers]
        return [None if server is None else server.base_url for server in servers]

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """One response to every prompt, in the order of the prompts; an empty batch gives an empty batch.

        A sample that fails has its error in `errors`, and does not affect the others.

        Raises:
            ValueError: a batch that is not right-padded, or lacks something.
            EngineStateError: an engine is asleep, or has no weights.
        """
        rows, call = rows_of(data, self._pad), next(self._calls)
        self._check_usable()
        futures = [self._worker(row.token_ids).answer(row, greedy, call) for row in rows]
        return padded_output(data, collected(futures, self.timeout), self._pad)

    def generate_text(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """{"texts": responses, "errors": what went wrong} for the texts in `data["prompts"]`."""
        return text_output(collected(self._text_futures(data, greedy), self.timeout))

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yields (place in the batch, its output without padding) as responses are ready, on the caller's own loop.

        `gen_leader_worker_idx` in an output is the number of the engine that it came from.
        """
        rows, call = rows_of(data, self._pad), next(self._calls)
        self._check_usable()
        engines, futures = list[int](), list[Future[Generation]]()
        for row in rows:
            engines.append(self._balancer.select_actor(row.token_ids))
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
        calls = map(_awaited, self._text_futures(data, greedy))
        async with aclosing(as_ready(calls, self.timeout)) as answers:
            async for place, answer in answers:
                yield place, text_output([answer])

    def _text_futures(self, data: BatchedDataDict[Any], greedy: bool) -> list[Future[tuple[str, str]]]:
        rows, call = text_rows(data, self.workers[0].engine.has_tokenizer), next(self._calls)
        self._check_usable()
        return [self._worker(row.text).answer_text(row, greedy, call) for row in rows]

    def _worker(self, prompt: list[int] | str) -> VllmGenerationWorker:
        return self.workers[self._balancer.select_actor(prompt)]

    def _check_usable(self) -> None:
        for worker in self.workers:
            worker.engine.state.usable_version()

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Wake the engines of a colocated configuration: all memory, or `["weights"]` before an update of the weights
        and `["kv_cache"]` after it.
        """
        if colocated(self.config):
            for worker in self.workers:
                worker.wake_up(tags)
        return True

    def finish_generation(self, level: int = 2) -> bool:
        """Put the engines of a colocated configuration to sleep, at level 2 without their weights; others forget
        cached prefixes.
        """
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

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Future[None]]:
        """Start joining the process group that weights are broadcast in: trainer ranks first, then the engines'
        workers. One future an engine; wait for them when the trainer's ranks are joining.
        """
        size = (world_size - train_world_size) // len(self.workers)
        joins = [
            worker.engine.init_collective_async(number * size, ip, port, world_size, train_world_size)
            for number, worker in enumerate(self.workers)
        ]
        return [worker.thread.submit(join) for worker, join in zip(self.workers, joins, strict=True)]

    def prepare_refit_info(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce what weights will be broadcast: name -> (shape, dtype)."""
        for worker in self.workers:
            worker.prepare_refit_info(state_dict_info)

    def update_weights_via_ipc_zmq(self) -> list[Future[bool]]:
        """Start to receive weights from trainer ranks on the same devices; one future an engine."""
        return [w.thread.submit(w.engine.update_weights_via_ipc_zmq_async()) for w in self.workers]

    def update_weights_from_collective(self) -> list[Future[bool]]:
        """Start to receive weights by broadcast, in the group of `init_collective`; one future an engine."""
        return [w.thread.submit(w.engine.update_weights_from_collective_async()) for w in self.workers]

    def shutdown(self) -> bool:
        """Stop all engines; safe to call twice."""
        self._end()
        return True


async def _awaited(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


def _stop(workers: list[VllmGenerationWorker]) -> None:
    for worker in workers:
        worker.shutdown()


def _devices(config: VllmConfig) -> list[range]:
    """Each engine's CUDA devices; empty ranges on a machine without any."""
    size, count = config["vllm_cfg"].get("tensor_parallel_size", 1), replicas(config)
    available = device_count()
    if available == 0:
        return [range(0)] * count
    if size * count > available:
        raise ValueError(
            f"{count} engines with tensor_parallel_size {size} need {size * count} devices, here are {available}: "
            "lower generation.vllm_cfg.num_replicas or tensor_parallel_size"
        )
    return [range(number * size, (number + 1) * size) for number in range(count)]
