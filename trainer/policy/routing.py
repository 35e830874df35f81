"""Routes of micro-batches through mixtures of experts, replayed or recorded, and the load of
experts.

A route is the set of experts that a token is sent to in a layer. An engine and a trainer that
compute scores with different kernels, or in different dtypes, send some tokens to different
experts, and their gap is then larger than rounding alone would make it. With the engine's routes
the trainer computes what was sampled (Rollout Routing Replay, Ma et al. 2025, arXiv:2510.11370);
the scores at these experts are the trainer's, so gradients reach the router.

A router is found and changed by its behaviour: its forward chooses among as many numbers as there
are experts, by one `topk` for each token. With replayed routes, that call returns their experts and
scores. The router is wrapped, not the layer, so a layer that checkpointing recomputes in backward
takes the same routes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def find_routers(model: PreTrainedModel, balanced: bool = False) -> dict[int, str]:
    """Return the name of each decoder layer's router, by the number of the layer; empty for a dense
    model.

    `model` is on meta, where the routers are run once. Raises UserError naming a module whose
    choice cannot be replaced, or, if loads are to be `balanced`, one whose scores are no softmax.
    """
    experts, top_k = _sizes(model)
    names = {id(module): name for name, module in model.named_modules()}
    routers: dict[int, str] = {}
    for number, layer in enumerate(decoder(model).layers):
        modules = dict(layer.named_modules())
        holders = [path for path, module in modules.items() if _holds_experts(module, experts)]
        for path in holders:
            block = modules[path.rpartition(".")[0]]
            router = _router_of(block, experts)
            name = names[id(router or block)]
            watched = None
            if router is not None and top_k:
                watched = _watched_run(router, block, modules[path], model)
            if watched is None:
                raise UserError(
                    f"model.routes: {name} of this model has no router that can be run: set it to own"
                )
            if watched.choices != 1 or number in routers:
                raise UserError(
                    f"model.routes: {name} chooses experts {watched.choices} times, not once: set it "
                    "to own"
                )
            if balanced and watched.sigmoids:
                wants = "the balance loss wants those of a softmax"
                raise UserError(
                    f"algorithm.balance_coef: {name} scores experts by sigmoids, and {wants}: set it "
                    "to 0"
                )
            routers[number] = name
    return routers


def asked_routers(model: PreTrainedModel, routes: str, balanced: bool = False) -> dict[int, str]:
    """Return the routers of a policy with these `model.routes`; with `own`, none if their choice
    cannot be replaced.

    Raises UserError for other `routes` if the model has no routers whose choice can be replaced;
    see `find_routers`.
    """
    try:
        routers = find_routers(model, balanced)
    except UserError:
        if routes != "own":
            raise
        return {}
    if not routers and routes != "own":
        raise UserError(
            f"model.routes is {routes}, but {type(model).__name__} has no experts: set it to own"
        )
    return routers


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the numbers of experts in a layer and of experts that a token is sent to; zeros for a
    dense model.
    """
    config = model.config.get_text_config()
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    sizes = (getattr(config, key, None) for key in keys)
    experts = next((size for size in sizes if size), 0)
    return experts, getattr(config, "num_experts_per_tok", 0) if experts else 0


def _holds_experts(module: nn.Module, experts: int) -> bool:
    return bool(experts) and any(
        p.ndim == 3 and p.shape[0] == experts for p in module.parameters(recurse=False)
    )


def _router_of(block: nn.Module, experts: int) -> nn.Module | None:
    """Return the module with the router's weight [experts, hidden], its own or that of a linear
    layer in it.
    """
    for module in block.modules():
        if type(module) is nn.Linear:
            continue
        linear = [child for child in module.children() if type(child) is nn.Linear]
        for part in [module, *linear]:
            if any(p.ndim == 2 and p.shape[0] == experts for p in part.parameters(recurse=False)):
                return module
    return None


def _is_choice(func: Any, args: Any, experts: int) -> bool:
    """Return True for a `topk` of scores [tokens, experts]; those of groups of experts have a third
    dimension.
    """
    return func in _TOPK and args[0].ndim == 2 and args[0].shape[-1] == experts


class _Watching(TorchFunctionMode):
    """The mode in which a router is run to count its choices of experts and its sigmoids."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.choices = self.sigmoids = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.choices += _is_choice(func, args, self.experts)
        self.sigmoids += func in (torch.sigmoid, Tensor.sigmoid)
        return func(*args, **(kwargs or {}))


def _watched_run(
    router: nn.Module, block: nn.Module, experts_module: nn.Module, model: PreTrainedModel
) -> _Watching | None:
    """Run the router and return the mode that watched it, or None if it cannot run.

    It may take its correction bias from the block, or be the block, whose experts then return what
    they get.
    """
    experts = _sizes(model)[0]
    width = model.config.get_text_config().hidden_size
    held = [*block.parameters(recurse=False), *block.buffers(recurse=False)]
    biases = [tensor for tensor in held if tensor.shape == (experts,) and router is not block]
    for shape in ((_PROBE_TOKENS, width), (1, _PROBE_TOKENS, width)):
        with torch.no_grad(), _returning_its_input(experts_module), _Watching(experts) as watching:
            try:
                router(torch.empty(shape, dtype=model.dtype, device="meta"), *biases)
            except Exception:  # the model's code may raise anything for tensors without data
                continue
        return watching
    return None


@contextmanager
def _returning_its_input(module: nn.Module) -> Iterator[None]:
    """Replace the forward of experts, which look at the values of routes, and those are on meta."""
    module.forward = lambda hidden, *routes, **options: hidden  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del module.forward


class Routing:
    """The wrapped routers of a model, with the routes of the micro-batch that it computes.

    Attributes: format: the layers with routers, the number of experts and the number that a token
        is sent to. record: keep the routes of each pass, for `taken`. gradient_scale: the number by
        which the backend will divide gradients.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        routers: dict[int, str],
        record: bool = False,
        gradient_scale: float = 1.0,
    ) -> None:
        """Wrap the routers that `find_routers` returned for this model, or for one like it."""
        experts, top_k = _sizes(model)
        self.format = RouteFormat(tuple(routers), experts=experts, top_k=top_k)
        self.record = record
        self.gradient_scale = gradient_scale
        self.groups: int = getattr(model.config.get_text_config(), "n_group", None) or 1
        # [N, layers, k] of the model's N input tokens; None: the router decides
        self.rows: Tensor | None = None
        self.samples = torch.empty(0, dtype=torch.int64)  # [N], see `samples_of`
        self.pull: Tensor | None = None  # [layers, experts] float32, see `balance`
        # Layers computed so far; a second pass recomputes them and does not count
        self._done: set[int] = set()
        self._taken: dict[int, Tensor] = {}
        self._reset()
        for position, name in enumerate(routers.values()):
            self._wrap(model.get_submodule(name), position)

    def _reset(self) -> None:
        shape = len(self.format.layers), self.format.experts
        self._loads = torch.zeros(shape, dtype=torch.int64)
        self._differ = torch.zeros((), dtype=torch.int64)
        self._pulled = torch.zeros((), dtype=torch.float64)

    def _wrap(self, router: nn.Module, position: int) -> None:
        inner: Callable[..., Any] = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Choice(self, position):
                return inner(*args, **kwargs)

        router.forward = forward  # type: ignore[assignment, method-assign]

    def begin(self, batch: MicroBatch) -> None:
        """Prepare for the forward and backward of a micro-batch, with its routes if it has any."""
        device = batch.input_ids.device
        self.rows = None if batch.routes is None else batch.routes.to(device, non_blocking=True)
        self.samples = samples_of(batch).to(device, non_blocking=True)
        self._done = set()
        self._taken = {}
        if self._loads.device != device:
            self._loads = self._loads.to(device)
            self._differ = self._differ.to(device)
            self._pulled = self._pulled.to(device)

    def taken(self) -> Tensor | None:
        """Return the routes [N, layers, k] of the latest pass, on the host; None unless they are
        recorded.
        """
        if not self.record:
            return None
        return torch.stack([self._taken[n] for n in range(len(self.format.layers))], dim=1).cpu()

    def take_counts(self) -> tuple[Tensor, int, float]:
        """Return the counts of all passes since the last call, which are then reset.

        Returns each expert's tokens [layers, experts] int64, on the host; the number of tokens,
        summed over layers, whose replayed routes differ from the router's choice; and the balance
        loss.
        """
        counts = self._loads.cpu(), int(self._differ), float(self._pulled)
        self._reset()
        return counts

    def choose(self, position: int, scores: Tensor, topk: Callable[[Tensor], Any]) -> Any:
        """Replace `topk` of scores [N, experts]: return the replayed experts and their scores, or
        the router's.
        """
        choice = topk(scores)
        rows = None if self.rows is None else self.rows[:, position].long()
        if rows is not None and rows.shape != choice.indices.shape:
            layer = self.format.layers[position]
            shape = list(choice.indices.shape)
            raise ValueError(
                f"layer {layer} routes {shape} tokens and experts, but its routes are {list(rows.shape)}"
            )
        used = choice.indices if rows is None else rows
        if position not in self._done:
            self._done.add(position)
            self._count(position, choice.indices, used)
        return choice if rows is None else torch.return_types.topk((scores.gather(-1, rows), rows))

    @torch.no_grad()
    def _count(self, position: int, choice: Tensor, used: Tensor) -> None:
        samples = self.samples.unsqueeze(-1).expand_as(used)
        # Bincount would wait for a GPU
        self._loads[position].index_add_(0, used.flatten(), samples.flatten())
        if choice is not used:
            self._differ += (
                (choice.sort(-1).values != used.sort(-1).values).any(-1) * self.samples
            ).sum()
        if self.record:
            self._taken[position] = used.to(self.format.dtype)

    def pull_of(self, position: int, logits: Tensor) -> Tensor:
        """Return the logits [N, experts]; backward adds the gradient of the balance loss to
        theirs.
        """
        if self.pull is None or not torch.is_grad_enabled():
            return logits
        weights = self.pull[position].to(logits.device)
        if position not in self._done:
            with torch.no_grad():
                probabilities = logits.float().softmax(-1)
                self._pulled += ((probabilities @ weights) * self.samples).sum().double()
        pulled: Tensor = _Pull.apply(logits, weights * self.gradient_scale, self.samples)
        return pulled


def balance(loads: Tensor, format: RouteFormat, coef: float) -> Tensor:
    """Return the weights [layers, experts] float32 of a token's probabilities in the balance loss,
    from all ranks' loads.

    The loss is that of Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961), equation 4, as a
    mean over layers: coef * experts * sum_e f_e P_e, where f_e is the share of the update's choices
    that fall on expert e, and P_e the mean of its probability over the update's tokens. The routes
    give f before the first forward pass, so the loss is a sum over tokens, whatever micro-batches
    and ranks they are in. `loads` are [layers, experts] int64.
    """
    choices = loads.sum(1, keepdim=True).double().clamp(min=1)
    tokens = choices / format.top_k
    return (coef * format.experts / len(format.layers) * loads / choices / tokens).float()


def loads_of(batches: list[MicroBatch], format: RouteFormat) -> Tensor:
    """Return each expert's tokens [layers, experts] int64 by the routes of this rank's
    micro-batches, on the host.
    """
    loads = torch.zeros(len(format.layers), format.experts, dtype=torch.int64)
    for batch in batches:
        if batch.rows and batch.routes is not None:
            rows = batch.routes.long()
            samples = samples_of(batch).unsqueeze(-1).expand(-1, format.top_k)
            for position, counts in enumerate(loads):
                counts.index_add_(0, rows[:, position].flatten(), samples.flatten())
    return loads


def samples_of(batch: MicroBatch) -> Tensor:
    """Return the number of samples that have each token of the model's input, 0 for padding: [N]
    int64, on the host.

    It is 1 for the tokens of a sequence, and more only where beginnings are computed once for
    several samples.
    """
    pack = batch.layout.pack
    if pack is not None and pack.tree is not None:
        rows = torch.tensor([node.rows for node in pack.tree.trie[0]])
        return pack.local(rows.repeat_interleave(torch.tensor(pack.lengths)))
    sizes = [length - 1 if batch.rows else 0 for length in batch.lengths]
    widths = pack.lengths if pack is not None else [batch.input_ids.shape[1] - 1] * len(sizes)
    marks = [torch.arange(width) < size for size, width in zip_longest(sizes, widths, fillvalue=0)]
    real = torch.cat(marks).long()
    return real if pack is None else pack.local(real)


class _Choice(TorchFunctionMode):
    """The mode in which a router's forward runs, which replaces its choice and adds the balance
    loss.
    """

    def __init__(self, routing: Routing, position: int) -> None:
        super().__init__()
        self.routing = routing
        self.position = position

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        routing = self.routing
        kwargs = kwargs or {}
        experts = routing.format.experts
        if _is_choice(func, args, experts):
            return routing.choose(
                self.position, args[0], lambda scores: func(scores, *args[1:], **kwargs)
            )
        if (
            func in _TOPK
            and routing.rows is not None
            and args[0].ndim == 2
            and args[0].shape[-1] == routing.groups
        ):
            # Some routers drop the scores of experts outside of the groups chosen here, so the
            # groups of the replayed experts come first.
            groups = routing.rows[:, self.position].long() // (experts // routing.groups)
            return func(args[0].scatter(1, groups, float("inf")), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func is functional.linear and result.shape[-1] == experts:
            return routing.pull_of(self.position, result)
        return result


class _Pull(torch.autograd.Function):
    """The identity; backward adds the gradient of the sum over samples' tokens of weights ·
    softmax(logits).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor, samples: Tensor) -> Tensor:
        ctx.save_for_backward(logits, weights, samples)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, weights, samples = ctx.saved_tensors
        p = logits.float().softmax(-1)
        pull = p * (weights - (p @ weights).unsqueeze(-1)) * samples.unsqueeze(-1)
        return grad + pull.to(grad.dtype), None, None
