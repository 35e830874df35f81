"""The policy on FSDP2: float32 master weights sharded over the ranks, forward and backward in the compute dtype."""

from functools import partial
from pathlib import Path

import torch

from trainer.batching import MicroBatch, scored_batch
from trainer.config import LoraConfig, ModelConfig, PolicyConfig
from trainer.policy import loading, saving
from trainer.policy.base import LossFn, Outputs, UpdateStats
from trainer.policy.lora import NO_ADAPTERS, add_adapters, start_value
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.offload import Offload
from trainer.policy.sharded import ShardedModel


class FsdpPolicy(ShardedModel):
    """`trainer.policy.base.Policy` says what the methods promise."""

    def __init__(
        self,
        model: ModelConfig,
        policy: PolicyConfig,
        device: torch.device,
        total_updates: int = 1,
        trainable: bool = True,
        value_head: bool = False,
        lora: LoraConfig = NO_ADAPTERS,
    ) -> None:
        """Build, shard and load the model.

        Args:
            device: "cpu", or the CUDA device of this rank.
            total_updates: where the learning rate's schedule ends, in updates asked for.
            trainable: False for a frozen reference: no gradients, no optimizer, weights kept in the compute dtype.
            value_head: outputs have values, too, of a head on the last hidden state: a critic that shares the trunk.
            lora: with a rank, adapters are trained, in float32, and the weights are kept in the compute dtype.
        """
        source = loading.resolve_folder(model.path)
        built = loading.build_meta_model(
            source,
            torch.float32 if trainable and not lora.rank else getattr(torch, policy.dtype),
            model.attn_implementation,
            model.trust_remote_code,
            device,
        )
        if lora.rank:
            add_adapters(built, lora, torch.float32, "meta")
        if trainable:
            loading.checkpoint_activations(built, policy.activation_checkpointing)
        module, start = PolicyModule(built, policy.fp32_head, value_head), partial(start_value, seed=lora.seed)
        super().__init__(module, built, source, policy, device, total_updates, trainable, start)

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """The outputs for each batch, without gradients."""
        return self._without_gradients(batches, lambda batch: outputs(self.module, batch, temperature))

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Log-probability (nats, temperature 1) of each of `token_ids[1:]`, the sharding manager's probe."""
        return self.score([scored_batch(token_ids, self.device)], temperature=1.0)[0].logprobs[0].tolist()

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """One optimizer step on the sum of all losses over micro-batches and ranks, or none, on all ranks alike.

        Raises TrainingDiverged on all ranks when the last `max_skipped_steps` updates were all skipped.
        """
        return self._update(batches, lambda batch: loss_fn(batch, outputs(self.module, batch, temperature)), place)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format and the compute dtype; without the tokenizer."""
        saving.save_pretrained(self.model, folder, self.compute_dtype, self.source)


class FrozenPolicy(FsdpPolicy):
    """A reference. By `policy.offload_reference` its weights are on the device only while it scores."""

    def __init__(self, model: ModelConfig, policy: PolicyConfig, device: torch.device) -> None:
        """Arguments as `FsdpPolicy`'s."""
        super().__init__(model, policy, device, trainable=False)
        away = device.type == "cuda" if policy.offload_reference is None else policy.offload_reference
        self._home = Offload(self.module.parameters if away else list, constant=True)
        self._home.release()

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """The outputs for each batch."""
        self._home.restore()
        outputs = super().score(batches, temperature)
        self._home.release()
        return outputs
