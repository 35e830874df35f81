"""The policy on FSDP2: float32 master weights sharded over the ranks, forward and backward in the compute dtype."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.batching import MicroBatch, scored_batch
from trainer.config import ModelConfig, PolicyConfig
from trainer.distributed import world_size
from trainer.optimizer import make_adamw
from trainer.policy import loading, saving
from trainer.policy.base import LossFn, Outputs, UpdateStats
from trainer.policy.checkpoint_names import parameter_names
from trainer.policy.module import PolicyModule
from trainer.policy.updates import Figures, Updates


class FsdpPolicy:
    """`trainer.policy.base.Policy` says what the methods promise. Needs a process group, of one rank or more.

    Attributes:
        model: the Transformers model; between calls its parameters are DTensors in float32, sharded on dimension 0.
    """

    def __init__(
        self,
        model: ModelConfig,
        policy: PolicyConfig,
        device: torch.device,
        total_updates: int = 1,
        trainable: bool = True,
    ) -> None:
        """Build, shard and load the model.

        Args:
            device: "cpu", or the CUDA device of this rank.
            total_updates: where the learning rate's schedule ends.
            trainable: False for a frozen reference: no gradients, no optimizer, weights kept in the compute dtype.
        """
        self.device, self.config, self.trainable = device, policy, trainable
        self.updates = Updates(policy, total_updates)
        self.compute_dtype = getattr(torch, policy.dtype)
        self.source = loading.resolve_folder(model.path)
        self.model = loading.build_meta_model(
            self.source,
            torch.float32 if trainable else self.compute_dtype,
            model.attn_implementation,
            model.trust_remote_code,
            device,
        )
        self.model.requires_grad_(trainable)
        if trainable and policy.activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module = self._shard()
        loading.load_sharded(self.model, self.source, device)
        if trainable:
            self.optimizer = make_adamw(
                list(self.model.parameters()), policy.lr, policy.betas, policy.eps, policy.weight_decay
            )

    @property
    def version(self) -> int:
        """How many updates were applied."""
        return self.updates.applied

    def _shard(self) -> PolicyModule:
        """One FSDP unit a decoder layer, and one for the rest: embeddings, final norm and output head."""
        mesh = init_device_mesh(self.device.type, (world_size(),), mesh_dim_names=("shard",))
        precision = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        module = PolicyModule(self.model, self.config.fp32_head)
        for layer in self.model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=self.config.reshard_after_forward)
        # The root's weights are needed again right after the forward pass, so they stay until the backward pass is
        # over.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        for unit in _units(module):
            # The loss is divided by the whole step's count already (P14), so gradients are summed over ranks, not
            # averaged. A divide factor alone would ask for a scaled reduction that gloo does not have.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Sharded parameters under the names they have in the Transformers model, tied ones once."""
        yield from parameter_names(self.model).items()

    @torch.no_grad()
    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """The outputs for each batch, without gradients."""
        self.module.eval()
        outputs = [Outputs(*self.module(batch.input_ids, batch.loss_mask.bool(), temperature)) for batch in batches]
        self._reshard()
        return outputs

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Log-probability (nats, temperature 1) of each of `token_ids[1:]`, the sharding manager's probe."""
        return self.score([scored_batch(token_ids, self.device)], temperature=1.0)[0].logprobs[0].tolist()

    def update(self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float) -> UpdateStats:
        """One optimizer step on the sum of all losses over micro-batches and ranks, or none, on all ranks alike (P15).

        Raises TrainingDiverged on all ranks when the last `max_skipped_steps` updates were all skipped.
        """
        self.module.train()
        figures = Figures(self.device)
        for batch in batches:
            outputs = Outputs(*self.module(batch.input_ids, batch.loss_mask.bool(), temperature))
            loss, sums = loss_fn(batch, outputs)
            loss.backward()
            figures.add(loss, sums)
        self._reshard()
        gradients = [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        squared_norm = torch.nn.utils.get_total_norm(gradients).double() ** 2
        totals = figures.over_ranks(squared_norm=squared_norm)
        return self._step(gradients, totals.pop("squared_norm") ** 0.5, totals)

    def _step(self, gradients: list[Tensor], norm: float, sums: dict[str, float]) -> UpdateStats:
        """Clip and apply, or skip. Loss and norm are sums over ranks, so that all ranks decide the same."""
        finite = abs(sums["loss"]) < float("inf") and norm < float("inf")  # both comparisons are false for NaN
        if finite:
            if norm > self.config.max_grad_norm:
                torch._foreach_mul_(gradients, self.config.max_grad_norm / (norm + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = self.updates.learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.updates.count(not finite, norm, sums)

    def state_dict(self) -> dict[str, Any]:
        """Live sharded tensors: torch.distributed.checkpoint saves them, and loads into them in place.

        The learning rate is a function of `version`, as is AdamW's own step count, so the number is all that is kept of
        both.
        """
        parameters = dict(self.named_parameters())
        moments: dict[str, Tensor] = {}
        for name, parameter in parameters.items() if self.trainable else ():
            state = self.optimizer.state[parameter]
            moments |= {f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        return {
            "model": {name: parameter.detach() for name, parameter in parameters.items()},
            "optimizer": moments,
            "counters": self.updates.counters(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what `state_dict` gave, on the same or another policy of the same model and number of ranks."""
        own = self.state_dict()
        for section in ("model", "optimizer"):
            if own[section].keys() != state[section].keys():
                different = sorted(own[section].keys() ^ state[section].keys())
                raise ValueError(f"the {section} state does not fit this model: only one of them has {different[:5]}")
            for name, tensor in own[section].items():
                tensor.copy_(state[section][name])
        self.updates.restore(state["counters"])
        if self.trainable:
            for values in self.optimizer.state.values():
                values["step"].fill_(self.version)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format and the compute dtype; without the tokenizer."""
        saving.save_pretrained(self.model, folder, self.compute_dtype, self.source)

    def _reshard(self) -> None:
        """Free gathered weights that were kept, so that outside of calls every parameter is its sharded self."""
        for unit in _units(self.module):
            unit.reshard()


def _units(module: nn.Module) -> Iterator[FSDPModule]:
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))
