"""The model's buffers that checkpoints contain, such as the biases that correct routers' scores."""

from torch import Tensor, nn

ROUTE_BIASES = ("e_score_correction_bias", "expert_bias")
"""Ends of the names of the buffers that correct routers' scores in mixtures of experts. They are
float32, as in engines.
"""


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints contain, by their names in memory. They are unsharded on
    every rank, and no optimizer changes them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: model.get_buffer(name) for name in model.state_dict() if name not in parameters}


def is_route_bias(name: str) -> bool:
    """Return True if a buffer, by its name in memory or in a checkpoint, has a name of
    `ROUTE_BIASES`.
    """
    return name.endswith(ROUTE_BIASES)


def set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace the model's buffer `name` (dotted path) by `buffer`."""
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._buffers[last] = buffer


def sent_buffers(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Return the saved buffers, which are sent to engines with the weights, as (name, buffer).
    Return also the names of those that are sent in their own dtype: routers' biases, and buffers of
    whole numbers.
    """
    buffers = saved_buffers(model)
    as_they_are = [n for n, b in buffers.items() if is_route_bias(n) or not b.is_floating_point()]
    return [*buffers.items()], as_they_are
