"""Mixtures of experts: the routes of a micro-batch, given from outside or recorded, and the load of experts.

A route is the set of experts that a token is sent to in a layer. An engine and a trainer that compute the same scores
with other kernels, or in another dtype, send some tokens elsewhere, and are then further apart than rounding alone
would make them. With the engine's routes the trainer computes what was sampled (Rollout Routing Replay, Ma et al. 2025,
arXiv:2510.11370); its own scores at these experts stay its own, and so gradients reach the router.

A router is found and changed by what it does: its forward chooses among as many numbers as there are experts, by one
`topk`. That call is answered with the given experts and their scores. It is the router that is wrapped, not the layer,
so a layer that checkpointing computes again in backward takes the same routes.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from trainer.errors import UserError
from trainer.model_structure import decoder
from trainer.types import MicroBatch, RouteFormat

_TOPK = (torch.topk, Tensor.topk)
_PROBE_TOKENS = 6


def find_routers(model: PreTrainedModel) -> dict[int, str]:
    """The name of each decoder layer's router, by the number of the layer; empty for a dense model.

    `model` is on meta, where the routers are tried. Raises UserError naming a module whose choice cannot be replaced.
    """
    experts, top_k = _sizes(model)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, str] = {}
    for number, layer in enumerate(decoder(model).layers):
        modules = dict(layer.named_modules())
        for path in [path for path, module in modules.items() if _holds_experts(module, experts)]:
            block = modules[path.rpartition(".")[0]]
            router = _router_of(block, experts)
            name = names[id(router or block)]
            if router is None or not top_k or (calls := _expert_choices(router, model)) is None:
                raise UserError(f"model.routes: {name} of this model has no router that can be tried: set it to own")
            if calls != 1 or number in found:
                raise UserError(f"model.routes: {name} chooses experts {calls} times, not once: set it to own")
            found[number] = name
    return found


def asked_routers(model: PreTrainedModel, routes: str) -> dict[int, str]:
    """The routers for a policy with these `model.routes`. Those of its own that cannot be looked into are left alone.

    Raises UserError where others are asked for, and the model has none whose choice can be replaced.
    """
    try:
        found = find_routers(model)
    except UserError:
        if routes != "own":
            raise
        return {}
    if not found and routes != "own":
        raise UserError(f"model.routes is {routes}, but {type(model).__name__} has no experts: set it to own")
    return found


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    """The experts of a layer, and how many of them a token is sent to; zeros for a dense model."""
    config = model.config.get_text_config()
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((size for key in keys if (size := getattr(config, key, None))), 0)
    return experts, getattr(config, "num_experts_per_tok", 0) if experts else 0


def _holds_experts(module: nn.Module, experts: int) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(experts and own) and any(p.ndim == 3 and p.shape[0] == experts for p in own)


def _router_of(block: nn.Module, experts: int) -> nn.Module | None:
    """The module that holds the router's weight [experts, hidden], or the one that holds it as a linear layer."""
    for module in block.modules():
        for part in [module, *(child for child in module.children() if type(child) is nn.Linear)]:
            if type(module) is not nn.Linear and any(
                p.ndim == 2 and p.shape[0] == experts for p in part.parameters(recurse=False)
            ):
                return module
    return None


class _Counting(TorchFunctionMode):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts, self.calls = experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in _TOPK and args[0].shape[-1] == self.experts
        return func(*args, **(kwargs or {}))


def _expert_choices(router: nn.Module, model: PreTrainedModel) -> int | None:
    """How often the router's forward calls `topk` on as many numbers as there are experts; None if it cannot run."""
    hidden = torch.empty(_PROBE_TOKENS, model.config.get_text_config().hidden_size, dtype=model.dtype, device="meta")
    with torch.no_grad(), _Counting(_sizes(model)[0]) as counting:
        try:
            router(hidden)
        except Exception:  # whatever the model's own code raises for one tensor without data
            return None
    return counting.calls


class Routing:
    """The routers of a model, wrapped, and the routes of the micro-batch that it computes.

    Attributes:
        format: the layers with routers, their experts and how many of them a token is sent to.
        record: keep the routes that are taken, for `taken`.
        gradient_scale: what the backend will divide gradients by.
    """

    def __init__(
        self, model: PreTrainedModel, routers: dict[int, str], record: bool = False, gradient_scale: float = 1.0
    ) -> None:
        """Wrap the routers that `find_routers` gave for this model, or for one like it."""
        experts, top_k = _sizes(model)
        self.format = RouteFormat(tuple(routers), experts=experts, top_k=top_k)
        self.record, self.gradient_scale = record, gradient_scale
        self.groups: int = getattr(model.config.get_text_config(), "n_group", None) or 1
        self.rows: Tensor | None = None  # [N, layers, k] of the model's N input tokens; None: the router decides
        self.real = torch.empty(0, dtype=torch.bool)  # [N], False for padding
        self.pull: Tensor | None = None  # [layers, experts] float32, see `balance`
        self._done: set[int] = set()  # layers computed; a second time is recomputation, which does not count
        self._taken: dict[int, Tensor] = {}
        self._reset()
        for position, name in enumerate(routers.values()):
            self._wrap(model.get_submodule(name), position)

    def _reset(self) -> None:
        shape = len(self.format.layers), self.format.experts
        self._loads = torch.zeros(shape, dtype=torch.int64)
        self._differ, self._pulled = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.float64)

    def _wrap(self, router: nn.Module, position: int) -> None:
        inner: Callable[..., Any] = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Choice(self, position):
                return inner(*args, **kwargs)

        router.forward = forward  # type: ignore[assignment, method-assign]

    def begin(self, batch: MicroBatch) -> None:
        """What follows, forward and backward, is for this micro-batch, by its routes where it has any."""
        device = batch.input_ids.device
        self.rows = None if batch.routes is None else batch.routes.to(device, non_blocking=True)
        self.real = real_inputs(batch).to(device, non_blocking=True)
        self._done, self._taken = set(), {}
        if self._loads.device != device:
            self._loads, self._differ, self._pulled = (t.to(device) for t in (self._loads, self._differ, self._pulled))

    def taken(self) -> Tensor | None:
        """The routes [N, layers, k] of the latest pass, on the host; None unless they are recorded."""
        if not self.record:
            return None
        return torch.stack([self._taken[n] for n in range(len(self.format.layers))], dim=1).cpu()

    def take_counts(self) -> tuple[Tensor, int, float]:
        """Since the last time: each expert's tokens [layers, experts] int64, on the host; of the tokens, counted in
        each layer, those that the router itself would have sent elsewhere; and the balance loss.
        """
        counts = self._loads.cpu(), int(self._differ), float(self._pulled)
        self._reset()
        return counts

    def choose(self, position: int, scores: Tensor, topk: Callable[[Tensor], Any]) -> Any:
        """In place of `topk` of scores [N, experts]: the given experts and their scores, or the router's own."""
        own = topk(scores)
        rows = None if self.rows is None else self.rows[:, position].long()
        if rows is not None and rows.shape != own.indices.shape:
            layer = self.format.layers[position]
            raise ValueError(
                f"layer {layer} routes {list(own.indices.shape)} tokens and experts, but has {list(rows.shape)}"
            )
        used = own.indices if rows is None else rows
        if position not in self._done:
            self._done.add(position)
            self._count(position, own.indices, used)
        return own if rows is None else torch.return_types.topk((scores.gather(-1, rows), rows))

    @torch.no_grad()
    def _count(self, position: int, own: Tensor, used: Tensor) -> None:
        real = self.real.long().unsqueeze(-1).expand_as(used)
        self._loads[position].index_add_(0, used.flatten(), real.flatten())  # bincount would wait for a GPU
        if own is not used:
            self._differ += ((own.sort(-1).values != used.sort(-1).values).any(-1) & self.real).sum()
        if self.record:
            self._taken[position] = used.to(self.format.dtype)

    def pull_of(self, position: int, logits: Tensor) -> Tensor:
        """The logits [N, experts], with the gradient of the balance loss added to theirs in backward."""
        if self.pull is None or not torch.is_grad_enabled():
            return logits
        weights = self.pull[position].to(logits.device)
        if position not in self._done:
            with torch.no_grad():
                probabilities = logits.float().softmax(-1)
                self._pulled += ((probabilities @ weights) * self.real).sum().double()
        pulled: Tensor = _Pull.apply(logits, weights * self.gradient_scale, self.real)
        return pulled


def balance(loads: Tensor, format: RouteFormat, coef: float) -> Tensor:
    """The weights [layers, experts] float32 of a token's probabilities in the balance loss, from all ranks' loads.

    The loss is that of Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961), equation 4, as a mean over layers:
    coef * experts * sum_e f_e P_e, with f_e the share of the update's choices that fell on expert e and P_e the mean of
    its probability over the update's tokens. The routes tell f before the first forward pass, so the loss is a sum over
    tokens, whatever micro-batches and ranks they are in. `loads` are [layers, experts] int64.
    """
    choices = loads.sum(1, keepdim=True).double().clamp(min=1)
    tokens = choices / format.top_k
    return (coef * format.experts / len(format.layers) * loads / choices / tokens).float()


def loads_of(batches: list[MicroBatch], format: RouteFormat) -> Tensor:
    """Each expert's tokens [layers, experts] int64 by the routes of this rank's micro-batches, on the host."""
    loads = torch.zeros(len(format.layers), format.experts, dtype=torch.int64)
    for batch in batches:
        if batch.rows and batch.routes is not None:
            rows = batch.routes[real_inputs(batch)].long()
            for position, own in enumerate(loads):
                own += rows[:, position].flatten().bincount(minlength=format.experts)
    return loads


def real_inputs(batch: MicroBatch) -> Tensor:
    """True for each token of the model's input that is one of a sample's, [N] bool, on the host."""
    sizes, pack = [length - 1 if batch.rows else 0 for length in batch.lengths], batch.layout.pack
    widths = pack.lengths if pack is not None else [batch.input_ids.shape[1] - 1] * len(sizes)
    real = torch.cat([torch.arange(width) < size for size, width in zip_longest(sizes, widths, fillvalue=0)])
    return real if pack is None else pack.own(real)


class _Choice(TorchFunctionMode):
    """Around a router's forward."""

    def __init__(self, routing: Routing, position: int) -> None:
        super().__init__()
        self.routing, self.position = routing, position

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        routing, kwargs = self.routing, kwargs or {}
        experts = routing.format.experts
        if func in _TOPK and args[0].shape[-1] == experts:
            return routing.choose(self.position, args[0], lambda scores: func(scores, *args[1:], **kwargs))
        if func in _TOPK and routing.rows is not None and args[0].ndim == 2 and args[0].shape[-1] == routing.groups:
            # Of experts outside of the groups chosen here the scores are lost to some routers, so the groups of the
            # given experts come first.
            groups = routing.rows[:, self.position].long() // (experts // routing.groups)
            return func(args[0].scatter(1, groups, float("inf")), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func is functional.linear and result.shape[-1] == experts:
            return routing.pull_of(self.position, result)
        return result


class _Pull(torch.autograd.Function):
    """The identity, which in backward adds the gradient of sum over real tokens of weights · softmax(logits)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor, real: Tensor) -> Tensor:
        ctx.save_for_backward(logits, weights, real)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, weights, real = ctx.saved_tensors
        p = logits.float().softmax(-1)
        own = p * (weights - (p @ weights).unsqueeze(-1)) * real.unsqueeze(-1)
        return grad + own.to(grad.dtype), None, None
