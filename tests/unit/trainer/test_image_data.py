"""Rows with images: where images are found, which data of them is kept, and which rows are refused."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from generation.image_marks import split_images
from generation.images import Image, ImageRules, thumbnail
from generation.rollouts.episodes import CarriedGroup
from generation.rollouts.tools import ToolLimits, ToolRunner, make_tool, parse_hermes, tools_by_name
from generation.trajectory import Trajectory
from sharding.ranks import RemoteError
from tests.support.learning_steps import make_batcher
from tests.support.pictures import image_rules, images, picture
from tests.support.recipes import make_config
from tests.support.rows import read_rows, write_rows
from trainer.config.checks import find_problems
from trainer.config.recipe import load_config
from trainer.config.schema import DataConfig, TrackingConfig, TrainConfig
from trainer.data import PromptDataset, load_prompts
from trainer.errors import UserError
from trainer.rewards.loading import OFFERED, bind_rewards
from trainer.rollouts.round import Round, packed, read_groups
from trainer.run.tracking import make_tracker
from trainer.sft import batches_of
from trainer.sft_rows import Transcripts, load_transcripts

SIZES = [(98, 70), (56, 56), (30, 200)]


@pytest.fixture(scope="module")
def rules(tiny_vlm: Callable[..., Path]) -> ImageRules:
    return image_rules(tiny_vlm(), most=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for width, height in SIZES:
        picture(width, height).save(tmp_path / "pictures" / f"{width}.png")
    return tmp_path


def load(folder: Path, rules: ImageRules, *rows: dict[str, Any], **keys: Any) -> PromptDataset:
    write_rows(folder / "rows.jsonl", rows)
    config = DataConfig(path=str(folder / "rows.jsonl"), answer_key=None, max_images=3, **keys)
    return load_prompts(config, rules.processor.tokenizer, rules)


def test_images_come_from_a_column_or_from_messages_in_the_order_of_places(
    folder: Path, rules: ImageRules
) -> None:
    paths = [f"pictures/{width}.png" for width, _ in SIZES]
    part = {"type": "image", "image": paths[1]}
    url = {"type": "image_url", "image_url": {"url": paths[2]}}
    text = {"type": "text", "text": "what?"}
    rows = [
        {
            "messages": [{"role": "user", "content": [{"type": "image"}, text, part, url]}],
            "seen": paths[:1],
        },
        {"messages": [{"role": "user", "content": "what?"}], "seen": paths[:2]},
        {"messages": [{"role": "user", "content": "no image"}], "seen": []},
    ]
    data = load(folder, rules, *rows, image_key="seen")
    sizes = [[image.size for image in prompt.images] for prompt in data]
    assert sizes == [SIZES, SIZES[:2], []]
    expanded = rules.processor.expand(
        [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, text]}],
        [Image.read(folder / path) for path in paths[:2]],
    )
    assert (list(data[1].token_ids), data[1].image_spans) == expanded
    assert "seen" not in data[0].row
    for prompt in data:
        assert [image.read().digest for image in prompt.images] == [
            image.digest for image in prompt.images
        ]
        row = f"of row {prompt.id} of {folder / 'rows.jsonl'}"
        assert [image.read().name for image in prompt.images] == [
            f"image {n + 1} {row}" for n in range(len(prompt.images))
        ]
        assert [length for _, length in prompt.image_spans] == [
            rules.processor.tokens(image.size) for image in prompt.images
        ]


def test_a_parquet_column_of_pillow_images_is_read_again_where_it_is_needed(
    folder: Path, rules: ImageRules
) -> None:
    rows = datasets.Dataset.from_dict(
        {"prompt": ["a", "b"], "image": [picture(98, 70), picture(56, 56)]}
    )
    rows.cast_column("image", datasets.Image()).to_parquet(folder / "rows.parquet")
    config = DataConfig(
        path=str(folder / "rows.parquet"), answer_key=None, max_images=1, image_key="image"
    )
    data = load_prompts(config, rules.processor.tokenizer, rules)
    assert [prompt.images[0].read().open().tobytes() for prompt in data] == [
        picture(98, 70).tobytes(),
        picture(56, 56).tobytes(),
    ]


def test_data_with_another_image_has_another_fingerprint_and_a_changed_file_is_told(
    folder: Path, rules: ImageRules
) -> None:
    row = {"prompt": "what?", "image": "pictures/98.png"}
    before = load(folder, rules, row, image_key="image")
    picture(99, 70).resize((98, 70)).save(folder / "pictures/98.png")
    assert load(folder, rules, row, image_key="image").fingerprint != before.fingerprint
    with pytest.raises(
        ValueError, match=r"image 1 of row 0 of .*rows.jsonl has changed since the data were"
    ):
        before[0].images[0].read()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "a", "image": "gone.png"},
            r"row 0 of .* has an image \(1\) that cannot be read: No such file",
        ),
        ({"prompt": "a", "image": "rows.jsonl"}, "that is not an image of a known kind"),
        (
            {"prompt": "a", "image": "pictures/large.png"},
            "that has 200 x 200 pixels, more than data.max_image_pixels",
        ),
        (
            {"prompt": "a", "image": ["pictures/98.png"] * 4},
            "has 4 images, more than data.max_images = 3",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "image": []},
            "has a place for an image, but no image",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image"}]}],
                "image": ["pictures/98.png"] * 2,
            },
            "has 1 images without a place in its messages",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio"}]}], "image": []},
            "a part of the type 'audio'",
        ),
        ({"prompt": "a <|image_pad|> b", "image": []}, "has 0 images, but 1 placeholders"),
    ],
)
def test_a_row_whose_images_cannot_be_used_is_named_in_one_sentence(
    folder: Path, rules: ImageRules, row: dict[str, Any], sentence: str
) -> None:
    picture(200, 200).save(folder / "pictures" / "large.png")
    with pytest.raises(UserError, match=sentence) as caught:
        load(folder, rules, row, image_key="image")
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_too_long_is_dropped_whole_and_never_cut_inside_an_image(
    folder: Path, rules: ImageRules
) -> None:
    # Truncation cut an image: https://github.com/microsoft/agent-lightning/issues/441
    rows = [{"prompt": "a", "image": "pictures/98.png"}, {"prompt": "a", "image": "pictures/30.png"}]
    length = len(load(folder, rules, *rows, image_key="image")[0].token_ids)
    data = load(folder, rules, *rows, image_key="image", max_prompt_tokens=length - 1)
    assert data.dropped == 1 and [prompt.id for prompt in data] == [1]


def test_messages_without_images_pass_through_unchanged() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
    ]
    assert split_images(messages) == (messages, [])


def test_a_reward_gets_the_pictures_by_name_and_completions_have_small_copies(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(
        "def seen(completion, *, images):\n    return sum(i.width for i in images)\n"
    )
    [reward] = bind_rewards([(f"{tmp_path / 'seen.py'}:seen", {})])
    offered = {"images": images((98, 70), (30, 200))}
    assert reward("", {name: offered.get(name) for name in OFFERED}) == 128
    small_copy = Image.read(thumbnail(offered["images"][1]))
    assert small_copy.size == (10, 64)


def test_a_checkpoint_has_the_images_of_carried_answers_once(tmp_path: Path) -> None:
    [seen] = images((98, 70))
    done = {
        n: [Trajectory(0, n, [3, 1], [5], [1], [-1.0], images=(seen,), image_spans=((0, 1),))]
        for n in range(4)
    }
    data = packed([Round(groups=[CarriedGroup(4, 2, done=done)])])
    assert data.count(seen.data) == 1
    (tmp_path / "carried_0.msgpack").write_bytes(data)
    [group] = read_groups(tmp_path)
    assert group == CarriedGroup(4, 2, done=done)
    assert [t.images[0].data for trajectories in group.done.values() for t in trajectories] == [
        seen.data
    ] * 4


def test_a_tool_may_reply_with_pictures_whose_words_are_cut_as_others(rules: ImageRules) -> None:
    def look(place: str) -> Any:
        """Look.

        Args:
            place: where.
        """
        return ["x" * 50, picture(56, 56)]

    tokenizer = rules.processor.tokenizer
    tools = tools_by_name([make_tool(look)])
    call = parse_hermes('<tool_call>{"name": "look", "arguments": {"place": "a"}}</tool_call>')
    replies = asyncio.run(
        ToolRunner(ToolLimits(max_tokens=8, images=True), tokenizer).run(tools, call, {})
    )
    [[text, image]] = replies
    assert text["text"].startswith("x" * 8 + " [cut") and image["image"].size == (56, 56)
    [plain] = asyncio.run(ToolRunner(ToolLimits(max_tokens=100), tokenizer).run(tools, call, {}))
    assert isinstance(plain, str)


def warm_start(
    folder: Path, model: Path, *rows: dict[str, Any], **data: Any
) -> tuple[TrainConfig, Transcripts]:
    write_rows(folder / "warm.jsonl", rows)
    data = {"path": str(folder / "warm.jsonl"), "max_images": 3, "image_key": "seen"} | data
    sft = {"completion_key": "completion", "max_tokens": 60}
    config = make_config(model={"path": str(model)}, data=data, sft=sft)
    return config, load_transcripts(config, AutoTokenizer.from_pretrained(model))


def test_a_warm_start_has_the_images_of_its_rows_where_rollouts_have_them(
    folder: Path, rules: ImageRules, tiny_vlm: Callable[..., Path], one_rank: None
) -> None:
    paths = [f"pictures/{width}.png" for width, _ in SIZES]
    image_turn = {
        "role": "user",
        "content": [{"type": "image", "image": paths[2]}, {"type": "text", "text": "this?"}],
    }
    reply = {"role": "assistant", "content": "a star"}
    # What comes after the last answer is not trained, its image neither.
    talk = [{"role": "user", "content": "what?"}, reply, image_turn, reply, image_turn]
    rows = [
        {"prompt": "what?", "seen": paths[:2], "completion": "a <circle>"},
        {"messages": talk, "seen": []},
    ]
    config, data = warm_start(folder, tiny_vlm(), *rows)
    first, second = data.samples
    [prompt] = load(folder, rules, {"prompt": "what?", "seen": paths[:2]}, image_key="seen")
    tokenizer, length = rules.processor.tokenizer, len(prompt.token_ids)
    assert first.input_ids[:length] == list(prompt.token_ids) and first.image_spans == prompt.image_spans
    assert tokenizer.decode(first.input_ids[length:]) == "a <circle><|im_end|>"
    assert first.loss_mask == [0] * length + [1] * (len(first.input_ids) - length)
    plain = [
        {"role": "user", "content": "what?"},
        reply,
        {**image_turn, "content": [{"type": "image"}, image_turn["content"][1]]},
    ]
    pictures = [Image.read(folder / path) for path in paths]
    expected, spans = rules.processor.expand([*plain, reply], pictures[2:], add_generation_prompt=False)
    assert second.input_ids == expected[: len(second.input_ids)] and second.image_spans == spans
    learned = [token for token, mine in zip(second.input_ids, second.loss_mask, strict=True) if mine]
    assert tokenizer.decode(learned) == "a star<|im_end|>" * 2
    assert first.images == second.images == ()  # read when they are trained
    batcher = make_batcher(config)
    batches = batches_of(data.samples, batcher)
    places = [(place.image.digest, place.length) for batch in batches for place in batch.images]
    assert sorted(places) == sorted(
        (image.digest, rules.processor.tokens(image.size)) for image in pictures
    )
    picture(31, 31).save(folder / paths[0])
    with pytest.raises(
        (UserError, RemoteError), match="image 1 of row 0 of .* has changed since the data were read"
    ):
        batches_of(data.samples, batcher)
    assert warm_start(folder, tiny_vlm(), *rows)[1].fingerprint() != data.fingerprint()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "what?", "seen": ["pictures/98.png"] * 4, "completion": "a"},
            "row 0 of .* has 4 images, more",
        ),
        (
            {"prompt": "<|image_pad|>", "seen": [], "completion": "a"},
            "row 0 of .* has 0 images, but 1 placeholders",
        ),
        (
            {"prompt": "what?", "seen": ["no.png"], "completion": "a"},
            r"row 0 of .* has an image \(1\) that cannot be",
        ),
    ],
)
def test_rows_of_a_warm_start_are_refused_as_those_of_training(
    folder: Path, tiny_vlm: Callable[..., Path], row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        warm_start(folder, tiny_vlm(), row)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.image_key": "image"}, "data.image_key is set, but data.max_images is 0"),
        ({"data.max_images": 1}, "takes no images"),
        (
            {"data.max_images": 1, "engine.extra": {"mm_processor_kwargs": {}}},
            "engine.extra has mm_processor_kwargs",
        ),
    ],
)
def test_keys_about_images_that_do_not_fit_are_told_before_anything_is_loaded(
    tiny_qwen2: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    recipe = {"model": {"path": str(tiny_qwen2)}, "data": {"path": str(tmp_path / "rows.jsonl")}}
    recipe |= {"run": {"output_dir": str(tmp_path)}, "reward": {"functions": ["exact_match"]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    problems = find_problems(load_config(tmp_path / "recipe.yaml", overrides), "train", {})
    assert any(sentence in problem for problem in problems)


def test_small_copies_of_what_was_seen_stay_whole_in_completions(tmp_path: Path) -> None:
    copies = [thumbnail(image) for image in images((98, 70))]
    assert len(copies[0]) > 4000  # longer than a text may be
    tracker = make_tracker(tmp_path, {}, "run", TrackingConfig(wandb="disabled"))
    tracker.completions(1, [{"text": "x" * 5000, "images": copies}])
    tracker.log(1, {})
    tracker.close()
    [row] = read_rows(tmp_path / "completions.jsonl")
    assert row["images"] == copies and "characters)" in row["text"]
