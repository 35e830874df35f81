"""The command line: its commands are files, and nobody waits for torch to be told their names."""

import subprocess
import sys
from pathlib import Path

import trainer.commands
from trainer.cli import parse


def test_help_lists_every_command_and_imports_neither_torch_nor_vllm():
    script = (
        "import sys\nfrom trainer.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    *help_text, imported = shown.splitlines()
    assert imported == "[]"
    files = [
        path for path in Path(trainer.commands.__path__[0]).glob("*.py") if "\ndef add_arguments(" in path.read_text()
    ]
    assert len(files) >= 8
    for name in ["train", "sft", *(path.stem for path in files)]:
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in help_text), name


def test_keys_are_overridden_where_a_command_has_a_recipe():
    arguments = parse(["plan", "recipe.yaml", "--run.steps", "3", "--ranks", "2"])
    assert arguments.overrides == ["run.steps=3"] and arguments.ranks == 2
