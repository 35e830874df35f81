"""Refusals of the command, each in one sentence."""

import pytest

from trainer.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the command, which refuses; return its one sentence, and leave what it printed to `capsys`."""
    assert main([*words]) == 2
    captured = capsys.readouterr()
    print(captured.out, end="")
    sentence = captured.err
    assert sentence.startswith("hotbunk: ") and sentence.count("\n") == 1, sentence
    return sentence
