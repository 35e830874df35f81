"""Lets PyPI's torchvision be imported beside a CPU build of torch, and hides it where no images are meant to be read.

Its compiled part needs CUDA's libraries. Without that part its operators are undefined, and its import fails as it
registers fakes for them (https://github.com/pytorch/vision/issues/8985); Transformers, which imports torchvision
wherever it finds it, fails with it. What processes images uses none of these operators, so defining them is enough.

`hotbunk_torchvision.pth`, beside it in an environment's site-packages, runs `install` at each start of Python, engines'
processes included. Beside a CUDA build of torch it does nothing.
"""

import os
import sys

SHOWN = "HOTBUNK_IMAGES"
"""The environment variable that lets this process and those it starts find torchvision beside a CPU build of torch."""

_ROIS = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_PAIRS = ", ".join(f"SymInt {name}_h, SymInt {name}_w" for name in ("stride", "pad", "dilation"))
_GRADIENT = "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned"
_OPERATORS = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROIS}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({_ROIS.replace('input', 'grad')}, {_GRADIENT}) -> Tensor",
    f"roi_pool({_ROIS}) -> (Tensor, Tensor)",
    f"ps_roi_align({_ROIS}, int sampling_ratio) -> (Tensor, Tensor)",
    f"ps_roi_pool({_ROIS}) -> (Tensor, Tensor)",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_PAIRS}, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor",
]
"""torchvision 0.28's, as torchvision/csrc/ops declares them."""

_library: list[object] = []  # a library's operators go with it


class Finder:
    """A finder on `sys.meta_path` that finds nothing: it defines torchvision's operators before its first import."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """What the import system asks of each finder for each module."""
        if name == "torchvision" and not _library:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in _OPERATORS:
                library.define(operator)
            _library.append(library)


def beside_cpu_build() -> bool:
    """Whether the torch of this environment was built without CUDA, by its version file: torch is not imported."""
    for folder in sys.path:
        try:
            with open(os.path.join(folder or ".", "torch", "version.py"), encoding="utf-8") as file:
                return "cuda: Optional[str] = None" in file.read()
        except OSError:
            continue
    return False


def install() -> None:
    """Hide torchvision beside a CPU build of torch, or, where the variable `SHOWN` is set, make it importable."""
    if "torchvision" not in sys.modules and beside_cpu_build():
        if os.environ.get(SHOWN):
            sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
        else:
            sys.modules["torchvision"] = None  # type: ignore[assignment]  # find_spec gives None, an import fails


def show() -> None:
    """Let this process, and those it starts, find torchvision. Before Transformers is imported: it looks once."""
    os.environ[SHOWN] = "1"
    if sys.modules.get("torchvision", Finder) is None:
        del sys.modules["torchvision"]
        install()
