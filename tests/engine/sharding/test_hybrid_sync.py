"""Weights of hybrids, some of which the engine keeps transformed, in a real engine over several syncs."""

from pathlib import Path

import pytest
import torch

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from generation.trajectory import Trajectory
from sharding.ranks import RemoteError
from sharding.send.source import FsdpWeightSource
from tests.support.colocated import Colocated, HfPolicy, start_engine
from tests.support.families import make_family
from tests.support.faulty_pack import shifted_inputs
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.learning.groups import to_sample
from trainer.learning.metrics import check_first_gap, engine_gap
from trainer.policy import attention, module
from trainer.policy.hf_format import checkpoint_views, parameter_names

PROMPT = [14, 50, 77, 120, 9]
FAULTY = "tests.support.faulty_worker.FaultyWorker"
SAMPLING = SamplingSettings(max_tokens=24)


@pytest.mark.parametrize(("family", "shared"), [("nemotron_h", True), ("granite4", False)])
def test_an_engine_computes_with_the_decay_of_every_version(
    family: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps -exp(A_log). Every version's A_log goes through its loader, and is compared after the same change."""
    make_family(family, tmp_path)
    with Colocated(tmp_path, shared=shared, worker_extension=FAULTY) as both:
        assert not both.leader.engine.caches_prefixes
        both.manager.sleep()
        for seed in (1, 2, 3):
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                report = both.manager.report
                assert report.verified == "full" and report.unreplayable is not None
                assert [name for name in report.unreplayable if name.endswith("A_log")] == [
                    *report.unreplayable
                ]
                sampled = both.complete(PROMPT, SAMPLING, seed)
                assert both.gap(PROMPT, sampled, 1.0) < 1e-4
                answers = [both.complete([token + 1 for token in PROMPT], SAMPLING, seed), sampled]
        if shared:  # of Granite's small layers a wrong state moves answers by less
            assert_a_shifted_pack_is_named(both.policy, answers, monkeypatch)
        else:  # the policy's own memory would keep its old values, too
            [outcome] = both.leader.thread.run(
                both.leader.engine.ask_workers("keep_stale", ".A"), 60, "a fault"
            )
            both.policy.randomise(4)
            both.manager.sleep()
            with pytest.raises(RemoteError, match=r"does not hold what was sent: .*A_log"):
                both.manager.wake(both.policy)
            assert outcome["parameters"] == 1
            assert_a_packed_convolution_is_named(both)


def assert_a_shifted_pack_is_named(
    policy: HfPolicy, answers: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that packs these answers agrees with the engine, and is told apart once a boundary is off by one."""
    samples = []
    for answer in answers:
        trajectory = Trajectory(0, 0, answer.prompt_ids)
        trajectory.extend(answer.token_ids, answer.logprobs)
        samples.append(to_sample(trajectory))
    [batch] = micro_batches(samples, 4000, 0, "cpu", count=1, packing=True)
    policy.model.set_attn_implementation(attention.implementation("sdpa", policy.model))
    trained, sections = (
        module.PolicyModule(policy.model),
        {"model": {"path": "m"}, "data": {"path": "d"}},
    )
    config = TrainConfig.model_validate(sections | {"policy": {"dtype": "float32"}})

    @torch.no_grad()
    def gap() -> dict[str, float]:
        logprobs = module.outputs(trained, batch, 1.0).logprobs
        return engine_gap(
            [(batch.trained(logprobs), batch.trained(batch.engine_logprobs))], config.algorithm
        )

    assert gap()["gap/max"] < 1e-4
    check_first_gap(gap(), config)
    with monkeypatch.context() as patch:
        patch.setattr(module, "trunk_inputs", shifted_inputs)
        with pytest.raises(
            UserError, match=r"nats apart on average in the first step.*batch.packing false"
        ):
            check_first_gap(gap(), config)


def assert_a_packed_convolution_is_named(both: Colocated) -> None:
    """A convolution that vLLM has packed is not written as it is, and no update of it is called verified."""
    [outcome] = both.leader.thread.run(both.leader.engine.ask_workers("pack_convolution"), 60, "a fault")
    both.policy.randomise(4)
    both.manager.sleep()
    with pytest.raises(RemoteError, match=rf"{outcome['layer']}\.weight is packed .* set .* to false"):
        both.manager.wake(both.policy)


def test_a_buffer_that_is_not_sent_is_named_in_the_first_sync(tmp_path: Path) -> None:
    """The routers' correction bias is a buffer in Transformers, and a parameter in vLLM."""
    make_family("glm4_moe", tmp_path)
    policy = HfPolicy(tmp_path)
    source = FsdpWeightSource(
        [
            (name, p)
            for name, p in parameter_names(policy.model).items()
            if not name.endswith("correction_bias")
        ],
        torch.float32,
        lambda name, shape: checkpoint_views(policy.model, name, shape),
    )
    with Colocated(tmp_path, policy=policy, source=source) as both:
        both.manager.sleep()
        with pytest.raises(
            RemoteError, match=r"never sent, so the engine would keep old values: .*correction_bias"
        ):
            both.manager.wake(policy)


def test_a_model_that_vllm_cannot_start_is_refused_by_name_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """OLMo-Hybrid's layers need Triton, which a CPU does not have."""
    make_family("olmo_hybrid", tmp_path)
    with pytest.raises(
        ValueError, match="vLLM cannot start OlmoHybridForCausalLM here .*triton.*: use another model"
    ):
        start_engine(tmp_path, dtype="bfloat16")
    assert "Traceback" not in capfd.readouterr().err
