"""Run reward functions in processes of their own, where they may raise, hang or die.

Each call has a deadline, after which its process is killed and replaced, so an endless loop in C
code or a lost socket costs one answer's reward and nothing else. Threads would not do, since they
cannot be stopped. If a process is killed from outside, for example by the kernel when memory is
short, its call is made once more, so that rewards do not depend on such events.

Each process has a socket of its own and no thread: the caller waits for the answer on the event
loop. The end of a socket reports the death of its process at once. (Pools that share one queue
between processes have to guess whose work was lost; pebble 5.2.3 loses an answer when an idle
worker has died.)

    rank ── watcher ── worker ── processes that a reward function starts

A packet counts only if the kernel names the worker as its sender and if it answers the last
question, so a process that a function has forked cannot answer. The watcher runs no user code. It
adopts all processes below it that lose their parent, and kills them when the worker, the rank or
the thread that started the worker is gone.
"""

import asyncio
import ctypes
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import struct
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from types import NoneType
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import psutil

from generation.trajectory import Trajectory, checked_reward
from trainer.config.schema import DataConfig, RewardConfig
from trainer.rewards.loading import BoundReward, bind_rewards

_START_SECONDS = 120.0
# Time for a watcher to end all processes below it, some of which may be stuck in the kernel
_END_SECONDS = 5.0
_LONGEST_ERROR = 300  # characters
_LONGEST_REPLY = 128 * 1024  # bytes; a longer packet is truncated and ignored
_PIECE = 32 * 1024  # bytes of a question in one packet
_HEADER = struct.Struct("<QQ")  # a question's number and its size in bytes
# The process, user and group of a packet's sender, as the kernel reports them
_CREDENTIALS = struct.Struct("3i")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
Specs = list[tuple[str, dict[str, Any]]]


class RewardError(RuntimeError):
    """Too many calls of a reward function failed."""


@dataclass
class RewardResult:
    """One answer's reward, or the reasons why it has none."""

    reward: float  # the weighted sum; `reward.error_reward` if a function failed
    parts: dict[str, float]  # the value of each function that has neither failed nor abstained
    error: str = ""  # a sentence about the failure, if there was one
    # True if there is no reward to learn from, so that the answer leaves its group
    unusable: bool = False
    # Failed functions: timeout, raised, died or unusable
    failures: dict[str, str] = field(default_factory=dict)
    # True if all functions returned None, so that none of them has judged the answer
    abstained: bool = False


class RewardPool:
    """Scores answers with the recipe's reward functions; a context manager that starts and ends the
    workers.

    The constructor loads and checks the functions, so that a wrong name is an error before a model
    loads. All answers are scored on one event loop. Enter the pool on a thread that outlives it,
    since workers die with the thread that started them.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Load and check the functions. Raises UserError naming a function that cannot be used."""
        self._config = config
        self._specs = [(function.name, function.kwargs) for function in config.functions]
        bound = bind_rewards(self._specs)
        self.functions = bound
        self.labels = [reward.label for reward in bound]
        self._text_votes = not bound or bound[0].extract is str.strip
        self._asked_for = frozenset[str]().union(*(reward.keywords for reward in bound))
        self._takes_answer = any(reward.takes_answer for reward in bound)
        self.weights = dict(
            zip(self.labels, (function.weight for function in config.functions), strict=True)
        )
        self._counts: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}
        self._workers: list[_Worker] = []
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()

    def columns(self, data: DataConfig) -> DataConfig:
        """Return the section, with `answer_key` set to null if it has its default and no function
        takes `answer`.
        """
        default = data.answer_key == DataConfig.model_fields["answer_key"].default
        return (
            data.model_copy(update={"answer_key": None}) if default and not self._takes_answer else data
        )

    def __enter__(self) -> "RewardPool":
        """Start the workers, which import the functions in the background."""
        for _ in range(self._config.workers):
            self._add_worker()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the workers, even in the middle of a call."""
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
        opened: str = "",
    ) -> RewardResult:
        """Score one answer. It never raises because of a reward function: a failure is in the
        result and is counted.

        `row` is the dataset's row; functions get `row["answer"]` as `answer`. `opened` is the tag
        that the chat template has opened before the completion. The trajectory, with its turns and
        tool replies, is sent to a process only if a function asks for it; so are the images, which
        become Pillow images.
        """
        offered = {
            "prompt": prompt,
            "row": row,
            "answer": row.get("answer"),
            "finish_reason": finish_reason,
        }
        offered["opened"] = opened
        offered["trajectory"] = trajectory if "trajectory" in self._asked_for else None
        offered["images"] = (
            trajectory.images if trajectory is not None and "images" in self._asked_for else ()
        )
        replies = await asyncio.gather(
            *(self._call(index, completion, offered) for index in range(len(self.labels)))
        )
        outcomes = dict(zip(self.labels, replies, strict=True))
        errors = {label: reply.error for label, reply in outcomes.items() if reply.error}
        self._count(errors)
        parts = {label: reply.value for label, reply in outcomes.items() if reply.value is not None}
        if errors:
            message = "; ".join(f"{label} {error}" for label, error in errors.items())
            failures: dict[str, str] = {label: outcomes[label].kind for label in errors}
            unusable = self._config.failed == "leave_out" or "unusable" in failures.values()
            return RewardResult(self._config.error_reward, parts, message, unusable, failures)
        if self.labels and not parts:
            return RewardResult(0.0, {}, abstained=True)
        try:
            shares = ((label, self.weights[label] * part) for label, part in parts.items())
            weighted = [checked_reward(share, f"{label} times its weight is") for label, share in shares]
            return RewardResult(checked_reward(sum(weighted), "the sum of all is"), parts)
        except ValueError as error:
            return RewardResult(self._config.error_reward, parts, str(error), unusable=True)

    async def extract(self, completion: str) -> str | None:
        """Return a completion's vote, by the first function's extractor; None if it finds none or
        fails.

        By default that is the text without white space around it, for which no process is called.
        """
        if self._text_votes:
            return completion.strip()
        reply = await self._call(0, completion, None)
        if reply.error:
            self._count({self.labels[0]: f"{reply.error} while extracting the answer"})
        return None if reply.error else reply.value

    def take_counts(self) -> dict[str, float]:
        """Return and reset the counts of calls and errors. All ranks have the same keys, so counts
        can be summed.
        """
        keys = ["reward/calls", *(f"reward/errors/{label}" for label in self.labels)]
        counts = {key: float(self._counts[key]) for key in keys}
        self._counts.clear()
        return counts

    def check_error_rate(self, counts: dict[str, float]) -> None:
        """Raise RewardError if a function failed in more than `max_error_rate` of its calls.

        `counts` are the counts of `take_counts`, summed over ranks.
        """
        for label in self.labels:
            calls = counts["reward/calls"]
            errors = counts[f"reward/errors/{label}"]
            if errors > self._config.max_error_rate * calls:
                raise RewardError(
                    f"reward {label!r} failed in {errors:.0f} of {calls:.0f} calls "
                    f"({errors / calls:.0%}), more than "
                    f"reward.max_error_rate={self._config.max_error_rate:g} allows; first error: it "
                    f"{self._first_errors.get(label, 'failed on another rank')}"
                )

    def _count(self, errors: dict[str, str]) -> None:
        self._counts["reward/calls"] += 1
        for label, error in errors.items():
            self._counts[f"reward/errors/{label}"] += 1
            self._first_errors.setdefault(label, error)

    async def _call(self, index: int, completion: str, offered: dict[str, Any] | None) -> "_Reply":
        """Call one function, or its extractor; if the process ends before it answers, call once
        more in a new one.
        """
        for again in (False, True):
            worker = await self._next_worker()
            reply = None
            try:
                reply = await worker.ask(index, completion, offered, self._config.timeout_s)
                return reply
            except TimeoutError:
                return _Reply(
                    error=f"took longer than reward.timeout_s={self._config.timeout_s:g}", kind="timeout"
                )
            except _StartError as error:
                return _Reply(error=str(error), kind="died")
            except (EOFError, OSError):
                code = worker.kill()
                if again:
                    sentence = f"ended its process with exit code {code}, as when it was asked before"
                    return _Reply(error=sentence, kind="died")
            except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
                sentence = f"cannot be given this row: {type(error).__name__}: {error}"
                return _Reply(error=_valid(sentence), kind="raised")
            finally:
                if reply is not None:
                    self._idle.put_nowait(worker)
                else:
                    self._replace(worker)
        raise AssertionError("the second call has an outcome")

    async def _next_worker(self) -> "_Worker":
        """Wait for a worker that is idle and alive, and return it."""
        while self._workers:
            worker = await self._idle.get()
            if not worker.dead():
                return worker
            self._replace(worker)
        raise RuntimeError("this reward pool is closed: use it in a with statement")

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        if worker in self._workers:  # otherwise the pool has been closed meanwhile
            self._workers.remove(worker)
            self._add_worker()

    def _add_worker(self) -> None:
        self._workers.append(_Worker(self._specs))
        self._idle.put_nowait(self._workers[-1])


class _Reply(NamedTuple):
    """The outcome of a call, sent as JSON and not pickled, since user code runs in the worker."""

    number: int = 0  # number of the question; 0 for the start
    # A number for a call, a text for an extraction; None: the function abstains, or extracts
    # nothing
    value: Any = None
    error: str = ""  # a sentence that says why there is no value; otherwise empty
    kind: Literal["", "timeout", "raised", "died", "unusable"] = ""  # kind of the error


class _StartError(Exception):
    """A worker could not load functions that the trainer itself has loaded."""


class _Worker:
    """A process with the loaded reward functions, for one caller at a time; it dies with the thread
    that started it.
    """

    def __init__(self, specs: Specs) -> None:
        # A process with CUDA and threads cannot safely be forked
        context = multiprocessing.get_context("spawn")
        # Packets arrive whole or not at all, so the reader never waits for the rest of a message.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._process = context.Process(
            target=_serve, args=(theirs, specs, os.getpid()), daemon=True, name="reward"
        )
        self._process.start()
        theirs.close()
        self._pid: int | None = None  # process number of the worker, which is the watcher's child
        self._ready = False

    def dead(self) -> bool:
        """Return True if an idle worker has ended, or if a process below it has sent an unexpected
        packet.
        """
        if not self._ready:
            return False
        with suppress(ConnectionError):
            try:
                self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
        return True

    async def ask(
        self, index: int, completion: str, offered: dict[str, Any] | None, seconds: float
    ) -> _Reply:
        """Call function `index`, or its extractor if `offered` is None. The deadline begins when
        functions are loaded.

        Raises TimeoutError past the deadline, EOFError if the process ends, and _StartError if it
        cannot load the functions. After any of these the worker cannot be used again.
        """
        if not self._ready:
            try:
                async with asyncio.timeout(_START_SECONDS):
                    started = await self._receive(0, NoneType)
            except TimeoutError as late:
                raise _StartError(f"was not loaded by its process within {_START_SECONDS:g} s") from late
            if started.error:
                raise _StartError(f"could not be loaded by its process: {started.error}")
            self._ready = True
        # Other processes must not guess it
        loop = asyncio.get_running_loop()
        number = 1 + secrets.randbits(62)
        question = pickle.dumps((index, completion, offered))
        pieces = (question[start : start + _PIECE] for start in range(0, len(question), _PIECE))
        async with asyncio.timeout(seconds):
            for piece in (_HEADER.pack(number, len(question)), *pieces):
                await loop.sock_sendall(self._socket, piece)
            return await self._receive(number, str | None if offered is None else float | None)

    def kill(self) -> int | None:
        """Kill the process and all processes below it, and return the exit code."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            self._process.terminate()  # a request to the watcher to end all processes below it
            self._process.join(_END_SECONDS + 1)
            if self._process.exitcode is None:
                # The process has not been reaped, so its number cannot belong to another process.
                with suppress(ProcessLookupError):  # it has not left the trainer's process group yet
                    os.killpg(self._process.pid or 0, signal.SIGKILL)
                self._process.kill()
                self._process.join()
        code = self._process.exitcode
        return 128 - code if code is not None and code > 128 else code

    async def _receive(self, number: int, kind: Any) -> _Reply:
        """Wait for the worker's answer to this question, an error or a value of this kind; drops
        all other packets.
        """
        loop = asyncio.get_running_loop()
        while True:
            readable = asyncio.Event()
            loop.add_reader(self._socket.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._socket.fileno())
            packet, notes, _, _ = self._socket.recvmsg(
                _LONGEST_REPLY, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
            if not packet:
                raise EOFError
            sender = _CREDENTIALS.unpack(notes[0][2])[0]
            self._pid = self._pid or sender  # the first packet is sent before any user code is loaded
            with suppress(msgspec.DecodeError):
                reply = msgspec.json.decode(packet, type=_Reply)
                answers = reply.error or isinstance(reply.value, kind)
                if answers and (sender, reply.number) == (self._pid, number):
                    return reply


# The functions below run in the watcher and in the worker.


def _serve(connection: socket.socket, specs: Specs, parent: int) -> None:
    """Become the watcher, whose child, the worker, load the functions and answer until the trainer
    is gone.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)  # the trainer had already ended
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(devnull, descriptor)
    # Belongs to the trainer; user code gets another one
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM))
    watcher = os.getpid()
    if worker := os.fork():
        connection.close()
        _watch(worker, parent)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends even code that is stuck in C
    if os.getppid() != watcher:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _answer(connection, specs)


def _watch(worker: int, parent: int) -> NoReturn:
    """Wait until the worker or the trainer ends or ask for it, kill all processes below, exit as
    the worker did.
    """
    status = None
    end = math.inf
    while time.monotonic() < end:
        came = signal.sigtimedwait((signal.SIGCHLD, signal.SIGTERM), 1.0 if end == math.inf else 0.02)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == worker else status
        except ChildProcessError:  # orphans have become children, so no process is left
            break
        asked = came is not None and came.si_signo == signal.SIGTERM
        if asked or status is not None or os.getppid() != parent:
            end = min(end, time.monotonic() + _END_SECONDS)
        if end < math.inf:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    child.kill()
    code = os.waitstatus_to_exitcode(signal.SIGKILL if status is None else status)
    os._exit(code if code >= 0 else 128 - code)


def _answer(connection: socket.socket, specs: Specs) -> None:
    """Load the functions, report that, and answer questions until the trainer is gone."""
    worker = os.getpid()

    def send(reply: _Reply) -> None:
        if os.getpid() != worker:
            # User code has forked this process, which has returned from the function
            os._exit(0)
        packet = msgspec.json.encode(reply._replace(error=_valid(reply.error)[: 2 * _LONGEST_ERROR]))
        if len(packet) > _LONGEST_REPLY:
            sentence = f"extracted a text of {len(packet)} bytes, more than {_LONGEST_REPLY}"
            packet = msgspec.json.encode(_Reply(reply.number, error=sentence, kind="unusable"))
        connection.send(packet)

    send(_Reply(-1))
    try:
        rewards = bind_rewards(specs)
    except BaseException as error:
        send(_Reply(error=_text(error) or type(error).__name__, kind="raised"))
        return
    send(_Reply())
    while header := connection.recv(_HEADER.size):
        number, size = _HEADER.unpack(header)
        question = bytearray()
        while len(question) < size:
            if not (piece := connection.recv(_PIECE)):
                return
            question += piece
        # Only the trainer has the other end of the socket
        index, completion, offered = pickle.loads(question)
        send(_reply(rewards[index], completion, offered)._replace(number=number))


def _reply(reward: BoundReward, completion: str, offered: dict[str, Any] | None) -> _Reply:
    """Call one function, or its extractor if `offered` is None; return its value or a sentence
    about its error.
    """
    try:
        if offered is None:
            extracted = reward.extract(completion)
            return _Reply(value=None if extracted is None else _valid(str(extracted)))
        value = reward(completion, offered)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        return _Reply(error=f"raised {type(error).__name__}: {_text(error)} ({where})", kind="raised")
    if value is None:
        return _Reply()
    try:
        return _Reply(value=checked_reward(value, "returned"))
    except BaseException as error:
        return _Reply(error=_text(error), kind="unusable")


def _valid(text: str) -> str:
    """Return the text with lone surrogates replaced, since they cannot be encoded."""
    return text.encode(errors="replace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_ERROR]
    except BaseException:
        return "a message that cannot be read"
