"""Failures on the weight path are noticed and named, and the next complete sync repairs them."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest
import torch

from generation.engine.lifecycle import EngineStateError
from generation.engine.sampling import SamplingSettings
from generation.engine.vllm_compat import engine_processes
from sharding.ranks import RemoteError
from sharding.report import SyncReport
from sharding.verify import parameters_to_verify
from sharding.wire.staging import resident_bytes
from sharding.workers import Link
from tests.conftest import TinyModel
from tests.support.colocated import Colocated

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=24)


@pytest.fixture(scope="module", params=[True, False], ids=["in-place", "layerwise"])
def both(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Colocated]:
    with Colocated(tiny_model(), plain=request.param) as both:
        both.manager.sleep()
        yield both


def plain(both: Colocated) -> bool:
    """Tell whether the engine keeps weights as they are sent."""
    return both.leader.engine.settings.plain_cpu_weights


def opened_and_closed(both: Colocated) -> tuple[int, int]:
    """Return the numbers of times that the worker has mapped and unmapped staging memory."""
    return both.manager.report.staging_opened, both.manager.report.staging_closed


def assert_repaired(both: Colocated) -> None:
    """A complete sync makes the engine agree with the policy again."""
    both.policy.randomise(seed=both.policy.version + 100)
    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with both.manager.generation_shift(both.policy):
        assert both.gap(PROMPT, both.complete(PROMPT, SAMPLING), 1.0) < 1e-4


def fail_to_wake(both: Colocated, error: type[BaseException] = RemoteError) -> str:
    """Wake the engine, which must fail and leave it without a version; return the error."""
    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with pytest.raises(error) as caught:
        both.manager.wake(both.policy)
    assert both.leader.engine.state.version is None
    with pytest.raises(EngineStateError, match="cannot generate"):
        both.complete(PROMPT, SAMPLING)
    return str(caught.value)


def rename(both: Colocated, monkeypatch: pytest.MonkeyPatch, old: str, new: str | None) -> None:
    """Make the manager send a weight under another name, or not at all."""
    parameters = []
    for parameter in both.manager._update.parameters:
        if parameter.name != old:
            parameters.append(parameter)
        elif new is not None:
            parameters.append(replace(parameter, pieces=(replace(parameter.pieces[0], name=new),)))
    monkeypatch.setattr(both.manager._update, "parameters", parameters)


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.kk_proj.weight"),
        ("model.layers.1.self_attn.k_proj.weight", None),
        ("model.layers.0.mlp.down_proj.weight", None),
        ("model.norm.weight", "model.norm.wait"),
        ("model.embed_tokens.weight", None),
        ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.qq_proj.bias"),
    ],
)
def test_a_renamed_or_missing_weight_is_fatal_and_named(
    both: Colocated, monkeypatch: pytest.MonkeyPatch, name: str, new: str | None
) -> None:
    with monkeypatch.context() as patch:
        rename(both, patch, name, new)
        message = fail_to_wake(both)
    module = name.rsplit(".", 2)[0]
    assert (new or module) in message or module.replace("k_proj", "") in message
    assert_repaired(both)


def test_a_weight_of_the_wrong_shape_is_fatal_and_named(
    both: Colocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    parameters = [
        replace(p, pieces=(replace(p.pieces[0], shape=(2, 64)),)) if p.name == name else p
        for p in both.manager._update.parameters
    ]
    with monkeypatch.context() as patch:
        patch.setattr(both.manager._transport, "transfer", lambda update: update.push(parameters, None))
        assert "post_attention_layernorm" in fail_to_wake(both)
    assert_repaired(both)


def test_a_wrong_byte_on_the_way_is_found(both: Colocated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of one weight change on the way; digests of the policy's weights, or log-probabilities, reveal it."""
    name = "model.layers.0.input_layernorm.weight"
    gather, calls = both.source.gather_into, []

    def flipped(names: list[str], slots: list[torch.Tensor]) -> None:
        gather(names, slots)
        if name in names and not calls:
            calls.append(name)
            slots[names.index(name)].view(torch.float32)[:64].mul_(-40.0)

    with monkeypatch.context() as patch:
        patch.setattr(both.source, "gather_into", flipped)
        with pytest.raises(RemoteError) as caught:
            both.manager.wake(both.policy)
    if plain(both):
        assert name in str(caught.value)
        assert "does not hold what was sent" in str(caught.value)
    else:
        assert "its weights are not the policy's" in str(caught.value)
    assert both.leader.engine.state.version is None
    assert_repaired(both)


def test_generating_asleep_or_stale_raises_and_names_both_versions(both: Colocated) -> None:
    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        both.complete(PROMPT, SAMPLING)
    with both.manager.generation_shift(both.policy):
        version, both.policy.version = both.policy.version, both.policy.version + 1
        with pytest.raises(
            EngineStateError, match=rf"version {version}, the policy is at version {version + 1}"
        ):
            both.complete(PROMPT, SAMPLING)
        both.policy.version = version
        both.complete(PROMPT, SAMPLING)


def test_cached_prefixes_of_old_weights_are_forgotten(both: Colocated) -> None:
    """The engine stays awake between two syncs, so only the reset separates old blocks from new weights."""
    prompt = [20 + i for i in range(64)]  # longer than several blocks of the prefix cache
    if both.leader.engine.state.memory.value == "asleep":
        both.manager.wake(both.policy)
    both.complete(prompt, SAMPLING)
    both.policy.randomise(seed=7)
    both.manager.report = SyncReport(both.policy.version)
    both.manager._sync()
    sampled = both.complete(prompt, SAMPLING)
    assert both.gap(prompt, sampled, 1.0) < 1e-4


def test_a_refused_reset_of_the_prefix_cache_is_an_error(
    both: Colocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> bool:
        return False

    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(both.leader.engine.llm, "reset_prefix_cache", refuse)
        with pytest.raises(RemoteError, match="refused to reset its prefix cache"):
            both.manager.wake(both.policy)
    assert_repaired(both)


def kinds_of_messages(both: Colocated) -> list[str]:
    """Return the kinds of messages of a complete update, each once."""
    kinds: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        post = Link.post
        patch.setattr(
            Link, "post", lambda link, kind, **fields: [kinds.append(kind), post(link, kind, **fields)]
        )
        assert_repaired(both)
    return list(dict.fromkeys(kinds))


def test_an_update_interrupted_at_any_message_leaves_no_version(both: Colocated) -> None:
    """Ctrl-C interrupts the trainer, wherever the worker is then."""
    kinds = kinds_of_messages(both)
    assert kinds[0] == "begin" and kinds[-1] == "end" and {"bucket", "finish"} < set(kinds)
    post = Link.post
    for at in kinds:

        def interrupted(link: Link, kind: str, at: str = at, **fields: Any) -> None:
            if kind == at:
                raise KeyboardInterrupt
            post(link, kind, **fields)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "post", interrupted)
            fail_to_wake(both, KeyboardInterrupt)
        assert_repaired(both)


def test_a_garbled_message_is_refused_and_the_next_update_repairs_it(
    both: Colocated,
) -> None:
    kinds, channel = kinds_of_messages(both), both.manager._channel
    send = channel.send
    for at in kinds:
        waiting = [at]

        def garbled(kind: str, waiting: list[str] = waiting, **fields: Any) -> None:
            if [kind] == waiting:
                channel._put(b"\xc1")
                waiting.clear()
            else:
                send(kind, **fields)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "send", garbled)
            assert (
                "the worker on cpu:0 failed: SyncError: 1 bytes that are not a message"
                in fail_to_wake(both)
            )
        assert_repaired(both)


def staging_in_use() -> list[tuple[int, int]]:
    """Count, in this process and each of its children, how often staging memory is open and how often mapped.

    A mapping keeps a file of its own open.
    """
    counts = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        folder = Path(f"/proc/{process.pid}")
        files = [file.readlink() for file in (folder / "fd").iterdir() if file.is_symlink()]
        maps = (folder / "maps").read_text().splitlines()
        counts.append(
            (
                sum("hotbunk-staging" in str(file) for file in files),
                sum("hotbunk-staging" in m for m in maps),
            )
        )
    return sorted(filter(any, counts))


def test_two_hundred_syncs_open_the_staging_memory_once_and_leak_nothing(both: Colocated) -> None:
    """Halves are compared: a leak of 50 KiB a sync would add 5 MiB between them."""
    assert_repaired(both)
    opened, closed = opened_and_closed(both)
    assert opened == closed + 1  # it stays open on a CPU, where new pages are slower than old ones
    in_use = [(1, 1), (2, 1)]  # the worker's mapping, and the trainer's with its exported file
    assert staging_in_use() == in_use
    resident = []
    for number in range(200):
        with both.manager.generation_shift(both.policy):
            if number % 20 == 0:
                both.complete(PROMPT, SAMPLING)
        engine = both.leader.thread.run(both.leader.engine.memory_bytes(), 10, "memory")
        resident.append((resident_bytes(), engine))
    assert opened_and_closed(both) == (opened, closed)
    assert staging_in_use() == in_use
    for side in zip(*resident, strict=True):
        assert mean(side[110:]) - mean(side[20:110]) < 4 << 20


def test_staging_memory_is_closed_as_often_as_it_was_opened(
    both: Colocated,
) -> None:
    """The trainer alone closes it, as on a GPU, where the KV cache needs the space, and the worker notices."""
    assert_repaired(both)
    opened, closed = opened_and_closed(both)
    for _ in range(5):
        both.manager._transport.abort("")
        assert staging_in_use() == [(1, 1)]
        with both.manager.generation_shift(both.policy):
            pass
        assert staging_in_use() == [(1, 1), (2, 1)]
    assert opened_and_closed(both) == (opened + 5, closed + 5)


def test_staging_is_bounded_by_two_buckets(both: Colocated) -> None:
    largest = max(parameter.nbytes for parameter in both.manager._update.parameters)
    assert both.manager.report.staging_bytes <= 2 * max(1 << 18, largest + 512)


def test_weights_larger_than_a_bucket_reach_the_engine_in_parts(
    both: Colocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are packed for oneDNN are sent whole."""
    bucket, manager = 1 << 13, both.manager
    largest = max(parameter.nbytes for parameter in manager._update.parameters)
    assert largest > 4 * bucket
    manager._transport.abort("")
    with monkeypatch.context() as patch:
        patch.setattr(
            manager._update, "settings", replace(manager._update.settings, bucket_bytes=bucket)
        )
        assert_repaired(both)
        assert manager.report.staging_bytes == 2 * (bucket if plain(both) else largest)
        assert manager.report.verified == ("full" if plain(both) else "probe")
        manager._transport.abort("")
    assert_repaired(both)


def test_verifying_samples_compares_all_weights_over_many_updates(
    both: Colocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {parameter.name for parameter in both.manager._update.parameters}
    with monkeypatch.context() as patch:
        patch.setattr(
            both.manager._update, "settings", replace(both.manager._update.settings, verify="sample")
        )
        drawn = [
            [p.name for p in parameters_to_verify(both.manager._update.parameters, "sample", version)]
            for version in range(400)
        ]
        assert {name for names in drawn for name in names} == everything
        assert all(len(names) < len(everything) for names in drawn)
        assert_repaired(both)
        assert both.manager.report.verified == ("sample" if plain(both) else "probe")


def test_the_death_of_a_worker_ends_the_update_and_is_named(tiny_model: TinyModel) -> None:
    """The test has an engine of its own, since nothing repairs it."""
    in_use = staging_in_use()
    with Colocated(tiny_model()) as both:
        both.manager.sleep()
        (core,) = engine_processes(both.leader.engine.llm)
        gather, calls = both.source.gather_into, []

        def kill_on_the_way(names: list[str], slots: list[torch.Tensor]) -> None:
            gather(names, slots)
            calls.append(names)
            if len(calls) == 3:
                core.kill()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(both.source, "gather_into", kill_on_the_way)
            message = fail_to_wake(both)
        assert (
            "the engine ended during a weight update" in message
            or "the worker on cpu:0 cannot be reached" in message
        )
        gc.collect()  # errors hold frames, whose variables are views of the memory
        assert staging_in_use() == in_use
