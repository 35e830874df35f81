"""Comes before PyPI's torchvision where torch is a build for CPUs: defines what is missing there,
and makes way for it.

The compiled part of that torchvision needs CUDA's libraries. Without that part its operators are
undefined, and its import fails as it registers fakes for them
(https://github.com/pytorch/vision/issues/8985); Transformers, which imports torchvision wherever it
finds it, fails with it. What processes images uses none of these operators, so defining them is
enough.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch

_ROIS = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_PAIRS = ", ".join(f"SymInt {name}_h, SymInt {name}_w" for name in ("stride", "pad", "dilation"))
_GRADIENT = (
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned"
)
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

# The operators last as long as this object, which torch therefore holds on to.
torch.hotbunk_torchvision_operators = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
for operator in _OPERATORS:
    torch.hotbunk_torchvision_operators.define(operator)  # type: ignore[attr-defined]

# The import that has led here returns what `sys.modules` has under this name in the end.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]
del sys.modules["torchvision"]
import_module("torchvision")
