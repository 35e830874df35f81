"""The ranks' process group: joining it, leaving it, and the store they met at.

Exchanges are in `sharding.collectives`.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from generation.devices import cuda_problem
from sharding.collectives import (  # noqa
    RemoteError,
    agree,
    agreed,
    all_gather_bytes,
    all_reduce_max,
    all_reduce_sum,
    introduce,
    is_main,
    rank,
    world_size,
)

_store: dist.Store | None = None


def init_process_group(timeout_seconds: float, device: str = "auto") -> None:
    """Join the ranks: gloo for CPU tensors, and NCCL for CUDA ones if `device` is "cuda" (or "auto" and CUDA works).

    Under torchrun the ranks meet through its environment variables; without it this process is the only rank.
    `timeout_seconds` is the deadline of every collective. On CUDA the process is bound to device LOCAL_RANK.
    """
    global _store
    timeout = timedelta(seconds=timeout_seconds)
    cuda = device == "cuda" or (device == "auto" and cuda_problem() is None)
    if "RANK" in os.environ:
        _stay_on_loopback()
        _store, rank_, world = next(dist.rendezvous("env://", timeout=timeout))
    else:
        _store, rank_, world = dist.HashStore(), 0, 1
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=_store, rank=rank_, world_size=world, timeout=timeout)
    introduce()


def _stay_on_loopback() -> None:
    """On a single machine, keep gloo and NCCL off the network; what the user set is left alone."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if one_machine and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def destroy_process_group() -> None:
    """Leave the group after all ranks have arrived here; a rank that leaves early can abort the others."""
    global _store
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    _store = None


def store() -> dist.Store:
    """The key-value store the ranks met at, under a prefix of our own. Use `.clone()` of it on any other thread."""
    if _store is None:
        raise RuntimeError("there is no store before init_process_group()")
    return dist.PrefixStore("hotbunk", _store)
