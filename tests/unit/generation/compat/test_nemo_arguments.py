"""Every key and argument of NeMo RL's interface has an effect, is refused, or has its row in docs/interfaces.md."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from generation.compat.nemo import config as config_module
from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.compat.nemo.batch import ColocatedConfig, GenerationDatumSpec, pad_token_id
from generation.compat.nemo.config import (
    VllmConfig,
    VllmSpecificArgs,
    engine_settings,
    has_tokenizer,
    on_ray,
    replicas,
    sampling_settings,
)
from generation.compat.nemo.generation import VllmGeneration, VllmGenerationWorker
from sharding import WORKER_EXTENSION
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "interfaces.md").read_text()
CONFIG: dict[str, Any] = {
    "backend": "vllm",
    "max_new_tokens": 8,
    "temperature": 0.7,
    "model_name": "nobody/nothing",
    "vllm_cfg": {"max_model_len": 32, "tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20},
    "vllm_kwargs": {"worker_extension_cls": WORKER_EXTENSION},
}
Reading = Callable[[Any], Any]

KEYS: dict[str, tuple[Any, Reading | str]] = {
    "backend": ("sglang", "generation.backend is 'sglang': it must be 'vllm'"),
    "model_name": ("somebody/something", lambda c: engine_settings(c).model),
    "max_new_tokens": (5, lambda c: sampling_settings(c).max_tokens),
    "temperature": (0.3, lambda c: sampling_settings(c).temperature),
    "top_p": (0.5, lambda c: sampling_settings(c).top_p),
    "top_k": (7, lambda c: sampling_settings(c).top_k),
    "stop_token_ids": ([4], lambda c: sampling_settings(c).stop_token_ids),
    "stop_strings": (["x"], lambda c: sampling_settings(c).stop),
    "pad_token_id": (9, pad_token_id),
    "vllm_kwargs": ({"block_size": 16}, lambda c: engine_settings(c).extra["block_size"]),
}
"""Key -> a value, and what reads it from a configuration, or the sentence that refuses it."""

VLLM_KEYS: dict[str, tuple[Any, Reading | str]] = {
    "max_model_len": (48, lambda c: engine_settings(c).max_model_len),
    "tensor_parallel_size": (1, lambda c: engine_settings(c).tensor_parallel_size),
    "pipeline_parallel_size": (
        2,
        "pipeline_parallel_size is 2: it must be 1, since weights reach tensor parallel",
    ),
    "expert_parallel_size": (2, lambda c: 2 * engine_settings(c).extra["enable_expert_parallel"]),
    "gpu_memory_utilization": (0.4, lambda c: engine_settings(c).gpu_memory_utilization),
    "precision": ("bfloat16", lambda c: engine_settings(c).dtype),
    "kv_cache_dtype": ("fp8", lambda c: engine_settings(c).extra["kv_cache_dtype"]),
    "kv_cache_memory_bytes": (1 << 21, lambda c: engine_settings(c).kv_cache_bytes),
    "load_format": ("dummy", lambda c: engine_settings(c).load_format),
    "skip_tokenizer_init": (
        True,
        lambda c: engine_settings(c).extra["skip_tokenizer_init"] and not has_tokenizer(c),
    ),
    "enforce_eager": (False, lambda c: engine_settings(c).enforce_eager),
    "max_num_seqs": (3, lambda c: engine_settings(c).max_num_seqs),
    "trust_remote_code": (True, lambda c: engine_settings(c).trust_remote_code),
    "expose_http_server": (True, lambda c: VllmAsyncGenerationWorker(c)._expose_http_server),
    "num_replicas": (3, replicas),
    "backend": ("ray", lambda c: "ray" if on_ray(c) else "local"),
    "seed": (11, lambda c: engine_settings(c).seed),
}
COLOCATED_KEYS: dict[str, tuple[Any, Reading | str]] = {
    "enabled": (True, lambda c: engine_settings(c).sleep),
    "resources": (
        {"gpus_per_node": 8},
        "it must be left out: an engine takes tensor_parallel_size devices",
    ),
}
ON_THE_PAGE = {"async_engine", "__extra__"}


def check(config: dict[str, Any], value: Any, expected: Reading | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            engine_settings(config)
        return
    read = expected(config)
    assert read == (value["block_size"] if isinstance(value, dict) else value)
    with suppress(KeyError):
        assert expected({**CONFIG, "colocated": {"enabled": False}}) != read  # not by default


@pytest.mark.parametrize(
    "key", sorted(set(VllmConfig.__annotations__) - {"vllm_cfg", "colocated"} - ON_THE_PAGE)
)
def test_every_key_of_the_configuration_has_an_effect_or_is_refused(key: str) -> None:
    value, expected = KEYS[key]
    check({**CONFIG, key: value}, value, expected)


@pytest.mark.parametrize("key", sorted(set(VllmSpecificArgs.__annotations__) - ON_THE_PAGE))
def test_every_key_of_the_engine_has_an_effect_or_is_refused(key: str) -> None:
    value, expected = VLLM_KEYS[key]
    check({**CONFIG, "vllm_cfg": {**CONFIG["vllm_cfg"], key: value}}, value, expected)


@pytest.mark.parametrize("key", sorted(ColocatedConfig.__annotations__))
def test_every_key_of_colocation_has_an_effect_or_is_refused(key: str) -> None:
    value, expected = COLOCATED_KEYS[key]
    check({**CONFIG, "colocated": {"enabled": False, key: value}}, value, expected)


@pytest.mark.parametrize("name", sorted(ON_THE_PAGE))
def test_arguments_without_effect_are_listed_on_the_page(name: str) -> None:
    assert name in VllmSpecificArgs.__annotations__ or name in GenerationDatumSpec.__annotations__
    assert f"`{name}`" in PAGE


VALUES: dict[str, Any] = {
    "rank_prefix": 6001,
    "ip": "10.0.0.7",
    "port": 4711,
    "world_size": 7052,
    "train_world_size": 7050,
    "timeout_s": 7.53125,
    "state_dict_info": {"a.weight": ((3, 4), "torch.float32")},
    "session": 1301,
    "version": 1701,
    "path": "/a/folder",
    "num_threads": 1901,
    "tags": ["kv_cache"],
    "level": 8111,
    "endpoints": [{"cpu:0": ["place", "secret"]}] * 2,
}
"""Argument -> a value that nothing else has."""

APART = {
    "generate",
    "generate_async",
    "generate_text",
    "generate_text_async",
    "answer",
    "answer_text",
    "submit",
}
"""Their arguments are data and `greedy`, which other tests show to matter; or names of the methods below."""


class Recorder:
    """Stands for an engine or a worker, and records every call."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> Future[None]:
            self.heard.append((name, args, kwargs))
            return Future()

        return note


def parameters_of(function: Any) -> list[str]:
    """Return the names of a method's parameters, without the one that Ray adds to the methods of an actor's class."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def taking_arguments(kind: type) -> list[str]:
    """List the public methods of the class itself that take arguments."""
    methods = {
        name: m for name, m in vars(kind).items() if inspect.isfunction(m) and not name.startswith("_")
    }
    return sorted(name for name, m in methods.items() if len(parameters_of(m)) > 1 and name not in APART)


def heard_of(method: Any, heard: list[Any]) -> dict[str, Any]:
    """Call a method with a value for each argument; return the arguments whose values reached nobody."""
    arguments = {name: VALUES[name] for name in parameters_of(method)}
    if "endpoints" in arguments and inspect.iscoroutinefunction(method):
        arguments["endpoints"] = arguments["endpoints"][0]
    result = method(**arguments)
    if inspect.iscoroutine(result):
        asyncio.run(result)
    text = repr(heard)
    plain = {"state_dict_info": "a.weight", "endpoints": "secret"}
    return {name: value for name, value in arguments.items() if plain.get(name, repr(value)) not in text}


@pytest.mark.parametrize("name", taking_arguments(VllmAsyncGenerationWorker))
def test_every_argument_reaches_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, heard = VllmAsyncGenerationWorker(CONFIG), list[Any]()  # type: ignore[arg-type]

    async def note(*args: Any, **kwargs: Any) -> list[Any]:
        heard.append((args, kwargs))
        return []

    for method in ("call_workers", "ask_workers", "receive", "sleep", "wake"):
        monkeypatch.setattr(worker, method, note)
    if name == "wake_up_async":
        worker.state.sleep(keeps_weights=True)
    assert heard_of(getattr(worker, name), heard) == {}


@pytest.mark.parametrize("name", taking_arguments(VllmGeneration))
def test_every_argument_reaches_the_workers(name: str) -> None:
    generation, recorder = VllmGeneration.__new__(VllmGeneration), Recorder()
    generation.config = {**CONFIG, "colocated": {"enabled": True}, "vllm_cfg": {"max_model_len": 32}}  # type: ignore
    generation.workers = [recorder, recorder]  # type: ignore[list-item]
    assert heard_of(getattr(generation, name), recorder.heard) == {}


def test_constructors_take_the_documented_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constructors take these arguments and no others. `timeout` bounds every wait: here the wait for an engine that
    does not start.
    """
    expected = ["self", "config", "bundle_indices", "fraction_of_gpus", "seed"]
    assert parameters_of(VllmAsyncGenerationWorker.__init__) == expected
    assert parameters_of(VllmGenerationWorker.__init__) == [*expected, "timeout"]
    assert parameters_of(VllmGeneration.__init__) == ["self", "config", "timeout"]

    async def start(worker: VllmAsyncGenerationWorker) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(VllmAsyncGenerationWorker, "start", start)
    monkeypatch.setattr(config_module, "device_count", lambda: 0)
    with pytest.raises(
        TimeoutError, match="starting the engine for nobody/nothing did not finish within 0 s"
    ):
        VllmGeneration(CONFIG, timeout=0.01)  # type: ignore[arg-type]
