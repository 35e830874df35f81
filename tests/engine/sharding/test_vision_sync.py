"""Models that see, on a real engine: their encoders' weights arrive as all others, and images are seen through them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from generation.images import ImageProcessor
from tests.colocated import Colocated, HfPolicy, start_engine, stop
from tests.conftest import TinyModel
from tests.seen_rows import make_rows, plain_outputs
from trainer.policy.hf_format import parameter_names
from trainer.types import Sample


class SeeingPolicy(HfPolicy):
    """A Transformers model that sees."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cpu")
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.version = 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from parameter_names(self.model).items()


def prompt_of(row: Sample) -> list[int]:
    return row.input_ids[: row.loss_mask.index(1)]


def complete(both: Colocated, row: Sample, sampling: SamplingSettings, seed: int = 0) -> Generation:
    work = both.leader.engine.complete(
        prompt_of(row),
        sampling,
        seed=seed,
        policy_version=both.policy.version,
        images=row.images,
        image_spans=row.image_spans,
    )
    return both.leader.thread.run(work, 60, "a test completion")


def gap(both: Colocated, processor: ImageProcessor, row: Sample, answer: Generation, temperature: float) -> float:
    """Largest difference from plain Transformers' log-probabilities; what was sampled stands for no image."""
    prompt, count = prompt_of(row), len(answer.token_ids)
    ids, mask = prompt + answer.token_ids, [0] * len(prompt) + [1] * count
    whole = Sample(ids, mask, [0.0] * len(ids), images=row.images, image_spans=row.image_spans)
    with torch.no_grad():
        own = plain_outputs(both.policy.model, processor, whole, temperature)[0][-count:].tolist()
    return max(abs(a - b) for a, b in zip(own, answer.logprobs, strict=True))


@pytest.mark.parametrize(
    ("kind", "tied", "shared"), [("qwen2_5_vl", True, False), ("qwen3_vl", False, True), ("llava", False, False)]
)
@pytest.mark.covers("P8", "P12")
def test_an_engine_sees_through_the_weights_that_it_was_sent(
    kind: str, tied: bool, shared: bool, tiny_vlm: TinyModel, tmp_path: Path
) -> None:
    """Sent, or in one memory with the policy's; 0, 1 and 3 images a row, first and last. The second sync replays.

    What is saved opens in plain Transformers and in an engine of its own, with the same answers.
    """
    folder = tiny_vlm(architecture=kind, tied=tied)
    processor = ImageProcessor(str(folder))
    rows = [row for row in make_rows(processor)[:5] if len(prompt_of(row)) > 1]
    greedy = SamplingSettings(max_tokens=12, temperature=0.0)
    with Colocated(folder, shared=shared, policy=SeeingPolicy(folder), images=3) as both:
        both.manager.sleep()
        for seed in (1, 2):
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                report = both.manager.report
                assert report.verified == "full" and report.unreplayable == {}
                behind = [name for name in report.left_out if ".layers.2." in name or ".post_layernorm." in name]
                assert report.left_out == behind and bool(behind) == (kind == "llava")
                for row in rows:
                    sampled = complete(both, row, SamplingSettings(max_tokens=12, temperature=0.8), seed)
                    assert gap(both, processor, row, sampled, 0.8) < 1e-4
                answers = [complete(both, row, greedy) for row in rows]
        both.policy.model.save_pretrained(tmp_path / "trained")
    processor._processor.save_pretrained(tmp_path / "trained")
    fresh = start_engine(tmp_path / "trained", plain=False, images=3)
    try:
        fresh.engine.state.adopt_checkpoint(2)
        for row, answer in zip(rows, answers, strict=True):
            named = {"images": row.images, "image_spans": row.image_spans}
            work = fresh.engine.complete(prompt_of(row), greedy, seed=0, policy_version=2, **named)
            expected = fresh.thread.run(work, 60, "fresh")
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    finally:
        stop(fresh)
