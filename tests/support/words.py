"""Find what stops a reader: docstrings that open in the middle of a thought, twins, long functions and files.

`python -m tests.support.words [FOLDER …]` prints them, and tests/unit/test_words.py limits their number.
CONTRIBUTING.md has the rules.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("trainer", "generation", "sharding", "hotbunk")
FRAGMENTS = ("Of", "What", "As many", "Whether", "See", "The same", "That", "Those", "How", "Some")
MOST_FUNCTION_LINES = 80
MOST_FILE_LINES = 550
LONG_FILES = ("trainer/config/schema.py", "generation/exact_ids.py")  # a table of keys; one algorithm
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parse(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path from the root and the syntax tree of each Python file in `folders`."""
    for folder in folders:
        start = ROOT / folder
        for file in [start] if start.is_file() else sorted(start.rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def fragments(folders: tuple[str, ...] = PRODUCT) -> list[str]:
    """List the docstrings that open with one of `FRAGMENTS`, as `path:line: first line`."""
    lines = []
    for path, tree in parse(folders):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node)):
                words = text.replace(",", " ").split()
                if any(words[: len(opening.split())] == opening.split() for opening in FRAGMENTS):
                    lines.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return lines


def twins(folders: tuple[str, ...] = PRODUCT) -> list[str]:
    """List the names of classes and of type aliases that stand in two files, as `name: path, path`."""
    files = defaultdict(list)
    for path, tree in parse(folders):
        for node in tree.body:
            alias = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, ast.Subscript | ast.BinOp
            )
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path)
            elif alias:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                for name in names:
                    if name[:1].isupper() and not name.isupper():  # `Rows = list[Row]`, not a constant
                        files[name].append(path)
    return [
        f"{name}: {', '.join(paths)}" for name, paths in sorted(files.items()) if len(set(paths)) > 1
    ]


def undocumented(folders: tuple[str, ...] = PRODUCT) -> list[str]:
    """List public classes, functions and methods (of more than three statements) that have no docstring."""
    lines = []
    for path, tree in parse(folders):
        places = list(tree.body)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places += node.body
        for node in places:
            if (
                isinstance(node, DEFINITIONS)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                long = isinstance(node, ast.ClassDef) or len(node.body) > 3
                overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
                if long and not overload:
                    lines.append(f"{path}:{node.lineno}: {node.name}")
    return lines


def oversized(folders: tuple[str, ...] = PRODUCT) -> list[str]:
    """List functions of more than 80 lines and files of more than 550, as `path:line: name`."""
    lines = []
    for path, tree in parse(folders):
        if path not in LONG_FILES and len((ROOT / path).read_text().splitlines()) > MOST_FILE_LINES:
            lines.append(f"{path}:1: file")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    lines.append(f"{path}:{node.lineno}: {node.name}")
    return lines


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or PRODUCT
    for finder in (fragments, undocumented, twins, oversized):
        lines = finder(chosen)
        print(f"\n== {finder.__name__}: {len(lines)}", *lines, sep="\n")
