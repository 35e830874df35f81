"""End all processes of a run, however the run ends.

Three mechanisms cover endings that the others cannot see:

- Two guardians above the rank (`guardian.py`), in case the rank or a guardian is killed: vLLM's
  engine core would not notice and would keep running.
- A death signal from the kernel, in case the torchrun launcher is killed: its ranks would continue
  without it.
- Signal handlers with a deadline, in case a rank is asked to end while its main thread is in a
  collective, where Python runs no handler. SIGTERM may have a grace period before that
  (`hold_signals`), in which the run can save.

It is used before anything heavy is imported, so it imports the standard library and `guardian.py`
only.
"""

import faulthandler
import json
import os
import select
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from generation import guardian
from trainer.errors import Interrupted, exit_sentence
from trainer.surroundings import require_loopback

LAST_WORDS = "HOTBUNK_LAST_WORDS"
"""Environment variable with the path of a file in memory, to which ranks write the reasons for
their ends.
"""

_WORD_LIMIT = 600  # characters
GRACE_SECONDS = 8.0  # from the signal to the forced exit; an orderly shutdown of vLLM takes up to 5
# Slurm and torchrun both forward a request; only a later signal is a second request
_SAME_REQUEST_SECONDS = 1.0
_HANDLED = (signal.SIGINT, signal.SIGTERM)

_folder: Path | None = None
_hold: "_Hold | None" = None
_said = False


@dataclass
class _Hold:
    """The delay before some signals interrupt: `seconds`, or as long as `worthwhile()` is true."""

    seconds: float
    worthwhile: Callable[[], bool]
    numbers: frozenset[int]
    came: int = signal.SIGTERM  # the signal that began the delay
    over: bool = False


def put_current_folder_last() -> None:
    """Put the current folder at the end of sys.path, so that `pkg.mod:Name` finds the user's code.

    It comes after this project's packages, here and in spawned processes, since a folder of the
    user may also be named `generation`.
    """
    ours = str(Path(__file__).parents[2])
    here = os.getcwd()
    if sys.path[0] in ("", here) and here != ours:  # by python -m
        del sys.path[0]
    sys.path += [folder for folder in (ours, here) if folder not in sys.path]


def start_guardian(*kept: int) -> Path:
    """Start two guardians above this process, and create and return its private folder.

    The process that was started becomes the outer guardian, and the caller continues in its
    grandchild, in a session of its own (see `guardian.py`). So call it first in a rank, before
    there are other threads, and before using CUDA. `kept` are descriptors that the guardians hold
    open until they end.

    The folder (mode 0700) is for sockets, including vLLM's, and for temporary files, here and in
    all children. It is deleted with everything in it. Folders of dead runs are deleted now.

    Until `install_signal_handlers`, SIGINT ends the process at once, as SIGTERM does. There is
    nothing to save yet, and a KeyboardInterrupt could be delayed by C++ code that waits for other
    ranks, or be lost in an import or a fork.
    """
    global _folder
    if _folder is not None:
        raise RuntimeError("this process has a guardian already")
    require_loopback()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # The kernel kills this process when torchrun is gone; with SIGKILL, since nothing waits for
        # it then.
        launcher = os.environ.get("HOTBUNK_LAUNCHER")  # the launcher has set it
        guardian.die_with(os.getppid())
        if launcher is not None and int(launcher) not in _ancestors():
            # It died while this process was being started
            os.kill(os.getpid(), signal.SIGKILL)
    _folder, lock = guardian.private_folder(str(_rank()))
    _go_below_guardians(_folder, (lock, *kept))
    os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = tempfile.tempdir = str(_folder)
    if cache := _user_cache():  # otherwise compiled code is deleted with the private folder
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "torchinductor"))  # for later runs
    return _folder


def _user_cache() -> Path | None:
    """Return the user's cache folder, created with mode 0700; None if other users could write to
    it.

    Later runs load and execute code from it.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        folder = base / "hotbunk"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        above = base.stat()
        entry = folder.lstat()
    except (OSError, RuntimeError):  # nothing can be written there; no home
        return None
    sticky = bool(above.st_mode & stat.S_ISVTX)  # users cannot rename entries of other users there
    safe = above.st_uid in (0, os.geteuid()) and (sticky or not above.st_mode & 0o022)
    private = stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid() and not entry.st_mode & 0o022
    return folder.absolute() if safe and private else None


def _go_below_guardians(folder: Path, kept: tuple[int, ...]) -> None:
    """Fork twice: this process becomes the outer guardian, its child the inner one; return in the
    grandchild.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Blocked signals stay pending until the guardians, which are exec'd, forward them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, guardian.WAITED_FOR)
    guardian.adopt_orphans()
    outer = os.getpid()
    if inner := os.fork():
        _become_guardian(inner, 0, folder, f"the guardian of rank {_rank()}", kept)
    os.setsid()  # neither Ctrl-C nor a launcher that kills the outer guardian's process group reaches it
    guardian.adopt_orphans()
    guardian.prctl(guardian.PR_SET_PDEATHSIG, guardian.PARENT_GONE)
    inner = os.getpid()
    if child := os.fork():
        _become_guardian(child, outer, folder, f"rank {_rank()}", kept)
    os.setsid()
    guardian.die_with(inner)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_guardian(
    child: int, parent: int, folder: Path, name: str, kept: tuple[int, ...]
) -> NoReturn:
    """Become `guardian.py`, with no descriptors except standard error and those that are kept."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(null, descriptor)
        for descriptor in {int(entry) for entry in os.listdir("/proc/self/fd")} - {0, 1, 2}:
            with suppress(OSError):  # the descriptor of the listing itself is closed
                os.set_inheritable(descriptor, descriptor in kept)
        script = guardian.__file__
        os.chdir("/")
        os.execv(
            sys.executable,
            [sys.executable, "-I", "-S", script, str(child), str(parent), str(folder), name],
        )
    finally:
        os._exit(1)


def _ancestors() -> Iterator[int]:
    """Yield the processes above this one."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = guardian.parent_of(pid)


def private_folder() -> Path:
    """Return the folder that `start_guardian` created: mode 0700, short enough for sockets, deleted
    at the end.
    """
    if _folder is None:
        raise RuntimeError("there is no private folder before start_guardian()")
    return _folder


def install_signal_handlers(
    phase: Callable[[], str], grace_seconds: float = GRACE_SECONDS, *, command: str | None = None
) -> None:
    """Make SIGINT and SIGTERM raise `Interrupted` in the main thread, and end the process in any
    case.

    A process that still exists after `grace_seconds`, or gets a second signal, exits with 128 + the
    signal's number. `phase` returns the rank's current phase, for the message, which names the
    `command` instead for a process that is not a rank. Call this function from the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    announcing = threading.RLock()
    announced = threading.Event()
    raised = threading.Event()

    def announce(number: int) -> None:
        # The main thread or the enforcer, whichever is first. The other waits, since it may end the
        # process afterwards.
        if announcing.acquire(timeout=grace_seconds) and not announced.is_set():
            announced.set()
            text = f"interrupted by {signal.Signals(number).name} during phase {phase()}"
            leave_word("Interrupted", text)
            line = f"rank {_rank()}: {text}\n"
            if command is not None:
                line = f"hotbunk {command}: stopped by {signal.Signals(number).name}\n"
            if os.isatty(2):
                line = f"\n{line}"  # the terminal has printed ^C
            # Not sys.stderr, which the signal may have interrupted in a write
            os.write(2, line.encode())
        with suppress(RuntimeError):  # not acquired
            announcing.release()

    def handler(number: int, _frame: FrameType | None) -> None:
        announce(number)
        if _hold is not None and number in _hold.numbers and not _hold.over:
            return  # `_enforce` handles the delay
        if not raised.is_set():  # a second exception would interrupt the clean-up of the first one
            raised.set()
            raise Interrupted(number)

    # Written by the C-level handler, whatever Python does
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _HANDLED:
        signal.signal(number, handler)
    os.register_at_fork(after_in_child=_forget_handlers)
    arguments = (reader, announce, phase, grace_seconds)
    threading.Thread(target=_enforce, args=arguments, name="signals", daemon=True).start()


def hold_signals(
    seconds: float, worthwhile: Callable[[], bool], numbers: Collection[int] = (signal.SIGTERM,)
) -> None:
    """Delay signals of these `numbers` by `seconds` from now on, so that a step can be finished and
    saved.

    They interrupt at once if `worthwhile()`, called on another thread, is false: when a rank has
    died, torchrun sends the same signal to the remaining ranks, which cannot finish a step without
    it. Other signals, and a second signal, also interrupt at once.
    """
    global _hold
    _hold = _Hold(seconds, worthwhile, frozenset(numbers))


def interrupt_now() -> None:
    """End a delay from the main thread and raise `Interrupted`, once the run is saved."""
    number = int(signal.SIGTERM)
    if _hold is not None:
        _hold.over = True
        number = _hold.came
    signal.raise_signal(number)


def _forget_handlers() -> None:
    """Reset signal handlers in a forked child, whose signals must not be reported through the
    parent's pipe.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _enforce(
    reader: int, announce: Callable[[int], None], phase: Callable[[], str], grace_seconds: float
) -> None:
    number = _next_signal(reader, None)
    assert number is not None
    announce(number)
    if _hold is not None and number in _hold.numbers:
        _hold.came = number
        number = _wait_out(reader, _hold)
    first = time.monotonic()
    while (left := first + grace_seconds - time.monotonic()) > 0:
        again = _next_signal(reader, left)
        if again is not None and time.monotonic() - first > _SAME_REQUEST_SECONDS:
            os._exit(128 + again)
    message = f"still in phase {phase()} {grace_seconds:.0f} s after the signal; leaving"
    os.write(2, f"rank {_rank()}: {message}\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    leave(128 + number)


def _wait_out(reader: int, hold: _Hold) -> int:
    """Wait until the delay is over or a second signal comes, interrupt the main thread, and return
    the signal.
    """
    number = hold.came
    began = time.monotonic()
    while hold.worthwhile() and (left := began + hold.seconds - time.monotonic()) > 0:
        again = _next_signal(reader, left)
        if again is None:
            continue
        if again != hold.came or time.monotonic() - began > _SAME_REQUEST_SECONDS:
            number = again
            break
    hold.over = True
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    _next_signal(reader, _SAME_REQUEST_SECONDS)  # takes the signal just sent out of the pipe
    return number


def _next_signal(reader: int, timeout: float | None) -> int | None:
    """Wait up to `timeout` seconds (None: for ever) for a handled signal, and return its number, or
    None.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            return None
        number = os.read(reader, 1)[0]
        if number in _HANDLED:
            return number


def leave_word(kind: str, text: str) -> None:
    """Tell the launcher, if there is one, why this rank ends; only the first call counts. Never
    raises.

    `kind` is the name of the exception's class, which the launcher prints before the text if
    needed.
    """
    global _said
    path = os.environ.get(LAST_WORDS)
    if path is None or _said:
        return
    _said = True
    text = " ".join(text.split())
    text = text if len(text) <= _WORD_LIMIT else f"{text[:_WORD_LIMIT]} …"
    with suppress(OSError, ValueError):  # the launcher is gone, or another program has set RANK
        line = json.dumps({"rank": int(os.environ.get("RANK", "")), "kind": kind, "text": text}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, line.encode())  # in one piece, so that ranks do not mix
        os.close(descriptor)


def run(main: Callable[[], int]) -> NoReturn:
    """Call `main`, and end the process with the exit code that it returns or that its exception
    stands for.

    A rank that only raised would hang in the interpreter's shutdown, which joins child processes
    and threads.
    """
    try:
        code = main()
    except Interrupted as interrupted:
        code = interrupted.exit_code
    except SystemExit as left:  # only code of the user's, or of a library, raises it
        leave_word("UserError", exit_sentence(left))
        traceback.print_exc()
        code = 1
    except BaseException as error:
        leave_word(type(error).__name__, ": ".join([*getattr(error, "__notes__", ()), str(error)]))
        traceback.print_exc()
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """Flush output and end this process without the interpreter's shutdown; the guardians clean
    up.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream is closed or no longer read
            stream.flush()
    os._exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
