"""The reason that a rank ends, for the launcher (`trainer.launcher`) to print last. The standard library only."""

import json
import os
from contextlib import suppress

VARIABLE = "HOTBUNK_LAST_WORDS"
"""Path of a file in the launcher's memory. Every process of a run inherits it."""

_LIMIT = 600  # characters
_said = False


def leave_word(kind: str, text: str) -> None:
    """Tell the launcher, if there is one, why this rank ends; only a rank's first word counts. Never raises.

    `kind` is the name of the exception's class, which goes before the text unless that says it all.
    """
    global _said
    path = os.environ.get(VARIABLE)
    if path is None or _said:
        return
    _said = True
    with suppress(OSError, ValueError):  # the launcher is gone, or it was not the launcher that set our number
        line = json.dumps({"rank": int(os.environ.get("RANK", "")), "kind": kind, "text": _one_line(text)}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, line.encode())  # in one piece, so that ranks do not mix
        os.close(descriptor)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]} …"
