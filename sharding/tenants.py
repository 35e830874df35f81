"""The trainer, as the weight path sees it: memory that it can release for a shift, and a policy
with a version.
"""

from typing import Protocol


class Tenant(Protocol):
    """A part of the trainer whose device memory is not needed, and can be released, while the
    engine generates.
    """

    def release(self, weights: bool) -> int:
        """Release memory that is not needed until `restore`, with its weights if `weights`; return
        the bytes.
        """

    def restore(self) -> None:
        """Take the memory again, as it was; called whether or not anything was released."""


class VersionedPolicy(Tenant, Protocol):
    """A policy that can be synced: its version, and its log-probabilities where weights cannot be
    read back.
    """

    @property
    def version(self) -> int:
        """The number of the weights; it changes whenever they do."""

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability (nats, temperature 1) of each of `token_ids[1:]`.
        Collective.
        """
