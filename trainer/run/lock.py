"""The lock in a run's folder, which ensures that only one run at a time uses the folder.

It is a flock(2) on the file `lock`, held by the ranks and their guardians. It is released when the
last process that has inherited the descriptor ends, however it ends. Rank 0 takes it exclusively;
once the ranks have met, all share it.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

from trainer.errors import UserError

_LOOK_SECONDS = 0.2
_SHARE_SECONDS = 60.0  # the longest time from the ranks' rendezvous until rank 0 shares its lock


class RunLock:
    """The lock of one run's folder."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and open the lock without taking it. Raises UserError if the folder is
        not writable.
        """
        self._folder = folder
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        self._owner = f"process {os.getppid() if launched else os.getpid()} on {socket.gethostname()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A process that inherits the descriptor, by fork or exec, holds the lock as well.
            self.descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"the run's folder {folder} cannot be written: {error.strerror}") from error

    def take(self, seconds: float) -> None:
        """Take the lock, for rank 0. Wait up to `seconds` for another run, which may be saving, and
        print that.

        Raises UserError naming the other run's host and process if it still holds the lock then.
        """
        began = time.monotonic()
        printed = False
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() - began >= seconds:
                raise UserError(
                    f"{self._folder} is still in use by {self._holder()} after {seconds:.0f} s: "
                    "wait until that run has ended, or end it, or give this one another run.name"
                )
            if not printed:
                line = (
                    f"{self._folder} is in use by {self._holder()}; waiting up to {seconds:.0f} s for "
                    "that to end"
                )
                print(f"[hotbunk] {line}", file=sys.stderr, flush=True)
                printed = True
            time.sleep(_LOOK_SECONDS)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, self._owner.encode(), 0)

    def share(self, rank: int, world_size: int) -> None:
        """Share the lock among all ranks; each rank calls this once rank 0 has taken the lock.

        Raises UserError if another run has taken the lock meanwhile.
        """
        deadline = time.monotonic() + _SHARE_SECONDS
        # Rank 0's change from an exclusive to a shared lock is not atomic: flock(2).
        while world_size > 1 and not self._try(fcntl.LOCK_SH, say=rank == 0):
            if rank == 0 or time.monotonic() >= deadline:
                raise UserError(
                    f"{self._folder} has been taken by {self._holder()}: stop one of the two runs"
                )
            time.sleep(_LOOK_SECONDS)

    def _try(self, kind: int, say: bool = True) -> bool:
        """Return True if the lock is taken now, or if the file system has no locks, in which case
        it warns.
        """
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if say:
                line = (
                    f"{self._folder} is on a file system without locks: make sure that no second run "
                    "uses it"
                )
                print(f"[hotbunk] {line}", file=sys.stderr, flush=True)
        return True

    def _holder(self) -> str:
        """Return the holder of the lock, such as "process 17 on host"."""
        return os.pread(self.descriptor, 200, 0).decode(errors="replace") or "another process"
