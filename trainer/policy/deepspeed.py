"""The policy on DeepSpeed ZeRO: the same numbers as FSDP2, for clusters that are set up for DeepSpeed.

ZeRO-1 and 2 keep whole compute weights on every rank and shard the float32 masters and Adam's moments (2: gradients,
too); ZeRO-3 shards the weights as well. Checkpoints hold rows of every parameter, as FSDP2 has them, so either backend
resumes from the other's.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from sharding.ranks import world_size
from sharding.send.source import whole_shape
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.model_structure import Work, freeze
from trainer.policy import hf_format
from trainer.policy.hf_format import checkpoint_views, parameter_names
from trainer.policy.lora import NO_ADAPTERS, add_adapters, factors, start_value
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.offload import Offloadable
from trainer.policy.optimizer import MOMENTS, Figures, Updates, decay_groups, state_of_no_steps
from trainer.policy.routing import Routing, asked_routers
from trainer.types import LossFn, MicroBatch, Outputs, Policy, UpdateStats


class DeepSpeedPolicy(Offloadable, Policy):
    """The policy on DeepSpeed. Needs a process group, of one rank or more.

    Under ZeRO-3 the model's parameters are empty between calls, and their partitions in `ds_tensor`.
    """

    def __init__(
        self,
        model: ModelConfig,
        policy: PolicyConfig,
        device: torch.device,
        total_updates: int = 1,
        lora: LoraConfig = NO_ADAPTERS,
    ) -> None:
        """Build, load and shard the model; arguments as `FsdpPolicy`'s."""
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported; it would look for other devices
        os.environ.setdefault("LOCAL_RANK", "0")  # read in deepspeed/comm/comm.py, and set by torchrun alone
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        # It calls what torch 2.13 has renamed (deepspeed/comm/torch.py): lines of every rank in every step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if device.type == "cpu":
            # Else it compiles an all-reduce for inference over shared memory, which takes a minute, and waits without
            # end for the lock of a process that was killed while compiling. Training does not use it
            # (https://github.com/deepspeedai/DeepSpeed/pull/5391).
            deepspeed.ops.__compatible_ops__ = {}
        # DeepSpeed's own way of putting memory away takes no other Adam than its own.
        super().__init__(policy.offload, self._update_memory, lambda: self.engine.module.parameters())
        self._deepspeed, self.device, self.config, self.lora = deepspeed, device, policy, lora
        self.zero_3 = policy.zero_stage == 3
        self.updates = Updates(policy, total_updates)
        self.compute_dtype = getattr(torch, policy.dtype)
        self.source = hf_format.resolve_folder(model.path)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.model = self._build(model)
        freeze(self.model, policy.freeze)
        hf_format.checkpoint_activations(self.model, policy.activation_checkpointing)
        # DeepSpeed divides gradients by the number of ranks.
        record, ranks = model.routes == "recorded", world_size()
        self.routing = Routing(self.model, self._routers, record, ranks) if self._routers else None
        vision = hf_format.make_vision(self.model, self.source)
        module = PolicyModule(self.model, policy.fp32_head, routing=self.routing, vision=vision)
        groups = decay_groups(list(self.trained().values()), policy.weight_decay)
        # At rate 0, since ZeRO-3 takes a step on zero gradients to make the optimizer's state
        # (deepspeed/runtime/zero/stage3.py, initialize_optimizer_states).
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=policy.betas, eps=policy.eps, fused=True)
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=self.optimizer, config=self._settings())
        self._make_optimizer_state()
        if self.compute_dtype != torch.float32:
            # DeepSpeed has made its masters from rounded weights.
            for parameter, whole in self._start_values(self.model, self.trained(), wider_than=self.compute_dtype):
                safe_set_full_fp32_param(parameter, whole)

    @property
    def work(self) -> Work:
        return cast(Work, self.engine.module.work)

    def shard_tensors(self) -> Iterator[Tensor]:
        """Every tensor that has the memory of ZeRO-3's partitions: these, and the flat buffers that they are cut from,
        which are the masters' too where both have one dtype.
        """
        zero = self.engine.optimizer
        yield from (parameter.ds_tensor for parameter in self.engine.module.parameters())
        yield from [zero.lp_param_buffer, *zero.fp16_partitioned_groups_flat, *zero.fp32_partitioned_groups_flat]

    def _update_memory(self) -> Iterator[Tensor]:
        """The tensors that only an update needs: masters, moments and the buffer of gradients."""
        zero = self.engine.optimizer
        yield from zero.fp32_partitioned_groups_flat if self.zero_3 else zero.single_partition_of_fp32_groups
        yield from (state[key] for state in zero.optimizer.state.values() for key in MOMENTS)
        if self.zero_3:
            yield zero.grad_partitions_flat_buffer

    def _settings(self) -> dict[str, Any]:
        config = self.config
        zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": self.device.type == "cuda"}
        if config.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        return {
            "train_micro_batch_size_per_gpu": 1,  # of no consequence: the boundaries of a step are set by `update`
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.max_grad_norm,
            "zero_optimization": zero,
            "bf16": {"enabled": self.compute_dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 60,
        }

    def _build(self, model: ModelConfig) -> PreTrainedModel:
        """The model with its weights: whole on the device or, under ZeRO-3, cut as it is built; not on the host."""
        # Without data, which also imports the model's classes: ZeRO would patch them wrongly while they are being made
        # (https://github.com/deepspeedai/DeepSpeed/issues/2812).
        built = hf_format.build_meta_model(self.source, model, self.compute_dtype, self.device)
        self._routers = asked_routers(built, model.routes)
        if self.zero_3:
            built = self._build_cut(built, model)
        else:
            hf_format.load_sharded(built, self.source, self.device)
        if self.lora.rank:
            add_adapters(built, self.lora, self.compute_dtype, self.device)  # whole; DeepSpeed cuts them as it starts
            for factor, whole in self._start_values(built, factors(built)):
                factor.data.copy_(whole)
        return built

    def _build_cut(self, empty: PreTrainedModel, model: ModelConfig) -> PreTrainedModel:
        """A model like `empty`, with its weights, each cut as soon as it is made."""
        with (
            no_init_weights(),
            # A group that is not named and has one rank would be taken for a mistake where torchrun has started more,
            # and memory-efficient linear would replace torch's in the whole process
            # (deepspeed/runtime/zero/partition_parameters.py).
            self._deepspeed.zero.Init(
                config_dict_or_path=self._settings(), data_parallel_group=dist.group.WORLD, mem_efficient_linear=False
            ),
        ):
            built = hf_format.model_kind(empty.config).from_config(
                empty.config,
                dtype=self.compute_dtype,
                attn_implementation=model.attn_implementation,
                trust_remote_code=model.trust_remote_code,
            )
        hf_format.choose_attention(built, model.attn_implementation)
        built.tie_weights()  # left out with the initialisation
        built = built.to(self.device)
        for name, buffer in empty.named_buffers():
            if not buffer.is_meta:  # computed, not loaded; ZeRO-3 has cast them, rotary frequencies among them
                built.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
        for parameter, whole in self._start_values(built, parameter_names(built)):
            self._fill(parameter, whole)
        return built

    def _start_values(
        self, model: PreTrainedModel, parameters: dict[str, nn.Parameter], wider_than: torch.dtype | None = None
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with the whole value it starts from, float32: the checkpoint's, or an adapter's beginning.

        With `wider_than`, only those that the checkpoint has in another dtype than this.
        """
        files = hf_format.SafetensorsFolder(self.source)
        hf_format.adopt_names(model, files.names)
        for name, parameter in parameters.items():
            shape = whole_shape(parameter)
            whole = start_value(name, shape, self.lora.seed)
            if whole is None:
                views = checkpoint_views(model, name, shape)
                if wider_than is not None and files.dtypes(views) == {wider_than}:
                    continue
                whole = files.read(views, 0, shape.numel(), torch.float32, self.device).view(shape)
            yield parameter, whole.to(self.device)

    @torch.no_grad()
    def _fill(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Set the compute weight, on all ranks; `whole` is the same on each."""
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.zero_3):
            parameter.copy_(whole)

    def _make_optimizer_state(self) -> None:
        """Adam's state from the start, as for FSDP2: zeros, of no steps.

        ZeRO-1 and 2 would make it at the first step, and then find that of the first parameter group only.
        """
        zero = self.engine.optimizer
        held = [p for group in zero.optimizer.param_groups for p in group["params"]]
        for partition in zero.fp32_partitioned_groups_flat if self.zero_3 else held:
            zero.optimizer.state[partition] = state_of_no_steps(partition)
        if not self.zero_3:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the Transformers model, tied ones once."""
        yield from parameter_names(self.model).items()

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name: all, or the adapters."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    @torch.no_grad()
    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """The outputs for each batch, without gradients. Collective."""
        self.engine.eval()
        return [outputs(self.engine, batch, temperature) for batch in batches]

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """One optimizer step on all batches; see `Policy.update`. Collective."""
        self.engine.train()
        figures = Figures(self.device)
        for number, batch in enumerate(batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(batches))
            loss, sums = loss_fn(batch, outputs(self.engine, batch, temperature))
            # DeepSpeed averages over ranks what is already divided by the whole step's count.
            self.engine.backward(loss * world_size(), scale_wrt_gas=False)
            figures.add(batch, loss, sums)
        return self._step(self.updates.learning_rate(place), figures.over_ranks())

    def _step(self, rate: float, sums: dict[str, float]) -> UpdateStats:
        """Apply, or skip where DeepSpeed finds a gradient that is not finite, as it does on all ranks together."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        skipped = bool(self.engine.optimizer.overflow)
        norm = float("nan") if skipped else float(self.engine.get_global_grad_norm())
        return self.updates.count(skipped, norm, rate, sums)

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments of the parameters that learn, as FSDP2 would hold them: float32 copies of rows."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        model, moments = {}, {}
        for name, parameter in self.trained().items():
            shape = whole_shape(parameter)
            model[name] = self._rows(safe_get_full_fp32_param(parameter), shape)
            for key in MOMENTS:
                moments[f"{name}.{key}"] = self._rows(safe_get_full_optimizer_state(parameter, key), shape)
        return {"model": model, "optimizer": moments, "counters": self.updates.counters()}

    def _rows(self, whole: Tensor, shape: torch.Size) -> DTensor:
        """This rank's rows of a tensor that every rank has."""
        mesh = init_device_mesh(self.device.type, (world_size(),), mesh_dim_names=("shard",))
        return distribute_tensor(whole.detach().float().view(shape), mesh, [Shard(0)], src_data_rank=None)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave, or FsdpPolicy's."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self.updates.restore(state["counters"])
        for values in self.engine.optimizer.optimizer.state.values():
            values["step"].fill_(self.version)
        for name, parameter in self.trained().items():
            whole = state["model"][name].full_tensor()
            safe_set_full_fp32_param(parameter, whole)
            self._fill(parameter, whole)
            for key in MOMENTS:
                safe_set_full_optimizer_state(parameter, state["optimizer"][f"{name}.{key}"].full_tensor(), key)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format and the compute dtype; without the tokenizer."""
        hf_format.save_pretrained(self.model, folder, self.compute_dtype, self.source)
