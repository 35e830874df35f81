"""A step's routes through a mixture of experts: checked where they come from, counted over all ranks."""

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.ranks import all_reduce_sum, sum_counts
from trainer.config.schema import TrainConfig
from trainer.types import Policy, RouteFormat, Routers


def engine_routes(config: TrainConfig, policy: Policy) -> RouteFormat | None:
    """The format of the engine's routes, where the recipe asks for them."""
    return policy.routing.format if config.model.routes == "engine" and policy.routing is not None else None


def checked_routes(trajectory: Trajectory, format: RouteFormat) -> Tensor:
    """The engine's routes of an answer, of the layers that have experts: [tokens - 1, layers, top_k] of format.dtype.

    Tokens behind the last one that was sampled, such as a tool's last words, were in no prompt. Nothing that is learned
    depends on them, so they may go to the first experts. Raises ValueError naming sample and layer where anything else
    is missing, or is not a route.
    """
    engine = f"prompt {trajectory.prompt_index} sample {trajectory.sample_index}: the engine"
    mask = trajectory.loss_mask
    tokens = len(trajectory.prompt_ids) + len(mask)
    needed = tokens - 1 - mask[::-1].index(1) if 1 in mask else 0
    if (given := trajectory.routes) is None:
        raise ValueError(f"{engine} gave no routes; rollouts of one's own must keep those of `Generation`")
    if len(given) < needed:
        raise ValueError(f"{engine} gave {len(given)} rows of routes for {needed} tokens that an answer follows")
    if given.ndim != 3 or given.shape[1] <= format.layers[-1] or given.shape[2] != format.top_k:
        shape = f"layers up to {format.layers[-1]} and {format.top_k} experts in each"
        raise ValueError(f"{engine}'s routes are {list(given.shape)}, which does not fit {shape}")
    rows = torch.from_numpy(given[: tokens - 1, list(format.layers)])
    ordered = rows.long().sort(-1).values
    outside = (ordered >= format.experts).any(-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for wrong, said in ((outside, f"an expert that is not among {format.experts}"), (twice, "one expert twice")):
        if wrong.any():
            token, position = wrong.nonzero()[0].tolist()
            raise ValueError(f"{engine}'s routes send token {token} in layer {format.layers[position]} to {said}")
    padding = torch.arange(format.top_k).expand(tokens - 1 - len(rows), len(format.layers), format.top_k)
    return torch.cat([rows.to(format.dtype), padding.to(format.dtype)])


def routing_metrics(routers: Routers, updates: int) -> dict[str, float]:
    """Figures of the passes since `take_counts` was last called, `updates` of them with a balance loss. Collective.

    moe/load_max_over_mean: the tokens of the busiest expert over those of the average one, in the layer where that is
    largest; moe/routes_differ: where routes were given, the share of choices that the trainer's own router would have
    made otherwise; moe/balance: the mean of the updates' balance loss, where there is one.
    """
    loads, differ, balance = routers.take_counts()
    loads = sum_counts(loads).double()
    sums = all_reduce_sum({"differ": float(differ), "balance": balance})
    choices = loads.sum().item() / routers.format.top_k
    if not choices:
        return {}
    found = {"moe/load_max_over_mean": (loads.max(1).values / loads.mean(1)).max().item()}
    found["moe/routes_differ"] = sums["differ"] / choices
    return found | ({"moe/balance": sums["balance"] / updates} if sums["balance"] else {})
