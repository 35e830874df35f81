"""Compare vLLM's model on each rank after two syncs with one freshly loaded, for test_reach.py."""

import gc
import os
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from sharding.ranks import agree, rank, world_size
from sharding.send.source import ShardedSource
from sharding.transports.pull import Pull
from tests.support import policy_checks as checks
from tests.support.deepspeed_checks import zero_policy
from tests.support.lora_checks import lora_policy
from tests.support.rank_checks import Checks, run_checks
from trainer.build import weight_source
from trainer.distributed import init_process_group

ADAPTED: dict[str, Any] = {
    "qwen2_tied": "all-linear",
    "deepseek_v2_untied": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
"""Layers with adapters, by model; vLLM keeps products of `kv_b_proj`, which therefore is staged."""

SPLIT = "qwen3_moe_untied"
"""The mixture whose experts are split over ranks."""


def on_ranks(models: str, results: str, *cases: str) -> None:
    """Run each case on all models, and write the results to the file `results`.

    A case such as "fsdp 2" or "zero3 1" is a backend of the policy and the engines' tensor-parallel size; "hsdp" is
    FSDP2 on pairs of ranks, and "experts" splits those of the model `SPLIT` over pairs. In "fsdp 2 lora", the models of
    `ADAPTED` are trained by adapters, which are merged.
    """
    init_process_group(120, "cpu")
    from vllm.v1.worker import cpu_model_runner

    from generation.engine.cpu_kernels import hide_instructions
    from sharding.worker import extension
    from sharding.worker.cpu import keep_weights_plain

    hide_instructions(plain=True)  # as in an engine's worker
    extension._PLAIN_ON_CPU = True
    keep_weights_plain()
    cpu_model_runner._set_torch_accelerator_to_noop()
    todo: Checks = {}
    for case in cases:
        backend, size, *adapted = case.split()
        for folder in sorted(Path(models).iterdir()):
            if (adapted and folder.name not in ADAPTED) or (
                backend == "experts" and folder.name != SPLIT
            ):
                continue
            saved = Path(results).parent / f"saved {case} {folder.name}"
            todo[f"{folder.name} {case}"] = partial(
                check_apart, folder, backend, int(size), saved, bool(adapted)
            )
    group = f"reach-{os.environ['MASTER_PORT']}"
    # Names the workers' shared memory, which nobody else removes here
    os.environ["VLLM_DIST_IDENT"] = group
    try:
        run_checks(todo, Path(results))
    finally:
        for file in Path("/dev/shm").glob(f"{group}-*"):
            file.unlink(missing_ok=True)


def check_apart(*arguments: Any) -> None:
    """Run `check_family` and remove vLLM's groups afterwards, since the next case may need others."""
    from vllm.distributed import parallel_state

    try:
        check_family(*arguments)
    finally:
        parallel_state.destroy_model_parallel()


def check_family(
    folder: Path, backend: str, tensor_parallel_size: int, saved: Path, adapted: bool
) -> None:
    """vLLM's model equals a fresh one after two syncs, and after a pull into weights that were wiped.

    The first sync records, the second replays; between them the policy's weights change, and it saves them.
    """
    from tests.support.in_process import InProcess

    policy = make_policy(folder, backend, adapted)
    source = weight_source(policy, torch.float32)
    worker = vllm_worker(folder, tensor_parallel_size)
    with tempfile.TemporaryDirectory() as private:
        both = InProcess(source, worker, Path(private))
        both.sync(1)
        change(source.in_memory())
        both.sync(2)
        both.manager.close()
    policy.save_pretrained(saved)
    agree(None, "saving the checkpoint")
    fresh = vllm_worker(saved, tensor_parallel_size)
    held, expected = tensors(worker.get_model()), tensors(fresh.get_model())
    assert held.keys() == expected.keys()
    different = [name for name in held if not torch.equal(held[name], expected[name])]
    assert not different, different
    for parameter in worker.get_model().parameters():
        parameter.data.fill_(float("nan"))
    with tempfile.TemporaryDirectory() as private:
        pull = Pull(policy.device, source, policy.shard_tensors(), [policy.optimizer])
        both = InProcess(source, worker, Path(private), way=pull)
        both.sync(3)
        with patch.object(both.manager._update, "push", wraps=both.manager._update.push) as push:
            both.sync(4)
        left = both.manager.report.unreplayable or {}
        staged = [p.name for p in source.parameters() if any(piece.name in left for piece in p.pieces)]
        assert [parameter.name for parameter in push.call_args.args[0]] == staged, "only staged ones"
        both.manager.close()
    pulled = tensors(worker.get_model())
    different = [name for name in expected if not torch.equal(pulled[name], expected[name])]
    assert not different, ("pulled", different)


def make_policy(folder: Path, backend: str, adapted: bool) -> Any:
    """Load a policy with this backend, with or without adapters."""
    if adapted:
        return lora_policy(folder, "zero 3" if backend == "zero3" else backend, ADAPTED[folder.name])
    if backend == "zero3":
        return zero_policy(folder, stage=3)
    settings = {"hsdp": {"shard_size": 2}, "experts": {"expert_parallel": 2}}
    return checks.make_policy(folder, **settings.get(backend, {}))


def change(source: ShardedSource) -> None:
    """Change every rank's part of every parameter, factors included; the factors B are 0 at first."""
    for parameter in source.parameters():
        _, values = source.own_values(parameter.name)
        values.add_(0.1 * parameter.name.startswith("B of ")).mul_(
            torch.empty_like(values).uniform_(0.5, 1.5)
        )


def vllm_worker(folder: Path, tensor_parallel_size: int) -> Any:
    """Stands in for an engine's worker on this rank, with the model that vLLM loads from a checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from generation.engine.settings import EngineSettings
    from generation.engine.vllm_compat import classes_inspected_here, engine_arguments
    from tests.support.in_process import Worker

    here = {"distributed_executor_backend": "external_launcher"}
    settings = EngineSettings(
        str(folder), 128, tensor_parallel_size=tensor_parallel_size, plain_cpu_weights=True, extra=here
    )
    with classes_inspected_here():
        config = EngineArgs(**engine_arguments(settings)).create_engine_config()
    # vLLM collects garbage twice per model, which would visit everything that cases have left
    gc.freeze()
    # Ranks refuse to unpickle what vLLM sends between workers; in a run, a worker is a process of its own.
    with (
        patch("torch.distributed.distributed_c10d._unpickler", pickle.Unpickler),
        set_current_vllm_config(config),
    ):
        parallel_state.init_distributed_environment(world_size(), rank(), "env://", rank(), "gloo")
        parallel_state.ensure_model_parallel_initialized(tensor_parallel_size, 1)
        model = get_model(vllm_config=config)
    return Worker(model, config)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and other tensors of modules, such as the products of MLA's weights."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(value, Tensor)
    }
