"""AsyncVLLM on a local Ray cluster: two actors with a real engine each do what local processes do."""

import multiprocessing
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from vllm import SamplingParams

from generation.compat.load_balancer import LoadBalancer
from generation.compat.torchrl.arguments import PromptErrors, resolve
from generation.compat.torchrl.replicas import ServiceEngine
from generation.compat.torchrl.service import AsyncVLLM
from tests.support import forked
from tests.support.colocated import HfPolicy
from tests.support.polling import wait_until

pytestmark = pytest.mark.timeout(600)  # a cluster starts slowly on a busy machine

SMALL = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20, "dtype": "float32"}
ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True)


def greeter() -> type:
    """Return a user's own actor class, with one more method. Ray's workers cannot import this file, so it is defined here."""

    class Greeter(ServiceEngine):
        async def greet(self, name: str) -> str:
            return f"hello {name}"

    return Greeter


def semaphore_names() -> Callable[[], None]:
    """Return a hook with which Ray's workers name semaphores as tests/__init__.py does."""

    def name_semaphores() -> None:
        multiprocessing.current_process()._config["semprefix"] = "/pytest"  # type: ignore[attr-defined]

    return name_semaphores


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # otherwise the machine's other work comes first
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token into the home directory
        # Files that a killed actor leaves can then be distinguished from a run's (tests/support/shared_memory.py).
        workers = {
            "worker_process_setup_hook": semaphore_names(),
            "py_executable": shlex.join(forked.PYTHON),
        }
        workers |= {"env_vars": {forked.ENGINES: "1"}}
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env=workers,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def service(cluster: None, model: Path) -> Iterator[AsyncVLLM]:
    with AsyncVLLM(resolve(str(model), compile=False, **SMALL), 2, actor_class=greeter()) as service:
        service.create_load_balancer()
        yield service


def engine_processes() -> list[psutil.Process]:
    """Return the engines, which write to Ray's logs, and the forked processes of their actors."""
    session, processes = Path(ray._private.worker._global_node.get_session_dir_path()).name, []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            engine = process.name().startswith("VLLM") and session in os.readlink(
                f"/proc/{process.pid}/fd/1"
            )
            actor = forked.__file__ in (line := process.cmdline()) and session in " ".join(line)
            if engine or actor:
                processes.append(process)
    return processes


def test_answers_keep_the_order_of_prompts_and_errors_name_theirs(service: AsyncVLLM) -> None:
    lengths = [30, 2, 17, 1]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = service.generate([[10 + i] for i in range(4)], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.weight_version for o in outputs] == [0] * 4
    with pytest.raises(PromptErrors) as caught:
        service.generate(["fine", [5] * 300, [10**6]], SamplingParams(max_tokens=2))
    assert [output is None for output in caught.value.outputs] == [False, True, True]
    assert "128" in str(caught.value.exceptions[0])


def test_deadlines_and_cancelling_end_requests_in_the_engine(service: AsyncVLLM) -> None:
    with pytest.raises(TimeoutError, match=r"vLLM generation timed out after 0\.05 seconds"):
        service.generate("a", ENDLESS, timeout_seconds=0.05)
    futures = [service.submit([i], ENDLESS) for i in range(6)]
    assert sum(service.get_num_unfinished_requests()) == 6  # counted before any actor answers
    for future in futures:
        future.cancel()
    deadline = time.monotonic() + 60
    while any(replica.submit("get_num_unfinished_requests").result(60) for replica in service.actors):
        assert time.monotonic() < deadline
    while any(service.get_num_unfinished_requests()):
        assert time.monotonic() < deadline


def test_actors_report_the_use_of_the_kv_cache(service: AsyncVLLM) -> None:
    deadline = time.monotonic() + 60
    while None in service.get_cache_usage():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    seen: list[float] = []
    while not seen or max(seen) == 0.0:
        assert time.monotonic() < deadline
        futures = [service.submit([1, i], ENDLESS) for i in range(8)]
        while not all(future.done() for future in futures):
            seen += service.get_cache_usage()
            time.sleep(0.02)
    assert 0.0 < max(seen) <= 1.0


def test_methods_of_an_actor_class_and_of_workers_can_be_called(service: AsyncVLLM) -> None:
    assert service.collective_rpc("report_device_id") == [["cpu:0"], ["cpu:0"]]
    assert [replica.submit("greet", "you").result(60) for replica in service.actors] == ["hello you"] * 2
    name = f"async-vllm-replica-{service.service_id}-1"
    assert ray.get_actor(name, namespace="hotbunk") is not None


def asker() -> type:
    """Return an actor class for a process that does not own the engines; defined here as `greeter` is."""

    class Asker:
        def ask(self, service: Any, prompts: list[list[int]]) -> dict[str, Any]:
            from vllm import SamplingParams

            with service:
                outputs, problem = service.generate(prompts, SamplingParams(max_tokens=3)), ""
                try:
                    service.update_weights(iter([("a", None)]))
                except RuntimeError as error:
                    problem = str(error)
                kind = f"{type(service).__module__}.{type(service).__name__}"
                lengths = [len(output.outputs[0].token_ids) for output in outputs]
                return {"pid": os.getpid(), "lengths": lengths, "kind": kind, "problem": problem}

    return Asker


def test_copies_in_other_processes_generate_at_the_same_time(service: AsyncVLLM) -> None:
    """The engines outlive the copies; only the owner may update weights."""
    mine = [service.submit([i], ENDLESS) for i in range(4)]
    actors = [ray.remote(num_cpus=0)(asker()).remote() for _ in range(2)]
    calls = [actor.ask.remote(service, [[n, 1], [n, 2]]) for n, actor in enumerate(actors)]
    answers = ray.get(calls, timeout=300)
    for actor in actors:
        ray.kill(actor)
    assert len({os.getpid(), *(answer["pid"] for answer in answers)}) == 3
    for answer in answers:
        assert all(1 <= length <= 3 for length in answer["lengths"]) and len(answer["lengths"]) == 2
        assert answer["kind"] == "generation.compat.torchrl.service.AsyncVLLM"
        assert (
            "is for the process that launched the service, of which this is a copy" in answer["problem"]
        )
    assert [len(future.result(60).outputs[0].token_ids) for future in mine] == [100] * 4
    assert service.generate("a", SamplingParams(max_tokens=1)).finished


def test_a_load_balancer_polls_actors_and_worker_calls_are_references(service: AsyncVLLM) -> None:
    names = [f"async-vllm-replica-{service.service_id}-{number}" for number in range(2)]
    balancer = LoadBalancer(
        actors=[ray.get_actor(name, namespace="hotbunk") for name in names], strategy="requests"
    )
    futures = [service._submit({"prompt_token_ids": [i]}, ENDLESS, 0, None, {}) for i in range(3)]
    wait_until(
        lambda: balancer.get_stats()["actor_stats"][0]["pending_requests"] == 3, 60, balancer.get_stats
    )
    assert balancer.select_actor() == 1
    assert [future.result(60).finished for future in futures] == [True] * 3
    assert LoadBalancer(balancer.actors, "kv-cache").select_actor("a") in (0, 1)
    references = service.collective_rpc_futures("report_device_id")
    assert all(isinstance(reference, ray.ObjectRef) for reference in references)
    assert (
        ray.get(references, timeout=60)
        == service.collective_rpc("report_device_id")
        == [["cpu:0"], ["cpu:0"]]
    )


def test_weights_reach_the_engines_in_actors(service: AsyncVLLM, model: Path) -> None:
    policy = HfPolicy(model)
    policy.randomise(3)
    service.update_weights(policy.model.named_parameters())
    assert service.get_master_address() == "127.0.0.1"  # the cluster has one node, so loopback is enough
    for index in range(2):
        output: Any = service.generate(
            [4, 5, 6], SamplingParams(max_tokens=4, logprobs=0), actor_index=index
        )
        sampled = list(output.outputs[0].token_ids)
        sampled_logprobs = [
            at[token].logprob for at, token in zip(output.outputs[0].logprobs, sampled, strict=True)
        ]
        expected = policy.logprobs([4, 5, 6, *sampled])[2:]
        assert max(abs(a - b) for a, b in zip(expected, sampled_logprobs, strict=True)) < 1e-4
        assert output.weight_version == 1


def test_a_dead_actor_raises_and_shutdown_leaves_no_process(service: AsyncVLLM) -> None:
    """This test is the last, since it ends the service."""
    # processes of earlier tests may still be ending
    wait_until(lambda: len(engine_processes()) == 4, 60, engine_processes)
    futures = [service._submit({"prompt_token_ids": [i]}, ENDLESS, 0, None, {}) for i in range(4)]
    ray.kill(ray.get_actor(f"async-vllm-replica-{service.service_id}-0", namespace="hotbunk"))
    assert all("died" in str(future.exception(60)) or future.exception(0) is None for future in futures)
    with pytest.raises(ray.exceptions.RayActorError):
        service.generate("a", ENDLESS, actor_index=0)
    service.shutdown()
    service.shutdown()
    wait_until(lambda: not engine_processes(), 60, engine_processes)
