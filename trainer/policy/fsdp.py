"""The policy on FSDP2: float32 master weights sharded over the ranks, forward and backward in the
compute dtype.

`ShardedModel` is a model with its optimizer, the common base of the policy and the critic.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sharding.ranks import all_reduce_sum, world_size
from sharding.send.source import local_part
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.distributed import say
from trainer.model_structure import Work, decoder, encoder_layers, freeze, hidden_matrices
from trainer.policy import hf_format, hf_saving
from trainer.policy.buffers import saved_buffers
from trainer.policy.experts import dispatched_experts, split_experts
from trainer.policy.fused import fuse, is_fused
from trainer.policy.hf_format import parameter_names
from trainer.policy.lora import NO_ADAPTERS, add_adapters, first_values
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.offload import Offload, Offloadable
from trainer.policy.optimizer import MetricSums, Updates
from trainer.policy.optimizer_choice import (
    make_optimizer,
    move_state,
    saved_state,
    set_steps,
    starts_without_state,
    state_tensors,
)
from trainer.policy.routing import Routing, asked_routers
from trainer.policy.tied import add_rows_to_head
from trainer.types import LossFn, MicroBatch, Outputs, Policy, UpdateStats

Result = TypeVar("Result")
LossOf = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class ShardedModel(Offloadable):
    """A model under FSDP2 with its optimizer, which needs a process group."""

    def __init__(
        self,
        # The module to call: the model with, possibly, a head that reads its hidden states
        module: nn.Module,
        model: PreTrainedModel,  # the model, still without data (`hf_format.build_meta_model`)
        source: Path,  # the checkpoint to load
        settings: PolicyConfig,
        device: torch.device,
        total_updates: int = 1,  # the end of the learning rate's schedule, in updates asked for
        trainable: bool = True,  # False for a frozen model: no gradients, no optimizer
        start: hf_format.StartValue = lambda name, shape: None,  # see `hf_format.load_sharded`
    ) -> None:
        """Shard and load the model. Between calls its parameters are DTensors, sharded on dimension
        0.
        """
        super().__init__(
            settings.offload,
            lambda: self._on_device(state_tensors(self.optimizer)),
            lambda: self._on_device(self._weights()),
        )
        self.module = module
        self.model = model
        self.source = source
        self.device = device
        self.config = settings
        self._on_host = trainable and settings.update_on == "host"
        # Where weights and optimizer state stay
        self.home = torch.device("cpu") if self._on_host else device
        self.birthplace = self._birthplace(trainable)  # where they are made
        self.compute_dtype = getattr(torch, settings.dtype)
        self.updates = Updates(settings, total_updates)
        if not trainable:
            module.requires_grad_(False)
        self._shard()
        self._load(start)
        if trainable:
            self.optimizer = make_optimizer(self.trained(), hidden_matrices(model), settings)
        self._state_to_move = trainable and self.birthplace != self.home

    @property
    def work(self) -> Work:
        """The work that the model has done so far on this rank."""
        return cast(Work, self.module.work)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield sharded parameters with their names in the Transformers model, tied ones once."""
        yield from parameter_names(self.model).items()

    def shard_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that have the memory of this rank's shards.

        These are the parameters, FSDP2's buffers to gather from, which have the padding of uneven
        shards, and the model's saved buffers.
        """
        yield from saved_buffers(self.model).values()
        for unit in self._units():
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    yield parameter._sharded_param_data
                    yield cast(DTensor, parameter.sharded_param)._local_tensor

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name: the model's, and those of a head beside it."""
        named = self.module.named_parameters()
        return {
            name.removeprefix("model."): parameter
            for name, parameter in named
            if parameter.requires_grad
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the live sharded tensors of the trained parameters, for
        torch.distributed.checkpoint to save and load.

        With adapters, the base is loaded from `model.path` again. The optimizer's step count is
        `version`, and the learning rate is a function of it and of the run's step, so neither is
        kept.
        """
        model = self.trained()
        return {
            "model": {name: parameter.detach() for name, parameter in model.items()},
            "optimizer": saved_state(self.optimizer, model) if model else {},
            "counters": self.updates.counters(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state that `state_dict` returned, of a policy with the same model and number of
        ranks.
        """
        target = self.state_dict()
        for section in ("model", "optimizer"):
            if target[section].keys() != state[section].keys():
                different = sorted(target[section].keys() ^ state[section].keys())
                raise ValueError(
                    f"the {section} state does not fit this model: only one of them has {different[:5]}"
                )
            for name, tensor in target[section].items():
                tensor.copy_(state[section][name])
        self.updates.restore(state["counters"])
        set_steps(self.optimizer, self.version)

    def _birthplace(self, trainable: bool) -> torch.device:
        """Return host memory for what is there while engines are awake: the device may never have
        room for all of it.
        """
        settings = self.config
        away = settings.offload != "none" if trainable else settings.offload_reference is not False
        return torch.device("cpu") if away and self.device.type == "cuda" else self.home

    def _load(self, start: hf_format.StartValue) -> None:
        hf_format.load_sharded(self.model, self.source, self.birthplace, start)
        for buffer in self.module.buffers() if self.birthplace != self.device else ():
            buffer.data = buffer.to(self.device)  # FSDP2 moves parameters alone

    def _move_weights(self) -> None:
        """Move weights that were made in host memory to the device, before they are used for the
        first time.
        """
        made_elsewhere = self.birthplace != self.home
        if made_elsewhere and next(self.module.parameters()).device.type != self.device.type:
            self.module.to(self.device)

    def _on_device(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors that are where the model computes, and so could be put away."""
        return (tensor for tensor in tensors if tensor.device.type == self.device.type)

    def _weights(self) -> Iterator[Tensor]:
        # A generation shift does not need them once the engines have them
        return self.module.parameters()

    def _shard(self) -> None:
        """Make an FSDP unit of each decoder layer, of the embeddings and the output head, if
        untied, and of the rest.

        The head is then gathered during the last layers' forward, and its gradients are reduced
        during backward.
        """
        mesh = shard_mesh(self.device, self.config.shard_size)
        precision = MixedPrecisionPolicy(self.compute_dtype, torch.float32)
        shard = partial(
            fully_shard, mesh=mesh, mp_policy=precision, offload_policy=self._offload_policy()
        )
        self._replicas = world_size() // mesh.size(-1)
        self._fuse()
        # Inputs and outputs keep their dtypes in units that are no layer: routers weigh experts in
        # float32, and image encoders compute rotary frequencies in it.
        kept = MixedPrecisionPolicy(self.compute_dtype, torch.float32, cast_forward_inputs=False)
        if self.config.expert_parallel > 1 and (experts := dispatched_experts(self.model)):
            holders = split_experts(
                self.model, self.config.expert_parallel, self._replicas, self.device.type
            )
            for layer in experts:
                shard(
                    layer,
                    mesh=holders,
                    mp_policy=kept,
                    reshard_after_forward=self.config.reshard_after_forward,
                )
        for layer in decoder(self.model).layers:
            shard(layer, reshard_after_forward=self.config.reshard_after_forward)
        for layer in encoder_layers(self.model):
            shard(layer, mp_policy=kept, reshard_after_forward=self.config.reshard_after_forward)
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        if head is None:  # a critic's head is called by the root
            ends = [embedding]
        else:
            ends = [] if head.weight is embedding.weight else [embedding, head]
        # The weights of these units are needed again soon after the forward pass, so they stay
        # until the end of backward.
        for unit in (*ends, self.module):
            shard(unit, reshard_after_forward=False)
        for unit in self._units():
            # The loss is divided by the step's count over all ranks already, so gradients are
            # summed over ranks, not averaged. A divide factor alone would need a scaled reduction,
            # which gloo does not have (https://github.com/pytorch/pytorch/pull/155915). A single
            # rank would divide by it into a new tensor.
            if not self._alone:
                unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def _offload_policy(self) -> OffloadPolicy:
        """Return PyTorch's own policy where the update is the host's (`policy.update_on`).

        A block of our own to which gradients move unit by unit was weighed. It could keep rounded
        weights on the device and overlap the optimizer's step with backward, but clipping needs the
        norm of all gradients first. FSDP2's policy gathers from page-locked memory, awaits each
        copy of a gradient before the optimizer's step, and adds up micro-batches in their order, so
        that a step equals the device's and a resumed run itself, bit for bit.
        """
        return (
            CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self._on_host else OffloadPolicy()
        )

    def _fuse(self) -> None:
        """Fuse the pointwise parts of the decoder, if the recipe or the device asks for it."""
        if is_fused(self.config, self.device.type) and (unknown := fuse(self.model)):
            say(f"{type(self.model).__name__} computes {', '.join(unknown)} as before, uncompiled")

    @torch.no_grad()
    def _without_gradients(
        self, batches: list[MicroBatch], forward: Callable[[MicroBatch], Result]
    ) -> list[Result]:
        """Return the results of `forward` for each batch, in evaluation mode and without
        gradients.
        """
        self._move_weights()
        self.module.eval()
        results = [forward(batch) for batch in batches]
        self._reshard()
        return results

    def _update(self, batches: list[MicroBatch], loss_of: LossOf, progress: float | None) -> UpdateStats:
        """Run one optimizer step on the sum of all losses over micro-batches and ranks, or skip it
        on all ranks.

        Raises TrainingDiverged on all ranks if the last `max_skipped_steps` updates were all
        skipped.
        """
        sums = self._accumulate(batches, loss_of)
        return self.step(sums, self.updates.learning_rate(progress), self.config.max_grad_norm)

    def _accumulate(self, batches: list[MicroBatch], loss_of: LossOf) -> MetricSums:
        """Add the gradients of all losses to those that wait for `step`, summed over ranks.
        Collective.

        Each call reduces its gradients over ranks and replicas in its last micro-batch, so no call
        needs to know whether another one follows. Returns this rank's sums of losses and metrics.
        """
        self._move_weights()
        if self._state_to_move:
            move_state(self.optimizer, self.device)
            self._state_to_move = False
        self.module.train()
        metrics = MetricSums(self.device)
        for number, batch in enumerate(batches, start=1):
            for unit in self._units():
                self._reduce_gradients(unit, number == len(batches))
            loss, sums = loss_of(batch)
            loss.backward()
            metrics.add(batch, loss, sums)
        self._reshard()
        return metrics

    def step(self, metrics: MetricSums, rate: float, max_norm: float) -> UpdateStats:
        """Clip the waiting gradients to a norm of `max_norm` and apply them, or drop them if loss
        or norm is not finite. Collective.

        `metrics` are this rank's sums of all losses since the last step. They and the norm are
        summed over ranks, so all ranks decide alike. Raises TrainingDiverged as `update` does.
        """
        gradients = [local_part(p.grad) for p in self.trained().values() if p.grad is not None]
        # Every replica has the same gradients, so the sum counts each shard once per replica.
        squared_norm = torch.nn.utils.get_total_norm(gradients).double() ** 2 / self._replicas
        sums = metrics.over_ranks(squared_norm=squared_norm)
        norm = sums.pop("squared_norm") ** 0.5
        # Both comparisons are false for NaN
        finite = abs(sums["loss"]) < float("inf") and norm < float("inf")
        if finite:
            if norm > max_norm:
                torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if not self.updates.applied and starts_without_state(self.config):
                self.optimizer.state.clear()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.updates.count(not finite, norm, rate, sums)

    def drop_gradients(self) -> None:
        """Drop the gradients that wait for `step`, also those of a call that was broken off."""
        self.optimizer.zero_grad(set_to_none=True)
        root = cast(FSDPModule, self.module)
        if root._get_fsdp_state()._is_root:  # which it is not before the first forward pass
            root.reset_iter_state()
        for unit in self._units():
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # made in the first forward pass
                        parameter._unsharded_param.grad = None

    def _reduce_gradients(self, unit: FSDPModule, last: bool) -> None:
        """Reduce a unit's gradients over replicas once per update, not once per micro-batch.

        The gradients of a single rank, which are whole, are also copied only once into those of its
        shards.
        """
        if self._alone:
            unit.set_requires_gradient_sync(last, recurse=False)
        else:
            unit.set_requires_all_reduce(last, recurse=False)

    @property
    def _alone(self) -> bool:
        """True for a single rank on a CPU; on a GPU its gradients are not yet known to take less
        memory so.
        """
        return world_size() == 1 and self.device.type == "cpu"

    def _reshard(self) -> None:
        """Free gathered weights that were kept, so that every parameter is sharded outside of
        calls.
        """
        for unit in self._units():
            unit.reshard()

    def _units(self) -> Iterator[FSDPModule]:
        return (unit for unit in self.module.modules() if isinstance(unit, FSDPModule))


class FsdpPolicy(ShardedModel, Policy):
    """The policy on FSDP2."""

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
        """Build, shard and load the model on "cpu", or on this rank's CUDA device; arguments as in
        `ShardedModel`.

        The weights of a model that is not `trainable` (a reference), and of the base of adapters,
        are in the compute dtype; adapters are in float32. With a value head, a critic that shares
        the trunk, outputs also have values.
        """
        source = hf_format.resolve_folder(model.path)
        dtype = torch.float32 if trainable and not lora.rank else getattr(torch, policy.dtype)
        built = hf_format.build_meta_model(source, model, dtype, device)
        if lora.rank:
            add_adapters(built, lora, torch.float32, "meta")
        if trainable:
            freeze(built, policy.freeze)
            hf_format.checkpoint_activations(
                built, policy.activation_checkpointing, policy.offload_activations
            )
        if device.type == "cpu" and policy.dtype == "float32":
            add_rows_to_head(built)
        routers = asked_routers(built, model.routes) if trainable else {}
        self.routing = Routing(built, routers, model.routes == "recorded") if routers else None
        vision = hf_format.make_vision(built, source)
        module = PolicyModule(built, policy.fp32_head, value_head, self.routing, vision)
        super().__init__(
            module, built, source, policy, device, total_updates, trainable, first_values(lora)
        )
        if trainable:
            self._move_weights()  # the first sync sends them

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """Return the outputs for each batch, without gradients. Collective."""
        return self._without_gradients(batches, lambda batch: outputs(self.module, batch, temperature))

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """Run one optimizer step on all batches, as `Policy.update` describes. Collective."""
        return self._update(
            batches, lambda batch: loss_fn(batch, outputs(self.module, batch, temperature)), place
        )

    def accumulate(self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float) -> MetricSums:
        """Add the gradients of the summed losses to those that wait for `step`. Collective.

        `update` is this and `step`. Between the two, calls may follow one another, and scores
        change nothing. Returns this rank's sums, which `step` takes (`MetricSums.join`).
        """
        return self._accumulate(
            batches, lambda batch: loss_fn(batch, outputs(self.module, batch, temperature))
        )

    def gradient_norms(self, batches: list[MicroBatch], temperature: float) -> Tensor:
        """Return the norm of each parameter's gradient, [parameters] float64, of the sum of all
        targets' log-probabilities and entropies. Collective.

        Weights, gradients, random states and the count of work are as before.
        """

        def loss_of(batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            result = outputs(self.module, batch, temperature)
            return ((result.logprobs + result.entropy) * batch.loss_mask).sum(), {}

        tokens = self.work.tokens
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            self._accumulate(batches, loss_of)
        self.work.tokens = tokens
        squares = [_squared_norm(parameter.grad) for parameter in self.trained().values()]
        sums = all_reduce_sum({str(number): square for number, square in enumerate(squares)})
        self.optimizer.zero_grad(set_to_none=True)
        return torch.tensor(list(sums.values()), dtype=torch.float64).div(self._replicas).sqrt()

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format and the compute dtype, without the tokenizer."""
        hf_saving.save_pretrained(self.model, folder, self.compute_dtype, self.source)


def _squared_norm(gradient: Tensor | None) -> float:
    """Return the squared norm of this rank's part of a gradient."""
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(local_part(gradient), dtype=torch.float64)) ** 2


class FrozenPolicy(FsdpPolicy):
    """A frozen reference. With `policy.offload_reference`, its weights are on the device only while
    it scores.
    """

    def __init__(self, model: ModelConfig, policy: PolicyConfig, device: torch.device) -> None:
        """Build, shard and load the model; arguments as in `FsdpPolicy`."""
        super().__init__(model, policy, device, trainable=False)
        away = device.type == "cuda" if policy.offload_reference is None else policy.offload_reference
        self._home = Offload(
            lambda: self._on_device(self.module.parameters()) if away else [], constant=True
        )
        self._home.release()

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """Return the outputs for each batch, without gradients. Collective."""
        self._home.restore()
        outputs = super().score(batches, temperature)
        self._home.release()
        return outputs


def shard_mesh(device: torch.device, shard_size: int | None) -> DeviceMesh:
    """Return the device mesh of all ranks in one row, each with its shard; or, with `shard_size`,
    in rows of that size (HSDP).

    The rows are replicas: the ranks of a row share a machine and gather weights from one another,
    and only sums of gradients go between machines. Zhao et al. 2023, PyTorch FSDP (arXiv
    2304.11277), 3.2.2.
    """
    ranks = world_size()
    if shard_size is None or shard_size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    return _rows(dist.group.WORLD, device.type, ranks, shard_size)


@lru_cache(maxsize=1)
def _rows(world: dist.ProcessGroup | None, device: str, ranks: int, shard_size: int) -> DeviceMesh:
    """Return a mesh of rows, the same for all models, since each mesh makes groups and, on CUDA,
    communicators of its own.
    """
    return init_device_mesh(
        device, (ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
    )
