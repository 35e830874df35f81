"""The objects of a run are whole when they are built: no method adds an attribute that the class does not declare."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[3] / "trainer"
FILES = ("loop.py", "build.py", "start.py", "engines.py", "sft.py")


def assigned(node: ast.AST) -> Iterator[str]:
    """Yield the attributes of `self` that are assigned to below a node, also in tuples, loops and `with`."""
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and ast.unparse(part.value) == "self"
        ):
            yield part.attr


def born_late(text: str) -> list[str]:
    """List the attributes that methods assign to, but that neither `__init__` nor the class's body names."""
    late = []
    for kind in ast.walk(ast.parse(text)):
        if isinstance(kind, ast.ClassDef):
            declared: set[str] = set()
            methods: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
            for node in kind.body:
                if isinstance(node, ast.AnnAssign):
                    declared.add(ast.unparse(node.target))
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    methods.append(node)
            declared.update(
                name for method in methods if method.name == "__init__" for name in assigned(method)
            )
            late += [
                f"{kind.name}.{name}"
                for method in methods
                for name in assigned(method)
                if name not in declared
            ]
    return late


@pytest.mark.parametrize("file", FILES)
def test_no_attribute_is_born_outside_init(file: str) -> None:
    assert born_late((TRAINER / file).read_text()) == []


def test_what_the_test_finds() -> None:
    text = """
class Late:
    declared: int
    def __init__(self): self.early = self.declared = 0
    def run(self):
        self.early += 1
        self.late, other.left = self.early, 2
        for self.number in (): pass
"""
    assert sorted(born_late(text)) == ["Late.late", "Late.number"]
