"""TODO."""

import fcntl
import json
import time
from pathlib import Path
from typing import Any

from sharding.wire.channel import SyncError

MANIFEST = "manifest.json"


_SLOTS = ("slot-0", "slot-1")


_FORMAT = 1


_POLL = 0.05  # seconds between two looks at a lock


def _lock(fd: int, how: int, deadline: float, complaint: str) -> None:
    while True:
        try:
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(complaint) from None
            time.sleep(_POLL)


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
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("slot") not in _SLOTS:
        raise SyncError(f"{path} is no manifest of this kind of weights folder (format {_FORMAT})")
    return content
