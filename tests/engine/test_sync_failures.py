"""What goes wrong on the weight path is noticed, named, and repaired by the next complete sync."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from colocated import Colocated
from conftest import TinyModel

from generation.engine_state import EngineStateError
from generation.sampling import SamplingSettings
from sharding.collectives import RemoteError
from sharding.verifying import parameters_to_verify

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=24)


@pytest.fixture(scope="module", params=[True, False], ids=["in-place", "layerwise"])
def both(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Colocated]:
    with Colocated(tiny_model(), plain=request.param) as both:
        both.manager.sleep()
        yield both


def assert_repaired(both: Colocated) -> None:
    """A complete sync makes the engine agree with the policy again."""
    both.policy.randomise(seed=both.policy.version + 100)
    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with both.manager.generation_shift(both.policy):
        assert both.gap(PROMPT, both.complete(PROMPT, SAMPLING), 1.0) < 1e-4


def fail_to_wake(both: Colocated) -> str:
    """The error of a wake that must fail; afterwards the engine has no version, and says so."""
    with pytest.raises(RemoteError) as caught:
        both.manager.wake(both.policy)
    assert both.leader.engine.state.version is None
    with pytest.raises(EngineStateError, match="cannot generate"):
        both.complete(PROMPT, SAMPLING)
    return str(caught.value)


def rename(both: Colocated, monkeypatch: pytest.MonkeyPatch, old: str, new: str | None) -> None:
    """Have the manager send a weight under another name, or not at all."""
    from sharding.plan import BucketPlan

    parameters = []
    for parameter in both.manager._parameters:
        if parameter.name != old:
            parameters.append(parameter)
        elif new is not None:
            parameters.append(replace(parameter, pieces=(replace(parameter.pieces[0], name=new),)))
    monkeypatch.setattr(both.manager, "_parameters", parameters)
    monkeypatch.setattr(both.manager, "_plan", BucketPlan(parameters, 1 << 18))


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
def test_p8_a_renamed_or_missing_weight_is_fatal_and_named(
    both: Colocated, monkeypatch: pytest.MonkeyPatch, name: str, new: str | None
) -> None:
    with monkeypatch.context() as patch:
        rename(both, patch, name, new)
        message = fail_to_wake(both)
    module = name.rsplit(".", 2)[0]
    assert (new or module) in message or module.replace("k_proj", "") in message
    assert_repaired(both)


def test_p8_a_weight_of_the_wrong_shape_is_fatal_and_named(both: Colocated, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    parameters = [
        replace(p, pieces=(replace(p.pieces[0], shape=(2, 64)),)) if p.name == name else p
        for p in both.manager._parameters
    ]
    from sharding.plan import BucketPlan

    with monkeypatch.context() as patch:
        patch.setattr(both.manager, "_plan", BucketPlan(parameters, 1 << 18))
        assert "post_attention_layernorm" in fail_to_wake(both)
    assert_repaired(both)


def test_a_wrong_byte_in_what_was_sent_is_found(both: Colocated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of one weight change on their way; digests of the policy's weights, or log-probabilities, find it."""
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
    if both.manager._plain:
        assert name in str(caught.value)
        assert "does not hold what was sent" in str(caught.value)
    else:
        assert "its weights are not the policy's" in str(caught.value)
    assert both.leader.engine.state.version is None
    assert_repaired(both)


def test_p5_generating_asleep_or_stale_raises_and_names_both_versions(both: Colocated) -> None:
    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        both.complete(PROMPT, SAMPLING)
    with both.manager.generation_shift(both.policy):
        version, both.policy.version = both.policy.version, both.policy.version + 1
        with pytest.raises(EngineStateError, match=rf"version {version}, the policy is at version {version + 1}"):
            both.complete(PROMPT, SAMPLING)
        both.policy.version = version
        both.complete(PROMPT, SAMPLING)


def test_p7_cached_prefixes_of_old_weights_are_forgotten(both: Colocated) -> None:
    """The engine stays awake between two syncs, so nothing but the reset stands between old blocks and new weights."""
    prompt = [20 + i for i in range(64)]  # several blocks of the prefix cache
    if both.leader.engine.state.memory.value == "asleep":
        both.manager.wake(both.policy)
    both.complete(prompt, SAMPLING)
    both.policy.randomise(seed=7)
    both.manager._sync(both.policy.version)
    sampled = both.complete(prompt, SAMPLING)
    assert both.gap(prompt, sampled, 1.0) < 1e-4


def test_p7_a_refused_reset_of_the_prefix_cache_is_an_error(both: Colocated, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> bool:
        return False

    if both.leader.engine.state.memory.value != "asleep":
        both.manager.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(both.leader.engine.engine, "reset_prefix_cache", refuse)
        with pytest.raises(RemoteError, match="refused to reset its prefix cache"):
            both.manager.wake(both.policy)
    assert_repaired(both)


def test_p4_p6_twenty_syncs_open_the_staging_memory_once_and_leave_nothing_behind(both: Colocated) -> None:
    assert_repaired(both)
    opened, closed = both.manager.staging_opened, both.manager.staging_closed
    assert opened == closed + 1  # open between syncs on CPU, where fresh pages cost more than kept ones
    resident = []
    for _ in range(20):
        with both.manager.generation_shift(both.policy):
            both.complete(PROMPT, SAMPLING)
        resident.append(both.leader.thread.run(both.leader.engine.memory_bytes(), 10, "memory"))
    assert (both.manager.staging_opened, both.manager.staging_closed) == (opened, closed)
    assert resident[-1] - resident[5] < 4 << 20


def test_p1_staging_is_bounded_by_two_buckets(both: Colocated) -> None:
    largest = max(parameter.nbytes for parameter in both.manager._parameters)
    assert both.manager.report.staging_bytes <= 2 * max(1 << 18, largest + 512)


def test_verifying_samples_compares_other_weights_each_time_and_all_in_the_end(
    both: Colocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {parameter.name for parameter in both.manager._parameters}
    with monkeypatch.context() as patch:
        patch.setattr(both.manager, "_settings", replace(both.manager._settings, verify="sample"))
        drawn = [
            [p.name for p in parameters_to_verify(both.manager._parameters, "sample", version)]
            for version in range(400)
        ]
        assert {name for names in drawn for name in names} == everything
        assert all(len(names) < len(everything) for names in drawn)
        assert_repaired(both)
        assert both.manager.report.verified == ("sample" if both.manager._plain else "probe")
