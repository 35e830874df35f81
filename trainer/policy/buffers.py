"""Buffers that checkpoints contain, such as the biases by which routers correct their scores."""

from torch import Tensor, nn

ROUTE_BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers of mixtures that decide which experts a token is sent to: float32 in engines, and so
here.
"""


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers that checkpoints contain, by name in memory, whole on every rank; nothing
    trains them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: model.get_buffer(name) for name in model.state_dict() if name not in parameters}


def is_route_bias(name: str) -> bool:
    """Return True if this is one of `ROUTE_BIASES`, by its name in memory or in a checkpoint."""
    return name.endswith(ROUTE_BIASES)


def set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace a buffer of the model."""
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._buffers[last] = buffer


def sent_buffers(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Return the saved buffers, which engines get with the weights, and the names of those to send
    in their own dtype.
    """
    buffers = saved_buffers(model)
    as_they_are = [n for n, b in buffers.items() if is_route_bias(n) or not b.is_floating_point()]
    return [*buffers.items()], as_they_are
