"""A folder of weights, as its writer and its readers see it.

    folder/slot-0, slot-1     the weights themselves, bucket behind bucket
    folder/manifest.json      names the slot that is complete, with every weight's place and every bucket's digest

A writer only writes the slot that the manifest does not name, once the last reader has left it, and replaces the
manifest last, in one step. So a reader finds a complete update or the one before it, and never half of either.
"""

import fcntl
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from sharding.wire.channel import SyncError

MANIFEST = "manifest.json"
SLOTS = ("slot-0", "slot-1")
FORMAT = 1
_POLL_SECONDS = 0.05


def digest(data: memoryview) -> str:
    """Of a bucket's bytes; a reader finds by it what the disk has damaged."""
    return hashlib.blake2b(data).hexdigest()


def lock(fd: int, shared: bool, deadline: float, complaint: str) -> None:
    """Lock a slot for reading, `shared`, or for writing.

    Raises:
        TimeoutError: with this complaint, when others hold it until the deadline (of `time.monotonic`).
    """
    while True:
        try:
            return fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(complaint) from None
            time.sleep(_POLL_SECONDS)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The current manifest of a weights folder.

    Raises:
        SyncError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise SyncError(f"{folder} holds no complete weights: {MANIFEST} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SyncError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("slot") not in SLOTS:
        raise SyncError(f"{path} is not a manifest of this kind of weights folder (format {FORMAT})")
    return content
