"""`UserError`, for mistakes that the user can fix, and helpers for its sentences."""

import signal

_LONGEST_SENTENCE = 290
_LONGEST_VALUE = 80
_GAP = " […] "


class UserError(Exception):
    """Bad configuration or input, in sentences that each name the culprit and the remedy.

    The command line prints them, one a line, without a traceback and exits with code 2; anything else that is raised is
    a defect and keeps its traceback. A sentence longer than 290 characters loses its middle: it begins with the key and
    ends with the remedy.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(*(shortened(" ".join(one.split()), _LONGEST_SENTENCE) for one in sentences))

    def __str__(self) -> str:
        return "\n".join(self.args)


def shown(value: object) -> str:
    """A value as it is quoted in a sentence: its repr, without the middle where it is longer than 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # an integer of more than 4300 digits; lists in lists in lists
        text = f"<{type(value).__name__}: {error}>"
    return shortened(text, _LONGEST_VALUE)


def shortened(text: str, limit: int) -> str:
    """The text, with a gap for its middle where it has more characters than `limit`; two thirds are its beginning."""
    if len(text) <= limit:
        return text
    head = (limit - len(_GAP)) * 2 // 3
    return text[:head] + _GAP + text[head + len(_GAP) - limit :]


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM, raised in the main thread. `exit_code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number
