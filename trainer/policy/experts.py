"""Expert parallelism: each rank of a group computes some of a mixture's experts. Tokens are sent to
the ranks of their experts, and the results back.

Dense weights are sharded over all ranks. With eight experts, four ranks and
`policy.expert_parallel: 2`, the mesh is

    rank                        0      1      2      3
    experts that it computes    0–3    4–7    0–3    4–7
    experts that it holds       0–1    4–5    2–3    6–7

Its dimensions are [efsdp, ep], and consecutive ranks differ in ep, as in Transformers, whose
exchange asks for a last dimension of tensor parallelism: its size is 1. FSDP2 shards experts over
the ranks that compute the same ones.

Transformers provides the plan of which modules to split, the split, and the exchange of tokens
(`ep_dispatch_experts` in transformers/distributed/tensor_parallel.py). Its `from_pretrained` is not
used: in 5.19 it refuses expert parallelism without tensor parallelism (`prepare_distribute_model`
in transformers/distributed/mixin.py). The policy is built on the meta device, sharded, and loaded
in float32 by code of this project.
"""

from functools import lru_cache

import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig, tensor_parallel

from sharding.ranks import world_size
from trainer.errors import UserError

try:  # Transformers 5.21 has moved this function
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
except ImportError:
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

DISPATCH = "ep_dispatch_experts"
"""Transformers' name for experts to which tokens are sent by all-to-all."""


def dispatched_experts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of experts that Transformers' plan splits for this model; empty if
    Transformers has no plan for it.
    """
    plan = getattr(model, "ep_plan", {})  # Transformers before 5.19 has none
    return [
        m
        for name, m in model.named_modules()
        if plan.get(replace_layer_number_by_wildcard(name)) == DISPATCH
    ]


def require_experts(model: PreTrainedModel) -> None:
    """Raise UserError unless Transformers can split experts, and has a plan for those of a model of
    this class.
    """
    if not hasattr(tensor_parallel, "resolve_parallel_plans"):
        raise UserError(
            f"policy.expert_parallel is above 1, but Transformers {transformers.__version__} cannot "
            "split experts: set it to 1, or install Transformers 5.19 or later"
        )
    if not dispatched_experts(model):
        lacks = f"Transformers has no plan to split the experts of {type(model).__name__}"
        raise UserError(f"policy.expert_parallel is above 1, but {lacks}: set it to 1")


def split_experts(model: PreTrainedModel, size: int, replicas: int, device: str) -> DeviceMesh:
    """Split the experts of a model on the meta device over groups of `size` ranks, and add the
    exchange of tokens to their forward passes.

    Returns the mesh over which FSDP2 shards experts: the ranks that compute the same ones, of
    `replicas` copies of the model. Collective.
    """
    try:  # Transformers 5.21 has moved this function
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        from transformers.distributed.tensor_parallel import apply_expert_parallelism
    _, plan = tensor_parallel.resolve_parallel_plans(
        model, DistributedConfig(fsdp_size=world_size() // replicas, ep_size=size)
    )
    mesh = _mesh(dist.group.WORLD, device, (replicas, world_size() // replicas // size, size, 1))
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan)
    return mesh["replicate", "efsdp"] if replicas > 1 else mesh["efsdp"]


@lru_cache(maxsize=1)
def _mesh(world: dist.ProcessGroup | None, device: str, shape: tuple[int, int, int, int]) -> DeviceMesh:
    """Return the mesh of all models, since each mesh makes groups and, on CUDA, communicators of
    its own.
    """
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "efsdp", "ep", "tp"))
