"""The shell scripts on machines that lack something, the tiny model and its task.

The scripts run in a copy of the clone, with programs replaced by stubs; the tests install and train nothing.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.examples.tasks import arithmetic, chain_sums
from tests.conftest import ROOT
from tests.support.rows import read_rows
from trainer.commands import tiny_model

PROGRAMS = (
    "awk",
    "bash",
    "cat",
    "cp",
    "cut",
    "df",
    "dirname",
    "flock",
    "grep",
    "mkdir",
    "nproc",
    "rm",
    "sha256sum",
    "tr",
)


def write_stub(path: Path, body: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone without .venv, and beside it `bin`: a PATH with a good Python and compiler, and no GPU."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    programs = root / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is not installed"))
    write_stub(programs / "python3", f'exec {sys.executable} "$@"')
    write_stub(programs / "g++", "exit 0")
    return root


def run_script(
    clone: Path, script: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"scripts/{script}", *arguments],
        cwd=clone,
        env={"PATH": str(clone / "bin"), "HOME": str(clone), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def old_python(programs: Path) -> None:
    write_stub(programs / "python3", '[ "$1" = -V ] && echo Python 3.10.4 || exit 1')


def new_python(programs: Path) -> None:
    """Make the Python report a release that no lock is for."""
    release = "import sys; sys.version_info = (3, 14, 0, 'final', 0)"
    body = f"""[ "$1" = -V ] && echo Python 3.14.0 || exec {sys.executable} -c "{release}; exec(sys.argv[1])" "$2" """
    write_stub(programs / "python3", body)


def no_python(programs: Path) -> None:
    (programs / "python3").unlink()


def no_compiler(programs: Path) -> None:
    (programs / "g++").unlink()


def no_headers(programs: Path) -> None:
    write_stub(
        programs / "python3", f'[[ $2 == *get_path* ]] && echo /nowhere || exec {sys.executable} "$@"'
    )


def no_venv(programs: Path) -> None:
    write_stub(programs / "python3", f'[[ $2 == *ensurepip* ]] && exit 1 || exec {sys.executable} "$@"')


def full_disk(programs: Path) -> None:
    (programs / "df").unlink()
    write_stub(
        programs / "df", "echo Filesystem 1024-blocks Used Available Capacity; echo / 9 8 2097152 99%"
    )


@pytest.mark.parametrize(
    ("lack", "phrases"),
    [
        (old_python, ["Python 3.11, 3.12 or 3.13 is needed", "Python 3.10.4", "PYTHON="]),
        (new_python, ["Python 3.11, 3.12 or 3.13 is needed", "Python 3.14.0", "PYTHON="]),
        (no_python, ["Python 3.11, 3.12 or 3.13 is needed", "not there", "PYTHON="]),
        (no_compiler, ["C++ compiler", "apt install g++", "CXX="]),
        (no_headers, ["/nowhere/Python.h", "-dev"]),
        (no_venv, ["venv module", "-venv"]),
        (full_disk, ["2 GiB of free disk space", "6 are needed"]),
    ],
)
def test_setup_names_what_is_missing_before_it_creates_anything(
    clone: Path, lack: Callable[[Path], None], phrases: list[str]
) -> None:
    lack(clone / "bin")
    before = sorted(clone.iterdir())
    done = run_script(clone, "setup.sh")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert all(words in done.stderr for words in phrases), done.stderr
    assert sorted(clone.iterdir()) == before


def test_setup_refuses_an_environment_that_is_not_its_own(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "precious").touch()
    done = run_script(clone, "setup.sh")
    assert done.returncode == 2
    assert "move it away" in done.stderr
    assert (clone / ".venv" / "precious").exists()


# Stands for `python -m venv`: the new environment's Python and uv note what they are asked for, and succeed or fail.
RECORDING_PYTHON = """
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p .venv/bin .venv/lib/python3.11/site-packages
    echo '#!/bin/bash' | tee .venv/bin/python .venv/bin/uv >/dev/null
    echo 'echo python "$@" >> log' >> .venv/bin/python
    echo 'echo uv "$@" >> log; exit $UV_STATUS' >> .venv/bin/uv
    chmod +x .venv/bin/*
else
    exec {python} "$@"
fi
"""


@pytest.fixture
def recorded(clone: Path) -> Callable[..., str]:
    """Run setup.sh without real installations; return the calls of the environment's programs."""
    for name in ("tee", "chmod"):
        (clone / "bin" / name).symlink_to(shutil.which(name) or "")
    write_stub(clone / "bin" / "python3", RECORDING_PYTHON.replace("{python}", sys.executable))

    def setup(uv_status: int = 0, **environment: str) -> str:
        log = clone / "log"
        log.unlink(missing_ok=True)
        done = run_script(clone, "setup.sh", UV_STATUS=str(uv_status), **environment)
        assert done.returncode == 0, done.stderr
        passed_over = (
            "python -c \n",
            "python -m pip --disable-pip-version-check --no-input --quiet install --dry-run",
        )
        return "".join(
            line for line in log.read_text().splitlines(True) if not line.startswith(passed_over)
        )

    return setup


def test_setup_installs_torch_with_dependencies_and_the_lock_without(
    recorded: Callable[..., str],
) -> None:
    torch_first, then_all = recorded().splitlines()
    assert torch_first.endswith("--constraint scripts/requirements/cpu.txt torch setuptools uv")
    assert "--no-deps" not in torch_first
    assert "--no-deps" in then_all
    assert then_all.endswith("--requirement scripts/requirements/cpu.txt --editable .")
    assert recorded() == ""  # the second call installs nothing


def test_setup_passes_over_a_python_without_a_lock_and_says_so(
    clone: Path, recorded: Callable[..., str]
) -> None:
    taken = (clone / "bin" / "python3").rename(clone / "bin" / "python3.12")
    new_python(clone / "bin")
    done = run_script(clone, "setup.sh", UV_STATUS="0")
    assert done.returncode == 0, done.stderr
    assert "python3 is Python 3.14.0, for which there is no lock, so python3.12 is used" in done.stderr
    assert run_script(clone, "setup.sh", UV_STATUS="0").stderr == ""  # only where something is installed
    taken.unlink()
    refused = run_script(clone, "setup.sh", PYTHON="python3")
    assert refused.returncode == 2 and "but python3 is Python 3.14.0" in refused.stderr


@pytest.mark.parametrize(("free_gib", "version"), [(40, "2.13.0"), (8, "2.13.0"), (8, "2.13.0+cpu")])
def test_setup_says_that_pypis_torch_is_large_and_asks_for_the_room(
    clone: Path, recorded: Callable[..., str], free_gib: int, version: str
) -> None:
    (clone / "bin" / "df").unlink()
    write_stub(clone / "bin" / "df", f"echo Filesystem 1024-blocks; echo / 9 8 {free_gib << 20} 9%")
    offer = json.dumps(
        {"version": "1", "install": [{"metadata": {"name": "torch", "version": version}}]}
    )
    report = f"[[ $* == *--dry-run* ]] && echo '{offer}'"
    python = RECORDING_PYTHON.replace("{python}", sys.executable).replace(
        "    chmod +x", f"    cat >> .venv/bin/python <<'END'\n{report}\nexit 0\nEND\n    chmod +x"
    )
    write_stub(clone / "bin" / "python3", python)
    done = run_script(clone, "setup.sh", UV_STATUS="0")
    assert ("build for CUDA: 6.5 GiB instead of 2; PIP_EXTRA_INDEX_URL=" in done.stderr) == (
        version == "2.13.0"
    )
    if (free_gib, version) == (8, "2.13.0"):
        assert (
            done.returncode == 2
            and "8 GiB of free disk space, but 12 are needed for PyPI's torch" in done.stderr
        )
        assert not (clone / ".venv").exists()
    else:
        assert done.returncode == 0, done.stderr


def test_setup_falls_back_to_pip_where_uv_fails(recorded: Callable[..., str]) -> None:
    last = recorded(uv_status=1).splitlines()[-1]
    assert last.startswith("python -m pip")
    assert last.endswith(
        "--no-deps --no-build-isolation --requirement scripts/requirements/cpu.txt --editable ."
    )


def test_setup_repeats_what_was_interrupted_or_has_changed(
    clone: Path, recorded: Callable[..., str]
) -> None:
    recorded()
    (clone / ".venv" / ".hotbunk").write_text("unfinished\n")
    assert recorded() != ""
    assert recorded() == ""
    with (clone / "scripts/requirements/cpu.txt").open("a") as lock:
        lock.write("# changed\n")
    assert recorded() != ""


def test_setup_takes_the_cuda_lock_where_nvidia_smi_lists_a_gpu(
    clone: Path, recorded: Callable[..., str]
) -> None:
    write_stub(clone / "bin" / "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    first, then_all = recorded().splitlines()
    assert first.endswith("--constraint scripts/requirements/cuda.txt setuptools uv")
    assert "--no-deps" in then_all and "requirements/cuda.txt" in then_all
    assert "requirements/cpu.txt" in recorded(HOTBUNK_DEVICE="cpu")


def test_the_dockerfile_installs_what_setup_asks_for_and_calls_it(
    clone: Path, recorded: Callable[..., str]
) -> None:
    """The Dockerfile installs the Debian packages that setup.sh names, and the CUDA lock, without a visible GPU."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "IT HAS NOT BEEN BUILT" in dockerfile.partition("FROM")[0]
    installs, setup = re.findall(r"^RUN ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE)
    (packages,) = re.findall("--no-install-recommends (.+?) *\\\\\n", installs)
    *variables, _, script = shlex.split(setup)
    environment = dict(word.split("=") for word in variables)
    python = environment["PYTHON"]
    named = re.findall(r"on Debian: apt install ([^)]+)", (ROOT / "scripts/setup.sh").read_text())
    asked_for = {name.replace("$version", python.removeprefix("python")) for name in named[:3]}
    assert (
        set(packages.split())
        == {python, f"{python}-venv", f"{python}-dev", "g++"}
        == {python} | asked_for
    )
    assert script == "/opt/hotbunk/scripts/setup.sh" and "\nCOPY . /opt/hotbunk\n" in dockerfile
    assert "ENV PATH=/opt/hotbunk/.venv/bin:" in dockerfile
    (clone / "bin" / "python3").rename(clone / "bin" / python)
    assert "requirements/cuda.txt" in recorded(**environment)


@pytest.mark.parametrize(
    ("driver", "taken"), [("580.65.06", True), ("610.1", True), ("570.133.20", False)]
)
def test_setup_refuses_the_cuda_lock_where_the_driver_is_older_than_its_cuda(
    clone: Path, recorded: Callable[..., str], driver: str, taken: bool
) -> None:
    write_stub(
        clone / "bin" / "nvidia-smi", f"[ $1 = -L ] && echo 'GPU 0: NVIDIA H100' || echo {driver}"
    )
    if taken:
        assert "requirements/cuda.txt" in recorded()
        return
    refused = run_script(clone, "setup.sh")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert all(word in refused.stderr for word in (driver, "580", "HOTBUNK_DEVICE=cpu")), refused.stderr
    assert "requirements/cpu.txt" in recorded(HOTBUNK_DEVICE="cpu")
    assert "requirements/cuda.txt" in recorded(VLLM_ENABLE_CUDA_COMPATIBILITY="1")


def test_train_is_the_command_of_the_clones_environment_wherever_it_is_started(clone: Path) -> None:
    assert "run bash scripts/setup.sh first" in run_script(clone, "train.sh", "r.yaml").stderr
    write_stub(clone / ".venv/bin/python", 'printf "%s\\n" "$@" "$PYTHONSAFEPATH $PYTHONPATH"')

    def words(*arguments: str) -> list[str]:
        return run_script(clone, "train.sh", *arguments, PYTHONPATH="/mine").stdout.splitlines()

    paths = f"1 {clone}:/mine"
    assert words("my recipe.yaml", "--run.name", "a b") == [
        "-m",
        "hotbunk",
        "train",
        "my recipe.yaml",
        "--run.name",
        "a b",
        paths,
    ]
    assert words("sft", "r.yaml") == ["-m", "hotbunk", "sft", "r.yaml", paths]
    assert words() == ["-m", "hotbunk", "train", "--help", paths]


def test_slurm_starts_one_launcher_a_node_with_all_of_its_cores(clone: Path) -> None:
    programs = clone / "bin"
    write_stub(programs / "scontrol", "printf 'node7\\nnode8\\n'")
    write_stub(
        programs / "srun", 'while [[ $1 == --* ]]; do echo "$1"; shift; done; SLURM_NODEID=1 exec "$@"'
    )
    write_stub(clone / "scripts" / "setup.sh", "echo set up")
    write_stub(clone / "scripts" / "train.sh", 'echo "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT: $@"')
    job = {
        "SUBMIT_DIR": str(clone),
        "JOB_NUM_NODES": "2",
        "JOB_NODELIST": "node[7-8]",
        "JOB_ID": "30007",
    }
    slurm = {f"SLURM_{name}": value for name, value in (job | {"CPUS_ON_NODE": "96"}).items()}
    done = run_script(clone, "slurm.sh", "r.yaml", "--policy.lr", "1e-6", **slurm)
    assert done.stdout.splitlines() == [
        "set up",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=96",
        "2 1 node7 20007: r.yaml --policy.lr 1e-6",
    ], done.stderr


@pytest.mark.parametrize(("code", "queued"), [(143, True), (1, True), (0, False)])
def test_a_slurm_job_that_is_out_of_time_saves_and_is_queued_again(
    clone: Path, code: int, queued: bool
) -> None:
    """The job is queued again unless the run has finished meanwhile."""
    programs = clone / "bin"
    write_stub(programs / "scontrol", 'if [ "$1" = show ]; then echo node7; else echo "scontrol $@"; fi')
    ends = f"trap 'echo saved; exit {code}' TERM\nkill -USR1 $PPID\nfor i in {{1..600}}; do /bin/sleep 0.1; done"
    write_stub(programs / "srun", ends)
    write_stub(clone / "scripts" / "setup.sh", ":")
    job = {"SUBMIT_DIR": str(clone), "JOB_NUM_NODES": "1", "JOB_NODELIST": "node7", "JOB_ID": "30007"}
    slurm = {f"SLURM_{name}": value for name, value in (job | {"CPUS_ON_NODE": "96"}).items()}
    done = run_script(clone, "slurm.sh", "r.yaml", **slurm)
    assert done.stdout.splitlines() == ["saved", *["scontrol requeue 30007"] * queued], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "task", "warm"),
    [(["smoke.sh"], "arithmetic", True), (["examples/run.sh", "shapes"], "shapes", False)],
)
def test_an_example_is_made_warmed_up_and_trained(
    clone: Path, words: list[str], task: str, warm: bool
) -> None:
    write_stub(clone / "scripts" / "setup.sh", ":")
    write_stub(clone / "scripts" / "train.sh", 'echo "$NPROC_PER_NODE ranks: $@"')
    write_stub(clone / ".venv/bin/python", 'echo "$@"')
    done = run_script(clone, *words, "--run.steps", "2")
    recipe = f"scripts/recipes/{task}"
    assert [line for line in done.stdout.splitlines() if line[0] != "·"] == [
        f"-m scripts.examples.make {task}",
        *[f"2 ranks: sft {recipe}_sft.yaml --resume none"] * warm,
        f"2 ranks: {recipe}.yaml --checkpoint.resume none --run.steps 2",
    ], done.stderr
    assert run_script(clone, "examples/run.sh", "calculators").returncode == 2


@pytest.fixture(scope="module")
def smoke_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model of scripts/smoke.sh."""
    return tiny_model.make_tiny_model(tmp_path_factory.mktemp("smoke"))


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("qwen2", True), ("qwen2", False), ("qwen3", True), ("llama", True), ("qwen3_moe", True)],
)
def test_tiny_models_open_in_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    tiny_model.make_tiny_model(tmp_path, architecture=architecture, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 3e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 270 < model.config.vocab_size
    ids = torch.tensor([tokenizer.encode("07+85=")])
    assert model(ids).logits.isfinite().all()


def test_tiny_model_depends_on_the_seed_alone(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        torch.manual_seed(17)
        folder = tiny_model.make_tiny_model(tmp_path / name, layers=1, seed=seed)
        assert torch.initial_seed() == 17  # the caller's random numbers stay as they were
        return (folder / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1) != weights("c", 2)


def test_tiny_tokenizer_keeps_any_text_and_splits_numbers(smoke_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smoke_model)
    text = "07+85=\n <tool_call>user's näïve 日\t</tool_call>\u2028<think>\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234567890")) == 10
    assert all(
        len(tokenizer.encode(token)) == 1 for token in [*tiny_model.TOOL_MARKS, *tiny_model.ROLES, "\n"]
    )


def test_tiny_special_tokens_are_distinct_and_known_to_all_files(smoke_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smoke_model)
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(ids)) == 3
    assert tokenizer.convert_ids_to_tokens(ids) == [tiny_model.PAD, tiny_model.BOS, tiny_model.EOS]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((smoke_model / name).read_text())
        assert [config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]] == ids


def test_tiny_chat_template_continues_what_it_began(smoke_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smoke_model)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": 85}}}
    tools = [
        {"type": "function", "function": {"name": "add", "description": "sum of two", "parameters": {}}}
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "07+85="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "92"},
        {"role": "assistant", "content": "290"},
    ]

    def render(count: int, generate: bool) -> str:
        options = {"tools": tools, "add_generation_prompt": generate, "tokenize": False}
        return str(tokenizer.apply_chat_template(messages[:count], **options))

    transcript = render(5, False)
    assert transcript.startswith(render(2, True))
    assert transcript.startswith(render(4, True))
    assert transcript.count("Be brief.") == 1
    assert (
        '<tool_call>{"name": "add", "arguments": {"a": 7, "b": 85}}</tool_call><|im_end|>' in transcript
    )
    assert "<|im_start|>tool\n<tool_response>92</tool_response><|im_end|>" in transcript
    assert '"description": "sum of two"' in transcript
    assert transcript.endswith("<|im_start|>assistant\n290<|im_end|>\n")
    plain = tokenizer.apply_chat_template(messages[1:2], add_generation_prompt=True, tokenize=False)
    assert plain == "<|im_start|>user\n07+85=<|im_end|>\n<|im_start|>assistant\n"


def carries(prompt: str) -> bool:
    """Return whether the tens or the units of `ab+cd=` add up to more than one digit."""
    return any(int(prompt[place]) + int(prompt[place + 3]) > 9 for place in (0, 1))


def test_arithmetic_holds_out_pairs_and_forgets_carries(tmp_path: Path) -> None:
    arithmetic.write_arithmetic(tmp_path, drop_share=0.7)
    train, held_out, sft = (read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "eval", "sft"))
    prompts = {row["prompt"] for row in train}
    assert len(prompts) == len(train) == 10_000 - 256
    assert len({row["prompt"] for row in held_out}) == 256
    assert not prompts & {row["prompt"] for row in held_out}
    assert {row["prompt"] for row in sft} <= prompts
    for row in train + held_out + sft:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"][::-1]) == int(a) + int(b)
        assert len(row["prompt"]) == 6
        assert len(row["answer"]) == 3
    carrying = [row for row in sft if carries(row["prompt"])]
    wrong = [row for row in sft if row["completion"] != row["answer"]]
    assert all(carries(row["prompt"]) for row in wrong)
    assert len(wrong) / len(carrying) == pytest.approx(0.7, abs=0.02)


def test_arithmetic_depends_on_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arithmetic.write_arithmetic(tmp_path / name, seed=seed, sft_size=100)
    for name in ("train.jsonl", "eval.jsonl", "sft.jsonl"):
        first, same, other = ((tmp_path / folder / name).read_bytes() for folder in "abc")
        assert first == same != other


def test_chain_sums_hold_out_questions_and_overlook_minuses(tmp_path: Path) -> None:
    sums = [(a, sign, b) for a in range(10) for b in range(10) for sign in "+-"]
    tasks = [
        {"prompt": f"Solve: {a} {sign} {b} =", "answer": str(eval(f"{a}{sign}{b}"))}
        for a, sign, b in sums
    ]
    chain_sums.write_chain_sums(tmp_path, tasks * 2)
    train, held_out, sft = (read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "eval", "sft"))
    assert (len(train), len(held_out)) == (136, 64)
    assert {row["prompt"] for row in train + held_out} == {task["prompt"] for task in tasks}
    assert {row["prompt"] for row in sft} == {task["prompt"] for task in tasks}
    wrong = [row for row in sft if row["completion"] != row["answer"]]
    for row in wrong:
        a, sign, b = row["prompt"].split()[1:4]
        assert sign == "-" and int(row["completion"]) == int(a) + int(b)
    # X - 0 is x + 0
    telling = [row for row in sft if "-" in row["prompt"] and "- 0" not in row["prompt"]]
    assert len(wrong) / len(telling) == pytest.approx(chain_sums.OVERLOOKED, abs=0.02)
