"""Calls of code that is not ours, with a deadline: it may block, raise anything, or never come back."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call_user(function: Callable[[], Any], timeout: float) -> Any:
    """The result of a plain function, run on a thread of its own, or of an async one, run on this loop.

    A plain function that is late keeps its thread, which nothing can stop, but which ends with the process; an async
    one is cancelled, and not waited for.

    Raises:
        TimeoutError: it took longer than `timeout` seconds.
        Exception: what the function raised.
    """
    task = asyncio.ensure_future(_run(function))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # one that is late may fail unheard
    try:
        finished, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not finished:
        task.cancel()
        raise TimeoutError(f"took longer than {timeout:g} s")
    return task.result()


async def _run(function: Callable[[], Any]) -> Any:
    inner = getattr(function, "func", function)  # of a functools.partial
    try:
        result = function() if inspect.iscoroutinefunction(inner) else await _in_thread(function)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, and the engine with it
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _in_thread(function: Callable[[], Any]) -> Any:
    """A daemon thread for each call: a pool would be used up by functions that hang, and waited for at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            result = function()
        except StopIteration as error:  # which a future does not carry
            failure = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            failure = error
        except BaseException as error:  # SystemExit, which would end the loop
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name="user-code").start()
    return await future
