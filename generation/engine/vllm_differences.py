"""Differences between releases of vLLM, each asked for by what is there, never by a version
number.

This is not part of `vllm_compat` because workers ask here too, and need not import for it what
starts engines.
"""

import inspect
from collections.abc import Iterable
from typing import Any

ENDS_OF_RESPONSES = ("response.completed", "response.incomplete")
"""The last event of a stream of Responses, which has the whole answer. From 0.33 on the second ends
an answer that was cut at its length; before, the first ends every answer.
"""


def server_arguments() -> Any:
    """Return vLLM's module of its server's command line, which 0.33 moved."""
    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:
        from vllm.entrypoints.launchers import cli_args
    return cli_args


def needs_cut_prompts(error: Exception) -> bool:
    """Return True if vLLM refuses to cache the states of recurrent layers because prompts are never
    cut, as on CPU (vllm/model_executor/models/config.py). The rest of the sentence depends on the
    release.
    """
    return "Chunked prefill is required" in str(error)


def takes_own_heads(sinks: Any) -> bool:
    """Return True if the loader of this parameter takes the worker's heads out of the sinks of all
    heads, as `load_attention_sink` does from 0.33 on. Before, sinks had vLLM's default loader,
    which copies.

    A reload wraps the loader (vllm/model_executor/model_loader/reload/layerwise.py).
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return inspect.unwrap(sinks.weight_loader) is not default_weight_loader


def unknown_to_vllm(request: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those of these settings of a request to vLLM's server that its class does not know, so
    that vLLM makes no sampling parameters of them.

    In 0.31 a `ResponsesRequest` has neither `min_p` nor `stop_token_ids`.
    """
    values = {
        name: getattr(request, name, None) for name in names if name not in type(request).model_fields
    }
    return {name: value for name, value in values.items() if value is not None}
