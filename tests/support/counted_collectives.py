"""Count the collectives of an update as they are called, and compare them with the plan's."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.ranks import world_size
from tests.support import policy_checks as checks
from tests.support.recipes import make_config
from trainer.estimates.model_sizes import model_sizes
from trainer.estimates.time import Traffic, update_traffic
from trainer.learning.batching import micro_batches

MICRO_BATCHES = 4


class Counted(TorchDispatchMode):
    """Counts calls of torch.distributed by name, and bytes: a gather's result, or what a rank gives to a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_")
            # (output, input, …) for gathers and scatters, ([tensor], …) for all-reduces
            tensor = {"allgather_base": lambda: args[0], "reduce_scatter_base": lambda: args[1]}.get(
                name, lambda: args[0][0]
            )()
            self.calls[name] = self.calls.get(name, 0) + 1
            self.nbytes[name] = self.nbytes.get(name, 0) + getattr(tensor, "nbytes", 0)
        return function(*args, **(kwargs or {}))

    def traffic(self) -> Traffic:
        names = ("allgather_base", "reduce_scatter_base", "allreduce")
        return Traffic(
            *(figures.get(name, 0) for name in names for figures in (self.calls, self.nbytes))
        )


def check_traffic(folder: Path, tied: bool, kind: str = "qwen2", **settings: Any) -> None:
    """Counted and planned collectives are equal, to the byte."""
    path = checks.model_folder(folder, kind, tied)
    policy = checks.make_policy(path, dtype="bfloat16", **settings)
    batches = micro_batches(
        checks.make_samples(), 40, 0, torch.device("cpu"), count=MICRO_BATCHES, packing=True
    )
    loss = checks.make_loss(batches)
    with Counted() as counted:
        policy.update(batches, loss, checks.TEMPERATURE)
    config = make_config(model={"path": str(path)})
    planned = update_traffic(policy.config, model_sizes(config, str(path)), world_size(), MICRO_BATCHES)
    assert counted.traffic() == planned, f"counted {counted.traffic()}, planned {planned}"
