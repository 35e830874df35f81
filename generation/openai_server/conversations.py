"""Conversations that are being captured, by the keys that clients send."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..capture import Capture
from ..chat_history import ChatHistory
from ..sampling import SamplingSettings, sample_seed
from ..trajectory import Trajectory


class TooManyConversations(RuntimeError):
    """More trajectories are open than the server keeps."""


@dataclass
class Conversation:
    """What one key has said so far.

    Attributes:
        sampling: what its requests have to be sampled with; None leaves that to the client.
        seed: the seed of its requests derives from it; None leaves that to the client.
        policy_version: the only version its requests may be answered by; None takes any.
    """

    history: ChatHistory
    sampling: SamplingSettings | None = None
    seed: int | None = None
    policy_version: int | None = None
    capture: Capture = field(default_factory=Capture)
    requests: int = 0

    def next_seed(self) -> int | None:
        """The next request's seed, a function of the conversation's and of how many requests came before."""
        self.requests += 1
        return None if self.seed is None else sample_seed(self.seed, 0, 0, 0, self.requests)

    def trajectories(self) -> list[Trajectory]:
        """What has been captured; each says how many prompts were rendered anew because ids could not be kept."""
        found = self.capture.trajectories()
        for trajectory in found:
            trajectory.metrics["server/retemplated"] = float(self.history.retemplated)
        return found


class Conversations:
    """At most `limit` of them at a time, each until it is taken."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], limit: int) -> None:
        self._tokenizer, self._ends, self._limit = tokenizer, tuple(eos_token_ids), limit
        self._open: dict[str, Conversation] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._open

    def get(self, key: str) -> Conversation | None:
        """The conversation of that key, if it is open."""
        return self._open.get(key)

    def open(
        self,
        key: str = "",
        *,
        sampling: SamplingSettings | None = None,
        seed: int | None = None,
        policy_version: int | None = None,
    ) -> str:
        """Begin to capture what comes under `key`, or under a new one that nobody can guess; gives the key.

        Raises:
            ValueError: it is open already.
            TooManyConversations: as many as the server keeps have not been taken.
        """
        key = key or f"hotbunk-{secrets.token_urlsafe(24)}"
        if key in self._open:
            raise ValueError(f"trajectory {key!r} is being captured already; take it first, or choose another key")
        if len(self._open) >= self._limit:
            raise TooManyConversations(
                f"{self._limit} trajectories are being captured and nobody takes them"
                if self._limit
                else "this server captures no trajectories"
            )
        history = ChatHistory(self._tokenizer, self._ends)
        self._open[key] = Conversation(history, sampling, seed, policy_version)
        return key

    def take(self, key: str) -> list[Trajectory]:
        """The trajectories captured under `key`, which is forgotten.

        Raises:
            KeyError: nothing was captured under it.
        """
        return self._open.pop(key).trajectories()
