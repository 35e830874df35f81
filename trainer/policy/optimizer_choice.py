"""The optimizer that a recipe names: AdamW, Muon, or a class of the user's own.

Its state is tensors of the parameters' shapes, sharded like them, which exist from the start: what
a checkpoint holds before the first update has the same names and sizes as afterwards.
"""

import inspect
from collections.abc import Container, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from generation.importing import load
from trainer.config.schema import PolicyConfig
from trainer.errors import Interrupted, UserError
from trainer.policy.muon import MuonAndAdamW
from trainer.policy.optimizer import decay_groups, make_adamw

_Parameters = Mapping[str, nn.Parameter]
_OTHER = "name another optimizer"
_IN_STATE = "keep it as a tensor in the state of a weight, or name another optimizer"

# Long enough for state that begins late: AdamW with a warm start, or statistics that are refreshed
# every 100 steps.
_TRIAL_STEPS = 240
_RESUMED_AFTER = (2, 200)
_TRIAL_RATE = 0.01


def make_optimizer(
    parameters: _Parameters, matrices: Container[str], settings: PolicyConfig
) -> torch.optim.Optimizer:
    """Make the optimizer with its state; `matrices` names the parameters for Muon
    (`hidden_matrices`).

    Raises UserError if it refuses its arguments, or if a class of the user's own cannot step these
    parameters.
    """
    name = settings.optimizer
    optimizer = None
    if name == "adamw":
        return make_adamw(list(parameters.values()), settings)
    try:
        if name == "muon":
            split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
            for path, parameter in parameters.items():
                split[path not in matrices].append(parameter)
            return MuonAndAdamW(*split, settings)
        optimizer = _make_custom(list(parameters.values()), settings)
        if optimizer.state:
            raise UserError(
                f"policy.optimizer: {name} makes its state when it is built, not in its first step: "
                f"{_OTHER}"
            )
        _make_state(optimizer)
    except (UserError, Interrupted):
        raise
    except BaseException as error:  # the user's class may raise anything
        kinds = " or ".join(sorted({type(parameter.data).__name__ for parameter in parameters.values()}))
        if optimizer:
            what = f"cannot step a {kinds}"
        else:
            what = "refuses its arguments; correct policy.optimizer_options"
        raise UserError(f"policy.optimizer: {name} {what} ({type(error).__name__}: {error})") from error
    _check_state(optimizer, name)
    return optimizer


def starts_without_state(settings: PolicyConfig) -> bool:
    """Return whether the first update begins without state, as a class of the user's own may treat
    it as special.
    """
    return ":" in settings.optimizer


def saved_state(optimizer: torch.optim.Optimizer, parameters: _Parameters) -> dict[str, Tensor]:
    """Return the live tensors of the state by name, `PARAMETER.KEY`, except counts of steps
    (`set_steps`).
    """
    states = ((name, optimizer.state[parameter]) for name, parameter in parameters.items())
    return {f"{name}.{key}": value for name, state in states for key, value in _tensors(state)}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of the state, except counts of steps."""
    return (value for state in optimizer.state.values() for _, value in _tensors(state))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state to a device. Optimizers that are neither fused nor capturable keep counts of
    steps on the CPU.
    """
    for group in optimizer.param_groups:
        counts_move = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if torch.is_tensor(value) and (key != "step" or counts_move):
                    state[key] = value.to(device)


def set_steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Set the count of steps in the state of every parameter, a tensor or a number."""
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].fill_(count)
        elif "step" in state:
            state["step"] = count


def state_widths(
    settings: PolicyConfig, shapes: Mapping[str, torch.Size], matrices: Container[str]
) -> dict[str, int]:
    """Return the bytes of state for each element of each parameter."""
    weights = _trial_weights()
    optimizer = make_optimizer(weights, ("hidden",), settings)
    widths = {}
    for kind, weight in weights.items():
        tensors = [tensor for _, tensor in _tensors(optimizer.state[weight])]
        widths[kind] = sum(tensor.element_size() for tensor in tensors if tensor.dim())
    by_name = {}
    for name, shape in shapes.items():
        if name in matrices:
            by_name[name] = widths["hidden"]
        elif len(shape) > 1:
            by_name[name] = widths["matrix"]
        else:
            by_name[name] = widths["vector"]
    return by_name


def try_optimizer(settings: PolicyConfig, shards: int) -> None:
    """Raise UserError unless the optimizer accepts its arguments, and continues from its state in a
    small trial.

    `shards` is the number of ranks between which rows of weights are cut.
    """
    try:
        _try(settings, shards)
    except (UserError, Interrupted):
        raise
    except BaseException as error:  # an optimizer may raise anything for options that it accepted
        where = f"fails in a trial on the CPU ({type(error).__name__}: {error})"
        remedy = f"correct policy.optimizer_options, or {_OTHER}"
        raise UserError(f"policy.optimizer: {settings.optimizer} {where}: {remedy}") from error


def _try(settings: PolicyConfig, shards: int) -> None:
    name = settings.optimizer
    steps = _TRIAL_STEPS if starts_without_state(settings) else 3  # what AdamW and Muon keep is known
    undisturbed = _trial(settings, range(steps))
    for count in _RESUMED_AFTER:
        if count >= steps:
            continue
        saved = _trial(settings, range(count))
        resumed = _trial(settings, range(count, steps), saved)
        equal = (
            torch.equal(tensor, undisturbed[key])
            for key, tensor in resumed.items()
            if key in undisturbed
        )
        if resumed.keys() != undisturbed.keys() or not all(equal):
            why = (
                f"does not continue from the tensors in its state after {count} steps as if it had not "
                "stopped"
            )
            raise UserError(f"policy.optimizer: {name} {why}, which checkpoints need: {_OTHER}")
    if shards > 1 and ":" in name:
        halves = []
        for rows in (slice(0, 3), slice(3, 6)):
            halves.append(_trial(settings, range(steps), rows=rows)["matrix"])
        if not torch.equal(torch.cat(halves), undisturbed["matrix"]):
            why = f"computes with whole matrices, of which each of {shards} ranks has some rows"
            raise UserError(
                f"policy.optimizer: {name} {why}: train on one rank, or set it to muon or adamw"
            )


def _make_custom(parameters: list[nn.Parameter], settings: PolicyConfig) -> torch.optim.Optimizer:
    """Make an optimizer of the user's class, whatever it raises; raise UserError if it is not fit
    for one.
    """
    name = settings.optimizer
    try:
        kind = load(name)
    except ValueError as error:
        raise UserError(f"policy.optimizer: {error}") from error
    if torch.optim.Optimizer not in getattr(kind, "__mro__", ()):
        raise UserError(f"policy.optimizer: {name} is not a subclass of torch.optim.Optimizer: name one")
    groups = decay_groups(parameters, settings.weight_decay)
    if "weight_decay" not in inspect.signature(kind).parameters:
        if settings.weight_decay:
            raise UserError(
                f"policy.weight_decay is set, but {name} takes no weight_decay: leave it out"
            )
        groups = [{"params": group["params"]} for group in groups]
    optimizer: torch.optim.Optimizer = kind(groups, lr=settings.lr, **settings.optimizer_options)
    return optimizer


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state by a step without gradients at a learning rate of 0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _check_state(optimizer: torch.optim.Optimizer, name: str) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None or key == "step":
                continue
            if not torch.is_tensor(value):
                what = f"a {type(value).__name__}"
            elif value.shape not in (parameter.shape, ()):
                what = f"a tensor of shape {list(value.shape)}"
            else:
                continue
            kept = f"keeps {key!r}, {what}, for a weight of shape {list(parameter.shape)}"
            remedy = (
                "name an optimizer whose state has the shape of its weights, and is cut and saved like "
                "them"
            )
            raise UserError(f"policy.optimizer: {name} {kept}: {remedy}")


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((key, value) for key, value in state.items() if key != "step" and torch.is_tensor(value))


def _trial_weights(seed: int = 0, rows: slice = slice(None)) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (6, 4), "matrix": (6, 4), "vector": (4,)}
    drawn = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return {
        name: nn.Parameter(value if name == "vector" else value[rows].clone())
        for name, value in drawn.items()
    }


@torch.no_grad()
def _trial(
    settings: PolicyConfig,
    steps: range,
    saved: Mapping[str, Tensor] | None = None,
    rows: slice = slice(None),
) -> dict[str, Tensor]:
    """Return small weights, and all that a checkpoint has of their state, after some steps from
    where `saved` was taken.
    """
    weights = _trial_weights(rows=rows)
    optimizer = make_optimizer(weights, ("hidden",), settings)
    if not all(torch.equal(weights[name], weight) for name, weight in _trial_weights(rows=rows).items()):
        what = (
            "changes weights in a step without gradients at a learning rate of 0, which makes its state"
        )
        raise UserError(f"policy.optimizer: {settings.optimizer} {what}: {_OTHER}")
    if saved is not None:
        for name, tensor in {**weights, **saved_state(optimizer, weights)}.items():
            tensor.copy_(saved.get(name, tensor))
        set_steps(optimizer, steps.start)
    elif starts_without_state(settings):
        optimizer.state.clear()
    groups_before = _group_values(optimizer)
    attributes_before = _attribute_values(optimizer)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = _TRIAL_RATE
        for name, gradient in _trial_weights(1 + step, rows).items():
            weights[name].grad = gradient.detach()
        optimizer.step()
    for group, earlier in zip(_group_values(optimizer), groups_before, strict=True):
        _check_unchanged(earlier, group, "{!r} of its groups", settings.optimizer)
    _check_unchanged(
        attributes_before, _attribute_values(optimizer), "its attribute {!r}", settings.optimizer
    )
    _check_state(optimizer, settings.optimizer)
    tensors = {**weights, **saved_state(optimizer, weights)}
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        what = f"reaches values that are not finite in {len(steps)} steps on gradients of size 1"
        raise UserError(
            f"policy.optimizer: {settings.optimizer} {what}: correct policy.optimizer_options"
        )
    return tensors


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy of what an optimizer's groups have besides parameters and the learning rate; tensors as
    lists.
    """
    copies = []
    for group in optimizer.param_groups:
        values = {}
        for key, value in group.items():
            if key not in ("params", "lr"):
                values[key] = value.tolist() if torch.is_tensor(value) else deepcopy(value)
        copies.append(values)
    return copies


def _attribute_values(optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """Return the values that can be reached from each attribute of an optimizer and of its class,
    as text.

    State, groups and weights are left out: checkpoints have them, or another check compares them.
    """
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    elsewhere = [optimizer, optimizer.state, optimizer.param_groups, *optimizer.param_groups, *weights]
    attributes = {**vars(type(optimizer)), **vars(optimizer)}
    seen = {id(thing) for thing in elsewhere}
    return {name: list(_values(value, set(seen))) for name, value in attributes.items()}


def _values(thing: Any, seen: set[int]) -> Iterator[str]:
    """Yield the numbers, texts and tensors in a value, in its items and in its attributes, as text;
    `seen` are ids.
    """
    code = inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing)
    if code or id(thing) in seen:
        return
    if torch.is_tensor(thing):
        yield repr(thing.tolist())
        return
    if isinstance(thing, Mapping):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        parts = list(thing)
    elif hasattr(thing, "__dict__"):
        parts = [vars(thing)]
    else:
        yield repr(thing)
        return
    seen.add(id(thing))
    for part in parts:
        yield from _values(part, seen)


def _check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any], what: str, name: str) -> None:
    """Raise UserError about the first key whose value a step has changed; `what` is a noun with a
    place for the key.
    """
    for key in sorted(before.keys() | after.keys()):
        if (key in before) != (key in after) or before[key] != after[key]:
            changed = f"changes {what.format(key)} in a step, which no checkpoint has"
            raise UserError(f"policy.optimizer: {name} {changed}: {_IN_STATE}")
