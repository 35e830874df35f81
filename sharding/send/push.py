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
from typing import Any

import torch

from sharding.ranks import allreduce_objects
from sharding.report import Verify
from sharding.wire.digests import add, cut, digest, packed, part_of, sum_up
from sharding.wire.manifest import SourceParameter, View

SAMPLED_SHARE = 16
"""`verify: sample` looks at one parameter in this many, others at every sync."""


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
