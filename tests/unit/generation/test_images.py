"""Images as they are read, and the one expansion of their placeholders, beside the model's own processor."""

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from generation.engine.engine import Engine
from generation.engine.image_inputs import _found
from generation.engine.settings import EngineSettings
from generation.images import Image, ImageLimits, ImageProcessor, ImageRules
from generation.server.image_messages import _with_images
from tests.support.in_process import IdleLLM

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "llava", "mistral3"]


def picture(width: int, height: int) -> PIL.Image.Image:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def encoded(image: PIL.Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


IMAGES = [Image.read(picture(*size)) for size in [(98, 70), (56, 56), (30, 200)]]


def message(*parts: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if part else {"type": "image"} for part in parts],
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "parts", [["", "first, ", "", " and last", ""], ["\n", "", "", "\n"], ["no image"]]
)
def test_a_prompt_is_expanded_as_the_models_own_processor_does_it(
    tiny_vlm: Callable[..., Path], family: str, parts: list[str]
) -> None:
    # Another count than the processor's: https://github.com/huggingface/trl/issues/6401
    from transformers import AutoProcessor

    folder = tiny_vlm(architecture=family)
    images = IMAGES[: parts.count("")]
    ours = ImageProcessor(str(folder))
    ids, spans = ours.expand([message(*parts)], images)
    theirs = AutoProcessor.from_pretrained(folder)
    text = theirs.apply_chat_template([message(*parts)], add_generation_prompt=True)
    pixels, settings = [image.open() for image in images] or None, {"add_special_tokens": False}
    encoding = theirs(text=[text], images=pixels, return_tensors="pt", **settings)
    assert ids == encoding["input_ids"][0].tolist()
    pad = theirs.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    places = [
        start + n
        for image, (start, length) in zip(images, spans, strict=True)
        for n in range(length)
        if n not in ours.marked(image.size)
    ]
    assert places == [index for index, token in enumerate(ids) if token == pad]
    if images:
        features = ours.features(images)
        of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        assert features.keys() == encoding.keys() - of_text
        assert all(torch.equal(value, encoding[name]) for name, value in features.items())


@pytest.mark.parametrize(
    ("parts", "images", "sentence"),
    [
        (["no place"], 1, "has 1 images, but 0 placeholders"),
        (["", ""], 1, "has 1 images, but 2 placeholders"),
        (["<|image_pad|>"], 0, "has 0 images, but 1 placeholders"),
    ],
)
def test_a_prompt_without_one_placeholder_for_each_image_is_refused(
    tiny_vlm: Callable[..., Path], parts: list[str], images: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        ImageProcessor(str(tiny_vlm())).expand([message(*parts)], IMAGES[:images])


def test_an_image_is_the_same_from_a_path_its_bytes_a_url_and_a_datasets_column(tmp_path: Path) -> None:
    data = encoded(picture(30, 20))
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [tmp_path / "a.png", str(tmp_path / "a.png"), data, url, {"bytes": data, "path": None}]
    read = [Image.read(source) for source in sources]
    assert {image.digest for image in read} == {read[0].digest}
    assert np.array_equal(np.asarray(read[0].open()), np.asarray(picture(30, 20)))
    assert Image.read(picture(30, 20)).size == (30, 20)


def test_pixels_are_upright_and_on_white_where_an_image_is_transparent() -> None:
    clear = PIL.Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    assert np.asarray(Image.read(encoded(clear)).open()).min() == 255
    lying = picture(4, 2)
    exif = lying.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    buffer = io.BytesIO()
    lying.save(buffer, format="PNG", exif=exif)
    upright = Image.read(buffer.getvalue())
    assert upright.size == (2, 4) == upright.open().size
    assert np.array_equal(np.asarray(upright.open()), np.rot90(np.asarray(lying), -1))


RAMP = np.linspace(0, 1, 256).reshape(16, 16)


@pytest.mark.parametrize(
    ("pixels", "kind"),
    [
        (np.rint(RAMP * 65535).astype(np.uint16), "PNG"),
        (np.rint(RAMP * 65535).astype(np.uint16), "TIFF"),
        (np.rint(RAMP * 255).astype(np.int32), "TIFF"),
        (RAMP.astype(np.float32), "TIFF"),
        ((RAMP * 255).astype(np.float32), "TIFF"),
    ],
)
def test_grey_pictures_of_more_than_8_bits_are_scaled_and_not_clipped(
    pixels: np.ndarray, kind: str
) -> None:
    seen = np.asarray(Image.read(encoded(PIL.Image.fromarray(pixels), kind)).open())
    assert seen.dtype == np.uint8 and seen.mean() == pytest.approx(127.5, abs=0.1)
    expected = np.array([[round(255 * value) for value in row] for row in RAMP.tolist()])
    assert np.array_equal(seen, np.stack([expected] * 3, axis=-1))


@pytest.mark.parametrize(
    "pixels",
    [
        (RAMP * 65535).astype(np.int32),
        (RAMP * 300).astype(np.float32),
        (RAMP - 0.5).astype(np.float32),
        np.full((2, 2), np.nan, dtype=np.float32),
    ],
)
def test_a_picture_whose_white_is_unknown_is_refused(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="which may mean any brightness: save it with 8 or 16 bits"):
        Image.read(encoded(PIL.Image.fromarray(pixels), "TIFF"))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"not an image", "is not an image of a known kind"),
        (encoded(picture(40, 40))[:300], "is broken"),
        (encoded(picture(40, 40), "JPEG")[:-400], "is broken"),
        (17, "is int, but must be a path"),
        ("nowhere.png", "cannot be read: No such file"),
        ("https://example.com/a.png", "is a remote address"),
        ("data:text/plain;base64,aGk=", "is a data URL of the kind"),
        ("data:image/png;base64,?", "whose base64 is broken"),
        (encoded(picture(300, 200)), "has 300 x 200 pixels, more than data.max_image_pixels"),
        (encoded(PIL.Image.new("1", (20_000, 20_000))), "pixels"),
    ],
)
def test_an_unusable_image_is_reported_in_one_sentence(source: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Image.read(source, ImageLimits(max_pixels=50_000))
    assert "\n" not in str(caught.value)


def test_a_larger_image_is_made_smaller_if_asked_but_a_bomb_is_refused() -> None:
    image = Image.read(encoded(picture(300, 200)), ImageLimits(6000, "resize"))
    assert image.size == (94, 63) == image.open().size
    for side in (10_000, 20_000):  # from twice its own limit on Pillow refuses by itself
        with pytest.raises(ValueError, match="pixels.* any image may have"):
            Image.read(encoded(PIL.Image.new("1", (side, side))), ImageLimits(6000, "resize"))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7, 7, 8, 7, 7, 9], 1),
        ([7, 7, 8, 7, 7], 1),
        ([7, 7, 8, 7, 7, 9, 6], None),
        ([7, 7, 7, 7], None),
        ([7, 7], None),
    ],
)
def test_the_trainer_s_tokens_of_an_image_are_looked_up_among_the_engine_s(
    ids: list[int], expected: int | None
) -> None:
    """5 begins the image, 7 has a feature, 8 ends a line and 9 the image."""
    tokens = [5, 7, 7, 8, 7, 7, 9]
    assert _found(ids, tokens, [token == 7 for token in tokens]) == expected


@pytest.mark.parametrize("count", [0, 1])
def test_features_that_an_engine_has_kept_of_images_go_with_the_weights(count: int) -> None:
    forgotten = []

    class Seeing(IdleLLM):
        async def reset_encoder_cache(self) -> None:
            forgotten.append("features")

    engine = Engine(EngineSettings("none", 64, images=count))
    engine._llm = Seeing()  # type: ignore[assignment]

    async def update() -> None:
        async with engine.update():
            assert not forgotten

    asyncio.run(update())
    assert forgotten == ["features"] * count


def test_images_of_two_requests_are_decoded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One image at a time, whichever request it is in: a request with many does not hold up the others."""
    order: list[str] = []
    decoding = threading.Lock()

    def read(source: Any, limits: ImageLimits) -> str:
        assert decoding.acquire(blocking=False)
        order.append(source[-1])
        time.sleep(0.01)
        decoding.release()
        return str(source)

    monkeypatch.setattr(Image, "read", read)
    rules = ImageRules(None, most=9)  # type: ignore[arg-type]
    decoder = ThreadPoolExecutor(1)

    async def request(name: str, count: int) -> None:
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}
            for _ in range(count)
        ]
        (message,) = await _with_images([{"role": "user", "content": parts}], rules, decoder)
        assert len(message["content"]) == count

    async def both() -> None:
        await asyncio.gather(request("a", 6), request("b", 1))

    asyncio.run(both())
    assert sorted(order) == [*"aaaaaab"] and "b" in order[:3]
