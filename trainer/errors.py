"""`UserError` for mistakes that the user can fix, and helpers that quote values in its
sentences.
"""

import signal
import traceback

_LONGEST_VALUE = 80
_GAP = " […] "


class UserError(Exception):
    """Bad configuration or input, described in sentences that each name the culprit and the remedy.

    The command line prints each sentence on a line of its own, without a traceback, and exits with
    code 2. Any other exception is a defect and keeps its traceback. A sentence is never cut; values
    in it are quoted by `quoted`.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(*(" ".join(sentence.split()) for sentence in sentences))

    def __str__(self) -> str:
        return "\n".join(self.args)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun, such as 1,024 rows."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def quoted(value: object) -> str:
    """Return the repr of a value for use in a sentence, without its middle if it is longer than 80
    characters.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:
        # An integer of more than 4300 digits; lists in lists in lists
        text = f"<{type(value).__name__}: {error}>"
    return shortened(text, _LONGEST_VALUE)


def shortened(text: str, limit: int) -> str:
    """Return the text; one longer than `limit` characters loses its middle and keeps twice as much
    start as end.
    """
    if len(text) <= limit:
        return text
    head = (limit - len(_GAP)) * 2 // 3
    return text[:head] + _GAP + text[head + len(_GAP) - limit :]


def one_line(error: BaseException) -> str:
    """Return the first 300 characters of an error's text on one line, or its type's name if it has
    none.
    """
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:300]


class Interrupted(KeyboardInterrupt):
    """A SIGINT or SIGTERM, raised in the main thread. `exit_code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def exit_sentence(left: SystemExit) -> str:
    """Return the sentence about code of the user's, or of a library, that wanted to end the
    process.
    """
    frame = traceback.extract_tb(left.__traceback__)[-1]
    called = f"{frame.filename}, line {frame.lineno}, ends the process (SystemExit: {left.code})"
    return f"{called}: let it return, or raise another exception"
