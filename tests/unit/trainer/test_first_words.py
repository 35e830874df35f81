"""The first and last words of commands: versions, help, the first line, the verdict of a dry run, interruptions."""

import os
import pty
import re
import subprocess
import sys
import tomllib

import pytest

import hotbunk
from tests.conftest import ROOT
from trainer.cli import main
from trainer.commands.generate import _typed

SILENT = """
import sys
sys.modules["torch"] = sys.modules["trainer.commands.launch"] = None  # importing either is an error
sys.argv = ["hotbunk", "train", "recipe.yaml"]
from hotbunk.__main__ import main
main()
"""
SERVES = """
import os, signal, time
from trainer.run import processes
processes.install_signal_handlers(lambda: "serve", grace_seconds=20.0, command="serve")
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def on_terminal(code: str) -> str:
    """Return what a Python process prints on a terminal until it ends."""
    reader, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=terminal, stderr=terminal):
        os.close(terminal)
        printed = b""
        while True:
            try:
                piece = os.read(reader, 4096)
            except OSError:  # the process has ended
                break
            printed += piece
    os.close(reader)
    return printed.decode()


def test_the_version_is_printed_and_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-m", "hotbunk", "--version"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"hotbunk {hotbunk.__version__}\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hotbunk.__version__"}


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train a model by reinforcement" in capsys.readouterr().out


def test_a_slow_command_says_something_before_its_imports() -> None:
    first = on_terminal(SILENT).splitlines()[0]
    assert first == f"· hotbunk {hotbunk.__version__}: loading"


def test_ctrl_c_names_the_command_that_it_has_stopped() -> None:
    lines = on_terminal(SERVES).splitlines()
    assert lines[:2] == ["", "hotbunk serve: stopped by SIGINT"]


def test_prints_of_user_code_replace_the_line_of_a_run() -> None:
    code = """
from trainer.run.screen import Progress
import time
with Progress(1, enabled=True).follow(lambda: "rollout"):
    time.sleep(2.5)
    print("from the user")
"""
    printed = on_terminal(code)
    assert re.search(r"rollout, \d s", printed)
    assert re.search(r"\r\x1b\[2Kfrom the user\r\n", printed)


def test_lines_with_a_slash_are_not_for_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Chat:
        def __init__(self) -> None:
            self.ids = [1]

        def ask(self, text: str) -> list[int]:
            self.ids = [*self.ids, len(text)]
            return self.ids

    lines = iter(["/help", "one", "/new", "three", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert list(_typed(Chat())) == [[1, 3], [5]]  # type: ignore[arg-type]
    assert "/new begins a new conversation" in capsys.readouterr().out
