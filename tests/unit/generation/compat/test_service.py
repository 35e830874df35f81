"""The parts of AsyncVLLM that need no engine: forms of input, settings, the gate before updates, errors."""

import abc
import asyncio
import dataclasses
import itertools
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from generation.compat.nemo import generation as nemo
from generation.compat.nemo.config import VllmConfig
from generation.compat.torchrl import arguments
from generation.compat.torchrl import service as service_module
from generation.compat.torchrl.arguments import (
    PromptErrors,
    answer_or_error,
    answers,
    from_arguments,
    gpus_per_replica,
    of_replicas,
    prompt_dictionaries,
    resolve,
    results_of,
    start_timeout,
    wait_until_started,
)
from generation.compat.torchrl.replicas import LocalReplica, RayReplica, UpdateGate
from generation.compat.torchrl.service import AsyncVLLM, make_async_vllm_engine
from generation.compat.torchrl.weights import _untied
from generation.engine import ray_cluster
from generation.engine import ray_replicas as engine_replicas
from generation.engine.settings import EngineSettings
from generation.engine.thread import EngineThread
from generation.engine.vllm_compat import engine_arguments

IDS = {"prompt_token_ids": [1, 2, 3]}


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(**({"model": "m", "max_model_len": 64} | changes))


def test_every_entry_point_reports_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    calls: list[Callable[[], Any]] = [
        lambda: AsyncVLLM(settings()),
        lambda: AsyncVLLM.launch(settings()),
        lambda: AsyncVLLM.from_pretrained("m"),
        lambda: make_async_vllm_engine(model_name="m"),
    ]
    for call in calls:
        with pytest.raises(
            ImportError, match="vllm is not installed. Please install it with `pip install vllm`"
        ):
            call()


def test_importing_needs_neither_vllm_nor_ray() -> None:
    program = (
        "import sys\n"
        "sys.modules['vllm'] = sys.modules['ray'] = None\n"  # importing either raises ImportError
        "import generation.compat.torchrl.service, generation.compat.load_balancer\n"
        "from generation.engine.ray_cluster import join_once\n"
        "try:\n"
        "    join_once(1)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == "ray is not installed. Please install it with `pip install ray`."


@pytest.mark.parametrize(("text", "seconds"), [("600", 600.0), ("0.5", 0.5), (None, 300.0)])
def test_the_time_to_start_is_a_number(
    text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS", raising=False)
    else:
        monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", text)
    assert start_timeout() == seconds


@pytest.mark.parametrize("text", ["ten minutes", "", "-1", "0", "nan", "inf"])
def test_an_invalid_start_timeout_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", text)
    with pytest.raises(
        ValueError, match="TORCHRL_VLLM_TIMEOUT_SECONDS must be a positive number of seconds"
    ):
        start_timeout()


@pytest.mark.parametrize(
    ("prompts", "ids", "expected", "single"),
    [
        ("a b", None, [{"prompt": "a b"}], True),
        (["a", "b"], None, [{"prompt": "a"}, {"prompt": "b"}], False),
        (("a", "b"), None, [{"prompt": "a"}, {"prompt": "b"}], False),
        (["a"], None, [{"prompt": "a"}], False),
        ([], None, [], False),
        ([1, 2, 3], None, [IDS], True),  # one prompt, as for LLM.generate
        ((1, 2, 3), None, [IDS], True),
        ([[1, 2, 3], [4]], None, [IDS, {"prompt_token_ids": [4]}], False),
        (IDS, None, [IDS], True),
        ([IDS, "b", [4]], None, [IDS, {"prompt": "b"}, {"prompt_token_ids": [4]}], False),
        (None, [1, 2, 3], [IDS], True),
        (None, [[1, 2, 3]], [IDS], False),
    ],
)
def test_all_forms_of_input_are_understood(
    prompts: Any, ids: Any, expected: list[dict[str, Any]], single: bool
) -> None:
    assert prompt_dictionaries(prompts, ids) == (expected, single)


@pytest.mark.parametrize(
    ("prompts", "ids", "message"),
    [
        ("a", [1], "Cannot specify both prompts and prompt_token_ids"),
        (["a", "b"], [[1], [2]], "Cannot specify both prompts and prompt_token_ids"),
        (None, [], "prompt_token_ids cannot be empty"),
        (None, None, "Must specify either prompts or prompt_token_ids"),
        (None, ["a"], "prompt_token_ids holds token ids or lists of them, not a str"),
        (None, "abc", "prompt_token_ids must be a list, not a str"),
        ([1, "a"], None, "prompt 0 mixes token ids with something else"),
        (["a", 1.5], None, "prompt 1 is a float: give a text, token ids or a prompt dictionary"),
        (["a", []], None, "prompt 1 has no token ids"),
        ([{"text": "a"}], None, "prompt 0 is a dictionary without any of prompt_token_ids, prompt,"),
    ],
)
def test_an_invalid_prompt_is_named(prompts: Any, ids: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        prompt_dictionaries(prompts, ids)
    assert message in str(caught.value)


def test_the_callers_prompt_is_not_changed() -> None:
    ids = [1, 2]
    made = prompt_dictionaries(ids)[0][0]
    made["prompt_token_ids"].append(3)
    assert ids == [1, 2]


def test_the_gpus_of_a_replica_are_counted() -> None:
    assert (
        gpus_per_replica(
            SimpleNamespace(tensor_parallel_size=2, data_parallel_size=3, pipeline_parallel_size=4)
        )
        == 24
    )
    assert gpus_per_replica(SimpleNamespace(tensor_parallel_size=2)) == 2
    assert gpus_per_replica(settings(tensor_parallel_size=2, extra={"pipeline_parallel_size": 2})) == 4


def test_a_new_service_is_not_launched() -> None:
    service = AsyncVLLM(settings(tensor_parallel_size=2), num_replicas=3)
    assert len(service.service_id) == 8
    assert int(service.service_id, 16) >= 0
    assert not service.launched
    assert service.actors == []
    assert service.get_tp_size() == 2
    assert {service.get_random_actor_index() for _ in range(50)} == {0, 1, 2}
    draws = [[AsyncVLLM(settings(), 5).get_random_actor_index() for _ in range(1)] for _ in range(2)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.create_load_balancer(), "before creating load balancer"),
        (lambda s: s.get_num_unfinished_requests(), "before getting request counts"),
        (lambda s: s.get_cache_usage(), "before getting cache usage"),
        (
            lambda s: s.init_weight_update_group("127.0.0.1", 1),
            "before initializing weight update group",
        ),
        (lambda s: s.update_weights([]), "before updating weights"),
        (lambda s: s.load_weights_from_storage("x"), "before updating weights"),
        (lambda s: s.get_model_metadata(), "before asking for model metadata"),
        (lambda s: s.get_master_port(), "before asking for the port"),
        (lambda s: s.collective_rpc_futures("x"), "before calling workers"),
        (lambda s: s.collective_rpc("x"), "before calling workers"),
    ],
)
def test_nothing_works_before_the_launch(call: Callable[[AsyncVLLM], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"AsyncVLLM service must be launched {message}"):
        call(AsyncVLLM(settings()))


def test_shutdown_before_the_launch_does_nothing() -> None:
    service = AsyncVLLM(settings())
    service.shutdown()
    service.shutdown()
    assert not service.launched and service.actors == []


def test_constructor_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="num_replicas must be at least 1, not 0"):
        AsyncVLLM(settings(), 0)
    with pytest.raises(ValueError, match="actor_class is for Ray's actors"):
        AsyncVLLM(settings(), actor_class=object, backend="local")
    with pytest.raises(ValueError, match="set num_replicas instead"):
        AsyncVLLM(settings(extra={"data_parallel_size": 2}))


def test_engine_arguments_are_kept_and_the_callers_stay_as_they_are() -> None:
    caller_settings = settings(extra={"block_size": 16})
    service = AsyncVLLM(caller_settings, enable_prefix_caching=False)
    assert caller_settings.extra == {"block_size": 16}
    assert service.settings.extra == {"block_size": 16, "enable_prefix_caching": False}
    assert engine_arguments(service.settings)["enable_prefix_caching"] is False


def test_prefix_caching_is_on_unless_switched_off() -> None:
    assert (
        engine_arguments(from_arguments({"model": "m", "max_model_len": 64}))["enable_prefix_caching"]
        is True
    )
    off = from_arguments({"model": "m", "max_model_len": 64, "enable_prefix_caching": False})
    assert engine_arguments(off)["enable_prefix_caching"] is False


def test_make_async_vllm_engine_starts_engines_with_its_arguments() -> None:
    made = resolve(
        "m", 2, True, True, max_model_len=64, kv_cache_memory_bytes=7, block_size=16, dtype="bfloat16"
    )
    assert (made.model, made.tensor_parallel_size, made.enforce_eager, made.fp32_head) == (
        "m",
        2,
        False,
        True,
    )
    assert (made.kv_cache_bytes, made.dtype, made.extra) == (7, "bfloat16", {"block_size": 16})
    assert resolve("m", max_model_len=64).tensor_parallel_size == 1
    assert resolve("m", 2, tensor_parallel_size=2, max_model_len=64).tensor_parallel_size == 2
    assert resolve("m", tensor_parallel_size=4, max_model_len=64).tensor_parallel_size == 4
    with pytest.raises(
        ValueError, match="pipeline_parallel_size is 2: it must be 1, since weights reach tensor"
    ):
        resolve("m", pipeline_parallel_size=2, max_model_len=64)
    with pytest.raises(ValueError, match="tensor_parallel_size must be set to 2"):
        resolve("m", 2, tensor_parallel_size=4, max_model_len=64)
    with pytest.raises(ValueError, match="worker_extension_cls is set by the service"):
        resolve("m", max_model_len=64, worker_extension_cls="x.Y")
    with pytest.raises(
        ValueError, match="distributed_executor_backend: leave it out, and set backend to ray"
    ):
        resolve("m", max_model_len=64, distributed_executor_backend="ray")


def test_the_compile_argument_is_not_passed_on_as_a_compilation_config() -> None:
    assert resolve("m", compile=False, max_model_len=64).enforce_eager
    assert "compilation_config" not in resolve("m", compile=True, max_model_len=64).extra
    engine_settings = resolve(
        "m", compile=True, max_model_len=64, compilation_config={"level": 0}, enforce_eager=True
    )
    assert engine_settings.enforce_eager
    assert engine_settings.extra == {"compilation_config": {"level": 0}}


def test_the_default_context_length_is_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "max_position_embeddings": 77})
    )
    assert resolve(str(tmp_path)).max_model_len == 77


def test_a_float32_head_is_vllms_head_dtype() -> None:
    plain = settings(extra={"hf_overrides": {"rope_theta": 1.0}})
    assert "hf_overrides" not in engine_arguments(settings())
    both = engine_arguments(dataclasses.replace(plain, fp32_head=True))["hf_overrides"]
    assert both == {"rope_theta": 1.0, "head_dtype": "float32"}
    assert plain.extra == {"hf_overrides": {"rope_theta": 1.0}}


def test_devices_are_dealt_out() -> None:
    pair = settings(tensor_parallel_size=2)
    assert [s.device_indices for s in of_replicas(pair, 2, 4, shared=True)] == [(0, 1), (2, 3)]
    assert [s.device_indices for s in of_replicas(pair, 2, 6, shared=True)] == [(2, 3), (4, 5)]
    assert [s.device_indices for s in of_replicas(pair, 2, 8, shared=False)] == [(0, 1), (0, 1)]
    four_devices = dataclasses.replace(pair, device_indices=(7, 6, 5, 4))
    assert [s.device_indices for s in of_replicas(four_devices, 2, 0, shared=True)] == [(7, 6), (5, 4)]
    on_cpu = of_replicas(pair, 2, 0, shared=True)
    assert all(s.on_cpu and len(s.cpu_cores) == 2 for s in on_cpu)
    with pytest.raises(ValueError, match="2 replicas of 2 devices each need 4 devices, not 3"):
        of_replicas(pair, 2, 3, shared=True)
    with pytest.raises(ValueError, match="1 replicas of 2 devices each need 2 devices, not 4"):
        of_replicas(four_devices, 1, 0, shared=True)


def test_replicas_on_a_cpu_share_what_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas on one CPU divide its free memory. vLLM would give 0.9 of it to each, and the second would not start."""
    monkeypatch.setattr(arguments.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    plain = from_arguments({"model": "m", "max_model_len": 64})
    for count, gib in ((1, 2), (2, 1), (4, 0.5)):
        made = of_replicas(plain, count, 0, shared=True)
        assert [s.kv_cache_bytes for s in made] == [int(gib * 2**30)] * count
    monkeypatch.setattr(arguments.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert of_replicas(plain, 1, 0, shared=True)[0].kv_cache_bytes == 4 << 30
    for memory_limit in ({"kv_cache_memory_bytes": 7}, {"gpu_memory_utilization": 0.1}):
        asked = from_arguments({"model": "m", "max_model_len": 64} | memory_limit)
        [made] = of_replicas(asked, 1, 0, shared=True)
        assert engine_arguments(made) == engine_arguments(asked)
    assert of_replicas(plain, 2, 2, shared=True)[0].kv_cache_bytes is None


def test_weights_are_sent_from_a_gpu_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    service = AsyncVLLM(settings(), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for current, taken, expected in [(0, {1, 2}, 0), (2, {1, 2}, 0), (1, {0}, 1), (0, set(), 0)]:
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        service._taken = taken
        assert service._sending_device() == torch.device("cuda", expected)
    service._taken = {0, 1, 2}
    with pytest.raises(
        RuntimeError, match="every GPU of this machine has an engine.*use load_weights_from_storage"
    ):
        service._sending_device()


def test_ranks_of_the_workers() -> None:
    """Two engines of two workers form a world of five with the trainer, rank 0; their first workers have ranks
    1 and 3.
    """

    class Recorder:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def refer(self, *call: Any) -> "Future[Any]":
            self.calls.append(call)
            return ended(None)

    service = AsyncVLLM(settings(tensor_parallel_size=2), 2)
    recorders = [Recorder(), Recorder()]
    service.actors += recorders  # type: ignore[arg-type]
    service._thread = SimpleNamespace()  # type: ignore[assignment]
    futures = service.init_weight_update_group("127.0.0.1", "4711")
    assert [future.result(0) for future in futures] == [None, None]
    assert [r.calls for r in recorders] == [
        [("ask_workers", "init_collective", rank - 1, "127.0.0.1", 4711, 5, 1, 300.0)] for rank in (1, 3)
    ]


def test_arguments_that_vllm_has_no_more_are_refused() -> None:
    service = AsyncVLLM(settings())
    with pytest.raises(ValueError, match="guided_options_request: set SamplingParams"):
        service.generate("a", guided_options_request=object())
    with pytest.raises(ValueError, match="prompt_adapter_request: vLLM has no prompt adapters any more"):
        service.generate("a", prompt_adapter_request=object())
    with pytest.raises(TypeError, match="generate has no argument 'max_tokens'"):
        service.generate("a", max_tokens=3)


def test_an_update_runs_alone_and_no_request_is_lost() -> None:
    async def scene() -> list[str]:
        gate, events = UpdateGate(), []

        async def request(name: str, steps: int) -> None:
            async with gate.request():
                events.append(f"{name} in")
                for _ in range(steps):
                    await asyncio.sleep(0)
                events.append(f"{name} out")

        async def update() -> None:
            async with gate.update(10):
                events.append("update in")
                await asyncio.sleep(0.01)
                events.append("update out")

        early = [asyncio.create_task(request(f"early{i}", 5)) for i in range(2)]
        await asyncio.sleep(0)
        updating = asyncio.create_task(update())
        await asyncio.sleep(0)
        late = [asyncio.create_task(request(f"late{i}", 1)) for i in range(2)]
        await asyncio.gather(*early, updating, *late)
        return events

    events = asyncio.run(scene())
    start, end = events.index("update in"), events.index("update out")
    assert end == start + 1
    assert set(events[:start]) == {f"early{i} {way}" for i in range(2) for way in ("in", "out")}
    assert len(events) == 10


async def test_an_update_that_cannot_begin_leaves_the_gate_open() -> None:
    gate = UpdateGate()
    async with gate.request():
        with pytest.raises(
            TimeoutError, match="1 requests did not end within 0 s, so no weights were updated"
        ):
            async with gate.update(0.01):
                raise AssertionError("the request was still inside")
    async with gate.request():  # and goes on
        pass
    async with gate.update(1):
        with pytest.raises(RuntimeError, match="a weight update is under way already"):
            async with gate.update(1):
                pass


def ended(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def test_one_failing_prompt_does_not_lose_the_others() -> None:
    futures = [ended("a"), ended(TimeoutError("late")), ended("c"), ended(ValueError("bad"))]
    results = [answer_or_error(future, place) for place, future in enumerate(futures)]
    with pytest.raises(PromptErrors, match="2 of 4 prompts failed") as caught:
        answers(results, single=False, return_exceptions=False)
    assert caught.value.outputs == ["a", None, "c", None]
    assert [error.__notes__ for error in caught.value.exceptions] == [["prompt 1"], ["prompt 3"]]
    timeouts, other_errors = caught.value.split(TimeoutError)
    assert isinstance(timeouts, PromptErrors)
    assert timeouts.outputs == ["a", None, "c", None]
    assert other_errors is not None
    assert answers(results, single=False, return_exceptions=True) == results
    with pytest.raises(TimeoutError, match="late"):
        answers(results[1:2], single=True, return_exceptions=False)
    assert answers(results[:1], single=True, return_exceptions=False) == "a"


def test_a_batch_that_only_timed_out_is_a_timeout() -> None:
    futures = [ended("a"), ended(TimeoutError("late")), ended(TimeoutError("later"))]
    results = [answer_or_error(future, place) for place, future in enumerate(futures)]
    with pytest.raises(TimeoutError, match="2 of 3 prompts failed; .*; the first error: late") as caught:
        answers(results, single=False, return_exceptions=False)
    assert caught.value.outputs == ["a", None, None]  # type: ignore[attr-defined]
    assert caught.value.exceptions == tuple(results[1:])  # type: ignore[attr-defined]


def test_a_service_of_local_processes_is_not_pickled() -> None:
    with pytest.raises(
        TypeError,
        match="engines in local processes cannot be used from other processes: set backend to ray",
    ):
        pickle.dumps(AsyncVLLM(settings()))
    with pytest.raises(RuntimeError, match="must be launched before pickling"):
        pickle.dumps(AsyncVLLM(settings(), backend="ray"))


def test_only_the_owner_of_engines_updates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayReplica, "watch", AsyncMock())
    copy = AsyncVLLM._copy(
        settings(), "abc", [("first", object())], 3, (["requests"], {"overload_threshold": 2.0})
    )
    try:
        assert (copy.service_id, copy.weight_version, len(copy.actors)) == ("abc", 3, 1)
        assert copy._load_balancer is not None and copy._load_balancer.overload_threshold == 2.0
        updates: list[Callable[[], Any]] = [
            lambda: copy.update_weights(iter([("a", torch.zeros(1))])),
            lambda: copy.load_weights_from_storage("x"),
            lambda: copy.init_weight_update_group("127.0.0.1", 1),
            copy.get_master_port,
            copy.receive_weights,
        ]
        for update in updates:
            with pytest.raises(
                RuntimeError, match="for the process that launched the service, of which this is a copy"
            ):
                update()
    finally:
        copy.shutdown()
    assert not copy.launched
    with pytest.raises(RuntimeError, match="has been shut down: get another copy from the owner"):
        copy.start()


def test_ray_is_joined_as_a_run_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service starts Ray on loopback, closed to others; a cluster that the program has joined is left as it was."""
    joined, left = list[int](), list[str]()
    monkeypatch.setattr(ray_cluster, "join_cluster", lambda cpus, folder: joined.append(cpus))
    for initialized in (True, False):
        ray = SimpleNamespace(
            is_initialized=lambda state=initialized: state, shutdown=lambda: left.append("cluster")
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        ray_cluster.join_once(3)()
    assert joined == [3] and left == ["cluster"]


def test_a_cluster_that_cannot_be_joined_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    ray = SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: left.append("cluster"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "join_cluster", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ray_cluster.join_once(3)
    assert left == ["cluster"]


def test_an_actor_that_cannot_be_made_leaves_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(nemo, "join_once", lambda _: lambda: left.append("cluster"))
    monkeypatch.setattr(nemo, "cluster_room", lambda: 1 / 0)
    config = VllmConfig(backend="vllm", model_name="m", max_new_tokens=8, temperature=1.0)
    config["vllm_cfg"] = {"max_model_len": 64, "backend": "ray"}
    with pytest.raises(ZeroDivisionError):
        nemo.VllmGenerationWorker(config)
    assert left == ["cluster"]


def test_an_actor_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(engine_replicas.Actor):
        def __init__(self) -> None:
            self.killed = False

        async def call(self, method: str, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(3600)

        def kill(self) -> None:
            self.killed = True

    monkeypatch.setattr(engine_replicas, "_STOP_SECONDS", 0.01)
    actor = Silent()
    asyncio.run(actor.close())
    assert actor.killed


@pytest.mark.parametrize(
    "method", ["init_weight_transfer_engine", "update_weights_native", "sleep", "wake_up"]
)
def test_the_sync_scheme_of_torchrl_is_refused_by_name(method: str) -> None:
    replica = LocalReplica(settings(), EngineThread())
    with pytest.raises(
        NotImplementedError, match=f"{method} is a method for TorchRL's VLLMWeightSyncScheme"
    ):
        getattr(replica, method)
    with pytest.raises(AttributeError, match="LocalReplica has no attribute 'wakeup'"):
        replica.wakeup  # noqa: B018


def test_a_cluster_of_its_own_ends_with_a_service_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(service_module, "join_once", lambda cpus: lambda: ends.append(cpus))
    monkeypatch.setattr(service_module, "gpu_count", lambda backend: 5)
    service = AsyncVLLM(settings(tensor_parallel_size=2), 3, backend="ray")
    with pytest.raises(ValueError, match="3 replicas of 2 devices each need 6 devices, not 5"):
        service.start()
    assert ends == [6] and not service.launched
    service.shutdown()
    assert ends == [6]


def test_a_tied_head_is_accepted_if_it_equals_the_embedding() -> None:
    names, one, other = ["model.embed_tokens.weight", "a"], torch.ones(2, 2), torch.zeros(2, 2)
    weights = {"model.embed_tokens.weight": one, "lm_head.weight": one.clone(), "a": other}
    for order in itertools.permutations(weights):
        assert {*names} == {name for name, _ in _untied(((n, weights[n]) for n in order), names)}
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
            [*_untied(((n, other if "head" in n else weights[n]) for n in order), names)]
    untied = [*names, "lm_head.weight"]
    assert [name for name, _ in _untied(iter(weights.items()), untied)] == [*weights]
    with pytest.raises(ValueError, match="differs"):
        [*_untied(iter([("lm_head.weight", one)]), ["a"])]


@pytest.mark.parametrize("base_is_imported", [True, False])
def test_a_service_is_an_engine_of_torchrl_where_torchrl_is_imported(
    monkeypatch: pytest.MonkeyPatch, base_is_imported: bool
) -> None:
    """A service passes the instance check of TorchRL's clients; tests/engine has the real clients."""

    class RLvLLMEngine(abc.ABC):  # noqa: B024
        pass

    home = "torchrl.modules.llm.backends.vllm"
    monkeypatch.setitem(sys.modules, "torchrl", SimpleNamespace())
    if base_is_imported:
        monkeypatch.setitem(sys.modules, f"{home}.base", SimpleNamespace(RLvLLMEngine=RLvLLMEngine))
    else:
        monkeypatch.delitem(sys.modules, f"{home}.base", raising=False)

    class Derived(AsyncVLLM):
        pass

    for kind in (AsyncVLLM, Derived):
        service = kind(settings())
        assert type(service).__name__ == "AsyncVLLM" and type(service).__module__.startswith(home)
        assert isinstance(service, kind) and isinstance(service, RLvLLMEngine) == base_is_imported
    monkeypatch.delitem(sys.modules, "torchrl")
    assert type(AsyncVLLM(settings())) is AsyncVLLM


def test_a_cancelled_prompt_says_why() -> None:
    future: Future[Any] = Future()
    future.cancel()
    assert "the service was shut down before" in str(answer_or_error(future, 0))


def test_a_load_from_a_folder_that_fails_on_one_engine_is_over_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load that fails on one engine ends on all, or the next load would find an engine that is still loading."""
    slow: Future[int] = Future()
    failed = ended(RuntimeError("the folder is empty"))
    monkeypatch.setattr(AsyncVLLM, "_updates", lambda *_: [failed, slow])
    threading.Timer(0.2, slow.set_result, [3]).start()
    with pytest.raises(RuntimeError, match="the folder is empty"):
        AsyncVLLM.__new__(AsyncVLLM).load_weights_from_storage("nothing")
    assert slow.done()


def test_waits_for_engines_end() -> None:
    never: Future[Any] = Future()
    assert results_of([ended([1]), ended([2])], 1, "x") == [[1], [2]]
    with pytest.raises(TimeoutError, match="reading: no answer from engine 1 within 0 s"):
        results_of([ended(1), never], 0.01, "reading")
    with pytest.raises(KeyError):
        results_of([never, ended(KeyError("x"))], 60, "reading")  # at once, not after a minute
    with pytest.raises(TimeoutError) as caught:
        wait_until_started([never], 0.01)
    assert "TORCHRL_VLLM_TIMEOUT_SECONDS allows more time" in caught.value.__notes__[0]
