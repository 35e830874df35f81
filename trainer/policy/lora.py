"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) by PEFT: of W + scale · B A, only B
and A are trained.

Adapters are injected into the Transformers model itself, so only names differ for the rest of the
code:

    in memory         model.layers.0.self_attn.q_proj.base_layer.weight
                      model.layers.0.self_attn.q_proj.lora_A.default.weight
    in checkpoints    model.layers.0.self_attn.q_proj.weight
    in PEFT's files   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from sharding.ranks import agreed, is_main
from sharding.report import AdapterFormat
from sharding.send.source import LowRank, gathered
from trainer.config.lora_start import PREFIX, WEIGHTS, adapted_layers, adapter_tensors, layer_name
from trainer.config.schema import LoraConfig
from trainer.config.weight_files import adapter_config
from trainer.distributed import say
from trainer.errors import UserError
from trainer.model_structure import Work, vision_modules
from trainer.surroundings import follow_umask
from trainer.types import MicroBatch, Outputs, Policy

NO_ADAPTERS = LoraConfig()

ADAPTER = "default"
"""PEFT's name of an adapter that is the only one."""


def add_adapters(
    model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Put adapters beside the linear layers that lora.target_modules names, and freeze everything
    else.

    The adapters have no values yet; `start_value` gives their first ones. Raises UserError if a
    name matches no module, or one that is not a linear layer of the language model.
    """
    from peft import inject_adapter_in_model  # an extra, and slow to import

    unfit = _unfit_names(model, lora)
    if lora.target_modules == "all-linear":
        # PEFT's "all-linear" (peft/tuners/tuners_utils.py) would also take a mixture's experts,
        # which are fused and not layers.
        targets = sorted(_linear_names(model) - unfit.keys())
    else:
        targets = list(lora.target_modules)
        if wrong := next((name for name in targets if name in unfit), None):
            raise UserError(
                f"lora.target_modules: leave out {wrong} of {type(model).__name__}: {unfit[wrong]}"
            )
    try:
        config = peft_config(lora, targets, exclude=list(vision_modules(model)))
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)  # without memory for values yet
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"lora.target_modules does not fit {type(model).__name__}: {reason}") from error
    layers = _adapted(model)
    for name in targets:
        # PEFT skips unknown names if another fits (https://github.com/huggingface/peft/issues/1959)
        if not any(f".{path}".endswith(f".{name}") for path in layers):
            raise UserError(f"lora.target_modules: {type(model).__name__} has no module {name}")
    for path, layer in layers.items():
        if not isinstance(layer.base_layer, nn.Linear) or layer is model.get_output_embeddings():
            raise UserError(
                f"lora.target_modules: {path} is not a linear layer inside the model: leave it out"
            )
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.to(dtype)
            if torch.device(device).type != "meta":
                factor.to_empty(device=device)


def left_out(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return one sentence for each reason for which `all-linear` leaves out layers of this model.
    The model has no adapters yet.
    """
    unfit = _unfit_names(model, lora) if lora.target_modules == "all-linear" else {}
    sentences = []
    for reason in sorted(set(unfit.values())):
        names = sorted(name for name in unfit if unfit[name] == reason)
        sentences.append(f"lora.target_modules leaves out {', '.join(names)}: {reason}")
    return sentences


def _linear_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear layers inside the language model."""
    outside = {model.get_output_embeddings()}
    outside |= {module for part in vision_modules(model).values() for module in part.modules()}
    return {
        layer_name(path)
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear) and m not in outside
    }


def _unfit_names(model: PreTrainedModel, lora: LoraConfig) -> dict[str, str]:
    """Return the names of linear layers that cannot have adapters, with the reason."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    unfit: dict[str, str] = {}
    for name in _linear_names(model):
        config = peft_config(lora, [name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # PEFT maps this name to several, or to none
            config.target_modules = []
        if name not in config.target_modules:
            unfit[name] = "PEFT takes them for the names of experts, which are fused"
    for mixer in model.modules():
        if {"A_log", "D"} <= mixer._parameters.keys():
            # A mixer with these parameters is Mamba's. PEFT itself refuses its layers only by some
            # names.
            names = [
                name
                for name, part in mixer.named_children()
                if isinstance(part, nn.Linear) and name != "in_proj"
            ]
            unfit |= dict.fromkeys(names, "kernels of Mamba read their weights past the layer")
    return unfit


def peft_config(
    lora: LoraConfig, targets: list[str], base: str | None = None, exclude: Sequence[str] = ()
) -> Any:
    """Return a `peft.LoraConfig` for adapters of the modules `targets`, except in `exclude`, of the
    model at `base`.
    """
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules="|".join(rf"{re.escape(name)}\..*" for name in exclude) or None,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def adapter_format(model: PreTrainedModel, lora: LoraConfig) -> AdapterFormat:
    """Return the format of the adapters, which an engine needs before they arrive."""
    settings: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora}
    return AdapterFormat(
        settings | {"target_modules": _targets(model)}, model.get_input_embeddings().num_embeddings
    )


def start_value(name: str, shape: torch.Size, seed: int) -> Tensor | None:
    """Return the start value of an adapter's factor, float32: A is uniform within ±1/√in, as in
    PEFT; B is 0, so the sum is W.

    It is a function of seed and name, so all backends on any number of ranks start from the same
    adapter. None for other parameters.
    """
    if not is_adapter(name):
        return None
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def first_values(lora: LoraConfig) -> Callable[[str, torch.Size], Tensor | None]:
    """Return a function (name, shape) -> first value of an adapter's factor, from the adapter in
    lora.start, or else from `start_value`.

    The function returns None for other parameters.
    """
    if lora.start is None:
        return partial(start_value, seed=lora.seed)
    tensors = load_file(Path(lora.start) / WEIGHTS)

    def first_value(name: str, shape: torch.Size) -> Tensor | None:
        return tensors[peft_name(name)].float() if is_adapter(name) else None

    return first_value


def require_start(model: PreTrainedModel, start: Path, base: str) -> None:
    """Raise UserError unless the adapter in the folder `start` has exactly the factors that this
    model's adapters have.

    Prints the name of the model that the adapter was trained on, if it is not `base`.
    """
    stored = adapter_tensors(start)
    theirs = adapted_layers(stored)
    if theirs != _targets(model):
        at = f"adapters are at {_targets(model)}, but those in lora.start at {theirs}"
        raise UserError(f"lora.target_modules: {at}: leave the key out, or start with new adapters")
    needed = {peft_name(name): tuple(factor.shape) for name, factor in factors(model).items()}
    for name in sorted(needed | stored):
        shapes = [needed.get(name), stored[name].shape if name in stored else None]
        if shapes[0] != shapes[1]:
            texts = ["no such tensor" if shape is None else f"shape {list(shape)}" for shape in shapes]
            needs, has = texts
            remedy = "go on from an adapter of all layers of this model"
            raise UserError(
                f"lora.start: {name}: {start} has {has}, and {type(model).__name__} {needs}: {remedy}"
            )
    trained_on = adapter_config(start).get("base_model_name_or_path")
    if trained_on and Path(trained_on).name != Path(base).name:
        say(f"lora.start: the adapter in {start} was trained on {trained_on}, and goes on with {base}")


def is_adapter(name: str) -> bool:
    """Return True if a parameter, by its name in memory, is a factor of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def peft_name(name: str) -> str:
    """Return the name in PEFT's files, which vLLM reads, of a factor with this name in memory."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return both factors of every adapter, by their names in memory."""
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def low_rank(model: nn.Module) -> dict[str, LowRank]:
    """Return the adapter of each adapted weight, by the weight's name in memory."""
    adapters = {}
    for path, layer in _adapted(model).items():
        a = layer.lora_A[ADAPTER].weight
        b = layer.lora_B[ADAPTER].weight
        adapters[f"{path}.base_layer.weight"] = LowRank(a=a, b=b, scale=layer.scaling[ADAPTER])
    return adapters


def _adapted(model: nn.Module) -> dict[str, Any]:
    modules = model.named_modules()
    return {
        path: module
        for path, module in modules
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
    }


def _targets(model: nn.Module) -> list[str]:
    return sorted({layer_name(path) for path in _adapted(model)})


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model computes without its adapters."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class BaseOfPolicy:
    """The policy without its adapters, a reference for the KL divergence that needs no second
    model.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def work(self) -> Work:
        """The policy's record of work, in which the passes of its base are counted as well."""
        return self._policy.work

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """Return the outputs of the base for each batch, without gradients. Collective."""
        with switched_off(self._policy.model):
            return self._policy.score(batches, temperature)


def save_adapter(model: PreTrainedModel, lora: LoraConfig, base: str, folder: Path) -> None:
    """Write the adapter alone, in PEFT's format, for PEFT and vLLM to load. Collective; rank 0
    writes.
    """
    tensors = {}
    for name, factor in factors(model).items():
        tensors[peft_name(name)] = gathered(factor).cpu().contiguous()
    with agreed(f"writing the adapter to {folder}"):
        if is_main():
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            config = peft_config(lora, _targets(model), base, exclude=list(vision_modules(model)))
            config.inference_mode = True
            config.save_pretrained(folder)
            follow_umask(folder)
