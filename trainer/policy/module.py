"""The modules to train: a causal language model that returns log-probabilities, and a trunk that
returns values.
"""

from dataclasses import replace
from operator import sub
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from trainer.model_structure import ModelFlops, PassSize, Work, attended, has_vision, model_flops
from trainer.policy.attention import require_branches, require_packing
from trainer.policy.head import Logits, logits_of
from trainer.policy.logprobs import target_logprobs
from trainer.policy.recurrent import SequenceRows
from trainer.policy.routing import Routing
from trainer.policy.sequence import sum_over_parts
from trainer.types import MicroBatch, Outputs

if TYPE_CHECKING:
    from trainer.policy.vision import Vision


Packing = dict[str, Any]
"""Arguments of a trunk that keep the sequences of a row apart; empty if each has a row of its
own.
"""

ImageInputs = dict[str, Any] | None
"""The images of a micro-batch (`Vision.inputs`); None for a text model."""


class TrunkModule(nn.Module):
    """A Transformers model whose hidden states are read, with a count of the operations that it has
    computed so far.
    """

    def __init__(self, model: PreTrainedModel, vision: "Vision | None" = None) -> None:
        """Wrap a model; `vision` is that of a multimodal one."""
        super().__init__()
        self.model = model
        self.vision = vision
        self.work = Work(sizes_of(model, vision))
        self.rows = SequenceRows(model)
        # True once `require_packing` and `require_branches` have found it so
        self._packable = self._branches = False

    def states_of(
        self, inputs: Tensor, states: Tensor, packing: Packing, images: ImageInputs = None
    ) -> Tensor:
        """Return the hidden states [K, H] from which targets are predicted.

        Inputs are [B, T] ids, right-padded, or sequences end to end, [1, N]; `states` [K] int64 are
        positions in the flattened inputs. Raises UserError if the trunk's layers cannot keep the
        sequences of a row apart.
        """
        trunk: PreTrainedModel = self.model.base_model
        if packing and not self._packable:
            require_packing(trunk)
            self._packable = True
        if "tree" in packing and not self._branches:
            require_branches(trunk)
            self._branches = True
        self.rows.begin(packing)
        if images is None or self.vision is None:
            every = trunk(input_ids=inputs, use_cache=False, **packing).last_hidden_state
        else:
            every = self.vision.hidden(inputs, images, packing)
        select = _SharedStates.apply if "tree" in packing else torch.index_select
        hidden: Tensor = select(every.flatten(0, 1), 0, states)
        patches = images["patches"] if images else 0
        logical = inputs.numel()
        if "tree" in packing:  # ranks that share the tokens count equal parts
            logical = packing["tree"].logical_tokens * inputs.numel() // sum(packing["sequence_lengths"])
        repeated = 0 if self.rows.paths is None else self.rows.paths.repeated
        size = PassSize(inputs.numel(), len(hidden), _pairs(inputs, packing), patches, repeated)
        self.work.count(size, logical)
        return hidden


class _SharedStates(torch.autograd.Function):
    """`index_select` with indices that may repeat: the state at a prompt's end predicts the first
    token of each answer.

    Backward adds in one order, also on CUDA, where `index_put_` sorts the indices and `index_add_`
    uses atomics.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, dim: int, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        ctx.shape = hidden.shape
        return hidden.index_select(dim, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (states,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        wide = grad.to(total.dtype)
        if grad.is_cuda:
            total.index_put_((states,), wide, True)
        else:
            total.index_add_(0, states, wide)
        return total.to(grad.dtype), None, None


class PolicyModule(TrunkModule):
    """A causal language model whose forward returns log-probabilities instead of logits.

    Its output head is called with hidden states and targets, and returns their `target_logprobs`.
    The call makes the hooks of FSDP and ZeRO gather the head's weight when it is needed. The value
    head [1, H] begins with zeros; it is not a part of `model`, so neither the engine nor an export
    contains it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fp32_head: bool = False,
        value_head: bool = False,
        routing: Routing | None = None,  # the model's routers, if it is a mixture of experts
        vision: "Vision | None" = None,  # that of a multimodal model
    ) -> None:
        super().__init__(model, vision)
        self.routing = routing
        _return_logprobs(model.get_output_embeddings(), logits_of(model), fp32_head)
        self.value_head: nn.Linear | None = None  # None: another model has the values, or there are none
        if value_head:
            self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        inputs: Tensor,
        states: Tensor,
        targets: Tensor,
        temperature: float,
        packing: Packing,
        images: ImageInputs = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropy of K targets, [K] float32, nats; with a value head
        also their values.

        The output head, by far the largest matrix, runs only on positions whose target counts.
        Targets are [K] int64; the other arguments are those of `states_of`.
        """
        hidden = self.states_of(inputs, states, packing, images)
        results: tuple[Tensor, ...] = self.model.get_output_embeddings()(hidden, targets, temperature)
        return results if self.value_head is None else (*results, values_of(hidden, self.value_head))


def sizes_of(model: PreTrainedModel, vision: "Vision | None") -> ModelFlops:
    """Return the sizes of a model, including those for its images."""
    sizes = model_flops(model)
    return sizes if vision is None else replace(sizes, image_token=vision.image_token(model))


def _return_logprobs(head: nn.Linear, changes: Logits, fp32_head: bool) -> None:
    """Make an output head return `target_logprobs` instead of logits if it also gets targets and a
    temperature.
    """
    logits = head.forward

    def forward(hidden: Tensor, *extra: Any) -> Any:
        if not extra:
            return logits(hidden)
        targets, temperature = extra
        operands = (hidden, head.weight, head.bias, targets, temperature)
        fused: dict[str, Any] = {"make": head.fused} if hidden.is_cuda and hasattr(head, "fused") else {}
        return target_logprobs(*operands, fp32_head=fp32_head, head=changes, **fused)

    head.forward = forward  # type: ignore[assignment, method-assign]


class AutoValueModel:
    """Maker of a critic's model, like Transformers' automatic classes: a trunk with a head `score`
    for one label.

    Transformers has classifiers only of text, so a multimodal critic is the language model with
    `score` for its head.
    """

    @staticmethod
    def from_config(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
        """Make the model. Raises ValueError for a type that Transformers has no classifier of."""
        if not has_vision(config):
            return cast(
                PreTrainedModel, AutoModelForSequenceClassification.from_config(config, **settings)
            )
        model = AutoModelForImageTextToText.from_config(config, **settings)
        model.lm_head = None
        model.score = nn.Linear(
            config.get_text_config().hidden_size, 1, bias=False, dtype=settings["dtype"]
        )
        return cast(PreTrainedModel, model)


class ValueModule(TrunkModule):
    """A critic: a trunk with a head for the expected return of the state in which a target is
    sampled.

    `AutoValueModel` makes its model, which like a reward model has one label.
    """

    def forward(
        self, inputs: Tensor, states: Tensor, packing: Packing, images: ImageInputs = None
    ) -> Tensor:
        """Return values [K] float32; arguments as in `states_of`."""
        return values_of(self.states_of(inputs, states, packing, images), self.model.score)


def trunk_inputs(batch: MicroBatch) -> tuple[Tensor, Packing]:
    """Return the inputs and the packing of a micro-batch for `states_of`."""
    pack = batch.layout.pack
    if pack is None:
        return batch.input_ids[:, :-1], {}
    longest = max(pack.lengths)
    packing = {
        "position_ids": pack.positions.unsqueeze(0),
        "cu_seq_lens_q": pack.starts,
        "cu_seq_lens_k": pack.starts,
        "max_length_q": longest,
        "max_length_k": longest,
        "sequence_lengths": pack.lengths,
    }
    if pack.tree is not None:
        packing["tree"] = pack.tree
    if len(pack.parts) > 1:
        packing["token_parts"] = pack.parts
    return batch.input_ids.flatten().index_select(0, pack.tokens).unsqueeze(0), packing


def _pairs(inputs: Tensor, packing: Packing) -> float:
    """Return the number of `attended` pairs, padding included if there are no lengths; ranks that
    share count equal parts.
    """
    lengths = packing["sequence_lengths"] if packing else [inputs.shape[1]] * len(inputs)
    pairs = attended(lengths)
    if "tree" in packing:  # what is after a beginning attends to it, too
        paths = packing["tree"].lengths
        pairs = attended(paths) - attended(list(map(sub, paths, lengths)))
    return pairs / len(packing.get("token_parts", [0]))


def outputs(module: nn.Module, batch: MicroBatch, temperature: float) -> Outputs:
    """Return the outputs of a PolicyModule, wrapped or not, for a micro-batch."""
    inputs, packing = trunk_inputs(batch)
    targets = batch.trained(batch.input_ids[:, 1:] if batch.targets is None else batch.targets)
    routing = cast(Routing | None, module.routing)
    if routing is not None:
        routing.begin(batch)
    results = module(
        inputs, batch.layout.states, targets, temperature, packing, _image_inputs(module, batch)
    )
    result = Outputs(*_for_loss(batch, *results))
    result.routes = None if routing is None else routing.taken()
    return result


def values(module: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the values of a ValueModule, wrapped or not, for a micro-batch, [B, T-1] float32; 0
    where the loss mask is 0.
    """
    inputs, packing = trunk_inputs(batch)
    images = _image_inputs(module, batch)
    return _for_loss(batch, module(inputs, batch.layout.states, packing, images))[0]


def _image_inputs(module: nn.Module, batch: MicroBatch) -> ImageInputs:
    """Return the images of a micro-batch for a multimodal model; None for others."""
    vision = cast("Vision | None", module.vision)
    return None if vision is None else vision.inputs(batch)


def _for_loss(batch: MicroBatch, *values: Tensor) -> tuple[Tensor, ...]:
    """Turn values [K] of this rank's targets into tables [B, T-1] of all targets, 0 elsewhere."""
    tables = tuple(map(batch.spread, values))
    return tables if batch.ways == 1 else sum_over_parts(torch.stack(tables), batch.ways).unbind()


def values_of(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return values [K] from hidden states [K, H], in float32: bfloat16 is too coarse, since 0.996
    and 1 are neighbours.
    """
    values = nn.functional.linear(hidden.float(), head.weight.float()).squeeze(1)
    return values.clone()  # FSDP2 warns of modules that return views
