"""The Ray cluster that engines run in: one that is there, or one of this process's own."""

import os
import secrets
import subprocess
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generation import guardian
from generation.engine.devices import device_names
from generation.undoing import undone_by

if TYPE_CHECKING:
    pass

_LOCAL_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # by default Ray's processes have a lower priority than all others
    # By default Ray replaces 127.0.0.1 by the machine's network address, and listens there and on
    # all addresses (ray/_private/services.py, get_node_ip_address).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

# Characters: Ray's sockets add up to 60 to it, and Linux allows 107 in a socket's path
_LONGEST_FOLDER = 45


def ray_module() -> Any:
    """Import Ray and return it. Raises ImportError, which names the remedy, if it is not
    installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("ray is not installed. Please install it with `pip install ray`.") from error
    return ray


def join_cluster(cpus: int, taken: int = 0, folder: Path | None = None) -> None:
    """Connect this process to the cluster of RAY_ADDRESS or, if that is not set, to a new one on
    this machine.

    The new one has its files in `folder`, by default in `ray` of the folder for temporary files.

    The new cluster is for this process alone: it is on loopback, has no dashboard, refuses clients
    that do not know its secret, and ends with the thread that calls this (prctl(2),
    PR_SET_PDEATHSIG). It has the machine's GPUs except for the first `taken`, on which ranks train.
    From then on this process sees only the cluster's GPUs.

    Raises: ImportError: Ray is not installed; the message names the remedy. RuntimeError: Ray was
        imported before, and this release of it does not take a secret any more. ValueError: all
        GPUs are taken.
    """
    alone = not os.environ.get("RAY_ADDRESS")
    if alone and taken:
        names = device_names()
        if not names[taken:]:
            raise ValueError(
                f"ranks train on all {len(names)} GPUs here: start fewer ranks, or name a Ray cluster"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[taken:])
    if alone:
        os.environ |= _LOCAL_ENVIRONMENT
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = ray_module()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL", "namespace": "hotbunk"}
    if not alone:
        ray.init(**quiet)
        return
    from ray._private import ray_constants

    # For a Ray that has been imported before, which has read the variables then.
    ray_constants.ENABLE_RAY_CLUSTER = False
    _read_secret()
    files = str(folder or f"{tempfile.gettempdir()}/ray")
    options = {"_temp_dir": files} if len(files) <= _LONGEST_FOLDER else {}
    cores = max(cpus, os.cpu_count() or 1)
    ray.init(
        "local",
        num_cpus=cores,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **options,
        **quiet,
    )


def _read_secret() -> None:
    """Have this process's Ray use the secret in the environment. Raises RuntimeError where it does
    not.
    """
    try:
        raylet: Any = import_module("ray._raylet")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        # As Ray does in ray/_private/authentication/authentication_token_setup.py
        raylet.Config.initialize("")
        takes_secret = raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
    except (AttributeError, ImportError):
        takes_secret = False
    if not takes_secret:
        remedy = (
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before it is imported, or join a cluster by "
            "ray.init first"
        )
        raise RuntimeError(
            f"this Ray was imported without a secret, which a cluster of one's own needs: {remedy}"
        )


def join_once(cpus: int) -> Callable[[], None]:
    """Join a cluster as `join_cluster`, unless already in one; return a function that leaves a
    cluster joined here.

    The files of a new cluster, and of its actors, are deleted then, or when this process has ended.
    """
    ray = ray_module()
    if ray.is_initialized():
        return lambda: None
    folder, lock = guardian.private_folder("ray")
    # Ray kills the guardians of actors' engines together with the actors.
    watcher = subprocess.Popen(
        guardian.command(folder), stdin=subprocess.DEVNULL, start_new_session=True
    )

    def leave() -> None:
        ray.shutdown()
        watcher.kill()
        watcher.wait()
        guardian.remove(folder)
        os.close(lock)

    before = os.environ.get("TMPDIR")
    with undone_by(leave):
        os.environ["TMPDIR"] = str(folder)  # for the actors
        try:
            join_cluster(cpus, folder=folder)
        finally:
            os.environ.pop("TMPDIR")
            os.environ |= {} if before is None else {"TMPDIR": before}
    return leave


def cluster_address() -> str:
    """Return HOST:PORT, at which other machines reach the cluster's first one; "" if there are no
    others.
    """
    import ray

    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if len(machines) < 2:
        return ""
    return ray.get_runtime_context().gcs_address
