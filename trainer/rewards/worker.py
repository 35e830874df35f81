"""One process that calls reward functions, and the trainer's end of the pipe to it.

A pipe for each process, and no thread: whoever holds the worker waits for its answer on the event loop. The end of the
pipe tells of a death at once, and of the right one. (Pools that share one queue between processes guess whose work was
lost; pebble 5.2.3 loses an answer for good when an idle worker has died.)
"""

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from generation.trajectory import checked_reward
from trainer.rewards.loading import BoundReward, bind_rewards

Specs = list[tuple[str, dict[str, Any]]]


class Reply(NamedTuple):
    """What a call came to.

    Attributes:
        value: of a call: a number; of an extraction: a text or None.
        error: if there is none, a sentence that says why.
        returned: whether the function came to its end, be it with a value that cannot be a reward.
    """

    value: Any
    error: str = ""
    returned: bool = False


_START_SECONDS = 120.0
_LONGEST_ERROR = 300


class StartError(Exception):
    """A worker could not load what the trainer itself has loaded."""


class Worker:
    """A process that has loaded the reward functions. One caller at a time; it dies with the thread that started it."""

    def __init__(self, specs: Specs) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with CUDA and threads is no safe place
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, specs, os.getpid()), daemon=True, name="reward")
        self._process.start()
        theirs.close()
        self._ready = False

    def dead(self) -> bool:
        """Whether an idle worker has ended: it says nothing unasked, so all there can be to read is the pipe's end."""
        return self._ready and self._connection.poll()

    async def ask(self, index: int, completion: str, offered: dict[str, Any] | None, seconds: float) -> Reply:
        """Call function `index`, or have it extract where nothing is offered. The deadline begins when it is loaded.

        Raises TimeoutError past the deadline, EOFError when the process ends and StartError when it cannot load the
        functions; then the worker is good for nothing.
        """
        if not self._ready:
            await self._wait_until_loaded()
        self._connection.send((index, completion, offered))
        return await self._receive(seconds)

    def kill(self) -> int | None:
        """End the process and what it started, whatever they are doing. Gives the exit code."""
        if not self._connection.closed:
            # The process is not reaped yet, dead or alive, so the number is still its own.
            try:
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:  # it has not come to leave our process group
                self._process.kill()
            self._process.join()
            self._connection.close()
        return self._process.exitcode

    async def _wait_until_loaded(self) -> None:
        try:
            started = await self._receive(_START_SECONDS)
        except TimeoutError as late:
            raise StartError(f"was not loaded by its process within {_START_SECONDS:g} s") from late
        if started.error:
            raise StartError(f"could not be loaded by its process: {started.error}")
        self._ready = True

    async def _receive(self, seconds: float) -> Reply:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            await asyncio.wait_for(readable.wait(), seconds)
        finally:
            loop.remove_reader(self._connection.fileno())
        return Reply(*json.loads(self._connection.recv_bytes()))  # not pickle: users' code is at the other end


# What follows runs in the worker.


def _serve(connection: Connection, specs: Specs, parent: int) -> None:
    """Load the functions, say so, and answer calls until the trainer is gone."""
    _become_mortal_and_mute(parent)
    try:
        rewards = bind_rewards(specs)
    except BaseException as error:
        _send(connection, Reply(0.0, _text(error)))
        return
    _send(connection, Reply(0.0))
    while True:
        try:
            index, completion, offered = connection.recv()
        except EOFError:
            return
        _send(connection, _reply(rewards[index], completion, offered))


def _become_mortal_and_mute(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: even code stuck in C dies with the trainer
    if os.getppid() != parent:
        os._exit(1)  # the trainer was gone before that
    os.setpgid(0, 0)  # so that what a reward function starts can be killed with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(devnull, descriptor)


def _reply(reward: BoundReward, completion: str, offered: dict[str, Any] | None) -> Reply:
    """Call one function; whatever it raises or returns, a plain value and a sentence go back and nothing else."""
    try:
        if offered is None:
            extracted = reward.extract(completion)
            return Reply(None if extracted is None else str(extracted), returned=True)
        value = reward(completion, offered)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        return Reply(0.0, f"raised {type(error).__name__}: {_text(error)} ({where})")
    try:
        return Reply(checked_reward(value, "returned"), returned=True)
    except BaseException as error:
        return Reply(0.0, _text(error), returned=True)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_ERROR]
    except BaseException:
        return "a message that cannot be read"


def _send(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(json.dumps(reply).encode())
