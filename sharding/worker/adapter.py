"""Handing a LoRA adapter to a running vLLM engine, in memory, so that all of it takes effect or the
culprit is named.

vLLM itself loads adapters from folders, passes over modules that it does not find
(https://github.com/vllm-project/vllm/issues/34186), and takes two adapters of one number for the
same. Here the factors come as weights do; every update is an adapter of its own, under a number
that was never used before, and the old one goes. Which factor reached a module is seen by watching
vLLM's own copies.
"""

from typing import Any, ClassVar

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from sharding.wire.channel import SyncError
from sharding.wire.manifest import Manifest, NamedTensors, Part
from sharding.worker.loader import Arrivals, copy_of
from sharding.worker.recording import LoadWatcher


class AdapterLoader:
    """One version of the adapter of one worker; the methods of `WeightLoader`."""

    plain = False  # vLLM scales and pads the factors
    recording = None  # every update fills the room for another adapter
    left_out: ClassVar[list[str]] = []

    def __init__(self, model_runner: Any, number: int, config: dict[str, Any]) -> None:
        """Take the adapter's `number` in requests, and the `config` that PEFT writes to
        adapter_config.json.
        """
        if not hasattr(model_runner, "lora_manager"):
            raise SyncError("an adapter arrived, but the engine was started without enable_lora")
        self._worker = model_runner.lora_manager
        self._number = number
        self._config = config
        self._arrivals = Arrivals({})
        self._factors: NamedTensors = []

    def begin(self, weights: Manifest, replay: bool = True) -> None:
        """Start an update that will bring exactly these factors, by PEFT's names."""
        self._arrivals = Arrivals(weights)

    def load(self, weights: NamedTensors) -> None:
        """Take some of the announced factors. When it returns, their memory may be overwritten."""
        self._arrivals.check_off(weights)
        self._factors += copy_of(weights)

    def load_parts(self, parts: list[Part]) -> None:
        """Refuse: factors travel whole, as `whole` says."""
        raise SyncError(f"{parts[0][0]} arrived in parts, but vLLM needs an adapter's factors whole")

    def whole(self) -> None:
        """Return None, which stands for all weights: every factor has to arrive whole."""

    def compare(self, weights: NamedTensors) -> list[str]:
        """Return no differences, since there is nothing to compare, as `plain` says."""
        return []

    def finish(self) -> None:
        """Put the adapter in the place of the one before.
        Raises SyncError: naming factors that no module of the engine took.
        Raises ValueError: vLLM does not know adapters of this kind.
        """
        for old in self._worker.list_adapters():
            self._worker.remove_adapter(old)
        watcher = LoadWatcher()
        manager = self._worker._adapter_manager
        watcher.expect(self._factors)
        with watcher:
            manager.add_adapter(self._adapter())
            manager.activate_adapter(self._number)
        if complaints := self._arrivals.complaints(watcher.read):
            raise SyncError("the engine's adapter is not the policy's: " + "; ".join(complaints))

    def _adapter(self) -> LoRAModel:
        config = PEFTHelper.from_dict(self._config)
        config.validate_legal(self._worker.lora_config)
        names: Any = getattr(self._worker._adapter_manager.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            self._number,
            dict(self._factors),
            config,
            device="cpu",  # where vLLM keeps adapters; activating one copies it to the worker's device
            dtype=self._worker.lora_config.lora_dtype,
            weights_mapper=names.get_rename_mapper() if hasattr(names, "get_rename_mapper") else names,
        )

    def unreplayable(self) -> None:
        """Return None, since nothing is recorded."""

    def abort(self) -> None:
        """Give up this update: the engine keeps no adapter that a request asks for."""
        self._factors = []
