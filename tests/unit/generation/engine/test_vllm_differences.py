"""Differences between releases of vLLM: what the installed one does not have is a small stand-in."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from vllm import SamplingParams
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs

from generation.engine import vllm_compat
from generation.engine.settings import EngineSettings
from generation.engine.vllm_differences import server_arguments, unknown_to_vllm
from generation.server.conversations import ServedCall
from generation.server.served_engine import ServedEngine


def test_the_servers_command_line_is_found_where_a_release_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to vLLM 0.32 among the launchers, from 0.33 on among what the servers have in common."""
    names = ("vllm.entrypoints.common", "vllm.entrypoints.launchers")
    for has, lacks in (names, names[::-1]):
        parent, module = ModuleType(has), ModuleType(f"{has}.cli_args")
        parent.cli_args = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, has, parent)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, lacks, ModuleType(lacks))
        monkeypatch.delitem(sys.modules, f"{lacks}.cli_args", raising=False)
        assert server_arguments() is module


@pytest.mark.parametrize(
    "sentence",
    [
        "Chunked prefill is required for mamba cache mode 'align'.",  # 0.31 and 0.32
        "Chunked prefill is required for Mamba prefix caching.",  # 0.33
    ],
)
def test_a_hybrid_starts_without_a_cache_of_prefixes_whatever_a_release_calls_it(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Arguments(AsyncEngineArgs):
        def __post_init__(self) -> None:
            """Look for no model."""

        def create_engine_config(self, *_: Any, **__: Any) -> Any:
            assert not self.enable_prefix_caching, sentence
            return "a configuration"

    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", Arguments)
    monkeypatch.setattr(vllm_compat, "check_build", lambda settings: None)
    settings = EngineSettings(model="m", max_model_len=64, sleep=False)
    assert vllm_compat._checked_config(settings) == "a configuration"  # type: ignore[comparison-overlap]
    monkeypatch.setattr(vllm_compat, "needs_cut_prompts", lambda error: False)
    with pytest.raises(AssertionError, match="Chunked prefill"):
        vllm_compat._checked_config(settings)


def test_settings_that_a_request_does_not_know_are_found_whatever_it_holds() -> None:
    """vLLM's requests keep fields that they do not know, but make no sampling parameters of them."""

    class Request(BaseModel, extra="allow"):
        min_p: float | None = None

    asked = ("min_p", "stop_token_ids", "top_k")
    request = Request.model_validate({"min_p": 0.5, "stop_token_ids": [7]})
    assert unknown_to_vllm(request, asked) == {"stop_token_ids": [7]}
    assert unknown_to_vllm(Request(), asked) == {}


def test_the_sampler_is_given_what_a_request_does_not_know() -> None:
    server = ServedEngine.__new__(ServedEngine)
    server._worker = SimpleNamespace(settings=SimpleNamespace(max_model_len=64))  # type: ignore[assignment]
    call = ServedCall(sampling=None, unknown={"stop_token_ids": [7], "min_p": 0.25})
    params = server._params(call, SamplingParams(max_tokens=4), 3)
    assert (params.stop_token_ids, params.min_p, params.max_tokens) == ([7], 0.25, 4)
    assert 7 in params.all_stop_token_ids
