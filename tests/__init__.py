"""Tests, in the folders of what they test.

What their own ranks and engines leave goes only when pytest ends: that of real runs has other names (shared_memory.py).
"""

import multiprocessing.shared_memory

multiprocessing.current_process()._config["semprefix"] = "/pytest"  # type: ignore[attr-defined]
multiprocessing.shared_memory._SHM_NAME_PREFIX = "/pytest_"  # type: ignore[attr-defined]
