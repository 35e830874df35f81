"""Load the reward functions that a recipe names and check their signatures, without torch, as
workers do it too.
"""

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from generation.importing import load
from generation.trajectory import Trajectory
from trainer.errors import Interrupted, UserError, quoted
from trainer.rewards.functions import BUILTINS, EXTRACTORS

OFFERED = ("prompt", "row", "answer", "finish_reason", "trajectory", "images", "opened")
"""The values that every reward function may ask for by keyword, besides the completion and its own
settings.
"""

TAKEN = ("mean", "std", "errors", "abstained")
"""Names of the run's own metrics below reward/, which a reward function may not have."""

_TRL_LOGGERS = ("log_extra", "log_metric")
_TRL_ONLY = frozenset(("environments", "trainer_state"))

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class BoundReward:
    """A reward function with its settings, which is called with the values it asks for only."""

    label: str
    function: Callable[..., Any]
    keywords: frozenset[str]
    kwargs: dict[str, Any]
    # Returns a completion's vote for majority votes, or None: by default the text; otherwise a
    # built-in function's extractor, or the attribute `extract` of the user's function or class
    extract: Callable[[str], Any] = str.strip

    @property
    def takes_answer(self) -> bool:
        """True if the function takes `answer`; with TRL's signature, only if it has a parameter of
        that name.
        """
        if isinstance(self.function, TrlReward):
            return "answer" in inspect.signature(self.function.function).parameters
        return "answer" in self.keywords

    def __call__(self, completion: str, offered: dict[str, Any]) -> Any:
        """Call the function; None: it abstains. `offered` holds a value for each name in
        OFFERED.
        """
        arguments = {key: offered[key] for key in self.keywords}
        if "images" in arguments:
            arguments["images"] = [image.open() for image in arguments["images"]]
        result = self.function(completion, **arguments, **self.kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


@dataclass(frozen=True)
class TrlReward:
    """An adapter for a reward function with TRL's signature, `f(prompts, completions, **columns) ->
    list[float]`.

    It passes one answer at a time, with the prompt as it stands in the data. If that is a list of
    messages, the completion is a list of one message. `names` are the function's parameters; None:
    it takes any.

    TRL's own format functions are asked twice where the chat template has opened a tag, such as
    <think>, before the completion: without the tag and with it, since they require the tag
    (https://github.com/huggingface/trl/issues/6966).
    """

    function: Callable[..., Any]
    names: frozenset[str] | None

    def __call__(self, completion: str, *, opened: str = "", **arguments: Any) -> Any:
        reward = self._reward(completion, **arguments)
        if opened and reward is not None:
            return max(reward, self._reward(opened + completion, **arguments))
        return reward

    @property
    def judges_format(self) -> bool:
        """True for TRL's own functions that compare a completion's tags with a pattern."""
        module = str(getattr(self.function, "__module__", ""))
        return module.startswith("trl.") and "format" in getattr(self.function, "__name__", "")

    def _reward(
        self,
        completion: str,
        *,
        prompt: str,
        row: dict[str, Any],
        trajectory: Trajectory | None = None,
        **kwargs: Any,
    ) -> Any:
        asked = next((row[key] for key in ("prompt", "messages") if row.get(key)), prompt)
        answer = completion if isinstance(asked, str) else [{"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
        loggers = dict.fromkeys(_TRL_LOGGERS, lambda *_: None)
        arguments = columns | {"prompts": [asked], "completions": [answer], **loggers}
        if trajectory is not None:
            arguments["completion_ids"] = [trajectory.response_ids[trajectory.answer_start :]]
        if self.names is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.names}
        result = self.function(**arguments | kwargs)
        rewards = list(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        if len(rewards) != 1:
            raise ValueError(f"it returned {len(rewards)} rewards for one completion")
        return rewards[0]


def bind_rewards(functions: Iterable[tuple[str, dict[str, Any]]]) -> list[BoundReward]:
    """Load the functions with these (name, kwargs) and check that they can be called.

    A class is constructed with its kwargs, once in each process, and the object is called without
    them. A label is the function's name, with a number if it is taken. Raises UserError naming the
    function.
    """
    bound: dict[str, BoundReward] = {}
    for name, kwargs in functions:
        label = short = name.rpartition(":")[2]
        if short in TAKEN:
            raise UserError(
                f"reward {name!r} would replace the run's own figure reward/{short}: rename the function"
            )
        number = 1
        while label in bound:
            number += 1
            label = f"{short}_{number}"
        bound[label] = _bind(name, label, kwargs)
    return list(bound.values())


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
        raise UserError(
            f"reward {name!r} is unknown: {hint} Write your own as pkg.mod:Name or path/file.py:Name"
        )
    if inspect.isclass(function):
        try:
            function = function(**kwargs)
            kwargs = {}
        except Interrupted:
            raise
        except BaseException as error:  # the user's constructor may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"reward {name!r} cannot be set up with kwargs {quoted(kwargs)}: {reason}"
            ) from error
    if not callable(function):
        raise UserError(f"reward {name!r} is {type(function).__name__}, not a function")
    extract = EXTRACTORS.get(name, getattr(function, "extract", str.strip))
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # some functions written in C have no signature
        raise UserError(f"reward {name!r} has no signature: wrap it in a Python function") from error
    if "completions" in parameters:
        reward, keywords = _bind_trl(name, function, parameters, kwargs)
        return BoundReward(label, reward, keywords, kwargs, extract)
    return BoundReward(label, function, _keywords(name, [*parameters.values()], kwargs), kwargs, extract)


def _bind_trl(
    name: str,
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    kwargs: dict[str, Any],
) -> tuple[TrlReward, frozenset[str]]:
    """Wrap a function with TRL's signature, and return it with the keys of OFFERED to pass to
    it.
    """
    for absent in _TRL_ONLY & parameters.keys():
        if parameters[absent].default is inspect.Parameter.empty:
            raise UserError(
                f"reward {name!r} asks for TRL's {absent!r}, which rewards do not get here: give the "
                "environment a method get_reward() instead"
            )
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and (unknown := kwargs.keys() - parameters.keys()):
        raise UserError(f"reward {name!r} takes no argument {min(unknown)!r}, which its kwargs set")
    reward = TrlReward(function, None if takes_any else frozenset(parameters) - _TRL_ONLY)
    keywords = {"prompt", "row"}
    if "completion_ids" in parameters:
        keywords.add("trajectory")
    if reward.judges_format:
        keywords.add("opened")
    return reward, frozenset(keywords)


def _keywords(name: str, parameters: list[inspect.Parameter], kwargs: dict[str, Any]) -> frozenset[str]:
    """Return the keys of OFFERED to pass. Raises UserError if the function does not take these and
    kwargs.
    """
    if parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[1:]
    elif not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        raise UserError(f"reward {name!r} must take the completion as its first argument")
    if clash := set(kwargs) & set(OFFERED):
        raise UserError(
            f"reward {name!r}: kwargs may not set {min(clash)!r}, which every reward can ask for"
        )
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    if not takes_any and (unknown := set(kwargs) - named):
        raise UserError(f"reward {name!r} takes no argument {min(unknown)!r}, which its kwargs set")
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind in (*_NAMED, *_POSITIONAL)
        if required and (parameter.name not in {*OFFERED, *kwargs} or parameter.kind not in _NAMED):
            raise UserError(
                f"reward {name!r} asks for {parameter.name!r}, but rewards get the completion and, by "
                f"keyword, {', '.join(OFFERED)} and their kwargs"
            )
    return frozenset(OFFERED) if takes_any else frozenset(OFFERED) & named
