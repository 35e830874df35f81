"""Plan the memory of a recipe that is yet to be written, by which `hotbunk new` fits it to a
GPU.
"""

from typing import Any

import torch

from trainer.config.model_file import model_config
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import with_chosen_way
from trainer.estimates.memory import COLUMNS, GIB, TIGHT, engine_parts, trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.estimates.recomputation import with_chosen_recomputation

__all__ = ["TIGHT", "planned_gib", "this_device"]


def this_device() -> tuple[str, float]:
    """Return the name of this machine's GPU, and its memory in GiB."""
    return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / GIB


def planned_gib(sections: dict[str, Any], gpus: int, device_gib: float) -> dict[str, float]:
    """Return the sum of each column of a recipe's plan on CUDA, in GiB; fetches config.json if its
    model is on the hub.

    Raises UserError if there is none.
    """
    model_config(sections["model"]["path"])
    sections = sections | {"run": sections["run"] | {"device": "cuda"}}
    config, _ = with_chosen_way(TrainConfig.model_validate(sections), gpus, gpus)
    config, _ = with_chosen_recomputation(config, gpus, device_gib)
    model = model_sizes(config, config.model.path, config.lora)
    parts = [
        *trainer_parts(config, model, gpus, device_gib),
        *engine_parts(config, model, gpus, device_gib),
    ]
    planned = {}
    for column in COLUMNS:
        planned[column] = sum(getattr(part, column) for part in parts) / GIB
    return planned
