"""`rollout.verifiers` with a small stand-in for the package; tests/engine has the real one, where it is installed."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from generation.rollouts.client import Scored
from generation.rollouts.client_process import ClientError, ClientProcesses
from generation.rollouts.environments import verifiers
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.checks import find_problems
from trainer.config.recipe import load_config, to_yaml
from trainer.data import load_prompts
from trainer.errors import UserError

PACKAGE = {
    "__init__.py": "",
    "v1/__init__.py": "",
    "v1/utils/__init__.py": "",
    "v1/clients.py": """
from types import SimpleNamespace as ModelContext
""",
    "v1/configs/__init__.py": "",
    "v1/configs/client.py": """
from types import SimpleNamespace as EvalClientConfig
""",
    "v1/utils/loaders.py": """
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import ClassVar

from pydantic import BaseModel, Field

SERVED = []

class Data(BaseModel):
    idx: int
    name: str | None = None
    prompt: str | None = None
    answer: int | None = None
    secret: int = Field(0, exclude=True)

    @property
    def prompt_text(self):
        return self.prompt or ""

class Task:
    def __init__(self, data, config=None):
        self.data, self.config = data, config

    @classmethod
    def data_type(cls):
        return Data

class Taskset:
    def __init__(self, size, secret):
        self.size, self.secret = size, secret

    @classmethod
    def task_type(cls):
        return Task

    def __iter__(self):
        for n in range(self.size):
            text = {"prompt": f"{n}+1"} if n else {"name": "zero"}
            yield Task(Data(idx=n, answer=n + 1, secret=self.secret, **text))

def resolve_env_config(data):
    if data["taskset"]["id"] != "sums":
        raise ModuleNotFoundError(f"taskset {data['taskset']['id']!r} not found")
    return data

class Env:
    def __init__(self, config):
        own = config["taskset"]
        self.taskset = Taskset(own.get("size", 3), own.get("secret", 0))
        self.config = SimpleNamespace(taskset=SimpleNamespace(task=config.get("task")))

    @asynccontextmanager
    async def serving(self):
        SERVED.append(0)
        yield
        SERVED.append("closed")

    def slots(self, task):
        return [task]

    async def run_slot(self, task, ctx):
        SERVED[-1] += 1
        error = SimpleNamespace(type="TaskError", message="no such sum")
        if task.data.idx == 2:
            return SimpleNamespace(ok=False, errors=[error], traces=[])
        rewards = {"right": SimpleNamespace(value=2.0 * task.data.answer), "unscored": None}
        metrics = {"served": SERVED[-1], "servers": SERVED.count("closed") + 1, "unscored": None}
        metrics |= {"settings": task.config}
        metrics["asked"] = f"{ctx.client.base_url} {os.environ[ctx.client.api_key_var]} {ctx.model}"
        trace = SimpleNamespace(errors=[], rewards=rewards, metrics=metrics)
        return SimpleNamespace(ok=True, errors=[error], traces=[trace] * (2 if task.data.idx == 0 else 1))

load_environment = Env
""",
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    for name, text in PACKAGE.items():
        file = tmp_path / "library" / "verifiers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    env = {"PYTHONPATH": str(tmp_path / "library")}
    args = {"taskset": {"size": 5}, "task": 7}
    defaults = {
        "environment": "sums",
        "args": args,
        "python": sys.executable,
        "env": env,
        "tasks": 100,
        "workers": 1,
    }
    return defaults | {"timeout_s": 60.0}


def test_tasks_are_rows_from_the_first_on(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[int](), ClientProcesses.run

    async def counted(self: ClientProcesses, *words: Any) -> Scored:
        asked.append(words[-1]["next"])
        return await ask(self, *words)

    monkeypatch.setattr(verifiers, "_TOGETHER", 2)
    monkeypatch.setattr(ClientProcesses, "run", counted)
    rows = verifiers.rows(settings)
    assert set(asked) == {2} and len(asked) >= 3  # so many in a line
    assert [row["prompt"] for row in rows] == ["zero", "1+1", "2+1", "3+1", "4+1"]
    assert [row["answer"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert verifiers.rows(settings | {"tasks": 3}) == rows[:3]


def test_an_environment_without_tasks_is_reported(settings: dict[str, Any]) -> None:
    for changes, sentence in (
        (
            {"environment": "none"},
            "'none' of verifiers lists no tasks: .*ModuleNotFoundError: taskset 'none' not found",
        ),
        ({"env": {}}, "'sums' of verifiers lists no tasks: .*No module named 'verifiers'"),
        (
            {"args": {"taskset": {"secret": 3}}},
            "task 0 differs after it was written as JSON and read again",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            verifiers.rows(settings | changes)


def test_rewards_and_metrics_are_those_of_the_environment(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent's rewards are weighted by name; a failed episode says why, and the next one is served."""
    rows = verifiers.rows(settings)

    async def play() -> list[Scored | str]:
        pool, outcomes = ClientProcesses(verifiers.command(settings)), list[Scored | str]()
        try:
            for n, row in enumerate([*rows, *rows[3:] * 40]):
                try:
                    outcomes.append(await pool.run("http://here", f"key {n}", "policy", row))
                except ClientError as error:
                    outcomes.append(str(error))
        finally:
            await pool.aclose()
        return outcomes

    results = asyncio.run(play())
    assert "the episode has 2 agents, but only one can be trained" in str(results[0])
    assert "TaskError: no such sum" in str(results[2])
    good = results[1]
    assert isinstance(good, Scored) and good.reward == {"right": 4.0}
    assert good.metrics == {
        "served": 2,
        "servers": 1,
        "settings": 7,
        "asked": "http://here key 1 policy",
    }
    served = [
        (result.metrics["served"], result.metrics["servers"])
        for result in results
        if isinstance(result, Scored)
    ]
    assert served[-1] == (21, 2) and max(served)[0] == 64  # servers are renewed after as many episodes


def test_tasks_of_a_verifiers_environment_are_the_prompts_of_a_recipe(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"model": {"path": "m"}, "rollout": {"verifiers": settings}})
    )
    config = load_config(tmp_path / "r.yaml", [])
    tokenizer = small_tokenizer()
    prompts = load_prompts(config.data, tokenizer)
    assert [prompt.row["prompt"] for prompt in prompts] == ["zero", "1+1", "2+1", "3+1", "4+1"]
    assert all(prompt.row["task"] for prompt in prompts)
    # A run's own, with other settings on the command line
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "config.yaml", ["rollout.verifiers.tasks=2"])
    assert len(load_prompts(again.data, tokenizer)) == 2
    with pytest.raises(
        UserError, match="verifiers:none .* cannot be read: the environment 'none' .* lists no tasks"
    ):
        load_prompts(
            load_config(tmp_path / "r.yaml", ["rollout.verifiers.environment=none"]).data, tokenizer
        )


def test_other_prompts_and_keyword_arguments_are_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    recipe = {"model": {"path": str(tmp_path)}, "rollout": {"verifiers": settings}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))

    def problems(*overrides: str) -> str:
        return "\n".join(find_problems(load_config(tmp_path / "r.yaml", list(overrides)), "train", {}))

    assert "data.path" not in problems() and "rollout" not in problems()
    assert "data.path is set, but the tasks of rollout.verifiers are the prompts" in problems(
        "data.path=x.jsonl"
    )
    assert "rollout.kwargs is set, but" in problems("rollout.kwargs={a: 1}")
    assert "rollout.environment and rollout.verifiers are both set" in problems(
        "rollout.environment=a:B"
    )
    assert "data.path: there is no file or folder verifiers:sums" in problems(
        "rollout.verifiers=null", "data.path=verifiers:sums"
    )
