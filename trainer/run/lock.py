"""One run, one process tree: the lock in a run's folder, which its ranks and their guardians hold.

It is a flock(2) on `lock` in the run's folder, so it is released when the last process that has inherited the
descriptor ends, however it ends. Rank 0 takes it alone; as soon as the ranks have found each other, all of them share
it.
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
_SHARE_SECONDS = 60.0  # from the ranks' meeting until rank 0 shares its lock


class RunLock:
    """The lock of one run's folder, open but not taken yet."""

    def __init__(self, folder: Path) -> None:
        """Make the folder where there is none. Raises UserError if it cannot be written."""
        self._folder = folder
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        self._owner = f"process {os.getppid() if launched else os.getpid()} on {socket.gethostname()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A process that inherits it, by fork or exec, holds the lock as well.
            self.descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"the run's folder {folder} cannot be written: {error.strerror}") from error

    def take(self, seconds: float) -> None:
        """Take it, for rank 0. Waits up to `seconds` for another run, which may be saving, and says so.

        Raises UserError naming the other run's host and process if that still holds it.
        """
        began, told = time.monotonic(), False
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() - began >= seconds:
                raise UserError(
                    f"{self._folder} is in use by {self._holder()}, and still was after {seconds:.0f} s: "
                    "wait until that run has ended, or end it, or give this one another run.name"
                )
            if not told:
                line = f"{self._folder} is in use by {self._holder()}; waiting up to {seconds:.0f} s for that to end"
                print(f"[hotbunk] {line}", file=sys.stderr, flush=True)
                told = True
            time.sleep(_LOOK_SECONDS)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, self._owner.encode(), 0)

    def share(self, rank: int, world_size: int) -> None:
        """Let all ranks hold it. For every rank, once rank 0 has taken it.

        Raises UserError if another run has taken it meanwhile.
        """
        deadline = time.monotonic() + _SHARE_SECONDS
        # Rank 0's change from one kind to the other is not atomic: flock(2).
        while world_size > 1 and not self._try(fcntl.LOCK_SH, say=rank == 0):
            if rank == 0 or time.monotonic() >= deadline:
                raise UserError(f"{self._folder} has been taken by {self._holder()}: one of two runs has to end")
            time.sleep(_LOOK_SECONDS)

    def _try(self, kind: int, say: bool = True) -> bool:
        """True if it is locked now, or cannot be on this file system, which a message says."""
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if say:
                line = f"{self._folder} is on a file system without locks: nothing keeps a second start from using it"
                print(f"[hotbunk] {line}", file=sys.stderr, flush=True)
        return True

    def _holder(self) -> str:
        """Its holder, such as "process 17 on host"."""
        return os.pread(self.descriptor, 200, 0).decode(errors="replace") or "another process"
