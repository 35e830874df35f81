"""Processes that wait for the end of another one, and then end everything that it has left behind.

Two of them are above each rank of a run, and one is between any other program and each engine that
it spawns:

    launcher ── outer guardian ── inner guardian ── rank ── engine, workers, and whatever these
    start program ── guardian ── engine, workers, and whatever these start

`processes.start_guardian` turns the process that the launcher started into the outer guardian; the
inner one is its child, and the rank continues as that one's child. Guardians run this file as

    python -I -S guardian.py CHILD PARENT FOLDER NAME [COMMAND ...]

with the number of the process below, of the one above (0: any), a private folder, and a name for
messages ("": none are printed). With a COMMAND, the guardian starts it as its child; with neither,
it ends the processes that use the folder, and deletes it, when the process above has ended. Each
guardian forwards signals to its child and ends with its child's exit code or signal, which the
process above then sees.

Guardians are subreapers (PR_SET_CHILD_SUBREAPER): a descendant that loses its parent becomes their
child. So they find all descendants, whatever their session, process group or environment, and know
when none is left. If the inner guardian is killed, the kernel kills the rank, and the outer
guardian cleans up. If the outer guardian is killed, the inner one kills the rank and cleans up. If
a program ends in any way, even by SIGKILL, the guardians of its engines kill these.

This file uses the standard library only, so that it starts in 30 ms, while the rank is still
importing torch.
"""

import fcntl
import os
import re
import resource
import shutil
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

HANDED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
PARENT_GONE = signal.SIGUSR1  # sent by the kernel to the inner guardian when the outer one dies
WAITED_FOR = HANDED_ON | {signal.SIGCHLD, PARENT_GONE}
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 1.0  # between checks of the rank's shared memory
POLITE_SECONDS = 2.0  # between SIGTERM and SIGKILL; vLLM and W&B's service clean up in less
# For multiprocessing's resource tracker, which ends by itself once its users have ended
TRACKER_SECONDS = 5.0
# The guardian then ends even if a process cannot be killed, as it is stuck in the kernel
GIVE_UP_SECONDS = 60.0
LOCK = "lock"  # in the private folder: held by the rank and its guardians, or by the program
# Characters; a Unix socket's path has at most 107, of which this folder's name takes 24, vLLM's 37
BASE_LIMIT = 40

SHARED_MEMORY = Path("/dev/shm")
# Names that only multiprocessing, torch and vLLM use.
MADE_UP = re.compile(r"psm_[0-9a-f]{8}|torch_\d+_\d+_\d+|sem\.mp-\w{8}|vllm_dist_.+")


def main() -> None:
    """Wait until the child ends, then end all other descendants and remove the private folder.

    A program that is still there keeps its folder, for an engine that it starts again.
    """
    child = int(sys.argv[1])
    parent = int(sys.argv[2])
    folder = Path(sys.argv[3])
    name = sys.argv[4]
    below = sys.argv[5:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop one process of many
    if below:
        child = start(below)
    status = watch(child, parent, folder)
    note_shared_memory(folder, {})
    ended = end_all()
    if not child:
        end_users(folder)
    if not below or os.getppid() != parent:
        remove(folder)
    if ended and name:
        print(
            f"[hotbunk] {name} is gone; ended what it left behind: {', '.join(sorted(ended))}",
            file=sys.stderr,
        )
    end_as(status)


def start(command: list[str]) -> int:
    """Start the command as a child of this process, in whose session no Ctrl-C arrives, and return
    its number.
    """
    os.setsid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    adopt_orphans()
    # `watch` then looks at once; it may be only a thread that has ended
    prctl(PR_SET_PDEATHSIG, PARENT_GONE)
    guardian = os.getpid()
    if child := os.fork():
        return child
    try:
        die_with(guardian)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(command[0], command)
    finally:
        os._exit(1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above took effect
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make descendants that lose their parent children of this process from now on
    (PR_SET_CHILD_SUBREAPER).
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError where it fails."""
    import ctypes  # not above, since most guardians do not need it

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def watch(child: int, parent: int, folder: Path) -> int:
    """Forward signals until `child` has ended, and return its status. Kill the child if `parent`
    has ended.
    """
    looks: dict[str, int] = {}
    while (status := reap(child)) is None:
        if parent:
            note_shared_memory(folder, looks)
            if os.getppid() != parent:
                if not child:
                    return 0
                os.kill(child, signal.SIGKILL)
        # Only `reap` reaps the child, so its number cannot belong to another process yet.
        came = signal.sigtimedwait(WAITED_FOR, LOOK_SECONDS)
        if came is not None and came.si_signo in HANDED_ON:
            os.kill(child, came.si_signo)
    return status


def reap(child: int) -> int | None:
    """Reap all children that have ended, and return the status of `child` if it is one of them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def end_all() -> set[str]:
    """Ask all descendants to end, then kill them until none is left. Return the names of the
    signalled ones.
    """
    # `last_company`: when more than one descendant was last seen
    start = last_company = time.monotonic()
    asked: dict[int, str] = {}
    while (age := time.monotonic() - start) < GIVE_UP_SECONDS:
        alive = descendants()
        if len(alive) > 1:
            last_company = time.monotonic()
        for pid, parent in alive.items():
            number = signal_for(pid, age, asked=pid in asked, alone=time.monotonic() - last_company)
            if number is not None:
                asked[pid] = f"{read(f'/proc/{pid}/comm').decode(errors='replace').strip()} ({pid})"
                send(pid, parent, number)
        try:
            # Orphans have become children of this process, so without children there are no
            # descendants
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        # Wake up when a child ends, and soon in any case, since new processes may have appeared.
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
    return set(asked.values())


def end_users(folder: Path) -> None:
    """Kill the processes that have a file in the folder open, except for its lock, which forks of
    its owner inherit.

    Ray's agents are nobody's descendants then. They outlive the rest of their cluster by half a
    minute or more.
    """
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # it is not a process, has ended, or belongs to another user
            descriptors = Path("/proc", entry, "fd").iterdir()
            files = [os.readlink(descriptor) for descriptor in descriptors]
            if any(file.startswith(f"{folder}/") and file != f"{folder}/{LOCK}" for file in files):
                os.kill(int(entry), signal.SIGKILL)


def signal_for(pid: int, age: float, *, asked: bool, alone: float) -> signal.Signals | None:
    """Return the signal for a process `age` seconds after the rank's end; None if it gets none yet.

    `alone` is the number of seconds for which it has been the only descendant.
    """
    command = read(f"/proc/{pid}/cmdline")
    if not command and age <= POLITE_SECONDS:  # its memory is gone, so it is about to end by itself
        return None
    if b"multiprocessing.resource_tracker" in command:
        # The tracker removes shared memory that its users have leaked, but only if it outlives
        # them.
        return signal.SIGKILL if alone > TRACKER_SECONDS else None
    if age > POLITE_SECONDS:
        return signal.SIGKILL
    return None if asked else signal.SIGTERM


def descendants() -> dict[int, int]:
    """Return the living processes below this one, without zombies, as {number: parent's number}."""
    parents = {int(entry): parent_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    living = dict[int, int]()
    unseen = [os.getpid()]
    while unseen:
        parent = unseen.pop()
        below = children.get(parent, [])
        living |= dict.fromkeys(below, parent)
        unseen += below
    return living


def parent_of(pid: int) -> int:
    """Return the parent of a living process; -1 if the process has ended."""
    # State and parent follow the command's closing parenthesis.
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields and fields[0] not in (b"Z", b"X") else -1


def read(path: str) -> bytes:
    """Return a file's bytes; empty if its process has ended or belongs to another user."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def send(pid: int, parent: int, number: int) -> None:
    """Signal a descendant, but not another process that has got the same number since."""
    with suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            if parent_of(pid) in (parent, os.getpid()):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def note_shared_memory(folder: Path, looks: dict[str, int]) -> None:
    """Create links in the folder to shared memory of descendants, for `remove`, here or in a later
    run.

    Python's resource tracker removes the shared memory it knows, unless it is killed as well. It
    does not know the memory that vLLM's tensor-parallel workers share on CPU. `looks` counts how
    often each name has been examined.
    """
    new = [
        name for name in os.listdir(SHARED_MEMORY) if MADE_UP.fullmatch(name) and looks.get(name, 0) < 3
    ]
    if not new:
        return
    # By inodes, not names: glibc maps a semaphore before it gives it its name
    # (sysdeps/pthread/sem_open.c).
    lines = b"".join(read(f"/proc/{pid}/maps") for pid in descendants()).splitlines()
    mapped = {int(line.split()[4]) for line in lines if bytes(SHARED_MEMORY) in line}
    for name in new:
        looks[name] = looks.get(name, 0) + 1  # examined again, in case its process has not mapped it yet
        with suppress(OSError):  # the memory or the folder is gone, or the link exists
            if (SHARED_MEMORY / name).stat().st_ino in mapped:
                (folder / f"remove-{name}").symlink_to(SHARED_MEMORY / name)


def remove(folder: Path) -> None:
    """Delete the folder and the files to which its links point."""
    for link in folder.glob("remove-*"):
        with suppress(OSError):
            Path(os.readlink(link)).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def private_folder(name: str) -> tuple[Path, int]:
    """Create a folder `hotbunk-NAME-…` for sockets (mode 0700). Return its path, and the descriptor
    that locks it.

    Folders of dead processes are deleted now.
    """
    import tempfile  # not above, for the same reason

    shared = tempfile.gettempdir()
    parent = shared if len(shared) <= BASE_LIMIT else "/tmp"
    sweep(Path(parent))
    folder = Path(tempfile.mkdtemp(prefix=f"hotbunk-{name}-", dir=parent))
    return folder, lock_folder(folder)


def command(folder: Path, *below: str) -> list[str]:
    """Return the command of a guardian below this process, which starts the command `below`, if
    given.
    """
    return [sys.executable, "-I", "-S", __file__, "0", str(os.getpid()), str(folder), "", *below]


def lock_folder(folder: Path) -> int:
    """Lock a new private folder, and return the descriptor; processes that inherit it hold the
    lock.
    """
    # Renamed when it is locked, since `sweep` examines folders with a lock only
    fresh = folder / f"{LOCK}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # on a file system without locks the folder is never swept
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(folder / LOCK)
    return descriptor


def sweep(parent: Path) -> list[Path]:
    """Remove folders of this user's ended runs, whose locks are not held, from `parent`. Return
    their paths.
    """
    swept = []
    for path in sorted(parent.glob("hotbunk-*")):
        with suppress(OSError), ExitStack() as opened:  # the folder is a link, has no lock, or is in use
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            if os.fstat(folder).st_uid == os.geteuid():
                lock = os.open(
                    LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
                swept.append(path)
    return swept


def end_as(status: int) -> None:
    """End this process in the same way as the process that had this status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # avoids a second core dump
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handlers
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
