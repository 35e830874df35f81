"""One training of scripts/try_ecosystem.sh: two steps, then what was recorded is looked at, and a row is added.

    python scripts/ecosystem/trial.py FOLDER NAME

FOLDER has models and the environments of Python by name, and gets `trials/NAME` and lines of `rows.jsonl`. The exit
status is 1 where anything is not as it should be: a failed episode, a request whose ids do not begin with all ids of
the one before, a gap, another number of trajectories than expected, a process that is left.
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
EPISODES = 4  # of each prompt, in two steps
GAP = 1e-4
BEYOND = 64  # tokens: an engine goes on while a busy machine has yet to find a stop string
END_OF_TURN = 2  # the tiny models' id of <|im_end|>
ANYTHING = f"{HERE / 'rewards.py'}:anything"


@dataclass(frozen=True)
class Tried:
    """A row of the table: the package whose version it shows, the user's own lines that know Hotbunk, and whether each
    episode has to be one trajectory.
    """

    package: str
    lines: str
    together: bool = True


@dataclass(frozen=True)
class Trial:
    """What is trained, and how.

    Attributes:
        environment: the Python that has the packages.
        rollout: the recipe's section, with {folder} where the folder goes.
        tried: the rows of the table, by name, one for each prompt.
        prompt: the text of every prompt.
        changes: further sections of the recipe.
        calls: tools have to be called, so that the model that does is trained.
        server: arguments of a server that the environment's Python runs meanwhile.
    """

    environment: str
    rollout: dict[str, Any]
    tried: dict[str, Tried]
    prompt: str = "What is 2+3?"
    changes: dict[str, Any] = field(default_factory=dict)
    calls: bool = False
    server: tuple[str, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The data."""
        return [{"prompt": self.prompt, "framework": name, "seed": 1} for name in self.tried]


def frameworks(environment: str, **tried: Tried) -> Trial:
    """Agents of frameworks.py."""
    client = {"command": [f"{{folder}}/{environment}/bin/python", str(HERE / "frameworks.py")], "workers": 4}
    client["env"] = {"PYTHONPATH": str(ROOT / "generation/rollouts/elsewhere")}
    return Trial(environment, {"client": client}, {name.replace("_", "-"): each for name, each in tried.items()})


def library(name: str, package: str, key: str, rollout: dict[str, Any], prompt: str, **more: Any) -> Trial:
    """A library that runs beside Hotbunk, in an environment that has both."""
    return Trial("libraries", rollout, {name: Tried(package, f"none: `{key}`")}, prompt, **more)


ENVIRONMENTS = "generation.rollouts.environments."
SUMS = {"taskset": {"size": 1}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}
LAKE = {"id": "FrozenLake-v1", "is_slippery": False, "actions": ["left", "down", "right", "up"], "render_mode": "ansi"}
VERIFIERS = {"environment": "hotbunk_sums", "args": SUMS, "python": "{folder}/verifiers/bin/python", "workers": 4}
CERTIFICATES = {name: os.environ[name] for name in ("SSL_CERT_FILE", "UV_DEFAULT_INDEX") if name in os.environ}
CHAIN = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=1&seed=1"

MCP = str(HERE / "mcp_server.py")
URL, KEY = "base URL and key", "`api_base` and key"
TRIALS = {
    "agents": frameworks(
        "agents",
        openai_chat=Tried("openai", URL),
        openai_Responses=Tried("openai", URL),
        anthropic=Tried("anthropic", URL),
        openai_agents=Tried("openai-agents", "`set_default_openai_client`"),
        # It alters special tokens in what it sends back, <|im_start|> for one, which a random model samples.
        pydantic_ai=Tried("pydantic-ai-slim", "`OpenAIProvider`", together=False),
        langgraph=Tried("langgraph", URL),
        smolagents=Tried("smolagents", KEY, together=False),  # it rewrites its history
    ),
    "litellm": frameworks("litellm", litellm=Tried("litellm", KEY)),
    "verifiers": Trial(
        "verifiers",
        {"verifiers": VERIFIERS | {"env": CERTIFICATES | {"PYTHONPATH": str(HERE)}}},
        {"verifiers": Tried("verifiers", "none: `rollout.verifiers`")},
    ),
    "mcp-command": library(
        "MCP by `command`", "mcp", "rollout.mcp", {"mcp": {"sums": {"command": [sys.executable, MCP]}}},
        "Add.", calls=True,
    ),
    "mcp-url": library(
        "MCP by `url`", "mcp", "rollout.mcp",
        {"mcp": {"sums": {"url": "http://127.0.0.1:8791/mcp", "session": "shared"}}},
        "Add.", calls=True, server=(MCP, "8791"),
    ),
    "gymnasium-tools": library(
        "gymnasium, tools", "gymnasium", "rollout.environment",
        {"environment": f"{ENVIRONMENTS}gymnasium:Gym", "kwargs": LAKE}, "Play.", calls=True,
    ),
    "gymnasium-text": library(
        "gymnasium, text", "gymnasium", "rollout.environment",
        {"environment": f"{ENVIRONMENTS}gymnasium:GymText", "kwargs": LAKE, "max_turns": 3}, "Play.",
    ),
    "textarena": library(
        "textarena", "textarena", "rollout.environment",
        {"environment": f"{ENVIRONMENTS}textarena:TextArena", "kwargs": {"id": "GuessTheNumber-v0"}, "max_turns": 3},
        "Play.",
    ),
    "openenv": library(
        "OpenEnv", "openenv-core", "rollout.environment",
        {"environment": f"{ENVIRONMENTS}openenv:OpenEnv", "kwargs": {"url": "http://127.0.0.1:8792"}},
        "Tell.", calls=True, server=(str(HERE / "openenv_server.py"), "8792"),
    ),
    "reasoning-gym": library(
        "reasoning-gym", "reasoning-gym", "data.path", {}, "",
        changes={"data": {"path": CHAIN}, "reward": {"functions": ["reasoning_gym", ANYTHING]}},
    ),
}  # fmt: skip


def recipe(folder: Path, name: str, trial: Trial) -> dict[str, Any]:
    """The recipe; with stop strings for the random model, whose answers would else all be cut: few enough that an empty
    answer is rare, which pydantic-ai takes once in a row.
    """
    sampling = {"max_tokens": 96} if trial.calls else {"max_tokens": 256, "stop": list(string.digits)}
    own: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(folder / "trials"), "name": name, "steps": 2},
        "model": {"path": str(folder / ("calling/model" if trial.calls else "model"))},
        "data": {"path": str(folder / f"trials/{name}.jsonl"), "max_prompt_tokens": 2048, "answer_key": None},
        "sampling": sampling,
        "engine": {"max_model_len": 16384, "max_num_seqs": 16, "kv_cache_gib": 0.25},
        "sync": {"verify": "off"},  # which asks the engine for answers of its own
        "policy": {"dtype": "float32", "lr": 1e-4},
        "algorithm": {"group_size": 2},
        "batch": {"prompts_per_step": len(trial.tried), "tokens_per_micro_batch": 16384},
        "tracking": {"wandb": "disabled", "completions_per_step": 100},
        "checkpoint": {"export_hf": False},
        "reward": {"functions": [ANYTHING]},
        "rollout": json.loads(json.dumps(trial.rollout).replace("{folder}", str(folder))) | {"max_error_rate": 1.0},
    }
    if trial.calls:
        own["rollout"]["describe_tools"] = False  # the model was not shown schemas either
    own["engine"]["logits_processors"] = [f"{HERE / 'recorder.py'}:Recorder"]
    if "verifiers" in trial.rollout:
        del own["data"]["path"]
    for section, keys in trial.changes.items():
        own[section] |= keys
    return own


@contextmanager
def serving(folder: Path, trial: Trial) -> Iterator[None]:
    """The server that a trial needs, from when it answers on."""
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
                    raise SystemExit(f"{trial.server[0]} does not serve")
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


def train(folder: Path, name: str, trial: Trial) -> None:
    """Two steps. Raises CalledProcessError where the run fails."""
    own = folder / "trials" / name
    own.parent.mkdir(exist_ok=True)
    shutil.rmtree(own, ignore_errors=True)
    own.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in trial.rows))
    own.with_suffix(".yaml").write_text(yaml.safe_dump(recipe(folder, name, trial)))
    libraries = next((folder / "libraries/lib").glob("python*/site-packages"))
    variables = {"PYTHONPATH": str(libraries), "NPROC_PER_NODE": "1"}
    variables["ECOSYSTEM_REQUESTS"] = str(own.with_suffix(".requests.json"))
    command = ["bash", str(ROOT / "scripts/train.sh"), str(own.with_suffix(".yaml")), "--resume", "none"]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def beginnings(requests: list[tuple[list[int], list[int]]], beyond: int = 0) -> int:
    """How many requests have a prompt that does not begin with all ids of one before: each begins a trajectory.

    At most `beyond` of the sampled ids may be missing before the turn ends: an engine samples some more before it
    learns of a stop string.
    """

    def goes_on(prompt: list[int], asked: list[int], sampled: list[int]) -> bool:
        """The prompt begins with a request and what it gave."""
        least = max(len(sampled) - beyond, 1)
        cut = [asked + sampled[:count] + [END_OF_TURN] for count in range(least, len(sampled))]
        return any(prompt[: len(begun)] == begun for begun in [asked + sampled, *cut])

    return sum(
        not any(goes_on(prompt, *before) for before in requests[:number]) for number, (prompt, _) in enumerate(requests)
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def version(folder: Path, trial: Trial, package: str) -> str:
    """The installed version of a package in a trial's environment."""
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(folder / trial.environment / "bin/python"), "-c", asked]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def judge(folder: Path, name: str, trial: Trial) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the table, and what is wrong."""
    run = folder / "trials" / name
    answers, steps = lines_of(run / "completions.jsonl"), lines_of(run / "metrics.jsonl")
    requests = json.loads(run.with_suffix(".requests.json").read_text())
    gaps = [step["gap/max"] for step in steps if "gap/max" in step]
    calls = sum(step.get("tools/calls", 0.0) for step in steps)
    wrong = [f"failed: {answer['error']}" for answer in answers if answer["error"]][:1]
    rows = []
    for number, (label, tried) in enumerate(trial.tried.items()):
        own = [answer for answer in answers if answer["prompt_id"] == number]
        good = [answer for answer in own if not answer["error"]]
        if tried.together and len(good) != EPISODES:
            wrong.append(f"{label}: {len(good)} trajectories of {EPISODES} episodes")
        found = {"name": label, "version": version(folder, trial, tried.package), "lines": tried.lines}
        rows.append(found | {"trajectories": len(good), "failed": len(own) - len(good), "gap": max(gaps, default=None)})
    if (begun := beginnings(requests, 0 if trial.calls else BEYOND)) != sum(row["trajectories"] for row in rows):
        wrong.append(f"of {len(requests)} requests {begun} begin anew, but that is not the number of trajectories")
    if any(step.get("server/retemplated") for step in steps):
        wrong.append("prompts were rendered anew")
    if len(gaps) < len(steps) or not max(gaps) <= GAP:
        wrong.append(f"gap/max in {len(steps)} steps: {gaps}")
    if trial.calls and not calls:
        wrong.append("no tool was called")
    if left := processes_of(folder):
        wrong.append(f"left behind: {left}")
    return rows, wrong


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name the folder; those above this one are left out."""
    found, above = [], {parent.pid for parent in psutil.Process().parents()} | {os.getpid()}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in above and str(folder) in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline())[:200])
    return found


def main() -> int:
    """One trial by the command line; the exit status."""
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
