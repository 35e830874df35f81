"""One update for every way and every peer: it asks no transport what it is, and ends or aborts once."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from sharding import update
from sharding.ranks import RemoteError
from sharding.report import SyncReport, SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource
from sharding.transports.base import Transport, as_transport
from sharding.update import Update
from sharding.workers import Workers
from tests.support.in_process import small_weights

WAYS = {"Staged", "ZeroCopy", "Pull", "Broadcast", "Storage"}


class OwnWay:
    """A user's way of sending weights, without base class or transfer, which records its calls."""

    reader, cuts, shares = "own:Reader", False, False

    def __init__(self) -> None:
        self.events: list[str] = []
        self.arrived: list[bytes] = []
        self.buffers: list[torch.Tensor] = []

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        self.buffers = [torch.empty(plan.capacity + 8, dtype=torch.uint8) for _ in range(2)]
        self.events.append(f"begin {version}")

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        self.arrived.append(self.buffers[fields["buffer"]][: fields["nbytes"]].numpy().tobytes())
        self.events.append(kind)
        return {}

    def wait(self, buffer: int) -> None:
        """Nothing to wait for."""

    def finish(self, release: bool) -> None:
        self.events.append("finish")

    def abort(self, reason: str) -> None:
        self.events.append(f"abort: {reason}")


def started(way: Any) -> Update:
    source = FsdpWeightSource(list(small_weights(0).items()), torch.float32)
    return Update(source, way, SyncSettings("off", bucket_bytes=512))


def test_a_way_without_a_transfer_of_its_own_gets_every_bucket() -> None:
    way = OwnWay()
    report = SyncReport(7)
    assert started(way).run(report, Workers()) == []
    assert way.events == ["begin 7", *["bucket"] * 5, "finish"]
    held = [torch.frombuffer(bytearray(memory), dtype=torch.float32) for memory in way.arrived]
    for memory, weight in zip(held, small_weights(0).values(), strict=True):
        assert torch.equal(memory[: weight.numel()].view(weight.shape), weight)
    assert report.nbytes == 5 * 512 and report.staging_bytes == 2 * 512 and report.verified == ""


def test_a_way_with_a_transfer_of_its_own_uses_it() -> None:
    way = OwnWay()
    way.transfer = lambda update: way.events.append(f"{len(update.parameters)} weights")  # type: ignore[attr-defined]
    started(way).run(SyncReport(7), Workers())
    assert way.events == ["5 weights", "finish"]


class InheritedWay(Transport):
    """The same, by inheritance: with the methods alone that have no default."""

    reader = "own:Reader"
    __init__ = OwnWay.__init__
    begin = OwnWay.begin
    send = OwnWay.send
    finish = OwnWay.finish
    events: list[str]


def test_a_way_that_inherits_gets_every_bucket_as_one_that_does_not() -> None:
    way, other = InheritedWay(), OwnWay()
    started(way).run(SyncReport(7), Workers())
    started(other).run(SyncReport(7), Workers())
    assert way.events == other.events == ["begin 7", *["bucket"] * 5, "finish"]


def test_an_object_of_any_class_becomes_a_transport_with_the_defaults_it_lacks() -> None:
    way = OwnWay()
    transport = as_transport(way)
    assert transport is way and isinstance(way, OwnWay) and isinstance(way, Transport)
    transport.connect(None)
    transport.leave("lost")
    assert way.events == ["abort: lost"] and not transport.survives
    assert as_transport(transport) is transport and type(transport).__name__ == "OwnWay"


def test_an_interrupted_update_is_aborted_once_with_its_reason() -> None:
    way = OwnWay()
    updates = started(way)
    way.send = lambda *_: (_ for _ in ()).throw(OSError("no way out"))  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="phase sending weights failed on rank 0: OSError: no way out"):
        updates.run(SyncReport(7), Workers())
    assert way.events == ["begin 7", "abort: no way out"]
    del way.send
    updates.run(SyncReport(8), Workers())
    assert way.events[2:] == ["begin 8", *["bucket"] * 5, "finish"]


def test_an_update_never_asks_which_way_it_has() -> None:
    """No name in the code of `update` is that of a way; comments may mention ways."""
    tree = ast.parse(Path(update.__file__).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & (WAYS | {"in_place", "reader"})
    asked = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "isinstance" in ast.unparse(node.func)
    ]
    assert all("way" not in call for call in asked), asked
