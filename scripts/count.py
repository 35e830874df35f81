"""Counts the code: files, lines and functions by package, and the core, which one person should be able to hold.

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
    "trainer/policy": ["fsdp", "module", "attention", "logprobs", "optimizer"],
    "generation": ["engine", "trajectory", "rollouts/run", "rollouts/episode", "rollouts/tools", "rollouts/agent"],
    "sharding": ["manager", "wire", "send"],
    "sharding/worker": ["extension", "receiver", "loader", "recording"],
}


def main() -> None:
    """Print a line for each package, one for the core, and the lengths of all functions."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    texts = {path: path.read_text() for package in PACKAGES for path in sorted((root / package).rglob("*.py"))}
    inside = tuple(root / folder / name for folder, names in CORE.items() for name in names)
    core = [path for path in texts if any(path.with_suffix("").is_relative_to(part) for part in inside)]
    for package in PACKAGES:
        say(package, [text for path, text in texts.items() if path.is_relative_to(root / package)])
    say("all", list(texts.values()))
    say("core", [texts[path] for path in core])
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    p50, p90 = (lengths[int(len(lengths) * share)] for share in (0.5, 0.9))
    print(f"{len(lengths)} functions: median {p50}, 90th percentile {p90}, longest {lengths[-1]} lines")


def say(name: str, texts: list[str]) -> None:
    """One line of the table."""
    print(f"{name:12} {len(texts):4} files {sum(len(text.splitlines()) for text in texts):7,} lines")


if __name__ == "__main__":
    main()
