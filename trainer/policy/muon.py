"""Muon on sharded matrices, with AdamW for the parameters that are not matrices of hidden layers.

Muon's direction is a matrix's momentum with all singular values near 1, which Newton-Schulz
iterations find, so it needs whole matrices: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/. `torch.optim.Muon` computes on FSDP2's shards as well,
but in bfloat16 its sums over parts of a tall matrix round differently (3 % of the direction on two
ranks), with 11 to 15 collectives a matrix. Here each rank receives a whole matrix in turn, so that
the direction is that of one rank, bit for bit, and the ranks share the work.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from sharding.send.source import local_part
from trainer.config.schema import PolicyConfig
from trainer.policy.optimizer import make_adamw


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for everything else, with one learning rate: Muon's is scaled to
    AdamW's size.

    Liu et al. 2025, Muon is Scalable for LLM Training (arXiv:2502.16982), section 2.2.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], settings: PolicyConfig
    ) -> None:
        """Make both, with state from the start. `policy.optimizer_options` are further arguments of
        Muon.

        Raises TypeError or ValueError if Muon refuses them.
        """
        options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"} | settings.optimizer_options
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self._optimizers.append(ShardedMuon(matrices, settings.lr, settings.weight_decay, **options))
        if others:
            self._optimizers.append(make_adamw(others, settings))
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.state.update(
            {p: {"momentum_buffer": torch.zeros_like(p, requires_grad=False)} for p in matrices}
        )
        for optimizer in self._optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run both steps. Collective: every rank of a shard's process group calls it."""
        for optimizer in self._optimizers:
            optimizer.step()


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for matrices of which each rank may have some rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run one step. A rank holds one whole matrix at a time besides its shards, in bfloat16."""
        # Torch 2.13 has them in one private step
        from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

        for group in self.param_groups:

            def orthogonal(matrix: Tensor, group: dict[str, Any] = group) -> Tensor:
                return _zeropower_via_newtonschulz(
                    matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )

            # Matrices of one shape are neighbours, so that ranks have equal work at a time.
            parameters = sorted(
                (p for p in group["params"] if p.grad is not None), key=lambda p: tuple(p.shape)
            )
            shards = _shard_group(parameters[0]) if parameters else None
            ranks = 1 if shards is None else dist.get_world_size(shards)
            for start in range(0, len(parameters), ranks):
                turn = parameters[start : start + ranks]
                momenta = [self._momentum(parameter, group).bfloat16() for parameter in turn]
                directions = of_whole_matrices(orthogonal, momenta, [p.shape for p in turn], shards)
                for parameter, direction in zip(turn, directions, strict=True):
                    part = local_part(parameter)
                    part.mul_(1 - group["lr"] * group["weight_decay"])
                    part.add_(
                        direction, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
                    )

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the average of this rank's rows of the gradient, and return it, or Nesterov's
        version of it.
        """
        gradient = local_part(parameter.grad)
        average = local_part(self.state[parameter]["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average


def of_whole_matrices(
    function: Callable[[Tensor], Tensor],
    parts: list[Tensor],
    shapes: list[torch.Size],
    shards: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Return this rank's rows of `function` of each matrix, of which `parts` has this rank's rows
    and `shapes` the sizes.

    There are at most as many matrices as ranks: rank i computes the i-th. Rows are cut as by
    `torch.chunk`. A function keeps a matrix's shape and dtype. Collective in `shards`; None means
    that parts are whole.
    """
    if shards is None or dist.get_world_size(shards) == 1:
        return [function(part) for part in parts]
    ranks = dist.get_world_size(shards)
    me = dist.get_rank(shards)
    rows, columns = shapes[me] if me < len(shapes) else (0, 0)
    chunk = -(-rows // ranks)
    received = [columns * min(chunk, max(0, rows - rank * chunk)) for rank in range(ranks)]
    sent = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    matrix = parts[0].new_empty(rows * columns)
    dist.all_to_all_single(
        matrix, torch.cat([part.flatten() for part in parts]), received, sent, group=shards
    )
    if rows:
        matrix = function(matrix.view(rows, columns)).flatten()
    results = parts[0].new_empty(sum(sent))
    dist.all_to_all_single(results, matrix, sent, received, group=shards)
    return [result.view(part.shape) for result, part in zip(results.split(sent), parts, strict=False)]


def _shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the process group over which a parameter's rows are cut; None for a tensor that is
    whole.
    """
    if not isinstance(parameter, DTensor):
        return None
    *others, last = parameter.placements
    assert last == Shard(0) and not any(placement.is_shard() for placement in others)
    return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
