"""End a run when a phase exceeds its deadline, and report the phases and stacks of all ranks.

A daemon thread on each rank checks the rank's deadlines, and the ranks' store on a connection of
its own. If a phase takes too long, its rank raises an alarm in the store; within a second all ranks
print their phases and the stacks of their threads, and exit. This does not depend on collectives,
in which a hung rank usually hangs.

Each rank checks the heartbeat of the next rank, so that a rank whose process or machine is gone is
noticed even if no rank gets an error: on several nodes each launcher sees only its own ranks, and a
kernel that waits for a peer keeps waiting.

A machine that loses power closes no connection, so a call to a store on that machine would not
return for many minutes. A second thread measures how long a call has been waiting. It runs on the
other machines only, since a launcher on the same machine may just be stopped (Ctrl-Z).

A rank that is asked to end informs the other ranks through the store, and learns if they are alive
(`call_all`).

An exception in a phase gets a note that names the innermost phase and the device, for the traceback
and the launcher.

Beside the stacks, each rank writes its latest collectives into the run's folder, as torch's flight
recorder has them. The rank whose last collective differs from that of the others is the one that
they wait for.

A Python thread cannot run while C code holds the interpreter's lock. For that case, the deadline
plus a margin is also set in `faulthandler`, whose timer runs without the interpreter.
"""

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from sharding.ranks import RemoteError
from trainer.run.processes import leave_word

EXIT_CODE = 124  # the exit code of timeout(1)
_POLL_SECONDS = 0.5
_LAST_WORDS_SECONDS = 3.0  # the time for which ranks wait for each other's stacks before they exit
_STORE_GONE_SECONDS = 5.0  # the time the main thread has to end by itself after the store is gone
_STORE_SILENT_SECONDS = 25.0  # without an answer from a store on another machine
_HELD_LOCK_MARGIN_SECONDS = 30.0
_ALARM = "watchdog/alarm"
_WHY = "watchdog/why"
_CALL = "watchdog/call"
_BEAT_SECONDS = 5.0
# The longest time without a beat: longer than C code holds the interpreter's lock.
_SILENT_SECONDS = 120.0
_CALL_SECONDS = 3.0  # several polls, in which every living rank answers
_STDERR = 2  # a descriptor, since sys.stderr may have been replaced by an object without one


@dataclass(frozen=True)
class _Phase:
    """A phase of a rank, with its deadline."""

    name: str
    since: float  # time.monotonic() at its beginning
    deadline: float  # seconds that it may take
    waits_for: Callable[[], str]

    @property
    def title(self) -> str:
        """The phase's name, and what it is waiting for now."""
        return ", ".join(filter(None, (self.name, self.waits_for())))

    def __str__(self) -> str:
        return (
            f"phase {self.title} for {time.monotonic() - self.since:.1f} s (deadline {self.deadline:g} "
            "s)"
        )


class Watchdog:
    """Watches this rank's phases and, through a clone of `store`, those of all ranks.

    Close it before the process group. `far` says that the store is on another machine; `device` is
    this rank's device; `folder` is where a rank that leaves writes its latest collectives.
    `exit_process` ends the process; tests replace it.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        exit_process: Callable[[int], object] = os._exit,
        far: bool = False,
        device: str = "cpu",
        folder: Path | None = None,
    ) -> None:
        self._rank = rank
        self._folder = folder
        self._device = device
        self._world_size = world_size
        self._exit = exit_process
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # absent from torch's stubs
        self._store.set_timeout(timedelta(seconds=10))
        # Outermost first; replaced, never changed, so the thread needs no lock
        self._phases: tuple[_Phase, ...] = ()
        self._between = "start-up"  # what to say while no phase is open
        self._posted: tuple[str, float] | None = None
        # time.monotonic() when this rank learned that a rank was asked to end
        self.called_at: float | None = None
        self._next = (rank + 1) % world_size
        # The next rank's latest beat, and how many beats of this rank followed it
        self._heard = b""
        self._missed = 0
        self._beat_at = time.monotonic()
        self._closed = threading.Event()
        self._answers = 0  # number of polls that the store has answered
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        if far:
            threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True).start()

    @contextmanager
    def phase(self, name: str, seconds: float, waits_for: Callable[[], str] = str) -> Iterator[None]:
        """Run the block as phase `name`, which may take `seconds`. Phases nest, with separate
        deadlines.

        Main thread only. `waits_for` is called on the watchdog's thread, and returns what the block
        is waiting for; "" if that is not known.
        """
        outer = self._phases
        self._phases = (*outer, _Phase(name, time.monotonic(), seconds, waits_for))
        self._arm()
        try:
            yield
        except Exception as error:
            if not isinstance(error, RemoteError) and not hasattr(error, "__notes__"):
                # The former names its phase
                error.add_note(f"in phase {self.current_phase()} on {self._device}")
            raise
        finally:
            self._phases = outer
            self._between = f"{name}, which has ended"
            self._arm()

    @contextmanager
    def aside(self, name: str, seconds: float) -> Iterator[None]:
        """Run the block as a phase whose time does not count for the phases around it."""
        outer = self._phases
        began = time.monotonic()
        self._phases = ()
        try:
            with self.phase(name, seconds):
                yield
        finally:
            took = time.monotonic() - began
            self._phases = tuple(replace(phase, since=phase.since + took) for phase in outer)
            self._arm()

    def current_phase(self) -> str:
        """Return this rank's open phases, outermost first: "step > rollout".

        While none is open: "start-up" before the first phase, and "step, which has ended" after
        one.
        """
        return " > ".join(phase.name for phase in self._phases) or self._between

    def called_for(self) -> float:
        """Return the seconds since this rank learned that a rank was asked to end; 0 before
        that.
        """
        return 0.0 if self.called_at is None else time.monotonic() - self.called_at

    def call_all(self) -> bool:
        """Tell all ranks that this rank was asked to end; return True if all answer. Any thread may
        call it.
        """
        store: dist.Store = self._store.clone()  # type: ignore[attr-defined]
        try:
            store.set(_CALL, "")
            store.wait(
                [f"watchdog/here/{rank}" for rank in range(self._world_size)],
                timedelta(seconds=_CALL_SECONDS),
            )
        except RuntimeError:  # a rank is silent, or the store is gone
            return False
        return True

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            with suppress(RuntimeError):  # the store is gone, so the other ranks have ended
                self._store.set(f"watchdog/beat/{self._rank}", "closed")

    def _arm(self) -> None:
        """Set the timer of `faulthandler` to the earliest deadline of the open phases."""
        if not self._phases:
            faulthandler.cancel_dump_traceback_later()
            return
        left = min(phase.since + phase.deadline for phase in self._phases) - time.monotonic()
        faulthandler.dump_traceback_later(
            max(left, 0.0) + _HELD_LOCK_MARGIN_SECONDS, exit=True, file=_STDERR
        )

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            now = time.monotonic()
            late = (phase for phase in self._phases if now - phase.since > phase.deadline)
            if expired := next(late, None):
                self._raise_alarm(f"exceeded a deadline, {expired}")
                return
            try:
                self._post()
                if self.called_at is None and self._store.check([_CALL]):
                    self.called_at = time.monotonic()
                    self._store.set(f"watchdog/here/{self._rank}", "")  # an answer: this rank is alive
                if self._is_silent():
                    self._raise_alarm(
                        f"has heard nothing of rank {self._next} for {_SILENT_SECONDS:g} s"
                    )
                    return
                alarm = self._store.check([_ALARM])
            except RuntimeError as gone:
                # The store's process has died, so collectives will fail; the main thread may end by
                # itself.
                if not self._closed.wait(_STORE_GONE_SECONDS):
                    self._leave(
                        "lost the store that the ranks share, so its holder has ended", f": {gone}"
                    )
                return
            self._answers += 1
            if alarm:
                with suppress(RuntimeError):  # the store is gone
                    if self._store.check([_WHY]):
                        leave_word("Deadline", self._store.get(_WHY).decode())
                self._last_words()
                return

    def _watch_store(self) -> None:
        """End this rank if the store does not answer for long.

        Time is counted in polls, so that time during which this process is stopped does not count.
        """
        answers = -1
        silent = 0.0
        while not self._closed.wait(_POLL_SECONDS):
            silent = silent + _POLL_SECONDS if answers == self._answers else 0.0
            answers = self._answers
            if silent >= _STORE_SILENT_SECONDS:
                self._leave(
                    f"has had no answer from the first machine for {silent:g} s: it is gone, or the "
                    "way to it"
                )
                return

    def _leave(self, why: str, details: str = "") -> None:
        """Report the reason and end this rank alone, since the store is gone."""
        leave_word("RemoteError", why)
        _say(f"rank {self._rank}: {why}{details}\n")
        self._describe()
        self._exit(EXIT_CODE)

    def _post(self) -> None:
        """Write this rank's phase and its beginning (wall clock) to the store, if they have
        changed.
        """
        phases = self._phases
        status = (
            " > ".join(phase.title for phase in phases) or self._between,
            phases[-1].since if phases else 0.0,
        )
        if status != self._posted:
            elapsed = time.monotonic() - phases[-1].since if phases else 0.0
            self._store.set(
                f"watchdog/phase/{self._rank}", json.dumps([status[0], time.time() - elapsed])
            )
            self._posted = status

    def _is_silent(self) -> bool:
        """Send a heartbeat, and return True if the next rank has sent none for too long.

        Time is counted in this rank's beats, since an event that stops the entire machine stops
        both ranks.
        """
        if self._next == self._rank or time.monotonic() - self._beat_at < _BEAT_SECONDS:
            return False
        self._beat_at = time.monotonic()
        self._store.set(f"watchdog/beat/{self._rank}", str(self._beat_at))
        key = f"watchdog/beat/{self._next}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        self._missed = self._missed + 1 if beat and beat == self._heard != b"closed" else 0
        self._heard = beat
        return self._missed * _BEAT_SECONDS >= _SILENT_SECONDS

    def _raise_alarm(self, why: str) -> None:
        """Report a failure to the other ranks; the first rank that reports prints the phases of all
        ranks.
        """
        leave_word("Deadline", why)
        try:
            self._post()
            if self._store.add(_ALARM, 1) == 1:
                _say(f"rank {self._rank} {why}; phases of all ranks:\n{self._everybody()}")
        except RuntimeError as gone:
            _say(
                f"rank {self._rank} {why}; phases of all ranks:\n  unknown, the store is gone: {gone}\n"
            )
        self._last_words()

    def _everybody(self) -> str:
        lines = []
        for rank in range(self._world_size):
            line = "not heard of yet"
            if self._store.check([key := f"watchdog/phase/{rank}"]):
                name, since = json.loads(self._store.get(key))
                line = f"{name} for {time.time() - since:.1f} s"
            lines.append(f"  rank {rank}: {line}\n")
        return "".join(lines)

    def _last_words(self) -> None:
        """Print this rank's phase and stack, wait for the other ranks' output, and exit.

        It waits because a launcher kills the other ranks as soon as one has exited.
        """
        self._describe()
        try:
            self._store.set(f"watchdog/said/{self._rank}", "")
            keys = [f"watchdog/said/{rank}" for rank in range(self._world_size)]
            self._store.wait(keys, timedelta(seconds=_LAST_WORDS_SECONDS))
        except RuntimeError as silent:
            _say(
                f"rank {self._rank}: left without hearing from every rank: "
                f"{str(silent).splitlines()[0]}\n"
            )
        self._exit(EXIT_CODE)

    def _describe(self) -> None:
        phase = str(self._phases[-1]) if self._phases else "no phase"
        with tempfile.TemporaryFile() as buffer:  # faulthandler writes to descriptors only
            faulthandler.dump_traceback(buffer, all_threads=True)
            buffer.seek(0)
            stacks = buffer.read().decode(errors="replace")
        _say(
            f"rank {self._rank}: {phase}\n"
            + "".join(f"rank {self._rank} | {line}\n" for line in stacks.splitlines())
        )
        if self._folder is not None:
            path = self._folder / f"collectives-rank{self._rank}.json"
            try:
                path.write_bytes(latest_collectives())
            except OSError as error:
                _say(
                    f"rank {self._rank}: its latest collectives cannot be written to {path}: "
                    f"{error.strerror}\n"
                )
            else:
                _say(f"rank {self._rank}: its latest collectives are in {path}\n")


def latest_collectives() -> bytes:
    """Return this process's latest collectives as JSON, from torch's flight recorder, which keeps
    2,000 by default.

    NCCL's are recorded apart from those of other backends.
    """
    of_nccl = getattr(c10d, "_dump_nccl_trace_json", None)
    if of_nccl is not None and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        return bytes(of_nccl())
    return bytes(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]  # absent from torch's stubs


def alarm(store: dist.Store, why: str) -> None:
    """End all ranks that watch `store`. A launcher calls it when it knows that a rank is gone;
    `why` is a sentence.
    """
    store.set(_WHY, why)
    store.add(_ALARM, 1)


def _say(text: str) -> None:
    """Write to standard error in one piece, so that the ranks' lines do not mix."""
    print(text, end="", file=sys.stderr, flush=True)
