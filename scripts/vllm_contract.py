"""Compares a release of vLLM with what Hotbunk relies on in it, from sources alone: vllm_contract.py [FOLDER] [--write]

FOLDER holds a folder `vllm`; by default the installed one. Nothing of vLLM is imported, and only Python's library is needed. Three groups:

- names: each module and name of vLLM that the product imports, also by a string, and each environment variable of vLLM that it sets;
- signatures of what the product patches, derives from or calls although it is private, as vllm_contract.json lists it;
- texts of vLLM that the product looks for, as vllm_contract.json lists them.

The first signature in a list is that of the locked release. Further ones are of releases that were tried, so they are no difference.
`--write` records FOLDER's signatures: alone as those of the lock, with `--tried` as further ones. The exit code is 1 where anything differs.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "scripts/vllm_contract.json"
PACKAGES = ("generation", "sharding", "trainer")
FORMS = " or "
"""Stands between two forms of a name, of which a release needs only one."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Tree:
    """The sources of one release of vLLM below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parsed: dict[Path, ast.Module] = {}

    def file(self, module: str) -> Path | None:
        """Return the file of a module; None if there is none."""
        path = self.folder / module.replace(".", "/")
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in files if file.is_file()), None)

    def parsed(self, file: Path) -> ast.Module:
        """Return the syntax tree of a file."""
        if file not in self._parsed:
            self._parsed[file] = ast.parse(file.read_text("utf-8"))
        return self._parsed[file]

    def has(self, dotted: str) -> bool:
        """Return True for a module, for a folder of modules, and for a name in a module."""
        module, _, name = dotted.rpartition(".")
        folder = self.folder / dotted.replace(".", "/")
        if self.file(dotted) is not None or (folder.is_dir() and any(folder.glob("*.py"))):
            return True
        return bool(module) and self.signature(module, name) is not None

    def signature(self, module: str, name: str, seen: tuple[str, ...] = ()) -> str | None:
        """Return what can be compared of a name in a module, or of a member of a class there (`Class.member`), wherever it is inherited or imported from; None if it is not there."""
        file = self.file(module)
        if file is None or f"{module}:{name}" in seen:
            return None
        seen = (*seen, f"{module}:{name}")
        first, _, rest = name.partition(".")
        for node in _statements(self.parsed(file).body):
            if isinstance(node, Definition) and node.name == first:
                found = self._member(module, node, rest, seen) if rest else _form(node)
                if found is not None:
                    return found
            elif not rest and first in _assigned(node):
                return "a value"
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(module, file, node)
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == first:
                        original = first if alias.name == "*" else alias.name
                        whole = f"{original}.{rest}" if rest else original
                        found = self.signature(origin, whole, seen)
                        if found is None and not rest and self.file(f"{origin}.{original}"):
                            found = "a module"
                        if found is None and not rest and not origin.startswith("vllm"):
                            found = "an import"
                        if found is not None:
                            return found
        names = [node.name for node in self.parsed(file).body if isinstance(node, ast.FunctionDef)]
        if (
            "__getattr__" in names and not rest
        ):  # a package that imports its names when they are asked for
            constants = (node for node in ast.walk(self.parsed(file)) if isinstance(node, ast.Constant))
            return "a value" if any(node.value == first for node in constants) else None
        return None

    def _member(self, module: str, owner: Definition, name: str, seen: tuple[str, ...]) -> str | None:
        for node in _statements(owner.body):
            if isinstance(node, Definition) and node.name == name:
                return _form(node)
            if name in _assigned(node):
                return "a value"
        for node in ast.walk(owner):  # self.name = …
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                return "a value"
        for base in owner.bases if isinstance(owner, ast.ClassDef) else ():
            while isinstance(base, ast.Subscript):
                base = base.value
            inherited = f"{ast.unparse(base)}.{name}"
            if "." in ast.unparse(base):  # of a module that is imported under a short name
                short, _, inherited = inherited.partition(".")
                origin = self._imported(module, short)
            else:
                origin = module
            found = self.signature(origin, inherited, seen) if origin else None
            if found is not None:
                return found
        return None

    def _imported(self, module: str, short: str) -> str | None:
        """Return the module that another one imports under a short name."""
        file = self.file(module)
        assert file is not None
        for node in _statements(self.parsed(file).body):
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                if (alias.asname or alias.name) == short:
                    own = isinstance(node, ast.ImportFrom)
                    return f"{self._origin(module, file, node)}.{alias.name}" if own else alias.name  # type: ignore[arg-type]
        return None

    def _origin(self, module: str, file: Path, node: ast.ImportFrom) -> str:
        """Return the whole name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def elsewhere(self, name: str) -> list[str]:
        """Return the modules that define a function, a class or a variable of this name themselves."""
        define = re.compile(
            rf"^\s*(?:class|def|async def) {re.escape(name)}\b|^{re.escape(name)} *[:=]", re.M
        )
        files = sorted((self.folder / "vllm").rglob("*.py"))
        found = [file for file in files if define.search(file.read_text("utf-8", "replace"))]
        return [".".join(file.relative_to(self.folder).with_suffix("").parts) for file in found]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those inside of conditions and attempts."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _assigned(node: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}


def _form(node: Definition) -> str:
    """Return the parameters of a function with its kind, or the bases of a class."""
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(map(ast.unparse, node.bases))})"
    decorators = [f"@{ast.unparse(decorator)} " for decorator in node.decorator_list]
    kinds = [d for d in decorators if d.split()[0] in ("@property", "@classmethod", "@staticmethod")]
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{''.join(kinds)}{prefix}({ast.unparse(node.args)})"


def product_files(root: Path = ROOT) -> list[Path]:
    """Return the sources of the product."""
    return sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))


def names(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the names of vLLM that the product imports or names in a string, each with the files that do. Where an import is tried and another one stands in its `except`, they are forms of one name."""
    used: dict[str, set[str]] = {}
    for file in product_files(root):
        tree = ast.parse(file.read_text("utf-8"))
        where = str(file.relative_to(root))
        seconds: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Try):
                tried = [name for part in node.body for name in _imports(part)]
                others = [name for handler in node.handlers for name in _imports(handler)]
                if tried and others:
                    seconds |= {
                        inner for part in [*node.body, *node.handlers] for inner in ast.walk(part)
                    }
                    for pair in zip(tried, others, strict=True):
                        used.setdefault(FORMS.join(pair), set()).add(where)
        for node in ast.walk(tree):
            if node not in seconds:
                for name in _imported(node):
                    used.setdefault(name, set()).add(where)
    return dict(sorted(used.items()))


def _imports(node: ast.AST) -> list[str]:
    return [name for inner in ast.walk(node) for name in _imported(inner)]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if re.fullmatch(r"vllm(\.\w+)+", node.value) else []
    return []


def variables(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the environment variables of vLLM that the product reads or sets, each with the files that do."""
    used: dict[str, set[str]] = {}
    for file in product_files(root):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(r"VLLM_[A-Z0-9_]+", str(node.value)):
                used.setdefault(str(node.value), set()).add(str(file.relative_to(root)))
    return dict(sorted(used.items()))


def changed(root: Path = ROOT) -> dict[str, set[str]]:
    """Return what the product replaces in vLLM, and the methods that its classes override, as `module:Class.method`, each with the files that do."""
    used: dict[str, set[str]] = {}
    installed = Tree(installed_folder())
    for file in product_files(root):
        tree = ast.parse(file.read_text("utf-8"))
        where = str(file.relative_to(root))
        origins: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    origins[alias.asname or alias.name] = (
                        whole if installed.file(whole) else f"{node.module}:{alias.name}"
                    )
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id in origins
                    ):
                        used.setdefault(_member_of(origins[target.value.id], target.attr), set()).add(
                            where
                        )
            elif isinstance(node, ast.ClassDef):
                for base in map(ast.unparse, node.bases):
                    first, _, rest = base.partition(".")
                    if first in origins:
                        owner = _member_of(origins[first], rest) if rest else origins[first]
                        for part in node.body:
                            if isinstance(part, Definition) and installed.signature(
                                *_split(f"{owner}.{part.name}")
                            ):
                                used.setdefault(f"{owner}.{part.name}", set()).add(where)
    return dict(sorted(used.items()))


def _member_of(origin: str, name: str) -> str:
    return f"{origin}.{name}" if ":" in origin else f"{origin}:{name}"


def _split(spot: str) -> tuple[str, str]:
    module, _, name = spot.partition(":")
    return module, name


@cache
def installed_folder() -> Path:
    """Return the folder that holds the installed vLLM. Raises SystemExit where there is none."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vllm_contract: vLLM is not installed: name the folder that holds a folder vllm")
    return Path(spec.origin).parents[1]


def differences(folder: Path, record: dict[str, Any], root: Path = ROOT) -> list[str]:
    """Return a sentence for each difference between a release and what the product relies on."""
    tree = Tree(folder)
    sentences = []
    for forms, files in names(root).items():
        if not any(map(tree.has, forms.split(FORMS))):
            sentences.append(f"name {forms} is {_gone(tree, forms.rpartition('.')[2])}; {_users(files)}")
    known = folder / "vllm/envs.py"
    for variable, files in variables(root).items():
        if known.is_file() and f'"{variable}"' not in known.read_text("utf-8"):
            sentences.append(f"name {variable} is gone from vllm/envs.py; {_users(files)}")
    for file, spots in record["signatures"].items():
        for forms, signatures in spots.items():
            found = _signature(tree, forms)
            if found is None:
                name = forms.rpartition(":")[2].rpartition(".")[2]
                sentences.append(f"name {forms} is {_gone(tree, name)}; {_users({file})}")
            elif found not in signatures:
                was = signatures[0] if signatures else "not recorded"
                sentences.append(f"signature of {forms}: was {was}, is {found}; {_users({file})}")
    for file, texts in record["texts"].items():
        for text, source in texts.items():
            path = folder / source
            if not path.is_file() or text not in " ".join(path.read_text("utf-8").split()):
                sentences.append(f"text {text!r} no longer stands in {source}; {_users({file})}")
    return sentences


def _signature(tree: Tree, forms: str) -> str | None:
    found = (tree.signature(*_split(spot)) for spot in forms.split(FORMS))
    return next((signature for signature in found if signature is not None), None)


def _gone(tree: Tree, name: str) -> str:
    places = tree.elsewhere(name)
    return f"moved to {' or '.join(places[:3])}" if places else "gone"


def _users(files: set[str]) -> str:
    return f"used by {', '.join(sorted(files))}"


def write(folder: Path, record: dict[str, Any], tried: bool) -> None:
    """Record the signatures of a release: those of the lock, or further ones of a release that was tried."""
    tree = Tree(folder)
    for spots in record["signatures"].values():
        for forms, signatures in spots.items():
            found = _signature(tree, forms)
            if found is not None and not (tried and found in signatures):
                spots[forms] = [*signatures, found] if tried else [found]
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def main() -> int:
    """Run the command. Return 1 where the release differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="folder that holds a folder vllm (default: the installed one)",
    )
    parser.add_argument("--write", action="store_true", help="record the release's signatures instead")
    parser.add_argument(
        "--tried", action="store_true", help="with --write: beside those of the locked release"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or installed_folder()
    record = json.loads(RECORD.read_text("utf-8"))
    if arguments.write:
        write(folder, record, arguments.tried)
        return 0
    sentences = differences(folder, record)
    print(*sentences, sep="\n", end="\n" if sentences else "")
    spots = sum(map(len, record["signatures"].values()))
    texts = sum(map(len, record["texts"].values()))
    counts = f"{len(names()) + len(variables())} names, {spots} signatures and {texts} texts"
    print(f"vllm_contract: {counts}, of which {len(sentences) or 'none'} differ")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
