"""A whole run whose engines are actors of a Ray cluster, and die and join during the run."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.conftest import TinyModel
from tests.support import forked
from tests.support.polling import wait_until
from tests.support.real_run import GONE_SECONDS, ROOT, Run, write_recipe

pytestmark = pytest.mark.timeout(900)  # a cluster starts slowly on a busy machine


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a cluster with room for two engines, whose processes are forked."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # otherwise the machine's other work comes first
    starts = {"py_executable": shlex.join(forked.PYTHON), "env_vars": {forked.ENGINES: "1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": starts}))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def actors() -> list[psutil.Process]:
    """Return the processes of the cluster's engines: each is forked from one, and ends with it."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and forked.__file__ in p.cmdline()]


def test_replicas_that_die_and_join_answer_each_prompt_once_as_one_engine_does(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    sections = {"run": {"steps": 6}, "eval": {"every": 3}, "policy": {"lr": 3e-3}, "lora": {"rank": 4}}
    sections |= {"sampling": {"max_tokens": 24}, "engine": {"max_model_len": 160}}
    gated = {"custom": f"{ROOT}/tests/support/gated_rollout.py:gated", "kwargs": {"folder": str(gates)}}
    tracking = {"completions_per_step": 100}
    recipe = write_recipe(tmp_path, tiny_model(), **sections, rollout=gated, tracking=tracking)

    run = Run(
        recipe,
        "--engine.placement",
        "ray",
        "--engine.replicas",
        "3",
        ranks=2,
        name="apart",
        preloaded=True,
    )
    run.wait_for((gates / "3.reached").exists, "the first turns of step 3")
    two = actors()
    assert len(two) == 2
    two[0].kill()
    (gates / "3").touch()
    run.wait_for((gates / "4.reached").exists, "the first turns of step 4")
    assert "starting another, 2 of engine.restarts left" in run.output()
    cluster.add_node(num_cpus=1)
    run.wait_for(
        lambda: "has started: 3 of 3 replicas from the next update on" in run.output(), "three engines"
    )
    (gates / "4").touch()
    assert run.wait() == 0, run.output()
    wait_until(
        lambda: not (run.processes() or actors()), GONE_SECONDS, lambda: [*run.processes(), *actors()]
    )
    together = Run(recipe, ranks=1, name="together", preloaded=True)
    assert together.wait() == 0, together.output()
    answers = [(one.folder / "completions.jsonl").read_bytes() for one in (run, together)]
    assert answers[0] == answers[1]
    rows, expected = run.comparable_rows(), together.comparable_rows()
    assert len(rows) == 7
    for row, other in zip(rows, expected, strict=True):
        # not bit for bit: engines compute different batches
        assert row.keys() == other.keys()
        assert {key: value for key, value in row.items() if isinstance(value, float)} == pytest.approx(
            {key: value for key, value in other.items() if isinstance(value, float)}, rel=1e-3, abs=1e-5
        )
