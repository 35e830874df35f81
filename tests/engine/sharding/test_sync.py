"""The weight path on a real engine: the weights that arrive are those sent, or the wrong one is named.

Here each family of models goes from one rank to one engine, plain and packed. An engine cannot see from how many ranks
weights come: one, two and four ranks of FSDP2 and ZeRO-3 send the checkpoint, byte for byte, for each family
(test_policy.py, test_hsdp.py, test_deepspeed.py). How an engine distributes weights to its workers does not depend on
that either: test_reach.py has two workers and two or four ranks for each family, and whole engines of two workers are
in test_collective_ranks.py (from four ranks and from one) and test_run.py (from two).
"""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from sharding.ranks import RemoteError
from tests.support.colocated import Colocated, gaps, start_engine, stop
from trainer.commands.tiny_model import make_tiny_model
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.routing import Routing

MODELS = [
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("llama", False),
    ("llama", True),
    ("gemma3", True),
    ("qwen3_moe", False),
    ("deepseek_v2", False),
]
REPROCESSED = {"deepseek_v2": {"kv_b_proj"}}
"""Modules that vLLM re-processes even if `plain`: it keeps products of MLA's weights."""
PROMPT = [14, 50, 77, 120, 9]


@pytest.mark.parametrize(
    ("architecture", "tied"), MODELS, ids=[f"{a}-{'tied' if t else 'untied'}" for a, t in MODELS]
)
def test_sync_of_random_weights_equals_a_fresh_engine(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    """Weights are replaced in place, or packed, in which case vLLM reloads them layer by layer."""
    folder = make_tiny_model(tmp_path / "start", architecture=architecture, tied=tied, layers=2)
    greedy = [synced(folder, architecture, plain, tmp_path / "trained") for plain in (True, False)]
    _copy_tokenizer(folder, tmp_path / "trained")
    fresh = start_engine(tmp_path / "trained", plain=False)
    try:
        fresh.engine.state.adopt_checkpoint(2)
        settings = SamplingSettings(max_tokens=40, temperature=0.0)
        expected = fresh.thread.run(
            fresh.engine.complete(PROMPT, settings, seed=0, policy_version=2), 60, "fresh"
        )
    finally:
        stop(fresh)
    assert [answer.token_ids for answer in greedy] == [expected.token_ids] * 2
    for answer in greedy:
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def synced(folder: Path, architecture: str, plain: bool, trained: Path) -> Generation:
    """Send an engine random weights twice, check it on the way, save them, and return its greedy answer."""
    with Colocated(folder, plain) as both:
        both.manager.sleep()
        in_place = plain and architecture not in REPROCESSED
        for seed in (1, 2):  # the second load replays the first, or re-processes layers again
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                assert both.manager.report.verified == ("full" if in_place else "probe")
                assert left_to_loaders(both) == (REPROCESSED.get(architecture, set()) if plain else None)
                for temperature in (1.0, 0.6):
                    sampled = both.complete(
                        PROMPT, SamplingSettings(max_tokens=40, temperature=temperature), seed
                    )
                    assert both.gap(PROMPT, sampled, temperature) < 1e-4
                greedy = both.complete(PROMPT, SamplingSettings(max_tokens=40, temperature=0.0))
        both.policy.model.save_pretrained(trained)
    return greedy


def test_weights_of_experts_are_verified_like_all_others(tmp_path: Path) -> None:
    """A wrong byte in any weight is found and named, in the first update and later."""
    folder = make_tiny_model(tmp_path / "start", architecture="qwen3_moe", tied=False, layers=2)
    with Colocated(folder, routes=True, bucket=1 << 22) as both:  # nothing is sent in parts
        both.manager.sleep()
        gather = both.source.gather_into
        for seed, (name, complaint) in enumerate(
            [
                ("", ""),
                (
                    "model.layers.1.self_attn.q_proj.weight",
                    "what was sent: model.layers.1.self_attn.q_proj.weight differ",
                ),
                ("", ""),
                (
                    "model.layers.1.mlp.experts.down_proj",
                    "what was sent: model.layers.1.mlp.experts.0.down_proj.weight differ",
                ),
                (
                    "model.layers.1.mlp.gate.weight",
                    "what was sent: model.layers.1.mlp.gate.weight differ",
                ),
                ("", ""),
            ]
        ):
            both.policy.randomise(seed)

            def flipped(names: list[str], slots: list[torch.Tensor], name: str = name) -> None:
                gather(names, slots)
                if name in names:
                    slots[names.index(name)].view(torch.float32)[:512].mul_(-9.0)

            both.source.gather_into = flipped  # type: ignore[method-assign]
            with nullcontext() if not name else pytest.raises(RemoteError, match=complaint):
                both.manager.wake(both.policy)
            assert (both.leader.engine.state.version is None) == bool(name)
            if not name:
                assert both.manager.report.verified == "full"
                assert_routes_are_the_policys(both, seed)
            both.manager.sleep()


def assert_routes_are_the_policys(both: Colocated, seed: int) -> None:
    """The engine chooses the experts that the policy's routers choose, with float32 on both sides.

    So the policy is as close to the engine with its own routes as with the engine's.
    """
    sampled = both.complete(PROMPT, SamplingSettings(max_tokens=20), seed)
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in both.policy.model.model.layers]
    handles = [
        gate.register_forward_hook(lambda _, __, result: chosen.append(result[2])) for gate in gates
    ]
    assert both.gap(PROMPT, sampled, 1.0) < 1e-4
    for handle in handles:
        handle.remove()
    assert sampled.routes is not None
    rows = torch.from_numpy(sampled.routes.copy()).long()
    assert torch.equal(rows.sort(-1).values, torch.stack(chosen, dim=1)[:-1].sort(-1).values)
    model = copy.deepcopy(both.policy.model)
    module = PolicyModule(
        model, routing=Routing(model, {n: f"model.layers.{n}.mlp.gate" for n in range(2)})
    )
    gaps_by_replay = gaps(
        lambda batch: outputs(module, batch, 1.0).logprobs, [sampled], module.routing.format
    )
    assert max(gap[-1] for gap in gaps_by_replay.values()) < 1e-4


def left_to_loaders(both: Colocated) -> set[str] | None:
    """Return the modules whose weights cannot be replayed; None if no module's can."""
    ordinary = both.manager.report.unreplayable
    if ordinary is None:
        return None
    return {"experts" if ".experts." in name else name.split(".")[-2] for name in ordinary}


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
