"""Nothing outlives a run, however it ends (invariant 12).

Three mechanisms, each for an ending the others cannot see:

- the guardian (`guardian.py`), for a rank that is killed: vLLM's engine core has no death pipe and would live on;
- a death signal from the kernel, for a torchrun launcher that is killed: its ranks would train on without it;
- signal handlers with a deadline, for a rank that is asked to end while its main thread sits in a collective, where
  Python runs no handler. SIGTERM may be given a grace period before that (`hold_sigterm`), in which the run can save.

Called before anything heavy is imported, so this module uses the standard library only.
"""

import ctypes
import faulthandler
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 8.0  # from the signal to the forced exit; an orderly shutdown of vLLM takes up to 5
_BASE_LIMIT = 40  # characters; a Unix socket's path has at most 107: up to 24 are our folder's name, 37 are vLLM's
_SAME_REQUEST_SECONDS = 1.0  # Slurm and torchrun both forward a request; only what comes later is somebody's impatience
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1

_folder: Path | None = None
_hold: "_Hold | None" = None


@dataclass
class _Hold:
    """What SIGTERM is given before it interrupts: `seconds`, if `worthwhile()` says that they will be of use."""

    seconds: float
    worthwhile: Callable[[], bool]
    over: bool = False


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM, raised in the main thread. `exit_code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def start_guardian() -> Path:
    """Make this process's private folder and start the guardian that outlives it. The first thing a rank does.

    The folder (mode 0700) is for sockets, vLLM's too, and becomes the place for temporary files, here and in all
    children: what they leave there goes with it. Returns it.
    """
    global _folder
    if _folder is not None:
        raise RuntimeError("this process has a guardian already")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with_launcher()
    shared = tempfile.gettempdir()
    _folder = Path(tempfile.mkdtemp(prefix=f"hotbunk-{_rank()}-", dir=shared if len(shared) <= _BASE_LIMIT else "/tmp"))
    session = os.getpid() if os.getsid(0) == os.getpid() else -1  # a shell's session holds more than this run
    token = secrets.token_hex(16)
    pidfd = os.pidfd_open(os.getpid())
    script = str(Path(__file__).with_name("guardian.py"))
    command = [sys.executable, "-I", "-S", script, str(pidfd), str(session), token, str(_folder), _name()]
    # The environment is passed on without the token, or the guardian would hunt itself.
    environment = {key: value for key, value in os.environ.items() if key != "HOTBUNK_TOKEN"}
    subprocess.Popen(
        command, pass_fds=[pidfd], env=environment, start_new_session=True, cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(pidfd)
    os.environ["HOTBUNK_TOKEN"] = token
    os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = tempfile.tempdir = str(_folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{os.getuid()}")  # serves later runs
    return _folder


def _die_with_launcher() -> None:
    """Have the kernel kill this process when torchrun is gone. SIGKILL: whatever it does then, nobody waits for it."""
    launcher = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:  # it died before the call above took effect
        os.kill(os.getpid(), signal.SIGKILL)


def private_folder() -> Path:
    """The folder that `start_guardian` made: mode 0700, short enough for sockets, gone when this process is."""
    if _folder is None:
        raise RuntimeError("there is no private folder before start_guardian()")
    return _folder


def remove_at_end(path: Path) -> None:
    """Have the guardian delete this file (of shared memory, say) when the process is gone, if it is still there."""
    (private_folder() / f"remove-{secrets.token_hex(8)}").symlink_to(path.absolute())


def install_signal_handlers(
    phase: Callable[[], str] = lambda: "start-up", grace_seconds: float = GRACE_SECONDS
) -> None:
    """From now on SIGINT and SIGTERM raise `Interrupted` in the main thread, and end the process in any case.

    If it is still there after `grace_seconds`, or gets a second signal, it exits with 128 + the signal's number.
    `phase` tells what the rank is doing, for the message. Call it from the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    announce = _announcer(phase)
    raised = threading.Event()

    def handler(number: int, _frame: FrameType | None) -> None:
        announce(number)
        if number == signal.SIGTERM and _hold is not None and not _hold.over:
            return  # `_enforce` sees to it
        if not raised.is_set():  # a second exception would only cut the clean-up of the first one short
            raised.set()
            raise Interrupted(number)

    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written by the C-level handler, whatever Python does
    for number in _HANDLED:
        signal.signal(number, handler)
    os.register_at_fork(after_in_child=_forget_handlers)
    arguments = (reader, announce, phase, grace_seconds)
    threading.Thread(target=_enforce, args=arguments, name="signals", daemon=True).start()


def hold_sigterm(seconds: float, worthwhile: Callable[[], bool]) -> None:
    """From now on SIGTERM interrupts only after `seconds`: time to reach the end of a step and save.

    It interrupts at once if `worthwhile()`, called on another thread, is false: torchrun sends the same signal to the
    ranks that are left when one has died, and without it they finish nothing. SIGINT, and a second SIGTERM, interrupt
    at once, too.
    """
    global _hold
    _hold = _Hold(seconds, worthwhile)


def interrupt_now() -> None:
    """End a hold from the main thread, with `Interrupted`: what it was for is done."""
    if _hold is not None:
        _hold.over = True
    signal.raise_signal(signal.SIGTERM)


def _announcer(phase: Callable[[], str]) -> Callable[[int], None]:
    """What says, once, how and when this rank was interrupted: main thread or enforcer, whichever runs first."""
    said = threading.Lock()

    def announce(number: int) -> None:
        if said.acquire(blocking=False):
            line = f"{_name()}: interrupted by {signal.Signals(number).name} during phase {phase()}\n"
            os.write(2, line.encode())  # not sys.stderr: the signal may have come while that was being written to

    return announce


def _forget_handlers() -> None:
    """In a forked child: its signals are its own, and must not be reported through the parent's pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _enforce(reader: int, announce: Callable[[int], None], phase: Callable[[], str], grace_seconds: float) -> None:
    number = _next_signal(reader, None)
    assert number is not None
    announce(number)
    if number == signal.SIGTERM and _hold is not None:
        number = _wait_out(reader, _hold)
    first = time.monotonic()
    while (left := first + grace_seconds - time.monotonic()) > 0:
        again = _next_signal(reader, left)
        if again is not None and time.monotonic() - first > _SAME_REQUEST_SECONDS:
            os._exit(128 + again)
    os.write(2, f"{_name()}: still in phase {phase()} {grace_seconds:.0f} s after the signal; leaving\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    leave(128 + number)


def _wait_out(reader: int, hold: _Hold) -> int:
    """Return when the hold is over or somebody is impatient, the main thread interrupted by the signal returned."""
    number, began = int(signal.SIGTERM), time.monotonic()
    while hold.worthwhile() and (left := began + hold.seconds - time.monotonic()) > 0:
        again = _next_signal(reader, left)
        if again is not None and (again != signal.SIGTERM or time.monotonic() - began > _SAME_REQUEST_SECONDS):
            number = again
            break
    hold.over = True
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    _next_signal(reader, _SAME_REQUEST_SECONDS)  # that one has come through the pipe as well
    return number


def _next_signal(reader: int, timeout: float | None) -> int | None:
    """The next of the handled signals that arrives within `timeout` seconds (None: for ever), or None."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            return None
        number = os.read(reader, 1)[0]
        if number in _HANDLED:
            return number


def run(main: Callable[[], int]) -> NoReturn:
    """Call `main`, and end the process with the exit code it returns, or that its exception stands for.

    A rank that merely raised would hang in the interpreter's shutdown, which joins child processes and threads.
    """
    try:
        code = main()
    except Interrupted as interrupted:
        code = interrupted.exit_code
    except KeyboardInterrupt:  # before install_signal_handlers
        print(f"{_name()}: interrupted by SIGINT during start-up", file=sys.stderr)
        code = 128 + signal.SIGINT
    except SystemExit as wanted:
        code = wanted.code if isinstance(wanted.code, int) else int(wanted.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process now, its output flushed, without the interpreter's own shutdown. The guardian does the rest."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads it any more: there is no one left to tell
            continue
    os._exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _name() -> str:
    return f"rank {_rank()}"
