"""The settings of the weights' path to the engine, and the report of a sync."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Verify = Literal["off", "sample", "full"]


@dataclass(frozen=True)
class SyncSettings:
    """Settings of the weights' path to the engine.

    Attributes: verify: which weights are compared in an update: none, a sample, or all.
        bucket_bytes: bounds either staging buffer, except for weights that a worker needs whole:
        all of them in the first update, later on those that it cannot replay. timeout: of every
        wait for a worker, s. replay: workers record the copies of vLLM's loaders in the first
        update, and repeat them from then on (`sharding.worker.recording`). delta: engines on other
        devices are sent only the words that have changed since the last update, and all digests are
        compared. Everything is sent if weights are not verified, or their source has no
        `own_values`.
    """

    verify: Verify = "sample"
    bucket_bytes: int = 512 << 20
    timeout: float = 300.0
    replay: bool = True
    delta: bool = False


@dataclass(frozen=True)
class AdapterFormat:
    """The format of a LoRA adapter, where updates are its factors on a base that the engines have,
    not full weights.

    Attributes:
        config: the content of PEFT's adapter_config.json, as far as engines need it; plain types.
        vocabulary: number of tokens that the model knows.
    """

    config: dict[str, Any]
    vocabulary: int


@dataclass
class SyncReport:
    """The report of one sync.

    Attributes: version: of the weights. nbytes: of all buckets, with those that were sent again to
        be compared. messages: number of messages to this rank's workers. staging_bytes: of both
        buffers together. staging_opened, staging_closed: how often this rank's worker has mapped
        and unmapped staging memory so far. verified: the comparison that was made: "", "sample",
        "full" or "probe". unreplayable: weights that the workers of this leader's engine cannot
        replay, with the reasons; None where they record nothing, or on a rank that leads none.
        left_out: weights that no worker of this engine has taken anything of, as it does at its
        start, on purpose. offloaded: bytes that the trainer put away for the generation shift.
        spared: bytes that were not sent, out of `nbytes`, since they had not changed. unpatched: a
        sentence about the weights that patches cannot change; "" if they are few, or nothing is
        patched. resent: why everything was sent although patches would have done; "" if they did,
        or there were none. seconds: by phase of the shift.
    """

    version: int
    nbytes: int = 0
    messages: int = 0
    staging_bytes: int = 0
    staging_opened: int = 0
    staging_closed: int = 0
    verified: str = ""
    unreplayable: dict[str, str] | None = None
    left_out: list[str] = field(default_factory=list)
    offloaded: int = 0
    spared: int = 0
    unpatched: str = ""
    resent: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """Bytes that were sent, of buckets and of patches in their place."""
        return self.nbytes - self.spared

    def notes(self, previous: "SyncReport") -> Iterator[str]:
        """Yield a sentence for each fact that a user should know, and that the report before did
        not tell.
        """
        if self.resent:
            yield f"all weights were sent, since {self.resent}"
        if self.unpatched not in ("", previous.unpatched):
            yield self.unpatched
        if self.left_out != previous.left_out:
            noun = "weight" if len(self.left_out) == 1 else "weights"
            names = ", ".join(self.left_out)
            yield f"vLLM leaves out {len(self.left_out)} {noun} of this model: {names}"
