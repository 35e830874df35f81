"""The interfaces of the trainer that weight syncs and generation shifts use: memory that can be
released while engines generate, and a policy with a version.
"""

from typing import Protocol


class Tenant(Protocol):
    """A part of the trainer, such as a model with its optimizer, that lends its device memory to
    the engine while the engine generates.
    """

    def release(self, weights: bool) -> int:
        """Release device memory that is not needed until `restore`; the weights stay unless
        `weights` is True. Return the number of bytes released.
        """

    def restore(self) -> None:
        """Allocate the released memory again, with the same contents. It is also called where
        nothing was released.
        """


class VersionedPolicy(Tenant, Protocol):
    """A policy whose weights are sent to engines, with the number of their version. Its
    log-probabilities are compared with the engine's where the engine's weights cannot be read back.
    """

    @property
    def version(self) -> int:
        """The version of the weights: a number that changes with every change of the weights."""

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability (nats, temperature 1) of each of `token_ids[1:]`, given the
        tokens before it. Collective.
        """
