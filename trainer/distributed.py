"""The ranks' process group and store, and the classes that ranks may unpickle from each other's
messages.

torch.distributed.checkpoint sends its plans as pickles over gloo (torch 2.13: `_DistWrapper`),
whose connections are not authenticated, so another user of the machine might connect first.
Therefore only the classes that it exchanges are unpickled. The exchanges of `sharding.ranks` do not
use pickle.
"""

import builtins
import os
import pickle
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from generation.engine.allocator import use_expandable_segments
from generation.engine.devices import cuda_problem
from sharding.ranks import EVERYBODY, exchange, is_main, set_everybody, share_pids, world_size
from sharding.wire.group import own_address
from trainer.errors import UserError

_DCP = "torch.distributed.checkpoint"
_METADATA = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
TABLE_CLASSES = {  # the classes in a checkpoint's table of tensors, besides torch.Size and dtypes
    # One class; the latter is its name in Python 3.13
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    f"{_DCP}.filesystem._StorageInfo",
    *(f"{_DCP}.metadata.{name}" for name in _METADATA),
    "torch.serialization._get_layout",
}

_EXCHANGED = TABLE_CLASSES | {
    f"{_DCP}.api.CheckpointException",
    f"{_DCP}.filesystem._StoragePrefix",
    *(f"{_DCP}.planner.{name}" for name in ("LoadItemType", "LoadPlan", "ReadItem", "SavePlan")),
    *(f"{_DCP}.planner.{name}" for name in ("TensorWriteData", "WriteItem", "WriteItemType")),
    f"{_DCP}.storage.WriteResult",
    *("traceback.FrameSummary", "traceback.StackSummary"),  # sent with the exception of a failed rank
}
PREFIX = "hotbunk"  # prefix of the ranks' keys in the store
# As /proc/net/tcp6 writes them
_LISTENS = "0A"
_LOOPBACK_6 = "00000000000000000000000001000000"
_store: dist.Store | None = None
_TIMES = count()  # this process has joined the ranks


def is_size_or_dtype(module: str, name: str) -> bool:
    """Return True if this name in a pickle is torch.Size or a dtype."""
    return module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))


class _MessageUnpickler(pickle.Unpickler):
    """Unpickles ranks' messages to each other, and raises UnpicklingError for a class that they do
    not exchange.
    """

    def find_class(self, module: str, name: str) -> Any:
        builtin = getattr(builtins, name, None) if module == "builtins" else None
        exception = isinstance(builtin, type) and issubclass(builtin, BaseException)
        if exception or f"{module}.{name}" in _EXCHANGED or is_size_or_dtype(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not among the classes that ranks exchange")


def init_process_group(
    timeout_seconds: float, device: str = "auto", apart: int = 0, apart_have_devices: bool = True
) -> None:
    """Join the ranks, with gloo for CPU tensors and, if `device` is "cuda" or "auto" finds CUDA,
    NCCL for CUDA ones.

    Under torchrun the ranks meet through its environment variables; without it this process is the
    only rank. `timeout_seconds` is the deadline of every collective. On CUDA the process is bound
    to device LOCAL_RANK.

    The last `apart` ranks form a crew of their own. The default group of a crew contains only the
    crew's ranks, so policies, checkpoints and rollouts need not know of the other crew; see
    `sharding.ranks`.
    """
    global _store
    timeout = timedelta(seconds=timeout_seconds)
    cuda = device == "cuda" or (device == "auto" and cuda_problem() is None)
    _stay_private()
    distributed_c10d._unpickler = _MessageUnpickler  # type: ignore[misc, assignment]
    # Further groups, of a mesh or of neighbours, would wait 10 or 30 minutes, whatever the first
    # group does.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    if "RANK" in os.environ:
        _store, rank_, world = next(dist.rendezvous("env://", timeout=timeout))
        # A program that joins again must not read the addresses of its earlier group.
        if times := next(_TIMES):
            _store = dist.PrefixStore(f"joined/{times}", _store)
    else:
        _store = dist.HashStore()
        rank_ = 0
        world = 1
    if rank_ >= world - apart and not apart_have_devices:
        cuda = False
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        use_expandable_segments()
        torch.set_float32_matmul_precision("highest")  # TF32 would be apart from the engine's products
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    crew = _store
    first = 0
    size = world - apart
    if apart:
        first, size = (size, apart) if rank_ >= size else (0, size)
        crew = dist.PrefixStore(f"crew/{first}", _store)
    dist.init_process_group(backend, store=crew, rank=rank_ - first, world_size=size, timeout=timeout)
    if apart:
        set_everybody(
            dist.ProcessGroupGloo(dist.PrefixStore("everybody", _store), rank_, world, timeout)
        )
    share_pids()
    if (
        _on_one_machine()
        and "RANK" in os.environ
        and is_main()
        and _is_open(int(os.environ["MASTER_PORT"]))
    ):
        say(
            f"port {os.environ['MASTER_PORT']}, where the ranks meet, is open to the network, and "
            "whoever reaches it can do anything with this run: start it with hotbunk train, which "
            "listens on loopback only (or with python -m trainer.launcher instead of torchrun)"
        )


def say(line: str) -> None:
    """Print a line about the run to standard error, on rank 0 only."""
    if is_main():
        begin = "\r\x1b[K" if sys.stderr.isatty() else ""  # overwrites the progress line
        print(f"{begin}[hotbunk] {line}", file=sys.stderr, flush=True)


def _on_one_machine() -> bool:
    """Return True if all ranks are on this machine: it has as many as there are, or they meet at
    loopback.
    """
    all_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return all_here or os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")


def _stay_private() -> None:
    """Keep gloo and NCCL off the network on one machine; on several, keep gloo on the interface of
    MASTER_ADDR.

    Variables that the user has set are not changed. Raises UserError if other machines would get a
    loopback address.
    """
    if not _on_one_machine():
        with suppress(OSError, LookupError, ValueError):
            here = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if here.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
                raise UserError(
                    f"MASTER_ADDR={os.environ['MASTER_ADDR']} is this machine's loopback here, where "
                    "no other machine can reach it: set it to this machine's address on the network"
                )
            for name, entries in psutil.net_if_addrs().items():
                if name != "lo" and here in (entry.address for entry in entries):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    elif any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _is_open(port: int) -> bool:
    """Return True if a process listens on this port of this machine at an address other than 127.…
    and ::1.
    """
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{table}").read_text("utf-8").splitlines()[1:]:
                address, _, number = line.split()[1].partition(":")
                # The first of four bytes comes last
                loopback = address.endswith("7F") or address == _LOOPBACK_6
                if int(number, 16) == port and line.split()[3] == _LISTENS and not loopback:
                    return True
    return False


def destroy_process_group(together: bool = True) -> None:
    """Leave the process group once all ranks have called this; a rank that left earlier could abort
    the others.

    With `together` False, leave at once, after a failure: the others then lose contact.
    """
    global _store
    if dist.is_initialized():
        if together and world_size(EVERYBODY) > world_size():  # there are crews
            exchange(None, among=EVERYBODY)
        set_everybody(None)
        if together:
            dist.barrier()
        dist.destroy_process_group()
    _store = None


def store() -> dist.Store:
    """Return the key-value store of the ranks, with a prefix for this run's keys. Other threads use
    its `.clone()`.
    """
    if _store is None:
        raise RuntimeError("there is no store before init_process_group()")
    return dist.PrefixStore(PREFIX, _store)
