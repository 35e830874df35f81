"""The weight path on a real engine: what arrives is what was sent, or somebody says which weight is not.

Each family of models goes from one rank into one engine here, plain and packed. From how many ranks it comes, no engine
can see: what one, two and four ranks of FSDP2 and ZeRO-3 send is the checkpoint, byte for byte, for each family
(test_policy.py, test_hsdp.py, test_deepspeed.py). How an engine shares it out to its workers does not depend on that
either; four ranks and one into an engine of two workers are tried in test_collective_ranks.py, two ranks into one of
two workers and into two engines of one in test_run.py.
"""

from pathlib import Path

import pytest
from colocated import Colocated, start_engine, stop
from make_tiny import make_tiny_model

from generation.sampling import SamplingSettings

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
REPROCESSED = {"qwen3_moe", "deepseek_v2"}  # experts shuffled, products of MLA's weights kept: whatever `plain` says
PROMPT = [14, 50, 77, 120, 9]


@pytest.mark.parametrize("plain", [True, False], ids=["in-place", "layerwise"])
@pytest.mark.parametrize(("architecture", "tied"), MODELS, ids=[f"{a}-{'tied' if t else 'untied'}" for a, t in MODELS])
def test_p8_p12_sync_of_random_weights_equals_a_fresh_engine(
    architecture: str, tied: bool, plain: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "start", architecture=architecture, tied=tied, layers=2)
    with Colocated(folder, plain) as both:
        both.manager.sleep()
        in_place = plain and architecture not in REPROCESSED
        for seed in (1, 2):  # twice: the second load replays the first, or is where re-processed layers go wrong
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                assert both.manager.report.verified == ("full" if in_place else "probe")
                assert both.manager.report.ordinary == ({} if in_place else None)  # nothing is left to the loaders
                for temperature in (1.0, 0.6):
                    sampled = both.complete(PROMPT, SamplingSettings(max_tokens=40, temperature=temperature), seed)
                    assert both.gap(PROMPT, sampled, temperature) < 1e-4
                greedy = both.complete(PROMPT, SamplingSettings(max_tokens=40, temperature=0.0))
        both.policy.model.save_pretrained(tmp_path / "trained")
    _copy_tokenizer(folder, tmp_path / "trained")
    fresh = start_engine(tmp_path / "trained", plain)
    try:
        fresh.engine.state.adopt_checkpoint(2)
        settings = SamplingSettings(max_tokens=40, temperature=0.0)
        expected = fresh.thread.run(fresh.engine.complete(PROMPT, settings, seed=0, policy_version=2), 60, "fresh")
    finally:
        stop(fresh)
    assert greedy.token_ids == expected.token_ids
    assert greedy.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
