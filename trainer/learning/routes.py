"""A step's routes through a mixture of experts, over all ranks."""

from sharding.ranks import all_reduce_sum, sum_counts
from trainer.learning.metrics import Metrics
from trainer.types import Routers


def routing_metrics(routers: Routers, updates: int) -> Metrics:
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
