"""Turn with images: their places in the ids equal those in one expansion of the whole conversation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation, History
from generation.images import Image, ImageProcessor, ImageRules, Spans, StoredImage
from generation.rollouts.agent import Agent, environment_rollout
from generation.rollouts.episode import RolloutSettings, one_shot
from generation.rollouts.sampler_prompts import PromptReader, PromptText
from generation.rollouts.tools import ToolLimits, ToolRunner, call_parser
from generation.trajectory import Trajectory
from tests.support.pictures import images, picture
from tests.support.scripted import Answers, ScriptedEngine, run

SIZES = [(98, 70), (56, 56), (30, 200)]
PICTURES = images(*SIZES)


class Looking(ScriptedEngine):
    """An engine that records the images of each request, and their places."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.seen: list[tuple[tuple[Image, ...], Spans]] = []

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: Any,
        *,
        images: Any = (),
        image_spans: Spans = (),
        **place: Any,
    ) -> Generation:
        self.seen.append((tuple(images), image_spans))
        return await super().complete(prompt_ids, sampling, **place)


class Gallery:
    """An environment that shows one picture first and another in reply to the first turn."""

    def reset(self, **row: Any) -> Any:
        return ["look: ", picture(*SIZES[1])]

    def respond(self, answer: str) -> Any:
        return [picture(*SIZES[2]), "and this?"]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3"])
def processor(tiny_vlm: Callable[..., Path], request: pytest.FixtureRequest) -> ImageProcessor:
    return ImageProcessor(tiny_vlm(architecture=request.param))


def user(*parts: str) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]
    return {"role": "user", "content": content}


def episode(
    processor: ImageProcessor, answer_ids: list[int], environment: bool = True, **rules: Any
) -> tuple[Trajectory, Looking]:
    """Return the trajectory and the engine of a row with an image and two turns with the same answer."""
    tokenizer, messages = processor.tokenizer, [user("", "what?")]
    agent = Agent(
        ToolRunner(ToolLimits(images=True), tokenizer), call_parser("hermes", tokenizer), 2, {}, False
    )
    ids, spans = processor.expand(messages, PICTURES[:1])
    stored = StoredImage(lambda: picture(*SIZES[0]), PICTURES[0].digest, PICTURES[0].size)
    engine = Looking(lambda prompt, seed: answer_ids)
    function = environment_rollout(Gallery, {}, agent) if environment else one_shot
    image_rules = ImageRules(processor, **({"most": 3} | rules))
    options = {
        "rows": [{}],
        "messages": [messages],
        "images": [([stored], spans)],
        "image_rules": image_rules,
    }
    [trajectory] = run(engine, function, [ids], tokenizer, **options)
    return trajectory, engine


def test_images_of_all_turns_stand_where_one_expansion_of_the_conversation_has_them(
    processor: ImageProcessor,
) -> None:
    answer_ids = processor.tokenizer("a star<|im_end|>", add_special_tokens=False)["input_ids"]
    trajectory, engine = episode(processor, answer_ids)
    assert not trajectory.error and trajectory.images == PICTURES
    conversation = [
        user("", "what?", "\n", "look: ", ""),
        {"role": "assistant", "content": "a star"},
        user("", "and this?"),
    ]
    ids, spans = processor.expand(conversation, PICTURES)
    token_ids = trajectory.prompt_ids + trajectory.response_ids
    assert token_ids == ids + answer_ids and trajectory.image_spans == spans
    assert engine.seen == [(PICTURES[:2], spans[:2]), (PICTURES, spans)]


def test_image_tokens_that_the_policy_samples_have_no_image(processor: ImageProcessor) -> None:
    # https://github.com/modelscope/ms-swift/issues/9287
    end = processor.tokenizer.eos_token_id
    pads = processor.tokenizer("<|image_pad|>" * 4, add_special_tokens=False)["input_ids"]
    plain, _ = episode(
        processor, [*processor.tokenizer("abcd", add_special_tokens=False)["input_ids"], end]
    )
    trajectory, _ = episode(processor, [*pads, end])
    assert trajectory.images == PICTURES and trajectory.image_spans == plain.image_spans
    begin = len(trajectory.prompt_ids)
    assert trajectory.response_ids[:4] == pads and all(
        start != begin for start, _ in trajectory.image_spans
    )


def test_one_answer_keeps_the_rows_images_and_those_that_come_up_are_bounded(
    processor: ImageProcessor,
) -> None:
    answer_ids = [processor.tokenizer.eos_token_id]
    trajectory, engine = episode(processor, answer_ids, environment=False)
    assert trajectory.images == PICTURES[:1] and engine.seen == [(PICTURES[:1], trajectory.image_spans)]
    failed, _ = episode(processor, answer_ids, max_bytes=1000)
    assert "bytes, more than rollout.max_image_mib" in failed.error
    failed, _ = episode(processor, answer_ids, most=2)
    assert "the episode has 3 images, more than data.max_images = 2" in failed.error


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_the_image_of_a_samplers_next_turn_stands_behind_the_answer(
    processor: ImageProcessor, end: str
) -> None:
    tokenizer, messages = processor.tokenizer, [user("", "what?")]
    ids, spans = processor.expand(messages, PICTURES[:1])
    start = PromptText("?", ids, messages=messages, images=PICTURES[:1], image_spans=spans)
    answer_ids = tokenizer("a star" + end, add_special_tokens=False)["input_ids"]
    history, settings = History(), RolloutSettings(1, SamplingSettings(8), 0, 0, 0)
    seen = {"images": start.images, "image_spans": spans}
    answer = Generation(
        answer_ids, [0.0] * len(answer_ids), prompt_ids=ids, text="a star", prompt_text="?", **seen
    )
    history.add(answer, start.messages)
    prompts = PromptReader(tokenizer, settings, [start], history, ImageRules(processor, most=2))
    turns = [
        {"role": "assistant", "content": "a star"},
        {"role": "user", "content": [picture_part(PICTURES[1])]},
    ]
    [request] = prompts.chat_requests([*start.messages, *turns], None, {})
    conversation = [user("", "what?"), turns[0], user("")]
    expected, places = processor.expand(conversation, PICTURES[:2])
    assert request.parent is answer and (request.input.ids, request.input.spans) == (expected, places)


def picture_part(image: Image) -> dict[str, Any]:
    return {"type": "image", "image": image}
