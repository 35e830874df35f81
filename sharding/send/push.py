"""The trainer's half of an update: announce it, gather bucket by bucket, and hand each to whoever reads it.

Messages go to a `Peer`, a rank's own worker as a rule (`Link`); the bytes of buckets go the recipe's `Way`.

The workers' weights are compared with the ranks' by digests: nothing is gathered or sent a second time. Every rank
digests its own shards, straight from the policy's parameters, and the ranks' parts are added up. So nothing in between
is trusted: not the cast, the gather, the staging buffer, nor what the worker recorded.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from sharding.ranks import allreduce_objects
from sharding.send.source import ShardedSource, WeightSource
from sharding.send.ways import Bucket, BucketPlan, Way
from sharding.wire.channel import Conversation, Look, SyncError
from sharding.wire.digests import add, cut, digest, packed, part_of, sum_up
from sharding.wire.manifest import SourceParameter, View, manifest_of
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
    """

    verify: Verify = "sample"
    bucket_bytes: int = 512 << 20
    timeout: float = 300.0
    replay: bool = True


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
    `unreplayable`: weights that the workers of this leader's engine cannot replay, and why; None where they record
    nothing, or on a rank that leads none.
    `left_out`: weights that no worker of this engine has taken anything of, as it does at its start, on purpose.
    `offloaded`: bytes that the trainer put away for the generation shift.
    """

    version: int
    nbytes: int = 0
    messages: int = 0
    staging_bytes: int = 0
    verified: str = ""
    unreplayable: dict[str, str] | None = None
    left_out: list[str] = field(default_factory=list)
    offloaded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def futures(calls: Sequence[Any]) -> "list[Future[Any]]":
    """Engines' calls as futures: Ray's ObjectRefs have one each."""
    return [call.future() if hasattr(call, "future") else call for call in calls]


def raise_if_failed(calls: Sequence["Future[Any]"]) -> None:
    """Raise when an engine's call has ended with an error: nobody will answer for that engine."""
    for call in calls:
        if call.done() and (error := call.exception()) is not None:
            raise SyncError(f"an engine's call failed: {type(error).__name__}: {error}") from error


class Peer(Protocol):
    """The receiver of an update's messages: a worker (`Link`), many workers, or nobody.
    Nothing here raises: errors are kept, and the ranks agree on them together.
    `error`: the first failure; from then on nothing is sent.
    """

    error: Exception | None

    @property
    def messages(self) -> int:
        """Sent so far."""

    def post(self, kind: str, **fields: Any) -> None:
        """Send without waiting for the answer."""

    def collect(self) -> dict[str, Any]:
        """The answer to the oldest unanswered message; {} after a failure."""


class NullPeer:
    """The peer of a rank that only gathers, for another rank to send."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.messages = 0

    def post(self, kind: str, **fields: Any) -> None:
        """See `Peer`."""

    def collect(self) -> dict[str, Any]:
        return {}


class Link:
    """A rank's conversation with one worker during one update. See `Peer`.

    Messages are answered in order, so they can be sent ahead of their answers. After the first failure nothing more is
    sent, and answers are {}: the rank continues with the others' collectives.
    `ended`: the worker has left its receive loop.
    """

    def __init__(self, channel: Conversation, session: int, timeout: float, still_alive: Look, worker: str) -> None:
        """See `Channel.receive`; `session` tells this update's messages from those of one that broke off."""
        self.error: Exception | None = None
        self.ended, self.messages = False, 0
        self._channel, self._session, self._timeout = channel, session, timeout
        self._still_alive, self._worker = still_alive, worker
        self._unanswered = 0

    def post(self, kind: str, **fields: Any) -> None:
        if self.error is not None:
            return
        try:
            self._channel.send(kind, session=self._session, **fields)
        except SyncError as error:
            self.error = SyncError(f"the worker on {self._worker} cannot be reached: {error}")
            try:
                self._still_alive()
            except Exception as cause:  # the engine's own end, where that is known
                self.error = cause
        self._unanswered += 1
        self.messages += 1

    def collect(self) -> dict[str, Any]:
        if self.error is not None or not self._unanswered:
            return {}
        waiting_for = f"answer from the worker on {self._worker}"
        try:
            while True:
                answer = self._channel.receive(self._timeout, waiting_for, self._still_alive)
                if answer.get("session") == self._session:
                    break
            self._unanswered -= 1
            if answer["kind"] == "failed":
                self.ended = True
                raise SyncError(f"the worker on {self._worker} failed: {answer['error']}")
            return answer
        except Exception as error:
            self.error = error
            return {}

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send and wait."""
        self.post(kind, **fields)
        return self.collect()

    def abort(self) -> None:
        """Let the worker leave its receive loop, if it is still in it."""
        if not self.ended:
            with suppress(SyncError):
                self._channel.send("abort", session=self._session)


def announce(
    peer: Peer,
    parameters: list[SourceParameter],
    version: int,
    replay: bool = True,
    adapter: dict[str, Any] | None = None,
    verify: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Say what will come: full weights, or a LoRA `adapter` of this `number` and `config`.
    `verify`: what will be compared by digests, see `DigestCheck.request`.
    Returns `plain`: whether the receiver keeps weights as they are sent, so that they can be compared. `views`: what it
    reads of the weights in `verify`. `whole`: which weights have to arrive whole; None: all. `records`: whether it
    notes down in this update what it can replay in later ones. {} after a failure.
    """
    weights = manifest_of(parameters)
    peer.post("begin", weights=weights, version=version, replay=replay, adapter=adapter, verify=verify)
    return peer.collect()


def push(
    source: WeightSource, plan: BucketPlan, way: Way, peer: Peer, kind: str, stamps: Iterator[int]
) -> list[dict[str, Any]]:
    """Gather each bucket into one buffer while the peer reads the other; returns the peer's answers.
    Collective over the trainer's ranks: gathering continues when the peer, or the way, has failed.
    """
    answers = []

    def reuse(buffer: int) -> None:
        answers.append(peer.collect())  # the peer is done with what this buffer held
        _keep_error(peer, way.wait, buffer)

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
        where = _keep_error(peer, way.send, kind, fields, peer.error is not None)
        peer.post(kind, **(fields | (where or {})))
    for number in range(max(len(plan.buckets) - BUFFERS, 0), len(plan.buckets)):
        reuse(number % BUFFERS)
    return answers


def _keep_error(peer: Peer, action: Callable[..., Any], *arguments: Any) -> Any:
    """Call it; an error becomes the peer's, which has others to gather with and must not leave them alone."""
    try:
        return action(*arguments)
    except Exception as error:
        peer.error = peer.error or error


def gather(source: WeightSource, bucket: Bucket, buffer: torch.Tensor, mark: int) -> None:
    """Fill a staging buffer with a bucket, and its stamp behind it."""
    slots = [(slot, buffer[slot.offset : slot.offset + slot.nbytes]) for slot in bucket.slots]
    whole = {slot.parameter.name: memory for slot, memory in slots if slot.whole}
    source.gather_into(list(whole), list(whole.values()))
    for slot, memory in slots:
        if not slot.whole:
            source.gather_part(slot.parameter.name, slot.start, memory)
    stamp(buffer[: bucket.nbytes + STAMP_BYTES], mark)


def different_weights(answers: list[dict[str, Any]]) -> list[str]:
    """The weights that a comparison found different."""
    return [name for answer in answers for name in answer.get("different", [])]


def parameters_to_verify(parameters: list[SourceParameter], verify: Verify, version: int) -> list[SourceParameter]:
    """Nothing, a sample that `version` draws, alike on all ranks, or everything."""
    if verify == "sample":
        return random.Random(version).sample(parameters, max(1, len(parameters) // SAMPLED_SHARE))
    return parameters if verify == "full" else []


class DigestCheck:
    """The comparison, for one update, of this rank's worker with all ranks.
    `request`: what a worker has to know at the beginning: the checkpoint names of the `weights` that were drawn, and
    the `seed` of which part of each is looked at; without one it is everything.
    `undigested`: parameters that were drawn but pass through the loaders of some worker, known after `expect`.
    """

    def __init__(self, source: ShardedSource, parameters: list[SourceParameter], verify: Verify, version: int) -> None:
        self._source = source
        self._drawn = parameters_to_verify(parameters, verify, version)
        self._sampling = verify == "sample"
        draw = random.Random(version)
        self._places = {
            piece.name: (parameter, piece)
            for parameter in self._drawn
            for piece in ([draw.choice(parameter.pieces)] if self._sampling else parameter.pieces)
        }
        self.request: dict[str, Any] = {"weights": list(self._places), "seed": version if self._sampling else None}
        self.undigested: list[SourceParameter] = []
        self._expected: dict[str, bytes] = {}

    def expect(self, views: dict[str, list[View]]) -> None:
        """Learn what this rank's worker should hold. Collective.
        `views`: of the weights drawn, what this worker copies into its parameters; none for a weight that its loaders
        take care of.
        """
        if not self._drawn:
            return
        ways = {name: [views[name]] for name in self._places if name in views}
        asked, lacking = allreduce_objects([ways, sorted(self._places.keys() - ways.keys())], _join_ways)
        unknown = {self._places[name][0].name for name in lacking}
        self.undigested = [parameter for parameter in self._drawn if parameter.name in unknown]
        holders = {name: self._source.holders(self._places[name][0].name) for name in asked}
        own = {name: {str(holders[name][0]): self._sums(name, readings)} for name, readings in asked.items()}
        sums = own | allreduce_objects({name: part for name, part in own.items() if len(holders[name]) > 1}, _join_sums)
        for name in ways:
            of_each_way = sums[name][str(holders[name][0])]
            self._expected[name] = digest(of_each_way[asked[name].index(views[name])])

    def _sums(self, name: str, ways: list[list[View]]) -> list[bytes]:
        """Those of this rank's part of a weight, for each way in which workers read it."""
        parameter, piece = self._places[name]
        dtype = getattr(torch, piece.dtype)
        first, values = self._source.own_values(parameter.name)
        first -= piece.offset // dtype.itemsize
        cuts = [itertools.chain.from_iterable(cut(views, self.request["seed"])) for views in ways]
        return [packed(sum_up((part_of(view, values, first) for view in views), dtype)) for views in cuts]

    def different(self, held: dict[str, bytes]) -> list[str]:
        """The weights whose digests, as the worker holds them, are not those of what the ranks have."""
        return [name for name, value in self._expected.items() if held.get(name) != value]


def _join_ways(lower: Any, higher: Any) -> Any:
    """By weight the ways in which some worker reads it, each once; and the weights that some worker does not read."""
    ways: dict[str, list[Any]] = dict(lower[0])
    for name, more in higher[0].items():
        ways[name] = (known := ways.get(name, [])) + [way for way in more if way not in known]
    return [ways, sorted({*lower[1], *higher[1]})]


def _join_sums(lower: Any, higher: Any) -> Any:
    """By weight, by the first of the ranks that hold it together, and by way: the sums of all their parts."""
    found: dict[str, dict[str, list[bytes]]] = {}
    for name in lower:
        found[name] = lower[name] | higher[name]
        for first in lower[name].keys() & higher[name].keys():
            both = zip(lower[name][first], higher[name][first], strict=True)
            found[name][first] = [add(one, other) for one, other in both]
    return found
