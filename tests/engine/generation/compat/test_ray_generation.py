"""`VllmGeneration` with `vllm_cfg.backend: ray`: actors on a local cluster do what child processes do."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from generation.compat.nemo.batch import BatchedDataDict
from generation.compat.nemo.config import VllmConfig
from generation.compat.nemo.generation import VllmGeneration, VllmGenerationWorker
from generation.engine.engine import WorkerError
from generation.engine.lifecycle import EngineStateError
from sharding import CollectiveSender, ShardingManager, SyncSettings
from tests.engine.generation.compat.test_interface import (
    PROMPTS,
    assert_weights_are,
    config,
    greedy_by_transformers,
    padded,
    responses,
    source_of,
)
from tests.support import forked
from tests.support.colocated import HfPolicy
from tests.support.polling import wait_until

pytestmark = pytest.mark.timeout(600)  # a cluster starts slowly on a busy machine

CPU, SETTINGS = torch.device("cpu"), SyncSettings("sample", 1 << 18, 60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Yield a cluster with room for two engines, whose processes are forked; this process has not joined it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # otherwise the machine's other work comes first
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token into the home directory
        starts = {"py_executable": shlex.join(forked.PYTHON), "env_vars": {forked.ENGINES: "1"}}
        patch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": starts}))
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def on_ray(model: Path, **engine: object) -> VllmConfig:
    described = config(model)
    described["vllm_cfg"] |= {"backend": "ray", **engine}  # type: ignore[typeddict-item]
    return described


def engines() -> list[psutil.Process]:
    """Return the engines below this process, found by their names; the cluster's are among them."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and p.name().startswith("VLLM")]


def test_actors_generate_sleep_and_take_weights(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    assert not ray.is_initialized()
    policy, network = HfPolicy(model), HfPolicy(model).model
    with VllmGeneration(on_ray(model), timeout=240) as generation:
        assert [(worker.engine, worker.device_ids) for worker in generation.workers] == [
            (None, ["cpu:0"])
        ] * 2
        assert ray.available_resources().get("CPU", 0) == 0  # Ray has placed the engines
        assert all(
            url and url.startswith("http://127.0.0.1:") for url in generation.dp_openai_server_base_urls
        )
        expected = [greedy_by_transformers(network, prompt, 12) for prompt in PROMPTS]
        assert responses(generation.generate(padded(PROMPTS), greedy=True)) == expected
        texts = generation.generate_text(BatchedDataDict({"prompts": ["1+1="] * 2}), greedy=True)[
            "texts"
        ]
        assert texts[0] == texts[1] != ""

        generation.finish_generation()
        with pytest.raises(EngineStateError, match="cannot generate: the engine is asleep"):
            generation.generate(padded(PROMPTS))
        generation.prepare_for_generation(["weights"])
        policy.randomise(seed=5)
        with CollectiveSender(source_of(policy), CPU, SETTINGS, workers=2) as sender:
            joining = generation.init_collective(sender.ip, sender.port, sender.world_size)
            assert all(isinstance(call, ray.ObjectRef) for call in joining)
            sender.connect(joining)
            updates = generation.update_weights_from_collective()
            sender.send(policy.version, updates)
            assert ray.get(updates) == [True, True]
        generation.prepare_for_generation(["kv_cache"])
        assert_weights_are(policy, generation)

        worker = generation.workers[0]
        with pytest.raises(WorkerError, match="no rank to receive from"):
            ray.get(generation.update_weights_via_ipc_zmq())
        policy.randomise(seed=6)
        manager = ShardingManager(source_of(policy), CPU, SETTINGS, tmp_path)
        manager.connect([worker.submit("connect_ipc_async", *manager.endpoints())])
        manager.send(policy.version, [worker.submit("update_weights_via_ipc_zmq_async")])
        manager.close()
        expected = [greedy_by_transformers(policy.model, prompt, 12) for prompt in PROMPTS]
        assert responses(worker.generate(padded(PROMPTS), greedy=True)) == expected
        with pytest.raises(EngineStateError, match="weights of no version"):
            generation.workers[1].generate(padded(PROMPTS))
    with pytest.raises(EngineStateError, match="closed"):
        generation.generate(padded(PROMPTS))
    assert not ray.is_initialized()  # `VllmGeneration` has joined the cluster, and left it
    wait_until(lambda: not engines(), 60, engines)


def test_a_cluster_without_room_is_refused_and_left_again(cluster: Cluster, model: Path) -> None:
    with pytest.raises(
        ValueError, match="3 engines with tensor_parallel_size 1 need 3 CPUs, but there are 2: lower"
    ):
        VllmGeneration(on_ray(model, num_replicas=3))
    with pytest.raises(
        ValueError, match="bundle_indices: with vllm_cfg.backend ray, Ray chooses the devices"
    ):
        VllmGenerationWorker(on_ray(model), [0])
    assert not ray.is_initialized()


def test_a_programs_own_cluster_is_used_only_if_configured(cluster: Cluster, model: Path) -> None:
    """Engines are children unless the configuration says otherwise, and the program stays in its cluster."""
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        alone = config(model)
        alone["vllm_cfg"]["num_replicas"] = 1
        with VllmGeneration(alone, timeout=120) as generation:
            assert generation.workers[0].actor is None and ray.available_resources()["CPU"] == 2
            assert isinstance(generation.prepare_for_generation(), bool)
        with pytest.raises(ValueError, match="3 engines"):
            VllmGeneration(on_ray(model, num_replicas=3))
        assert ray.is_initialized()
    finally:
        ray.shutdown()
