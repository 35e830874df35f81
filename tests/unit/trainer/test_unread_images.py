"""Images that a row has and nobody would read: refused where the prompt needs them, otherwise named."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from generation.images import ImageRules
from tests.support.pictures import image_rules, picture
from tests.support.recipes import make_config
from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.schema import DataConfig, HeldOutConfig
from trainer.data import load_held_out, load_prompts, prompt_rows
from trainer.errors import UserError
from trainer.sft_rows import load_transcripts

PARTS = [
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]}
]
PLAIN = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def model(tiny_vlm: Callable[..., Path]) -> Path:
    return tiny_vlm()


@pytest.fixture(scope="module")
def rules(model: Path) -> ImageRules:
    return image_rules(model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture(98, 70).save(tmp_path / "a.png")
    return tmp_path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "keys", "sentence"),
    [
        ({"messages": PARTS}, {}, "has an image in its messages, but data.max_images is 0"),
        (
            {"messages": PLAIN, "images": ["a.png"]},
            {"max_images": 1},
            "has images in its column 'images', which is",
        ),
        (
            {"prompt": "<image>what?", "images": ["a.png"]},
            {},
            "has images in its column 'images', which is not read",
        ),
        (
            {"prompt": "<image>what?", "seen": "a.png"},
            {"max_images": 2},
            "column 'seen', which is not read: set data",
        ),
    ],
)
def test_rows_whose_images_would_not_be_read_are_refused(
    folder: Path,
    model: Path,
    rules: ImageRules,
    row: dict[str, Any],
    keys: dict[str, Any],
    sentence: str,
    kind: str,
    one_rank: None,
) -> None:
    """For training, evaluation and a warm start alike, with the row's number."""
    plain: dict[str, Any] = {"completion": "1"}
    for key, value in {"messages": PLAIN, "prompt": "what?", "images": None, "seen": None}.items():
        if key in row:
            plain[key] = value
    path = write_rows(folder / f"rows.{kind}", [plain, {**row, "completion": "1"}])
    data = DataConfig(path=str(path), answer_key=None, **keys)
    images = rules if data.max_images else None
    tokenizer = rules.processor.tokenizer
    with pytest.raises(UserError, match=f"row 1 of .*{sentence}"):
        load_prompts(data, tokenizer, images)
    with pytest.raises(UserError, match=f"row 1 of .*{sentence}"):
        load_held_out(HeldOutConfig(path=str(path)), data, tokenizer, images)
    sft = {"completion_key": "completion"}
    config = make_config(model={"path": str(model)}, data=data.model_dump(), sft=sft)
    with pytest.raises(UserError, match=f"row 1 of .*{sentence}"):
        load_transcripts(config, tokenizer)


def test_columns_of_images_that_nothing_mentions_are_named_in_a_remark(folder: Path) -> None:
    encoded = base64.b64encode((folder / "a.png").read_bytes()).decode()
    data_url = f"data:image/png;base64,{encoded}"
    held = {"one": "a.png", "two": [None, "a.JPG"], "three": encoded, "four": data_url}
    others = {
        "container": "python:3.11",
        "note": "see a.png",
        "url": "https://x.org/a.png",
        "five": None,
        "six": [],
    }
    path = write_rows(folder / "rows.jsonl", [{"prompt": "what?", "answer": "a.png", **held, **others}])
    (row,) = prompt_rows(DataConfig(path=str(path)), small_tokenizer())
    assert row.remarks == tuple(f"has images in its column {name!r}, which is not read" for name in held)
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "image": [picture(9, 7)]}).cast_column(
        "image", datasets.Image()
    )
    rows.to_parquet(folder / "pillow.parquet")
    (row,) = prompt_rows(
        DataConfig(path=str(folder / "pillow.parquet"), answer_key=None), small_tokenizer()
    )
    assert row.remarks == ("has images in its column 'image', which is not read",)
