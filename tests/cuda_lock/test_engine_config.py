"""vLLM's configuration of our engine arguments on an H100."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from generation.engine.settings import EngineSettings
from generation.engine.vllm_compat import engine_arguments, started_with
from generation.engine.vllm_release import check_build, check_version
from sharding import SHARING_WORKER, WORKER_EXTENSION


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from trainer.commands.tiny_model import make_tiny_model

    folder: Path = make_tiny_model(
        tmp_path_factory.mktemp("tiny"), hidden_size=512, heads=8, kv_heads=4, layers=2
    )
    return str(folder)


def configured(model: str, **changes: Any) -> tuple[Any, str]:
    """vLLM's configuration, and how it would start the engine's processes."""
    defaults: dict[str, Any] = {
        "max_model_len": 1024,
        "dtype": "bfloat16",
        "device_indices": (0,),
        "max_num_seqs": 512,
    }
    defaults["worker_extension"] = WORKER_EXTENSION
    settings = EngineSettings(model=model, **(defaults | changes))
    with started_with(settings):
        check_version()
        check_build(settings)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.system_utils import get_mp_context

        arguments = engine_arguments(settings)
        assert set(arguments) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        return AsyncEngineArgs(**arguments).create_engine_config(), get_mp_context().get_start_method()


def test_an_engine_is_spawned_on_runner_v2_sleeps_by_cumem_and_reads_8192_tokens(model: str) -> None:
    config, start = configured(model)
    assert start == "spawn"
    assert config.use_v2_model_runner
    assert config.parallel_config.worker_cls == "generation.engine.cuda_worker.CudaWorker"
    assert config.parallel_config.worker_extension_cls == WORKER_EXTENSION
    assert config.scheduler_config.max_num_batched_tokens == 8192
    assert config.scheduler_config.max_num_seqs == 512
    assert config.model_config.enable_sleep_mode
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.cache_config.enable_prefix_caching
    assert config.device_config.device_type == "cuda"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"worker_class": SHARING_WORKER}, lambda c: c.parallel_config.worker_cls == SHARING_WORKER),
        (
            {"tensor_parallel_size": 2, "device_indices": (0, 1)},
            lambda c: c.parallel_config.world_size == 2,
        ),
        ({}, lambda c: not c.use_cumem_cudagraph_pool and not c.model_config.enable_nccl_comm_suspend),
        ({"deep_sleep": True, "enforce_eager": False}, lambda c: c.use_cumem_cudagraph_pool),
        ({"deep_sleep": True}, lambda c: not c.model_config.enable_nccl_comm_suspend),
        (
            {"deep_sleep": True, "tensor_parallel_size": 2, "device_indices": (0, 1)},
            lambda c: c.model_config.enable_nccl_comm_suspend,
        ),
        ({"fp32_head": True}, lambda c: str(c.model_config.head_dtype) == "torch.float32"),
        ({"lora_rank": 12}, lambda c: c.lora_config.max_lora_rank == 16),
        ({"dtype": "float32"}, lambda c: str(c.model_config.dtype) == "torch.float32"),
        (
            {"extra": {"max_num_batched_tokens": 4096}},
            lambda c: c.scheduler_config.max_num_batched_tokens == 4096,
        ),
    ],
)
def test_settings_arrive_in_vllms_configuration(model: str, changes: dict[str, Any], says: Any) -> None:
    config, start = configured(model, **changes)
    assert start == "spawn"
    assert says(config)


def test_factories_of_logits_processors_run_in_the_second_runner(model: str) -> None:
    from generation.engine import logits

    extra = logits.engine_arguments(
        ["trainer.commands.tiny_model:make_tiny_model"], logits.uses_v2(on_cpu=False, environ={})
    )
    config, _ = configured(model, extra=extra)
    assert config.use_v2_model_runner


FORKS = """
import os, sys, torch
before = torch.cuda.is_available() if "count" in sys.argv else None
child = os.fork()
if not child:
    os._exit(torch.cuda._is_in_bad_fork())
print(torch.cuda.is_initialized(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("argument", "poisoned"), [("count", 1), ("leave", 0)])
def test_a_child_of_a_process_that_has_counted_devices_cannot_use_cuda(
    argument: str, poisoned: int
) -> None:
    """Why engines are spawned: vLLM asks `is_initialized`, which says nothing of it."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"
    }
    command = [sys.executable, "-W", "ignore", "-c", FORKS, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["False", str(poisoned)]
