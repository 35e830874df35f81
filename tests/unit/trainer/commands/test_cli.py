"""The command line: commands are files, and listing them does not import torch."""

import ast
import builtins
import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer.commands
from generation.importing import load
from tests.conftest import ROOT
from trainer.cli import main, parse


def test_help_lists_every_command_and_imports_neither_torch_nor_vllm():
    script = (
        "import sys\nfrom trainer.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    *help_text, imported = output.splitlines()
    assert imported == "[]"
    files = [
        path
        for path in Path(trainer.commands.__path__[0]).glob("*.py")
        if "\ndef add_arguments(" in path.read_text()
    ]
    assert len(files) >= 7
    for name in ["train", "sft", *(path.stem for path in files)]:
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in help_text), name


def test_keys_are_overridden_where_a_command_has_a_recipe():
    arguments = parse(["plan", "recipe.yaml", "--run.steps", "3", "--ranks", "2"])
    assert arguments.overrides == ["run.steps=3"] and arguments.ranks == 2


COMMANDS = {
    "train": ["train", "{}", "--dry-run"],
    "sft": ["sft", "{}", "--check"],
    "plan": ["plan", "{}"],
    "report": ["report", "{}"],
    "watch": ["report", "{}", "--watch"],
    "generate": ["generate", "{}", "--prompt", "x"],
    "serve": ["serve", "{}"],
    "eval": ["eval", "{}"],
    "an evaluation's recipe": ["eval", "m", "{}"],
    "new": ["new", "{}", "--model", "m"],
    "a run's folder": ["train", "{recipe}", "--check", "--run.output_dir", "{}"],
    "data": ["train", "{recipe}", "--check", "--data.path", "{}/x.jsonl"],
    "a checkpoint": ["train", "{recipe}", "--check", "--checkpoint.resume", "{}/step_3"],
    "reward code": ["train", "{recipe}", "--check", "--reward.functions", "['{}/x.py:f']"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("why", ["too long", "closed"])
def test_an_impossible_path_is_one_sentence_in_every_command(
    command: str,
    why: str,
    tiny_qwen2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    paths = f"run: {{output_dir: {tmp_path}, device: cpu}}\nmodel: {{path: {tiny_qwen2}}}\ndata: {{path: {tmp_path}}}\n"
    recipe.write_text(f"{paths}reward: {{functions: [exact_match]}}\nengine: {{max_model_len: 2048}}\n")
    closed = tmp_path / "closed" / "run.yaml"
    path = closed if why == "closed" else tmp_path / ("x" * 5000)
    if why == "closed":
        closed.parent.mkdir()
        refuse_below(closed.parent, monkeypatch)
    assert (
        main(
            [
                word.replace("{recipe}", str(recipe)).replace("{}", str(path))
                for word in COMMANDS[command]
            ]
        )
        == 2
    )
    message = capsys.readouterr().err
    assert (
        message.startswith("hotbunk: ")
        and message.count("\n") == 1
        and len(message.replace(str(path), "")) < 600
        and str(path)[:40] in message
    )


def refuse_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse access below a folder, as the kernel would; the tests may run as root, which may enter every folder."""

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and str(path).startswith(f"{folder}/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return refusing

    for module, names in (
        (os, ["stat", "lstat", "mkdir", "open", "listdir", "scandir"]),
        (io, ["open"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, guarded(getattr(module, name)))
    monkeypatch.setattr(builtins, "open", io.open)


def test_a_long_prompt_is_not_taken_for_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/such/model", "--prompt", "why? " * 2000]) == 2
    assert "there is no folder no/such/model" in capsys.readouterr().err


def test_help_and_recipes_work_in_an_ascii_locale(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: m}\ndata: {path: d, system_prompt: größe √}\n", "utf-8")
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["--help"], ["train", "--help"], ["train", str(recipe), "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *words],
            cwd=ROOT,
            env=ascii_only,
            capture_output=True,
            timeout=120,
        )
        assert (
            done.returncode == (2 if words[-1] == "--check" else 0) and b"Traceback" not in done.stderr
        ), done.stderr
    assert (
        b"model.path: there is no folder m" in done.stderr
        or b"model.path: m is not a folder" in done.stderr
    )


def test_no_file_is_read_or_written_in_the_locales_encoding() -> None:
    unsaid = []
    for file in (
        file
        for folder in ("trainer", "generation", "sharding")
        for file in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            modes = [
                a.value
                for a in node.args
                if isinstance(a, ast.Constant) and re.fullmatch("[rwax+]+", str(a.value))
            ]
            argument_count = len(node.args)
            if (name, argument_count) in (("read_text", 0), ("write_text", 1)) or (
                name in ("open", "TemporaryFile") and modes
            ):
                unsaid.append(f"{file}:{node.lineno}")
    assert unsaid == []


@pytest.mark.parametrize("code", ["0", "None", "'enough'", ""])
def test_code_of_the_users_that_exits_is_named_with_its_line(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a command would end with exit code 0 and print nothing."""
    script = tmp_path / "mine.py"
    script.write_text(f"import sys\ndef main(arguments):\n    sys.exit({code})\n")
    monkeypatch.setattr(
        "trainer.cli._module", lambda command: SimpleNamespace(main=load(f"{script}:main"))
    )
    monkeypatch.setattr("trainer.cli.parse", lambda argv: SimpleNamespace(command="doctor"))
    assert main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"hotbunk: {script}, line 3, ends the process (SystemExit: ")
        and error.count("\n") == 1
    )
