"""Where a process of a run keeps what later ones load and execute: in a folder that nobody else can write to."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from generation import guardian
from tests.conftest import ROOT
from trainer.run import processes

SCRIPT = """
import os
from generation import guardian
from trainer.run import processes
folder = processes.start_guardian()
def main():
    print(folder, os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), flush=True)
    return 0
processes.run(main)
"""


def test_compiled_products_are_not_in_a_folder_that_others_can_make_first(tmp_path: Path) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    planted = shared / f"torchinductor_{os.getuid()}"
    planted.mkdir(parents=True)
    home.mkdir()
    (tmp_path / "file").touch()  # a home in which no folder can be made
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    }
    for name, expected in (("home", f"{home}/.cache/hotbunk/torchinductor"), ("file", "")):
        environment = kept | {"TMPDIR": str(shared), "HOME": str(tmp_path / name)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and done.stdout.rstrip("\n").partition(" ")[2] == expected, (
            done.stderr
        )
    assert stat.S_IMODE((home / ".cache" / "hotbunk").stat().st_mode) == 0o700
    assert list(planted.iterdir()) == []


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_users_cache_is_made_once_and_closed_to_others(base: Path) -> None:
    assert processes._user_cache() == base / "hotbunk" == processes._user_cache()
    assert stat.S_IMODE((base / "hotbunk").stat().st_mode) == 0o700
    base.chmod(0o1777)  # as /tmp: nobody can replace what is ours
    assert processes._user_cache() == base / "hotbunk"


@pytest.mark.parametrize(
    "what", ["writable", "a link", "a file", "replaceable", "another user's", "below another user's"]
)
def test_a_cache_that_others_may_write_to_is_not_used(what: str, base: Path, tmp_path: Path) -> None:
    base.mkdir()
    folder = base / "hotbunk"
    folder.mkdir(mode=0o700)
    if what == "writable":
        folder.chmod(0o770)
    elif what in ("a link", "a file"):
        folder.rmdir()
        folder.symlink_to(tmp_path) if what == "a link" else folder.touch()
    elif what == "replaceable":
        base.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    else:
        os.chown(folder if what == "another user's" else base, 65534, 65534)
    assert processes._user_cache() is None


SLOW_TO_SAY = """
import hashlib, os, signal, threading, time
from generation import guardian
from trainer.run import processes

def phase():
    time.sleep(0 if threading.current_thread() is threading.main_thread() else 2)
    return "rollout"

processes.install_signal_handlers(phase, grace_seconds=20.0)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # the handler waits for its end, the other thread does not
except BaseException:
    os._exit(130)
"""


def test_a_rank_that_is_interrupted_says_so_before_it_ends() -> None:
    """The rank also says so where the main thread leaves before the thread that reports it."""
    command = [sys.executable, "-c", SLOW_TO_SAY]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (130, "rank 0: interrupted by SIGINT during phase rollout\n")


def test_a_process_that_is_exiting_is_not_signalled_before_its_time() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    # It is not reaped, and its memory and command line are gone
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert guardian.signal_for(child, 0.1, asked=False, alone=0.1) is None
        late = guardian.POLITE_SECONDS + 1
        assert guardian.signal_for(child, late, asked=False, alone=late) == signal.SIGKILL
        assert guardian.signal_for(os.getpid(), 0.1, asked=False, alone=0.1) == signal.SIGTERM
    finally:
        os.waitpid(child, 0)


def test_a_rank_whose_code_exits_with_0_has_failed() -> None:
    script = "import sys\nfrom trainer.run import processes\nprocesses.run(lambda: sys.exit(0))\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 1 and "SystemExit" in done.stderr
