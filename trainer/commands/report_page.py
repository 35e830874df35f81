"""The page report.html: a run, or several side by side, in one file that needs no network.

The page contains Plotly, a script of its own and the run as JSON. Texts of models, tools and data
are only in that JSON, which contains no `<`, and enter the page as text: no part of them is ever
parsed as HTML. The page's content security policy names the two scripts by their digests, so that
browsers run no others.
"""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import yaml

from trainer.commands.report_record import RunRecord, memory, metric_lines, phases, remarks, state
from trainer.config.schema import TrainConfig
from trainer.run.records import Rows, series
from trainer.run.verdict import verdict

LIMIT = 20 * 10**6
"""Largest size of the page in bytes."""
_POINTS = 2000  # largest number of points of a metric's curves, over all runs
_ANSWER_BYTES = 8 * 10**6
_TOKEN_BYTES = 5 * 10**6
# Factors of these limits, tried in turn until the page is small enough
_SCALES = (1.0, 0.5, 0.25, 0.1, 0.03)
# ␀, ␁ …
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_UNSEEN = re.compile("[\x80-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters without a picture, characters that turn the direction of text, and halves of
surrogate pairs.
"""


def page(records: Sequence[RunRecord], follows: bool = False) -> str:
    """Return the HTML of the page about the first run, compared with the others; if it `follows`,
    it polls `/data`.

    Raises ValueError if the page cannot be made small enough.
    """
    from plotly.offline import get_plotlyjs

    folder = files("trainer.commands")
    scripts = {"PLOTLY": get_plotlyjs(), "SCRIPT": folder.joinpath("report_page.js").read_text("utf-8")}
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in scripts.values()
    ]
    parts = scripts | {"POLICY": " ".join(f"'sha256-{digest}'" for digest in digests)}
    parts |= {"TITLE": html.escape(visible(records[0].name))}
    template = folder.joinpath("report_page.html").read_text("utf-8")
    for scale in _SCALES:
        parts["DATA"] = embedded(page_data(records, scale) | {"follows": follows})
        text = re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], template)
        if len(text.encode()) <= LIMIT:
            return text
    raise ValueError(f"{records[0].folder}: its page would be larger than {LIMIT} bytes")


def page_data(records: Sequence[RunRecord], scale: float = 1.0) -> dict[str, Any]:
    """Return the page's JSON: the curves of all runs, and the tables, answers, tokens and recipe of
    the first run.
    """
    first = records[0]
    points = max(50, int(scale * _POINTS / len(records)))
    return {
        "name": first.name,
        "state": state(first),
        "remarks": [*verdict(first.rows, first.recipe), *remarks(first.rows)],
        "figures": [line[:-1] for line in metric_lines(first.rows)],
        "phases": list(phases(first.rows)),
        "memory": list(memory(first.rows)),
        "runs": [
            {"name": name, "curves": curves(record.rows, points)} for name, record in _named(records)
        ],
        "answers": some_steps(first.answers, int(scale * _ANSWER_BYTES)),
        "tokens": some_steps(first.tokens, int(scale * _TOKEN_BYTES)),
        "recipe": list(recipe_lines(first.recipe)),
    }


def embedded(data: dict[str, Any]) -> str:
    """Encode data as JSON for a <script> that is not run; nothing in it can end the element or
    begin a comment.
    """
    text = json.dumps(
        _visible_all(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str
    )
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def visible(text: str) -> str:
    """Replace control characters by their pictures, and characters that would turn or hide their
    neighbours by �.
    """
    return _UNSEEN.sub("�", text.translate(_PICTURES))


def _visible_all(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, dict):
        return {_visible_all(str(key)): _visible_all(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_visible_all(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(records: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    """Pair each record with a unique name: the name of its folder, or the folder's path."""
    names = [record.name for record in records]
    return [
        (name if names.count(name) == 1 else str(r.folder), r)
        for name, r in zip(names, records, strict=True)
    ]


def curves(rows: Rows, points: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return the steps and values of every metric. A curve of more than `points` keeps only local
    highs and lows.
    """
    metrics = {}
    for key in dict.fromkeys(key for row in rows for key in row if key != "train/step"):
        pairs = [
            pair for pair in zip(*series(rows, key), strict=True) if isinstance(pair[1], int | float)
        ]
        kept = [(step, float(f"{value:.6g}")) for step, value in _extremes(pairs, points)]
        metrics[key] = [step for step, _ in kept], [value for _, value in kept]
    return metrics


def _extremes(pairs: list[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    if len(pairs) <= points:
        return pairs
    size = math.ceil(2 * len(pairs) / points)
    stretches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    kept = {choose(stretch, key=lambda pair: pair[1]) for stretch in stretches for choose in (min, max)}
    return sorted(kept | {pairs[0], pairs[-1]})


def some_steps(rows: Rows, limit: int) -> Rows:
    """Return the rows of every n-th step, including the last, where n is the smallest power of two
    with which they fit.

    `limit` is in bytes of JSON. If a single step is larger, its first rows are returned, as many as
    fit.
    """
    steps: dict[int, Rows] = {}
    for row in rows:
        steps.setdefault(row["train/step"], []).append(row)
    sizes = {step: len(embedded({"rows": group}).encode()) for step, group in steps.items()}
    order = sorted(steps, reverse=True)
    every = 1
    while sum(sizes[step] for step in order[::every]) > limit and every < len(order):
        every *= 2
    chosen = [row for step in reversed(order[::every]) for row in steps[step]]
    while chosen and len(order[::every]) == 1 and len(embedded({"rows": chosen}).encode()) > limit:
        chosen = chosen[: len(chosen) // 2]
    return chosen


def recipe_lines(recipe: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """List each key of the run's recipe with its value, its default, and True if they differ."""
    required = {"model": {"path": "-"}, "data": {"path": "-"}}
    default = TrainConfig.model_validate(required).model_dump(mode="json")
    lines = []
    for section, keys in recipe.items():
        for key, value in keys.items():
            defaults = default.get(section, {})
            name = f"{section}.{key}"
            text = ""
            if key in defaults and name not in ("model.path", "data.path"):
                text = _yaml(defaults[key])
            differs = key not in defaults or value != defaults[key]
            lines.append((name, _yaml(value), text, differs))
    return lines


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
