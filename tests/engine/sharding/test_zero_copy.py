"""The policy and a real engine share the memory of their weights: the engine generates with what the policy trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from generation.engine.lifecycle import EngineStateError
from generation.engine.sampling import SamplingSettings
from sharding.ranks import RemoteError
from sharding.workers import Link
from tests.conftest import TinyModel
from tests.support.colocated import Colocated
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.learning.batching import micro_batches
from trainer.policy import InPlacePolicy
from trainer.types import Sample

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=40)
CPU = torch.device("cpu")
DENSE = [("qwen2", True), ("qwen2", False), ("qwen3", True), ("llama", False), ("gemma3", True)]


@pytest.mark.parametrize(
    ("architecture", "tied"), DENSE, ids=[f"{a}-{'tied' if t else 'untied'}" for a, t in DENSE]
)
def test_new_weights_are_the_engines_without_being_sent(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "start", architecture=architecture, tied=tied, layers=2)
    with Colocated(folder, shared=True) as both:
        both.manager.sleep()
        for seed in (1, 2, 3):
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                report = both.manager.report
                assert report.verified == "full" and report.unreplayable == {}
                if seed > 1:
                    assert (report.nbytes, report.staging_bytes, report.messages) == (0, 0, 4)
                sampled = both.complete(PROMPT, SAMPLING, seed)
                assert both.gap(PROMPT, sampled, 1.0) < 1e-4
            with pytest.raises(EngineStateError, match="asleep"):
                both.complete(PROMPT, SAMPLING)


def update(policy: InPlacePolicy) -> None:
    """Make a step of AdamW that makes a sequence of random tokens likelier."""
    ids = torch.randint(5, 60, (24,), generator=torch.Generator().manual_seed(policy.version)).tolist()
    batches = micro_batches([Sample(ids, [1] * 24, [0.0] * 24)], 1000, 0, CPU)
    policy.update(batches, lambda batch, outputs: (-outputs.logprobs.sum(), {}), 1.0)


@pytest.fixture(scope="module")
def trained(tiny_model: TinyModel) -> Any:
    """Yield a policy in bfloat16 with master weights, and an engine that shares its weights, asleep."""
    folder = tiny_model()
    policy = InPlacePolicy(ModelConfig(path=str(folder)), PolicyConfig(dtype="bfloat16", lr=3e-3), CPU)
    with Colocated(folder, dtype=torch.bfloat16, shared=True, policy=policy) as both:
        both.manager.sleep()
        with both.manager.generation_shift(policy):
            pass
        yield both


def gap(both: Colocated, token_ids: list[int]) -> float:
    """Mean difference (nats) between the engine's and the policy's log-probabilities."""
    coroutine = both.leader.engine.prompt_logprobs(token_ids)
    engine = both.leader.thread.run(coroutine, 60, "log-probabilities")
    expected = both.policy.score_tokens(token_ids)
    return sum(abs(a - b) for a, b in zip(engine, expected, strict=True)) / len(expected)


def test_an_optimizer_step_is_a_sync_and_a_wrong_byte_is_still_found(trained: Any) -> None:
    policy, manager = trained.policy, trained.manager
    ids = list(range(5, 45))
    for _ in range(3):
        before = policy.score_tokens(ids)
        update(policy)
        assert max(abs(a - b) for a, b in zip(before, policy.score_tokens(ids), strict=True)) > 0.05
        with manager.generation_shift(policy):
            assert manager.report.nbytes == 0 and manager.report.verified == "full"
            assert gap(trained, ids) < 0.02
            assert trained.complete(PROMPT, SAMPLING).token_ids
    name = "model.layers.1.mlp.up_proj.weight"
    weight = dict(policy.model.named_parameters())[name]
    weight.data[3, 5] += 1.0  # it differs from the master weight now
    with pytest.raises(RemoteError, match=f"does not hold what was sent: {name} differ"):
        manager.wake(policy)
    with pytest.raises(EngineStateError, match="no version"):
        trained.complete(PROMPT, SAMPLING)
    manager.sleep()
    with manager.generation_shift(policy):
        assert manager.report.nbytes > 0, "a complete update must send the weights, and share them again"
        assert gap(trained, ids) < 0.02
    update(policy)
    with manager.generation_shift(policy):
        assert manager.report.nbytes == 0 and gap(trained, ids) < 0.02


def test_an_interrupted_update_of_shared_weights_leaves_no_version(
    trained: Any,
) -> None:
    policy, manager, post = trained.policy, trained.manager, Link.post
    for at in ("begin", "in_place", "finish", "end"):

        def interrupted(link: Link, kind: str, at: str = at, **fields: Any) -> None:
            if kind == at:
                raise KeyboardInterrupt
            post(link, kind, **fields)

        update(policy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "post", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.wake(policy)
        assert trained.leader.engine.state.version is None
        manager.sleep()
        for _ in range(2):
            with manager.generation_shift(policy):
                assert gap(trained, list(range(5, 45))) < 0.02
        assert manager.report.nbytes == 0


def test_an_engine_with_shared_weights_refuses_to_drop_them(trained: Any) -> None:
    engine, thread = trained.leader.engine, trained.leader.thread
    with pytest.raises(ValueError, match="let it sleep at level 1"):
        thread.run(engine.sleep(2), 60, "sleeping")


def test_sharing_packed_weights_is_refused_with_a_remedy(tiny_model: TinyModel) -> None:
    """Recipes are checked before; this is the error for a manager that is built by hand."""
    with Colocated(tiny_model(), plain=False, verify="off", shared=True) as both:
        both.manager.sleep()
        with pytest.raises(
            RemoteError, match="re-processes its weights after loading.*set sync.way to staged"
        ):
            both.manager.wake(both.policy)


def test_an_update_without_weights_is_refused_unless_they_are_shared(tiny_model: TinyModel) -> None:
    with Colocated(tiny_model()) as both:
        both.manager._transport.transfer = lambda update: update.post("in_place")  # type: ignore[attr-defined]
        with pytest.raises(RemoteError, match="this worker shares none with the trainer"):
            both.manager._sync()
        assert both.leader.engine.state.version is None
