"""The modules that are trained: a causal language model that returns log-probabilities, a trunk that returns values."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from trainer.model_structure import ModelFlops, Work, attended, model_flops, sees
from trainer.policy.attention import require_packing
from trainer.policy.logprobs import target_logprobs
from trainer.policy.routing import Routing
from trainer.policy.sequence import whole
from trainer.types import MicroBatch, Outputs

if TYPE_CHECKING:
    from trainer.policy.vision import Vision


Packing = dict[str, Any]
"""Arguments of a trunk that keep the sequences of a row apart; empty where each has a row."""

Seen = dict[str, Any] | None
"""The images of a trunk that sees (`Vision.inputs`)."""


class SeeingTrunk(nn.Module):
    """A Transformers model of which the hidden states are read, and the operations that it has computed so far."""

    def __init__(self, model: PreTrainedModel, vision: "Vision | None" = None) -> None:
        """`vision`: of a model that sees."""
        super().__init__()
        self.model, self.vision = model, vision
        self.work = Work(sizes_of(model, vision))

    def states_of(self, inputs: Tensor, states: Tensor, packing: Packing, seen: Seen = None) -> Tensor:
        """The hidden states [K, H] from which targets are predicted.

        Inputs are [B, T] ids, right-padded, or sequences end to end, [1, N]; `states` [K] int64 positions in them,
        flattened. Raises UserError where the trunk's layers cannot keep them apart.
        """
        trunk: PreTrainedModel = self.model.base_model
        if packing:
            require_packing(trunk)
        if seen is None or self.vision is None:
            every = trunk(input_ids=inputs, use_cache=False, **packing).last_hidden_state
        else:
            every = self.vision.hidden(inputs, seen, packing)
        hidden = every.flatten(0, 1).index_select(0, states)
        self.work.count(inputs.numel(), len(hidden), _pairs(inputs, packing), seen["patches"] if seen else 0)
        return hidden


class PolicyModule(SeeingTrunk):
    """A causal language model whose forward gives log-probabilities instead of logits.

    Its output head is called with hidden states and targets, and returns `target_logprobs` of them. It is a call, so
    that the hooks of FSDP and ZeRO gather the head's weight when it is needed. The value head [1, H] begins with zeros;
    it is not a part of `model`, so neither the engine nor an export ever sees it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fp32_head: bool = False,
        value_head: bool = False,
        routing: Routing | None = None,  # the model's routers, if it is a mixture
        vision: "Vision | None" = None,  # of a model that sees
    ) -> None:
        super().__init__(model, vision)
        self.routing = routing
        _return_logprobs(model.get_output_embeddings(), fp32_head)
        self.value_head: nn.Linear | None = None  # None: another model has the values, or none is asked for
        if value_head:
            self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(self.value_head.weight)

    def forward(
        self, inputs: Tensor, states: Tensor, targets: Tensor, temperature: float, packing: Packing, seen: Seen = None
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropy of K targets, [K] float32, nats; with a value head also the values.

        The output head, by far the largest matrix, runs only on positions whose target counts. Targets are [K] int64,
        the other arguments as in `states_of`.
        """
        hidden = self.states_of(inputs, states, packing, seen)
        found: tuple[Tensor, ...] = self.model.get_output_embeddings()(hidden, targets, temperature)
        return found if self.value_head is None else (*found, values_of(hidden, self.value_head))


def sizes_of(model: PreTrainedModel, vision: "Vision | None") -> ModelFlops:
    """The sizes of a model, with the share of its images."""
    sizes = model_flops(model)
    return sizes if vision is None else replace(sizes, image_token=vision.image_token(model))


def _return_logprobs(head: nn.Linear, fp32_head: bool) -> None:
    """Let an output head that is also given targets and a temperature return `target_logprobs` in place of logits."""
    logits = head.forward

    def forward(hidden: Tensor, *asked: Any) -> Any:
        if not asked:
            return logits(hidden)
        targets, temperature = asked
        return target_logprobs(hidden, head.weight, head.bias, targets, temperature, fp32_head=fp32_head)

    head.forward = forward  # type: ignore[assignment, method-assign]


class AutoValueModel:
    """Makes a critic's model, as Transformers' automatic classes make theirs: a trunk with a head `score` of one label.

    Transformers has classifiers of text. Of a model that sees it is the language model with that head for its own.
    """

    @staticmethod
    def from_config(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
        """Raises ValueError for a type that Transformers has no classifier of."""
        if not sees(config):
            found: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, **settings)
            return found
        model = AutoModelForImageTextToText.from_config(config, **settings)
        model.lm_head = None
        model.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False, dtype=settings["dtype"])
        return cast(PreTrainedModel, model)


class ValueModule(SeeingTrunk):
    """A critic: a trunk and a head for the expected return of the state in which a target is sampled.

    Its model is made by `AutoValueModel`, with one label, as reward models are.
    """

    def forward(self, inputs: Tensor, states: Tensor, packing: Packing, seen: Seen = None) -> Tensor:
        """Values [K] float32; arguments as in `states_of`."""
        return values_of(self.states_of(inputs, states, packing, seen), self.model.score)


def trunk_inputs(batch: MicroBatch) -> tuple[Tensor, Packing]:
    """A micro-batch's inputs and packing, as `states_of` takes them."""
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
    if len(pack.parts) > 1:
        packing["token_parts"] = pack.parts
    return batch.input_ids.flatten().index_select(0, pack.tokens).unsqueeze(0), packing


def _pairs(inputs: Tensor, packing: Packing) -> float:
    """See `attended`; padding is included where a trunk is not told lengths. Ranks that share have the same part."""
    lengths = packing["sequence_lengths"] if packing else [inputs.shape[1]] * len(inputs)
    return attended(lengths) / len(packing.get("token_parts", [0]))


def outputs(module: nn.Module, batch: MicroBatch, temperature: float) -> Outputs:
    """The outputs of a PolicyModule, wrapped or not, for a micro-batch."""
    inputs, packing = trunk_inputs(batch)
    targets = batch.trained(batch.input_ids[:, 1:])
    routing = cast(Routing | None, module.routing)
    if routing is not None:
        routing.begin(batch)
    found = module(inputs, batch.layout.states, targets, temperature, packing, _seen(module, batch))
    result = Outputs(*_for_loss(batch, *found))
    result.routes = None if routing is None else routing.taken()
    return result


def values(module: nn.Module, batch: MicroBatch) -> Tensor:
    """The values of a ValueModule, wrapped or not, for a micro-batch, [B, T-1] float32; 0 where the loss mask is 0."""
    inputs, packing = trunk_inputs(batch)
    return _for_loss(batch, module(inputs, batch.layout.states, packing, _seen(module, batch)))[0]


def _seen(module: nn.Module, batch: MicroBatch) -> Seen:
    """The images of a micro-batch for a model that sees; None for others."""
    vision = cast("Vision | None", module.vision)
    return None if vision is None else vision.inputs(batch)


def _for_loss(batch: MicroBatch, *found: Tensor) -> tuple[Tensor, ...]:
    """Values [K] of this rank's targets as [B, T-1] of all of them, 0 elsewhere."""
    tables = tuple(map(batch.spread, found))
    return tables if batch.ways == 1 else whole(torch.stack(tables), batch.ways).unbind()


def values_of(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Values [K] float32 from hidden states [K, H]. Returns are too fine for bfloat16: there 1 is next after 0.996."""
    return nn.functional.linear(hidden.float(), head.weight.float()).squeeze(1)
