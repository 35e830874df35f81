"""One vLLM engine for callers that block: the asynchronous worker on an event loop of its own."""

from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Self, TypeVar

from generation.compat.load_balancer import EngineLoad
from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.compat.nemo.batch import (
    BatchedDataDict,
    GenerationDatumSpec,
    GenerationOutputSpec,
    Row,
    padded_output,
    rows_of,
    text_output,
    text_rows,
)
from generation.compat.nemo.config import VllmConfig
from generation.engine.engine import Leader
from generation.engine.lifecycle import Memory
from generation.exact_ids import Generation

T = TypeVar("T")


class VllmGenerationWorker(EngineLoad):
    """A started engine. Every method may be called from any thread except the engine's, and waits `timeout` seconds.

    Attributes:
        engine: the asynchronous worker, for coroutines on the thread's loop.
        thread: its event loop.
    """

    def __init__(
        self, config: VllmConfig, device_indices: Sequence[int] = (), seed: int | None = None, timeout: float = 1800.0
    ) -> None:
        """Start the engine on these CUDA devices, or on CPU where there are none; `seed` replaces the config's."""
        super().__init__()
        self.timeout = timeout
        self.engine = VllmAsyncGenerationWorker.from_config(config, device_indices, seed)
        self._leader = Leader.start(self.engine, timeout)
        self.thread = self._leader.thread
        try:
            self._wait(self.engine.post_init_async(), "preparing the engine")
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _counted(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engine's loop, counted as a request until it ends."""
        self.submitted()
        future = self.thread.submit(coroutine)
        future.add_done_callback(lambda _: self.finished())
        return future

    def answer(self, row: Row, greedy: bool, call: int) -> Future[Generation]:
        """Start to generate for one sample of a batch; see `VllmAsyncGenerationWorker.answer`."""
        return self._counted(self.engine.answer(row, greedy, call))

    def answer_text(self, row: Row, greedy: bool, call: int) -> Future[tuple[str, str]]:
        """Start to generate for one text."""
        return self._counted(self.engine.answer_text(row, greedy, call))

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """One response to every prompt; see `GenerationInterface.generate`."""
        rows, call = rows_of(data, self.engine.pad_token_id), self.engine.next_call()
        self.engine.state.usable_version()
        completions = collected([self.answer(row, greedy, call) for row in rows], self.timeout)
        return padded_output(data, completions, self.engine.pad_token_id)

    def generate_text(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """{"texts": responses, "errors": what went wrong} for the texts in `data["prompts"]`."""
        rows, call = text_rows(data, self.engine.has_tokenizer), self.engine.next_call()
        self.engine.state.usable_version()
        return text_output(collected([self.answer_text(row, greedy, call) for row in rows], self.timeout))

    def __getattr__(self, name: str) -> Any:
        """What the asynchronous worker has as `NAME_async`, blocking: `report_device_id`, `init_collective`,
        `prepare_refit_info`, `update_weights_via_ipc_zmq`, `update_weights_from_collective`, `reset_prefix_cache`.
        """
        method = None if "engine" not in self.__dict__ else getattr(self.engine, f"{name}_async", None)
        if method is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda *args, **kwargs: self._wait(method(*args, **kwargs), name.replace("_", " "))

    def sleep(self, level: int = 2) -> None:
        """Give memory back, if the engine is not asleep already; see `Engine.sleep`."""
        if self.engine.state.memory is not Memory.ASLEEP:
            self._wait(self.engine.sleep(level), "putting the engine to sleep")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what is not held already of the memory called `tags`; all of it by default."""
        held = {Memory.AWAKE: {"weights", "kv_cache"}, Memory.WEIGHTS: {"weights"}}
        wanted = ("weights", "kv_cache") if tags is None else tags
        missing = [tag for tag in wanted if tag not in held.get(self.engine.state.memory, set())]
        self._wait(self.engine.wake(missing), "waking the engine")

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
    failed = next((future for future in futures if future in done and future.exception() is not None), None)
    for future in unfinished:
        future.cancel()
    if failed is not None:
        failed.result()
    if unfinished:
        raise TimeoutError(f"{len(unfinished)} of {len(futures)} requests did not finish within {timeout:.0f} s")
    return [future.result() for future in futures]
