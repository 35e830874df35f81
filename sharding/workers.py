"""The workers that a rank speaks to in an update, each at the end of a `Link`.

A rank speaks to its own worker, rank 0 to those of all engines on other devices, or a rank to none
at all.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from sharding.wire.channel import Look, MessageLine, SyncError


def futures(calls: Sequence[Any]) -> "list[Future[Any]]":
    """Return engines' calls as futures; each of Ray's ObjectRefs has one."""
    return [call.future() if hasattr(call, "future") else call for call in calls]


def raise_if_failed(calls: Sequence["Future[Any]"]) -> None:
    """Raise when an engine's call has ended with an error: nobody will answer for that engine."""
    for call in calls:
        if call.done() and (error := call.exception()) is not None:
            raise SyncError(f"an engine's call failed: {type(error).__name__}: {error}") from error


class Link:
    """A rank's conversation with one worker during one update. Its methods raise nothing: errors
    are kept.

    Messages are answered in order, so they can be sent ahead of their answers. After the first
    failure nothing more is sent, and answers are {}.

    Attributes:
        worker: the worker's device, or its rank in the weights group.
        error: the first failure.
        lost: the worker cannot be reached.
        left: the worker has left its receive loop.
        messages: number of messages sent so far.
        unanswered: number of those whose answers are yet to be collected.
    """

    def __init__(
        self, channel: MessageLine, session: int, timeout: float, still_alive: Look, worker: str
    ) -> None:
        """Speak to a worker over `channel`. `session` distinguishes the messages of this update
        from those of a broken one; `timeout` and `still_alive` are as in `Channel.receive`.
        """
        self.worker = worker
        self.error: Exception | None = None
        self.lost = self.left = False
        self.messages = self.unanswered = 0
        self._channel = channel
        self._session = session
        self._timeout = timeout
        self._still_alive = still_alive

    def post(self, kind: str, **fields: Any) -> None:
        """Send without waiting for the answer."""
        if self.error is not None:
            return
        try:
            self._channel.send(kind, session=self._session, **fields)
        except SyncError as error:
            self.error = SyncError(f"the worker on {self.worker} cannot be reached: {error}")
            self.lost = True
            try:
                self._still_alive()
            except Exception as cause:  # the engine's own end, where that is known
                self.error = cause
        self.unanswered += 1
        self.messages += 1

    def collect(self) -> dict[str, Any]:
        """Return the answer to the oldest unanswered message."""
        if self.error is not None or not self.unanswered:
            return {}
        try:
            answer = self._receive(self._timeout, self._still_alive)
        except Exception as error:
            self.error = error
            self.lost = True
            return {}
        self.unanswered -= 1
        if answer["kind"] == "failed":
            self.error = SyncError(f"the worker on {self.worker} failed: {answer['error']}")
            return {}
        return answer

    def abort(self, reason: str = "") -> None:
        """Tell the worker to leave its receive loop, if it is still in it."""
        if not self.left:
            with suppress(SyncError):
                self._channel.send("abort", session=self._session, reason=reason)

    def has_left(self, seconds: float) -> bool:
        """Return True once an aborted worker says that it has left, False if it does not within
        `seconds`.
        """
        try:
            while not (self.left or self.lost):
                self._receive(seconds)  # an answer that it sent before it read of the end
        except (SyncError, TimeoutError):
            self.lost = True
        return not self.lost

    def _receive(self, timeout: float, still_alive: Look = lambda: None) -> dict[str, Any]:
        """Return the next message of this update."""
        while True:
            answer = self._channel.receive(
                timeout, f"answer from the worker on {self.worker}", still_alive
            )
            if answer.get("session") == self._session:
                self.left = answer.get("left", False)
                return answer


class Workers:
    """The workers that a rank speaks to in an update: its own, those of all engines, or none where
    rank 0 speaks to all of them.

    If one fails, all count as failed, and the error names that one. No method raises: the ranks
    agree on errors together.
    """

    def __init__(self, *links: Link) -> None:
        self.links = links
        self._way_error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """The first failure, of a worker or of the transport. Nothing is sent after it."""
        return next((link.error for link in self.links if link.error), self._way_error)

    def fail(self, error: Exception) -> None:
        """Record a failure of the transport."""
        self._way_error = self._way_error or error

    @property
    def messages(self) -> int:
        """Number of messages sent so far, to all workers."""
        return sum(link.messages for link in self.links)

    def post(self, kind: str, **fields: Any) -> None:
        """Send to every worker without waiting for the answers."""
        if self.error is None:
            for link in self.links:
                link.post(kind, **fields)

    def collect(self) -> list[dict[str, Any]]:
        """Return each worker's answer to the oldest unanswered message; [] after a failure."""
        answers = [link.collect() for link in self.links] if self.error is None else []
        return [] if self.error else answers

    def collect_last(self) -> list[dict[str, Any]]:
        """Return each worker's answer to the latest message, once all before it are answered; []
        after a failure.
        """
        while self.error is None and any(link.unanswered > 1 for link in self.links):
            self.collect()
        return self.collect()

    def abort(self, reason: str, seconds: float) -> bool:
        """Tell all workers to leave the update; Return True if all did within `seconds`, and the
        transport has not failed.
        """
        for link in self.links:
            link.abort(reason)
        return self._way_error is None and all(link.has_left(seconds) for link in self.links)
