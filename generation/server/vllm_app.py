"""The parts of vLLM's HTTP server that are private or change between releases (0.32)."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any


def told_error(status: int, sentence: str) -> Exception:
    """The one error that vLLM's handlers hand on to the client, also within a stream, without logging a traceback."""
    from vllm.exceptions import GenerationError

    error = GenerationError(sentence)
    error.status_code = HTTPStatus(status)
    return error


@contextmanager
def _root_logging_kept() -> Iterator[None]:
    """The root logger's levels stay what they were: importing part of vLLM's server changes them for the whole process,
    and only handlers are restored there (vllm/entrypoints/serve/sagemaker/api_router.py).
    """
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, own in handlers:
            handler.setLevel(own)


async def build_openai_app(
    engine: Any,
    model_name: str,
    model: str,
    tool_parser: str | None,
    reasoning_parser: str | None,
    check: Callable[[Any], None],
) -> Any:
    """vLLM's own OpenAI-compatible FastAPI application on an engine that is running already.

    `check` is given each request for answers as vLLM has parsed it, before anything is done for it.

    Raises:
        ValueError: vLLM has no parser of that name.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--model", model, "--served-model-name", model_name]
    if tool_parser is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    if reasoning_parser is not None:
        words += ["--reasoning-parser", reasoning_parser]
    with _root_logging_kept():
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        try:
            validate_parsed_serve_args(arguments)
            tasks = await engine.get_supported_tasks()
            app = build_app(arguments, tasks, engine.model_config)
            await init_app_state(engine, app.state, arguments, tasks)
        except (KeyError, TypeError) as error:
            raise ValueError(f"vLLM's server does not start with these settings: {error}") from error
    for serving, method in (("chat", "create_chat_completion"), ("completion", "create_completion")):
        if (handler := getattr(app.state, f"openai_serving_{serving}", None)) is not None:
            setattr(handler, method, _checked_first(check, getattr(handler, method)))
    return app


def _checked_first(check: Callable[[Any], None], handle: Callable[..., Any]) -> Callable[..., Any]:
    async def checked(request: Any, *arguments: Any, **named: Any) -> Any:
        check(request)
        return await handle(request, *arguments, **named)

    return checked
