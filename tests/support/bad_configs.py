"""Draw wrong configurations of every kind with Hypothesis, and check what the command says about each.

Half are drawn from the schema: values of the right type at, inside and just outside of their bounds. The other half
are not: other types, NaN and huge numbers, paths, damaged files of model and data, torchrun's variables, code that does
not load.

    PYTHONPATH=.:scripts python tests/support/bad_configs.py check 600  # all of them through --dry-run, in this process
    PYTHONPATH=.:scripts python tests/support/bad_configs.py run 30     # 30 of the accepted ones, for one step each
"""

import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.conftest  # noqa: F401 - it sets the environment
from tests.support.real_run import write_recipe
from trainer.cli import main
from trainer.config.schema import TrainConfig

LONGEST = 600  # characters of an error message, in which a path counts as at most 160
SECONDS = 120  # to check one configuration
RUN_SECONDS = 240  # to train one step
AFFORDABLE = {"reward.workers": 4, "engine.kv_cache_gib": 0.25}
"""Limits of an accepted recipe that is run here: other tests need this machine's memory, too."""

Case = dict[str, Any]
"""Dotted keys of a recipe with new values; `env` holds environment variables, `files` replaces files of the folder."""


@dataclass
class Outcome:
    """The command's exit code and error messages for one case; `raised` is a traceback."""

    code: int | None = None
    messages: list[str] = field(default_factory=list)
    raised: str = ""

    @property
    def fault(self) -> str:
        """The mistake that the command made in handling the case; empty if it made none."""
        if self.raised:
            return self.raised
        lengths = (sum(min(len(word), 160) + 1 for word in line.split()) for line in self.messages)
        odd = [
            line
            for line, length in zip(self.messages, lengths, strict=True)
            if not line.startswith("hotbunk: ") or length > LONGEST
        ]
        if odd or self.code not in (0, 2) or (self.code == 2) != bool(self.messages):
            return f"exit code {self.code}: {odd or self.messages}"
        return ""


def _leaves(
    schema: dict[str, Any], node: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key of the JSON schema that is not a section, with the schema of its value."""
    for name, inner in node["properties"].items():
        target = schema["$defs"].get(inner.get("$ref", "").rpartition("/")[2])
        if target is None:
            yield path + name, inner
        else:
            yield from _leaves(schema, target, f"{path}{name}.")


_SCHEMA = TrainConfig.model_json_schema()
KEYS = dict(_leaves(_SCHEMA, _SCHEMA))


def _near(inner: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of the type that the schema names, at, inside and just outside of their bounds."""
    if "anyOf" in inner:
        return st.one_of(*map(_near, inner["anyOf"]))
    if "enum" in inner or "const" in inner:
        return st.sampled_from([*inner.get("enum", [inner.get("const")]), "other"])
    if inner.get("type") in ("integer", "number"):
        integral = inner["type"] == "integer"
        least, most = inner.get("minimum", -1), inner.get("maximum", inner.get("exclusiveMaximum", 1))
        step = 1 if integral else min(0.001, (most - least) / 8)
        ends = [
            least,
            most,
            least - step,
            most + step,
            least + step,
            most - step,
            2 * most,
            most * 10**6,
            -most,
        ]
        some = min(most, least + (64 if integral else 2))
        return st.one_of(
            st.sampled_from(ends), st.integers(least, some) if integral else st.floats(least, some)
        )
    if "prefixItems" in inner:
        return st.tuples(*map(_near, inner["prefixItems"])).map(list)
    if inner.get("type") == "array":
        return st.lists(_near(inner["items"]), max_size=2)
    kinds = {"boolean": st.booleans(), "null": st.none(), "object": st.just({})}
    return kinds.get(
        inner.get("type", ""), st.sampled_from(["", "a", "none", "auto", "-", "a.b", "a" * 64])
    )


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "a\nb",
    "a" * 300,
    "a" * 5000,
    "9" * 5000,
    "${run.name}",
    "${x",
    "../up",
    "🙂",
]
NUMBERS = [
    0,
    -1,
    1e300,
    -1e300,
    1e-300,
    2**63,
    2**70,
    10**12,
    10**400,
    0.5,
    *map(float, ("nan", "inf", "-inf")),
]
OTHERS = [None, True, [], {}, [[]], [None], {"a": {"b": 1}}, {1: 2}, [1, "a"], {"": ""}]
PATHS = [
    "/proc/nothing",
    "/proc/1/x",
    "/dev/null/x",
    "/sys/x",
    "{file}/below",
    "{file}",
    "/dev/zero",
    "/b" * 2100,
]
NOT_COUNTS = ["abc", "0", "-1", "", " 1", "1.0", "1e300", "9" * 5000, "١"]
MODEL_KEYS = """
text_config rope_parameters rope_scaling layer_types num_attention_heads num_hidden_layers max_position_embeddings
quantization_config model_type architectures num_experts hidden_size num_key_value_heads head_dim vocab_size hidden_act
intermediate_size kv_lora_rank dtype tie_word_embeddings eos_token_id rms_norm_eps rope_theta
""".split()  # noqa: SIM905
MODEL_VALUES = [
    None,
    "x",
    "",
    [],
    [1],
    {},
    {"rope_type": "yarn", "factor": "a"},
    -1,
    0,
    1.5,
    2**70,
    True,
    7,
]
DEEP_OBJECT = '{"a":' * 900 + "1" + "}" * 900
MODEL_FILES = ["[]", '"text"', "null", "7", "", "{", "{}", _nested(100_000), DEEP_OBJECT, "\0", "NaN"]
ROWS = [
    "",
    "{}",
    "null",
    "[1]",
    '{"prompt": 3}',
    '{"prompt": {"a": 1}, "answer": 1}',
    '{"prompt": "a", "ans',
    "\0",
]
ROWS += [f'{{"prompt": "a", "answer": {_nested(depth)}}}' for depth in (60, 900, 3000)]
RECIPES = [
    "",
    "[]",
    "run: 3",
    "run: &a [*a]",
    "a: {b: [}",
    "\0",
    "run: {name: !!python/name:os.system }",
    "run: ${run}",
]
RECIPES += [f"engine: {{extra: {{a: {_nested(depth)}}}}}" for depth in (40, 200, 900)]
RECIPES += [
    f"run: {{seed: {'9' * 5000}}}",
    "includes: [recipe.yaml]",
    "includes: ['\\0']",
    "run: {name: 2026-99-99}",
]
RAISED = [
    "KeyboardInterrupt",
    "SystemExit(3)",
    "GeneratorExit",
    "BaseException('x' * 5000)",
    "RecursionError",
    "1/0",
]
CODE = [*(f"raise {one}\n" for one in RAISED), "def f(:\n", "\0", "f = 3\n", "f = max\n", "import f\n"]
CODE_KEYS = [f"rollout.{key}" for key in ("tools", "custom", "environment", "sampler", "client")] + [
    "reward.functions"
]
PATH_KEYS = """
run.output_dir run.name model.path data.path model.tokenizer checkpoint.resume algorithm.teacher
eval.datasets.held_out.path
""".split()  # noqa: SIM905
RANK_VARIABLES = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
EXTRA = """
model tensor_parallel_size no_such_argument hf_overrides additional_config seed worker_cls quantization
""".split()  # noqa: SIM905
TEMPLATE = """
tokenize conversation messages tools return_dict chat_template enable_thinking self documents
""".split()  # noqa: SIM905


def _hostile() -> st.SearchStrategy[Case]:
    """Cases with one thing that the schema does not describe."""

    def pairs(keys: list[str], values: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.tuples(st.sampled_from(keys), st.sampled_from(values)).map(lambda pair: dict([pair]))

    odd = [*TEXTS, *NUMBERS, *OTHERS]
    code = st.tuples(st.sampled_from(CODE_KEYS), st.sampled_from(CODE))
    return st.one_of(
        pairs(sorted(KEYS), odd),
        pairs(sorted(KEYS), NUMBERS),
        pairs(PATH_KEYS, [*PATHS, *TEXTS]),
        pairs(RANK_VARIABLES, NOT_COUNTS).map(lambda pair: {"env": pair}),
        st.sampled_from(MODEL_FILES).map(lambda text: {"files": {"model/config.json": text}}),
        pairs(MODEL_KEYS, MODEL_VALUES).map(lambda pair: {"files": {"model/config.json": pair}}),
        code.map(lambda pair: {"files": {"code.py": pair[1]}, pair[0]: "code"}),
        pairs(EXTRA, odd).map(lambda pair: {"engine.extra": pair}),
        pairs(TEMPLATE, odd).map(lambda pair: {"data.chat_template_kwargs": pair}),
        st.sampled_from(ROWS).map(lambda row: {"files": {"data/train.jsonl": row + "\n"}}),
        st.sampled_from(RECIPES).map(lambda text: {"files": {"recipe.yaml": text}}),
    )


def cases() -> st.SearchStrategy[Case]:
    """Cases of which half are near the schema's bounds and half are outside of it."""
    near = st.sampled_from(sorted(KEYS)).flatmap(lambda key: st.tuples(st.just(key), _near(KEYS[key])))
    return st.one_of(st.lists(near, min_size=1, max_size=3).map(dict), _hostile())


class Folder:
    """A correct recipe with its model and data, which each case changes for a moment."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        for file in model.iterdir():
            (folder / "model" / file.name).write_bytes(file.read_bytes())
        self.recipe = write_recipe(
            folder, folder / "model", run={"steps": 1, "name": "run", "device": "cpu"}
        )
        self._values = yaml.safe_load(self.recipe.read_text())

    @contextlib.contextmanager
    def spoilt(self, case: Case) -> Iterator[None]:
        """Apply the case to the folder and the environment, and undo it at the end."""
        values = json.loads(json.dumps(self._values))
        for key, value in case.items():
            if key not in ("env", "files"):
                *sections, name = key.split(".")
                reduce(lambda outer, inner: outer.setdefault(inner, {}), sections, values)[name] = (
                    self._filled(key, value)
                )
        texts = {"recipe.yaml": yaml.dump(values), **case.get("files", {})}
        model = self.folder / "model" / "config.json"
        if isinstance(config := texts.get("model/config.json"), dict):
            texts["model/config.json"] = json.dumps(json.loads(model.read_text()) | config)
        before = {
            name: (self.folder / name).read_bytes() for name in texts if (self.folder / name).exists()
        }
        for name, text in texts.items():
            (self.folder / name).write_bytes(text.encode())
        try:
            with mock.patch.dict(os.environ, case.get("env", {})):
                yield
        finally:
            for name in texts:
                (self.folder / name).unlink()
            for name, content in before.items():
                (self.folder / name).write_bytes(content)
            for name in [name for name in sys.modules if name.startswith("beside_")]:
                del sys.modules[name]

    def _filled(self, key: str, value: Any) -> Any:
        if value == "code":
            name = f"{self.folder}/code.py:f"
            return {"reward.functions": [{"name": name}], "rollout.tools": [name]}.get(key, name)
        return value.replace("{file}", str(self.recipe)) if isinstance(value, str) else value

    def judge(self, case: Case, *options: str) -> Outcome:
        """Run the command on the changed recipe, in this process."""
        outcome, errors = Outcome(), io.StringIO()
        with (
            self.spoilt(case),
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                outcome.code = main(["train", str(self.recipe), *options])
            except BaseException:
                outcome.raised = traceback.format_exc()
        lines = errors.getvalue().splitlines()
        outcome.messages = [line for line in lines if line.startswith("hotbunk: ")] or lines * (
            outcome.code == 2
        )
        return outcome


def search(folder: Folder, examples: int, seen: Callable[[Case, Outcome], None], *options: str) -> None:
    """Check `examples` cases, the same ones in every run, and passes each with its outcome to `seen`."""
    checks = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    @checks
    @given(cases())
    def judged(case: Case) -> None:
        seen(case, folder.judge(case, *options))

    judged()


def _check(folder: Folder, examples: int) -> list[Case]:
    """Run the long search, print the faults, and return the accepted cases."""
    accepted, faults, refused, times = [], [], 0, []
    last = time.monotonic()

    def seen(case: Case, outcome: Outcome) -> None:
        nonlocal refused, last
        signal.alarm(SECONDS)
        times.append((time.monotonic() - last, case))
        last = time.monotonic()
        refused += outcome.code == 2
        if fault := outcome.fault:
            faults.append(case)
            print(f"--- {_brief(case)}\n{fault}\n", flush=True)
        elif outcome.code == 0:
            accepted.append(case)

    search(folder, examples, seen, "--dry-run")
    signal.alarm(0)
    slowest = max(times, key=lambda pair: pair[0])
    print(
        f"{len(times)} cases: {refused} refused, {len(accepted)} accepted, {len(faults)} faults; the slowest took"
    )
    print(f"{slowest[0]:.1f} s: {_brief(slowest[1])}")
    return accepted


def _run(folder: Folder, cases: list[Case]) -> None:
    """Run each case for one step in a fork of this process, which has imported everything heavy."""

    import trainer.loop  # noqa: F401

    for number, case in enumerate(cases):
        lowered = {
            key: min(value, AFFORDABLE[key]) if key in AFFORDABLE else value
            for key, value in case.items()
        }
        log, began = folder.folder / f"{number}.log", time.monotonic()
        with folder.spoilt({**lowered, "run.steps": 1, "run.name": f"run{number}"}):
            if (pid := os.fork()) == 0:
                _become_the_run(folder.recipe, log)
            code = _waited(pid)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raised = [line for line in lines if line.startswith("Traceback")]
        message = next(
            (line for line in reversed(lines) if line.startswith("hotbunk: ")),
            lines[-1] if lines else "",
        )
        late = code == 124 and any("exceeded a deadline" in line for line in lines)
        well = code == 0 or late or (code == 2 and not raised)
        verdict, seconds = "well" if well else "NOT WELL", time.monotonic() - began
        print(
            f"{number}: {verdict}, exit code {code}, {seconds:.0f} s: {_brief(case)}\n     {message}",
            flush=True,
        )
        if not well:
            print("\n".join(lines[-60:]))


def _become_the_run(recipe: Path, log: Path) -> None:
    code = 1
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = main(["train", str(recipe)])
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _waited(pid: int) -> int:
    """Return the exit code, or 1000 if the run and its children had to be killed after RUN_SECONDS."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.2)
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os.waitpid(pid, 0)
    return 1000


def _brief(case: Case) -> str:
    text = repr(case)
    return text if len(text) < 400 else f"{text[:300]} … {text[-80:]}"


if __name__ == "__main__":
    from trainer.commands.tiny_model import make_tiny_model

    command, count = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_DATASETS_CACHE"] = f"{place}/cache"
        made = make_tiny_model(Path(place) / "tiny", layers=2, intermediate_size=128)
        (Path(place) / "work").mkdir()
        folder = Folder(Path(place) / "work", made)
        accepted = _check(folder, count if command == "check" else 600)
        if command == "run":
            _run(folder, random.Random(0).sample(accepted, count))
