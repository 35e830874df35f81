"""Requests with images to a real engine, compared with plain Transformers."""

import asyncio
import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import PIL.Image
import pytest
import torch

from generation.engine.engine import Engine, Leader
from generation.engine.image_inputs import ImageCountError
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from generation.engine.slices import Slices
from generation.exact_ids import Generation, joined
from generation.images import Image, ImageLimits, ImageProcessor, ImageRules, Spans, StoredImage
from generation.rollouts.client import Client, ClientRollout
from generation.rollouts.episode import PolicyLLM, RolloutSettings
from generation.rollouts.episodes import run_episode
from generation.rollouts.sampler import sample_batch
from generation.rollouts.sampler_prompts import prompt_batch
from generation.server import OpenAIServer, ServerSettings
from generation.trajectory import Trajectory
from sharding import WORKER_EXTENSION
from tests.support.pictures import images
from tests.support.sliced import Episodes
from trainer.engines import start_server

PICTURES = images((98, 70), (56, 56), (30, 200))
GREEDY = SamplingSettings(temperature=0.0, max_tokens=6)


def user(*parts: str) -> dict[str, Any]:
    """Return a user's message of texts, and of an image for each empty part."""
    content = [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]
    return {"role": "user", "content": content}


class ImageEngine:
    """A tiny multimodal model, its processor, and an engine for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processor = folder, ImageProcessor(str(folder))
        fields: dict[str, Any] = {"max_num_seqs": 8, "sleep": False, "keyed_noise": True, "images": 3}
        settings = EngineSettings(
            str(folder), 512, kv_cache_bytes=1 << 24, worker_extension=WORKER_EXTENSION, **fields
        )
        self.leader = Leader.start(Engine(settings), 300)
        self.leader.engine.state.adopt_checkpoint(0)

    async def answer(
        self, ids: list[int], pictures: tuple[Image, ...], spans: Spans, **options: Any
    ) -> Generation:
        """Sample an answer to ids and images, greedily by default."""
        settings = {"sampling": GREEDY, "seed": 0, "policy_version": 0} | options
        return await self.leader.engine.complete(ids, images=pictures, image_spans=spans, **settings)

    def complete(
        self, ids: list[int], pictures: tuple[Image, ...], spans: Spans, **options: Any
    ) -> Generation:
        return self.leader.thread.run(self.answer(ids, pictures, spans, **options), 120, "sampling")

    def plain_logprobs(self, ids: list[int], pictures: tuple[Image, ...], spans: Spans) -> torch.Tensor:
        """Plain Transformers' log-probability of each id after the first; only the ids in `spans` stand for images."""
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for start, length in spans:
            kinds[0, start : start + length] = 1
        features: dict[str, Any] = self.processor.features(pictures) if pictures else {}
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **features)
                .logits[0]
                .float()
            )
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def vlm(tiny_vlm: Callable[..., Path]) -> Iterator[ImageEngine]:
    """Yield the engine that all tests of this file share."""
    started = ImageEngine(tiny_vlm())
    yield started
    started.leader.close()


@pytest.mark.parametrize(
    ("parts", "count"),
    [(["what?"], 0), (["", "what?"], 1), (["", " and ", "", "", " last"], 3), (["last ", ""], 1)],
)
def test_answers_to_images_have_transformers_log_probabilities(
    vlm: ImageEngine, parts: list[str], count: int
) -> None:
    pictures = PICTURES[:count]
    ids, spans = vlm.processor.expand([user(*parts)], pictures)
    answer = vlm.complete(ids, pictures, spans)
    assert answer.prompt_ids == ids
    expected = vlm.plain_logprobs(ids + answer.token_ids, pictures, spans)[len(ids) - 1 :]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=2e-5, rtol=0)


def test_a_wrong_number_of_image_tokens_is_an_error_that_names_the_image(vlm: ImageEngine) -> None:
    ids, spans = vlm.processor.expand([user("", "", "what?")], PICTURES[:2])
    with pytest.raises(
        ImageCountError, match=r"image 2 \(98 x 70 pixels\) takes 8 tokens in the engine, but 4 in"
    ):
        vlm.complete(ids, (PICTURES[0], PICTURES[0]), spans)


def test_more_images_than_a_request_may_have_are_refused(vlm: ImageEngine) -> None:
    pictures = PICTURES + PICTURES[:1]
    ids, spans = vlm.processor.expand([user("", "", "", "", "what?")], pictures)
    with pytest.raises(ValueError, match="a request has 4 images, but this engine takes at most 3"):
        vlm.complete(ids, pictures, spans)


def test_a_sampled_image_token_is_not_taken_for_an_image(vlm: ImageEngine) -> None:
    # https://github.com/modelscope/ms-swift/issues/9287
    [pad] = vlm.processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>"])
    ids, spans = vlm.processor.expand([user("", "what?")], PICTURES[:1])
    for sampled in ([pad] * spans[0][1], [pad]):  # as many as an image has, or fewer
        longer = [*sampled, *ids]
        moved = ((spans[0][0] + len(sampled), spans[0][1]),)
        answer = vlm.complete(longer, PICTURES[:1], moved)
        assert answer.prompt_ids == longer
        assert answer.logprobs != vlm.complete(longer, (), ()).logprobs  # the image has an effect


def test_answers_to_images_are_the_same_in_slices(vlm: ImageEngine) -> None:
    """Answer are equal bit for bit at temperature 1: one that continues has its images again."""
    sampled = {"sampling": SamplingSettings(max_tokens=12)}
    requests = []
    for count, parts in enumerate([["what?"], ["", "what?"], ["last ", "", ""]]):
        ids, spans = vlm.processor.expand([user(*parts)], PICTURES[:count])
        requests.append((ids, PICTURES[:count], spans))
    uncut = [vlm.complete(*one, **sampled) for one in requests]
    episodes = [lambda gate, one=one: vlm.answer(*one, turnstile=gate, **sampled) for one in requests]
    with Episodes(vlm.leader, 5, episodes) as running:
        cut = running.results()
    for one, other in zip(uncut, cut, strict=True):
        assert (
            len(one.token_ids) > 5
            and one.token_ids == other.token_ids
            and one.logprobs == other.logprobs
        )


def openai_message(*parts: str | Image) -> dict[str, Any]:
    """Return a user's message in the form of OpenAI's clients."""
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    content = [
        {"type": "image_url", "image_url": {"url": part.data_url()}} if isinstance(part, Image) else part
        for part in texts
    ]
    return {"role": "user", "content": content}


def by_client(
    vlm: ImageEngine, client: Client, row: tuple[Image, ...] = (), slice_tokens: int = 0, **rules: Any
) -> list[Trajectory]:
    """Run one greedy episode of a client for a row with these images, in slices if `slice_tokens` is set."""
    sampling = SamplingSettings(
        max_tokens=6, temperature=0, stop_token_ids=[vlm.processor.tokenizer.eos_token_id]
    )
    settings = RolloutSettings(1, sampling, policy_version=0, seed=1, step=2)
    image_rules = ImageRules(**({"processor": vlm.processor, "most": 3} | rules))
    ids, spans = vlm.processor.expand([user(*["" for _ in row], "what?")], row)
    engine, tokenizer = vlm.leader.engine, vlm.processor.tokenizer
    llm = PolicyLLM(
        engine, tokenizer, settings, 3, 1, ids, images=row, image_spans=spans, image_rules=image_rules
    )
    function = ClientRollout(client, start_server, 60)

    async def go() -> list[Trajectory]:
        gate = Slices(slice_tokens or 1)

        async def open_again() -> None:
            while True:
                gate.open(0)
                await gate.settled()

        opening = asyncio.ensure_future(open_again())
        try:
            with gate.episode() as turnstile:
                llm.turnstile = turnstile if slice_tokens else None
                return await run_episode(function, llm, {"question": "what?"})
        finally:
            opening.cancel()
            await function.aclose()

    return vlm.leader.thread.run(go(), 90, "an episode")


async def look_twice(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Ask a turn with the row's image, and one with another image."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as api:
        [url] = row["images"]
        first = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": row["question"]},
        ]
        messages: list[Any] = [{"role": "user", "content": first}]
        answer = (await api.chat.completions.create(model=model, messages=messages)).choices[0].message
        messages += [answer, openai_message("and this: ", PICTURES[1])]
        await api.chat.completions.create(model=model, messages=messages)
    return 0.5


def test_two_turns_of_a_client_have_transformers_log_probabilities(
    vlm: ImageEngine,
) -> None:
    [trajectory] = by_client(vlm, look_twice, PICTURES[:1])
    assert trajectory.turns == 2 and trajectory.images == PICTURES[:2] and trajectory.reward == 0.5
    assert trajectory.metrics["server/retemplated"] == 0
    ids = trajectory.prompt_ids + trajectory.response_ids
    expected, spans = vlm.processor.expand([user("", "what?")], PICTURES[:1])
    assert trajectory.prompt_ids == expected and trajectory.image_spans[:1] == spans
    [pad] = vlm.processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>"])
    start, length = trajectory.image_spans[1]
    assert ids[start - 1 : start + length + 1] == [
        ids[spans[0][0] - 1],
        *[pad] * length,
        ids[sum(spans[0])],
    ]
    plain = vlm.plain_logprobs(ids, trajectory.images, trajectory.image_spans)[len(expected) - 1 :]
    mask = torch.tensor(trajectory.loss_mask).bool()
    gap = (torch.tensor(trajectory.logprobs) - plain)[mask].abs()
    assert mask.sum() > 4 and gap.max() <= 1e-4
    [cut] = by_client(vlm, look_twice, PICTURES[:1], slice_tokens=2)
    assert cut.response_ids == trajectory.response_ids and cut.image_spans == trajectory.image_spans
    torch.testing.assert_close(
        torch.tensor(cut.logprobs), torch.tensor(trajectory.logprobs), atol=2e-5, rtol=0
    )


def test_the_limit_on_images_that_a_client_adds_excludes_the_rows(vlm: ImageEngine) -> None:
    added = len(PICTURES[1].data)
    [trajectory] = by_client(vlm, look_twice, PICTURES[:1], max_bytes=added)
    assert not trajectory.error
    [failed] = by_client(vlm, look_twice, PICTURES[:1], max_bytes=added - 1)
    assert "the request has images of" in failed.error


def test_a_wrong_number_of_image_tokens_ends_a_clients_rollout(
    vlm: ImageEngine, tiny_vlm: Callable[..., Path]
) -> None:
    other = ImageProcessor(str(tiny_vlm(largest_image=2)))  # it gives that image 2 tokens
    sentence = (
        r"image 1 of row 5 of rows.jsonl \(98 x 70 pixels\) takes 8 tokens in the engine, but 2 in"
    )
    with pytest.raises(ImageCountError, match=sentence):
        # the name is kept, though the client sends a data URL
        by_client(
            vlm,
            look_twice,
            (replace(PICTURES[0], name="image 1 of row 5 of rows.jsonl"),),
            processor=other,
        )


def by_sampler(vlm: ImageEngine, sampler: Any, row: tuple[Image, ...], **rules: Any) -> list[Trajectory]:
    """Draw two greedy samples of a prompt with the row's images."""
    sampling = SamplingSettings(
        max_tokens=6, temperature=0, stop_token_ids=[vlm.processor.tokenizer.eos_token_id]
    )
    settings = RolloutSettings(2, sampling, policy_version=0, seed=1, step=2)
    messages = [user(*["" for _ in row], "what?")]
    ids, spans = vlm.processor.expand(messages, row)
    stored = [StoredImage(lambda image=image: image.data, image.digest, image.size) for image in row]
    batch = prompt_batch([ids], [0], vlm.processor.tokenizer, 2, [messages], images=[(stored, spans)])
    limits = ImageRules(**({"processor": vlm.processor, "most": 3} | rules))

    async def score(trajectory: Trajectory) -> None: ...

    work = sample_batch(
        vlm.leader.engine, vlm.processor.tokenizer, sampler, batch, settings, score, 60, limits
    )
    return vlm.leader.thread.run(work, 90, "a rollout")


def chats(llm: Any, prompts: Any, params: Any) -> Any:
    """Return a sampler that chats: a turn with the row's image, and one with another image."""
    turns = [list(prompt.messages) for prompt in prompts]
    for messages, output in zip(turns, llm.chat(turns), strict=True):
        messages += [
            {"role": "assistant", "content": output.outputs[0].text},
            openai_message("and this: ", PICTURES[1]),
        ]
    return llm.chat(turns)


def texts(llm: Any, prompts: Any, params: Any) -> Any:
    """Return a sampler like `chats` that prompts with text; its second prompt lists both images."""
    more = "\n<|im_start|>user\nand this: <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    media = {"image": [PICTURES[0].open(), PICTURES[1].open()]}
    end = llm.get_tokenizer().eos_token
    return llm.generate(
        [
            {"prompt": out.prompt + out.outputs[0].text + end + more, "multi_modal_data": media}
            for out in llm.generate(prompts)
        ]
    )


def tokens(llm: Any, prompts: Any, params: Any) -> Any:
    """Return a sampler like `chats` that prompts with token ids."""
    media = {"image": [PICTURES[0], PICTURES[1]]}
    outputs = llm.generate([{"prompt_token_ids": prompt.token_ids} for prompt in prompts])
    ids, _ = ImageProcessor(llm.engine.settings.model).expand("and this: <|image_pad|>", PICTURES[1:2])
    return llm.generate(
        [
            {
                "prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids, *ids],
                "multi_modal_data": media,
            }
            for out in outputs
        ]
    )


@pytest.mark.parametrize("sampler", [chats, texts, tokens])
def test_two_turns_of_a_sampler_have_transformers_log_probabilities(
    vlm: ImageEngine, sampler: Any
) -> None:
    for trajectory in by_sampler(vlm, sampler, PICTURES[:1]):
        assert not trajectory.error and trajectory.turns == 2 and trajectory.images == PICTURES[:2]
        ids = trajectory.prompt_ids + trajectory.response_ids
        expected, spans = vlm.processor.expand([user("", "what?")], PICTURES[:1])
        assert trajectory.prompt_ids == expected and trajectory.image_spans[:1] == spans
        [pad] = vlm.processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>"])
        start, length = trajectory.image_spans[1]
        assert ids[start : start + length] == [pad] * vlm.processor.tokens(PICTURES[1].size)
        plain = vlm.plain_logprobs(ids, trajectory.images, trajectory.image_spans)[len(expected) - 1 :]
        mask = torch.tensor(trajectory.loss_mask).bool()
        gap = (torch.tensor(trajectory.logprobs) - plain)[mask].abs()
        assert mask.sum() > 4 and gap.max() <= 1e-4


def asks(**prompt: Any) -> Any:
    """Return a sampler that adds these fields to each prompt."""

    def sampler(llm: Any, prompts: Any, params: Any) -> Any:
        return llm.generate([{"prompt": start, **prompt} for start in prompts])

    return sampler


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        (
            asks(multi_modal_data={"image": PICTURES[1]}),
            "a prompt's images must begin with those of the prompt that",
        ),
        (
            asks(multi_modal_data={"image": [*PICTURES[:1]] * 4}),
            "a prompt has 4 images, more than data.max_images = 3",
        ),
        (asks(multi_modal_data={"image": PICTURES[:2]}), "a prompt has 1 images, but 0 placeholders"),
        (
            lambda llm, prompts, params: llm.generate(
                [{"prompt": "<|image_pad|>", "multi_modal_data": {"image": b"x"}}]
            ),
            "a prompt has an image (1) that is not an image of a known kind",
        ),
        (
            lambda llm, prompts, params: [
                [*out.outputs[0].token_ids, 5] for out in chats(llm, prompts, params)
            ],
            "holds 7 ids that the policy has not sampled",
        ),
    ],
)
def test_prompts_that_samplers_may_not_ask_are_refused(
    vlm: ImageEngine, sampler: Any, sentence: str
) -> None:
    try:
        errors = {trajectory.error for trajectory in by_sampler(vlm, sampler, PICTURES[:1])}
    except ValueError as error:
        errors = {str(error)}
    assert len(errors) == 1 and sentence in errors.pop()


def test_a_response_may_be_cut_before_an_image_but_not_within_it(vlm: ImageEngine) -> None:
    def cut(at: int) -> Any:
        def sampler(llm: Any, prompts: Any, params: Any) -> Any:
            return [
                joined(llm.history.generations[-1 - i].chain).response_ids[:at]
                for i, _ in enumerate(chats(llm, prompts, params))
            ]

        return sampler

    [uncut, _] = by_sampler(vlm, chats, PICTURES[:1])
    begin = uncut.image_spans[1][0] - len(uncut.prompt_ids)
    for trajectory in by_sampler(vlm, cut(begin), PICTURES[:1]):
        assert trajectory.images == PICTURES[:1] and trajectory.image_spans == uncut.image_spans[:1]
    with pytest.raises(ValueError, match="is cut within an image"):
        by_sampler(vlm, cut(begin + 1), PICTURES[:1])


@pytest.fixture(scope="module")
def server(vlm: ImageEngine) -> Iterator[OpenAIServer]:
    """Yield a server that takes images of requests, within limits."""
    rules = ImageRules(vlm.processor, ImageLimits(larger="resize"), most=3, max_bytes=100_000)
    settings = ServerSettings(image_rules=rules, header_keys=True)
    started = vlm.leader.thread.run(
        OpenAIServer.start(vlm.leader.engine, settings), 60, "starting a server"
    )
    yield started
    vlm.leader.thread.run(started.stop(), 20, "stopping a server")


def asked(server: OpenAIServer, path: str, key: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
    """Send a request, and return the answer's status and body."""
    headers = {"x-hotbunk-trajectory": key} if key else {}
    body = {"model": "policy", "temperature": 0, "max_tokens": 4} | body
    answer = httpx.post(server.base_url + path, json=body, headers=headers, timeout=60)
    return answer.status_code, answer.json()


def taken(vlm: ImageEngine, server: OpenAIServer, key: str) -> list[Trajectory]:
    """End the capture of a key, and return its trajectories."""

    async def take() -> list[Trajectory]:
        return server.take(key)

    return vlm.leader.thread.run(take(), 10, "taking trajectories")


def url_part(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


LARGE = images((200, 200))[0]  # noise of more than 100,000 bytes


def bomb() -> Image:
    """Return an image of 64 million pixels in a few kilobytes, which `Image.read` would accept from a dataset."""
    buffer = io.BytesIO()
    PIL.Image.new("1", (8000, 8000)).save(buffer, format="PNG")
    return Image(buffer.getvalue(), "", (8000, 8000))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        url_part("http://example.org/a.png"),
        {},
        "the request has an image (1) at a remote address (http://example.org/a",
    ),
    (url_part("file:///etc/hostname"), {}, "the request has an image (1) without a data URL"),
    (url_part("/etc/hostname"), {}, "the request has an image (1) without a data URL"),
    (
        url_part("data:image/png;base64,@@"),
        {},
        "has an image (1) that is a data URL whose base64 is broken",
    ),
    (
        url_part("data:image/png;base64,AAAA"),
        {},
        "the request has an image (1) that is not an image of a known kind",
    ),
    (openai_message(*[PICTURES[1]] * 4), {}, "the request has 4 images, more than data.max_images = 3"),
    (openai_message(LARGE), {}, "more than rollout.max_image_mib"),
    (openai_message(bomb()), {}, "has 8000 x 8000 pixels, more than any image may have (33554432)"),
    (
        openai_message(PICTURES[1], "<|image_pad|>"),
        {},
        "the request has 1 images, but 2 placeholders (<|image_pad|>)",
    ),
    (
        openai_message(PICTURES[1]),
        {"truncate_prompt_tokens": 9},
        "truncate_prompt_tokens may cut an image in two: leave it out",
    ),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {}, "uuid": "a"}]},
        {},
        "the request has an image (1) without a data URL",
    ),
]


@pytest.mark.parametrize(("message", "more", "sentence"), REFUSED)
def test_images_that_clients_may_not_send_are_refused(
    server: OpenAIServer, message: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    status, answer = asked(server, "/chat/completions", "a", messages=[message], **more)
    assert status == 400 and sentence in answer["error"]["message"], answer


def test_images_are_decoded_one_at_a_time_over_all_requests(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, met, read = threading.Barrier(2), [], Image.read

    def waiting(*arguments: Any) -> Image:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(both.wait(timeout=1))
        return read(*arguments)

    monkeypatch.setattr(Image, "read", waiting)
    with ThreadPoolExecutor(2) as pool:
        messages = [openai_message(PICTURES[1], "what?")]
        answers = list(
            pool.map(lambda _: asked(server, "/chat/completions", messages=messages), range(2))
        )
    assert [status for status, _ in answers] == [200, 200] and met == []


def test_conversations_that_differ_only_in_an_image_are_kept_apart(
    vlm: ImageEngine, server: OpenAIServer
) -> None:
    first = [[openai_message(image, "what?")] for image in (PICTURES[1], images((57, 56))[0])]
    for messages in first:
        same = {"allowed_token_ids": [40]}  # so that only the images distinguish the conversations
        _, answer = asked(server, "/chat/completions", "two", messages=messages, **same)
        text = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
    for messages in reversed(first):
        assert asked(server, "/chat/completions", "two", messages=messages)[0] == 200
    trajectories = taken(vlm, server, "two")
    assert [trajectory.turns for trajectory in trajectories] == [2, 2]
    assert [trajectory.images[0].size for trajectory in trajectories] == [(57, 56), (56, 56)]
    assert trajectories[0].metrics["server/retemplated"] == 0


def as_response(image: Image) -> dict[str, Any]:
    content = [{"type": "input_image", "image_url": image.data_url(), "detail": "auto"}]
    return {"role": "user", "content": [*content, {"type": "input_text", "text": "what?"}]}


def as_message(image: Image) -> dict[str, Any]:
    data = image.data_url().partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {
        "role": "user",
        "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}],
    }


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/chat/completions", lambda i: openai_message(i, "what?")),
        ("/responses", as_response),
        ("/messages", as_message),
    ],
)
def test_ids_only_grow_over_turns_with_images_in_every_dialect(
    vlm: ImageEngine, server: OpenAIServer, path: str, form: Callable[[Image], dict[str, Any]]
) -> None:
    turns: list[Any] = [form(PICTURES[1])]
    name = "input" if path == "/responses" else "messages"
    length = {"max_output_tokens": 4, "max_tokens": None} if path == "/responses" else {}
    status, answer = asked(server, path, path, **{name: turns}, **length)
    assert status == 200, answer
    if path == "/responses":
        turns += answer["output"]
    elif path == "/messages":
        turns += [{"role": "assistant", "content": answer["content"]}]
    else:
        turns += [answer["choices"][0]["message"]]
    status, answer = asked(server, path, path, **{name: [*turns, form(PICTURES[2])]}, **length)
    assert status == 200, answer
    [trajectory] = taken(vlm, server, path)
    assert trajectory.turns == 2 and trajectory.images == PICTURES[1:3]
    ids, spans = vlm.processor.expand([user("", "what?")], PICTURES[1:2])
    assert trajectory.prompt_ids == ids and trajectory.image_spans[:1] == spans
    plain = vlm.plain_logprobs(ids + trajectory.response_ids, trajectory.images, trajectory.image_spans)
    mask = torch.tensor(trajectory.loss_mask).bool()
    gap = (torch.tensor(trajectory.logprobs) - plain[len(ids) - 1 :])[mask].abs()
    assert gap.max() <= 1e-4
