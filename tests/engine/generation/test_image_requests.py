"""Requests with images to a real engine, beside plain Transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from generation.engine.engine import Engine, Leader
from generation.engine.images import ImageCountError
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from generation.exact_ids import Generation
from generation.images import Image, ImageProcessor, Spans
from sharding import WORKER_EXTENSION
from tests.pictures import images
from tests.sliced import Episodes

PICTURES = images((98, 70), (56, 56), (30, 200))
GREEDY = SamplingSettings(temperature=0.0, max_tokens=6)


def user(*parts: str) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]
    return {"role": "user", "content": content}


class Seeing:
    """A tiny model, its processor, and an engine of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processor = folder, ImageProcessor(str(folder))
        own: dict[str, Any] = {"max_num_seqs": 8, "sleep": False, "keyed_noise": True, "images": 3}
        settings = EngineSettings(str(folder), 512, kv_cache_bytes=1 << 24, worker_extension=WORKER_EXTENSION, **own)
        self.leader = Leader.start(Engine(settings), 300)
        self.leader.engine.state.adopt_checkpoint(0)

    async def answer(self, ids: list[int], pictures: tuple[Image, ...], spans: Spans, **own: Any) -> Generation:
        settings = {"sampling": GREEDY, "seed": 0, "policy_version": 0} | own
        return await self.leader.engine.complete(ids, images=pictures, image_spans=spans, **settings)

    def complete(self, ids: list[int], pictures: tuple[Image, ...], spans: Spans, **own: Any) -> Generation:
        return self.leader.thread.run(self.answer(ids, pictures, spans, **own), 120, "sampling")

    def plain_logprobs(self, ids: list[int], pictures: tuple[Image, ...], spans: Spans) -> torch.Tensor:
        """By plain Transformers of each id after the first, where only the ids in `spans` stand for images."""
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for start, length in spans:
            kinds[0, start : start + length] = 1
        given: dict[str, Any] = self.processor.features(pictures) if pictures else {}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **given).logits[0].float()
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def seeing(tiny_vlm: Callable[..., Path]) -> Iterator[Seeing]:
    found = Seeing(tiny_vlm())
    yield found
    found.leader.close()


@pytest.mark.parametrize(
    ("parts", "count"), [(["what?"], 0), (["", "what?"], 1), (["", " and ", "", "", " last"], 3), (["last ", ""], 1)]
)
def test_an_answer_to_images_has_the_log_probabilities_of_plain_transformers(
    seeing: Seeing, parts: list[str], count: int
) -> None:
    pictures = PICTURES[:count]
    ids, spans = seeing.processor.expand([user(*parts)], pictures)
    answer = seeing.complete(ids, pictures, spans)
    assert answer.prompt_ids == ids
    expected = seeing.plain_logprobs(ids + answer.token_ids, pictures, spans)[len(ids) - 1 :]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=2e-5, rtol=0)


def test_another_count_than_the_engines_is_an_error_that_names_image_and_counts(seeing: Seeing) -> None:
    ids, spans = seeing.processor.expand([user("", "", "what?")], PICTURES[:2])
    with pytest.raises(ImageCountError, match=r"image 2 \(98 x 70 pixels\) takes 8 tokens in the engine, but 4 in"):
        seeing.complete(ids, (PICTURES[0], PICTURES[0]), spans)


def test_more_images_than_a_request_may_have_are_refused_in_a_sentence(seeing: Seeing) -> None:
    pictures = PICTURES + PICTURES[:1]
    ids, spans = seeing.processor.expand([user("", "", "", "", "what?")], pictures)
    with pytest.raises(ValueError, match=r"4 images are more than a request may have \(3\)"):
        seeing.complete(ids, pictures, spans)


def test_an_image_token_that_was_sampled_is_not_taken_for_an_image(seeing: Seeing) -> None:
    # https://github.com/modelscope/ms-swift/issues/9287
    [pad] = seeing.processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>"])
    ids, spans = seeing.processor.expand([user("", "what?")], PICTURES[:1])
    for sampled in ([pad] * spans[0][1], [pad]):  # as many as an image has, or another number
        whole = [*sampled, *ids]
        moved = ((spans[0][0] + len(sampled), spans[0][1]),)
        answer = seeing.complete(whole, PICTURES[:1], moved)
        assert answer.prompt_ids == whole
        assert answer.logprobs != seeing.complete(whole, (), ()).logprobs  # the image is seen


def test_answers_to_images_that_are_cut_into_slices_are_those_that_are_not(seeing: Seeing) -> None:
    """Bit for bit, at temperature 1: what goes on sees its images again."""
    sampled = {"sampling": SamplingSettings(max_tokens=12)}
    asked = []
    for count, parts in enumerate([["what?"], ["", "what?"], ["last ", "", ""]]):
        ids, spans = seeing.processor.expand([user(*parts)], PICTURES[:count])
        asked.append((ids, PICTURES[:count], spans))
    whole = [seeing.complete(*one, **sampled) for one in asked]
    episodes = [lambda gate, one=one: seeing.answer(*one, turnstile=gate, **sampled) for one in asked]
    with Episodes(seeing.leader, 5, episodes) as running:
        cut = running.results()
    for one, other in zip(whole, cut, strict=True):
        assert len(one.token_ids) > 5 and one.token_ids == other.token_ids and one.logprobs == other.logprobs
