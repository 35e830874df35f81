"""Images of rows: marks in texts are their places, and what cannot be read is quoted in a line."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from generation.images import Image, ImageRules
from tests.support.pictures import image_rules, picture
from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.schema import DataConfig
from trainer.data import load_prompts, row_reader
from trainer.errors import UserError


@pytest.fixture(scope="module")
def rules(tiny_vlm: Callable[..., Path]) -> ImageRules:
    return image_rules(tiny_vlm(), most=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("a.png", (98, 70)), ("b.png", (56, 56)), ("with space.png", (30, 200))):
        picture(*size).save(tmp_path / name)
    return tmp_path


def ids_and_sizes(path: Path, rules: ImageRules) -> list[tuple[list[int], list[tuple[int, int]]]]:
    config = DataConfig(path=str(path), answer_key=None, max_images=3, image_key="images")
    prompts = load_prompts(config, rules.processor.tokenizer, rules)
    return [(list(prompt.token_ids), [image.size for image in prompt.images]) for prompt in prompts]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_marks_in_a_text_are_the_places_of_the_images_in_order(
    folder: Path, rules: ImageRules, kind: str
) -> None:
    """Against Transformers' template and processor on messages with parts."""
    rows = [
        {"prompt": "first <image>\nsecond <image>?", "images": ["a.png", "b.png"]},
        {"prompt": "<image>what?", "images": ["b.png"]},
        {"prompt": "no image", "images": None},
    ]
    place = {"type": "image"}
    first, second = {"type": "text", "text": "first "}, {"type": "text", "text": "\nsecond "}
    texts: list[list[dict[str, Any]]] = [
        [first, place, second, place, {"type": "text", "text": "?"}],
        [place, {"type": "text", "text": "what?"}],
        [{"type": "text", "text": "no image"}],
    ]
    files = [["a.png", "b.png"], ["b.png"], []]
    expected = []
    for parts, names in zip(texts, files, strict=True):
        opened = [PIL.Image.open(folder / name) for name in names]
        messages = [{"role": "user", "content": parts}]
        text = rules.processor._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        inputs = rules.processor._processor(text=[text], images=opened or None, add_special_tokens=False)
        expected.append((list(inputs["input_ids"][0]), [image.size for image in opened]))
    assert ids_and_sizes(write_rows(folder / f"rows.{kind}", rows), rules) == expected
    conversations = [
        {"messages": [{"role": "user", "content": row["prompt"]}], "images": row["images"]}
        for row in rows
    ]
    assert ids_and_sizes(write_rows(folder / f"rows.{kind}", conversations), rules) == expected


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "<image><image>what?", "images": ["a.png"]},
            "has a place for an image, but no image for it",
        ),
        (
            {"prompt": "<image>what?", "images": ["a.png", "b.png"]},
            "has 1 images without a place in its messages",
        ),
        ({"prompt": "<image>what?", "images": []}, "has a place for an image, but no image for it"),
        (
            {"prompt": "<video>what?", "images": ["a.png"]},
            "has the mark <video> in its text, but videos are not read",
        ),
        (
            {"prompt": "what?", "images": [None, "a.png"]},
            "has a null among its images, as image 1: leave it out",
        ),
    ],
)
def test_marks_and_images_that_are_not_equally_many_are_refused(
    folder: Path, rules: ImageRules, row: dict[str, Any], sentence: str
) -> None:
    for kind in ("jsonl", "parquet"):
        with pytest.raises(UserError, match=f"row 1 of .*{sentence}"):
            ids_and_sizes(
                write_rows(folder / f"rows.{kind}", [{"prompt": "what?", "images": ["a.png"]}, row]),
                rules,
            )


def test_images_in_base64_and_at_file_addresses_are_read(folder: Path, rules: ImageRules) -> None:
    file = folder / "with space.png"
    text = base64.encodebytes(file.read_bytes()).decode()  # with line breaks
    rows = [
        {"prompt": "what?", "images": [source]} for source in (file.as_uri(), text, "with space.png")
    ]
    assert "%20" in file.as_uri()
    first, second, third = ids_and_sizes(write_rows(folder / "rows.jsonl", rows), rules)
    assert first == second == third and first[1] == [(30, 200)]
    url = Image.read(f"file://localhost{folder}/with%20space.png")
    assert url.digest == Image.read(file).digest == Image.read(f"file:{folder}/with space.png").digest


def test_a_source_that_cannot_be_read_is_quoted_in_a_line(folder: Path, rules: ImageRules) -> None:
    broken = base64.b64encode(b"\x89PNG" + bytes(9000)).decode()
    for source in (
        "x" * 26_000,
        base64.b64encode(bytes(9000)).decode(),
        broken,
        f"file://other/{'a' * 900}",
        "a\0b",
    ):
        with pytest.raises(UserError, match="has an image \\(1\\) that") as caught:
            ids_and_sizes(
                write_rows(folder / "rows.jsonl", [{"prompt": "what?", "images": [source]}]), rules
            )
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="is on another host"):
        ids_and_sizes(
            write_rows(folder / "rows.jsonl", [{"prompt": "a", "images": ["file://other/a.png"]}]), rules
        )


def test_a_tool_may_return_a_picture_of_floats(folder: Path) -> None:
    floats = PIL.Image.new("F", (4, 4), 0.5)
    assert Image.read(floats).open().getpixel((0, 0)) == (128, 128, 128)
    assert io.BytesIO(Image.read(floats).data).getbuffer()[:4] == b"\x89PNG"


def test_environments_get_the_places_of_marks_in_a_text() -> None:
    reader = row_reader(DataConfig(path="d"), small_tokenizer())
    (message,) = reader.messages({"prompt": "first <image> second <image>"}, images=2)
    place = {"type": "image"}
    first, second = {"type": "text", "text": "first "}, {"type": "text", "text": " second "}
    assert message["content"] == [first, place, second, place]
    (message,) = reader.messages({"prompt": "what?"}, images=1)
    assert message["content"] == [place, {"type": "text", "text": "what?"}]
