"""The engine of an engine group: its settings, its start on the group's leader, and how it samples."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig, PreTrainedTokenizerBase

from generation.engine.engine import Engine, Leader
from generation.engine.logits import engine_arguments, uses_v2
from generation.engine.replicas import ReplicatedEngine, join_cluster
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings, cpu_places
from generation.engine.vllm_compat import fork_engines
from generation.rollouts.client import CapturingServer
from sharding import SHARING_WORKER, WORKER_EXTENSION
from sharding.ranks import EVERYBODY, rank, world_size
from trainer.config.machine import resolve_device
from trainer.config.placement import leads_engine, placement, training_ranks
from trainer.config.schema import HeldOutConfig, TrainConfig
from trainer.errors import UserError
from trainer.policy.hf_format import resolve_folder
from trainer.run import processes
from trainer.run.screen import Progress


def engine_settings(config: TrainConfig, on_cuda: bool) -> EngineSettings:
    """The settings of this rank's engine group. Ranks of a group are consecutive, on one machine."""
    engine, size = config.engine, config.engine.tensor_parallel_size
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    group = range(local_rank, local_rank + size)
    place = placement(config)
    if place.actors:  # an actor sees its own devices alone, and may be on any machine
        group, local_ranks = range(size), engine.replicas * size
    places = cpu_places(group, local_ranks)
    needed = processor_arguments(config, on_cuda)
    both = {"additional_config": needed.get("additional_config", {}) | engine.extra.get("additional_config", {})}
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
        sleep=engine.sleep and not place.apart,
        shared_weights=config.sync.way == "zero_copy",
        trust_remote_code=config.model.trust_remote_code,
        device_indices=tuple(group) if on_cuda else (),
        cpu_threads=places["cpu_threads"],
        cpu_cores=() if on_cuda or place.actors else places["cpu_cores"],
        fp32_head=config.policy.fp32_head,
        lora_rank=config.lora.rank if config.lora.engines_apply else 0,
        routes=config.model.routes == "engine",
        images=config.data.max_images,
        worker_extension=WORKER_EXTENSION,
        keyed_noise=config.rollout.slice_tokens is not None,
        worker_class=SHARING_WORKER if config.sync.way == "zero_copy" and on_cuda else None,
        extra=needed | engine.extra | (both if both["additional_config"] else {}),
    )


def processor_arguments(config: TrainConfig, on_cuda: bool) -> dict[str, Any]:
    """vLLM's arguments for engine.logits_processors. Raises UserError for one that cannot be loaded, or is none."""
    try:
        return engine_arguments(config.engine.logits_processors, uses_v2(on_cpu=not on_cuda, environ=os.environ))
    except ValueError as error:
        raise UserError(f"engine.logits_processors: {error}") from error


def fetch_model(config: TrainConfig) -> None:
    """Download the model, on one rank of each machine and before the start of engines, which has a deadline."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        resolve_folder(config.model.path)


def start_engine(config: TrainConfig, on_cuda: bool) -> Leader | None:
    """On the first rank of each engine group: start the engine. None on the other ranks."""
    if not leads_engine(config, rank(EVERYBODY), world_size(EVERYBODY)):
        return None
    engine = config.engine
    if not placement(config).actors:
        return _start(Engine(engine_settings(config, on_cuda)), engine.start_timeout_s)
    cuda = resolve_device(config) == "cuda"
    settings = engine_settings(config, cuda)  # this rank itself has no device
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1 if cuda else 0  # by ranks here that train
    try:
        join_cluster(engine.replicas * engine.tensor_parallel_size, taken)
    except ValueError as error:
        raise UserError(f"engine.placement: {error}") from error
    return _start(ReplicatedEngine(settings, engine.replicas, engine.restarts), engine.start_timeout_s)


def rank_device(config: TrainConfig) -> torch.device:
    """The device this rank trains on, or its engine is on."""
    generates = rank(EVERYBODY) >= training_ranks(config, world_size(EVERYBODY))
    has_none = placement(config).actors and generates
    if resolve_device(config) == "cpu" or has_none:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


async def start_server(engine: Engine, **settings: Any) -> CapturingServer:
    """The server that clients of rollouts talk to (level 6); `settings` are those of `ServerSettings`."""
    from generation.server import OpenAIServer, ServerSettings  # with vLLM's web framework, for level 6 only

    return await OpenAIServer.start(engine, ServerSettings(**settings))


def _start(engine: Engine, timeout: float) -> Leader:
    try:
        return Leader.start(engine, timeout)
    except (ValueError, TimeoutError) as error:  # vLLM's own complaint about its settings
        raise UserError(f"the engine does not start with these settings of engine and model: {error}") from error


def stop_engine(leader: Leader | None) -> None:
    """Stop the engine's processes and its thread."""
    if leader is not None:
        leader.close()


def on_checkpoint(command: str, settings: EngineSettings, job: Callable[[Leader], int], timeout: float = 600.0) -> int:
    """Run a command's job on an engine that holds a checkpoint's weights, and stop the engine.

    Returns the job's exit status; 2, with a sentence on stderr, for mistakes that the user can mend.
    """
    stop_forking = fork_engines() if settings.on_cpu else lambda: None
    processes.install_signal_handlers(lambda: command)
    print(f"starting vLLM with {settings.model}", file=sys.stderr)
    leader = None
    try:
        with Progress(0, enabled=True, console=Console(stderr=True)).follow(lambda: "starting"):
            leader = _start(Engine(settings), timeout)
        leader.engine.state.adopt_checkpoint(0)
        return job(leader)
    except (UserError, ValueError) as error:  # also a prompt that is too long, or a port that is taken
        print(f"hotbunk: {error}", file=sys.stderr)
        return 2
    finally:
        stop_engine(leader)
        stop_forking()


def evaluation_sampling(config: TrainConfig, dataset: HeldOutConfig, stop_token_ids: list[int]) -> SamplingSettings:
    """Sampling of answers to a held-out dataset: its own settings, else evaluation's; the training's stop strings."""
    shared = config.eval
    return SamplingSettings(
        max_tokens=dataset.max_tokens or shared.max_tokens or config.sampling.max_tokens,
        temperature=shared.temperature if dataset.temperature is None else dataset.temperature,
        top_p=dataset.top_p or shared.top_p,
        stop=list(config.sampling.stop),
        stop_token_ids=stop_token_ids,
    )


def end_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends an answer: the tokenizer's EOS and those of the model's generation_config.json, if it has one.

    The engine does not read that file, so its list of EOS ids (chat models have two) is passed with each request.
    """
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    try:
        listed = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has none
        listed = None
    return sorted(ids | set(listed if isinstance(listed, list) else [] if listed is None else [listed]))
