"""Every argument documented for TorchRL's AsyncVLLM is used, refused, or listed in docs/interfaces.md."""

import inspect
import re
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

import sharding
from generation.compat.load_balancer import EngineLoad, LoadBalancer
from generation.compat.torchrl import service as service_module
from generation.compat.torchrl.replicas import ServiceReplica
from generation.compat.torchrl.service import AsyncVLLM, make_async_vllm_engine
from generation.compat.torchrl.weights import WeightUpdates
from generation.engine.settings import EngineSettings
from sharding.worker.extension import VllmInternalWorkerExtension
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "interfaces.md").read_text()
[TORCHRL] = (part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith("TorchRL"))


class Asked(ServiceReplica):
    """A replica that records the calls of its engine, and finishes them all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def submit(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        self.calls.append(
            (method, args, {name: value for name, value in kwargs.items() if name != "timeout"}, kwargs)
        )
        future: Future[Any] = Future()
        outcome = {"error": None, "weights": {"a": [[1], "float32"]}, "weight_version": 0}
        future.set_result(SimpleNamespace(**outcome) if method == "generate" else [outcome])
        return future

    async def close(self) -> None:
        """Nothing runs."""


def launched() -> AsyncVLLM:
    """Return a service of two recording replicas in place of engines."""
    made = AsyncVLLM(EngineSettings(model="m", max_model_len=64), 2)
    made.actors += [Asked(), Asked()]
    made._thread = SimpleNamespace()  # type: ignore[assignment]
    made.create_load_balancer("round-robin")
    return made


def calls_of(work: Callable[[AsyncVLLM], Any]) -> str:
    """Return, as text, the engine calls that a method leads to, and its result."""
    service = launched()
    result = work(service)
    return repr([[call[:3] for call in asked.calls] for asked in service.actors]) + type(result).__name__  # type: ignore[attr-defined]


def settings_of(**arguments: Any) -> str:
    """Return, as text, the arguments with which `from_pretrained` launches a service."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            service_module.AsyncVLLM, "launch", lambda *args, **kwargs: made.append((args, kwargs))
        )
        AsyncVLLM.from_pretrained(**({"model_name": "m", "max_model_len": 64} | arguments))
    return repr(made)


def made_of(*args: Any, **kwargs: Any) -> str:
    service = AsyncVLLM(*args, **kwargs)
    return repr(
        (
            service.settings,
            service.num_replicas,
            service.backend,
            service._actor_class,
            service._carriers,
        )
    )


def asks(**arguments: Any) -> Callable[[], str]:
    return lambda: calls_of(lambda service: service.generate(**({"prompts": ["a"]} | arguments)))


def rpc(name: str, **arguments: Any) -> Callable[[], str]:
    return lambda: calls_of(lambda service: getattr(service, name)(**({"method": "x"} | arguments)))


def chosen(**arguments: Any) -> str:
    balancer = LoadBalancer(**({"actors": [EngineLoad()] * 2} | arguments))
    settings = (
        len(balancer.actors),
        balancer.strategies,
        balancer.prefix_length,
        balancer.overload_threshold,
    )
    return repr((*settings, balancer.overload_floor))


def drawn(seed: int) -> list[int]:
    balancer = LoadBalancer([EngineLoad() for _ in range(9)], "requests", seed=seed)
    return [balancer.select_actor() for _ in range(9)]


ENGINE = EngineSettings(model="m", max_model_len=64)
OTHER_ENGINE = EngineSettings(model="m", max_model_len=65)
TWO_MODULES = SimpleNamespace(WORKER_EXTENSION="a.B")
CHANGED: dict[Callable[..., Any], dict[str, tuple[Callable[[], Any], Callable[[], Any]]]] = {
    AsyncVLLM.__init__: {
        "engine_args": (lambda: made_of(ENGINE), lambda: made_of(OTHER_ENGINE)),
        "num_replicas": (lambda: made_of(ENGINE), lambda: made_of(ENGINE, 2)),
        "actor_class": (lambda: made_of(ENGINE), lambda: made_of(ENGINE, 1, Asked)),
        "enable_prefix_caching": (lambda: made_of(ENGINE), lambda: made_of(ENGINE, 1, None, False)),
        "backend": (lambda: made_of(ENGINE), lambda: made_of(ENGINE, backend="ray")),
        "carriers": (lambda: made_of(ENGINE), lambda: made_of(ENGINE, carriers=TWO_MODULES)),
    },
    AsyncVLLM.from_pretrained: {
        "model_name": (settings_of, lambda: settings_of(model_name="n")),
        **{
            name: (settings_of, lambda name=name, value=value: settings_of(**{name: value}))
            for name, value in {  # type: ignore[misc]
                "num_devices": 2,
                "num_replicas": 2,
                "verbose": False,
                "compile": False,
                "enable_fp32_output": True,
                "options": 3,
            }.items()
            if name != "options"
        },
        "options": (settings_of, lambda: settings_of(max_num_seqs=3)),
    },
    AsyncVLLM.generate: {
        "prompts": (asks(), asks(prompts=["b"])),
        "sampling_params": (asks(), asks(sampling_params=SamplingParams(max_tokens=3))),
        "prompt_token_ids": (asks(), asks(prompts=None, prompt_token_ids=[[1]])),
        "lora_request": (asks(), asks(lora_request="adapter")),
        "timeout_seconds": (asks(), asks(timeout_seconds=3.0)),
        "actor_index": (asks(), asks(actor_index=1)),
    },
    AsyncVLLM.collective_rpc: {
        "method": (rpc("collective_rpc"), rpc("collective_rpc", method="y")),
        "args": (rpc("collective_rpc"), rpc("collective_rpc", args=(1,))),
        "kwargs": (rpc("collective_rpc"), rpc("collective_rpc", kwargs={"a": 1})),
    },
    AsyncVLLM.collective_rpc_futures: {
        "method": (rpc("collective_rpc_futures"), rpc("collective_rpc_futures", method="y")),
        "args": (rpc("collective_rpc_futures"), rpc("collective_rpc_futures", args=(1,))),
        "kwargs": (rpc("collective_rpc_futures"), rpc("collective_rpc_futures", kwargs={"a": 1})),
    },
    LoadBalancer.__init__: {
        "actors": (chosen, lambda: chosen(actors=[EngineLoad()] * 3)),
        "strategy": (chosen, lambda: chosen(strategy="requests")),
        "prefix_length": (chosen, lambda: chosen(prefix_length=2)),
        "overload_threshold": (chosen, lambda: chosen(overload_threshold=3.0)),
        "overload_floor": (chosen, lambda: chosen(overload_floor=9)),
        "seed": (lambda: drawn(0), lambda: drawn(1)),
    },
    WeightUpdates.load_weights_from_storage: {
        "path": (
            lambda: calls_of(lambda s: _read(s, "a")),
            lambda: calls_of(lambda s: _read(s, "b")),
        ),
        "num_threads": (
            lambda: calls_of(lambda s: _read(s, "a")),
            lambda: calls_of(lambda s: _read(s, "a", 3)),
        ),
    },
    WeightUpdates.init_weight_update_group: {
        "master_address": (
            lambda: calls_of(lambda s: s.init_weight_update_group("a", 1)),
            lambda: calls_of(lambda s: s.init_weight_update_group("b", 1)),
        ),
        "master_port": (
            lambda: calls_of(lambda s: s.init_weight_update_group("a", 1)),
            lambda: calls_of(lambda s: s.init_weight_update_group("a", "2")),
        ),
    },
}
ELSEWHERE: dict[Callable[..., Any], dict[str, str]] = {  # where an argument is tested by what it does
    AsyncVLLM.generate: {"use_tqdm": "row", "return_exceptions": "row", "removed": "refused"},
    AsyncVLLM.collective_rpc: {"timeout": "test_waits_for_engines_end"},
    AsyncVLLM.collective_rpc_futures: {"timeout": "row: collective_rpc_futures"},
    AsyncVLLM.create_load_balancer: dict.fromkeys(
        ("strategy", "options"), "test_the_load_balancer_examples_run"
    ),
    AsyncVLLM.launch: {
        **dict.fromkeys(("engine_args", "num_replicas"), "test_engine_args_can_be_given_directly"),
        "options": "row: backend",
    },
    AsyncVLLM.get_num_unfinished_requests: {"actor_index": "test_calls_can_name_an_engine_by_its_index"},
    AsyncVLLM.get_cache_usage: {"actor_index": "test_calls_can_name_an_engine_by_its_index"},
    AsyncVLLM.shutdown: {"drain_seconds": "test_shutdown_lets_requests_end_and_leaves_no_process"},
    LoadBalancer.select_actor: {
        "prompt": "test_the_load_balancer_examples_run",
        "request_context": "row",
    },
    WeightUpdates.update_weights: {
        "weights": "test_weights_reach_engines_by_broadcast",
        "version": "test_a_sender_of_the_trainers_own_updates_the_engines",
    },
    VllmInternalWorkerExtension.init_weight_update_group: dict.fromkeys(
        ("master_address", "master_port", "rank_offset", "world_size"), "trainers_group"
    ),
    VllmInternalWorkerExtension.update_weight: dict.fromkeys(
        ("name", "dtype_name", "shape", "timeout_s"),
        "test_torchrls_update_weight_sends_a_version_weight_by_weight",
    ),
    sharding.stateless_init_process_group: dict.fromkeys(
        ("master_address", "master_port", "rank", "world_size", "device", "timeout"), "trainers_group"
    ),
}
TESTS = "".join(
    path.read_text()
    for path in sorted((ROOT / "tests").rglob("compat/*.py"))
    if path.name[5:12] != "torchrl"
)


def _read(service: AsyncVLLM, *arguments: Any) -> Any:
    with pytest.raises(TypeError):  # an outcome in place of a version
        service.load_weights_from_storage(*arguments)


def documented(call: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(call).parameters) - {"self", "cls"}


@pytest.mark.parametrize("call", {**CHANGED, **ELSEWHERE}, ids=lambda call: call.__qualname__)
def test_every_argument_has_its_line_here(call: Callable[..., Any]) -> None:
    assert {*CHANGED.get(call, {}), *ELSEWHERE.get(call, {})} == documented(call)


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call, names in CHANGED.items() for name in names],
    ids=lambda part: getattr(part, "__qualname__", part),
)
def test_each_argument_changes_the_result_of_its_call(call: Callable[..., Any], name: str) -> None:
    plain, changed = CHANGED[call][name]
    assert plain() == plain() != changed()


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call, names in ELSEWHERE.items() for name in names],
    ids=lambda part: getattr(part, "__qualname__", part),
)
def test_other_arguments_have_a_test_or_a_row(call: Callable[..., Any], name: str) -> None:
    where = ELSEWHERE[call][name]
    if where.startswith("row"):
        assert f"`{where.partition(': ')[2] or name}" in TORCHRL
    elif where != "refused":
        assert f"def {where}(" in TESTS


def test_arguments_without_a_counterpart_are_refused_with_the_remedy() -> None:
    service, refused = (
        launched(),
        [
            (lambda: service.generate("a", prompt_adapter_request=1), "leave it out"),
            (
                lambda: service.generate("a", guided_options_request=1),
                r"structured_outputs=\.\.\.\) instead",
            ),
            (
                lambda: AsyncVLLM(
                    EngineSettings(model="m", max_model_len=64, extra={"data_parallel_size": 2})
                ),
                "set num_replicas instead",
            ),
            (
                lambda: settings_of(num_devices=2, tensor_parallel_size=3),
                "tensor_parallel_size must be set to 2",
            ),
            (lambda: settings_of(worker_extension_cls="a.B"), "set by the service: leave it out"),
            (lambda: settings_of(pipeline_parallel_size=2), "raise tensor_parallel_size instead"),
            (lambda: service.collective_rpc("x", kwargs={"timeout": 5}), "pass timeout=... beside it"),
            (
                lambda: settings_of(distributed_executor_backend="ray"),
                "set backend to ray for engines in actors",
            ),
            (lambda: service.__reduce__(), "set backend to ray"),
            (
                lambda: service.init_weight_update_group("127.0.0.1"),
                "takes both master_address and master_port",
            ),
            (
                lambda: sharding.stateless_init_process_group(None, 1, 1, 2),
                "joins with init_weight_update_group",
            ),
        ],
    )
    for work, remedy in refused:
        with pytest.raises((ValueError, TypeError), match=remedy):
            work()


def test_the_arguments_of_both_ways_to_make_a_service_agree() -> None:
    arguments = documented(make_async_vllm_engine) - {"engine_args", "backend", "carriers"}
    assert arguments == documented(AsyncVLLM.from_pretrained) - {"options"}


def test_arguments_by_position_are_those_of_torchrl() -> None:
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            service_module.AsyncVLLM, "launch", lambda *args, **kwargs: made.append((args, kwargs))
        )
        AsyncVLLM.from_pretrained("m", 2, 3, False, False, True, max_model_len=64)
    named = {
        "num_devices": 2,
        "num_replicas": 3,
        "verbose": False,
        "compile": False,
        "enable_fp32_output": True,
    }
    assert repr(made) == settings_of(**named) != settings_of(**(named | {"verbose": True}))
