"""A record of the weights that engines apart hold, from which rank 0 sends only what has changed (`sync.delta`).

Rank 0 keeps a copy of all weights in the engine's dtype in host memory. Digests of blocks would need hardly any, but
could name only blocks, all of which change (`sharding.wire.patches`). A worker keeps no copy: it reads the former
content of a bucket back out of its weights (`Recording.recall`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from sharding.wire.manifest import SourceParameter, first_names
from sharding.wire.patches import patch_between


class LastSent:
    """The weights as they were last sent. All ranks have one, and rank 0 alone fills it.

    Attributes:
        spared: bytes that patches have saved in this update; 0: everything was sent.
        unpatched: a sentence about the weights that always travel whole, "" if they are less than 1 % of the bytes.

    What is sent outside of `begin` and `commit` is neither patched nor kept.
    """

    def __init__(self, reason: str = "") -> None:
        """`reason`: why there is nothing to patch, where workers have been sent weights before."""
        self.spared = 0
        self.unpatched = ""
        self._whole: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._bytes: dict[str, Tensor] = {}
        self._known: set[str] = set()
        self._reason = reason

    def begin(self, parameters: list[SourceParameter], unrecorded: set[str] | None) -> None:
        """Prepare for an update. `unrecorded`: weights that some worker cannot read back; None: all
        of them.
        """
        if unrecorded is None:
            self.forget("a worker has no record yet of where its weights go")
        self.spared = 0
        self._whole = self._whole if unrecorded is None else unrecorded
        sizes = {piece.name: piece.nbytes for parameter in parameters for piece in parameter.pieces}
        self._sizes = {name: nbytes for name, nbytes in sizes.items() if name not in self._whole}
        percent = round(100 - 100 * sum(self._sizes.values()) / max(sum(sizes.values()), 1))
        whole = first_names(sorted(sizes.keys() - self._sizes.keys()))
        self.unpatched = f"{percent} % of the bytes cannot be patched, since engines re-process {whole}" * (percent > 0)
        self._bytes = {name: kept for name, kept in self._bytes.items() if self._sizes.get(name) == kept.nbytes}
        self._known &= self._bytes.keys()

    def replace(self, bucket: Tensor, fields: dict[str, Any]) -> Tensor | None:
        """Note a bucket, uint8 [nbytes], and return the patch that leads to it; None: it has to be
        sent whole.

        `fields` are those of its message.
        """
        pieces = [(name, dtype, 0, math.prod(shape), offset) for name, dtype, shape, offset in fields["pieces"]]
        places = [*pieces, *fields["stretches"]]
        former = bucket.clone() if any(name in self._known for name, *_ in places) else None  # padding does not change
        for name, dtype, first, count, offset in places:
            width = getattr(torch, dtype).itemsize
            memory = bucket[offset:][: count * width]
            if former is not None and name not in self._known:  # all of it is sent
                torch.bitwise_not(memory, out=former[offset:][: count * width])
            if name not in self._sizes:
                continue
            if name not in self._bytes:
                self._bytes[name] = torch.empty(self._sizes[name], dtype=torch.uint8)
            kept = self._bytes[name][first * width :][: count * width]
            if former is not None and name in self._known:
                former[offset:][: count * width] = kept
            kept.copy_(memory)
        patch = None if former is None else patch_between(former, bucket)
        self.spared += 0 if patch is None else bucket.nbytes - patch.nbytes
        return patch

    def commit(self) -> str:
        """Note that all workers hold the weights sent. Return why all were sent again, or "" if
        they were not.
        """
        self._known, self._sizes = set(self._bytes), {}
        reason, self._reason = self._reason, ""
        return reason

    def forget(self, reason: str) -> None:
        """Send everything in the next update. The first `reason` is reported, if there was anything
        to patch.
        """
        self._reason = self._reason or (reason if self._known else "")
        self._known, self._sizes = set(), {}
