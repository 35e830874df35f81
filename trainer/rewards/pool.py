"""Reward functions run in processes of their own, where they may raise, hang or die.

Each call has a deadline after which its process is killed and replaced, so a loop inside C code or a lost socket costs
one answer's reward and nothing else. Threads could not give that: nothing can stop them. A process may also be ended
from outside, as by the kernel when memory is short: its call is made once more, so that rewards do not depend on that.

Each process has a pipe of its own, and no thread: the caller waits for the answer on the event loop. The end of the
pipe tells of a death at once, and of the right one. (Pools that share one queue between processes guess whose work was
lost; pebble 5.2.3 loses an answer when an idle worker has died.)
"""

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import Any, NamedTuple

from generation.trajectory import Trajectory, checked_reward
from trainer.config.schema import DataConfig, RewardConfig
from trainer.rewards.loading import BoundReward, bind_rewards

_START_SECONDS = 120.0
_LONGEST_ERROR = 300  # characters
Specs = list[tuple[str, dict[str, Any]]]


class RewardError(RuntimeError):
    """Too many calls of a reward function failed."""


@dataclass
class RewardResult:
    """One answer's reward."""

    reward: float  # the weighted sum; `reward.error_reward` where a function has failed
    parts: dict[str, float]  # each function's own value
    error: str = ""  # what went wrong, if anything did
    unusable: bool = False  # a function's value, or the sum, cannot be a reward: nothing can be learned from the answer


class RewardPool:
    """Scores answers with the recipe's reward functions. A context manager; leaving it leaves no process.

    The functions are loaded and checked here first, so that a wrong name is an error before a model loads. All answers
    are scored on one event loop. Enter the pool on a thread that outlives it: workers die with the thread that started
    them.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Load and check the functions. Raises UserError naming the one that does not fit."""
        self._config = config
        self._specs = [(function.name, function.kwargs) for function in config.functions]
        bound = bind_rewards(self._specs)
        self.labels = [reward.label for reward in bound]
        self._text_votes = not bound or bound[0].extract is str.strip
        self._asked_for = frozenset[str]().union(*(reward.keywords for reward in bound))
        self._takes_answer = any(reward.takes_answer for reward in bound)
        self.weights = dict(zip(self.labels, (function.weight for function in config.functions), strict=True))
        self._counts: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}
        self._workers: list[_Worker] = []
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()

    def columns(self, data: DataConfig) -> DataConfig:
        """The section with `answer_key` null where that is the default and no function takes `answer`."""
        default = data.answer_key == DataConfig.model_fields["answer_key"].default
        return data.model_copy(update={"answer_key": None}) if default and not self._takes_answer else data

    def __enter__(self) -> "RewardPool":
        """Start the workers, which import the functions meanwhile."""
        for _ in range(self._config.workers):
            self._add_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        while self._workers:
            self._workers.pop().kill()

    async def score(
        self,
        *,
        prompt: str,
        completion: str,
        row: dict[str, Any],
        finish_reason: str,
        trajectory: Trajectory | None = None,
    ) -> RewardResult:
        """Score one answer. Never raises because of a reward function: its failure is in the result and is counted.

        `row` is the dataset's row; functions see `row["answer"]` as `answer`. The trajectory, turns and tool replies
        included, travels to the processes only if a function asks for it; so do its images, which it sees as Pillow's.
        """
        offered = {"prompt": prompt, "row": row, "answer": row.get("answer"), "finish_reason": finish_reason}
        offered["trajectory"] = trajectory if "trajectory" in self._asked_for else None
        offered["images"] = trajectory.images if trajectory is not None and "images" in self._asked_for else ()
        replies = await asyncio.gather(*(self._call(index, completion, offered) for index in range(len(self.labels))))
        outcomes = dict(zip(self.labels, replies, strict=True))
        errors = {label: reply.error for label, reply in outcomes.items() if reply.error}
        self._count(errors)
        parts = {label: reply.value for label, reply in outcomes.items() if not reply.error}
        if errors:
            message = "; ".join(f"{label} {error}" for label, error in errors.items())
            unusable = any(outcomes[label].returned for label in errors)
            return RewardResult(self._config.error_reward, parts, message, unusable)
        try:
            weighted = [
                checked_reward(w * parts[label], f"{label} times its weight is") for label, w in self.weights.items()
            ]
            return RewardResult(checked_reward(sum(weighted), "the sum of all is"), parts)
        except ValueError as error:
            return RewardResult(self._config.error_reward, parts, str(error), unusable=True)

    async def extract(self, completion: str) -> str | None:
        """The answer that the first function finds in a completion, for the vote; None: there is none, or it failed.

        Where that is the text, white space around it left out, no process is asked.
        """
        if self._text_votes:
            return completion.strip()
        reply = await self._call(0, completion, None)
        if reply.error:
            self._count({self.labels[0]: f"{reply.error} while extracting the answer"})
        return None if reply.error else reply.value

    def take_counts(self) -> dict[str, float]:
        """Calls and errors since the last time, under the same keys on every rank: they can be summed over ranks."""
        keys = ["reward/calls", *(f"reward/errors/{label}" for label in self.labels)]
        counts = {key: float(self._counts[key]) for key in keys}
        self._counts.clear()
        return counts

    def check_error_rate(self, counts: dict[str, float]) -> None:
        """Raise RewardError when a function failed in more than `max_error_rate` of its calls.

        `counts` are those of `take_counts`, summed over ranks.
        """
        for label in self.labels:
            calls, errors = counts["reward/calls"], counts[f"reward/errors/{label}"]
            if errors > self._config.max_error_rate * calls:
                raise RewardError(
                    f"reward {label!r} failed in {errors:.0f} of {calls:.0f} calls ({errors / calls:.0%}), more than "
                    f"reward.max_error_rate={self._config.max_error_rate:g} allows; first error: it "
                    f"{self._first_errors.get(label, 'failed on another rank')}"
                )

    def _count(self, errors: dict[str, str]) -> None:
        self._counts["reward/calls"] += 1
        for label, error in errors.items():
            self._counts[f"reward/errors/{label}"] += 1
            self._first_errors.setdefault(label, error)

    async def _call(self, index: int, completion: str, offered: dict[str, Any] | None) -> "_Reply":
        """Call one function, or extract; once more, in a fresh process, where the first ended before it answered."""
        asked = 0
        while True:
            asked += 1
            worker = await self._next_worker()
            answered = False
            try:
                reply = await worker.ask(index, completion, offered, self._config.timeout_s)
                answered = True
                return reply
            except TimeoutError:
                return _Reply(0.0, f"took longer than reward.timeout_s={self._config.timeout_s:g}")
            except _StartError as error:
                return _Reply(0.0, str(error))
            except (EOFError, OSError):
                code = worker.kill()
                if asked == 2:
                    return _Reply(0.0, f"ended its process with exit code {code}, as when it was asked before")
            except (PicklingError, TypeError, AttributeError, ValueError) as error:
                return _Reply(0.0, f"cannot be given this row: {type(error).__name__}: {error}")
            finally:
                if answered:
                    self._idle.put_nowait(worker)
                else:
                    self._replace(worker)

    async def _next_worker(self) -> "_Worker":
        """The next that is free and alive."""
        while self._workers:
            worker = await self._idle.get()
            if not worker.dead():
                return worker
            self._replace(worker)
        raise RuntimeError("this reward pool is not open: use it in a with statement")

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        if worker in self._workers:  # else the pool has been closed meanwhile
            self._workers.remove(worker)
            self._add_worker()

    def _add_worker(self) -> None:
        self._workers.append(_Worker(self._specs))
        self._idle.put_nowait(self._workers[-1])


class _Reply(NamedTuple):
    """The outcome of a call."""

    value: Any  # of a call: a number; of an extraction: a text or None
    error: str = ""  # a sentence that says why there is no value; otherwise empty
    returned: bool = False  # the function came to its end, if only with a value that cannot be a reward


class _StartError(Exception):
    """A worker could not load the functions that the trainer itself has loaded."""


class _Worker:
    """A process that has loaded the reward functions. One caller at a time; it dies with the thread that started it."""

    def __init__(self, specs: Specs) -> None:
        context = multiprocessing.get_context("spawn")  # a process with CUDA and threads cannot safely be forked
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, specs, os.getpid()), daemon=True, name="reward")
        self._process.start()
        theirs.close()
        self._ready = False

    def dead(self) -> bool:
        """True if an idle worker has ended: it sends nothing unasked, so only the pipe's end can be there to read."""
        return self._ready and self._connection.poll()

    async def ask(self, index: int, completion: str, offered: dict[str, Any] | None, seconds: float) -> _Reply:
        """Call function `index`, or have it extract where nothing is offered. The deadline begins when it is loaded.

        Raises TimeoutError past the deadline, EOFError when the process ends and _StartError when it cannot load the
        functions; then the worker cannot be used again.
        """
        if not self._ready:
            try:
                started = await self._receive(_START_SECONDS)
            except TimeoutError as late:
                raise _StartError(f"was not loaded by its process within {_START_SECONDS:g} s") from late
            if started.error:
                raise _StartError(f"could not be loaded by its process: {started.error}")
            self._ready = True
        self._connection.send((index, completion, offered))
        return await self._receive(seconds)

    def kill(self) -> int | None:
        """End the process and all it started, whatever they are doing. Gives the exit code."""
        if not self._connection.closed:
            # The process is not reaped yet, dead or alive, so the number is still its own.
            try:
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:  # it has not left our process group yet
                self._process.kill()
            self._process.join()
            self._connection.close()
        return self._process.exitcode

    async def _receive(self, seconds: float) -> _Reply:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            await asyncio.wait_for(readable.wait(), seconds)
        finally:
            loop.remove_reader(self._connection.fileno())
        return _Reply(*json.loads(self._connection.recv_bytes()))  # not pickle: users' code is at the other end


# The rest runs in the worker.


def _serve(connection: Connection, specs: Specs, parent: int) -> None:
    """Load the functions, say so, and answer calls until the trainer is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: even code stuck in C dies with the trainer
    if os.getppid() != parent:
        os._exit(1)  # the trainer was gone before that
    os.setpgid(0, 0)  # so that the processes of a reward function can be killed with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(devnull, descriptor)

    def send(reply: _Reply) -> None:
        connection.send_bytes(json.dumps(reply).encode())

    try:
        rewards = bind_rewards(specs)
    except BaseException as error:
        send(_Reply(0.0, _text(error)))
        return
    send(_Reply(0.0))
    while True:
        try:
            index, completion, offered = connection.recv()
        except EOFError:
            return
        send(_reply(rewards[index], completion, offered))


def _reply(reward: BoundReward, completion: str, offered: dict[str, Any] | None) -> _Reply:
    """Call one function; whatever it raises or returns, a plain value and a sentence go back and nothing else."""
    try:
        if offered is None:
            extracted = reward.extract(completion)
            return _Reply(None if extracted is None else str(extracted), returned=True)
        value = reward(completion, offered)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        return _Reply(0.0, f"raised {type(error).__name__}: {_text(error)} ({where})")
    try:
        return _Reply(checked_reward(value, "returned"), returned=True)
    except BaseException as error:
        return _Reply(0.0, _text(error), returned=True)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_ERROR]
    except BaseException:
        return "a message that cannot be read"
