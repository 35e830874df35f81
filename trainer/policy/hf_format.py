"""Loading and saving of sharded models in Hugging Face format; no rank ever has the entire model.

A model is built without data and sharded; then each rank reads its rows, and no others, from the
safetensors files. To save it, parameters are gathered one at a time and rank 0 writes them.

Transformers 5 keeps some weights fused in memory, above all a mixture's experts, while checkpoints
(and vLLM, which reads them) have one tensor for each expert. Loading, saving and the weight sync
all use `checkpoint_views`, which says which range of a parameter's elements is which checkpoint
tensor.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from sharding.send.source import local_part
from trainer.config.schema import ModelConfig
from trainer.config.weight_files import stored_tensors
from trainer.errors import UserError
from trainer.model_structure import adds_to_products, decoder, has_vision
from trainer.policy import attention
from trainer.policy.buffers import is_route_bias, saved_buffers, set_buffer
from trainer.policy.head import logits_of

if TYPE_CHECKING:
    from trainer.policy.vision import Vision

SHARD_BYTES = 5 << 30

COPIED = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a checkpoint that training does not change; without an image processor, vLLM builds
another encoder.
"""

_KEPT_RESULTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
]
"""Operations that "products" does not compute again: products with weights, and attention. Batched
products have the size of attention's scores, and are not kept.
"""

StartValue = Callable[[str, torch.Size], Tensor | None]
"""(name, shape) -> the unsharded start value of a parameter, the same on all ranks; None: the
checkpoint's.
"""


class CheckpointView(NamedTuple):
    """A checkpoint tensor as a contiguous part of a parameter: elements [offset, offset +
    prod(shape)).
    """

    name: str
    offset: int
    shape: tuple[int, ...]


def resolve_folder(path: str) -> Path:
    """Return the local folder of a model; for a hub name, downloads configuration, tokenizer and
    safetensors files.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        # Mistral's repositories have the weights a second time, in a layout of their own.
        wanted = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.safetensors", "*.py"]
        return Path(snapshot_download(path, allow_patterns=wanted, ignore_patterns=["consolidated*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ImportError) as error:
        # SOCKS: httpx
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"model.path {path} is neither a folder nor a model to download: {reason}"
        ) from error


def build_meta_model(
    folder: Path,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kind: Any = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Build the model without its weights: parameters on meta, computed buffers (rotary
    frequencies) on `device`.

    `settings` give attention and remote code, not the path. `kind` is the automatic class that
    finds the model's class, by default that for language models, text-only or multimodal, and
    `overrides` replace keys of config.json. Raises UserError if the trainer cannot run such a
    model.
    """
    asked = settings.attn_implementation
    remote = settings.trust_remote_code
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote, **overrides)
    with torch.device("meta"):
        build = partial(
            (kind or model_kind(config)).from_config, config, dtype=dtype, trust_remote_code=remote
        )
        try:
            model: PreTrainedModel = build(attn_implementation=asked)
        except ValueError as error:
            if "does not support an attention implementation" not in str(error):
                raise
            # `choose_attention` refuses `asked` unless ours replaces it
            model = build(attn_implementation="eager")
    for name in filter(is_route_bias, saved_buffers(model)):
        set_buffer(model, name, model.get_buffer(name).float())
    if model.base_model is model and hasattr(model, "model"):
        # Llama 4 names another attribute than it has
        model.base_model_prefix = "model"
    if not hasattr(decoder(model), "layers"):
        name = type(model).__name__
        raise UserError(
            f"{folder}: {name} does not keep its decoder layers in one list: use another model"
        )
    if kind is None:  # others have no output head
        logits_of(model)
    choose_attention(model, asked)
    # If a model contains another, the inner one computes its own buffers.
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    owners = {module: owner for owner in models for module in owner.modules()}
    computing = [module for module in owners if module._non_persistent_buffers_set]
    with torch.no_grad():
        for module in computing:
            for name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        # Some models compute buffers of their layers themselves. Parameters are on meta, where this
        # does nothing.
        for module in dict.fromkeys([*computing, *owners.values()]):
            owners[module]._init_weights(module)
    # `revert_weight_conversion` would search all modules for it again for each parameter.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    splitting = (one for one in conversions if isinstance(one, WeightConverter) and _splits(one))
    if split := next(splitting, None):
        how = f"makes several weights of one tensor of its checkpoint ({split.source_patterns[0]})"
        raise UserError(f"{folder}: {type(model).__name__} {how}: use another model")
    model._weight_conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
    return model


def _splits(conversion: WeightConverter) -> bool:
    """Return True if several weights come from one tensor of the checkpoint, so that none of them
    is a part of it alone.
    """
    return len(conversion.source_patterns) < len(conversion.target_patterns)


def model_kind(config: PretrainedConfig) -> Any:
    """Return the automatic class for a model to train, which answers in text and may take
    images.
    """
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def choose_attention(model: PreTrainedModel, asked: str) -> None:
    """Replace PyTorch's attention by the trainer's if the result is the same.

    Image encoders, which are not causal, keep the implementation that was asked for. Raises
    UserError if neither the trainer nor Transformers has that for this model.
    """
    chosen: Any = attention.implementation(asked, model)
    if has_vision(model.config):
        chosen = {"": chosen, "text_config": chosen, "vision_config": asked}
    try:
        model.set_attn_implementation(chosen)
    except ValueError as error:
        lacks = f"Transformers has no {asked} for {type(model).__name__}"
        raise UserError(
            f"model.attn_implementation: {lacks}: set it to eager, and batch.packing to false"
        ) from error


def make_vision(model: PreTrainedModel, folder: Path) -> "Vision | None":
    """Return the preparer of images for a multimodal model, with its processor from `folder`; None
    for other models.
    """
    if not has_vision(model.config):
        return None
    from generation.images import ImageProcessor  # imports torchvision
    from trainer.policy.vision import Vision

    return Vision(model, ImageProcessor(str(folder)))


def checkpoint_activations(
    model: PreTrainedModel,
    layers: Literal["auto", "none", "products", "every_second", "full"],
    offload: bool = False,
) -> None:
    """Make decoder layers keep only their input and recompute the rest in backward
    (arXiv:1604.06174).

    With "products" they also keep the results of matrix products and of attention, so that none of
    these is computed twice. Raises UserError where experts have biases, which Transformers adds to
    kept results in place (`transformers/integrations/moe.py`).

    With `offload` the inputs of layers on a GPU wait in page-locked host memory
    (`torch.autograd.graph.save_on_cpu`). What was left at "auto" is "none".
    """
    if layers not in ("auto", "none"):
        every = 2 if layers == "every_second" else 1
        offload = offload and torch.cuda.is_available()
        options: dict[str, Any] = {"use_reentrant": False}
        if layers == "products":
            if adds_to_products(name for name, _ in model.named_parameters()):
                raise UserError(
                    "policy.activation_checkpointing: products does not work with experts that have "
                    "biases, as this model's: set it to every_second or full"
                )
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT_RESULTS)
        model.gradient_checkpointing_enable(options, every_n_layers=every, offload=offload)


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by name in memory, each once: of tied ones only the first, which
    checkpoints contain.
    """
    return dict(model.named_parameters(remove_duplicate=True))


def checkpoint_views(model: PreTrainedModel, name: str, shape: Iterable[int]) -> list[CheckpointView]:
    """Return the checkpoint tensors that the parameter `name` of `shape` consists of, in the order
    of their elements.

    They are found by sending a tensor without data through Transformers' conversion to checkpoint
    format and comparing each result, a view, with that tensor. For example, two experts' fused gate
    and up projections, [2, 2 I, H] in memory, are

        experts.0.gate_proj.weight    offset 0          [I, H]
        experts.0.up_proj.weight      offset I H        [I, H]
        experts.1.gate_proj.weight    offset 2 I H      [I, H]
        experts.1.up_proj.weight      offset 3 I H      [I, H]

    Raises ValueError if a checkpoint tensor is not a contiguous part of the parameter (a transposed
    weight, for example), or if the tensors do not cover the parameter.
    """
    shape = tuple(shape)
    # PEFT keeps the weights of a layer with an adapter one level down
    name = name.replace(".base_layer.", ".")
    probe = torch.empty(shape, device="meta").as_subclass(_ViewProbe)
    storage = probe.untyped_storage()._cdata
    views = []
    for checkpoint_name, piece in revert_weight_conversion(model, {name: probe}).items():
        if piece.untyped_storage()._cdata != storage or not piece.is_contiguous():
            raise ValueError(
                f"{checkpoint_name} in the checkpoint is not a contiguous part of {name} in memory"
            )
        checkpoint_name = getattr(model, OWN_NAMES, {}).get(checkpoint_name, checkpoint_name)
        views.append(CheckpointView(checkpoint_name, int(piece.storage_offset()), tuple(piece.shape)))
    views.sort(key=lambda view: view.offset)
    expected = 0
    for view in views:
        if view.offset != expected:
            begins = f"begins at element {view.offset} of {name}"
            raise ValueError(f"{view.name} in the checkpoint {begins}, not at {expected}")
        expected += math.prod(view.shape)
    if expected != math.prod(shape):
        raise ValueError(
            f"the checkpoint's tensors cover {expected} elements of {name}, which has {math.prod(shape)}"
        )
    return views


OWN_NAMES = "hotbunk_own_names"
"""The attribute of a model in which `adopt_names` keeps names: Transformers' -> the
checkpoint's.
"""


def adopt_names(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Make image encoders keep the names that they have in the model's checkpoint, which vLLM needs
    as well.

    Checkpoints on the hub have a level `vision_model` in these names, which vLLM 0.32 requires, and
    which Transformers 5 removes and does not add again (`PrefixChange` in
    transformers/conversion_mapping.py), so that vLLM cannot load what it saves.
    """
    own: dict[str, str] = {}
    if has_vision(model.config):
        for name in names:
            plain = name.replace(".vision_model.", ".", 1)
            own[plain] = name
    setattr(model, OWN_NAMES, {plain: name for plain, name in own.items() if plain != name})


class _ViewProbe(Tensor):
    """A tensor whose `contiguous()` returns itself, since conversions call it on chunks and a copy
    hides its origin.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def load_sharded(
    model: PreTrainedModel,
    folder: Path,
    device: torch.device,
    start: StartValue = lambda name, shape: None,
) -> None:
    """Fill the sharded model's parameters and saved buffers from `folder`; tied parameters stay
    tied.

    Each rank reads its own rows. Raises UserError naming a tensor that the checkpoint lacks or has
    in another shape.
    """
    files = SafetensorsFolder(folder)
    adopt_names(model, files.names)

    def rows(name: str, tensor: Tensor, begin: int, end: int) -> Tensor:
        """Return elements [begin, end) of a parameter or buffer, in its dtype, on the device."""
        if (value := start(name, tensor.shape)) is not None:
            return value.reshape(-1)[begin:end].to(device, tensor.dtype, copy=True)
        return files.read(checkpoint_views(model, name, tensor.shape), begin, end, tensor.dtype, device)

    loaded: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    # A tied parameter occurs under each of its names; the same object for all of them keeps it
    # tied.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in loaded:
            loaded[id(parameter)] = _filled(parameter, partial(rows, name, parameter))
        state[name] = loaded[id(parameter)]
    for name, buffer in saved_buffers(model).items():
        state[name] = rows(name, buffer, 0, buffer.numel()).view(buffer.shape)
    if unused := sorted(files.names - files.used - set(model.all_tied_weights_keys)):
        some = ", ".join(unused[:5])
        warnings.warn(f"{folder} has {len(unused)} tensors the model does not use: {some}", stacklevel=2)
    model.load_state_dict(state, assign=True)


def require_tensors(model: PreTrainedModel, folder: Path) -> None:
    """Raise UserError naming a tensor of the model that the checkpoint lacks or has in another
    shape.

    It reads the headers alone, which takes no memory for the weights.
    """
    tensors = stored_tensors(folder)
    adopt_names(model, tensors)
    for name, parameter in parameter_names(model).items():
        for view in checkpoint_views(model, name, parameter.shape):
            _require_shape(folder, view, tensors[view.name].shape if view.name in tensors else None)


def _require_shape(folder: Path, view: CheckpointView, shape: Sequence[int] | None) -> None:
    """Raise UserError unless a stored tensor (None: there is none of this name) has the shape that
    the model needs.
    """
    if shape is None:
        raise UserError(f"{folder} has no tensor {view.name}, which the model in its config.json needs")
    if tuple(shape) != view.shape:
        needed = f"but the model in its config.json needs {list(view.shape)}"
        raise UserError(
            f"{view.name} in {folder} has shape {list(shape)}, {needed}: correct the one or the other"
        )


def _filled(parameter: nn.Parameter, rows: Callable[[int, int], Tensor]) -> nn.Parameter:
    """Return a parameter like `parameter`, with this rank's rows as data, or with all rows if it is
    not sharded.
    """
    local: Tensor
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        placements = parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        begin = offset[0] * math.prod(parameter.shape[1:])
        part = rows(begin, begin + math.prod(shape)).view(shape)
        # `DTensor.from_local` would move it to the mesh's
        local = torch.empty_like(parameter, device=part.device)
        local_part(local).copy_(part)
    else:
        local = rows(0, parameter.numel()).view(parameter.shape)
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


class SafetensorsFolder:
    """The tensors of a checkpoint, in one file or in several with an index; files are opened on
    first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: set[str] = set()  # the names of tensors that have been read
        self._handles: dict[str, safe_open] = {}
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        elif single.exists():
            self._file_of = dict.fromkeys(self._handle(single.name).keys(), single.name)
        else:
            raise UserError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        self.names = set(self._file_of)

    def dtypes(self, views: list[CheckpointView]) -> set[torch.dtype]:
        """Return the dtypes of the stored tensors."""
        return {self._stored(view)[:0].dtype for view in views}

    def read(
        self, views: list[CheckpointView], begin: int, end: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return elements [begin, end) of the tensor that `views` make up, flat; reads only the
        rows that it needs.

        Raises UserError naming a tensor that is missing or has another shape; ValueError if `begin`
        or `end` lies inside a row.
        """
        result = torch.empty(end - begin, dtype=dtype, device=device)
        for view in views:
            stored = self._stored(view)
            size = math.prod(view.shape)
            first = max(begin, view.offset)
            last = min(end, view.offset + size)
            if first >= last:
                continue
            if not view.shape:
                result[first - begin].copy_(stored[...])
                continue
            row = size // view.shape[0]
            if (first - view.offset) % row or (last - view.offset) % row:
                raise ValueError(f"a shard's border lies inside a row of {view.name}")
            rows = stored[(first - view.offset) // row : (last - view.offset) // row]
            result[first - begin : last - begin].copy_(rows.reshape(-1))
        return result

    def _stored(self, view: CheckpointView) -> Any:
        """Return the tensor on disk, not read yet. All ranks check every tensor, so that all fail
        alike.
        """
        if view.name not in self._file_of:
            _require_shape(self.folder, view, None)
        self.used.add(view.name)
        stored = self._handle(self._file_of[view.name]).get_slice(view.name)
        _require_shape(self.folder, view, stored.get_shape())
        return stored

    def _handle(self, file: str) -> safe_open:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{self.folder / file} cannot be read: {str(error).partition(chr(10))[0]}"
                ) from error
        return self._handles[file]
