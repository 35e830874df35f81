"""Conversations that are being captured, by the keys that clients send."""

import hashlib
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
        key: what its client has to send.
        by_request: a request has opened it, not the program.
        sampling: what its requests have to be sampled with; None leaves that to the client.
        seed: the seed of its requests derives from it; None leaves that to the client.
        policy_version: the only version its requests may be answered by; None takes any.
        lost_keys: requests for answers that came to its own address without its key, and were refused.
    """

    key: str
    history: ChatHistory
    by_request: bool = False
    sampling: SamplingSettings | None = None
    seed: int | None = None
    policy_version: int | None = None
    capture: Capture = field(default_factory=Capture)
    requests: int = 0
    lost_keys: int = 0

    @property
    def place(self) -> str:
        """Names it in addresses, without giving away its key."""
        return hashlib.blake2b(self.key.encode(), digest_size=16).hexdigest()

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
    """Each is kept until it is taken; at most `limit` at a time of the program's, and as many that requests opened."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], limit: int) -> None:
        self._tokenizer, self._ends, self._limit = tokenizer, tuple(eos_token_ids), limit
        self._open: dict[str, Conversation] = {}
        self._places: dict[str, Conversation] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._open

    def __getitem__(self, key: str) -> Conversation:
        return self._open[key]

    def get(self, key: str) -> Conversation | None:
        """The conversation of that key, if it is open."""
        return self._open.get(key)

    def at(self, place: str) -> Conversation | None:
        """The conversation at that address, if it is open."""
        return self._places.get(place)

    def check_room(self, by_request: bool) -> None:
        """Raise TooManyConversations unless one more can be opened."""
        if sum(each.by_request == by_request for each in self._open.values()) >= self._limit:
            raise TooManyConversations(f"{self._limit} trajectories are being captured and nobody takes them")

    def open(
        self,
        key: str = "",
        *,
        by_request: bool = False,
        sampling: SamplingSettings | None = None,
        seed: int | None = None,
        policy_version: int | None = None,
    ) -> Conversation:
        """Begin to capture what comes under `key`, or under a new one that nobody can guess.

        Raises:
            ValueError: it is open already.
            TooManyConversations: as many as the server keeps have not been taken.
        """
        key = key or f"hotbunk-{secrets.token_urlsafe(24)}"
        if key in self._open:
            raise ValueError(f"trajectory {key!r} is being captured already; take it first, or choose another key")
        self.check_room(by_request)
        history = ChatHistory(self._tokenizer, self._ends)
        opened = Conversation(key, history, by_request, sampling, seed, policy_version)
        self._open[key] = self._places[opened.place] = opened
        return opened

    def take(self, key: str) -> list[Trajectory]:
        """The trajectories captured under `key`, which is forgotten.

        Raises:
            KeyError: it is not open.
        """
        taken = self._open.pop(key)
        del self._places[taken.place]
        return taken.trajectories()
