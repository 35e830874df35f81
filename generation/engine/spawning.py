"""Spawns engine cores, where they are not forked, so that they end with the program that has
started them.

vLLM starts a core by Python's `spawn`. A core does not notice that its program has been killed: it
keeps its memory, on a GPU as well. A death signal from the kernel would not do, since it comes when
the thread ends that has started the core. So a guardian (`generation/guardian.py`) stands between
the program and each core.

`spawn` also imports the program's main module again, in which a program without `if __name__ ==
"__main__"` would start its engines again. A core needs that module only where its settings name
something of it.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any

from generation import guardian

_MAIN = ("init_main_from_name", "init_main_from_path")  # of `spawn.get_preparation_data`


class _GuardedPopen(popen_spawn_posix.Popen):
    """A process as the base class starts it, but below a guardian, and without the program's main
    module.
    """

    _fds: list[int]  # descriptors that the process inherits; pickling adds to them

    def __init__(self, process: "_GuardedProcess") -> None:
        self._folder = process.folder
        super().__init__(process)

    def _launch(self, process: "_GuardedProcess") -> None:
        tracker: Any = resource_tracker.getfd()  # type: ignore[attr-defined]
        sentinel, held_by_child = os.pipe()
        reader, writer = os.pipe()
        command = guardian.command(
            self._folder, *spawn.get_command_line(tracker_fd=tracker, pipe_handle=reader)
        )
        try:
            content = self._pickled(process)  # adds descriptors to `self._fds`
            descriptors = [*self._fds, tracker, held_by_child, reader]
            self.pid = util.spawnv_passfds(os.fsencode(sys.executable), command, descriptors)  # type: ignore[attr-defined]
            with open(writer, "wb", closefd=False) as stream:
                stream.write(content)
        finally:
            os.close(held_by_child)
            os.close(reader)
            # The core takes the end of `writer` for the end of its parent.
            self.finalizer = util.Finalize(self, util.close_fds, (sentinel, writer))  # type: ignore[attr-defined]
        self.sentinel = sentinel

    def _pickled(self, process: "_GuardedProcess") -> bytes:
        """Return the bytes that `spawn.spawn_main` reads: settings of this process, then the
        process object.
        """
        settings = spawn.get_preparation_data(process.name)
        beginning = io.BytesIO()
        content = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(process, content)
            if b"__main__" not in content.getvalue():
                settings = {name: value for name, value in settings.items() if name not in _MAIN}
            reduction.dump(settings, beginning)
        finally:
            set_spawning_popen(None)
        return beginning.getvalue() + content.getvalue()


class _GuardedProcess(SpawnProcess):
    """A process of an engine core; `folder` is the private folder of its engine."""

    folder: Path

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _GuardedPopen(process_obj)


class _GuardedContext(SpawnContext):
    """A multiprocessing context whose processes are below guardians."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def Process(self, **arguments: Any) -> _GuardedProcess:  # type: ignore[override]
        process = _GuardedProcess(**arguments)
        process.folder = self._folder
        return process


@contextmanager
def spawned_below(folder: Path) -> Iterator[None]:
    """Return a context in which vLLM spawns cores below guardians, which delete `folder` when this
    process has ended.

    It changes nothing where cores are forked (`generation.engine.forkserver`).
    """
    starter: Any = import_module("vllm.v1.engine.utils")
    original = starter.get_mp_context
    if original is import_module("vllm.utils.system_utils").get_mp_context:
        starter.get_mp_context = lambda: _GuardedContext(folder)
    try:
        yield
    finally:
        starter.get_mp_context = original
