"""The ranks' process group: joining it, leaving it, and the store they met at; what ranks may unpickle of each other.

torch.distributed.checkpoint sends its plans as pickles over gloo (torch 2.13: `_DistWrapper`), whose connections are
not authenticated: another user of the machine who is quick enough could be at the other end. So only the classes that
it exchanges are unpickled. Our own exchanges (`sharding.ranks`) need no pickle.
"""

import builtins
import os
import pickle
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from generation.engine.devices import cuda_problem
from sharding.ranks import EVERYBODY, exchange, is_main, set_everybody, share_pids, world_size
from sharding.wire.group import own_address
from trainer.errors import UserError

_DCP = "torch.distributed.checkpoint"
_METADATA = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
TABLE_CLASSES = {  # in a checkpoint's table of tensors, besides torch.Size and dtypes
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # the same class; the latter is its name in Python 3.13
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
    *("traceback.FrameSummary", "traceback.StackSummary"),  # with the exception of a rank that failed
}
PREFIX = "hotbunk"  # of the keys that ranks put into the store they met at
_LISTENS, _LOOPBACK_6 = "0A", "00000000000000000000000001000000"  # as /proc/net/tcp6 writes them
_store: dist.Store | None = None


def is_size_or_dtype(module: str, name: str) -> bool:
    """True if a pickle means torch.Size or a dtype by this name."""
    return module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(builtins, name, None) if module == "builtins" else None
        exception = isinstance(found, type) and issubclass(found, BaseException)
        if exception or f"{module}.{name}" in _EXCHANGED or is_size_or_dtype(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not among the classes that ranks exchange")


def init_process_group(
    timeout_seconds: float, device: str = "auto", apart: int = 0, apart_have_devices: bool = True
) -> None:
    """Join the ranks: gloo for CPU tensors, and NCCL for CUDA ones if `device` is "cuda" (or "auto" and CUDA works).

    Under torchrun the ranks meet through its environment variables; without it this process is the only rank.
    `timeout_seconds` is the deadline of every collective. On CUDA the process is bound to device LOCAL_RANK.

    The last `apart` ranks are a crew of their own. The default group of either crew has its own ranks alone, so that
    nothing of a policy, a checkpoint or a rollout has to know that there is another; see `sharding.ranks`.
    """
    global _store
    timeout = timedelta(seconds=timeout_seconds)
    cuda = device == "cuda" or (device == "auto" and cuda_problem() is None)
    _stay_private()
    distributed_c10d._unpickler = _Unpickler  # type: ignore[misc, assignment]  # others raise UnpicklingError
    met = next(dist.rendezvous("env://", timeout=timeout)) if "RANK" in os.environ else (dist.HashStore(), 0, 1)
    _store, rank_, world = met
    if rank_ >= world - apart and not apart_have_devices:
        cuda = False
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    crew, first, size = _store, 0, world - apart
    if apart:
        first, size = (size, apart) if rank_ >= size else (0, size)
        crew = dist.PrefixStore(f"crew/{first}", _store)
    dist.init_process_group(backend, store=crew, rank=rank_ - first, world_size=size, timeout=timeout)
    if apart:
        set_everybody(dist.ProcessGroupGloo(dist.PrefixStore("everybody", _store), rank_, world, timeout))
    share_pids()
    if _on_one_machine() and "RANK" in os.environ and is_main() and _is_open(int(os.environ["MASTER_PORT"])):
        say(
            f"port {os.environ['MASTER_PORT']}, where the ranks meet, is open to the network, and whoever reaches it "
            "can do anything with this run: start it with hotbunk train, which listens on loopback only (or by "
            "python -m trainer.launcher in the place of torchrun)"
        )


def say(line: str) -> None:
    """Print a line about the run to standard error, on rank 0."""
    if is_main():
        begin = "\r\x1b[K" if sys.stderr.isatty() else ""  # over the line that says what is going on
        print(f"{begin}[hotbunk] {line}", file=sys.stderr, flush=True)


def _on_one_machine() -> bool:
    """True if all ranks are on this machine: there are as many as here, or they meet at loopback."""
    all_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return all_here or os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")


def _stay_private() -> None:
    """Keep gloo and NCCL off the network on one machine, and gloo on one interface, MASTER_ADDR's, on several.

    What the user has set is left alone. Raises UserError where other machines would be given a loopback address.
    """
    if not _on_one_machine():
        with suppress(OSError, LookupError, ValueError):
            own = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if own.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
                raise UserError(
                    f"MASTER_ADDR={os.environ['MASTER_ADDR']} is this machine's loopback here, where no other machine "
                    "can reach it: set it to this machine's address on the network"
                )
            for name, entries in psutil.net_if_addrs().items():
                if name != "lo" and own in (entry.address for entry in entries):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    elif any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _is_open(port: int) -> bool:
    """True if something listens on this port of this machine at another address than 127.… and ::1."""
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{table}").read_text("utf-8").splitlines()[1:]:
                address, _, found = line.split()[1].partition(":")
                here = address.endswith("7F") or address == _LOOPBACK_6  # the first of four bytes comes last
                if int(found, 16) == port and line.split()[3] == _LISTENS and not here:
                    return True
    return False


def destroy_process_group() -> None:
    """Leave the group after all ranks have arrived here; a rank that leaves early can abort the others."""
    global _store
    if dist.is_initialized():
        if world_size(EVERYBODY) > world_size():  # there are crews
            exchange(None, among=EVERYBODY)
        set_everybody(None)
        dist.barrier()
        dist.destroy_process_group()
    _store = None


def store() -> dist.Store:
    """The key-value store the ranks met at, under a prefix of our own. Use `.clone()` of it on any other thread."""
    if _store is None:
        raise RuntimeError("there is no store before init_process_group()")
    return dist.PrefixStore(PREFIX, _store)
