"""Count the operations that make the host wait for the device, by the function that calls them."""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "item",
    "masked_scatter_backward",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose result, or its size, the host needs."""


HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
"""Methods that tensors on a CPU answer without an operation."""


class Waits:
    """Counts the operations that make the host wait for the device, by the project's function that calls them.

    Copies between host and device count, unless they are asynchronous. A tensor on the CPU stands for one on a device.

    Attributes:
        counts: function -> number of waits.
        operations: number of operations that were inspected.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.operations = 0
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Operations(self))
        self._modes.enter_context(_Reads(self.counts))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()


class _Operations(TorchDispatchMode):
    def __init__(self, seen: Waits) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._seen.operations += 1
        if waits(function._schema.name.removeprefix("aten::"), args, kwargs, result):
            self._seen.counts[asked_by()] += 1
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._found = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in HOST_READS:
            self._found[asked_by()] += 1
        return function(*args, **(kwargs or {}))


def waits(name: str, args: Any, kwargs: Any, result: Any) -> bool:
    """Tell whether an operation makes the host wait."""
    if name in ("index", "index_put", "index_put_"):
        by = [index for index in args[1] if index is not None]
        return any(
            index.dtype in (torch.bool, torch.uint8) or index.device != args[0].device for index in by
        )
    if name in ("_to_copy", "copy_"):
        places = {tensor.device.type for tensor in (*args, result) if isinstance(tensor, Tensor)}
        return len(places) > 1 and not (
            kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        )
    return name in WAITING


def asked_by() -> str:
    """Return `file:function` of the innermost frame in the project's own packages."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents and path.relative_to(ROOT).parts[0] in (
            "trainer",
            "sharding",
            "generation",
        ):
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
    return "nobody of ours"
