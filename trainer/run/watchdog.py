"""Every phase has a deadline; when one expires, the run ends and says where each rank was.

One daemon thread a rank looks at the rank's own deadlines, and at the store the ranks share, on its own connection. The
rank whose phase takes too long raises the alarm there; within a second every rank prints its phase and all its threads'
stacks, and exits. It does not depend on collectives, which is what a hung rank hangs in.

Each rank listens to the beat of the next one, so that one whose process or machine is gone is noticed even when no rank
gets an error: on several nodes each launcher sees its own ranks only, and a kernel that waits for a peer keeps waiting.

A machine that has lost its power closes no connection, and a call to the store that it held would not return for many
minutes. A second thread counts for how long one has not; it does so on the other machines alone, as a launcher on this
one may just be stopped (Ctrl-Z).

A rank that is asked to end informs the others in the same way, and learns whether they are alive (`call_all`).

What is raised in a phase gets a note that names the innermost phase and the device, for the traceback and the launcher.

A Python thread cannot run while C code keeps the interpreter's lock. For that, the same deadline plus a margin is set
in `faulthandler`, whose timer runs without the interpreter.
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
from typing import Self

import torch.distributed as dist

from sharding.ranks import RemoteError
from trainer.run.processes import leave_word

EXIT_CODE = 124  # what timeout(1) exits with
_POLL_SECONDS = 0.5
_LAST_WORDS_SECONDS = 3.0  # how long the ranks wait for each other's stacks before they exit
_STORE_GONE_SECONDS = 5.0  # how long the main thread has to end by itself when the store has gone
_STORE_SILENT_SECONDS = 25.0  # without an answer, of one that another machine holds
_HELD_LOCK_MARGIN_SECONDS = 30.0
_ALARM = "watchdog/alarm"
_WHY = "watchdog/why"
_CALL = "watchdog/call"
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 120.0  # without a beat: longer than C code keeps the interpreter's lock, or a rank is stopped
_CALL_SECONDS = 3.0  # in which every living rank answers: some polls
_STDERR = 2  # the descriptor: sys.stderr may be replaced by something without one


@dataclass(frozen=True)
class _Phase:
    name: str
    since: float  # time.monotonic()
    deadline: float  # seconds it may take
    waits_for: Callable[[], str]

    @property
    def title(self) -> str:
        """Its name, and what it waits for now."""
        return ", ".join(filter(None, (self.name, self.waits_for())))

    def __str__(self) -> str:
        return f"phase {self.title} for {time.monotonic() - self.since:.1f} s (deadline {self.deadline:g} s)"


class Watchdog:
    """Watches this rank's phases, and through a clone of `store` all ranks'. Close it before the process group.

    `far`: another machine holds the store. `exit_process` is called last; a test passes its own. `device`: this rank's.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        exit_process: Callable[[int], object] = os._exit,
        far: bool = False,
        device: str = "cpu",
    ) -> None:
        self._rank = rank
        self._device = device
        self._world_size = world_size
        self._exit = exit_process
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # absent from torch's stubs
        self._store.set_timeout(timedelta(seconds=10))
        self._phases: tuple[_Phase, ...] = ()  # outermost first; replaced, never changed: the thread needs no lock
        self._posted: tuple[str, float] | None = None
        self.called_at: float | None = None  # time.monotonic() when this rank heard that one was asked to end
        self._next = (rank + 1) % world_size
        self._heard, self._missed = b"", 0  # the next rank's latest beat, and how many of our own there were since
        self._beat_at = time.monotonic()
        self._closed = threading.Event()
        self._answers = 0  # rounds of questions to the store that have been answered
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        if far:
            threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True).start()

    @contextmanager
    def phase(self, name: str, seconds: float, waits_for: Callable[[], str] = str) -> Iterator[None]:
        """The block is phase `name` and may take `seconds`. Phases nest, each with its deadline. Main thread only.

        `waits_for` tells, on the watchdog's thread, what the block waits for at the moment; empty: nothing to tell.
        """
        outer = self._phases
        self._phases = (*outer, _Phase(name, time.monotonic(), seconds, waits_for))
        self._arm()
        try:
            yield
        except Exception as error:
            if not isinstance(error, RemoteError) and not hasattr(error, "__notes__"):  # the former names its phase
                error.add_note(f"in phase {self.current_phase()} on {self._device}")
            raise
        finally:
            self._phases = outer
            self._arm()

    @contextmanager
    def aside(self, name: str, seconds: float) -> Iterator[None]:
        """As `phase`, for what the phases around it were not given time for: their deadlines wait meanwhile."""
        outer, began = self._phases, time.monotonic()
        self._phases = ()
        try:
            with self.phase(name, seconds):
                yield
        finally:
            took = time.monotonic() - began
            self._phases = tuple(replace(phase, since=phase.since + took) for phase in outer)
            self._arm()

    def current_phase(self) -> str:
        """This rank's open phases, outermost first: "step > rollout"; "start-up" before the first phase."""
        return " > ".join(phase.name for phase in self._phases) or "start-up"

    def called_for(self) -> float:
        """Seconds since this rank heard that one was asked to end; 0 before."""
        return 0.0 if self.called_at is None else time.monotonic() - self.called_at

    def call_all(self) -> bool:
        """Tell all ranks that this one is asked to end. Returns whether all of them answer. For any thread."""
        store: dist.Store = self._store.clone()  # type: ignore[attr-defined]
        try:
            store.set(_CALL, "")
            store.wait([f"watchdog/here/{rank}" for rank in range(self._world_size)], timedelta(seconds=_CALL_SECONDS))
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
            with suppress(RuntimeError):  # the store is gone, and so are the others
                self._store.set(f"watchdog/beat/{self._rank}", "closed")

    def _arm(self) -> None:
        """Set the timer that needs no interpreter to the first deadline of the phases that are open."""
        if not self._phases:
            faulthandler.cancel_dump_traceback_later()
            return
        left = min(phase.since + phase.deadline for phase in self._phases) - time.monotonic()
        faulthandler.dump_traceback_later(max(left, 0.0) + _HELD_LOCK_MARGIN_SECONDS, exit=True, file=_STDERR)

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            now = time.monotonic()
            if expired := next((phase for phase in self._phases if now - phase.since > phase.deadline), None):
                self._raise_alarm(f"exceeded a deadline, {expired}")
                return
            try:
                self._post()
                if self.called_at is None and self._store.check([_CALL]):
                    self.called_at = time.monotonic()
                    self._store.set(f"watchdog/here/{self._rank}", "")  # an answer: this rank is alive
                if self._is_silent():
                    self._raise_alarm(f"has heard nothing of rank {self._next} for {_SILENT_SECONDS:g} s")
                    return
                alarm = self._store.check([_ALARM])
            except RuntimeError as gone:
                # Its holder has died, so no collective can end well; the main thread may know already.
                if not self._closed.wait(_STORE_GONE_SECONDS):
                    self._leave("lost the store that the ranks share, so its holder has ended", f": {gone}")
                return
            self._answers += 1
            if alarm:
                with suppress(RuntimeError):  # the store is gone
                    if self._store.check([_WHY]):
                        leave_word("Deadline", self._store.get(_WHY).decode())
                self._last_words()
                return

    def _watch_store(self) -> None:
        """Leave where a question is not answered for long. Counted in polls: what stops this process does not count."""
        answers, silent = -1, 0.0
        while not self._closed.wait(_POLL_SECONDS):
            silent = silent + _POLL_SECONDS if answers == self._answers else 0.0
            answers = self._answers
            if silent >= _STORE_SILENT_SECONDS:
                self._leave(f"has had no answer from the first machine for {silent:g} s: it is gone, or the way to it")
                return

    def _leave(self, why: str, details: str = "") -> None:
        """Without the store, through which the others could be told."""
        leave_word("RemoteError", why)
        _say(f"rank {self._rank}: {why}{details}\n")
        self._describe()
        self._exit(EXIT_CODE)

    def _post(self) -> None:
        """Put this rank's phase and its beginning (wall clock) into the store, if they have changed."""
        phases = self._phases
        told = " > ".join(phase.title for phase in phases) or "start-up", phases[-1].since if phases else 0.0
        if told != self._posted:
            elapsed = time.monotonic() - phases[-1].since if phases else 0.0
            self._store.set(f"watchdog/phase/{self._rank}", json.dumps([told[0], time.time() - elapsed]))
            self._posted = told

    def _is_silent(self) -> bool:
        """Beat, and return True if the next rank has stopped beating for too long.

        Counted in beats of our own: what stops a whole machine stops both.
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
        """Report a failure to the other ranks; the first rank to report prints the phases of all."""
        leave_word("Deadline", why)
        try:
            self._post()
            if self._store.add(_ALARM, 1) == 1:
                _say(f"rank {self._rank} {why}; phases of all ranks:\n{self._everybody()}")
        except RuntimeError as gone:
            _say(f"rank {self._rank} {why}; phases of all ranks:\n  unknown, the store is gone: {gone}\n")
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
        """Print this rank's phase and stacks, wait until the others have (a launcher kills them after us), exit."""
        self._describe()
        try:
            self._store.set(f"watchdog/said/{self._rank}", "")
            keys = [f"watchdog/said/{rank}" for rank in range(self._world_size)]
            self._store.wait(keys, timedelta(seconds=_LAST_WORDS_SECONDS))
        except RuntimeError as silent:
            _say(f"rank {self._rank}: left without hearing from every rank: {str(silent).splitlines()[0]}\n")
        self._exit(EXIT_CODE)

    def _describe(self) -> None:
        phase = str(self._phases[-1]) if self._phases else "no phase"
        with tempfile.TemporaryFile() as buffer:  # faulthandler writes to descriptors only
            faulthandler.dump_traceback(buffer, all_threads=True)
            buffer.seek(0)
            stacks = buffer.read().decode(errors="replace")
        _say(f"rank {self._rank}: {phase}\n" + "".join(f"rank {self._rank} | {line}\n" for line in stacks.splitlines()))


def alarm(store: dist.Store, why: str) -> None:
    """End all ranks that watch `store`, for a launcher who knows that one of them has gone; `why` is a sentence."""
    store.set(_WHY, why)
    store.add(_ALARM, 1)


def _say(text: str) -> None:
    """Write to standard error at once, so that the ranks' lines do not mix."""
    print(text, end="", file=sys.stderr, flush=True)
