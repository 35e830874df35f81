"""Weights broadcast to workers of remote engines, all in one process: what they hold, and what it is compared by."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sharding.ranks import RemoteError
from sharding.remote.broadcast import CollectiveSender
from sharding.report import SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource, StreamSource
from sharding.transports.delta import LastSent
from sharding.wire.manifest import SourceParameter
from sharding.worker import extension
from sharding.workers import Link
from tests.support.in_process import SmallModel, Worker, small_weights

CPU = torch.device("cpu")
TIMES = 20
"""So many times the rows of the small model: its matrices are larger than a bucket, its vectors are not."""


class NumberedWorker(Worker):
    """One of several workers of a process: an engine of its own, or one of two that cut weights."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.rank = model.rank


class Whole:
    """A source that cannot say what a rank holds, only gather it."""

    def __init__(self, source: FsdpWeightSource) -> None:
        self._source = source

    def parameters(self) -> list[SourceParameter]:
        return self._source.parameters()

    def gather_into(self, names: list[str], slots: list[Tensor]) -> None:
        self._source.gather_into(names, slots)

    def gather_part(self, name: str, start: int, slot: Tensor) -> None:
        self._source.gather_part(name, start, slot)


class Apart:
    """A policy, an engine of one worker and one of two, and a sender to all three. `posted` has the kinds of
    messages.
    """

    def __init__(
        self, bucket_bytes: int = 1 << 20, shards: bool = True, verify: str = "full", **more: Any
    ) -> None:
        self.weights = small_weights(0, TIMES)
        source: Any = FsdpWeightSource(list(self.weights.items()), torch.float32)
        self.source = source if shards else Whole(source)
        models = [SmallModel(0, 1, times=TIMES), *(SmallModel(rank, 2, times=TIMES) for rank in (0, 1))]
        self.workers = [NumberedWorker.of(model) for model in models]
        self.pool = ThreadPoolExecutor(3)
        settings = SyncSettings(verify, bucket_bytes, 20, **more)  # type: ignore[arg-type]
        self.join(settings)

    def join(self, settings: SyncSettings, session: int = 0) -> None:
        """Have all workers join a new group."""
        self.sender = CollectiveSender(self.source, CPU, settings, workers=3, session=session)
        place = self.sender.ip, self.sender.port, 4
        before = (0, 1, 1)  # workers of earlier engines
        pairs = zip(self.workers, before, strict=True)
        joining = [self.pool.submit(worker.init_collective, first, *place) for worker, first in pairs]
        self.sender.connect(joining)
        assert [call.result()["error"] for call in joining] == [None] * 3

    def send(self, version: int, count: int | None = None) -> Any:
        """Send changed weights, of each `count` elements or all, and check that every worker holds the weights of one
        that has loaded them directly.
        """
        for name, weight in small_weights(version, TIMES).items():
            places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(version))[
                :count
            ]
            self.weights[name].flatten()[places] = weight.flatten()[places]
        report = self.sender.send(version, self.calls())
        for worker in self.workers:
            twin = SmallModel(worker.model.rank, worker.model.ranks, times=TIMES)
            twin.load_weights(self.weights.items())
            for name, parameter in twin.named_parameters():
                assert torch.equal(worker.model.get_parameter(name), parameter), (name, version)
        return report

    def calls(self) -> list[Future[Any]]:
        return [self.pool.submit(worker.update_weights_from_collective, 20.0) for worker in self.workers]

    def nbytes(self, *names: str) -> int:
        """Return the bytes that one send of these weights takes; without names, one send of all weights."""
        parameters = [p for p in self.source.parameters() if not names or p.name in names]
        return BucketPlan(parameters, 1 << 20).nbytes


@pytest.fixture(params=[True, False], ids=["shards", "no shards"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)
    apart = Apart(shards=request.param)
    yield apart
    apart.sender.close()
    apart.pool.shutdown()


def test_recorded_weights_are_sent_once_and_verified_on_each_workers_part(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second send of all weights is needed only where the source cannot say what its rank holds."""
    kinds: list[str] = []
    post = Link.post
    monkeypatch.setattr(
        Link, "post", lambda link, kind, **fields: [kinds.append(kind), post(link, kind, **fields)]
    )
    first = apart.send(1)
    assert (first.nbytes, first.verified) == (2 * apart.nbytes(), "full"), "it is recorded"
    for version in (2, 3):
        kinds.clear()
        report = apart.send(version)
        again = apart.nbytes("scaled") if isinstance(apart.source, FsdpWeightSource) else apart.nbytes()
        assert (report.nbytes - apart.nbytes(), report.verified) == (again, "full"), (
            "`scaled` is left to its loader"
        )
        assert kinds == [
            kind for kind in ("begin", "bucket", "finish", "compare", "end") for _ in apart.workers
        ]
        assert report.messages == len(kinds)


@pytest.mark.parametrize(
    ("rank", "where"), [(1, "weights rank 1"), (2, "weights rank 2"), (3, "weights rank 3")]
)
def test_a_wrong_weight_of_one_worker_is_named_and_the_next_update_repairs_it(
    apart: Apart, rank: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart.send(1)
    model = apart.workers[rank - 1].model
    replay = extension.Receiver._load

    def spoiled(receiver: Any, *arguments: Any) -> None:
        replay(receiver, *arguments)
        if receiver._worker.model is model:
            model.columns.data.view(torch.int32)[7, 3] ^= 1

    sent: list[str] = []
    gather = apart.source.gather_into
    with monkeypatch.context() as patch:
        patch.setattr(extension.Receiver, "_load", spoiled)
        patch.setattr(
            apart.source, "gather_into", lambda names, slots: [sent.extend(names), gather(names, slots)]
        )
        message = f"the worker on {where} does not hold what was sent: columns differ"
        calls = apart.calls()
        with pytest.raises(RemoteError, match=message) as caught:
            apart.sender.send(2, calls)
    assert str(caught.value).count("does not hold") == 1
    assert all("broke the update off" in call.result()["error"] for call in calls)
    if isinstance(apart.source, FsdpWeightSource):
        assert sorted(sent) == sorted([*apart.weights, "scaled"]), (
            "nothing but `scaled` was gathered a second time"
        )
    assert apart.send(3).verified == "full"


def test_weights_larger_than_a_bucket_travel_in_parts_once_they_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)
    apart = Apart(bucket_bytes=1024)
    assert apart.send(1).staging_bytes == 2 * 6144, "the 5760 bytes of `a`"
    for version in (2, 3):
        report = apart.send(version)
        assert (report.staging_bytes, report.verified) == (2 * 1024, "full")
    apart.sender.close()
    apart.pool.shutdown()


@pytest.fixture(params=[(1 << 20, "full"), (1024, "sample")], ids=["", "in parts"])
def patched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    """Return workers that have been sent everything, and patches next."""
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)
    apart = Apart(request.param[0], verify=request.param[1], delta=True)
    first, second = (apart.send(version) for version in (1, 2))
    assert first.spared == 0 and second.spared < second.nbytes / 10, "all changes"
    yield apart
    apart.sender.close()
    apart.pool.shutdown()


def test_ten_patched_updates_are_the_policys_on_every_worker_in_few_bytes(patched: Apart) -> None:
    """Float32 values of 2 words each change in 4 elements of a weight; `scaled`, left to its loader, travels whole."""
    # Of four weights, of counts and padding, and whole
    most = 4 * 4 * 2 * 4 + 20 * 16 + 2 * patched.nbytes("scaled")
    for version in range(3, 13):
        report = patched.send(version, count=4)
        print(f"update {version}: {report.nbytes - report.spared} of {report.nbytes} bytes")
        assert (
            report.nbytes - report.spared <= most + patched.nbytes("scaled") and most < report.nbytes / 4
        )
        assert report.verified in ("sample", "full") and not report.resent


@pytest.mark.parametrize("place", ["worker", "way", "counts", "trainer"])
def test_what_a_patch_does_not_prove_is_found_and_everything_sent_again(
    patched: Apart, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong word in a worker's weights, on the way, or in what rank 0 knows of them."""
    replace, last_sent = LastSent.replace, patched.sender._update.transport.last_sent  # type: ignore[attr-defined]

    def damaged(self: LastSent, bucket: Tensor, fields: dict[str, Any]) -> Tensor | None:
        patch = replace(self, bucket, fields)
        if patch is not None:
            patch[0 if place == "counts" else 4] ^= 3
        return patch

    with monkeypatch.context() as changes:
        if place == "worker":
            patched.workers[2].model.columns.data.view(torch.int32)[7, 3] ^= 1
        elif place == "trainer":
            patched.weights["norm"].view(torch.int32)[:] ^= 1
            last_sent._bytes["norm"].view(torch.int32)[:] = patched.weights["norm"].view(
                torch.int32
            )  # as if it was sent
        else:
            changes.setattr(LastSent, "replace", damaged)
        report = (
            patched.send(13, count=4) if place != "trainer" else patched.sender.send(13, patched.calls())
        )
    assert "does not hold what was sent" in report.resent and report.spared > 0
    report = patched.send(14, count=4)
    assert report.spared > report.nbytes / 2 and not report.resent


def test_all_is_sent_after_an_update_that_broke_off_and_to_a_new_group(patched: Apart) -> None:
    calls = patched.calls()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RemoteError):
        patch.setattr(extension.Receiver, "_load", lambda receiver, *_: receiver.nothing)
        patched.sender.send(3, calls)
    assert all(call.result()["error"] for call in calls)
    report = patched.send(4, count=4)
    assert (report.spared, report.resent) == (0, "the update before broke off")
    assert patched.send(5, count=4).spared > 0
    patched.sender.close()
    patched.join(SyncSettings("sample", 1 << 20, 20, delta=True), session=patched.sender.session)
    report = patched.send(6, count=4)
    assert (report.spared, report.resent) == (0, "workers have joined or left")
    assert patched.send(7, count=4).spared > 0


@pytest.mark.parametrize("patched", [(1 << 20, "full")], indirect=True, ids=[""])
@pytest.mark.parametrize("case", ["iterator", "no digests", "unverified"])
def test_nothing_is_patched_in_an_update_that_digests_do_not_prove(patched: Apart, case: str) -> None:
    sender, update = patched.sender, patched.sender._update
    source, settings = update.source, update.settings
    if case == "unverified":
        update.settings = replace(settings, verify="off")
    else:
        sender.use(
            Whole(patched.source)
            if case == "no digests"
            else StreamSource(sender.refit_info(), iter(patched.weights.items()))
        )
    assert patched.send(3, count=4).spared == 0
    sender.use(source)
    update.settings = settings
    report = patched.send(4, count=4)
    assert (report.spared, report.resent) == (
        0,
        "digests did not compare all weights of the update before",
    )
    assert patched.send(5, count=4).spared > 0
