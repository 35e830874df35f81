"""An engine's worker in which a fault can be put in on purpose."""

from typing import Any

import torch

from sharding.worker.extension import VllmInternalWorkerExtension
from sharding.worker.loader import WeightLoader


class FaultyWorker(VllmInternalWorkerExtension):
    """The worker extension of a run, with a fault in its next updates."""

    def keep_stale(self, suffix: str) -> dict[str, Any]:
        """From now on updates leave the parameters whose name ends so as they are, and take them for loaded."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        stale = {p: p.detach().clone() for name, p in model.named_parameters() if name.endswith(suffix)}
        finish = WeightLoader.finish

        def finish_stale(loader: WeightLoader) -> None:
            finish(loader)
            for parameter, values in stale.items():
                parameter.detach().copy_(values)

        WeightLoader.finish = finish_stale  # type: ignore[method-assign]
        return {"error": None, "parameters": len(stale)}

    def pack_convolution(self) -> dict[str, Any]:
        """Pack a convolution as vLLM does on CPUs with AVX512-BF16, in an order that no CPU has."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        layers = [(name, module) for name, module in model.named_modules() if name.endswith("conv1d")]
        name, layer = layers[0]
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        layer._cpu_unpacked_conv_weight = weight.detach().flatten(1).clone()
        weight.data = weight.detach().flip(0).clone()
        return {"error": None, "layer": name}
