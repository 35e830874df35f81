"""Multimodal models on a real engine: the encoders' weights arrive like all others, and images pass through them."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from generation.engine.engine import Engine, Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from generation.exact_ids import Generation
from generation.images import ImageProcessor
from tests.conftest import TinyModel
from tests.support.colocated import Colocated, HfPolicy, start_engine, stop
from tests.support.image_rows import make_sample, noise, plain_outputs
from tests.unit.trainer.policy.test_vision import make_module
from trainer.learning.batching import micro_batches
from trainer.policy.hf_format import parameter_names
from trainer.policy.hf_saving import save_pretrained
from trainer.policy.module import outputs
from trainer.types import Sample


class MultimodalPolicy(HfPolicy):
    """The trained module of a multimodal model."""

    def __init__(self, folder: Path) -> None:
        self.device, self.version = torch.device("cpu"), 0
        self.module = make_module(folder).eval()
        self.model = self.module.model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from parameter_names(self.model).items()

    @torch.no_grad()
    def gap(self, samples: list[Sample], temperature: float, packing: bool) -> float:
        """Largest difference from the engine's log-probabilities over all samples."""
        [batch] = micro_batches(samples, 10_000, 0, "cpu", packing=packing)
        differences = (outputs(self.module, batch, temperature).logprobs - batch.engine_logprobs).abs()
        return float(batch.trained(differences).max())


class Noting(Engine):
    """An engine that records how many prompt tokens of each request were in vLLM's prefix cache."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.cached: list[int | None] = []

    async def request(self, prompt: dict[str, Any], params: Any, **options: Any) -> Any:
        output = await super().request(prompt, params, **options)
        self.cached.append(output.num_cached_tokens)
        return output


def make_prompts(processor: ImageProcessor) -> list[Sample]:
    """Prompts with 0, 1 and 3 images of different sizes, first and last; the last prompt is for a second turn.

    The first prompt is longer than a cache block of 32 tokens, the others are shorter.
    """
    small, wide, high = noise(1, 28, 28), noise(2, 84, 28), noise(3, 56, 84)
    contents = [[5, wide, 30], [9], [small, 2, high, wide], [high], [2, wide, 3]]
    return [make_sample(processor, content, seed, sampled=0) for seed, content in enumerate(contents)]


def complete(
    leader: Leader, prompt: Sample, sampling: SamplingSettings, seed: int, version: int
) -> Generation:
    images = {"images": prompt.images, "image_spans": prompt.image_spans}
    work = leader.engine.complete(
        prompt.input_ids, sampling, seed=seed, policy_version=version, **images
    )
    return leader.thread.run(work, 60, "a test completion")


def joined(before: Sample, ids: list[int], logprobs: list[float] | None = None) -> Sample:
    """Return a sample continued with these ids; sampled ones have log-probabilities."""
    mask = [int(logprobs is not None)] * len(ids)
    return replace(
        before,
        input_ids=before.input_ids + ids,
        loss_mask=before.loss_mask + mask,
        engine_logprobs=before.engine_logprobs + (logprobs or [0.0] * len(ids)),
    )


def play(both: Colocated, prompts: list[Sample], sampling: SamplingSettings) -> list[Sample]:
    """Sample an answer to each prompt except the last, which continues the first answer as a second turn."""
    *first, more = prompts
    played = []
    for prompt in first:
        answer = complete(both.leader, prompt, sampling, 7, both.policy.version)
        played.append(joined(prompt, answer.token_ids, answer.logprobs))
    shift = len(played[0].input_ids)
    turn = replace(
        joined(played[0], more.input_ids),
        images=played[0].images + more.images,
        image_spans=played[0].image_spans
        + tuple((start + shift, count) for start, count in more.image_spans),
    )
    answer = complete(both.leader, turn, sampling, 8, both.policy.version)
    return [*played, joined(turn, answer.token_ids, answer.logprobs)]


@pytest.mark.parametrize(
    ("kind", "tied", "shared"),
    [("qwen2_5_vl", True, False), ("qwen3_vl", False, True), ("llava", False, False)],
)
def test_an_engine_reads_images_through_the_weights_it_was_sent(
    kind: str, tied: bool, shared: bool, tiny_vlm: TinyModel, tmp_path: Path
) -> None:
    """Weights are sent, or shared with the policy; the second sync replays, and the cache keeps nothing of the first.

    The log-probabilities are those of the trained module, packed and padded: 0, 1 and 3 images a row, of different
    sizes, first and last, beside rows without, and two turns with an image each. The export opens in plain Transformers
    and in another engine, with the same answers.
    """
    from transformers import LlavaModel  # once torchvision can be imported

    if "mm_encoder_outputs" not in inspect.signature(LlavaModel.forward).parameters:
        pytest.skip("training with images needs Transformers 5.19, and vLLM 0.31 takes an older one")
    folder = tiny_vlm(architecture=kind, tied=tied)
    processor = ImageProcessor(str(folder))
    prompts, greedy = make_prompts(processor), SamplingSettings(max_tokens=12, temperature=0.0)
    cache: Any = {"kind": Noting, "extra": {"block_size": 32}}
    with Colocated(folder, shared=shared, policy=MultimodalPolicy(folder), images=3, **cache) as both:
        both.manager.sleep()
        for seed in (1, 2):
            both.policy.randomise(seed)
            with both.manager.generation_shift(both.policy):
                report = both.manager.report
                assert report.verified == "full" and report.unreplayable == {}
                behind = [
                    name
                    for name in report.left_out
                    if ".layers.2." in name or ".post_layernorm." in name
                ]
                assert report.left_out == behind and bool(behind) == (kind == "llava")
                both.leader.engine.cached = []
                played = play(both, prompts, SamplingSettings(max_tokens=12, temperature=0.8))
                # Cached tokens of the second turn only
                again = (len(played[0].input_ids) - 1) // 32 * 32
                assert both.leader.engine.cached == [0, 0, 0, 0, again] and again
                answers = [
                    complete(both.leader, prompt, greedy, 0, both.policy.version) for prompt in prompts
                ]
            for packing in (True, False):
                assert both.policy.gap(played, 0.8, packing) <= 1e-4
        save_pretrained(both.policy.model, tmp_path, torch.float32, folder)
        processor.tokenizer.save_pretrained(tmp_path)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    fresh = start_engine(tmp_path, plain=False, images=3)
    try:
        fresh.engine.state.adopt_checkpoint(2)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = complete(fresh, prompt, greedy, 0, 2)
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            with torch.no_grad():
                seen, _ = plain_outputs(
                    plain, processor, joined(prompt, answer.token_ids, answer.logprobs), 1.0
                )
            assert seen[-len(answer.token_ids) :].tolist() == pytest.approx(answer.logprobs, abs=1e-4)
    finally:
        stop(fresh)
