"""Run one trial of scripts/try_ecosystem.sh: train two steps, check the records, and add rows to the table.

    python scripts/ecosystem/trial.py FOLDER NAME

FOLDER has models and Python environments by name. The trial is written to `trials/NAME`, and its rows to `rows.jsonl`.
The exit status is 1 where a check fails: an episode has failed, a request does not begin with all ids of the request
before, there is a gap, the number of trajectories is not as expected, or a process is left.
"""

import json
import os
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
EPISODES = 4  # episodes of each prompt in two steps
GAP = 1e-4
BEYOND = 64  # tokens that an engine may sample before a busy machine has found a stop string
END_OF_TURN = 2  # the tiny models' id of <|im_end|>
ANYTHING = f"{HERE / 'rewards.py'}:anything"


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Attributes:
        package: the package whose version the row shows.
        lines: the user's lines of code that depend on Hotbunk.
        together: True where each episode has to be a single trajectory.
    """

    package: str
    lines: str
    together: bool = True


@dataclass(frozen=True)
class Trial:
    """A training run of two steps, and what is expected of it.

    Attributes:
        environment: the Python environment that has the packages.
        rollout: the recipe's section `rollout`, with {folder} in place of the folder.
        tried: the rows of the table by name, one for each prompt.
        prompt: the text of every prompt.
        changes: further sections of the recipe.
        calls: True where tools have to be called, so that the model that calls tools is trained.
        server: arguments of a server that the environment's Python runs during the trial.
    """

    environment: str
    rollout: dict[str, Any]
    tried: dict[str, TableRow]
    prompt: str = "What is 2+3?"
    changes: dict[str, Any] = field(default_factory=dict)
    calls: bool = False
    server: tuple[str, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the data."""
        return [{"prompt": self.prompt, "framework": name, "seed": 1} for name in self.tried]


def frameworks(environment: str, **tried: TableRow) -> Trial:
    """Return the trial of agents of frameworks.py."""
    client = {
        "command": [f"{{folder}}/{environment}/bin/python", str(HERE / "frameworks.py")],
        "workers": 4,
    }
    client["env"] = {"PYTHONPATH": str(ROOT / "generation/rollouts/elsewhere")}
    return Trial(
        environment, {"client": client}, {name.replace("_", "-"): row for name, row in tried.items()}
    )


def library(
    name: str, package: str, key: str, rollout: dict[str, Any], prompt: str, **more: Any
) -> Trial:
    """Return the trial of a library that runs in one environment with Hotbunk."""
    return Trial("libraries", rollout, {name: TableRow(package, f"none: `{key}`")}, prompt, **more)


ENVIRONMENTS = "generation.rollouts.environments."
SUMS = {"taskset": {"size": 1}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}
LAKE = {
    "id": "FrozenLake-v1",
    "is_slippery": False,
    "actions": ["left", "down", "right", "up"],
    "render_mode": "ansi",
}
VERIFIERS = {
    "environment": "hotbunk_sums",
    "args": SUMS,
    "python": "{folder}/verifiers/bin/python",
    "workers": 4,
}
CERTIFICATES = {
    name: os.environ[name] for name in ("SSL_CERT_FILE", "UV_DEFAULT_INDEX") if name in os.environ
}
CHAIN = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=1&seed=1"

MCP = str(HERE / "mcp_server.py")
URL, KEY = "base URL and key", "`api_base` and key"
TRIALS = {
    "agents": frameworks(
        "agents",
        openai_chat=TableRow("openai", URL),
        openai_Responses=TableRow("openai", URL),
        anthropic=TableRow("anthropic", URL),
        openai_agents=TableRow("openai-agents", "`set_default_openai_client`"),
        # It changes special tokens such as <|im_start|> in answers that it sends back; a random model samples those.
        pydantic_ai=TableRow("pydantic-ai-slim", "`OpenAIProvider`", together=False),
        langgraph=TableRow("langgraph", URL),
        smolagents=TableRow("smolagents", KEY, together=False),  # it rewrites its history
    ),
    "litellm": frameworks("litellm", litellm=TableRow("litellm", KEY)),
    "verifiers": Trial(
        "verifiers",
        {"verifiers": VERIFIERS | {"env": CERTIFICATES | {"PYTHONPATH": str(HERE)}}},
        {"verifiers": TableRow("verifiers", "none: `rollout.verifiers`")},
    ),
    "mcp-command": library(
        "MCP by `command`",
        "mcp",
        "rollout.mcp",
        {"mcp": {"sums": {"command": [sys.executable, MCP]}}},
        "Add.",
        calls=True,
    ),
    "mcp-url": library(
        "MCP by `url`",
        "mcp",
        "rollout.mcp",
        {"mcp": {"sums": {"url": "http://127.0.0.1:8791/mcp", "session": "shared"}}},
        "Add.",
        calls=True,
        server=(MCP, "8791"),
    ),
    "gymnasium-tools": library(
        "gymnasium, tools",
        "gymnasium",
        "rollout.environment",
        {"environment": f"{ENVIRONMENTS}gymnasium:Gym", "kwargs": LAKE},
        "Play.",
        calls=True,
    ),
    "gymnasium-text": library(
        "gymnasium, text",
        "gymnasium",
        "rollout.environment",
        {"environment": f"{ENVIRONMENTS}gymnasium:GymText", "kwargs": LAKE, "max_turns": 3},
        "Play.",
    ),
    "textarena": library(
        "textarena",
        "textarena",
        "rollout.environment",
        {
            "environment": f"{ENVIRONMENTS}textarena:TextArena",
            "kwargs": {"id": "GuessTheNumber-v0"},
            "max_turns": 3,
        },
        "Play.",
    ),
    "openenv": library(
        "OpenEnv",
        "openenv-core",
        "rollout.environment",
        {"environment": f"{ENVIRONMENTS}openenv:OpenEnv", "kwargs": {"url": "http://127.0.0.1:8792"}},
        "Tell.",
        calls=True,
        server=(str(HERE / "openenv_server.py"), "8792"),
    ),
    "reasoning-gym": library(
        "reasoning-gym",
        "reasoning-gym",
        "data.path",
        {},
        "",
        changes={"data": {"path": CHAIN}, "reward": {"functions": ["reasoning_gym", ANYTHING]}},
    ),
}


def recipe(folder: Path, name: str, trial: Trial) -> dict[str, Any]:
    """Return the recipe of a trial. The random model has stop strings, without which all of its answers would be cut.

    They are so few that two empty answers in a row, which pydantic-ai refuses, are rare.
    """
    sampling = {"max_tokens": 96} if trial.calls else {"max_tokens": 256, "stop": list(string.digits)}
    sections: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(folder / "trials"), "name": name, "steps": 2},
        "model": {"path": str(folder / ("calling/model" if trial.calls else "model"))},
        "data": {
            "path": str(folder / f"trials/{name}.jsonl"),
            "max_prompt_tokens": 2048,
            "answer_key": None,
        },
        "sampling": sampling,
        "engine": {"max_model_len": 16384, "max_num_seqs": 16, "kv_cache_gib": 0.25},
        "sync": {"verify": "off"},  # verification would add requests to those that are recorded
        "policy": {"dtype": "float32", "lr": 1e-4},
        "algorithm": {"group_size": 2},
        "batch": {"prompts_per_step": len(trial.tried), "tokens_per_micro_batch": 16384},
        "tracking": {"wandb": "disabled", "completions_per_step": 100},
        "checkpoint": {"export_hf": False},
        "reward": {"functions": [ANYTHING]},
        "rollout": json.loads(json.dumps(trial.rollout).replace("{folder}", str(folder)))
        | {"max_error_rate": 1.0},
    }
    if trial.calls:
        # The model has not seen schemas in its training either
        sections["rollout"]["describe_tools"] = False
    sections["engine"]["logits_processors"] = [f"{HERE / 'recorder.py'}:Recorder"]
    if "verifiers" in trial.rollout:
        del sections["data"]["path"]
    for section, keys in trial.changes.items():
        sections[section] |= keys
    return sections


@contextmanager
def serving(folder: Path, trial: Trial) -> Iterator[None]:
    """Run the server that a trial needs, if any, and wait until it answers."""
    if not trial.server:
        yield
        return
    python = folder / trial.environment / "bin/python"
    with subprocess.Popen([str(python), *trial.server]) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                with suppress(httpx.TransportError):
                    httpx.get(f"http://127.0.0.1:{trial.server[1]}/")
                    break
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(
                        f"the server {trial.server[0]} does not answer on port {trial.server[1]}"
                    )
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


def train(folder: Path, name: str, trial: Trial) -> None:
    """Train two steps. Raises CalledProcessError where the run fails."""
    run = folder / "trials" / name
    run.parent.mkdir(exist_ok=True)
    shutil.rmtree(run, ignore_errors=True)
    run.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in trial.rows))
    run.with_suffix(".yaml").write_text(yaml.safe_dump(recipe(folder, name, trial)))
    libraries = next((folder / "libraries/lib").glob("python*/site-packages"))
    variables = {"PYTHONPATH": str(libraries), "NPROC_PER_NODE": "1"}
    variables["ECOSYSTEM_REQUESTS"] = str(run.with_suffix(".requests.json"))
    command = ["bash", str(ROOT / "scripts/train.sh"), str(run.with_suffix(".yaml")), "--resume", "none"]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def beginnings(requests: list[tuple[list[int], list[int]]], beyond: int = 0) -> int:
    """Count the requests that begin a trajectory, since their prompt does not begin with all ids of an earlier one.

    At most `beyond` of the sampled ids may be missing before the turn ends, since an engine samples more tokens before
    a stop string is found.
    """

    def goes_on(prompt: list[int], earlier: list[int], sampled: list[int]) -> bool:
        """Return True if the prompt begins with an earlier prompt and the ids sampled for it."""
        least = max(len(sampled) - beyond, 1)
        cut = [earlier + sampled[:count] + [END_OF_TURN] for count in range(least, len(sampled))]
        return any(prompt[: len(ids)] == ids for ids in [earlier + sampled, *cut])

    return sum(
        not any(goes_on(prompt, *before) for before in requests[:number])
        for number, (prompt, _) in enumerate(requests)
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def version(folder: Path, trial: Trial, package: str) -> str:
    """Return the installed version of a package in a trial's environment."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(folder / trial.environment / "bin/python"), "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def judge(folder: Path, name: str, trial: Trial) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table, and a sentence for each check that fails."""
    run = folder / "trials" / name
    answers, steps = lines_of(run / "completions.jsonl"), lines_of(run / "metrics.jsonl")
    requests = json.loads(run.with_suffix(".requests.json").read_text())
    gaps = [step["gap/max"] for step in steps if "gap/max" in step]
    calls = sum(step.get("tools/calls", 0.0) for step in steps)
    wrong = [f"failed: {answer['error']}" for answer in answers if answer["error"]][:1]
    rows = []
    for number, (label, tried) in enumerate(trial.tried.items()):
        trajectories = [answer for answer in answers if answer["prompt_id"] == number]
        good = [answer for answer in trajectories if not answer["error"]]
        if tried.together and len(good) != EPISODES:
            wrong.append(f"{label}: {len(good)} trajectories of {EPISODES} episodes")
        row = {"name": label, "version": version(folder, trial, tried.package), "lines": tried.lines}
        row |= {
            "trajectories": len(good),
            "failed": len(trajectories) - len(good),
            "gap": max(gaps, default=None),
        }
        rows.append(row)
    total = sum(row["trajectories"] for row in rows)
    if (begun := beginnings(requests, 0 if trial.calls else BEYOND)) != total:
        wrong.append(
            f"{begun} of {len(requests)} requests begin a trajectory, but there are {total} trajectories"
        )
    if any(step.get("server/retemplated") for step in steps):
        wrong.append("prompts were rendered again, since exact ids could not be kept")
    if len(gaps) < len(steps) or not max(gaps) <= GAP:
        wrong.append(f"gap/max in {len(steps)} steps: {gaps}")
    if trial.calls and not calls:
        wrong.append("no tool was called")
    if left := processes_of(folder):
        wrong.append(f"processes are left: {left}")
    return rows, wrong


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes that name the folder, except this process and its parents."""
    lines, above = [], {parent.pid for parent in psutil.Process().parents()} | {os.getpid()}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in above and str(folder) in " ".join(process.cmdline()):
                lines.append(" ".join(process.cmdline())[:200])
    return lines


def main() -> int:
    """Run the trial that the command line names. Return the exit status."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    trial = TRIALS[name]
    with serving(folder, trial):
        train(folder, name, trial)
    rows, wrong = judge(folder, name, trial)
    for row in rows:
        print(json.dumps(row))
    for sentence in wrong:
        print(f"{name}: {sentence}", file=sys.stderr)
    with (folder / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
