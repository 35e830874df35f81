"""One vLLM engine for callers that block: the asynchronous worker on an event loop of its own."""

from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Self, TypeVar

from generation.compat.load_balancer import EngineLoad
from generation.compat.nemo.batch import (
    BatchedDataDict,
    GenerationDatumSpec,
    GenerationOutputSpec,
    Row,
    padded_output,
    rows_of,
    stop_strings_of,
    text_output,
    texts_of,
)
from generation.compat.nemo.config import VllmConfig
from generation.engine.engine import VllmAsyncGenerationWorker
from generation.engine.lifecycle import Memory
from generation.engine.thread import EngineThread
from generation.exact_ids import Generation

T = TypeVar("T")


class VllmGenerationWorker:
    """A started engine. Every method may be called from any thread but the engine's, and waits `timeout` seconds.

    Attributes:
        engine: the asynchronous worker, for coroutines on the thread's loop.
        load: the requests submitted here that have not finished.
    """

    def __init__(
        self,
        config: VllmConfig,
        device_indices: Sequence[int] = (),
        seed: int | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Start the engine on these CUDA devices, or on CPU where there are none; `seed` replaces the config's."""
        self.timeout, self.load = timeout, EngineLoad()
        self.engine = VllmAsyncGenerationWorker.from_config(config, device_indices, seed)
        self.thread = EngineThread()
        try:
            self._wait(self.engine.start(), f"starting the engine for {config['model_name']}")
            self._wait(self.engine.post_init_async(), "preparing the engine")
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engine's loop, counted as a request until it ends."""
        self.load.submitted()
        future = self.thread.submit(coroutine)
        future.add_done_callback(lambda _: self.load.finished())
        return future

    def answer(self, row: Row, greedy: bool, call: int) -> Future[Generation]:
        """Start to generate for one sample of a batch; see `VllmAsyncGenerationWorker.answer`."""
        return self.submit(self.engine.answer(row, greedy, call))

    def answer_text(self, prompt: str, stop: list[str], place: int, greedy: bool, call: int) -> Future[tuple[str, str]]:
        """Start to generate for one text."""
        return self.submit(self.engine.answer_text(prompt, stop, place, greedy, call))

    def get_num_unfinished_requests(self) -> int:
        """Requests submitted and not finished."""
        return self.load.get_num_unfinished_requests()

    def get_cache_usage(self) -> float | None:
        """Share of the KV cache in use; None, since nobody reports it to this worker."""
        return self.load.get_cache_usage()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """One response to every prompt; see `GenerationInterface.generate`."""
        rows, call = rows_of(data, self.engine.pad_token_id), self.engine.next_call()
        self.engine.state.usable_version()
        futures = [self.answer(row, greedy, call) for row in rows]
        return padded_output(data, collected(futures, self.timeout), self.engine.pad_token_id)

    def generate_text(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """{"texts": responses, "errors": what went wrong} for the texts in `data["prompts"]`."""
        prompts, call = texts_of(data, self.engine.has_tokenizer), self.engine.next_call()
        self.engine.state.usable_version()
        stops = stop_strings_of(data, len(prompts))
        futures = [self.answer_text(p, s, i, greedy, call) for i, (p, s) in enumerate(zip(prompts, stops, strict=True))]
        return text_output(collected(futures, self.timeout))

    def report_device_id(self) -> list[str]:
        """The device of each of the engine's workers."""
        return self._wait(self.engine.report_device_id_async(), "asking the workers for their devices")

    def init_collective(self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int) -> None:
        """Join the process group that weights are broadcast in, with all its other ranks."""
        join = self.engine.init_collective_async(rank_prefix, ip, port, world_size, train_world_size)
        self._wait(join, "joining the process group of the weights")

    def prepare_refit_info(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce the weights that will be broadcast: name -> (shape, dtype)."""
        self._wait(self.engine.prepare_refit_info_async(state_dict_info), "announcing weights")

    def update_weights_via_ipc_zmq(self, session: int = 0) -> bool:
        """Receive one update from the trainer's ranks on the workers' devices. True; a failure raises."""
        return self._wait(self.engine.update_weights_via_ipc_zmq_async(session), "a weight update")

    def update_weights_from_collective(self) -> bool:
        """Receive one update by broadcast. True; a failure raises."""
        return self._wait(self.engine.update_weights_from_collective_async(), "a weight update")

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._wait(self.engine.reset_prefix_cache_async(), "resetting the prefix cache")

    def sleep(self, level: int = 2) -> None:
        """Give memory back, if the engine is not asleep already; see `VllmAsyncGenerationWorker.sleep_async`."""
        if self.engine.state.memory is not Memory.ASLEEP:
            self._wait(self.engine.sleep_async(level), "putting the engine to sleep")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what is not held already of the memory called `tags`; all of it by default."""
        held = {Memory.AWAKE: {"weights", "kv_cache"}, Memory.WEIGHTS: {"weights"}}
        wanted = ("weights", "kv_cache") if tags is None else tags
        missing = [tag for tag in wanted if tag not in held.get(self.engine.state.memory, set())]
        self._wait(self.engine.wake_up_async(missing), "waking the engine")

    def shutdown(self) -> None:
        """Stop the server, the engine's processes and the loop; safe to call twice."""
        try:
            if self.engine.server is not None:
                self._wait(self.engine.shutdown(), "stopping the engine and its server")
        finally:
            self.engine.close()
            self.thread.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self.thread.run(coroutine, self.timeout, what)


def collected(futures: Sequence[Future[T]], timeout: float) -> list[T]:
    """The results in their order. The first error, or `timeout` seconds, end the others."""
    done, unfinished = wait(futures, timeout, return_when=FIRST_EXCEPTION)
    failed = next((future for future in futures if future in done and future.exception() is not None), None)
    for future in unfinished:
        future.cancel()
    if failed is not None:
        failed.result()
    if unfinished:
        raise TimeoutError(f"{len(unfinished)} of {len(futures)} requests did not finish within {timeout:.0f} s")
    return [future.result() for future in futures]
