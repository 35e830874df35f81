"""The six levels of rollouts: builds, from a recipe's keys, the function or sampler that runs
episodes.
"""

import functools
import inspect
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from generation.importing import load
from generation.rollouts.agent import (
    Agent,
    InlineTags,
    environment_class,
    environment_rollout,
    environment_tools,
    inline_rollout,
    tool_rollout,
)
from generation.rollouts.client import CapturingServer, ClientRollout, StartServer
from generation.rollouts.client_process import ClientCommand, ClientProcesses
from generation.rollouts.environments import verifiers
from generation.rollouts.episode import RolloutFunction, custom_rollout, one_shot
from generation.rollouts.mcp_tools import McpServer, McpTools, list_tools
from generation.rollouts.sampler import Sampler, make_sampler
from generation.rollouts.tools import Tool, ToolLimits, ToolRunner, call_parser, make_tool, tools_by_name
from sharding.ranks import agreed, exchange, is_main
from trainer.config.schema import (
    ClientConfig,
    ProcessesConfig,
    RolloutConfig,
    TrainConfig,
    VerifiersConfig,
)
from trainer.data import Prompt, image_rules, row_reader
from trainer.errors import Interrupted, UserError

T = TypeVar("T")


class RolloutLevel:
    """The recipe's way of turning prompts into trajectories, on one of six levels from one-shot to
    any OpenAI client.

    It is loaded and checked before any model. Raises UserError naming the key that does not fit.
    Keys may also hold objects in place of their names.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        start_server: StartServer | None = None,
    ) -> None:
        """Load and check the recipe's level. `start_server` starts the server of level 6; it may be
        None where no episode is run.
        """
        self.image_rules = image_rules(config, tokenizer)
        # Runs one episode; None: a sampler takes all prompts at once
        self.function: RolloutFunction | None = one_shot
        self.sampler: Sampler | None = None  # the object of level 5
        self._mcp: McpTools | None = None
        # With the tools' schemas as arguments of the chat template, if the recipe says so
        self.data = config.data
        named = config.rollout
        kwargs = config.rollout.kwargs
        if (custom := named.custom) is not None:
            self.function = _checked("rollout.custom", lambda: custom_rollout(_named(custom), kwargs))
        elif (sampler := named.sampler) is not None:
            recipe = config.model_dump()
            self.function = None
            self.sampler = _checked(
                "rollout.sampler", lambda: make_sampler(load(sampler), kwargs, recipe)
            )
        elif named.client is not None or named.verifiers is not None:
            self.function = _client_function(config, start_server)
        elif named.tools or named.mcp or named.environment is not None:
            self._mcp = _mcp_tools(config)
            self.function, schemas = _agent_function(
                config, tokenizer, self._mcp.tools, self.image_rules is not None
            )
            if named.mcp:
                self.function = self._mcp.around(self.function)
            if schemas and named.describe_tools:
                described = {**config.data.chat_template_kwargs, "tools": schemas}
                self.data = config.data.model_copy(update={"chat_template_kwargs": described})
            elif schemas:
                self.data = config.data.model_copy(update={"tools_key": None})
        self._reader = row_reader(self.data, tokenizer)

    async def aclose(self) -> None:
        """Stop the server of level 6 and MCP servers. Call it on the engine's event loop, before
        the engine stops.
        """
        if self._mcp is not None:
            await self._mcp.aclose()
        if isinstance(self.function, ClientRollout):
            await self.function.aclose()

    def messages(self, prompts: Sequence[Prompt]) -> list[list[dict[str, Any]] | None] | None:
        """Return the messages of each prompt; None without a chat template, or if the level does
        not use them.
        """
        if self._reader.form is None or self.function is one_shot:
            return None
        readers = [prompt.reader or self._reader for prompt in prompts]
        pairs = zip(readers, prompts, strict=True)
        return [reader.messages(prompt.row, len(prompt.images)) for reader, prompt in pairs]


def _client_function(config: TrainConfig, start_server: StartServer | None) -> ClientRollout:
    """Build level 6: a client on a thread of the leader, or in processes of another Python."""
    named = config.rollout
    log = config.run.folder / "clients.log"

    async def serve(engine: Any, **settings: Any) -> CapturingServer:
        """Start a server that parses tool calls as the recipe says."""
        assert start_server is not None
        return await start_server(engine, tool_parser=named.tool_parser, **settings)

    if not isinstance(section := named.verifiers or named.client, ProcessesConfig):
        function = _checked("rollout.client", lambda: load(str(section)))
        client = functools.partial(function, **named.kwargs) if named.kwargs else function
        return _checked(
            "rollout.client", lambda: ClientRollout(client, serve, config.run.step_deadline_s)
        )
    if isinstance(section, VerifiersConfig):
        key = "rollout.verifiers.python"
        command = verifiers.command(section.model_dump(), log)
    else:
        assert isinstance(section, ClientConfig)
        key = "rollout.client.command"
        client_command = section.command
        command = ClientCommand(client_command, section.workers, section.env, named.kwargs, log)
    if shutil.which(command.command[0]) is None:
        raise UserError(f"{key}: there is no program {command.command[0]}")
    pool = ClientProcesses(command)
    return ClientRollout(pool.run, serve, section.timeout_s, pool.aclose)


def _mcp_tools(config: TrainConfig) -> McpTools:
    """Return the tools of rollout.mcp, which rank 0 lists for all ranks. Collective."""
    servers = [
        McpServer(name, server.command, server.url, server.env, server.session == "shared")
        for name, server in config.rollout.mcp.items()
    ]
    listed: dict[str, list[dict[str, Any]]] = {}
    if servers:
        with agreed("asking MCP servers for their tools"):
            if is_main():
                listed = _checked("rollout.mcp", lambda: list_tools(servers))
        listed = exchange(listed)[0]
    return McpTools(servers, listed, config.run.folder / "mcp.log")


def _agent_function(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, mcp_tools: list[Tool], images: bool
) -> tuple[RolloutFunction, list[dict[str, Any]]]:
    """Build levels 2 and 3; return the function and all tools' schemas. `images`: replies may have
    images.
    """
    named = config.rollout

    def function(spec: str) -> Callable[..., Any]:
        loaded: Callable[..., Any] = _named(spec)
        if not inspect.isroutine(loaded):
            raise ValueError(f"{spec!r} is {type(loaded).__name__}, not a function")
        return loaded

    inline = named.tool_parser == "inline"  # inline calls have a parser of their own
    parser = "hermes" if inline else named.tool_parser
    limits = ToolLimits(
        named.tool_timeout_s,
        named.max_concurrency,
        named.max_tool_tokens,
        named.tool_error,
        named.tool_rates,
        images,
    )

    def all_tools() -> dict[str, Tool]:
        own = [make_tool(function(spec)) for spec in named.tools]
        return tools_by_name([*own, *mcp_tools])

    tools = _checked("rollout.tools", all_tools)
    parse = _checked("rollout.tool_parser", lambda: call_parser(parser, tokenizer))
    tools_key = config.data.tools_key if named.describe_tools else None
    agent = Agent(
        ToolRunner(limits, tokenizer), parse, named.max_turns, tools, named.describe_tools, tools_key
    )
    schemas = [tool.schema for tool in tools.values()]
    if named.environment is None:
        _check_rates(named, tools)
        tags = InlineTags(**named.inline_tags.model_dump())
        return inline_rollout(agent, tags) if inline else tool_rollout(agent), schemas
    loaded = _checked("rollout.environment", functools.partial(_named, named.environment))
    cls = _checked("rollout.environment", lambda: environment_class(loaded, named.kwargs))
    methods = _checked("rollout.environment", lambda: environment_tools(cls))
    _check_rates(named, [*tools, *methods])
    schemas += [tool.schema for tool in methods.values()]
    return _checked(
        "rollout.environment", lambda: environment_rollout(cls, named.kwargs, agent, loaded)
    ), schemas


def _named(spec: Any) -> Any:
    """Return the object that an import string names; any other object is meant itself."""
    return load(spec) if isinstance(spec, str) else spec


def _check_rates(named: RolloutConfig, tools: Iterable[str]) -> None:
    if unknown := sorted({*named.tool_rates} - {*tools}):
        there = ", ".join(tools) or "none"
        raise UserError(f"rollout.tool_rates: there is no tool {unknown[0]!r}; the tools are: {there}")


def _checked(key: str, make: Callable[[], T]) -> T:
    """Return the result of `make`; an error of the user's code becomes a UserError about the
    key.
    """
    try:
        return make()
    except (UserError, Interrupted):
        raise
    except BaseException as error:  # the user's constructor may raise anything
        raise UserError(f"{key}: {error or type(error).__name__}") from error
