"""The state of an engine: which memory it holds, which weights are in that memory, and what it may
therefore do.
"""

from enum import Enum


class Memory(Enum):
    """The part of the engine's memory that is mapped. Weights wake before the KV cache, never after
    it.
    """

    AWAKE = "awake"
    WEIGHTS = "holding weights but no KV cache"
    ASLEEP = "asleep"
    CLOSED = "closed"


class EngineStateError(RuntimeError):
    """Raised where an engine is asked for something that its state forbids."""


class EngineLifecycle:
    """The state machine of one engine: memory, weight version, and whether weights are on their
    way.

    `version` is the policy version whose weights the engine holds, or None when it holds none that
    can be trusted: before the first sync, after a level-2 sleep, during a sync, and after a failed
    sync. Only a complete sync, or `adopt_checkpoint`, ends that. `latest` is the last version that
    the engine has held, -1 before the first.
    """

    def __init__(self) -> None:
        self.memory = Memory.AWAKE
        self.version: int | None = None
        self.latest = -1
        self.syncing = False

    def __str__(self) -> str:
        weights = (
            "weights of no version" if self.version is None else f"weights of version {self.version}"
        )
        return f"{self.memory.value}, {weights}" + (", being updated" if self.syncing else "")

    def _require(self, action: str, *allowed: Memory) -> None:
        if self.memory not in allowed or self.syncing:
            needed = " or ".join(m.value for m in allowed)
            raise EngineStateError(
                f"cannot {action}: the engine is {self}; it must be {needed} and not being updated"
            )

    def check_can_generate(self, policy_version: int) -> None:
        """Raise `EngineStateError`, naming both versions, unless the engine is awake with the
        policy's weights.
        """
        self._require("generate", Memory.AWAKE)
        if self.version != policy_version:
            raise self._stale(f", the policy is at version {policy_version}")

    def usable_version(self) -> int:
        """Return the version of the weights to generate with. Raises `EngineStateError` if there is
        none.
        """
        self._require("generate", Memory.AWAKE)
        if self.version is None:
            raise self._stale()
        return self.version

    def _stale(self, policy: str = "") -> EngineStateError:
        held = f"version {self.version}"
        if self.version is None:
            held = "no version (they were dropped or never sent)"
        return EngineStateError(
            f"cannot generate: the engine holds weights of {held}{policy}; sync the weights first"
        )

    def adopt_checkpoint(self, version: int) -> None:
        """Note that the weights loaded from disk at the start are those of `version` (no trainer,
        no sync).
        """
        self._require("adopt a checkpoint", Memory.AWAKE)
        self.version = self.latest = version

    def sleep(self, keeps_weights: bool) -> None:
        """Note that the engine sleeps. It may have been awake, or half awake after a failed wake or
        sync.
        """
        self._require("sleep", Memory.AWAKE, Memory.WEIGHTS)
        self.memory = Memory.ASLEEP
        if not keeps_weights:
            self.version = None

    def wake_weights(self) -> None:
        """Note that the weights' memory is mapped. Its contents cannot be trusted after a level-2
        sleep.
        """
        self._require("wake the weights", Memory.ASLEEP)
        self.memory = Memory.WEIGHTS

    def wake_kv_cache(self) -> None:
        """Note that the KV cache is mapped. The weights come first, since an engine that is half
        awake must not run (https://github.com/vllm-project/vllm/issues/44395).
        """
        self._require("wake the KV cache", Memory.WEIGHTS)
        self.memory = Memory.AWAKE

    def begin_sync(self) -> None:
        """Note that weights start to arrive: from now until `finish_sync` the engine holds no
        version.
        """
        self._require("update weights", Memory.AWAKE, Memory.WEIGHTS)
        self.syncing = True
        self.version = None

    def finish_sync(self, version: int) -> None:
        """Note that every weight of `version` has arrived and was accounted for."""
        if not self.syncing:
            raise EngineStateError(
                f"cannot finish a weight update that never began: the engine is {self}"
            )
        self.syncing = False
        self.version = version
        self.latest = version

    def fail_sync(self) -> None:
        """Note that a sync broke off: the engine stays without a version until a complete one
        succeeds.
        """
        self.syncing = False
        self.version = None

    def close(self) -> None:
        """Note that the engine's processes have ended."""
        self.memory = Memory.CLOSED
        self.version = None
        self.syncing = False
