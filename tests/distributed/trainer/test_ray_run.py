"""A whole run whose engines are actors of a Ray cluster, which come and go."""

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.conftest import TinyModel
from tests.distributed.killed_run import unequal
from tests.distributed.real_run import Run, write_recipe

pytestmark = pytest.mark.timeout(900)  # a cluster on a busy machine takes its time to start


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """With room for two engines."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else the machine's other work comes first
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def actors() -> list[psutil.Process]:
    """Of all engines of the cluster."""
    return [
        process
        for process in psutil.process_iter(["name"])
        if process.info["name"].startswith("ray::ActorEngin") and process.status() != psutil.STATUS_ZOMBIE
    ]


def test_replicas_that_die_and_join_answer_every_prompt_once_as_one_engine_does(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path
) -> None:
    steps = {"run": {"steps": 8}, "eval": {"every": 4}, "policy": {"lr": 3e-3}, "lora": {"rank": 4}}
    turns = {"rollout": {"custom": "second_look"}}
    recipe = write_recipe(tmp_path, tiny_model(), **steps, tracking={"completions_per_step": 100})
    together = Run(recipe, ranks=1, name="together", preloaded=True)
    assert together.wait() == 0, together.output()
    phases = tmp_path / "phases"
    phases.mkdir()
    apart = ["--engine.apart", "ray", "--engine.replicas", "3"]
    run = Run(recipe, *apart, ranks=2, name="apart", preloaded=True, phases=phases)
    run.wait_for_steps(2)
    run.wait_for(lambda: "rollout" in phase(phases, 1), "a rollout")
    actors()[0].kill()
    run.wait_for_steps(4)
    cluster.add_node(num_cpus=1)
    assert run.wait() == 0, run.output()
    print(run.output())
    run.assert_gone()
    assert not unequal(together, run)
