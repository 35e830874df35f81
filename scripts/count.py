"""Count files, lines, statements and functions by package, and those of the core, which one person should be able to know.

python scripts/count.py [FOLDER]
"""

import ast
import sys
from pathlib import Path

PACKAGES = ("trainer", "generation", "sharding")
CORE = {
    "trainer": [
        "loop",
        "build",
        "data",
        "rollouts",
        "types",
        "config/schema",
        "config/algorithm",
        "algorithms",
        "learning",
    ],
    "trainer/policy": ["fsdp", "module", "attention", "logprobs", "optimizer", "packing"],
    "generation": [
        "engine",
        "trajectory",
        "rollouts/episodes",
        "rollouts/episode",
        "rollouts/tools",
        "rollouts/agent",
    ],
    "sharding": ["manager", "wire", "send"],
    "sharding/worker": ["extension", "receiver", "loader", "recording"],
}


def main() -> None:
    """Print a line for each package, one for the core, and the lengths of all functions."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    texts = {
        path: path.read_text() for package in PACKAGES for path in sorted((root / package).rglob("*.py"))
    }
    inside = tuple(root / folder / name for folder, names in CORE.items() for name in names)
    core = [path for path in texts if any(path.with_suffix("").is_relative_to(part) for part in inside)]
    for package in PACKAGES:
        print_line(
            package, [text for path, text in texts.items() if path.is_relative_to(root / package)]
        )
    print_line("all", list(texts.values()))
    print_line("core", [texts[path] for path in core])
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    p50, p90 = (lengths[int(len(lengths) * share)] for share in (0.5, 0.9))
    print(f"{len(lengths)} functions: median {p50}, 90th percentile {p90}, longest {lengths[-1]} lines")


def print_line(name: str, texts: list[str]) -> None:
    """Print one line of the table."""
    lines = sum(len(text.splitlines()) for text in texts)
    code = sum(map(code_lines, texts))
    statements = sum(isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    print(
        f"{name:12} {len(texts):4} files {lines:7,} lines {code:7,} of code {statements:7,} statements"
    )


def code_lines(text: str) -> int:
    """Return the number of lines that are neither blank, nor only a comment, nor part of a docstring."""
    statements = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and node.end_lineno
    ]
    strings = [node for node in statements if isinstance(getattr(node.value, "value", None), str)]
    documented = {line for node in strings for line in range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#")
        for n, line in lines
        if n not in documented
    )


if __name__ == "__main__":
    main()
