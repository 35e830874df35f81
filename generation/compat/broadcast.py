"""One object from one rank of a group to all, for code that runs on every rank of an engine group. Rollouts do not need
it: tools and environments run on the group's leader only, and whole trajectories are exchanged.
"""

from typing import Any

import msgspec
import torch
import torch.distributed as dist


def broadcast_across_tp(obj: Any = None, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The object of rank `src` of the group (None: all ranks) on every rank of it; the others' `obj` does not matter.

    Always two collectives, whatever the object is, on CPU tensors; nothing is unpickled, so the object consists of
    None, booleans, numbers, text, bytes, lists and dictionaries. Tuples and sets arrive as lists; anything else is a
    TypeError on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return obj
    payload, problem = b"", ""
    if dist.get_rank(group) == src:
        try:
            payload = msgspec.msgpack.encode(obj)
        except (TypeError, OverflowError) as error:
            payload, problem = str(error).encode(), "yes"
    # A negative length says that what follows is an error, so that no rank is left waiting for the object.
    length = torch.tensor([-len(payload) if problem else len(payload)], dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=src)
    sent = bytearray(payload or abs(int(length)))
    data = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=src)
    received = data.numpy().tobytes()
    if int(length) < 0:
        raise TypeError(f"rank {src} has something that cannot be broadcast: {received.decode()}")
    return msgspec.msgpack.decode(received)
