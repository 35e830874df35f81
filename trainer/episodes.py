"""What the recipe's `rollout` section names, loaded and checked before any model is: the way from prompt to trajectory.

Six levels, from nothing to any OpenAI client; each is one key of the section (README, "Rollouts").
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from generation.rollouts.agent import Agent, environment_rollout, environment_tools, tool_rollout
from generation.rollouts.inline_tools import inline_rollout
from generation.rollouts.llm import RolloutFunction, custom_rollout, one_shot
from generation.rollouts.sampler import Sampler, make_sampler
from generation.rollouts.tool_calls import CallParser, call_parser
from generation.rollouts.tools import ToolLimits, ToolRunner, make_tool, tools_by_name
from trainer.config import DataConfig, RolloutConfig, TrainConfig
from trainer.data import Prompt, prompt_messages
from trainer.errors import UserError
from trainer.importing import load_object
from trainer.lifetime import Interrupted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class EpisodePlan:
    """How this recipe's prompts become trajectories. Raises UserError naming the key that does not fit.

    Attributes:
        data: the recipe's data section; where tools are to be described, their schemas go to the chat template.
        function: runs one episode; None where a sampler takes all prompts at once.
        sampler: level 5's object, or None.
    """

    def __init__(self, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
        rollout = config.rollout
        self._templated = config.data.apply_chat_template and tokenizer.chat_template is not None
        self.function: RolloutFunction | None = one_shot
        self.sampler: Sampler | None = None
        schemas: list[dict[str, Any]] = []
        if rollout.custom is not None:
            found = load_object(rollout.custom)
            self.function = _checked("rollout.custom", lambda: custom_rollout(found, rollout.kwargs))
        elif rollout.sampler is not None:
            found = load_object(rollout.sampler)
            self.function, self.sampler = None, _checked("rollout.sampler", lambda: make_sampler(found, rollout.kwargs))
        elif rollout.client is not None:
            self.function = _checked("rollout.client", lambda: _client_function(config))
        elif rollout.tools or rollout.environment is not None:
            self.function, schemas = _agent_function(rollout, tokenizer)
        self.data = _describing(config.data, schemas) if rollout.describe_tools else config.data

    async def aclose(self) -> None:
        """Stop what the function has started: level 6's server. On the engine's loop, before the engine stops."""
        if (close := getattr(self.function, "aclose", None)) is not None:
            await close()

    def messages(self, prompts: Sequence[Prompt]) -> list[list[dict[str, Any]] | None] | None:
        """What each prompt was rendered from; None where nobody asks, or no chat template is applied."""
        if not self._templated or self.function is one_shot:
            return None
        return [prompt_messages(prompt.row, self.data) for prompt in prompts]


def _agent_function(
    rollout: RolloutConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[RolloutFunction, list[dict[str, Any]]]:
    """Levels 2 and 3, and the schemas of their tools."""
    limits = ToolLimits(rollout.tool_timeout_s, rollout.max_concurrency, rollout.max_tool_tokens, rollout.tool_error)
    tools = _checked("rollout.tools", lambda: tools_by_name(make_tool(_function(spec)) for spec in rollout.tools))
    parse = _checked("rollout.tool_parser", lambda: _parser(rollout.tool_parser, tokenizer))
    agent = Agent(ToolRunner(limits, tokenizer), parse, rollout.max_turns, tools, rollout.describe_tools)
    schemas = [tool.schema for tool in tools.values()]
    if rollout.environment is None:
        return inline_rollout(agent) if rollout.tool_parser == "inline" else tool_rollout(agent), schemas
    found = load_object(rollout.environment)
    if not inspect.isclass(found) or not callable(getattr(found, "reset", None)):
        raise UserError(f"rollout.environment: {rollout.environment!r} must be a class with a method reset(**row)")
    schemas += [t.schema for t in _checked("rollout.environment", lambda: environment_tools(found)).values()]
    return _checked("rollout.environment", lambda: environment_rollout(found, rollout.kwargs, agent)), schemas


def _parser(name: str, tokenizer: "PreTrainedTokenizerBase") -> CallParser:
    return call_parser("hermes" if name == "inline" else name, tokenizer)  # inline calls are found otherwise


def _function(spec: str) -> Callable[..., Any]:
    found = load_object(spec)
    if not inspect.isroutine(found):
        raise ValueError(f"{spec!r} is {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _client_function(config: TrainConfig) -> RolloutFunction:
    """Level 6. The server and what it needs are imported only here."""
    from generation.openai_server import ServerSettings
    from generation.rollouts.client import client_rollout

    assert config.rollout.client is not None
    found = load_object(config.rollout.client)
    client = functools.partial(found, **config.rollout.kwargs) if config.rollout.kwargs else found
    server = ServerSettings(tool_parser=config.rollout.tool_parser)
    return client_rollout(client, server, timeout_s=config.run.step_deadline_s)


def _checked(key: str, make: Callable[[], T]) -> T:
    """What `make` gives; what is wrong with the user's object becomes a sentence about the key."""
    try:
        return make()
    except (UserError, Interrupted):
        raise
    except BaseException as error:  # the user's constructor may raise anything
        raise UserError(f"{key}: {error or type(error).__name__}") from error


def _describing(data: DataConfig, schemas: list[dict[str, Any]]) -> DataConfig:
    if not schemas:
        return data
    return data.model_copy(update={"chat_template_kwargs": {**data.chat_template_kwargs, "tools": schemas}})
