"""The process that outlives a rank by a moment: it waits until the rank is gone, then removes what that left behind.

Run by `lifetime.start_guardian` as `python -I -S guardian.py PIDFD SESSION TOKEN FOLDER NAME`, in a session of its own:
neither Ctrl-C nor a launcher that kills the rank's session reaches it. It uses the standard library only: it starts in
some 30 ms and must work while the rank is still importing torch.

What belongs to the rank is found by two marks that children inherit: TOKEN in the environment (every process that was
exec'd), and, where the rank leads a session, that SESSION (also children that were only forked). Neither is lost when a
process is orphaned, as a parent id is.
"""

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

LOOK_SECONDS = 1.0  # between looks into the rank's folder
POLITE_SECONDS = 2.0  # between SIGTERM and SIGKILL: vLLM and W&B's service tidy up in less
TRACKER_SECONDS = 5.0  # for multiprocessing's resource tracker, which ends by itself once its users are gone
GIVE_UP_SECONDS = 60.0  # a process that cannot be killed (stuck in the kernel) must not keep the guardian


def main() -> None:
    """Wait for the rank to end, however it does, then kill its descendants and remove its folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pidfd, session, token, path, name = sys.argv[1:]
    folder, meetings = Path(path), set[str]()
    gone = False
    while not gone:
        gone = bool(select.select([int(pidfd)], [], [], LOOK_SECONDS)[0])
        meetings |= {meeting.name for meeting in folder.glob("vllm_dist_*")}
    ended = end_all(int(session), token)
    remove(folder, meetings)
    if ended:
        print(f"[hotbunk] {name} is gone; ended what it left behind: {', '.join(sorted(ended))}", file=sys.stderr)


def end_all(session: int, token: str) -> set[str]:
    """Ask every process of the rank to end, then kill until none is left. Returns the names of those it signalled."""
    start = time.monotonic()
    asked: dict[int, str] = {}
    while (age := time.monotonic() - start) < GIVE_UP_SECONDS:
        found = belonging(session, token)
        if not found:
            break
        for pid, handle in found.items():
            number = signal_for(pid, age, asked=pid in asked, alone=len(found) == 1)
            if number is not None:
                asked[pid] = f"{read(f'/proc/{pid}/comm').decode(errors='replace').strip()} ({pid})"
                send(handle, number)
        # Wake up when the first of them is gone; new ones may have appeared, so look again soon in any case.
        select.select(list(found.values()), [], [], 0.1)
        for handle in found.values():
            os.close(handle)
    return set(asked.values())


def signal_for(pid: int, age: float, *, asked: bool, alone: bool) -> signal.Signals | None:
    """What to send to a process `age` seconds after the rank's end; None to let it be for now."""
    if b"multiprocessing.resource_tracker" in read(f"/proc/{pid}/cmdline"):
        # It removes the shared memory that its users leaked, but only if it outlives them.
        return signal.SIGKILL if alone and age > POLITE_SECONDS + TRACKER_SECONDS else None
    if age > POLITE_SECONDS:
        return signal.SIGKILL
    return None if asked else signal.SIGTERM


def belonging(session: int, token: str) -> dict[int, int]:
    """The rank's processes: process id -> an open pidfd."""
    found: dict[int, int] = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if pid != os.getpid() and belongs(pid, session, token):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            if belongs(pid, session, token):  # still: the id may have been given to another process before the open
                found[pid] = handle
            else:
                os.close(handle)
    return found


def belongs(pid: int, session: int, token: str) -> bool:
    """Whether a process, zombies left out, is in the session or carries the token."""
    # After the command's closing parenthesis come state, parent, process group, session.
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if not fields or fields[0] in (b"Z", b"X"):
        return False
    return int(fields[3]) == session or f"HOTBUNK_TOKEN={token}".encode() in read(f"/proc/{pid}/environ").split(b"\0")


def read(path: str) -> bytes:
    """The file's bytes; none when the process is gone meanwhile or belongs to somebody else."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def send(handle: int, number: int) -> None:
    """Signal the process behind a pidfd: never another one that has been given the same id since."""
    try:
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return


def remove(folder: Path, meetings: set[str]) -> None:
    """Delete the folder, the files that `lifetime.remove_at_end` linked to from it, and vLLM's shared memory.

    On CPU, vLLM's tensor-parallel workers meet at a temporary file and name their shared memory after it; no tracker
    knows of it. Workers that are asked to end may remove the file and leave the memory, so `meetings` is noted before.
    """
    for link in folder.glob("remove-*"):
        Path(os.readlink(link)).unlink(missing_ok=True)
    for meeting in meetings:
        for memory in Path("/dev/shm").glob(f"{meeting}-*"):
            memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
