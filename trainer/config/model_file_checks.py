"""Check a recipe against its model's config.json."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from generation.engine.settings import (
    QUANTIZING,
    routes_problem,
)
from trainer.config.machine import (
    resolve_device,
)
from trainer.config.model_file import (
    EXPERT_KEYS,
    PACKABLE_LAYERS,
    REPROCESSED_KEYS,
    SELECTIVE_SCANS,
    model_config,
    position_limit,
)
from trainer.config.parallel import check_divides
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import way
from trainer.errors import UserError

Command = Literal["train", "sft", "eval"]


def check_model_file(config: TrainConfig, command: Command, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each part of the model's config.json that the recipe does not fit."""
    try:
        model = model_config(config.model.path)
    except UserError as error:
        yield str(error)
        return
    if command == "train" and way(config).shares_memory:
        for key in filter(model.get, REPROCESSED_KEYS):
            # Experts are shuffled; weights of latent attention multiplied
            what = REPROCESSED_KEYS[key]
            yield (
                f"sync.way: vLLM does not keep the {what} of this model as trained ({key}): set it to "
                "staged"
            )
    if command != "eval":
        yield from _check_packing(config, model)
        yield from _check_quantization(config, model)
    if command == "sft":
        return
    if (limit := position_limit(model)) is not None and config.engine.max_model_len > limit:
        yield (
            f"engine.max_model_len = {config.engine.max_model_len} is more than the {limit} positions "
            "of the model"
        )
    dtype = config.engine.dtype or config.policy.dtype
    on_cpu = resolve_device(config) == "cpu"
    if on_cpu and model.get("model_type") in SELECTIVE_SCANS:
        kind = f"{config.model.path} has Mamba-1 layers"
        yield f"model.path: {kind}, for which vLLM has no CPU kernel: use a GPU or a Mamba-2 model"
    if on_cpu and dtype == "float32" and model.get("linear_key_head_dim"):
        yield (
            "engine.dtype is float32, but vLLM on CPU has gated delta rules in bfloat16 only: set it "
            "to bfloat16"
        )
    yield from _check_mixture(config, any(map(model.get, EXPERT_KEYS)), environ)
    if on_cpu and config.lora.engines_apply and any(map(model.get, EXPERT_KEYS)):
        yield (
            "lora.sync is adapter, which vLLM on CPU cannot do for mixtures of experts: set it to merged"
        )
    size = config.engine.tensor_parallel_size
    if heads := model.get("num_attention_heads"):
        yield from check_divides(
            "num_attention_heads of the model", heads, "engine.tensor_parallel_size", size
        )


def _check_mixture(config: TrainConfig, mixture: bool, environ: Mapping[str, str]) -> Iterator[str]:
    """Check the keys of mixtures; `check_model` later checks that the routers of the model's class
    are replaceable.
    """
    routes = config.model.routes
    coef = config.algorithm.balance_coef
    if routes != "own" and not mixture:
        yield (
            f"model.routes is {routes}, but {config.model.path} is not a mixture of experts: set it to "
            "own"
        )
    elif routes == "engine" and (problem := routes_problem(resolve_device(config) == "cpu", environ)):
        yield problem
    if coef and routes == "own":
        yield (
            f"algorithm.balance_coef is {coef:g}, but the experts' loads must be known before the "
            "first forward pass: set model.routes to recorded"
        )


def _check_packing(config: TrainConfig, model: dict[str, Any]) -> Iterator[str]:
    """Check what config.json says; `require_packing` checks the model's class once it is built."""
    unpackable = sorted(set(model.get("layer_types") or ()) - set(PACKABLE_LAYERS))
    if unpackable and config.batch.packing:
        layers = f"layers ({', '.join(unpackable)}) in which sequences of a pack would not be kept apart"
        yield f"batch.packing is true, but the model has {layers}: set it to false"


def _check_quantization(config: TrainConfig, model: dict[str, Any]) -> Iterator[str]:
    """Refuse quantised models: vLLM re-packs their weights as it loads them, and no such layout has
    been verified.
    """
    extra = config.engine.extra
    overrides = extra.get("hf_overrides")
    overridden = isinstance(overrides, dict) and overrides.get("quantization_config")
    keys = [key for key in QUANTIZING if extra.get(key)]
    for key in [*keys, *(["hf_overrides.quantization_config"] if overridden else [])]:
        yield (
            f"engine.extra.{key} is set, but weights are not synced into quantised engines: leave it out"
        )
    if model.get("quantization_config"):
        yield (
            f"model.path: {config.model.path} is quantised and cannot be trained: name the model it was "
            "made from"
        )
