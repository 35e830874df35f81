"""Every block of code in README and docs is run, or says why not; what is not run is checked as far as it goes.

Rows are read, recipes validated, Python is executed, commands are parsed by the command line that they are for.
"""

import asyncio
import json
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from generation.rollouts.episode import Conversation, PolicyLLM
from tests.conftest import ROOT
from tests.support.scripted import END, ScriptedEngine, merging_tokenizer, run
from tests.unit.test_docs_links import PAGES, pages
from trainer import cli
from trainer.config.recipe import known_keys
from trainer.config.schema import TrainConfig

BLOCK = re.compile(
    r"(?:^<!-- not run by the tests: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
COMMAND = re.compile(r"^(\$ |bash |\.venv/bin/|python |hotbunk \w+ )", re.MULTILINE)


def blocks(language: str) -> list[Any]:
    """Return (page, reason not to run it, code) for each block of the language on all pages."""
    matches = [
        (page.name, *match.groups()) for page in PAGES for match in BLOCK.finditer(page.read_text())
    ]
    kept = [(page, reason, code) for page, reason, kind, code in matches if kind == language]
    return [
        pytest.param(reason, code, id=f"{page}-{place}")
        for place, (page, reason, code) in enumerate(kept)
    ]


@pages
def test_every_block_has_a_language_that_is_checked_or_is_a_picture(page: Path) -> None:
    for _, language, code in BLOCK.findall(page.read_text()):
        assert language in ("bash", "python", "yaml", "json", ""), language
        assert language or not COMMAND.search(code), f"commands without a language: {code}"


@pytest.mark.parametrize(("reason", "code"), blocks("json"))
def test_rows_can_be_read(reason: str, code: str) -> None:
    assert all("prompt" in json.loads(line) for line in code.splitlines())


@pytest.mark.parametrize(("reason", "code"), blocks("yaml"))
def test_recipes_are_valid(reason: str, code: str) -> None:
    """Recipes on the pages are valid, with a model and data added where they have none."""
    recipe = yaml.safe_load(code)
    base: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}
    config = TrainConfig.model_validate(base | recipe | {"data": base["data"] | recipe.get("data", {})})
    assert config.model_fields_set == {*base, *recipe}


@pytest.mark.parametrize(("reason", "code"), blocks("python"))
def test_python_blocks_of_the_pages_run(reason: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run as imported modules, so code only for `__main__` is not run. A client's function is called."""
    compiled = compile(code, "block", "exec")
    if reason and "imports" not in reason:
        return
    served: list[Any] = []
    monkeypatch.setitem(sys.modules, "hotbunk_client", types.SimpleNamespace(serve=served.append))
    space: dict[str, Any] = {"__name__": "block"}
    exec(compiled, space)
    if served:
        assert asyncio.run(served[0]("http://127.0.0.1:1", "key", "policy", {})) == 1.0
    if "asked_for" in space:
        assert space["asked_for"]("1x", answer="0123456789") == 0.5
    if "second_thought" in space:
        engine = ScriptedEngine(lambda ids, seed: [40, 41, END])
        (done,) = run(engine, space["second_thought"], [[5, 6]], merging_tokenizer())
        assert (done.error, done.turns, done.reward, done.metrics["looks"]) == ("", 3, 1.0, 3.0)
        assert sum(done.loss_mask) == 9 and done.prompt_ids + done.response_ids == [
            *engine.prompts[-1],
            40,
            41,
            END,
        ]
    if "brief" in space:
        assert space["brief"]("It is 42", answer="42", limit=4) == 0.9


@pytest.mark.parametrize(("reason", "code"), blocks("bash"))
def test_commands_are_known_and_say_why_they_are_not_run(reason: str, code: str) -> None:
    """Every command in the documentation exists, and has a reason for not being run here. Another test runs the
    commands of the first hour that need no training.
    """
    assert reason
    variables: dict[str, str] = {}
    for line in filter(None, code.replace("\\\n", " ").splitlines()):
        if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
            continue
        line = re.sub(r"\$(\w+)", lambda match: variables[match[1]], line.partition("#")[0])
        for command in line.split("&&"):
            check(shlex.split(command))


@pytest.mark.parametrize(("kind", "name"), [(Conversation, "chat"), (PolicyLLM, "llm")])
def test_all_methods_of_conversations_are_on_their_page(kind: type, name: str) -> None:
    text = (ROOT / "docs" / "rollouts.md").read_text()
    public = [
        method for method in dir(kind) if not method.startswith("_") and callable(getattr(kind, method))
    ]
    assert [method for method in public if f"{name}.{method}(" not in text] == []


def check(words: list[str]) -> None:
    """Check that the script of a command exists, and that it takes the arguments.

    Variables before it, a container and a debugger around it are left out.
    """
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[0] == "apptainer":
        words = words[words.index("hotbunk") :]
    if words[:3] == ["python", "-m", "pdb"]:
        words = words[words.index("-m", 2) + 1 :]
    if words[0] in ("cd", "export", "git") or "pytest" in words:
        return
    if words[0] in ("hotbunk", "trainer"):
        words = [".venv/bin/hotbunk", *words[1:]]
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
        if words[1] != "scripts/train.sh":
            return
        command = words[2:] if words[2] == "sft" else ["train", *words[2:]]
    elif words[0] == ".venv/bin/python":
        source = "".join(file.read_text() for file in (ROOT / words[1]).parent.glob("*.py"))
        assert all(f'"{word}"' in source for word in words[2:] if word.startswith("--"))
        return
    else:
        assert words[0] == ".venv/bin/hotbunk"
        command = words[1:]
    arguments = cli.parse([word.strip("[]") if word == "[RECIPE]" else word for word in command])
    keys = {key for key, _ in known_keys()}
    assert {override.partition("=")[0] for override in arguments.overrides} <= keys
