"""Modules whose weights vLLM changes after it has loaded them, and how they are loaded again.

Packed for oneDNN on CPU, experts shuffled, quantised, products of MLA's weights: what such a module keeps is not what
was sent, so it is taken through vLLM's layerwise reload, while all others are written in place. The reload
is vllm/model_executor/model_loader/reload/layerwise.py; the remedies below are for what it leaves stale or unset.
"""

from typing import Any

import torch
from torch.nn import Module
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


def reprocessed_modules(model: Module, plain_on_cpu: bool) -> list[Module]:
    """The outermost modules that cannot be written in place, or read back; the model itself where oneDNN packs it.

    Args:
        plain_on_cpu: oneDNN packing was switched off before the model was built.
    """
    if not plain_on_cpu and next(model.parameters()).device.type == "cpu":
        return [model]
    found: list[Module] = []
    inside: set[Module] = set()
    for module in model.modules():  # from the outside in
        if module not in inside and _keeps_something_else(module):
            found.append(module)
            inside.update(module.modules())
    return found


def _keeps_something_else(module: Module) -> bool:
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        return True
    return hasattr(module, "W_UK_T") or hasattr(module, "W_UV")  # MLA keeps products of its weights


class Reload:
    """One layerwise reload of some modules of a model, which keeps the weights it is given until they are complete."""

    def __init__(self, model: Module, modules: list[Module], config: VllmConfig) -> None:
        self._model, self._modules, self._config = model, modules, config
        self._begun = False

    def begin(self) -> None:
        """Parameters go to meta, until all weights of a module have come."""
        if not self._modules:
            return
        if next(self._model.parameters()).device.type == "cpu":
            for module in self._all():
                method = getattr(module, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    method.moe_kernel = None  # type: ignore[union-attr]  # else no prepack from the second load on
        with set_current_vllm_config(self._config):
            for module in self._modules:
                initialize_layerwise_reload(module)
        self._begun = True

    def finish(self) -> None:
        """Load what was waiting for more, and put back what nothing came for: no parameter stays on meta."""
        if not self._begun:
            return
        self._begun = False
        with set_current_vllm_config(self._config):
            for module in self._modules:
                finalize_layerwise_reload(module, self._config.model_config)
            _repack_tied(self._all())

    def parameters(self) -> set[torch.nn.Parameter]:
        """Of these modules, as they are now."""
        return {parameter for module in self._modules for parameter in module.parameters()}

    def untouched(self) -> list[str]:
        """Modules with parameters that nothing was sent for, unless they share them with one that was loaded (tied)."""
        missing: dict[str, set[int]] = {}
        loaded: set[int] = set()
        for name, module in self._named():
            info = get_layerwise_info(module)
            parameters = info.kernel_tensors[0] if info.kernel_tensors else module._parameters
            own = {id(p) for p in parameters.values() if p is not None}
            if not info.can_load() or info.load_numel > 0:
                loaded |= own
            elif info.load_numel_total and info.restore_metadata[0]:  # MLA's attention keeps only products
                missing[name] = own
        return [name for name, own in missing.items() if not own <= loaded]  # without parameters: nothing to miss

    def _all(self) -> list[Module]:
        return [module for _, module in self._named()]

    def _named(self) -> list[tuple[str, Module]]:
        inside = {inner for module in self._modules for inner in module.modules()}
        return [(name, module) for name, module in self._model.named_modules() if module in inside]


def _repack_tied(modules: list[Any]) -> None:
    """Pack again for all but the first of the modules that share a weight: on CPU a tied head keeps a packed copy."""
    owners: dict[int, Module] = {}
    for module in modules:
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        if owners.setdefault(id(weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)
