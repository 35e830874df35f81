"""What the model is shown of a row, in every form that people keep rows: for training, evaluation and a warm start."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.chat_templates import TEMPLATES
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.schema import DataConfig, HeldOutConfig, TrainConfig
from trainer.data import load_held_out, load_prompts, load_rows
from trainer.errors import UserError
from trainer.sft_rows import load_transcripts

QWEN3 = small_tokenizer(TEMPLATES["qwen3"])
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "weather in Bern?"}
REPLY = {"role": "tool", "content": "sunny"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}},
}

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def each_file_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, evaluation and warm start get the same rows, whose preparation takes most of a test's time."""
    prepared: dict[Any, datasets.Dataset] = {}

    def load(
        path: str, subset: str | None, split: str, size: int | None = None, **more: Any
    ) -> datasets.Dataset:
        key = (path, split, Path(path).stat().st_mtime_ns)
        if key not in prepared:
            prepared[key] = load_rows(path, subset, split, size, **more)
        return prepared[key]

    for module in ("trainer.data.prompts", "trainer.sft_rows"):
        monkeypatch.setattr(f"{module}.load_rows", load)


def asks(arguments: Any, name: str = "weather") -> Row:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def write(folder: Path, kind: str, rows: list[Row]) -> str:
    file = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(file)


def recipe(path: str, **data: Any) -> TrainConfig:
    sections = {"model": {"path": "x"}, "sft": {"completion_key": "completion"}}
    return TrainConfig.model_validate(sections | {"data": {"path": path, "answer_key": None} | data})


def shown(path: str, use: str, tokenizer: Any = QWEN3, **data: Any) -> list[list[int]]:
    """Return the ids of the rows' prompts: those of a warm start up to the first token that is learned."""
    config = recipe(path, **data)
    if use == "sft":
        samples = load_transcripts(config, tokenizer).samples
        return [sample.input_ids[: sample.loss_mask.index(1)] for sample in samples]
    if use == "eval":
        elsewhere = config.data.model_copy(update={"path": "elsewhere"})
        return [
            list(prompt.token_ids)
            for prompt in load_held_out(HeldOutConfig(path=path), elsewhere, tokenizer)
        ]
    return [list(prompt.token_ids) for prompt in load_prompts(config.data, tokenizer)]


def rendered(messages: list[Row], tools: list[Row] | None = None, tokenizer: Any = QWEN3) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


# For each form: the rows as people keep them, and what is meant, as messages and tools.
FORMS: dict[str, tuple[list[Row], list[tuple[list[Row], list[Row] | None]]]] = {
    "messages as JSON text": (
        [{"messages": json.dumps([SYSTEM, USER])}, {"messages": json.dumps([USER])}],
        [([SYSTEM, USER], None), ([USER], None)],
    ),
    "a prompt as JSON text": ([{"prompt": json.dumps([SYSTEM, USER])}], [([SYSTEM, USER], None)]),
    "text that begins like JSON": (
        [{"prompt": "[1, 2] + [3]"}, {"prompt": '[{"a": 1}]'}],
        [([{"role": "user", "content": text}], None) for text in ("[1, 2] + [3]", '[{"a": 1}]')],
    ),
    "arguments as JSON text": (
        [{"prompt": [USER, asks('{"city": "Bern"}'), REPLY]}],
        [([USER, asks({"city": "Bern"}), REPLY], None)],
    ),
    "arguments with different keys": (
        [
            {"prompt": [USER, asks({"city": "Bern"}), REPLY]},
            {"prompt": [USER, asks({"a": 1, "b": {"c": 2}}), REPLY]},
        ],
        [
            ([USER, asks({"city": "Bern"}), REPLY], None),
            ([USER, asks({"a": 1, "b": {"c": 2}}), REPLY], None),
        ],
    ),
    "arguments that are dates": (
        [{"prompt": [USER, asks({"day": "2024-05-01"}), REPLY]}],
        [([USER, asks({"day": "2024-05-01"}), REPLY], None)],
    ),
    "text parts": (
        [
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "12 "}, {"type": "text", "text": "+ 30"}],
                    }
                ]
            }
        ],
        [([{"role": "user", "content": "12 + 30"}], None)],
    ),
    "roles in capitals": (
        [{"messages": [SYSTEM | {"role": "System"}, USER | {"role": "USER"}]}],
        [([SYSTEM, USER], None)],
    ),
    "text under another key": (
        [{"messages": [{"role": "user", "text": "12"}]}],
        [([USER | {"content": "12"}], None)],
    ),
    "no content beside a call": (
        [{"prompt": [USER, asks({"city": "Bern"}) | {"content": None}, REPLY]}],
        [([USER, asks({"city": "Bern"}), REPLY], None)],
    ),
    "a column of tools": (
        [
            {"prompt": [USER], "tools": [TOOL]},
            {"prompt": [USER], "tools": [ADD]},
            {"prompt": [USER], "tools": None},
        ],
        [([USER], [TOOL]), ([USER], [ADD]), ([USER], None)],
    ),
    "tools as JSON text": (
        [{"prompt": [USER], "tools": json.dumps([TOOL, ADD])}],
        [([USER], [TOOL, ADD])],
    ),
    "each tool as JSON text": ([{"prompt": [USER], "tools": [json.dumps(TOOL)]}], [([USER], [TOOL])]),
    "tools without their type": ([{"prompt": [USER], "tools": [TOOL["function"]]}], [([USER], [TOOL])]),
    # The files of other projects, in the form that their documentation prints.
    "TRL, language modelling": ([{"messages": [USER]}], [([USER], None)]),
    "TRL, prompt and completion in text": (
        [{"prompt": "The sky is"}],
        [([USER | {"content": "The sky is"}], None)],
    ),
    "TRL, tool calling": ([{"messages": [USER], "tools": json.dumps([ADD])}], [([USER], [ADD])]),
    "verl": (
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": "6 * 7"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "42"},
                "extra_info": {"split": "train", "index": 0},
            }
        ],
        [([USER | {"content": "6 * 7"}], None)],
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_each_form_are_shown_as_they_are_meant(tmp_path: Path, form: str, kind: str) -> None:
    rows, meant = FORMS[form]
    path = write(tmp_path, kind, [row | {"completion": "42"} for row in rows])
    expected = [rendered(messages, tools) for messages, tools in meant]
    assert {use: shown(path, use) for use in ("train", "eval", "sft")} == dict.fromkeys(
        ("train", "eval", "sft"), expected
    )


@pytest.mark.parametrize(
    ("prompt_key", "row"),
    [
        ("input", {"input": "6 * 7", "label": "42"}),
        ("context_messages", {"context_messages": [{"role": "user", "content": "6 * 7"}], "id": "1"}),
    ],
)
def test_files_of_openrlhf_are_read_with_their_column_named(
    tmp_path: Path, prompt_key: str, row: Row
) -> None:
    path = write(tmp_path, "jsonl", [row | {"output": "42"}])
    assert shown(path, "train", prompt_key=prompt_key) == [rendered([USER | {"content": "6 * 7"}])]


def test_nulls_of_a_jsonl_row_stay_and_those_of_arrow_go(tmp_path: Path) -> None:
    """In parquet, both are the same."""
    given = {"city": "Bern", "unit": None, "days": [None, {"n": None}]}
    others = {"city": "Bonn", "unit": "C", "days": [{"n": 1}]}
    rows = [{"prompt": [USER, asks(arguments), REPLY]} for arguments in (given, others)]
    path = write(tmp_path, "jsonl", rows)
    assert shown(path, "train") == [rendered(row["prompt"]) for row in rows]
    path = write(tmp_path, "parquet", rows)
    less = {"city": "Bern", "days": [None, {}]}
    assert shown(path, "train") == [
        rendered([USER, asks(arguments), REPLY]) for arguments in (less, others)
    ]


def test_texts_that_are_json_stay_texts_beside_contents_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "in parts"}]
    texts = ["42", '"quoted"', "{}", "[1]", "null"]
    path = write(
        tmp_path, "jsonl", [{"prompt": [{"role": "user", "content": text}]} for text in [parts, *texts]]
    )
    expected = [rendered([{"role": "user", "content": text}]) for text in ["in parts", *texts]]
    assert shown(path, "train") == expected


def test_a_date_is_the_text_that_the_file_has(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"prompt": "2024-05-01", "answer": "2024-05-02"}])
    [prompt] = load_prompts(DataConfig(path=path), QWEN3)
    assert (prompt.row["prompt"], prompt.row["answer"]) == ("2024-05-01", "2024-05-02")


def test_an_answer_in_a_column_of_objects_with_different_keys_is_found(tmp_path: Path) -> None:
    judged = [{"ground_truth": "1"}, {"ground_truth": "2", "style": "rule"}]
    path = write(tmp_path, "jsonl", [{"prompt": "a", "reward_model": value} for value in judged])
    config = DataConfig(path=path, answer_key="reward_model.ground_truth")
    assert [prompt.row["answer"] for prompt in load_prompts(config, QWEN3)] == ["1", "2"]


REFUSED: dict[str, tuple[Row, str]] = {
    "null content": (
        {"prompt": [USER, {"role": "user", "content": None}]},
        r"message \(2\) without content",
    ),
    "unknown key": (
        {"prompt": [{"role": "user", "body": "a"}]},
        "without content; it has only role, body",
    ),
    "an object": (
        {"prompt": [{"role": "user", "content": {"q": "a"}}]},
        r"message \(1\) with a part without text",
    ),
    "arguments": (
        {"prompt": [USER, asks("{city}"), REPLY]},
        r"message \(2\) with a call whose arguments are not a JSON",
    ),
    "Python's text": (
        {"prompt": str([USER])},
        "list of messages, which is not JSON: write it with json.dumps",
    ),
    "ShareGPT": (
        {"messages": [{"from": "human", "value": "a"}]},
        "neither a string nor a list of messages",
    ),
    "other roles": ({"messages": [{"role": "human", "content": "a"}]}, "role 'human': call it 'user'"),
    "tools": ({"prompt": [USER], "tools": "hammer"}, "has tools that are text, but not JSON: hammer"),
    "names of tools": (
        {"prompt": [USER], "tools": ["saw"]},
        "names the tool 'saw', but the recipe has none",
    ),
    "an image": ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", REFUSED)
def test_rows_that_are_not_certain_are_refused_by_file_and_row(
    tmp_path: Path, form: str, kind: str
) -> None:
    row, sentence = REFUSED[form]
    path = write(tmp_path, kind, [row | {"completion": "42"}] * 2)
    for use in ("train", "eval", "sft"):
        with pytest.raises(UserError, match=f"row 0 of {re.escape(path)} .*{sentence}") as caught:
            shown(path, use)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_prompt_that_ends_with_the_answer_is_refused_or_continued(tmp_path: Path, key: str) -> None:
    answered = [USER, {"role": "assistant", "content": "It is "}]
    path = write(tmp_path, "jsonl", [{key: answered}, {key: [USER]}])
    for use in ("train", "eval"):
        with pytest.raises(
            UserError,
            match=r"row 0 of .* ends with an assistant's turn.*drop.*data.continue_final: true",
        ):
            shown(path, use)
        continued, asked = shown(path, use, continue_final=True)
        text = QWEN3.decode(rendered([USER])) + "It is "
        assert continued == QWEN3(text, add_special_tokens=False)["input_ids"]
        assert asked == rendered([USER])
    called = write(tmp_path, "jsonl", [{key: [USER, asks({})]}])
    with pytest.raises(UserError, match="ends with a tool call, which cannot be continued"):
        shown(called, "train", continue_final=True)


def test_a_system_message_alone_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"messages": [SYSTEM]}])
    for use in ("train", "eval"):
        with pytest.raises(UserError, match="row 0 of .* holds a system message alone"):
            shown(path, use)


def test_a_row_may_name_some_of_the_recipes_tools(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"prompt": [USER], "tools": tools} for tools in ([ADD], ["weather", "add"], [], None, ["saw"])
    ]
    described = {"chat_template_kwargs": {"tools": [TOOL, ADD]}}
    path = write(tmp_path, "jsonl", rows[:-1])
    expected = [rendered([USER], tools) for tools in ([ADD], [TOOL, ADD], None, [TOOL, ADD])]
    assert shown(path, "train", **described) == expected
    path = write(tmp_path, "jsonl", rows)
    with pytest.raises(
        UserError, match="row 4 of .* names the tool 'saw', but those of the recipe are weather, add"
    ):
        shown(path, "train", **described)


def test_tools_that_the_template_does_not_describe_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"prompt": "a", "tools": [TOOL]}])
    gemma = small_tokenizer(TEMPLATES["gemma3"])
    with pytest.raises(
        UserError,
        match="has tools, which the chat template does not describe: set data.tools_key to null",
    ):
        shown(path, "train", gemma)
    assert shown(path, "train", gemma, tools_key=None) == [
        rendered([{"role": "user", "content": "a"}], None, gemma)
    ]


def test_text_that_begins_with_the_bos_has_one_and_templated_text_is_named(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = small_tokenizer(TEMPLATES["llama"])
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    path = write(tmp_path, "jsonl", [{"prompt": "<s>12 + 30", "completion": "42"}])
    expected = [[bos, *tokenizer("12 + 30", add_special_tokens=False)["input_ids"]]]
    for use in ("train", "eval", "sft"):
        assert shown(path, use, tokenizer, apply_chat_template=False) == expected
        with pytest.raises(
            UserError, match=r"row 0 .* templated already \(<s>\): set data.apply_chat_template to false"
        ):
            shown(path, use, tokenizer)


def test_a_warm_start_learns_completions_in_messages_and_nothing_twice(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "42"}
    asked = {"role": "user", "content": "and now?"}
    chat = [USER, {"role": "assistant", "content": "no"}, asked]
    cases: list[tuple[Row, list[str]]] = [
        ({"prompt": [USER], "completion": [answer]}, ["42"]),
        ({"prompt": [USER], "completion": json.dumps([answer])}, ["42"]),
        ({"prompt": "a", "completion": answer}, ["42"]),
        ({"prompt": "a", "completion": 42}, ["42"]),
        ({"prompt": [USER], "completion": [asks({"city": "Bern"}), REPLY, answer]}, ["weather", "42"]),
        ({"prompt": chat, "completion": "42"}, ["42"]),  # the prompt's own turns are not learned
        ({"messages": [USER, answer], "completion": "other"}, ["42"]),
        ({"messages": [*chat, answer]}, ["no", "42"]),
    ]
    for row, learned in cases:
        path = write(tmp_path, "jsonl", [row])
        [sample] = load_transcripts(recipe(path), QWEN3).samples
        text = QWEN3.decode(
            [i for i, mask in zip(sample.input_ids, sample.loss_mask, strict=True) if mask]
        )
        turns = text.split("<|im_end|>")[:-1]
        assert len(turns) == len(learned) and all(
            word in turn for word, turn in zip(learned, turns, strict=True)
        ), row
        assert QWEN3.decode(sample.input_ids).count("<|im_start|>assistant") == len(learned) + (
            row.get("prompt") == chat
        )


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": [USER, {"role": "assistant", "content": "41"}], "completion": "42"},
            "has a completion besides",
        ),
        (
            {"prompt": "a", "completion": {"text": "42"}},
            "has a completion that is dict: it must be text, or a list",
        ),
        ({"prompt": "a", "completion": True}, "has a completion that is bool"),
        ({"prompt": "a", "completion": None}, "no completion in 'completion'"),
    ],
)
def test_completions_that_are_not_certain_are_refused(tmp_path: Path, row: Row, sentence: str) -> None:
    path = write(tmp_path, "jsonl", [row])
    with pytest.raises(UserError, match=f"row 0 of .* {sentence}"):
        load_transcripts(recipe(path), QWEN3)


@pytest.mark.parametrize("explicit", [True, False])
def test_files_of_preferences_are_refused_by_name(tmp_path: Path, explicit: bool) -> None:
    row = {"chosen": [USER], "rejected": [USER]} | ({"prompt": "a"} if explicit else {})
    path = write(tmp_path, "jsonl", [row])
    for use in ("sft",) if explicit else ("train", "eval", "sft"):
        with pytest.raises(
            UserError, match=r"is a file of preferences \(chosen, rejected\), but has no column"
        ):
            shown(path, use)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "folder/rows.jsonl"])
def test_a_file_that_is_not_utf_8_is_named_with_line_and_byte(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b'{"prompt": "tea"}\n' + '{"prompt": "café"}\n'.encode("latin-1"))
    source = file.parent if "folder" in name else file
    for use in ("train", "eval", "sft"):
        with pytest.raises(
            UserError,
            match=rf"{re.escape(str(file))}: line 2 is not UTF-8 at its byte 16 \(0xe9\): save",
        ):
            shown(str(source), use)


def test_text_in_parquet_that_is_not_utf_8_is_named_by_row(tmp_path: Path) -> None:
    broken = pyarrow.array([b"tea", "café".encode("latin-1")], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": broken}), tmp_path / "rows.parquet")
    with pytest.raises(
        UserError, match="row 1 of .*rows.parquet has a text that is not UTF-8: its byte 0xe9"
    ):
        shown(str(tmp_path / "rows.parquet"), "train")


def test_folders_of_save_to_disk_are_read_with_their_splits(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "completion": ["1", "2", "3"]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(str(tmp_path / "two"))
    expected = [rendered([{"role": "user", "content": letter}]) for letter in "abc"]
    for use in ("train", "sft"):
        assert shown(str(tmp_path / "one"), use) == expected
        assert shown(str(tmp_path / "two"), use) == expected
        assert shown(str(tmp_path / "two"), use, split="test") == expected[2:]
        assert shown(str(tmp_path / "one"), use, split="train[1:]") == expected[1:]
    with pytest.raises(UserError, match=r"two \(split valid\) cannot be read: .*valid"):
        load_rows(str(tmp_path / "two"), None, "valid")
