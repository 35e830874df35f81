"""The event loop that an engine, its rollouts and its server share, on a thread of its own.

vLLM binds an engine to the loop that first used it, so everything that talks to the engine runs on
this loop. The trainer's thread only waits, always with a deadline.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from generation.engine.devices import this_device

T = TypeVar("T")


class EngineThread:
    """An asyncio event loop on a thread of its own, which runs until `close`, whatever its tasks
    raise.

    The thread uses the CUDA device of the thread that makes it.
    """

    def __init__(self, name: str = "engine-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = False
        self._use_device = this_device()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._use_device()
        asyncio.set_event_loop(self.loop)
        while not self._closing:
            try:
                self.loop.run_forever()
            # A task that raises these ends the loop, which other tasks still need
            # (Lib/asyncio/tasks.py, Task.__step).
            except (SystemExit, KeyboardInterrupt) as error:
                message = (
                    f"{type(error).__name__} in a task or callback of thread "
                    f"{threading.current_thread().name!r}"
                )
                self.loop.call_exception_handler({"message": message, "exception": error})

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; the future's `result(timeout)` gives its value or raises
        its error.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run a coroutine from another thread and return its result.

        After `timeout` seconds it is cancelled, and TimeoutError is raised. Its message begins with
        `what`, the action as a noun: "the rollout did not finish within 60 s".
        """
        return waited_for(self.submit(coroutine), timeout, what)

    def close(self, timeout: float = 5.0) -> None:
        """Cancel all tasks and stop the loop; a loop that is blocked keeps running until the
        process ends.
        """
        if self.loop.is_closed():
            return

        async def cancel_all() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        cancelled = self.submit(cancel_all())
        if cancelled in wait([cancelled], timeout).done:
            self._closing = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout)
            self.loop.close()


def waited_for(future: Future[T], timeout: float, what: str) -> T:
    """Return the result of a future.

    After `timeout` seconds it is cancelled, and TimeoutError is raised, whose message begins with
    `what`, as in `run`.
    """
    try:
        return future.result(timeout)
    except BaseException as error:
        still_running = not future.done()
        future.cancel()
        if isinstance(error, TimeoutError) and still_running:
            raise TimeoutError(f"{what} did not finish within {timeout:.0f} s") from error
        raise


async def as_ready(
    calls: Iterable[Awaitable[T]], timeout: float | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield each call's index and result as soon as it is ready. An error, or the end of iteration,
    cancels the rest.

    Use `contextlib.aclosing` where the iteration may end early: Python itself would close this
    generator at some later time. Raises TimeoutError after `timeout` seconds, if given.
    """

    async def indexed(index: int, call: Awaitable[T]) -> tuple[int, T]:
        return index, await call

    tasks = [asyncio.ensure_future(indexed(index, call)) for index, call in enumerate(calls)]
    try:
        for task in asyncio.as_completed(tasks, timeout=timeout):
            yield await task
    except TimeoutError as error:
        late = sum(not task.done() for task in tasks)
        if timeout is None or not late:
            raise
        raise TimeoutError(
            f"{late} of {len(tasks)} requests did not finish within {timeout:.0f} s"
        ) from error
    finally:
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
