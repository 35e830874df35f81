"""Prove, after an update, that the workers hold the weights that the ranks have.

There are three proofs, tried in this order:

1. Digests, for weights that workers copy by their record, without a second send: every rank digests
its own shards, straight from the policy's parameters, and the ranks' parts are added up. So no step
in between has to be trusted: neither the cast, the gather, the staging buffer nor the record. 2.
Loaders, for weights that pass through vLLM's: they are sent a second time, and the loaders compare.
3. A probe, where vLLM re-processes weights, so that they cannot be read back: policy and engine
score the same random tokens.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from generation.engine.engine import Leader
from generation.engine.sampling import NotFiniteError
from generation.engine.settings import LEAST_MODEL_LEN
from sharding.ranks import allreduce_objects
from sharding.report import AdapterFormat, Verify
from sharding.send.source import ShardedSource, StreamSource, WeightSource
from sharding.tenants import VersionedPolicy
from sharding.wire.channel import SyncError
from sharding.wire.digests import add, cut, digest, packed, part_of, sum_up
from sharding.wire.manifest import Piece, SourceParameter, View, first_names
from sharding.workers import Workers

SAMPLED_SHARE = 16
"""`verify: sample` compares one parameter in this many, others at every sync."""

PROBE_TOKENS = LEAST_MODEL_LEN - 1
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest mean gap (nats) of the log-probability probe; a stale or misplaced weight is off by more
than 1. A mixture in bfloat16 sends some tokens to other experts than a trainer in float32: a tiny
one was 0.23 off after 29 steps.
"""

Probe = tuple[list[int], list[float]]
"""Token ids, and the policy's log-probability (nats) of each except the first."""

Answers = list[dict[str, Any]]
"""One answer from each worker, to the same message."""


def parameters_to_verify(
    parameters: list[SourceParameter], verify: Verify, version: int
) -> list[SourceParameter]:
    """Return no parameters, a sample that `version` draws, alike on all ranks, or all of them."""
    if verify == "sample":
        count = max(1, len(parameters) // SAMPLED_SHARE)
        return random.Random(version).sample(parameters, count)
    return parameters if verify == "full" else []


def comparison(source: WeightSource, verify: Verify) -> Verify:
    """Return which weights of an update are compared: those of an iterator are gone by then."""
    return "off" if isinstance(source, StreamSource) else verify


def can_digest(source: WeightSource, verify: Verify) -> bool:
    """Return True if digests can compare all weights of an update."""
    return comparison(source, verify) != "off" and isinstance(source, ShardedSource)


class Verification:
    """The comparison of the weights of this rank's workers with those of the ranks, in one update.
    The caller's lines:

        # The answers are the workers' terms.
        workers.post("begin", verify=verification.request, ...)
        ...  # the weights travel
        workers.post("finish")
        verification.expect(terms)  # while the workers digest their weights
        wrong = verification.verdict(workers, workers.collect_last(), send_again)
        probe = verification.probe(policy, adapter)  # None, unless nothing could be compared

    Attributes: request: tells the workers which checkpoint names to digest (`weights`), and the
        `seed` of the part of each that is digested; without one it is all of it. comparable: True
        after `expect` if some worker keeps weights unchanged, so that they can be compared.
        undigested: after `expect`, the drawn parameters that digests cannot compare, since such a
        worker has a weight of them from its loaders, or all where the source does not know a rank's
        part.
    """

    def __init__(
        self,
        source: WeightSource,
        parameters: list[SourceParameter],
        verify: Verify,
        version: int,
        digest_all: bool = False,
    ) -> None:
        """Draw the weights to compare. `digest_all`: digest every weight, though `verify` draws
        fewer to send again.
        """
        self._sharded = source if isinstance(source, ShardedSource) else None
        self._parameters = parameters
        self._setting = verify
        self._compared = comparison(source, verify)
        digested: Verify = "full" if digest_all else self._compared
        again = parameters_to_verify(parameters, self._compared, version)
        self._again = {parameter.name for parameter in again}
        self._drawn = parameters_to_verify(parameters, digested, version)
        self._seed = version if digested == "sample" else None
        draw = random.Random(version)
        self._homes: dict[str, tuple[SourceParameter, Piece]] = {}
        for parameter in self._drawn:
            pieces = [draw.choice(parameter.pieces)] if digested == "sample" else parameter.pieces
            for piece in pieces:
                self._homes[piece.name] = (parameter, piece)
        digestible = [] if self._sharded is None else list(self._homes)
        self.request: dict[str, Any] = {"weights": digestible, "seed": self._seed}
        self.undigested: list[SourceParameter] = []
        self.comparable = False
        self._expected: list[dict[str, bytes]] = []

    @property
    def compares(self) -> bool:
        """True unless `sync.verify` is off, or the weights are gone once they are sent."""
        return self._compared != "off"

    @property
    def verified(self) -> str:
        """The comparison that was made, if the verdict is good: "sample", "full", or "" where a
        probe has to decide.
        """
        return self._compared if self.comparable else ""

    @property
    def undecided(self) -> bool:
        """True if a probe has to decide, since neither digests nor loaders could compare any
        weight.
        """
        return self._setting != "off" and not self.verified

    def expect(self, terms: Answers) -> None:
        """Work out the digests that each worker should have. Collective.

        `terms`: by worker, whether it keeps weights as they are sent (`plain`), and its `views`:
        the elements of each drawn weight that it copies into its parameters; none of a weight that
        its loaders take care of.
        """
        if not self._drawn:
            return
        needs = [self._needs(term["plain"], term["views"]) for term in terms]
        own_needs = functools.reduce(_join, needs, [{}, [], False])
        requested, lacking, self.comparable = allreduce_objects(own_needs, _join)
        names = self._again.intersection(self._homes[name][0].name for name in lacking)
        self.undigested = [parameter for parameter in self._drawn if parameter.name in names]
        digests = self._digests(requested)
        self._expected = []
        for term in terms:
            readings = term["views"].items()
            self._expected.append(
                {name: digests[name][requested[name].index(views)] for name, views in readings}
            )

    def _needs(self, plain: bool, views: dict[str, list[View]]) -> list[Any]:
        """Return one worker's readings of weights, the weights that only its loaders can compare,
        and `plain`.
        """
        lacking = sorted(self._homes.keys() - views.keys()) if plain else []
        return [{name: [reading] for name, reading in views.items()}, lacking, plain]

    def _digests(self, requested: dict[str, list[list[View]]]) -> dict[str, list[bytes]]:
        """Return the digests of weights, for each way in which some worker reads them.
        Collective.
        """
        holders: dict[str, list[int]] = {}
        parts: dict[str, dict[str, list[bytes]]] = {}
        for name, readings in requested.items():
            assert self._sharded is not None  # else workers were asked for no digests
            parameter, piece = self._homes[name]
            holders[name] = self._sharded.holders(parameter.name)
            first, values = self._sharded.own_values(parameter.name)
            sums = self._sums(piece, first, values, readings)
            parts[name] = {str(holders[name][0]): sums}
        shared = {name: part for name, part in parts.items() if len(holders[name]) > 1}
        totals = parts | allreduce_objects(shared, _join_sums)
        return {name: [*map(digest, totals[name][str(holders[name][0])])] for name in requested}

    def _sums(
        self, piece: Piece, first: int, values: torch.Tensor, readings: list[list[View]]
    ) -> list[bytes]:
        """Return the sums of this rank's part of a weight, for each way in which workers read it.

        `values` [n]: the parameter's elements from number `first` on, of which `piece` is the
        weight.
        """
        dtype = getattr(torch, piece.dtype)
        first -= piece.offset // dtype.itemsize
        sums = []
        for views in readings:
            cuts = itertools.chain.from_iterable(cut(views, self._seed))
            parts = (part_of(view, values, first) for view in cuts)
            sums.append(packed(sum_up(parts, dtype)))
        return sums

    def different(self, answers: Answers) -> list[list[str]]:
        """Return for each worker the weights whose digests differ from those of the ranks'
        weights.
        """
        different = []
        for expected, answer in zip(self._expected, answers, strict=False):
            # After a failure there are no answers
            digests = answer["digests"]
            different.append([name for name, value in expected.items() if digests.get(name) != value])
        return different

    def verdict(
        self,
        workers: Workers,
        answers: Answers,
        send_again: Callable[[list[SourceParameter]], list[Answers]],
    ) -> str:
        """Return a sentence that names workers with other weights than were sent; "" if all agree.
        Collective.

        Args: workers: those that this rank speaks to. answers: to the message `finish`. send_again:
            sends parameters for loaders to compare, and returns the answers for each bucket.
        """
        different = self.different(answers)
        if self.undigested:
            for bucket_answers in send_again(self.undigested):
                for names, answer in zip(different, bucket_answers, strict=False):
                    names += answer["different"]
        return "; ".join(
            f"the worker on {link.worker} does not hold what was sent: {first_names(names)} differ"
            for link, names in zip(workers.links, different, strict=False)
            if names
        )

    def probe(self, policy: VersionedPolicy, adapter: AdapterFormat | None) -> Probe | None:
        """Draw the probe that has to verify the update, where digests and loaders could not; else
        None. Collective.

        The engine is asked later, by `check_probe`, once its KV cache is awake.
        """
        if not self.undecided:
            return None
        return draw_probe(policy, vocabulary_of(self._parameters, adapter))


def _join(lower: Any, higher: Any) -> Any:
    """Unite, by weight, the ways in which workers read it; the weights that only some worker's
    loaders can compare; and whether any worker keeps weights as they are sent.
    """
    readings: dict[str, list[Any]] = dict(lower[0])
    for name, more in higher[0].items():
        first = readings.get(name, [])
        readings[name] = first + [reading for reading in more if reading not in first]
    return [readings, sorted({*lower[1], *higher[1]}), lower[2] or higher[2]]


def _join_sums(lower: Any, higher: Any) -> Any:
    """Add up the sums of parts, by weight, by the first of the ranks that hold it together, and by
    reading.
    """
    totals: dict[str, dict[str, list[bytes]]] = {}
    for name in lower:
        totals[name] = lower[name] | higher[name]
        for first in lower[name].keys() & higher[name].keys():
            pairs = zip(lower[name][first], higher[name][first], strict=True)
            totals[name][first] = [add(one, other) for one, other in pairs]
    return totals


def vocabulary_of(parameters: list[SourceParameter], adapter: AdapterFormat | None) -> int:
    """Return the number of tokens that the model knows, from its weights or from its adapter's
    format.
    """
    if adapter is not None:
        return adapter.vocabulary
    embedding = next((p for p in parameters if "embed" in p.name), parameters[0])
    return embedding.pieces[0].shape[0]


def draw_probe(policy: VersionedPolicy, vocabulary: int) -> Probe:
    """Draw random tokens, and score them by the policy. Collective. Raises NotFiniteError, on all
    ranks alike.
    """
    token_ids = random.Random(policy.version).choices(range(vocabulary), k=PROBE_TOKENS)
    expected = policy.score_tokens(token_ids)
    if bad := [logprob for logprob in expected if not math.isfinite(logprob)]:
        raise NotFiniteError(f"the policy gives random tokens a log-probability of {bad[0]}")
    return token_ids, expected


def check_probe(leader: Leader, probe: Probe, timeout: float) -> None:
    """Score a probe with the engine, for at most `timeout` seconds, and compare with the policy's
    scores.

    Raises SyncError, and leaves the engine without a version, if their mean gap exceeds
    `PROBE_TOLERANCE`.
    """
    token_ids, expected = probe
    scored = leader.thread.run(
        leader.engine.prompt_logprobs_of_all(token_ids), timeout, "the log-probability probe"
    )
    mean_gaps = []
    for logprobs in scored:
        gaps = [abs(a - b) for a, b in zip(expected, logprobs, strict=True)]
        mean_gaps.append(sum(gaps) / len(logprobs))
    gap = max(mean_gaps)
    bound = PROBE_TOLERANCE[leader.engine.settings.dtype]
    if not gap <= bound:
        leader.engine.state.fail_sync()
        raise SyncError(
            f"after the update the engine's log-probabilities are {gap:.3g} nats off the trainer's on "
            f"average, more than {bound:g}: its weights are not the policy's"
        )
