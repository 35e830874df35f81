"""The worker's half of weight_sync.py; runs inside vLLM's worker."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from common import TIMEOUT, in_turns, plain_copy, seconds, timed, total
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from sharding.wire.channel import Channel, connect
from sharding.wire.digests import digests_of
from sharding.wire.manifest import Manifest, NamedTensors
from sharding.wire.staging import open_memory
from sharding.worker.extension import _PLAIN_ON_CPU, VllmInternalWorkerExtension
from sharding.worker.loader import WeightLoader, copy_of, reprocessed_modules


class BenchWorker(VllmInternalWorkerExtension):
    """The extension of training, with further methods for the benchmark.

    Its methods may leave other weights in the model than the policy's; the next update brings those back.
    """

    bench_channel: Channel | None = None
    bench_memory: Callable[[], None] | None = None

    def bench_copy(self, nbytes: int) -> float:
        """Return the seconds that a copy of `nbytes` bytes takes."""
        worker: Any = self
        if self.bench_memory is None:
            self.bench_memory = plain_copy(nbytes, worker.device)
            self.bench_memory()
        return timed(self.bench_memory, worker.device)

    def bench_load(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each way to load weights that are in this process already, after a complete update."""
        worker: Any = self
        model, manifest, recording = (
            worker.get_model(),
            self.hotbunk_weights or {},
            self.hotbunk_recording,
        )
        weights, apart = resident(manifest, worker.device), reprocessed_modules(model, _PLAIN_ON_CPU)

        def update(replay: bool) -> None:
            loader = WeightLoader(model, worker.vllm_config, apart, recording)
            loader.begin(manifest, replay)
            loader.load(weights)
            loader.finish()

        def one_by_one() -> None:
            for weight in weights:
                model.load_weights([weight])

        ways: dict[str, Any] = {
            "memcpy": plain_copy(sum(tensor.nbytes for _, tensor in weights), worker.device)
        }
        ways["digest"] = lambda: digests_of({name: [tensor] for name, tensor in weights}, None)
        ways["loaders"] = lambda: update(replay=False)
        if not apart:
            ways |= {"replay": lambda: update(replay=True), "one by one": one_by_one}
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            return in_turns(ways, rounds, worker.device)

    def bench_trl(self, rounds: int) -> list[float]:
        """Return the seconds of TRL's `sync_weights`, with the trainer's model and the engine's in this process."""
        from trl.distributed import DistributedBackend
        from trl.generation.vllm_generation import VLLMGeneration

        worker: Any = self
        generation = VLLMGeneration.__new__(VLLMGeneration)  # its constructor would start an engine
        generation.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None))
        generation._dist = DistributedBackend(generation.accelerator)
        generation.mode, generation.enable_sleep_mode = "colocate", False
        generation.model = trainer_model(worker.vllm_config.model_config.model, worker.device)
        driver = SimpleNamespace(model_runner=SimpleNamespace(model=worker.get_model()))
        engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=driver))
        generation.llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)
        return seconds(generation.sync_weights, rounds, worker.device)

    def bench_connect(self, address: str, secret: str) -> None:
        """Connect to the trainer's process, for `bench_verl`."""
        self.bench_channel = connect(address, secret, "bench", 0)

    def bench_verl(self) -> None:
        """Receive one update as verl's worker extension does: bucket by bucket into `load_weights`, then everything
        that vLLM does after loading.

        Its CUDA path copies a bucket before it loads it, so that the sender can continue; in shared memory there is no
        such copy, and here the sender waits.
        """
        worker: Any = self
        channel, model = self.bench_channel, worker.get_model()
        assert channel is not None
        buffer = open_memory(channel.receive(TIMEOUT, "memory")["handle"], worker.device)[0]
        channel.send("opened")
        last = False
        while not last:
            message = channel.receive(TIMEOUT, "bucket")
            weights = views(buffer, message["pieces"])
            if worker.device.type == "cuda":
                weights = copy_of(weights)
                torch.cuda.synchronize(worker.device)
                channel.send("taken")
            model.load_weights(weights)
            if worker.device.type == "cpu":
                channel.send("taken")
            last = message["last"]
        del weights
        process_weights_after_loading(model, worker.vllm_config.model_config, worker.device)

    def bench_sum(self) -> float:
        """Return the sum of all weights of the model."""
        return total(self.get_model().parameters())  # type: ignore[attr-defined]


def resident(manifest: Manifest, device: torch.device) -> NamedTensors:
    """Make weights of the manifest's names, shapes and dtypes."""
    return [
        (name, torch.full(shape, 0.01, dtype=getattr(torch, dtype), device=device))
        for name, (shape, dtype) in manifest.items()
    ]


def trainer_model(folder: str, device: torch.device) -> PreTrainedModel:
    """Make the trainer's model in Transformers, unsharded and in float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def views(buffer: torch.Tensor, pieces: list[list[Any]]) -> NamedTensors:
    """Return the weights in a bucket, from [name, dtype, shape, offset in bytes] of each."""
    return [
        (name, buffer[offset:].view(getattr(torch, dtype))[: torch.Size(shape).numel()].view(shape))
        for name, dtype, shape, offset in pieces
    ]
