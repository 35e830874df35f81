"""Reports of the error that keeps a worker of an engine from starting.

At the log level ERROR, vLLM would say only that its engine core failed, and print two tracebacks of
forty lines. So a worker writes its error to a file, which the process that starts the engine reads.
At other log levels vLLM reports the error itself.
"""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

START_ERROR = "HOTBUNK_START_ERROR"
"""The environment variable with the path of the file that a worker writes its error to."""

_START = (
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
)

W = TypeVar("W")


def reporting_start_errors(worker: type[W]) -> type[W]:
    """Decorate a worker class, so that an error in one of its methods that start it is written to
    the file that `START_ERROR` names, and ends the process with exit code 1.
    """
    for name in _START:
        setattr(worker, name, _reporting(getattr(worker, name)))
    return worker


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method wrapped, so that an error is written to the file and ends the process."""

    @wraps(method)
    def reporting(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            if (file := os.environ.get(START_ERROR)) is None or os.environ.get(
                "VLLM_LOGGING_LEVEL"
            ) != "ERROR":
                raise
            Path(file).write_text(f"{type(error).__name__}: {error}", "utf-8")
            os._exit(1)

    return reporting
