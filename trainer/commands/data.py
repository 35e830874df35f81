"""`hotbunk data`: show what the model sees of the data, and what looks wrong in it."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainer.commands.data_survey import Example, Survey, survey
from trainer.config.checks import check_config
from trainer.config.recipe import load_config
from trainer.data import load_tokenizer
from trainer.data.summary import TokenLengths, duplicates_line, named_rows, shared_line
from trainer.errors import UserError, counted
from trainer.run.screen import make_console

_BAR = 24  # columns of the longest bar of the histogram
_CHARACTERS = 2000  # of an example


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Show the first prompts as the model sees them, the lengths of all, the tokens that end an "
        "answer, which columns are read, and what looks wrong: duplicates, prompts that are evaluated "
        "on as well, and answers for which a reward can never be 1. All rows are read; no weights are."
    )
    parser.add_argument(
        "recipe", type=Path, help="YAML file; keys are overridden by --section.key value"
    )
    parser.add_argument("--rows", type=int, default=3, help="number of rows to show (default: 3)")
    parser.add_argument("--sft", action="store_true", help="show what hotbunk sft would train on")
    parser.add_argument("--json", action="store_true", help="print JSON instead, with all row numbers")


def main(arguments: argparse.Namespace) -> int:
    """Print the survey. Raises UserError if the data cannot be read or a row cannot be used."""
    if arguments.rows < 0:
        raise UserError("--rows must be at least 0")
    config = load_config(arguments.recipe, arguments.overrides)
    check_config(config, "sft" if arguments.sft else "train")
    facts = survey(config, arguments.rows, sft=arguments.sft)
    if arguments.json:
        print(json.dumps(asdict(facts), indent=2, ensure_ascii=False))
        return 0
    console = make_console()
    console.print(table(facts))
    for line in suspicions(facts):
        console.print(Text(f"· {line}", "yellow"))
    marks = list(load_tokenizer(config.model).get_added_vocab())
    for example in facts.examples:
        console.print(panel(example, marks, colours=console.is_terminal))
    return 0


def table(facts: Survey) -> RenderableType:
    """Return a table of the data's sizes, columns and ends."""
    rows = Table(
        title=facts.path, title_justify="left", show_header=False, box=box.SIMPLE, padding=(0, 1)
    )
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")

    def add(name: str, value: RenderableType) -> None:
        rows.add_row(name, Text(value) if isinstance(value, str) else value)

    add("rows", f"{facts.rows:,}, of which {facts.used:,} are used")
    for reason, indices in facts.dropped.items():
        add("left out", f"{counted(len(indices), 'row')}, since each {reason}: {named_rows(indices)}")
    if facts.lengths is not None:
        add("lengths", f"{facts.lengths}; {facts.limit} are allowed")
        add("", histogram(facts.lengths))
    add("columns read", ", ".join(facts.columns_read) or "none")
    if facts.columns_passed:
        readers = f"only {', '.join(facts.readers)} may read" if facts.readers else "nobody reads"
        add("others", f"{', '.join(facts.columns_passed)}, which {readers}")
    add("answers end with", " or ".join(facts.ends) or "nothing")
    return rows


def histogram(lengths: TokenLengths) -> Text:
    """Return a bar for each bin of lengths, with its number of rows."""
    most = max(lengths.histogram)
    edge = len(str(lengths.width * len(lengths.histogram)))
    lines = []
    for number, count in enumerate(lengths.histogram):
        first = number * lengths.width + 1
        last = (number + 1) * lengths.width
        bar = "█" * round(_BAR * count / most)
        lines.append(f"{first:>{edge}}–{last:<{edge}} {bar or '▏' if count else ''} {count:,}")
    return Text("\n".join(lines))


def suspicions(facts: Survey) -> list[str]:
    """Return a sentence for everything that looks wrong."""
    lines = list(facts.template)
    lines += [f"{named_rows(rows)}: {remark}" for remark, rows in facts.remarks.items()]
    if facts.duplicates:
        lines.append(duplicates_line(facts.duplicates))
    lines += [shared_line(name, rows) for name, rows in facts.shared.items() if rows]
    return lines


def panel(example: Example, marks: list[str], *, colours: bool) -> Panel:
    """Return a row's text; tokens that are trained are green or, without `colours`, in brackets ⟦
    ⟧.
    """
    body = Text()
    for piece, trained in example.pieces:
        text = "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in piece)
        if trained:
            body.append(text if colours else f"⟦{text}⟧", "green")
        else:
            body.append(text)
    body.highlight_words(marks, "cyan")
    if len(body) > _CHARACTERS:
        body = Text.assemble(body[: _CHARACTERS // 2], "\n[…]\n", body[-_CHARACTERS // 2 :])
    parts = [f"row {example.row}", counted(example.tokens, "token")]
    if example.images:
        parts.append(counted(example.images, "image"))
    if example.tools:
        parts.append(f"tools {', '.join(example.tools)}")
    return Panel(
        body, title=Text(", ".join(parts)), title_align="left", box=box.SQUARE, border_style="dim"
    )
