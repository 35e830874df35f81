"""Run user code so that it disturbs nothing else: it may block, raise anything, or never return.

Some exceptions are instructions to the code that runs a task: `SystemExit` and `KeyboardInterrupt`
end an event loop, and `CancelledError` says that the task was cancelled, which an
`asyncio.TaskGroup` ignores silently. From user code they are failures like any other.
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
"""Seconds that cancelled code may take to end, for example to close an environment or to abort a
request.
"""

_LONGEST_ERROR = 1000  # characters of an error's text


class UserTimeout(TimeoutError):
    """User code took longer than it may. A `TimeoutError` of another class was raised by the code
    itself.
    """


class UserCodeError(RuntimeError):
    """User code raised something that is not an `Exception`; the text is that error's name and
    message.
    """


def described(error: BaseException) -> str:
    """Return an error's name and message as one text, even if its `__str__` fails."""
    try:
        text = str(error)
        if not isinstance(error, UserCodeError):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    except BaseException:
        text = f"{type(error).__name__}, whose message cannot be read"
    text = text.encode(errors="replace").decode()  # lone surrogates cannot be sent between processes
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


async def contained(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run user code as a separate task, which is cancelled only when the caller is, or after
    `timeout` seconds.

    When the caller is cancelled, the code has `ENDING_SECONDS` to end; after a timeout it is not
    waited for. Raises the code's `Exception`, UserCodeError for anything else that it raises, and
    UserTimeout after `timeout` seconds.
    """

    async def run() -> T:
        try:
            return await work
        except Exception:
            raise
        except BaseException as error:
            raise UserCodeError(described(error)) from error

    task = asyncio.ensure_future(run())
    # Nobody awaits it after a timeout
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    # A task that is cancelled at once has never started `work`
    task.add_done_callback(lambda _: work.close())
    try:
        finished, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=ENDING_SECONDS)
        raise
    if not finished:
        task.cancel()
        raise UserTimeout(f"took longer than {timeout:g} s")
    if task.cancelled():  # before it began, so that `run` could not catch the error
        raise UserCodeError("CancelledError: the task was cancelled by other code")
    return task.result()


async def call_user(function: Callable[[], Any], timeout: float | None = None) -> Any:
    """Call a plain function on a new thread, or an async one on this event loop. Return its result.

    After `timeout` seconds, an async function is cancelled and not waited for. A plain function
    cannot be stopped; its thread ends with the process at the latest. Raises as `contained` does.
    """

    async def call() -> Any:
        inner = getattr(function, "func", function)  # of a functools.partial
        result = function() if inspect.iscoroutinefunction(inner) else await _in_thread(function)
        return await result if inspect.isawaitable(result) else result

    return await contained(call(), timeout)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call a function on a new daemon thread. Functions that hang would use up a pool, which is
    joined at exit.
    """
    future: Future[Any] = Future()
    # So that it cannot be cancelled, but is only no longer awaited
    future.set_running_or_notify_cancel()
    use_device = this_device()

    def work() -> None:
        try:
            use_device()
            future.set_result(function())
        except StopIteration as error:  # asyncio's futures refuse it
            future.set_exception(RuntimeError(f"StopIteration: {error}"))
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # otherwise it would end the event loop that awaits the future
            future.set_exception(UserCodeError(described(error)))

    threading.Thread(target=work, daemon=True, name="user-code").start()
    return await asyncio.wrap_future(future)
