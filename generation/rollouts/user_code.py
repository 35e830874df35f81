"""Code that is not ours, kept from disturbing anything else: it may block, raise anything, or never return.

Some exceptions are instructions to whoever runs the code: `SystemExit` and `KeyboardInterrupt` end an event loop, and a
`CancelledError` says that the caller was cancelled, which an `asyncio.TaskGroup` passes over in silence. From user code
they are failures like any other.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from generation.engine.devices import this_device

T = TypeVar("T")

ENDING_SECONDS = 5.0
"""How long code that has been cancelled may take to end: to close an environment, to abort a request."""

_LONGEST_ERROR = 1000  # characters of an error's text


class Late(TimeoutError):
    """User code took longer than it may; a `TimeoutError` of another class is its own."""


class UserCodeError(RuntimeError):
    """User code raised something that is not an `Exception`; the text is its name and its message."""


def described(error: BaseException) -> str:
    """An error in one text, by name, whatever its own `__str__` does."""
    try:
        text = str(error)
        if not isinstance(error, UserCodeError):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    except BaseException:
        text = f"{type(error).__name__}, whose message cannot be read"
    text = text.encode(errors="replace").decode()  # lone surrogates do not travel
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


async def contained(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run user code as a task of its own, which is cancelled only if the caller is, or when time is up.

    When the caller is cancelled, so is the work, and has `ENDING_SECONDS` to end. Work that is late is not waited for.
    Raises what it raised, UserCodeError for what is not an `Exception`, and Late after `timeout` seconds.
    """

    async def run() -> T:
        try:
            return await work
        except Exception:
            raise
        except BaseException as error:
            raise UserCodeError(described(error)) from error

    task = asyncio.ensure_future(run())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # one that is late may fail unheard
    task.add_done_callback(lambda _: work.close())  # one that is cancelled at once has not begun
    try:
        finished, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=ENDING_SECONDS)
        raise
    if not finished:
        task.cancel()
        raise Late(f"took longer than {timeout:g} s")
    if task.cancelled():  # before it began: nobody was there to catch it
        raise UserCodeError("CancelledError: the task was cancelled by somebody else")
    return task.result()


async def call_user(function: Callable[[], Any], timeout: float | None = None) -> Any:
    """The result of a plain function, run on a thread of its own, or of an async one, run on this loop.

    A plain function that is late keeps its thread, which nothing can stop, but which ends with the process; an async
    one is cancelled, and not waited for. Raises as `contained` does.
    """

    async def call() -> Any:
        inner = getattr(function, "func", function)  # of a functools.partial
        result = function() if inspect.iscoroutinefunction(inner) else await _in_thread(function)
        return await result if inspect.isawaitable(result) else result

    return await contained(call(), timeout)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """A daemon thread for each call: a pool would be used up by functions that hang, and waited for at exit."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on it is never cancelled, only no longer awaited
    use_device = this_device()

    def work() -> None:
        try:
            use_device()
            future.set_result(function())
        except StopIteration as error:  # which asyncio's futures do not carry
            future.set_exception(RuntimeError(f"StopIteration: {error}"))
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # would be raised by the loop that awaits the future
            future.set_exception(UserCodeError(described(error)))

    threading.Thread(target=work, daemon=True, name="user-code").start()
    return await asyncio.wrap_future(future)
