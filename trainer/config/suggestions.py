"""Suggestions for keys and commands that do not exist: misspelt ones, and keys of TRL, verl and
OpenRLHF.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("other_trainers.md")
"""The table of docs/migration.md: in each row a key of TRL, of verl, of OpenRLHF, and what stands
for them here.
"""

_MOST_NAMED = 3  # a suggestion of more keys than this does not help


def suggestion(key: str, keys: Sequence[str]) -> str:
    """Return the end of a sentence that says what `key` was probably meant to be; "" if nothing is
    likely.

    `keys` are all keys there are, as dotted paths. A wrong guess costs more than none, so
    similarity alone counts for little. The first of these that exists is named:

    1. the only key of the same section that is one edit away (see `edits`);
    2. the counterpart of a key that another trainer has under this path;
    3. the keys of the same name in other sections, if they are few;
    4. the counterpart of the only key of another trainer with this ending;
    5. the only key of the same section that is two edits away.
    """
    section, _, name = key.rpartition(".")
    siblings = {path.rpartition(".")[2]: path for path in keys if path.rpartition(".")[0] == section}
    namesakes = [path for path in keys if path.rpartition(".")[2] == name]
    endings = {
        text for path, text in counterparts().items() if f".{path}".endswith((f".{key}", f".{name}"))
    }
    if one_edit := closest(name, siblings, most=1):
        return f"; did you mean {siblings[one_edit]}?"
    if key in counterparts():
        return _naming(counterparts()[key])
    if namesakes:
        return f"; did you mean {' or '.join(namesakes)}?" if len(namesakes) <= _MOST_NAMED else ""
    if len(endings) == 1:
        return _naming(endings.pop())
    two_edits = closest(name, siblings)
    return f"; did you mean {siblings[two_edits]}?" if two_edits else ""


def closest(name: str, names: Iterable[str], most: int = 2) -> str | None:
    """Return the name at most `most` edits away; None if there is none, or if two names are within
    two edits.

    A name of fewer than three letters for each edit is too short to be recognised, and is never
    returned.
    """
    near = [candidate for candidate in names if edits(name, candidate) <= 2]
    if len(near) != 1:
        return None
    distance = edits(name, near[0])
    return near[0] if distance <= most and len(near[0]) >= 3 * distance else None


def edits(one: str, other: str) -> int:
    """Return the fewest edits that turn one text into another.

    An edit inserts, deletes or replaces a letter, or swaps two neighbours (optimal string
    alignment).
    """
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, counterpart in enumerate(other, start=1):
            replaced = rows[-1][j - 1] + (letter != counterpart)
            fewest = min(replaced, rows[-1][j] + 1, row[-1] + 1)
            if i > 1 and j > 1 and one[i - 2 : i] == counterpart + other[j - 2]:
                fewest = min(fewest, rows[-2][j - 2] + 1)
            row.append(fewest)
        rows.append(row)
    return rows[-1][-1]


@cache
def counterparts() -> dict[str, str]:
    """Return what stands here for each key of another trainer, as the table says it."""
    meanings: dict[str, list[str]] = {}
    for line in TABLE.read_text("utf-8").splitlines()[2:]:
        *foreign, ours = [cell.strip() for cell in line.strip("|").split("|")]
        for key in re.findall(r"`(?:--)?([\w.]+)", " ".join(foreign)):
            rows = meanings.setdefault(key, [])
            if ours not in rows:
                rows.append(ours)
    return {key: " and ".join(rows).replace("`", "") for key, rows in meanings.items()}


def _naming(counterpart: str) -> str:
    is_key = re.fullmatch(r"[\w.]+", counterpart)
    return f"; did you mean {counterpart}?" if is_key else f"; here: {counterpart}"
