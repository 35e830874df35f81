"""Workers that write down what keeps them from starting.

vLLM itself would say only that its core failed, below two tracebacks of forty lines; it does so
where its log is set to INFO or DEBUG.
"""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

START_ERROR = "HOTBUNK_START_ERROR"
"""Environment variable of an engine's processes: the file for the reason why a worker does not
start.
"""

_START = (
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
)

W = TypeVar("W")


def reporting_start_errors(worker: type[W]) -> type[W]:
    """Decorate a subclass of a worker: an error in its start is written to the file of
    `START_ERROR`, and ends it.
    """
    for name in _START:
        setattr(worker, name, _reporting(getattr(worker, name)))
    return worker


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, changed to write down its error and end the process."""

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
