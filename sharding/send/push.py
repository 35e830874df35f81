"""The messages and the buckets that a rank sends in an update, and the check of the weights that workers then hold.

Messages go to `Workers`, each at the end of a `Link`; the bytes of buckets go by the recipe's `Way`.

Weights that workers have recorded are verified by digests, without a second send: every rank digests its own shards,
straight from the policy's parameters, and the ranks' parts are added up. So nothing in between is trusted: not the
cast, the gather, the staging buffer, nor the record. Weights that pass through vLLM's loaders are sent a second time,
for the loaders to compare.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sharding.ranks import allreduce_objects
from sharding.send.source import WeightSource
from sharding.send.ways import Bucket, BucketPlan, Way
from sharding.wire.channel import Look, MessageLine, SyncError
from sharding.wire.digests import add, cut, digest, packed, part_of, sum_up
from sharding.wire.manifest import SourceParameter, View
from sharding.wire.staging import BUFFERS, STAMP_BYTES, stamp

SAMPLED_SHARE = 16
"""`verify: sample` looks at one parameter in this many, others at every sync."""

Verify = Literal["off", "sample", "full"]


@dataclass(frozen=True)
class SyncSettings:
    """Settings of the weights' way to the engine.
    `bucket_bytes`: bounds either staging buffer, except for weights that a worker needs whole: all of them in the first
    update, later on those that it cannot replay.
    `timeout`: of every wait for a worker, s.
    `replay`: workers record what vLLM's loaders do in the first update, and repeat it from then on
    (`sharding.worker.recording`).
    `delta`: engines apart are sent what has changed since the last update, and all digests are compared. Everything is
    sent if weights are not verified, or their source has no `own_values`.
    """

    verify: Verify = "sample"
    bucket_bytes: int = 512 << 20
    timeout: float = 300.0
    replay: bool = True
    delta: bool = False


@dataclass(frozen=True)
class AdapterFormat:
    """Marks updates as the factors of a LoRA adapter, on a base that the engines have loaded, not full weights.
    `config`: what PEFT writes to adapter_config.json, as far as engines need it; plain types.
    `vocabulary`: how many tokens the model knows.
    """

    config: dict[str, Any]
    vocabulary: int


@dataclass
class SyncReport:
    """One sync.
    `verified`: what was compared: "", "sample", "full" or "probe".
    `staging_opened`, `staging_closed`: how often this rank's worker has mapped staging memory so far, and let it go.
    `unreplayable`: weights that the workers of this leader's engine cannot replay, and why; None where they record
    nothing, or on a rank that leads none.
    `left_out`: weights that no worker of this engine has taken anything of, as it does at its start, on purpose.
    `offloaded`: bytes that the trainer put away for the generation shift.
    `spared`: bytes that were not sent, out of `nbytes`, since they had not changed.
    `unpatched`: a sentence about the weights that patches cannot change, "" if they are few, or nothing is patched.
    `resent`: why everything was sent although patches would have done; "" if they did, or there were none.
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


def futures(calls: Sequence[Any]) -> "list[Future[Any]]":
    """Return engines' calls as futures; each of Ray's ObjectRefs has one."""
    return [call.future() if hasattr(call, "future") else call for call in calls]


def raise_if_failed(calls: Sequence["Future[Any]"]) -> None:
    """Raise when an engine's call has ended with an error: nobody will answer for that engine."""
    for call in calls:
        if call.done() and (error := call.exception()) is not None:
            raise SyncError(f"an engine's call failed: {type(error).__name__}: {error}") from error


class Link:
    """A rank's conversation with one worker during one update. Its methods raise nothing: errors are kept.

    Messages are answered in order, so they can be sent ahead of their answers. After the first failure nothing more is
    sent, and answers are {}.

    Attributes:
        worker: the worker's device, or its rank in the weights group.
        error: the first failure.
        lost: the worker cannot be reached.
        left: the worker has left its receive loop.
        messages: number of messages sent so far.
        unanswered: number of those whose answers are yet to be collected.
    """

    def __init__(self, channel: MessageLine, session: int, timeout: float, still_alive: Look, worker: str) -> None:
        """`session` tells this update's messages from those of a broken one; for the rest see `Channel.receive`."""
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
            self.error, self.lost = SyncError(f"the worker on {self.worker} cannot be reached: {error}"), True
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
            self.error, self.lost = error, True
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
                self._receive(seconds)  # what it has answered before it read of the end
        except (SyncError, TimeoutError):
            self.lost = True
        return not self.lost

    def _receive(self, timeout: float, still_alive: Look = lambda: None) -> dict[str, Any]:
        """Return the next message of this update."""
        while True:
            answer = self._channel.receive(timeout, f"answer from the worker on {self.worker}", still_alive)
            if answer.get("session") == self._session:
                self.left = answer.get("left", False)
                return answer


class Workers:
    """The workers that a rank speaks to in an update: its own, those of all engines, or none where rank 0 does that.

    The failure of one is the failure of all, under its name. Nothing raises: the ranks agree on errors together.
    """

    def __init__(self, *links: Link) -> None:
        self.links = links
        self._way_error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """The first failure, of a worker or of the way; from then on nothing is sent."""
        return next((link.error for link in self.links if link.error), self._way_error)

    def fail(self, error: Exception) -> None:
        """Note that the way has failed."""
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
        """Tell all workers to leave the update; True if all did within `seconds`, and the way has not failed."""
        for link in self.links:
            link.abort(reason)
        return self._way_error is None and all(link.has_left(seconds) for link in self.links)


def push(
    source: WeightSource, plan: BucketPlan, way: Way, workers: Workers, kind: str, stamps: Iterator[int]
) -> list[list[dict[str, Any]]]:
    """Gather each bucket into one buffer while the workers read the other; returns their answers for each bucket.
    Collective over the trainer's ranks: gathering continues when a worker, or the way, has failed.
    """
    answers = []

    def reuse(buffer: int) -> None:
        answers.append(workers.collect())  # they are done with what this buffer held
        _note_failure(workers, way.wait, buffer)

    for number, bucket in enumerate(plan.buckets):
        at, mark = number % BUFFERS, next(stamps)
        if number >= BUFFERS:
            reuse(at)
        gather(source, bucket, way.buffers[at], mark)
        fields: dict[str, Any] = {
            "buffer": at,
            "nbytes": bucket.nbytes,
            "stamp": mark,
            "pieces": [(p.name, p.dtype, p.shape, p.offset) for p in bucket.pieces()],
            "stretches": [(s.name, s.dtype, s.first, s.count, s.offset) for s in bucket.stretches()],
        }
        where = _note_failure(workers, way.send, kind, fields, workers.error is not None)
        workers.post(kind, **(fields | (where or {})))
    for number in range(max(len(plan.buckets) - BUFFERS, 0), len(plan.buckets)):
        reuse(number % BUFFERS)
    return answers


def _note_failure(workers: Workers, action: Callable[..., Any], *arguments: Any) -> Any:
    """Call it; an error is noted, since this rank has others to gather with and must not leave them alone."""
    try:
        return action(*arguments)
    except Exception as error:
        workers.fail(error)


def gather(source: WeightSource, bucket: Bucket, buffer: torch.Tensor, mark: int) -> None:
    """Fill a staging buffer with a bucket, and its stamp behind it."""
    slots = [(slot, buffer[slot.offset : slot.offset + slot.nbytes]) for slot in bucket.slots]
    complete = {slot.parameter.name: memory for slot, memory in slots if slot.whole}
    source.gather_into(list(complete), list(complete.values()))
    for slot, memory in slots:
        if not slot.whole:
            source.gather_part(slot.parameter.name, slot.start, memory)
    stamp(buffer[: bucket.nbytes + STAMP_BYTES], mark)


def parameters_to_verify(parameters: list[SourceParameter], verify: Verify, version: int) -> list[SourceParameter]:
    """Return no parameters, a sample that `version` draws, alike on all ranks, or all of them."""
    if verify == "sample":
        return random.Random(version).sample(parameters, max(1, len(parameters) // SAMPLED_SHARE))
    return parameters if verify == "full" else []


class DigestCheck:
    """The comparison, in one update, of the workers that this rank speaks to with all ranks.

    Attributes:
        request: what workers have to know at the beginning: the checkpoint names of the `weights` that were drawn, and
            the `seed` of which part of each is looked at; without one it is everything.
        comparable: some worker keeps weights as they are sent. Known after `expect`, as are
        undigested: the parameters drawn of which such a worker has a weight from its loaders, or all, where the source
            cannot say what a rank holds.
    """

    def __init__(
        self, source: Any, parameters: list[SourceParameter], verify: Verify, version: int, again: Verify | None = None
    ) -> None:
        """`source`: a `ShardedSource`, or a `WeightSource`. `again`: which weights are sent a second time where digests
        do not do; None: those that `verify` draws.
        """
        self._again = {parameter.name for parameter in parameters_to_verify(parameters, again or verify, version)}
        self._source = source
        self._drawn = parameters_to_verify(parameters, verify, version)
        self._seed = version if verify == "sample" else None
        draw = random.Random(version)
        self._places = {
            piece.name: (parameter, piece)
            for parameter in self._drawn
            for piece in ([draw.choice(parameter.pieces)] if verify == "sample" else parameter.pieces)
        }
        digested = list(self._places) if hasattr(source, "own_values") else []
        self.request: dict[str, Any] = {"weights": digested, "seed": self._seed}
        self.undigested: list[SourceParameter] = []
        self.comparable = False
        self._expected: list[dict[str, bytes]] = []

    def expect(self, terms: list[dict[str, Any]]) -> None:
        """Learn what each worker should hold. Collective.
        `terms`: by worker, whether it keeps weights as they are sent (`plain`), and its `views`: of the weights drawn,
        what it copies into its parameters; none of a weight that its loaders take care of.
        """
        if not self._drawn:
            return
        needs = [self._needs(term["plain"], term["views"]) for term in terms]
        asked, lacking, self.comparable = allreduce_objects(functools.reduce(_join, needs, [{}, [], False]), _join)
        names = self._again.intersection(self._places[name][0].name for name in lacking)
        self.undigested = [parameter for parameter in self._drawn if parameter.name in names]
        holders = {name: self._source.holders(self._places[name][0].name) for name in asked}
        parts = {name: {str(holders[name][0]): self._sums(name, ways)} for name, ways in asked.items()}
        shared = {name: part for name, part in parts.items() if len(holders[name]) > 1}
        sums = parts | allreduce_objects(shared, _join_sums)
        digests = {name: [*map(digest, sums[name][str(holders[name][0])])] for name in asked}
        self._expected = [
            {name: digests[name][asked[name].index(views)] for name, views in term["views"].items()} for term in terms
        ]

    def _needs(self, plain: bool, views: dict[str, list[View]]) -> list[Any]:
        """Return one worker's ways of reading weights, the weights that it can only compare, and whether it can."""
        lacking = sorted(self._places.keys() - views.keys()) if plain else []
        return [{name: [way] for name, way in views.items()}, lacking, plain]

    def _sums(self, name: str, ways: list[list[View]]) -> list[bytes]:
        """Sum up this rank's part of a weight, for each way in which workers read it."""
        parameter, piece = self._places[name]
        dtype = getattr(torch, piece.dtype)
        first, values = self._source.own_values(parameter.name)
        first -= piece.offset // dtype.itemsize
        cuts = [itertools.chain.from_iterable(cut(views, self._seed)) for views in ways]
        return [packed(sum_up((part_of(view, values, first) for view in views), dtype)) for views in cuts]

    def different(self, answers: list[dict[str, Any]]) -> list[list[str]]:
        """Return for each worker the weights whose digests differ from those of the ranks' weights."""
        held = [answer["digests"] for answer in answers]
        pairs = zip(self._expected, held, strict=False)  # after a failure there are no answers
        return [[name for name, value in expected.items() if digests.get(name) != value] for expected, digests in pairs]


def _join(lower: Any, higher: Any) -> Any:
    """Unite, by weight, the ways in which workers read it; the weights that some worker can only compare; and whether
    one can.
    """
    ways: dict[str, list[Any]] = dict(lower[0])
    for name, more in higher[0].items():
        ways[name] = (first := ways.get(name, [])) + [way for way in more if way not in first]
    return [ways, sorted({*lower[1], *higher[1]}), lower[2] or higher[2]]


def _join_sums(lower: Any, higher: Any) -> Any:
    """Add up the sums of parts, by weight, by the first of the ranks that hold it together, and by way."""
    totals: dict[str, dict[str, list[bytes]]] = {}
    for name in lower:
        totals[name] = lower[name] | higher[name]
        for first in lower[name].keys() & higher[name].keys():
            both = zip(lower[name][first], higher[name][first], strict=True)
            totals[name][first] = [add(one, other) for one, other in both]
    return totals
