"""From names in a recipe to callables whose signatures are known to fit. Imports no torch: workers use this too."""

import asyncio
import difflib
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from generation.importing import load
from trainer.errors import Interrupted, UserError, shown
from trainer.rewards.functions import BUILTINS, EXTRACTORS

OFFERED = ("prompt", "row", "answer", "finish_reason", "trajectory")
"""The values that every reward function may ask for by keyword, besides the completion and its own settings."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class BoundReward:
    """A reward function with its settings, which gets only the values it asks for."""

    label: str
    function: Callable[..., Any]
    keywords: frozenset[str]
    kwargs: dict[str, Any]
    # gives a completion's vote, for majority votes, or None: the built-in function's own, or the user's function's or
    # class's attribute of this name; without one, the text
    extract: Callable[[str], Any] = str.strip

    def __call__(self, completion: str, offered: dict[str, Any]) -> Any:
        """Call the function; `offered` holds a value for each name in OFFERED."""
        result = self.function(completion, **{key: offered[key] for key in self.keywords}, **self.kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def bind_rewards(functions: Iterable[tuple[str, dict[str, Any]]]) -> list[BoundReward]:
    """Load each (name, kwargs) and check that it can be called.

    A class is constructed with its kwargs, once in each process, and the object is called without them.
    Labels are the functions' own names, numbered where one occurs twice. Raises UserError naming the function.
    """
    bound, seen = [], Counter[str]()
    for name, kwargs in functions:
        short = name.rpartition(":")[2]
        seen[short] += 1
        bound.append(_bind(name, short if seen[short] == 1 else f"{short}_{seen[short]}", kwargs))
    return bound


def _bind(name: str, label: str, kwargs: dict[str, Any]) -> BoundReward:
    function: Any = BUILTINS.get(name)
    if ":" in name:
        try:
            function = load(name)
        except ValueError as error:
            raise UserError(str(error)) from error
    elif function is None:
        close = difflib.get_close_matches(name, BUILTINS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"the built-in ones are {', '.join(BUILTINS)}."
        raise UserError(f"reward {name!r} is not known: {hint} Your own is written pkg.mod:Name or path/file.py:Name")
    if inspect.isclass(function):
        try:
            function, kwargs = function(**kwargs), {}
        except Interrupted:
            raise
        except BaseException as error:  # whatever the user's constructor raises
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"reward {name!r} cannot be set up with kwargs {shown(kwargs)}: {reason}") from error
    if not callable(function):
        raise UserError(f"reward {name!r} is {type(function).__name__}, not a function")
    extract = EXTRACTORS.get(name, getattr(function, "extract", str.strip))
    return BoundReward(label, function, _keywords(name, function, kwargs), kwargs, extract)


def _keywords(name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> frozenset[str]:
    """The keys of OFFERED to pass; raises UserError unless completion, these and kwargs are what the function takes."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:  # some functions of C do not say
        raise UserError(f"reward {name!r} does not say what it takes: wrap it in a function of yours") from error
    if parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[1:]
    elif not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        raise UserError(f"reward {name!r} must take the completion as its first argument")
    if clash := set(kwargs) & set(OFFERED):
        raise UserError(f"reward {name!r}: kwargs may not set {min(clash)!r}, which every reward is given")
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    if not takes_any and (unknown := set(kwargs) - named):
        raise UserError(f"reward {name!r} takes no argument {min(unknown)!r}, which its kwargs set")
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind in (*_NAMED, *_POSITIONAL)
        if required and (parameter.name not in {*OFFERED, *kwargs} or parameter.kind not in _NAMED):
            raise UserError(
                f"reward {name!r} asks for {parameter.name!r}, but is given the completion and, by keyword, "
                f"{', '.join(OFFERED)} and its kwargs"
            )
    return frozenset(OFFERED) if takes_any else frozenset(OFFERED) & named
