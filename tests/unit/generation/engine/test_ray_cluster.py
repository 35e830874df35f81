"""The Ray cluster that a run starts for itself."""

import json
import os
import socket
import subprocess
import sys

import pytest

from generation.engine.ray_cluster import join_cluster
from tests.support.polling import wait_until
from tests.support.real_run import GONE_SECONDS, ROOT

STARTED = """
import json, time
import psutil
import sys
if len(sys.argv) > 1:
    import ray  # which reads its variables for the first time now
from generation.engine.ray_cluster import cluster_address, join_cluster
join_cluster(1)
import ray

@ray.remote
def one():
    return 1

ray.get(one.remote())
everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
heard = [c.laddr.ip for p in everyone for c in p.net_connections("inet") if c.status == "LISTEN"]
address = ray.get_runtime_context().gcs_address
print(json.dumps({"heard": heard, "address": address, "others": cluster_address()}), flush=True)
input()
"""
STRANGER = "import sys, ray; ray.init(sys.argv[1], logging_level='CRITICAL', log_to_driver=False)"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("imported", [[], ["ray"]], ids=["", "ray imported before"])
def test_a_cluster_of_ones_own_is_on_loopback_and_ends_with_its_process(imported: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, *imported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as started:
        assert started.stdout is not None
        report = json.loads(started.stdout.readline())
        assert len(report["heard"]) >= 5  # the store, the raylet's two, its agent's, the worker's
        assert {address.removeprefix("::ffff:") for address in report["heard"]} == {"127.0.0.1"}
        assert report["others"] == ""
        command = [sys.executable, "-c", STRANGER, report["address"]]
        # Else it looks for loopback on the network
        near = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        stranger = subprocess.run(command, capture_output=True, text=True, timeout=120, env=near)
        assert stranger.returncode and "AuthenticationError" in stranger.stderr
        started.kill()
    host, _, port = report["address"].rpartition(":")
    wait_until(lambda: socket.socket().connect_ex((host, int(port))) != 0, GONE_SECONDS)


def test_a_cluster_of_ones_own_has_the_gpus_that_no_rank_trains_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6")
    join_cluster(1, taken=2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(
        ValueError, match="ranks train on all 1 GPUs here: start fewer ranks, or name a Ray cluster"
    ):
        join_cluster(1, taken=1)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    join_cluster(1, taken=1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
