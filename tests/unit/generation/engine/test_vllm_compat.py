"""The arguments and the vLLM versions that engines start with; only vLLM's imports are real here."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from generation.engine.settings import EngineSettings, cpu_binding
from generation.engine.vllm_compat import engine_arguments, engine_environment, started_with
from generation.engine.vllm_release import (
    RELEASES,
    SUPPORTED,
    check_build,
    check_keyed_noise,
    check_version,
)

CPU = EngineSettings(model="m", max_model_len=64)
CUDA = EngineSettings(model="m", max_model_len=64, device_indices=(0,))


@pytest.mark.parametrize("images", [0, 3])
def test_an_engine_keeps_an_encoder_and_makes_no_video_as_it_starts(images: int) -> None:
    """At no image vLLM leaves out the encoder, whose weights are sent; by default it starts with the longest video."""
    arguments = engine_arguments(replace(CPU, images=images))
    assert arguments["limit_mm_per_prompt"] == {"image": images or 1, "video": 0}


def test_a_vllm_outside_of_the_supported_range_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOTBUNK_ANY_VLLM", raising=False)  # which scripts/try_vllm.sh sets
    (_, oldest), (_, newest) = SUPPORTED
    for version in ("0.8.5", "0.26.0", f"0.{oldest - 1}.9", f"0.{newest + 1}.0", "1.0"):
        with pytest.raises(
            ImportError, match=f"vLLM {version} is installed, but {RELEASES} is needed"
        ) as caught:
            check_version(version)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    for version in (f"0.{oldest}.0", f"0.{newest}.4+cpu", "0.1.dev1+g123", "unknown", None):
        check_version(version)
    monkeypatch.setenv("HOTBUNK_ANY_VLLM", "1")
    check_version(f"0.{newest + 1}.0")


@pytest.mark.parametrize(("settings", "cpu_build"), [(CPU, False), (CUDA, True)])
def test_an_engine_for_the_other_build_of_vllm_is_refused_with_both_remedies(
    settings: EngineSettings, cpu_build: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = SimpleNamespace(is_cpu=lambda: cpu_build)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=build))
    with pytest.raises(ValueError, match=r"HOTBUNK_DEVICE=(cpu|cuda) bash scripts/setup\.sh") as caught:
        check_build(settings)
    assert len(str(caught.value)) < 300
    check_build(CPU if cpu_build else CUDA)


def test_engines_on_cuda_are_spawned_whatever_this_process_has_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert engine_environment(CUDA)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert engine_environment(CUDA)["VLLM_WSL2_ENABLE_PIN_MEMORY"] == "1"


def test_float32_attention_of_an_engine_on_cuda_is_not_rounded_to_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's cache knows the variable, so that no kernel compiled with another precision is used."""
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    exact = replace(CUDA, dtype="float32")
    assert engine_environment(exact)["TRITON_F32_DEFAULT"] == "ieee"
    for other in (replace(CUDA, dtype="bfloat16"), replace(CPU, dtype="float32")):
        assert "TRITON_F32_DEFAULT" not in engine_environment(other)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert engine_environment(exact)["TRITON_F32_DEFAULT"] == "tf32x3"


def test_an_engine_on_cuda_never_allocates_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_HIP_ALLOC_CONF", raising=False)
    environment = engine_environment(CUDA)
    variables = {name: value for name, value in environment.items() if name.endswith("ALLOC_CONF")}
    assert variables == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert not any(name.endswith("ALLOC_CONF") for name in engine_environment(CPU))


@pytest.mark.parametrize(
    ("changes", "graphs", "communicators"),
    [
        ({}, False, False),
        ({"deep_sleep": True}, True, False),
        ({"deep_sleep": True, "tensor_parallel_size": 2, "device_indices": (0, 1)}, True, True),
        ({"deep_sleep": True, "sleep": False}, False, False),
        ({"deep_sleep": True, "device_indices": ()}, False, False),
    ],
)
def test_a_deep_sleep_is_of_graphs_and_of_several_devices(
    changes: dict, graphs: bool, communicators: bool
) -> None:
    arguments = engine_arguments(replace(CUDA, **changes))
    assert arguments.get("sleep_mode_offload_cudagraph", False) is graphs
    assert arguments.get("enable_nccl_comm_suspend", False) is communicators
    assert graphs or not {"sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"} & arguments.keys()


def test_an_engine_on_cpu_keeps_a_bounded_number_of_compiled_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    # What oneDNN keeps by itself
    assert int(engine_environment(CPU)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "5")
    assert engine_environment(CPU)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "5"


@pytest.mark.parametrize(
    ("omp_threads", "processes", "threads"),
    [("", 1, 8), ("", 3, 2), ("3", 1, 3), ("3,2", 4, 2), ("9", 9, 1), ("few", 2, 4)],
)
def test_an_engine_on_cpu_has_its_share_of_the_cores_or_the_threads_it_is_told_to(
    omp_threads: str, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", omp_threads)
    assert cpu_binding([0], processes)["cpu_threads"] == threads


def test_engines_do_not_warn_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    assert engine_environment(CPU)["TORCH_LOGS"] == "-torch._library.triton"
    monkeypatch.setenv("TORCH_LOGS", "recompiles")  # the user's own stays
    environment = {**os.environ, **engine_environment(CPU)}
    assert environment["TORCH_LOGS"] == "recompiles,-torch._library.triton"
    quiet = "import generation.engine.vllm_compat as c\nwith c._environment(c._quiet_environment()): import vllm.kernels"
    # Where torch has brought Triton, vLLM says so before anything in a new process's environment could mute it.
    for code in [quiet] if find_spec("triton") else [quiet, "import vllm.kernels"]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        assert "Triton" not in done.stderr


def test_engines_of_several_ranks_share_neither_ports_nor_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/fast")
    ports, roots = set(), set()
    for rank in range(8):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(os, "getpid", lambda rank=rank: 4_194_300 + rank)
        environment = engine_environment(CUDA)
        ports.update(range(int(environment["VLLM_PORT"]), int(environment["VLLM_PORT"]) + 16))
        roots.add(environment.get("VLLM_CACHE_ROOT", os.environ["VLLM_CACHE_ROOT"]))
    assert len(ports) == 8 * 16 and min(ports) > 1024 and max(ports) < 32768
    assert len(roots) == 8 and all(root.startswith("/fast") for root in roots)


def test_two_machines_with_one_home_have_caches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/home/shared")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    roots = set()
    for machine in ("node0", "node1"):
        monkeypatch.setattr("platform.node", lambda machine=machine: machine)
        for rank in range(8):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            roots.add(engine_environment(CUDA)["VLLM_CACHE_ROOT"])
    assert len(roots) == 16
    assert "/home/shared/node1" in roots and "/home/shared/node1/local_rank_7" in roots


def test_the_environment_is_never_emptied_and_is_afterwards_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(
        type(os.environ), "clear", lambda _: pytest.fail("threads may read it meanwhile")
    )
    before, attention = dict(os.environ), torch.backends.cuda.cudnn_sdp_enabled()
    with started_with(CUDA):
        assert "RANK" not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        os.environ["VLLM_ADDED_THIS"] = "1"
        torch.backends.cuda.enable_cudnn_sdp(not attention)  # as vLLM's CUDA platform does
    assert dict(os.environ) == before
    assert torch.backends.cuda.cudnn_sdp_enabled() == attention


def test_prompts_are_read_in_large_steps_on_cuda_unless_the_recipe_says_otherwise() -> None:
    assert engine_arguments(CUDA)["max_num_batched_tokens"] == 8192
    more = EngineSettings(model="m", max_model_len=64, device_indices=(0,), max_num_seqs=10_000)
    assert engine_arguments(more)["max_num_batched_tokens"] == 10_000
    recipe_settings = EngineSettings(
        model="m", max_model_len=64, device_indices=(0,), extra={"max_num_batched_tokens": 512}
    )
    assert engine_arguments(recipe_settings)["max_num_batched_tokens"] == 512


@pytest.mark.parametrize(
    ("options", "speculative", "v2", "complaint"),
    [
        (
            {"device_indices": (0,)},
            None,
            False,
            "needs vLLM's model runner V2 on CUDA.* unset VLLM_USE_V2_MODEL_RUNNER",
        ),
        ({"device_indices": (0,)}, "ngram", True, "speculative_config is set.*leave it out"),
        ({"worker_extension": None}, None, False, "on CPU keyed noise needs worker_extension"),
        ({"device_indices": (0,)}, None, True, None),
        ({"worker_extension": "some.Extension"}, None, False, None),
    ],
)
def test_noise_is_keyed_by_position_or_the_engine_does_not_start(
    options: dict[str, Any], speculative: str | None, v2: bool, complaint: str | None
) -> None:
    config = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=v2)
    with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
        check_keyed_noise(EngineSettings("m", 64, keyed_noise=True, **options), config)
