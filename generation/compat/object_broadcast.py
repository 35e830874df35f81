"""Broadcast an object from one rank of a group to all, for code that runs on every rank of an
engine's group.

Rollouts do not need it: tools and environments run on the group's leader only, and complete
trajectories are exchanged.
"""

from typing import Any

import msgspec
import torch
import torch.distributed as dist


def broadcast_across_tp(obj: Any = None, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the object of rank `src` on every rank of the group (None: all ranks). Other ranks'
    `obj` is ignored.

    Takes two collectives on CPU tensors for any object. Nothing is unpickled: the object may
    consist of None, booleans, numbers, text, bytes, lists and dictionaries. Tuples and sets arrive
    as lists. Raises TypeError on all ranks for anything else.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return obj
    payload = b""
    problem = ""
    if dist.get_rank(group) == src:
        try:
            payload = msgspec.msgpack.encode(obj)
        except (TypeError, OverflowError) as error:
            payload = str(error).encode()
            problem = "yes"
    # A negative length announces an error message in place of the object, so that no rank waits in
    # vain.
    length = torch.tensor([-len(payload) if problem else len(payload)], dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=src)
    sent = bytearray(payload or abs(int(length)))
    data = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=src)
    received = data.numpy().tobytes()
    if int(length) < 0:
        raise TypeError(f"rank {src} has an object that cannot be broadcast: {received.decode()}")
    return msgspec.msgpack.decode(received)
