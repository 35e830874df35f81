"""The policy on DeepSpeed ZeRO, with the same results as on FSDP2, for clusters that are set up for
DeepSpeed.

ZeRO-1 and 2 keep unsharded compute weights on every rank and shard the float32 masters and Adam's
moments (2: gradients, too); ZeRO-3 shards the weights as well. Checkpoints have rows of every
parameter, like those of FSDP2, so either backend resumes from the other's.
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
from trainer.policy import hf_format, hf_saving
from trainer.policy.buffers import saved_buffers, set_buffer
from trainer.policy.hf_format import checkpoint_views, parameter_names
from trainer.policy.lora import NO_ADAPTERS, add_adapters, factors, first_values
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.offload import Offloadable
from trainer.policy.optimizer import MOMENTS, MetricSums, Updates, decay_groups, state_of_no_steps
from trainer.policy.routing import Routing, asked_routers
from trainer.types import LossFn, MicroBatch, Outputs, Policy, UpdateStats


class DeepSpeedPolicy(Offloadable, Policy):
    """The policy on DeepSpeed, which needs a process group of one rank or more.

    Under ZeRO-3 the model's parameters are empty between calls, and their partitions are in
    `ds_tensor`.
    """

    def __init__(
        self,
        model: ModelConfig,
        policy: PolicyConfig,
        device: torch.device,
        total_updates: int = 1,
        lora: LoraConfig = NO_ADAPTERS,
    ) -> None:
        """Build, load and shard the model; arguments as in `FsdpPolicy`."""
        if device.type == "cpu":
            # DeepSpeed reads it on import, and else looks for other devices
            os.environ["DS_ACCELERATOR"] = "cpu"
        # deepspeed/comm/comm.py reads it, and only torchrun sets it
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        # It calls functions that torch 2.13 has renamed (deepspeed/comm/torch.py), and every rank
        # warns in every step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if device.type == "cpu":
            # Else it compiles an all-reduce for inference over shared memory, which takes a minute
            # and training does not use, and it waits forever for the lock of a process that was
            # killed while compiling (https://github.com/deepspeedai/DeepSpeed/pull/5391).
            deepspeed.ops.__compatible_ops__ = {}
        # DeepSpeed's offloading works with its own Adam only.
        super().__init__(policy.offload, self._update_memory, lambda: self.engine.module.parameters())
        self._deepspeed = deepspeed
        self.device = device
        self.config = policy
        self.lora = lora
        self._first_value = first_values(lora)
        self.zero_3 = policy.zero_stage == 3
        self.updates = Updates(policy, total_updates)
        self.compute_dtype = getattr(torch, policy.dtype)
        self.source = hf_format.resolve_folder(model.path)
        deepspeed.init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        self.model = self._build(model)
        freeze(self.model, policy.freeze)
        hf_format.checkpoint_activations(
            self.model, policy.activation_checkpointing, policy.offload_activations
        )
        # DeepSpeed divides gradients by the number of ranks.
        record = model.routes == "recorded"
        ranks = world_size()
        self.routing = Routing(self.model, self._routers, record, ranks) if self._routers else None
        vision = hf_format.make_vision(self.model, self.source)
        module = PolicyModule(self.model, policy.fp32_head, routing=self.routing, vision=vision)
        groups = decay_groups(list(self.trained().values()), policy.weight_decay)
        # The rate is 0, since ZeRO-3 takes a step on zero gradients to make the optimizer's state
        # (deepspeed/runtime/zero/stage3.py, initialize_optimizer_states).
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=policy.betas, eps=policy.eps, fused=True
        )
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=self._settings()
        )
        self._make_optimizer_state()
        if self.compute_dtype != torch.float32:
            # DeepSpeed has made its masters from rounded weights.
            exact = self._start_values(self.model, self.trained(), wider_than=self.compute_dtype)
            for parameter, value in exact:
                safe_set_full_fp32_param(parameter, value)

    @property
    def work(self) -> Work:
        """The work that the model has done so far on this rank."""
        return cast(Work, self.engine.module.work)

    def shard_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors with the memory of what ranks hold: ZeRO-3's partitions, the flat
        buffers behind them, and the model's saved buffers.

        If weights and masters have one dtype, some buffers are the masters' as well.
        """
        zero = self.engine.optimizer
        yield from (parameter.ds_tensor for parameter in self.engine.module.parameters())
        yield from saved_buffers(self.model).values()
        yield from [
            zero.lp_param_buffer,
            *zero.fp16_partitioned_groups_flat,
            *zero.fp32_partitioned_groups_flat,
        ]

    def _update_memory(self) -> Iterator[Tensor]:
        """Yield the tensors that only an update needs: masters, moments and the buffer of
        gradients.
        """
        zero = self.engine.optimizer
        yield from (
            zero.fp32_partitioned_groups_flat if self.zero_3 else zero.single_partition_of_fp32_groups
        )
        yield from (state[key] for state in zero.optimizer.state.values() for key in MOMENTS)
        if self.zero_3:
            yield zero.grad_partitions_flat_buffer

    def _settings(self) -> dict[str, Any]:
        config = self.config
        zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": self.device.type == "cuda"}
        if config.update_on == "host":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        return {
            # Without effect, since `update` sets the boundaries of a step
            "train_micro_batch_size_per_gpu": 1,
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
        """Build the model with its weights, unsharded on the device or, under ZeRO-3, sharded while
        it is built.
        """
        # This build without data also imports the model's classes, which ZeRO would patch wrongly
        # while they are made (https://github.com/deepspeedai/DeepSpeed/issues/2812).
        built = hf_format.build_meta_model(self.source, model, self.compute_dtype, self.device)
        self._routers = asked_routers(built, model.routes)
        if self.zero_3:
            built = self._build_sharded(built, model)
        else:
            hf_format.load_sharded(built, self.source, self.device)
        if self.lora.rank:
            # DeepSpeed shards them when it starts
            add_adapters(built, self.lora, self.compute_dtype, self.device)
            for factor, value in self._start_values(built, factors(built)):
                factor.data.copy_(value)
        return built

    def _build_sharded(self, empty: PreTrainedModel, model: ModelConfig) -> PreTrainedModel:
        """Build a model like `empty`, with its weights, each of which is sharded as soon as it is
        made.
        """
        with (
            no_init_weights(),
            # DeepSpeed takes an unnamed group of one rank for a mistake if torchrun has started
            # more ranks, and its memory-efficient linear would replace torch's in the entire
            # process (deepspeed/runtime/zero/partition_parameters.py).
            self._deepspeed.zero.Init(
                config_dict_or_path=self._settings(),
                data_parallel_group=dist.group.WORLD,
                mem_efficient_linear=False,
            ),
        ):
            built = hf_format.model_kind(empty.config).from_config(
                empty.config,
                dtype=self.compute_dtype,
                attn_implementation=model.attn_implementation if empty._supports_sdpa else "eager",
                trust_remote_code=model.trust_remote_code,
            )
        hf_format.choose_attention(built, model.attn_implementation)
        built.tie_weights()  # `no_init_weights` leaves this out, too
        built = built.to(self.device)
        files = hf_format.SafetensorsFolder(self.source)
        hf_format.adopt_names(built, files.names)
        for name, buffer in empty.named_buffers():
            # ZeRO-3 has cast computed ones, such as rotary frequencies
            if buffer.is_meta:  # the others are saved
                views = checkpoint_views(built, name, buffer.shape)
                buffer = files.read(views, 0, buffer.numel(), buffer.dtype, self.device).view(
                    buffer.shape
                )
            set_buffer(built, name, buffer)
        for parameter, value in self._start_values(built, parameter_names(built)):
            self._fill(parameter, value)
        return built

    def _start_values(
        self,
        model: PreTrainedModel,
        parameters: dict[str, nn.Parameter],
        wider_than: torch.dtype | None = None,
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its unsharded float32 start value: the checkpoint's, or an
        adapter's.

        With `wider_than`, only parameters that the checkpoint has in another dtype.
        """
        files = hf_format.SafetensorsFolder(self.source)
        hf_format.adopt_names(model, files.names)
        for name, parameter in parameters.items():
            shape = whole_shape(parameter)
            value = self._first_value(name, shape)
            if value is None:
                views = checkpoint_views(model, name, shape)
                if wider_than is not None and files.dtypes(views) == {wider_than}:
                    continue
                value = files.read(views, 0, shape.numel(), torch.float32, self.device).view(shape)
            yield parameter, value.to(self.device)

    @torch.no_grad()
    def _fill(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a compute weight to an unsharded `value`, the same on all ranks. Collective."""
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.zero_3):
            parameter.copy_(value)

    def _make_optimizer_state(self) -> None:
        """Make Adam's state, zeros after no steps, at the start, as for FSDP2.

        ZeRO-1 and 2 would make it at the first step, and then find only that of the first parameter
        group.
        """
        zero = self.engine.optimizer
        held = [p for group in zero.optimizer.param_groups for p in group["params"]]
        for partition in zero.fp32_partitioned_groups_flat if self.zero_3 else held:
            zero.optimizer.state[partition] = state_of_no_steps(partition)
        if not self.zero_3:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the Transformers model, tied ones once."""
        yield from parameter_names(self.model).items()

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name: all, or the adapters."""
        return {
            name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad
        }

    @torch.no_grad()
    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """Return the outputs for each batch, without gradients. Collective."""
        self.engine.eval()
        return [outputs(self.engine, batch, temperature) for batch in batches]

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """Run one optimizer step on all batches, as `Policy.update` describes. Collective."""
        self.engine.train()
        metrics = MetricSums(self.device)
        for number, batch in enumerate(batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(batches))
            loss, sums = loss_fn(batch, outputs(self.engine, batch, temperature))
            # DeepSpeed averages over ranks, but losses are divided by the step's count over all
            # ranks already.
            self.engine.backward(loss * world_size(), scale_wrt_gas=False)
            metrics.add(batch, loss, sums)
        return self._step(self.updates.learning_rate(place), metrics.over_ranks())

    def _step(self, rate: float, sums: dict[str, float]) -> UpdateStats:
        """Apply the update, or skip it if DeepSpeed finds a gradient that is not finite, on all
        ranks alike.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        skipped = bool(self.engine.optimizer.overflow)
        norm = float("nan") if skipped else float(self.engine.get_global_grad_norm())
        return self.updates.count(skipped, norm, rate, sums)

    def state_dict(self) -> dict[str, Any]:
        """Return masters and moments of trained parameters, as rows in float32, like those of
        FSDP2, but copies.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        model = {}
        moments = {}
        for name, parameter in self.trained().items():
            shape = whole_shape(parameter)
            model[name] = self._rows(safe_get_full_fp32_param(parameter), shape)
            for key in MOMENTS:
                moments[f"{name}.{key}"] = self._rows(
                    safe_get_full_optimizer_state(parameter, key), shape
                )
        return {"model": model, "optimizer": moments, "counters": self.updates.counters()}

    def _rows(self, value: Tensor, shape: torch.Size) -> DTensor:
        """Return a sharded tensor with this rank's rows of a value that every rank has."""
        mesh = init_device_mesh(self.device.type, (world_size(),), mesh_dim_names=("shard",))
        return distribute_tensor(
            value.detach().float().view(shape), mesh, [Shard(0)], src_data_rank=None
        )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, of this policy or of an FsdpPolicy."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self.updates.restore(state["counters"])
        for values in self.engine.optimizer.optimizer.state.values():
            values["step"].fill_(self.version)
        for name, parameter in self.trained().items():
            value = state["model"][name].full_tensor()
            safe_set_full_fp32_param(parameter, value)
            self._fill(parameter, value)
            for key in MOMENTS:
                safe_set_full_optimizer_state(
                    parameter, state["optimizer"][f"{name}.{key}"].full_tensor(), key
                )

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format and the compute dtype, without the tokenizer."""
        hf_saving.save_pretrained(self.model, folder, self.compute_dtype, self.source)
