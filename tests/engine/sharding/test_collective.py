"""Weights for remote engines: broadcast to two real engines, read from a folder, and failures."""

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig

from generation.engine.sampling import SamplingSettings
from sharding.ranks import RemoteError
from sharding.remote.broadcast import CollectiveSender, engine_ranks
from sharding.remote.storage import StorageWriter
from sharding.report import SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource, StreamSource
from sharding.wire.manifest import checkpoint_manifest, differences
from sharding.workers import Link
from tests.conftest import TinyModel
from tests.support.colocated import HfPolicy, start_engine, stop
from tests.support.nemo_worker import NemoWorker
from trainer.policy.hf_format import checkpoint_views, parameter_names

PROMPT = [20 + i for i in range(40)]  # longer than several blocks of the prefix cache
SETTINGS = SyncSettings("full", bucket_bytes=1 << 16, timeout=30)


class Apart:
    """A policy in this process, and two engines that share only the weights group with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy = HfPolicy(folder)
        self.engines = [start_engine(folder, plain, NemoWorker) for plain in (True, False)]
        self.sender = self.join(SETTINGS)

    def source(self) -> FsdpWeightSource:
        model = self.policy.model
        layout = lambda name, shape: checkpoint_views(model, name, shape)  # noqa: E731
        return FsdpWeightSource(list(parameter_names(model).items()), torch.float32, layout)

    def call(self, action: Callable[[Any], Coroutine[Any, Any, Any]]) -> list[Future[Any]]:
        return [leader.thread.submit(action(leader.engine)) for leader in self.engines]

    def join(self, settings: SyncSettings) -> CollectiveSender:
        """Make a sender, and have both engines join its group."""
        world_size, ranks = engine_ranks(2, 1)
        sender = CollectiveSender(self.source(), torch.device("cpu"), settings, workers=2)
        calls = [
            leader.thread.submit(
                leader.engine.init_collective_async(
                    first - 1, sender.ip, sender.port, world_size, 1, settings.timeout
                )
            )
            for leader, first in zip(self.engines, ranks, strict=True)
        ]
        sender.connect(calls)
        for call in calls:
            call.result(30)
        return sender

    def update(self, seconds: float = 30.0) -> list[Future[Any]]:
        return self.call(lambda engine: engine.update_weights_from_collective_async(seconds))

    def send(self) -> None:
        self.policy.randomise(self.policy.version + 50)
        self.sender.send(self.policy.version, self.update())

    def gaps(self) -> list[float]:
        """Return the largest difference of each engine's log-probabilities from plain Transformers'."""
        gaps = []
        for leader in self.engines:
            sampling = SamplingSettings(max_tokens=24)
            request = leader.engine.complete(
                PROMPT, sampling, seed=1, policy_version=self.policy.version
            )
            sampled = leader.thread.run(request, 60, "a completion")
            expected = self.policy.logprobs(PROMPT + sampled.token_ids)[len(PROMPT) - 1 :]
            gaps.append(max(abs(a - b) for a, b in zip(expected, sampled.logprobs, strict=True)))
        return gaps


@pytest.fixture(scope="module")
def apart(tiny_model: TinyModel) -> Iterator[Apart]:
    """Yield the policy and the engines that all tests of this file share."""
    apart = Apart(tiny_model())
    yield apart
    apart.sender.close()
    for leader in apart.engines:
        stop(leader)


def test_broadcast_weights_are_the_policys_on_every_engine(apart: Apart) -> None:
    for _ in range(2):
        apart.send()
        assert max(apart.gaps()) < 1e-4
        assert max(apart.gaps()) < 1e-4


def fail(apart: Apart, seconds: float = 30.0) -> str:
    """Make an update that must fail on the trainer and on both engines, and leave no version; return the error."""
    calls = apart.update(seconds)
    with pytest.raises(RemoteError) as caught:
        apart.sender.send(apart.policy.version + 1, calls)
    for call in calls:
        with pytest.raises(RuntimeError, match=r"worker 0 on cpu:0 \(pid \d+\)"):
            call.result(60)
    assert [leader.engine.state.version for leader in apart.engines] == [None, None]
    return str(caught.value)


def replace_parameter(
    apart: Apart, patch: pytest.MonkeyPatch, old: str, changes: dict[str, Any]
) -> None:
    """Make the sender announce and send a weight under another name, in another shape, or not at all."""
    parameters = []
    for parameter in apart.sender._update.parameters:
        if parameter.name != old:
            parameters.append(parameter)
        elif changes:
            parameters.append(replace(parameter, pieces=(replace(parameter.pieces[0], **changes),)))
    patch.setattr(apart.sender._update, "parameters", parameters)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "model.layers.1.self_attn.k_proj.weight",
            {"name": "model.layers.1.self_attn.kk_proj.weight"},
            "kk_proj",
        ),
        ("model.layers.0.mlp.down_proj.weight", {}, "down_proj"),
        (
            "model.layers.1.post_attention_layernorm.weight",
            {"shape": (2, 32)},
            "post_attention_layernorm",
        ),
        (
            "model.norm.weight",
            {"dtype": "float64", "shape": (32,)},
            "model.norm.weight comes as float64",
        ),
    ],
    ids=["renamed", "missing", "wrong-shape", "wrong-dtype"],
)
def test_a_weight_that_does_not_fit_fails_the_update_on_all_engines(
    apart: Apart, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace_parameter(apart, patch, name, changes)
        error = fail(apart)
    assert message in error
    assert "weights rank" in error
    apart.send()  # the next update repairs it through the same group
    assert max(apart.gaps()) < 1e-4


@pytest.mark.parametrize(
    ("extra", "message"), [(1, "arrived a second time"), (-1, "announced but never sent")]
)
def test_a_weight_that_comes_twice_or_not_at_all_is_an_error(
    apart: Apart, extra: int, message: str
) -> None:
    parameters = apart.sender._update.parameters
    sent = [*parameters, parameters[-1]] if extra > 0 else parameters[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart.sender._update.transport, "transfer", lambda update: update.push(sent, None))
        error = fail(apart)
    assert message in error
    assert parameters[-1].name in error


def test_the_refusal_of_one_worker_fails_all_and_names_it(apart: Apart) -> None:
    """Only the second engine expects another name; the first loads everything, and may not keep it."""
    info = apart.sender.refit_info()
    shape, dtype = info.pop("model.norm.weight")
    second = apart.engines[1]
    promised = info | {"model.normal.weight": [shape, dtype]}
    second.thread.run(second.engine.prepare_refit_info_async(promised), 30, "the promise")
    error = fail(apart)
    assert "weights rank 2 failed" in error
    assert "weights rank 1" not in error
    assert "model.normal.weight is missing; model.norm.weight is not expected" in error
    for call in apart.call(lambda engine: engine.prepare_refit_info_async(apart.sender.refit_info())):
        call.result(30)
    apart.send()
    assert max(apart.gaps()) < 1e-4


def test_weights_of_an_iterator_are_sent_once_and_cannot_be_compared(apart: Apart) -> None:
    """The first engine keeps weights as they are sent, so a source that can be read twice would be compared with it."""
    apart.policy.randomise(apart.policy.version + 50)
    stream = StreamSource(apart.sender.refit_info(), apart.policy.model.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart.sender._update, "source", stream)
        report = apart.sender.send(apart.policy.version, apart.update())
    assert report.verified == ""
    assert max(apart.gaps()) < 1e-4


def test_a_wrong_byte_on_the_way_is_found_by_digests(apart: Apart) -> None:
    gather, calls = apart.sender._update.source.gather_into, []
    post, kinds = Link.post, []

    def flipped(names: list[str], slots: list[torch.Tensor]) -> None:
        gather(names, slots)
        if "model.norm.weight" in names and not calls:
            calls.append(names)
            slots[names.index("model.norm.weight")][3] ^= 64

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart.sender._update.source, "gather_into", flipped)
        patch.setattr(
            Link, "post", lambda link, kind, **fields: [kinds.append(kind), post(link, kind, **fields)]
        )
        error = fail(apart)
    assert {"bucket", "finish"} < set(kinds) and "compare" not in kinds, (
        "digests must find it, without a second send"
    )
    assert "the worker on weights rank 1 does not hold what was sent: model.norm.weight differ" in error


def test_memory_is_bounded_by_two_buckets_and_does_not_grow(apart: Apart) -> None:
    apart.send()
    largest = max(parameter.nbytes for parameter in apart.sender._update.parameters)
    report = apart.sender.send(apart.policy.version, apart.update())
    assert report.staging_bytes <= 2 * max(SETTINGS.bucket_bytes, largest + 512)
    once = BucketPlan(apart.sender._update.parameters, SETTINGS.bucket_bytes).nbytes
    assert (report.nbytes, report.verified) == (once, "full"), (
        "must be compared by digests, not sent again"
    )
    resident = []
    for _ in range(10):
        apart.sender.send(apart.policy.version, apart.update())
        leader = apart.engines[0]
        resident.append(leader.thread.run(leader.engine.memory_bytes(), 10, "memory"))
    assert resident[-1] - resident[3] < 4 << 20


def test_engine_and_trainer_agree_on_names_shapes_and_dtypes(apart: Apart) -> None:
    for leader in apart.engines:
        (answer,) = leader.thread.run(
            leader.engine.call_workers("hotbunk_model_metadata"), 30, "metadata"
        )
        assert answer["error"] is None
        assert differences(apart.sender.refit_info(), answer["weights"]) == []
        config = AutoConfig.from_pretrained(apart.folder)
        on_disk = checkpoint_manifest(str(apart.folder), "float32", config.tie_word_embeddings)
        assert differences(on_disk, answer["weights"]) == []


def test_joining_twice_changes_nothing_and_wrong_ranks_are_named(apart: Apart) -> None:
    engine, thread = apart.engines[0].engine, apart.engines[0].thread
    sender = apart.sender

    def join(prefix: int, port: int, world_size: int) -> None:
        thread.run(
            engine.init_collective_async(prefix, sender.ip, port, world_size, 1, 2.0), 30, "joining"
        )

    def ready() -> list[bool]:
        return thread.run(engine.call_workers("check_collective_ready"), 30, "asking")

    assert ready() == [True]
    join(0, sender.port, 3)
    apart.send()  # the group has not changed
    second, second_thread = apart.engines[1].engine, apart.engines[1].thread
    with pytest.raises(RuntimeError, match=r"rank 1 of the weights group is taken by pid \d+"):
        second_thread.run(
            second.init_collective_async(0, sender.ip, sender.port, 3, 1, 2.0), 30, "joining"
        )
    with pytest.raises(RuntimeError, match="rank 4 of 5 does not belong to the trainer's weights group"):
        second_thread.run(
            second.init_collective_async(3, sender.ip, sender.port, 5, 1, 2.0), 30, "joining"
        )
    with pytest.raises(RuntimeError, match=r"no trainer at 127\.0\.0\.1:9 within 2 s"):
        join(0, 9, 3)
    assert ready() == [False]
    with pytest.raises(RuntimeError, match="in no weights group: init_collective comes first"):
        thread.run(engine.update_weights_from_collective_async(1.0), 30, "updating")
    sender.close()
    apart.sender = apart.join(SETTINGS)
    apart.send()
    assert max(apart.gaps()) < 1e-4


def test_patches_leave_a_real_engine_with_the_policys_weights(apart: Apart) -> None:
    """One engine keeps weights as they are sent; the other packs them, so that it cannot be patched."""
    apart.sender.close()
    engines, settings = apart.engines, replace(SETTINGS, verify="sample", delta=True)
    first = engines[0]
    apart.sender = CollectiveSender(apart.source(), torch.device("cpu"), settings, workers=1)
    calls = [
        first.thread.submit(
            first.engine.init_collective_async(0, apart.sender.ip, apart.sender.port, 2, 1, 30.0)
        )
    ]
    apart.sender.connect(calls)
    reports = []
    apart.engines = engines[:1]
    for step in range(4):
        for parameter in apart.policy.model.parameters():
            parameter.detach().view(-1)[step::97] += 0.01
        apart.policy.version += 1
        reports.append(apart.sender.send(apart.policy.version, apart.update()))
    assert max(apart.gaps()) < 1e-4
    sent = [report.nbytes - report.spared for report in reports]
    assert max(sent[1:]) < 0.1 * sent[0] and not any(report.resent for report in reports), sent
    apart.engines = engines
    apart.sender.close()
    apart.sender = apart.join(SETTINGS)
    apart.send()


def test_a_silent_engine_ends_the_update_and_a_new_group_repairs_it(apart: Apart) -> None:
    apart.sender.close()
    apart.sender = apart.join(SyncSettings("off", 1 << 16, timeout=2.0))
    first = apart.engines[0]
    call = first.thread.submit(first.engine.update_weights_from_collective_async(30.0))
    with pytest.raises(RemoteError, match="no answer from the worker on weights rank 2 within 2 s"):
        apart.sender.send(apart.policy.version + 1, [call])  # the second engine has not been called
    with pytest.raises(RuntimeError, match="weights rank 2"):
        call.result(60)
    with pytest.raises(RemoteError, match="make a new CollectiveSender"):
        apart.sender.send(apart.policy.version + 1)
    ready = [
        call.result(30)
        for call in apart.call(lambda engine: engine.call_workers("check_collective_ready"))
    ]
    assert ready == [[False], [False]]
    apart.sender.close()
    apart.sender = apart.join(SETTINGS)
    apart.send()
    assert max(apart.gaps()) < 1e-4


def test_an_engine_gives_up_a_silent_trainer_at_its_deadline(apart: Apart) -> None:
    for call in apart.update(1.0):
        with pytest.raises(RuntimeError, match=r"message from the trainer.* within 1 s|gave up"):
            call.result(60)
    assert [leader.engine.state.version for leader in apart.engines] == [None, None]
    apart.sender.close()
    apart.sender = apart.join(SETTINGS)
    apart.send()


def test_weights_from_a_folder_are_the_policys_or_raise(apart: Apart, tmp_path: Path) -> None:
    def load() -> list[Future[Any]]:
        return apart.call(lambda engine: engine.load_weights_from_storage_async(str(tmp_path)))

    writer = StorageWriter(tmp_path, apart.source(), bucket_bytes=1 << 16)
    for _ in range(2):
        apart.policy.randomise(apart.policy.version + 70)
        writer.write(apart.policy.version)
        for call in load():
            call.result(60)
        assert max(apart.gaps()) < 1e-4  # at the folder's version
    slot = tmp_path / "slot-1"
    slot.write_bytes(slot.read_bytes()[:-9999])
    for call in load():
        with pytest.raises(RuntimeError, match="ends inside of bucket"):
            call.result(60)
    assert [leader.engine.state.version for leader in apart.engines] == [None, None]
    writer.write(apart.policy.version)
    for call in load():
        call.result(60)
    assert max(apart.gaps()) < 1e-4


def test_a_killed_engine_ends_the_update_on_all_engines(apart: Apart) -> None:
    """This test is the file's last, since it leaves only one engine."""
    first, second = apart.engines
    gather, calls = apart.sender._update.source.gather_into, []

    def kill_on_the_way(names: list[str], slots: list[torch.Tensor]) -> None:
        gather(names, slots)
        calls.append(names)
        if len(calls) == 4:
            core.kill()

    core = psutil.Process(pid_of(second))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart.sender._update.source, "gather_into", kill_on_the_way)
        running = apart.update()
        with pytest.raises(RemoteError):
            apart.sender.send(apart.policy.version + 1, running)
    with pytest.raises(RuntimeError, match="trainer gave up|broke the update off|weights rank"):
        running[0].result(60)
    with pytest.raises(Exception, match="EngineCore|died|dead"):
        running[1].result(60)
    assert first.engine.state.version is None


def pid_of(leader: Any) -> int:
    """Return the process id of the worker, which every error names."""
    (answer,) = leader.thread.run(
        leader.engine.call_workers("prepare_refit_info", {"w": [[1], "int8"]}), 30, "a look"
    )
    return int(answer["error"].split("(pid ")[1].split(")")[0])
