"""The settings, the start and the end of an engine, and its sampling settings for evaluations."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from generation.engine.engine import Engine, Leader
from generation.engine.lifecycle import Memory
from generation.engine.logits import engine_arguments, uses_v2
from generation.engine.ray_cluster import join_cluster
from generation.engine.ray_replicas import ReplicatedEngine
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings, cpu_binding
from generation.engine.vllm_compat import fork_engines
from generation.rollouts.client import CapturingServer
from sharding import SHARING_WORKER, WORKER_EXTENSION
from sharding.ranks import EVERYBODY, rank, world_size
from trainer.config.machine import resolve_device
from trainer.config.placement import leads_engine, placement, training_ranks
from trainer.config.schema import HeldOutConfig, TrainConfig
from trainer.config.sync_ways import way
from trainer.config.weight_files import require_trainable
from trainer.errors import UserError
from trainer.policy.hf_format import resolve_folder
from trainer.run import processes
from trainer.run.screen import Progress


def engine_settings(config: TrainConfig, on_cuda: bool) -> EngineSettings:
    """Return the settings of this rank's engine. The ranks of an engine are consecutive and on one
    machine.
    """
    engine = config.engine
    size = config.engine.tensor_parallel_size
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    group = range(local_rank, local_rank + size)
    shares_memory = way(config).shares_memory
    record = placement(config)
    if record.actors:  # an actor sees only its own devices, and may run on any machine
        group = range(size)
        local_ranks = engine.replicas * size
    cores = cpu_binding(group, local_ranks)
    needed = processor_arguments(config, on_cuda)
    extra = needed | engine.extra
    additional = needed.get("additional_config", {}) | engine.extra.get("additional_config", {})
    if additional:
        extra["additional_config"] = additional
    return EngineSettings(
        model=str(resolve_folder(config.model.path)),
        tokenizer=config.model.tokenizer,
        dtype=engine.dtype or config.policy.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        tensor_parallel_size=size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        load_format=engine.load_format,
        plain_cpu_weights=engine.plain_cpu_weights,
        kv_cache_bytes=None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * 2**30),
        enforce_eager=(not on_cuda) if engine.enforce_eager is None else engine.enforce_eager,
        seed=config.run.seed,
        sleep=engine.sleep and not record.remote,
        deep_sleep=engine.deep_sleep,
        shared_weights=shares_memory,
        trust_remote_code=config.model.trust_remote_code,
        device_indices=tuple(group) if on_cuda else (),
        cpu_threads=cores["cpu_threads"],
        cpu_cores=() if on_cuda or record.actors else cores["cpu_cores"],
        fp32_head=config.policy.fp32_head,
        lora_rank=config.lora.rank if config.lora.engines_apply else 0,
        routes=config.model.routes == "engine",
        images=config.data.max_images,
        worker_extension=WORKER_EXTENSION,
        keyed_noise=config.rollout.slice_tokens is not None,
        worker_class=SHARING_WORKER if shares_memory and on_cuda else None,
        extra=extra,
    )


def processor_arguments(config: TrainConfig, on_cuda: bool) -> dict[str, Any]:
    """Return vLLM's arguments for engine.logits_processors. Raises UserError for one that cannot be
    loaded or used.
    """
    try:
        return engine_arguments(
            config.engine.logits_processors, uses_v2(on_cpu=not on_cuda, environ=os.environ)
        )
    except ValueError as error:
        raise UserError(f"engine.logits_processors: {error}") from error


def fetch_model(config: TrainConfig) -> None:
    """Download the model on one rank of each machine, before engines start, whose start has a
    deadline.

    Raises UserError if its files cannot be used, as `check_config` does for a folder.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        require_trainable(resolve_folder(config.model.path))


def start_engine(config: TrainConfig, on_cuda: bool) -> Leader | None:
    """Start an engine if this rank leads one, and return it; None on all other ranks."""
    if not leads_engine(config, rank(EVERYBODY), world_size(EVERYBODY)):
        return None
    engine = config.engine
    if not placement(config).actors:
        return _start(Engine(engine_settings(config, on_cuda)), engine.start_timeout_s)
    cuda = resolve_device(config) == "cuda"
    settings = engine_settings(config, cuda)  # this rank itself has no device
    # Devices of the training ranks here
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1 if cuda else 0
    try:
        join_cluster(engine.replicas * engine.tensor_parallel_size, taken)
    except ValueError as error:
        raise UserError(f"engine.placement: {error}") from error
    return _start(ReplicatedEngine(settings, engine.replicas, engine.restarts), engine.start_timeout_s)


def put_to_sleep(leader: Leader | None, timeout: float) -> None:
    """Put a started engine to sleep, before models are built that need its memory; nothing for one
    that sleeps.

    Weights that no sync brings stay: those under adapters, and those that the trainer is going to
    share.
    """
    if leader is not None and leader.engine.state.memory is Memory.AWAKE:
        settings = leader.engine.settings
        level = 1 if settings.lora_rank or settings.shared_weights else 2
        leader.thread.run(leader.engine.sleep(level), timeout, "putting the engine to sleep")


def rank_device(config: TrainConfig) -> torch.device:
    """Return the device on which this rank trains or its engine runs."""
    generates = rank(EVERYBODY) >= training_ranks(config, world_size(EVERYBODY))
    has_none = placement(config).actors and generates
    if resolve_device(config) == "cpu" or has_none:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


async def start_server(engine: Engine, **settings: Any) -> CapturingServer:
    """Start the server that rollout clients talk to (level 6); `settings` are the fields of
    `ServerSettings`.
    """
    # Imports vLLM's web framework, only level 6 needs it
    from generation.server import OpenAIServer, ServerSettings

    return await OpenAIServer.start(engine, ServerSettings(**settings))


def _start(engine: Engine, timeout: float) -> Leader:
    try:
        return Leader.start(engine, timeout)
    except (ValueError, TimeoutError) as error:  # vLLM rejects its settings
        raise UserError(
            f"the engine does not start with these settings of engine and model: {error}"
        ) from error


def stop_engine(leader: Leader | None) -> None:
    """Stop the engine's processes and its thread, if this rank leads an engine."""
    if leader is not None:
        leader.close()


def on_checkpoint(
    command: str, settings: EngineSettings, job: Callable[[Leader], int], timeout: float = 600.0
) -> int:
    """Start an engine with a checkpoint's weights, run a command's job on it, and stop the engine.

    Returns the job's exit status; or 2, after printing a sentence on stderr, for mistakes that the
    user can fix.
    """
    stop_forking = fork_engines() if settings.on_cpu else lambda: None
    processes.install_signal_handlers(lambda: command, command=command)
    print(f"starting vLLM with {settings.model}", file=sys.stderr)
    leader = None
    try:
        with Progress(0, enabled=True, console=Console(stderr=True)).follow(lambda: "starting"):
            leader = _start(Engine(settings), timeout)
        leader.engine.state.adopt_checkpoint(0)
        return job(leader)
    except (UserError, ValueError) as error:
        # Includes a prompt that is too long and a port that is taken
        print(f"hotbunk: {error}", file=sys.stderr)
        return 2
    finally:
        stop_engine(leader)
        stop_forking()


def evaluation_sampling(
    config: TrainConfig, dataset: HeldOutConfig, stop_token_ids: list[int]
) -> SamplingSettings:
    """Return a held-out dataset's sampling settings: its own ones, else those of `eval`, with
    training's stops.
    """
    shared = config.eval
    return SamplingSettings(
        max_tokens=dataset.max_tokens or shared.max_tokens or config.sampling.max_tokens,
        temperature=shared.temperature if dataset.temperature is None else dataset.temperature,
        top_p=dataset.top_p or shared.top_p,
        stop=list(config.sampling.stop),
        stop_token_ids=stop_token_ids,
    )
