"""Run work of a test in a forked child."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress


def in_child(work: Callable[[], None], seconds: int = 120) -> int:
    """Run `work` in a fork of this process; return its exit code, or minus the signal that ended it.

    The child exits here whatever `work` raises (with code 1), so that it never goes on as a second pytest. It is killed
    after `seconds`: a fork has the locks of its parent's threads, but not the threads.
    """
    sys.stdout.flush()
    if not (child := os.fork()):
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            work()
            code = 0
        except BaseException:
            with suppress(BaseException):
                traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
