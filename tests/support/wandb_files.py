"""Read W&B's own files without W&B's service."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _WHOLE, _LAST = 32768, 1, 4


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records (`wandb_internal_pb2.Record`) of a `.wandb` file: LevelDB's log after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    log, at, data = file.read_bytes(), 7, b""
    assert log[:4] == b":W&B"
    while at + 7 <= len(log):
        if (left := _BLOCK - at % _BLOCK) < 7:  # too short for a header: padding
            at += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", log, at)
        data += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(data)
            data = b""
            yield record
