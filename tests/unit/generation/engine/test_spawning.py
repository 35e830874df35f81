"""Processes as engine cores are spawned: they end with their program, and do not need its main module."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.polling import wait_until

BEGINNING = """
import atexit, json, os, sys, threading, time
from pathlib import Path
from generation import guardian
from generation.engine.spawning import _GuardedContext
with open("imports", "a") as file:
    file.write(__name__ + "\\n")
folder, lock = guardian.private_folder("engine")
atexit.register(guardian.remove, folder)
context = _GuardedContext(folder)
"""
SLEEPER = """
import os, subprocess
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 16)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open("children", "w").write(f"{os.getpid()} {child.pid} {memory.name}")
child.wait()
"""
CORE = f"""
process = context.Process(target=exec, args=({SLEEPER!r},), name="core")
process.start()
while not Path("children").exists() or len(Path("children").read_text().split()) < 3:
    time.sleep(0.05)
core, child, memory = Path("children").read_text().split()
print(json.dumps([os.getpid(), process.pid, int(core), int(child), memory, str(folder)]), flush=True)
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder for a program, whose processes are killed at the end."""
    yield tmp_path
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(tmp_path):
                process.kill()


def start(folder: Path, text: str) -> "subprocess.Popen[str]":
    script = folder / "program.py"
    script.write_text(BEGINNING + text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, script], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def run(folder: Path, text: str) -> str:
    """Return what a program prints that ends well and without a word of error."""
    program = start(folder, text)
    output, errors = program.communicate(timeout=120)
    assert (program.returncode, errors) == (0, "")
    return output


def gone(pids: list[int], paths: list[Path]) -> bool:
    living = [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    return not living and not any(path.exists() for path in paths)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_core_when_its_program_is_killed(
    scratch: Path, number: signal.Signals
) -> None:
    program = start(scratch, CORE + "time.sleep(1000)")
    assert program.stdout is not None
    _, *pids, memory, folder = json.loads(program.stdout.readline())
    program.send_signal(number)
    program.wait(timeout=60)
    wait_until(lambda: gone(pids, [Path("/dev/shm", memory), Path(folder)]))


def test_users_of_a_watched_folder_end_with_the_program(scratch: Path) -> None:
    """As Ray's agents do, which are nobody's descendants once their cluster has been killed."""
    text = """
import subprocess
subprocess.Popen(guardian.command(folder), start_new_session=True)
log = (folder / "log").open("w")
user = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=log)
print(user.pid, folder, flush=True)
time.sleep(1000)
"""
    program = start(scratch, text)
    assert program.stdout is not None
    user, folder = program.stdout.readline().split()
    program.kill()
    program.wait(timeout=60)
    wait_until(lambda: gone([int(user)], [Path(folder)]))


def test_a_core_outlives_the_thread_that_has_started_it(scratch: Path) -> None:
    text = """
process = context.Process(target=time.sleep, args=(1000,))
thread = threading.Thread(target=process.start)
thread.start()
thread.join()
time.sleep(1.5)  # the guardian looks every second
print(process.is_alive())
process.terminate()
process.join()
print(process.exitcode)
"""
    assert run(scratch, text) == "True\n-15\n"


def test_a_killed_guardian_takes_its_core_with_it(scratch: Path) -> None:
    text = """
import psutil
process = context.Process(target=time.sleep, args=(1000,))
process.start()
while not (children := psutil.Process(process.pid).children()):
    time.sleep(0.05)
process.kill()
process.join()
print(process.exitcode)
psutil.wait_procs(children, 60)
print(children[0].is_running())
"""
    assert run(scratch, text) == "-9\nFalse\n"


def test_a_program_without_a_guard_is_imported_once(scratch: Path) -> None:
    """Exit codes arrive as the core has given them."""
    text = "process = context.Process(target=os._exit, args=(7,))\nprocess.start()\nprocess.join()\n"
    assert run(scratch, text + "print(process.exitcode)\n") == "7\n"
    assert (scratch / "imports").read_text() == "__main__\n"


def test_a_core_that_needs_something_of_the_main_module_gets_it(scratch: Path) -> None:
    text = """
def work():
    os._exit(8)

if __name__ == "__main__":
    process = context.Process(target=work)
    process.start()
    process.join()
    print(process.exitcode)
"""
    assert run(scratch, text) == "8\n"
    assert (scratch / "imports").read_text() == "__main__\n__mp_main__\n"
