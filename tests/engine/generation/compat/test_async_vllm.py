"""AsyncVLLM on two real engines in processes of this machine: answers, deadlines, weights, and a clean end."""

import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams

import sharding
from generation.compat.torchrl.arguments import PromptErrors, as_settings
from generation.compat.torchrl.service import AsyncVLLM, make_async_vllm_engine
from generation.engine import forkserver
from generation.engine.lifecycle import EngineStateError
from generation.engine.vllm_compat import engine_arguments
from sharding.remote.broadcast import CollectiveSender
from sharding.remote.storage import StorageWriter
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource
from tests.support.colocated import HfPolicy
from tests.support.polling import wait_until
from trainer.learning.batching import micro_batches
from trainer.policy.module import PolicyModule, outputs
from trainer.types import Sample

SMALL = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[AsyncVLLM]:
    with make_async_vllm_engine(
        model_name=str(model), num_replicas=2, verbose=False, compile=False, **SMALL
    ) as service:
        yield service


def engine_processes() -> list[psutil.Process]:
    """Return the engines' processes below this one."""
    children = [
        p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE
    ]
    # Helpers of this process's own multiprocessing, and with -n 0 the server of tests/support/forked.py
    helpers = ("resource_tracker", "forkserver", "forked import serve")
    engines = [p for p in children if p.pid != forkserver._server._forkserver_pid]
    return [p for p in engines if not any(helper in " ".join(p.cmdline()) for helper in helpers)]


def nothing_unfinished(service: AsyncVLLM) -> bool:
    """Wait until all requests count as finished, and tell whether the engines agree.

    A request is counted a moment after its answer has come.
    """
    wait_until(lambda: not any(service.get_num_unfinished_requests()), 30)
    return unfinished_in_engines(service) == [0, 0]


def unfinished_in_engines(service: AsyncVLLM) -> list[int]:
    return [replica.submit("get_num_unfinished_requests").result(30) for replica in service.actors]


def gap(policy: HfPolicy, output: Any) -> float:
    """Largest difference between an output's log-probabilities and the policy's."""
    sampled = list(output.outputs[0].token_ids)
    expected = policy.logprobs(list(output.prompt_token_ids) + sampled)[
        len(output.prompt_token_ids) - 1 :
    ]
    sampled_logprobs = [
        at[token].logprob for at, token in zip(output.outputs[0].logprobs, sampled, strict=True)
    ]
    return max(abs(a - b) for a, b in zip(expected, sampled_logprobs, strict=True))


def test_a_list_of_prompts_gives_a_list_of_outputs_and_a_single_prompt_one_output(
    service: AsyncVLLM,
) -> None:
    one = service.generate([5, 6, 7], GREEDY)
    assert list(one.prompt_token_ids) == [5, 6, 7]
    assert one.finished
    same = [
        service.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY),
        *service.generate([[5, 6, 7]], GREEDY),
        *service.generate(({"prompt_token_ids": [5, 6, 7]},), GREEDY),
        service.generate(prompt_token_ids=[5, 6, 7], sampling_params=GREEDY),
        *service.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=GREEDY),
    ]
    assert {tuple(o.outputs[0].token_ids) for o in same} == {tuple(one.outputs[0].token_ids)}
    text = service.generate("1+1=", GREEDY, use_tqdm=True)
    assert list(text.prompt_token_ids) == service.get_tokenizer().encode("1+1=")
    assert service.generate([]) == []
    assert len(service.generate("1+1=").outputs[0].token_ids) <= 16  # vLLM's own default


def test_outputs_keep_the_order_and_parameters_of_prompts(service: AsyncVLLM) -> None:
    """Outputs come in the order of prompts, though answers end in another; one prompt has several answers."""
    lengths = [40, 1, 23, 2, 60, 5, 9, 3]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, n=2 if n == 5 else 1) for n in lengths]
    outputs = service.generate([[10 + i] for i in range(8)], params)
    assert [list(o.prompt_token_ids) for o in outputs] == [[10 + i] for i in range(8)]
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [len(o.outputs) for o in outputs] == [2 if n == 5 else 1 for n in lengths]
    # The caller's objects are not changed
    assert {p.output_kind for p in params} == {SamplingParams().output_kind}
    with pytest.raises(ValueError, match="2 sampling parameters were given for 3 prompts"):
        service.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_a_deadline_ends_one_prompt_and_its_request_in_the_engine(service: AsyncVLLM) -> None:
    params = [SamplingParams(max_tokens=1), ENDLESS, SamplingParams(max_tokens=2, ignore_eos=True)]
    for replica in range(2):
        for seconds in (0.12, 0.24, 0.48, 0.96):  # as the short prompts need on a busy machine
            with pytest.raises(TimeoutError) as caught:
                service.generate(["a", "b", "c"], params, timeout_seconds=seconds, actor_index=replica)
            missing = [output is None for output in caught.value.outputs]  # type: ignore[attr-defined]
            if not missing[0] and not missing[2]:
                break
        assert missing == [False, True, False]
        [error] = caught.value.exceptions  # type: ignore[attr-defined]
        assert f"vLLM generation timed out after {seconds:g} seconds" in str(error)
    with pytest.raises(PromptErrors):  # one prompt fails for another reason
        service.generate(["a", [5] * 300], ENDLESS, timeout_seconds=0.12)
    with pytest.raises(TimeoutError, match=r"vLLM generation timed out after 0\.01 seconds"):
        service.generate("a", ENDLESS, timeout_seconds=0.01)
    assert service.generate("a", GREEDY, timeout_seconds=0).finished  # no limit
    assert service.generate("a", GREEDY, timeout_seconds=-1).finished
    assert nothing_unfinished(service)


def test_a_prompt_that_vllm_refuses_fails_alone(service: AsyncVLLM) -> None:
    prompts: list[Any] = ["fine", [5] * 300, "fine, too", [10**6]]
    results = service.generate(prompts, GREEDY, return_exceptions=True)
    assert [isinstance(result, Exception) for result in results] == [False, True, False, True]
    assert results[1].__notes__ == ["prompt 1"]
    with pytest.raises(type(results[1])):
        service.generate(prompts[1], GREEDY)


def test_cancelling_a_future_drops_its_request(service: AsyncVLLM) -> None:
    future = service.submit([1, 2, 3], ENDLESS)
    while not sum(unfinished_in_engines(service)):
        assert not future.done()
    future.cancel()
    wait_until(lambda: not sum(unfinished_in_engines(service)), 30)
    assert nothing_unfinished(service)


def test_calls_can_name_an_engine_by_its_index(service: AsyncVLLM) -> None:
    assert service.generate("a", GREEDY, actor_index=1).finished
    for call in (
        lambda i: service.generate("a", GREEDY, actor_index=i),
        service.get_num_unfinished_requests,
        service.get_cache_usage,
    ):
        for index in (-1, 2):
            with pytest.raises(IndexError, match=rf"Actor index {index} out of range \[0, 2\)"):
                call(index)
    assert nothing_unfinished(service)
    assert service.get_num_unfinished_requests(1) == 0


def test_several_engines_need_a_load_balancer(service: AsyncVLLM) -> None:
    kept, service._load_balancer = service._load_balancer, None
    try:
        with pytest.raises(
            RuntimeError, match="LoadBalancer is not created. Create a LoadBalancer using"
        ):
            service.generate("a", GREEDY)
    finally:
        service._load_balancer = kept
    assert service.create_load_balancer("round-robin") is service._load_balancer
    service._load_balancer = kept


def test_loads_count_submitted_requests_and_the_real_cache_use(service: AsyncVLLM) -> None:
    """A burst is spread before any engine answers, and the use of the KV cache is the one of vLLM's scheduler."""
    futures = [service.submit([7, 8, 9], ENDLESS, timeout_seconds=60) for _ in range(24)]
    burst = service.get_num_unfinished_requests()
    assert sum(burst) == 24
    assert min(burst) >= 6  # the prefix's engine takes all, until it is overloaded
    seen = 0.0
    while not all(future.done() for future in futures):
        seen = max(seen, *service.get_cache_usage())
    assert 0.01 < seen <= 1.0
    assert nothing_unfinished(service)
    assert service.get_cache_usage() == [0.0, 0.0]
    stats = service._load_balancer.get_stats()  # type: ignore[union-attr]
    assert [(s["pending_requests"], s["cache_usage"]) for s in stats["actor_stats"]] == [
        (0, 0.0),
        (0, 0.0),
    ]


def test_collective_rpc_returns_the_workers_answers_in_order(service: AsyncVLLM) -> None:
    assert service.collective_rpc("report_device_id", timeout=60) == [["cpu:0"], ["cpu:0"]]
    memory = service.collective_rpc("hotbunk_memory_bytes")
    assert all(one > 1 << 20 for engine in memory for one in engine)
    with pytest.raises(Exception, match="no_such_method"):
        service.collective_rpc("no_such_method", args=(1,), kwargs={"a": 2})


def test_eight_threads_may_generate_at_once(service: AsyncVLLM) -> None:
    def work(thread: int) -> list[list[int]]:
        outputs = [service.generate([20 + thread, i], SamplingParams(max_tokens=2)) for i in range(25)]
        return [list(output.prompt_token_ids) for output in outputs]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert results == [[[20 + thread, i] for i in range(25)] for thread in range(8)]
    assert nothing_unfinished(service)


def test_a_second_start_does_nothing(service: AsyncVLLM, caplog: pytest.LogCaptureFixture) -> None:
    before = {p.pid for p in engine_processes()}
    service.start()
    assert "is launched already" in caplog.text
    assert {p.pid for p in engine_processes()} == before
    assert len(before) == 2


def test_vllms_engine_arguments_are_accepted_and_not_changed(model: Path) -> None:
    args = AsyncEngineArgs(model=str(model), max_num_seqs=3, enable_prefix_caching=False, block_size=16)
    before, environment = repr(args), dict(os.environ)
    settings = as_settings(args)
    assert (settings.max_num_seqs, settings.dtype, settings.enforce_eager) == (3, "auto", False)
    assert settings.extra == {"enable_prefix_caching": False, "block_size": 16}
    started = AsyncVLLM(args).engine_args
    assert isinstance(started, AsyncEngineArgs) and started is not args
    assert (started.model, started.max_num_seqs, started.block_size) == (str(model), 3, 16)
    assert engine_arguments(settings)["enable_prefix_caching"] is False
    assert repr(args) == before
    assert dict(os.environ) == environment


def test_weights_reach_engines_by_broadcast(service: AsyncVLLM, model: Path) -> None:
    """Engines compute with what was sent, forget old prefixes, and name weights that do not fit."""
    policy = HfPolicy(model)
    metadata = service.get_model_metadata()
    expected = {name: (p.dtype, p.shape) for name, p in policy.model.named_parameters()}
    assert metadata == expected
    service.check_model_metadata(expected)
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight is missing.*model\.bogus is not expected"
    ):
        wrong = {
            ("model.bogus" if name == "model.norm.weight" else name): what
            for name, what in expected.items()
        }
        service.check_model_metadata(wrong)

    prompt, params = list(range(30, 230)), SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    for index in (0, 1, 0, 1):
        output = service.generate(prompt, params, actor_index=index)
    assert output.num_cached_tokens > 0
    for version in (1, 2):
        policy.randomise(version)
        report = service.update_weights(reversed(list(policy.model.named_parameters())))
        assert (report.version, service.weight_version) == (version, version)
        assert report.nbytes >= sum(p.nbytes for p in policy.model.parameters())
        outputs = [service.generate(prompt, params, actor_index=i) for i in range(2)]
        assert [o.weight_version for o in outputs] == [version] * 2
        assert max(gap(policy, output) for output in outputs) < 1e-4
    assert service.get_master_address() == "127.0.0.1"
    assert service.get_master_port() == service._sender.port


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], "ended without"),
        (lambda w: [*w, w[0]], "twice|already|again"),
        (lambda w: [*w, ("model.bogus", w[0][1])], "model.bogus"),
        (lambda w: [(n, t[:-1] if n == "model.norm.weight" else t) for n, t in w], "model.norm.weight"),
        (lambda w: [*w, ("lm_head.weight", w[0][1] + 1)], "lm_head.weight differs from the embedding"),
    ],
)
def test_after_weights_that_do_not_fit_engines_refuse_until_some_fit(
    service: AsyncVLLM, model: Path, change: Any, message: str
) -> None:
    policy = HfPolicy(model)
    weights = list(policy.model.named_parameters())
    with pytest.raises(Exception, match=message) as caught:
        service.update_weights(change(weights))
    assert not isinstance(caught.value, (TimeoutError, AttributeError, KeyError))
    with pytest.raises(EngineStateError):
        service.generate("a", GREEDY)
    service.update_weights(weights)
    assert service.generate("a", GREEDY).finished


def test_an_update_without_weights_changes_nothing(
    service: AsyncVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    before = service.weight_version
    assert service.update_weights(iter(())) is None
    assert "No weights provided for update" in caplog.text
    assert service.generate("a", GREEDY).weight_version == service.weight_version == before


def test_a_state_dict_of_transformers_may_have_a_tied_head(service: AsyncVLLM, model: Path) -> None:
    policy = HfPolicy(model)
    policy.randomise(21)
    state = policy.model.state_dict()
    assert "lm_head.weight" in state and "lm_head.weight" not in service.get_model_metadata()
    service.update_weights(iter(state.items()))
    assert gap(policy, service.generate([1, 2, 3], SamplingParams(max_tokens=4, logprobs=0))) < 1e-4


def test_the_port_is_reserved_before_there_is_a_group(service: AsyncVLLM, model: Path) -> None:
    service.close_weights_group()
    address = service.get_master_address(), service.get_master_port()
    with pytest.raises(OSError, match="in use"), socket.create_server(address):
        pass
    assert service.get_master_port() == address[1]
    # The service's own group: it waits for no other process
    calls = service.init_weight_update_group(*address)
    assert [call.done() for call in calls] == [True, True]
    assert service.init_weight_update_group() == calls
    assert service.collective_rpc("check_nccl_group_ready") == [[True], [True]]
    service.update_weights(HfPolicy(model).model.named_parameters())
    assert service.get_master_port() == address[1]
    with pytest.raises(ValueError, match="both master_address and master_port, or neither"):
        service.init_weight_update_group("127.0.0.1")


@pytest.fixture
def trainers_group(service: AsyncVLLM) -> Iterator[Any]:
    """Rank 0 of a group made as TorchRL's trainers make it, which both workers join."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    service.close_weights_group()
    for number, replica in enumerate(service.actors):
        place = "localhost", str(port), 1 + number, 3
        [outcome] = replica.submit("call_workers", "init_weight_update_group", *place).result(60)
        assert outcome["error"] is None  # returns at once, though no process listens yet
    assert service.collective_rpc("check_nccl_group_ready") == [[False], [False]]
    group = sharding.stateless_init_process_group(
        "localhost", str(port), 0, 3, torch.device("cpu"), timeout=60
    )
    yield group
    group.abort("the test is over")


def send(service: AsyncVLLM, group: Any, name: str, weight: torch.Tensor) -> list[dict[str, Any]]:
    """Send one weight as TorchRL does: a call of all workers, and the broadcast that goes with it."""
    dtype = str(weight.dtype).removeprefix("torch.")
    futures = service.collective_rpc_futures("update_weight", args=(name, dtype, tuple(weight.shape)))
    group.broadcast(weight, src=0, stream=None)
    return [outcome for future in futures for outcome in future.result(60)]


def test_torchrls_update_weight_sends_a_version_weight_by_weight(
    service: AsyncVLLM, model: Path, trainers_group: Any
) -> None:
    """Between the first weight and the last an engine has no version; then it has the next one, on all workers."""
    policy, version = HfPolicy(model), service.weight_version
    policy.randomise(31)
    prompt = list(range(30, 230))
    before = [service.generate(prompt, GREEDY, actor_index=i) for i in (0, 1, 0, 1)]
    assert before[-1].num_cached_tokens > 0
    held = service.submit([5], ENDLESS)  # it ends with the old weights
    weights = list(policy.model.named_parameters())
    for number, (name, weight) in enumerate(weights[:-1]):
        outcomes = send(service, trainers_group, name, weight)
        assert [(o["error"], o["left"]) for o in outcomes] == [(None, len(weights) - 1 - number)] * 2
    assert held.result(0).weight_version == version  # type: ignore[attr-defined]
    with pytest.raises(EngineStateError, match="being updated"):
        service.generate("a", GREEDY)
    outcomes = send(service, trainers_group, *weights[-1])
    assert [(o["left"], o["version"]) for o in outcomes] == [(0, version + 1)] * 2
    assert service.weight_version == version + 1
    for index in range(2):
        output = service.generate(prompt, SamplingParams(max_tokens=4, logprobs=0), actor_index=index)
        assert (output.weight_version, output.num_cached_tokens) == (version + 1, 0)
        assert gap(policy, output) < 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda weights: ("model.bogus", weights[1][1]),
            "not announced: model.bogus; still to come: model",
        ),
        (lambda weights: weights[0], "embed_tokens.weight arrived a second time; still to come: model"),
        (lambda weights: (weights[1][0], weights[1][1].double()), "arrived as .*float64"),
        (lambda weights: (weights[1][0], weights[1][1][:-1]), "and was announced as"),
    ],
)
def test_a_weight_that_does_not_fit_ends_its_update(
    service: AsyncVLLM, model: Path, trainers_group: Any, wrong: Any, message: str
) -> None:
    """The outcome names the mistake, and a complete update by any way repairs it."""
    weights = list(HfPolicy(model).model.named_parameters())
    assert all(outcome["error"] is None for outcome in send(service, trainers_group, *weights[0]))
    for outcome in send(service, trainers_group, *wrong(weights)):
        assert re.search(message, outcome["error"]), outcome
    with pytest.raises(EngineStateError, match="no version"):
        service.generate("a", GREEDY)
    send(service, trainers_group, *weights[0])  # begins an update, which the next one replaces
    service.update_weights(weights)
    assert service.generate("a", GREEDY).finished


def test_a_weight_without_a_group_is_reported_in_the_outcome(service: AsyncVLLM, model: Path) -> None:
    service.collective_rpc("close_collective")
    [[outcome], _] = service.collective_rpc("update_weight", args=("x", "float32", (1,)))
    assert "Weight update group not initialized" in outcome["error"]
    with pytest.raises(
        ValueError, match="rank 1 is a worker's, which joins with init_weight_update_group"
    ):
        sharding.stateless_init_process_group(None, 1, 1, 2)
    service.close_weights_group()
    service.update_weights(HfPolicy(model).model.named_parameters())


def test_a_sender_of_the_trainers_own_updates_the_engines(service: AsyncVLLM, model: Path) -> None:
    """The trainer has a group of its own, and the engines' futures report success and failure."""
    policy = HfPolicy(model)
    policy.randomise(5)
    source = FsdpWeightSource(list(policy.model.named_parameters()), torch.float32)
    service.close_weights_group()
    with CollectiveSender(source, torch.device("cpu"), SyncSettings(timeout=60), workers=2) as sender:
        sender.connect(service.init_weight_update_group(sender.ip, str(sender.port)))
        assert service.collective_rpc("check_collective_ready") == [[True], [True]]
        calls = service.receive_weights()
        sender.send(40, calls)
        assert [call.result(60) for call in calls] == [40, 40]
    output = service.generate([1, 2, 3], SamplingParams(max_tokens=4, logprobs=0))
    assert output.weight_version == 40
    assert gap(policy, output) < 1e-4
    refused: list[Future[Any]] = service.receive_weights()  # no process sends
    with pytest.raises(RuntimeError, match="weights group|trainer"):
        [call.result(60) for call in refused]
    service.update_weights(policy.model.named_parameters(), version=41)


def test_each_answer_has_one_version_during_an_update(service: AsyncVLLM, model: Path) -> None:
    """Requests before, during and after an update are answered, with the weights of the version that they name."""
    policy = HfPolicy(model)
    service.update_weights(policy.model.named_parameters())
    old = service.weight_version
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
    early = [service.submit([3 + i], params) for i in range(4)]
    with ThreadPoolExecutor(1) as pool:
        updated = HfPolicy(model)
        updated.randomise(9)
        update = pool.submit(service.update_weights, updated.model.named_parameters())
        late = []
        while not update.done():
            late.append(service.submit([50 + len(late) % 100], SamplingParams(max_tokens=3, logprobs=0)))
            time.sleep(0.02)
        update.result()
    outputs = [future.result(60) for future in (*early, *late)]
    versions = [output.weight_version for output in outputs]  # type: ignore[attr-defined]
    assert set(versions) <= {old, old + 1}
    assert old in versions[:4]
    for output, version in zip(outputs, versions, strict=True):
        assert gap(policy if version == old else updated, output) < 1e-4
    assert service.generate("a", GREEDY).weight_version == old + 1


def test_engines_read_weights_from_a_folder(service: AsyncVLLM, model: Path, tmp_path: Path) -> None:
    policy = HfPolicy(model)
    policy.randomise(11)
    source = FsdpWeightSource(list(policy.model.named_parameters()), torch.float32)
    refused = ("load_weights_from_storage", None, (str(tmp_path), 2))
    with pytest.raises(RuntimeError, match=r"worker 0 on cpu:0 .* holds no complete weights"):
        service.load_weights_from_storage(tmp_path / "nothing")
    (tmp_path / "meta.json").write_text("{}")  # as TensorDict writes
    with pytest.raises(
        RuntimeError, match=r"is TensorDict's, without digests: write it with sharding\.StorageWriter"
    ):
        service.collective_rpc(*refused)
    other = FsdpWeightSource([("model.norm.weight", torch.nn.Parameter(torch.zeros(3)))], torch.float32)
    with pytest.raises(RuntimeError, match=r"weights of another model, such as model\.norm\.weight"):
        service.load_weights_from_storage(StorageWriter(tmp_path / "other", other).write(69))
    service.reset_prefix_cache()
    service.generate("a", GREEDY)  # no weight was touched
    folder = StorageWriter(tmp_path / "weights", source).write(70)
    assert service.load_weights_from_storage(folder, num_threads=2) == 70 == service.weight_version
    # It ends before its engine's workers load other weights
    running = service.submit([1, 2, 3], ENDLESS)
    StorageWriter(tmp_path / "weights", source).write(71)
    by_name = {"storage_path": str(folder), "num_threads": 2}
    for [outcome] in service.collective_rpc("load_weights_from_storage", kwargs=by_name):
        assert outcome["error"] is None and outcome["version"] == 71
    assert running.result(60).weight_version == 70 and service.weight_version == 71
    output = service.generate([1, 2, 3], SamplingParams(max_tokens=4, logprobs=0))
    assert gap(policy, output) < 1e-4


def test_a_dead_engine_raises_at_once(service: AsyncVLLM) -> None:
    """Kill one of the two engines; only the tests of the service's end may follow."""
    futures = [service.submit([9, i], ENDLESS) for i in range(12)]
    os.kill(min(engine_processes(), key=lambda p: p.pid).pid, signal.SIGKILL)
    errors = [future.exception(60) for future in futures]
    assert any(type(error).__name__ == "EngineDeadError" for error in errors)
    assert not all(errors)  # the other engine's requests succeed
    with pytest.raises(Exception, match="ngine"):
        service.collective_rpc("report_device_id", timeout=60)


def test_shutdown_lets_requests_end_and_leaves_no_process(service: AsyncVLLM) -> None:
    futures = [service._submit({"prompt_token_ids": [i]}, ENDLESS, 1, None, {}) for i in range(4)]
    service.shutdown()
    assert [len(future.result(0).outputs[0].token_ids) for future in futures] == [200] * 4
    service.shutdown()
    assert not service.launched
    assert engine_processes() == []
    with pytest.raises(RuntimeError, match="must be launched before generating"):
        service.generate("a")


def test_a_failed_start_leaves_no_process(service: AsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "0.01")
    with pytest.raises(TimeoutError, match="no answer from engine 0, 1 within 0 s"):
        service.start()
    assert not service.launched
    # an engine was being started at the time-out
    wait_until(lambda: not engine_processes(), 120)


def test_a_float32_head_reaches_the_engine(tiny_qwen2_untied: Path) -> None:
    """Logits of a bfloat16 head lie on a grid; those of a float32 head do not, and are the trainer's."""
    with AsyncVLLM.from_pretrained(
        str(tiny_qwen2_untied),
        verbose=False,
        compile=False,
        enable_fp32_output=True,
        **(SMALL | {"dtype": "bfloat16"}),
    ) as service:
        prompt = list(range(40, 72))
        output = service.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
        engine_logprobs = {token: at.logprob for token, at in output.outputs[0].logprobs[0].items()}
    policy = HfPolicy(tiny_qwen2_untied, dtype=torch.bfloat16)
    mask = [0] * len(prompt) + [1]
    samples = [Sample([*prompt, token], mask, [0.0] * len(mask)) for token in engine_logprobs]
    (batch,) = micro_batches(samples, 10_000, 0, "cpu", packing=False)
    with torch.no_grad():
        exact, rounded = (
            outputs(PolicyModule(policy.model, fp32_head), batch, 1.0).logprobs[:, -1].tolist()
            for fp32_head in (True, False)
        )
    assert on_a_grid(rounded)
    assert not on_a_grid(exact)
    assert not on_a_grid(list(engine_logprobs.values()))
    assert math.isclose(max(exact), max(engine_logprobs.values()), abs_tol=0.05)


def on_a_grid(logprobs: list[float], step: float = 2.0**-12) -> bool:
    """Tell whether all differences are multiples of `step`, as for bfloat16 logits of at least 1/16."""
    steps = [(value - logprobs[0]) / step for value in logprobs]
    return max(abs(s - round(s)) for s in steps) < 0.05
