"""Compares the workers' weights with the ranks' by digests: nothing is gathered or sent a second time.

Every rank digests its own shards, straight from the policy's parameters, and the ranks' parts are added up. So nothing
in between is trusted: not the cast, the gather, the staging buffer, nor what the worker recorded.
"""

import random
from typing import Any, Literal

import torch

from sharding.ranks import exchange
from sharding.send.source import ShardedSource
from sharding.wire.digests import MODULUS, cut, digest, part_of
from sharding.wire.manifest import SourceParameter, View

SAMPLED_SHARE = 16
"""`verify: sample` looks at one parameter in this many, others at every sync."""

Verify = Literal["off", "sample", "full"]


def parameters_to_verify(parameters: list[SourceParameter], verify: Verify, version: int) -> list[SourceParameter]:
    """Nothing, a sample that `version` draws, alike on all ranks, or everything."""
    if verify == "sample":
        return random.Random(version).sample(parameters, max(1, len(parameters) // SAMPLED_SHARE))
    return parameters if verify == "full" else []


class DigestCheck:
    """The comparison, for one update, of this rank's worker with all ranks.

    Attributes:
        request: what a worker has to know at the beginning: the checkpoint names of the `weights` that were drawn, and
            the `seed` of which part of each is looked at; without one it is everything.
        undigested: parameters that were drawn but pass through the loaders of some worker, known after `expect`.
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
        self._expected: dict[str, int] = {}

    def expect(self, views: dict[str, list[View]]) -> None:
        """Learn what this rank's worker should hold. Collective.

        Args:
            views: of the weights drawn, what this worker copies into its parameters; none for a weight that its loaders
                take care of.
        """
        if not self._drawn:
            return
        readers: list[dict[str, list[View]]] = exchange(views)
        asked: dict[str, list[list[View]]] = {name: [] for name in self._places}  # each reading once
        for name, reading in ((name, r[name]) for r in readers for name in self._places if name in r):
            asked[name] += [reading] if reading not in asked[name] else []
        unknown = {self._places[name][0].name for name in asked if any(name not in r for r in readers)}
        self.undigested = [parameter for parameter in self._drawn if parameter.name in unknown]
        parts = exchange({name: self._digests(name, ways) for name, ways in asked.items() if ways})
        for name, own in views.items():
            which, holders = asked[name].index(own), self._source.holders(self._places[name][0].name)
            self._expected[name] = sum(parts[holder][name][which] for holder in holders) % MODULUS

    def _digests(self, name: str, ways: list[list[View]]) -> list[int]:
        """This rank's part of a weight's digest, for each way in which workers read it."""
        parameter, piece = self._places[name]
        dtype = getattr(torch, piece.dtype)
        first, values = self._source.own_values(parameter.name)
        first -= piece.offset // dtype.itemsize
        return [
            digest(part_of(p, values, first, dtype) for parts in cut(views, self.request["seed"]) for p in parts)
            for views in ways
        ]

    def different(self, held: dict[str, int]) -> list[str]:
        """The weights whose digests, as the worker holds them, are not those of what the ranks have."""
        return [name for name, value in self._expected.items() if held.get(name) != value]
