"""The routes of a step's tokens through a mixture of experts: their check on arrival, and their
counts over ranks.
"""

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.ranks import all_reduce_sum, sum_counts
from trainer.config.schema import TrainConfig
from trainer.types import Policy, RouteFormat, Routers


def engine_routes(config: TrainConfig, policy: Policy) -> RouteFormat | None:
    """Return the format of the engine's routes, if the recipe asks for them."""
    return (
        policy.routing.format if config.model.routes == "engine" and policy.routing is not None else None
    )


def checked_routes(trajectory: Trajectory, format: RouteFormat) -> Tensor:
    """Return the engine's routes of an answer, in layers with experts: [tokens - 1, layers, top_k]
    of format.dtype.

    The engine never computed tokens after the last sampled one, such as a tool's last reply.
    Nothing that is learned depends on them, so they go to the first experts. Raises ValueError
    naming sample and layer if any other route is missing or invalid.
    """
    engine = f"prompt {trajectory.prompt_index} sample {trajectory.sample_index}: the engine"
    mask = trajectory.loss_mask
    tokens = len(trajectory.prompt_ids) + len(mask)
    needed = tokens - 1 - mask[::-1].index(1) if 1 in mask else 0
    if (routes := trajectory.routes) is None:
        raise ValueError(
            f"{engine} gave no routes; rollouts of one's own must keep those of `Generation`"
        )
    if len(routes) < needed:
        raise ValueError(
            f"{engine} gave {len(routes)} rows of routes for {needed} tokens that an answer follows"
        )
    if routes.ndim != 3 or routes.shape[1] <= format.layers[-1] or routes.shape[2] != format.top_k:
        shape = f"layers up to {format.layers[-1]} and {format.top_k} experts in each"
        raise ValueError(f"{engine}'s routes are {list(routes.shape)}, which does not fit {shape}")
    rows = torch.from_numpy(routes[: tokens - 1, list(format.layers)])
    ordered = rows.long().sort(-1).values
    outside = (ordered >= format.experts).any(-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for wrong, what in (
        (outside, f"an expert that is not among {format.experts}"),
        (twice, "one expert twice"),
    ):
        if wrong.any():
            token, position = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{engine}'s routes send token {token} in layer {format.layers[position]} to {what}"
            )
    padding = torch.arange(format.top_k).expand(tokens - 1 - len(rows), len(format.layers), format.top_k)
    return torch.cat([rows.to(format.dtype), padding.to(format.dtype)])


def routing_metrics(routers: Routers, updates: int) -> dict[str, float]:
    """Return metrics of the passes since `take_counts` was last called, `updates` of them with a
    balance loss. Collective.

    - moe/load_max_over_mean: tokens of the busiest expert over tokens of the average expert, in the
      layer where this is largest;
    - moe/routes_differ: the share of replayed choices that the trainer's router would have made
      differently;
    - moe/balance: the mean balance loss of the updates, if there is one.
    """
    loads, differ, balance = routers.take_counts()
    loads = sum_counts(loads).double()
    sums = all_reduce_sum({"differ": float(differ), "balance": balance})
    choices = loads.sum().item() / routers.format.top_k
    if not choices:
        return {}
    metrics = {"moe/load_max_over_mean": (loads.max(1).values / loads.mean(1)).max().item()}
    metrics["moe/routes_differ"] = sums["differ"] / choices
    return metrics | ({"moe/balance": sums["balance"] / updates} if sums["balance"] else {})
