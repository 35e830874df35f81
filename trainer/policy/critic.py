"""The value model of PPO with a trunk of its own; a critic that shares the policy's is a head in
`PolicyModule`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.config.schema import ModelConfig, PolicyConfig, TrainConfig
from trainer.errors import UserError
from trainer.policy import hf_format
from trainer.policy.fsdp import ShardedModel
from trainer.policy.module import AutoValueModel, ValueModule, values
from trainer.types import MicroBatch, UpdateStats

HEAD = "score.weight"
ValueLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(batch, values [B, T-1]) -> summed loss and metrics, as in `trainer.types.LossFn`."""


class Critic(ShardedModel):
    """A value model under FSDP2, with its optimizer: the expected return of the state in which a
    token was sampled.

    In Transformers' terms it is a sequence classifier with one label, so it can start from the
    policy's checkpoint, with a head of zeros, or from a reward model, with that model's head. It
    takes images if the policy does.
    """

    def __init__(
        self, model: ModelConfig, settings: PolicyConfig, device: torch.device, total_updates: int = 1
    ) -> None:
        """Build, shard and load the model; arguments as in `FsdpPolicy`.

        Raises UserError if Transformers has no classifier of the model's type.
        """
        source = hf_format.resolve_folder(model.path)
        try:
            built = hf_format.build_meta_model(
                source, model, torch.float32, device, AutoValueModel, num_labels=1
            )
        except ValueError as error:
            lacks = "Transformers has no classifier of its type"
            raise UserError(
                f"{model.path} cannot be a critic: {lacks}; set critic.shared to true"
            ) from error
        hf_format.checkpoint_activations(
            built, settings.activation_checkpointing, settings.offload_activations
        )
        fresh = HEAD not in hf_format.SafetensorsFolder(source).names
        module = ValueModule(built, hf_format.make_vision(built, source))

        def start(name: str, shape: torch.Size) -> Tensor | None:
            return torch.zeros(shape) if fresh and name == HEAD else None

        super().__init__(module, built, source, settings, device, total_updates, start=start)

    def score(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return values [B, T-1] float32 of each batch, 0 where its loss mask is 0, without
        gradients. Collective.
        """
        return self._without_gradients(batches, lambda batch: values(self.module, batch))

    def update(
        self, batches: list[MicroBatch], loss_fn: ValueLoss, progress: float | None = None
    ) -> UpdateStats:
        """Run one optimizer step on the sum of all losses, or skip it, as `Policy.update`.
        Collective.
        """
        return self._update(batches, lambda batch: loss_fn(batch, values(self.module, batch)), progress)


def make_critic(config: TrainConfig, device: torch.device, total_updates: int) -> Critic:
    """Make the critic that the recipe describes."""
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path})
    keys = {"lr": config.critic.lr, "warmup_steps": config.critic.warmup_steps}
    return Critic(model, config.policy.model_copy(update=keys), device, total_updates)
