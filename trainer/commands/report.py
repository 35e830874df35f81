"""`hotbunk report`: write a page about a run, finished or not, for a browser."""

import argparse

from rich.table import Table
from rich.text import Text

from trainer.commands.report_page import page
from trainer.commands.report_record import metric_lines, read_record, remarks, state
from trainer.commands.report_watch import watch
from trainer.config.section import path_argument
from trainer.run.records import write_whole
from trainer.run.screen import make_console
from trainer.run.verdict import verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Write report.html to a run's folder, whether the run is finished or not. It has curves, "
        "times, memory, answers and their tokens, and the recipe, in one file that a browser opens "
        "without a network."
    )
    parser.add_argument(
        "runs",
        type=path_argument,
        nargs="+",
        metavar="RUN",
        help="folder of a run; more are compared with it",
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve the page on 127.0.0.1, and follow the run"
    )
    parser.add_argument(
        "--port", type=int, default=8001, help="port of --watch; 0: a free one (default: 8001)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Write report.html to the first run's folder and print a summary; or serve the page while the
    run goes on.
    """
    if arguments.watch:
        return watch(arguments.runs, arguments.port)
    records = [read_record(folder) for folder in arguments.runs]
    path = records[0].folder / "report.html"
    write_whole(path, page(records))
    console = make_console()
    console.print(state(records[0]))
    table = Table("", "first", "best", "last", "", box=None, header_style="dim", padding=(0, 2))
    for line in metric_lines(records[0].rows):
        table.add_row(*map(Text, line))  # a metric's name may look like markup
    console.print(table)
    for remark in (*verdict(records[0].rows, records[0].recipe), *remarks(records[0].rows)):
        console.print(f"· {remark}")
    console.print(f"\n{path}, for a browser", soft_wrap=True, markup=False)
    return 0
