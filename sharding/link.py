"""A rank's conversation with its worker during one weight update."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from .channel import SyncError


class Conversation(Protocol):
    """What a link speaks through: a `Channel`, or something that behaves like one."""

    def send(self, kind: str, **fields: Any) -> None:
        """See `Channel.send`."""

    def receive(
        self, timeout: float, waiting_for: str, still_alive: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """See `Channel.receive`."""


class Link:
    """Messages are answered in order, so they can be sent ahead of their answers.

    After the first failure it says nothing more, and answers are {}: the rank goes on with the others' collectives.

    Attributes:
        error: the first failure.
        ended: the worker has left its receive loop.
        messages: sent so far.
    """

    def __init__(
        self, channel: Conversation, session: int, timeout: float, still_alive: Callable[[], None], worker: str
    ) -> None:
        """See `Channel.receive`; `session` tells this update's messages from those of one that broke off."""
        self.error: Exception | None = None
        self.ended = False
        self.messages = 0
        self._channel, self._session, self._timeout = channel, session, timeout
        self._still_alive, self._worker = still_alive, worker
        self._unanswered = 0

    def post(self, kind: str, **fields: Any) -> None:
        """Send without waiting for the answer."""
        if self.error is None:
            try:
                self._channel.send(kind, session=self._session, **fields)
            except SyncError as error:
                self.error = self._cause(error)
                return
            self._unanswered += 1
            self.messages += 1

    def _cause(self, error: SyncError) -> Exception:
        """The worker's own death, where it is known already; else that it cannot be reached."""
        try:
            self._still_alive()
        except Exception as cause:
            return cause
        return SyncError(f"the worker on {self._worker} cannot be reached: {error}")

    def collect(self) -> dict[str, Any]:
        """The answer to the oldest unanswered message; {} after a failure."""
        if self.error is not None or not self._unanswered:
            return {}
        try:
            answer = self._answer()
            self._unanswered -= 1
            if answer["kind"] == "failed":
                self.ended = True
                raise SyncError(f"the worker on {self._worker} failed: {answer['error']}")
            return answer
        except Exception as error:
            self.error = error
            return {}

    def _answer(self) -> dict[str, Any]:
        while True:
            answer = self._channel.receive(
                self._timeout, f"answer from the worker on {self._worker}", self._still_alive
            )
            if answer.get("session") == self._session:
                return answer

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send and wait."""
        self.post(kind, **fields)
        return self.collect()

    def abort(self) -> None:
        """Let the worker leave its receive loop, if it is still in it."""
        if not self.ended:
            with suppress(SyncError):
                self._channel.send("abort", session=self._session)
