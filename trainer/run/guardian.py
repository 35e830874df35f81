"""Two processes above each rank that wait for its end, and then end the processes it has left behind.

    launcher ── outer guardian ── inner guardian ── rank ── engine, workers, and whatever these start

`processes.start_guardian` turns the process that the launcher started into the outer guardian; the inner one is its
child, and the rank continues as that one's child. Both run this file as

    python -I -S guardian.py CHILD PARENT FOLDER NAME

with the number of the process below, of the one above (0: any), the rank's private folder, and a name for messages.
Each hands signals on to its child and ends with its child's exit code or signal, so that the launcher sees the rank.

Both are subreapers (PR_SET_CHILD_SUBREAPER): a descendant that loses its parent becomes their child. So they find all
of them, whatever session, process group or environment these have made for themselves, and know when none is left. If
the inner guardian is killed, the kernel kills the rank, and the outer one cleans up; if the outer one is killed, the
inner one kills the rank and cleans up.

The standard library only: this starts in some 30 ms, while the rank is still importing torch.
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
PARENT_GONE = signal.SIGUSR1  # what the kernel sends the inner guardian at the outer one's death
WAITED_FOR = HANDED_ON | {signal.SIGCHLD, PARENT_GONE}
LOOK_SECONDS = 1.0  # between looks at the rank's shared memory
POLITE_SECONDS = 2.0  # between SIGTERM and SIGKILL: vLLM and W&B's service tidy up in less
TRACKER_SECONDS = 5.0  # for multiprocessing's resource tracker, which ends by itself once its users are gone
GIVE_UP_SECONDS = 60.0  # a process that cannot be killed (stuck in the kernel) must not keep the guardian
LOCK = "lock"  # in the rank's folder: held by the rank and its guardians

SHARED_MEMORY = Path("/dev/shm")
# Names that only multiprocessing, torch and vLLM use.
MADE_UP = re.compile(r"psm_[0-9a-f]{8}|torch_\d+_\d+_\d+|sem\.mp-\w{8}|vllm_dist_.+")


def main() -> None:
    """Wait for the child to end, however it does, then end all other descendants and remove the rank's folder."""
    child, parent, folder, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop one process of many
    status = watch(child, parent, folder)
    note_shared_memory(folder, {})
    ended = end_all()
    remove(folder)
    if ended:
        print(f"[hotbunk] {name} is gone; ended what it left behind: {', '.join(sorted(ended))}", file=sys.stderr)
    end_as(status)


def watch(child: int, parent: int, folder: Path) -> int:
    """Hand signals on until `child` has ended; returns its status. Without `parent` the child is killed."""
    looks: dict[str, int] = {}
    while (status := reap(child)) is None:
        if parent:
            note_shared_memory(folder, looks)
            if os.getppid() != parent:
                os.kill(child, signal.SIGKILL)
        # The child is not reaped before `reap` has said so: its number is still its own.
        came = signal.sigtimedwait(WAITED_FOR, LOOK_SECONDS)
        if came is not None and came.si_signo in HANDED_ON:
            os.kill(child, came.si_signo)
    return status


def reap(child: int) -> int | None:
    """Take note of the children that have ended; the status of `child` if it is one of them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def end_all() -> set[str]:
    """Ask all descendants to end, then kill until none is left. Returns the names of those that were signalled."""
    start = others = time.monotonic()
    asked: dict[int, str] = {}
    while (age := time.monotonic() - start) < GIVE_UP_SECONDS:
        found = descendants()
        if len(found) > 1:
            others = time.monotonic()  # when the last of them was seen
        for pid, parent in found.items():
            number = signal_for(pid, age, asked=pid in asked, alone=time.monotonic() - others)
            if number is not None:
                asked[pid] = f"{read(f'/proc/{pid}/comm').decode(errors='replace').strip()} ({pid})"
                send(pid, parent, number)
        try:  # orphans are our children by now, so without children there are no descendants
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        # Wake up when a child ends; others may have appeared, so look again soon in any case.
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
    return set(asked.values())


def signal_for(pid: int, age: float, *, asked: bool, alone: float) -> signal.Signals | None:
    """The signal for a process `age` seconds after the rank's end, `alone` of them as the last; None: not yet."""
    command = read(f"/proc/{pid}/cmdline")
    if not command and age <= POLITE_SECONDS:  # it is about to end by itself: its memory is gone, and with it that line
        return None
    if b"multiprocessing.resource_tracker" in command:
        # It removes the shared memory that its users leaked, but only if it outlives them.
        return signal.SIGKILL if alone > TRACKER_SECONDS else None
    if age > POLITE_SECONDS:
        return signal.SIGKILL
    return None if asked else signal.SIGTERM


def descendants() -> dict[int, int]:
    """The living processes below this one: number -> the parent's number. Zombies are left out."""
    parents = {int(entry): parent_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, unseen = dict[int, int](), [os.getpid()]
    while unseen:
        parent = unseen.pop()
        below = children.get(parent, [])
        found |= dict.fromkeys(below, parent)
        unseen += below
    return found


def parent_of(pid: int) -> int:
    """The parent of a living process; -1 when it has ended."""
    # After the command's closing parenthesis come state and parent.
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields and fields[0] not in (b"Z", b"X") else -1


def read(path: str) -> bytes:
    """The file's bytes; empty if the process has ended or belongs to another user."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def send(pid: int, parent: int, number: int) -> None:
    """Signal a descendant: never another process that has been given the same number since."""
    with suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            if parent_of(pid) in (parent, os.getpid()):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def note_shared_memory(folder: Path, looks: dict[str, int]) -> None:
    """Link from the folder to shared memory that descendants use, for `remove`, here or in a later run.

    Python's resource tracker removes what it knows of, if it is not killed as well. Of what vLLM's tensor-parallel
    workers share on CPU, no tracker knows. `looks` says how often each name has been examined.
    """
    new = [name for name in os.listdir(SHARED_MEMORY) if MADE_UP.fullmatch(name) and looks.get(name, 0) < 3]
    if not new:
        return
    # By inodes, not names: glibc maps a semaphore before it gives it its name (sysdeps/pthread/sem_open.c).
    lines = b"".join(read(f"/proc/{pid}/maps") for pid in descendants()).splitlines()
    mapped = {int(line.split()[4]) for line in lines if bytes(SHARED_MEMORY) in line}
    for name in new:
        looks[name] = looks.get(name, 0) + 1  # whose process has yet to map it is looked at again
        with suppress(OSError):  # it is gone, or known, or the folder is gone
            if (SHARED_MEMORY / name).stat().st_ino in mapped:
                (folder / f"remove-{name}").symlink_to(SHARED_MEMORY / name)


def remove(folder: Path) -> None:
    """Delete the folder and the files that are linked to from it."""
    for link in folder.glob("remove-*"):
        with suppress(OSError):
            Path(os.readlink(link)).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def lock_folder(folder: Path) -> int:
    """Lock a new private folder; returns the descriptor, which whoever inherits it holds the lock with."""
    fresh = folder / f"{LOCK}.new"  # renamed when it is locked: `sweep` looks at folders with a lock only
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: never swept
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(folder / LOCK)
    return descriptor


def sweep(parent: Path) -> list[Path]:
    """Remove folders of this user's ended runs from `parent`, those whose lock is not held. Returns them."""
    swept = []
    for path in sorted(parent.glob("hotbunk-*")):
        with suppress(OSError), ExitStack() as opened:  # an OSError: it is a link, without a lock, or in use
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            if os.fstat(folder).st_uid == os.geteuid():
                lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
                swept.append(path)
    return swept


def end_as(status: int) -> None:
    """End this process as the one with this status did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handlers
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
