"""Prompts: the rows that are read, those that are dropped, and an order that needs no memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recipes import make_config
from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.schema import DataConfig
from trainer.data import Prompt, PromptDataset, epoch_order, load_held_out, load_prompts, load_rows
from trainer.errors import UserError
from trainer.rewards import bind_rewards


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, *rows: dict) -> str:
    write_rows(path, rows)
    return str(path)


def numbered(count: int, salt: str = "") -> PromptDataset:
    return PromptDataset(
        [Prompt(index, (index,), {"answer": f"{index}{salt}"}) for index in range(count)]
    )


def texts(dataset: PromptDataset) -> list[str]:
    tokenizer = small_tokenizer()
    return [tokenizer.decode(list(dataset[index].token_ids)) for index in range(len(dataset))]


def held_out(data: DataConfig, **named: dict[str, Any]) -> dict[str, PromptDataset]:
    """Return the held-out datasets of a recipe with this data section and these entries of eval.datasets."""
    config = make_config(data=data, eval={"datasets": named})
    return {
        name: load_held_out(dataset, data, small_tokenizer())
        for name, dataset in config.eval.datasets.items()
    }


@pytest.mark.parametrize(("length", "size"), [(10, 4), (7, 7), (5, 12), (1, 3)])
def test_a_stop_at_any_step_changes_nothing(length: int, size: int) -> None:
    steps = 3 * length // size + 1
    dataset = numbered(length)
    uninterrupted = [
        prompt.id for step in range(steps) for prompt in dataset.take(step * size, size, seed=3)
    ]
    for stop in range(steps):
        epoch_order.cache_clear()
        resumed = numbered(length)  # another process would read the data anew
        ids = [prompt.id for step in range(stop) for prompt in dataset.take(step * size, size, seed=3)]
        ids += [
            prompt.id
            for step in range(stop, steps)
            for prompt in resumed.take(step * size, size, seed=3)
        ]
        assert ids == uninterrupted


@given(length=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 2**63))
def test_each_epoch_shows_each_prompt_once(length: int, size: int, seed: int) -> None:
    dataset = numbered(length)
    steps = -(-3 * length // size)
    ids = [prompt.id for step in range(steps) for prompt in dataset.take(step * size, size, seed)]
    for epoch in range(3):
        assert Counter(ids[epoch * length : (epoch + 1) * length]) == Counter(range(length))


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    orders = {epoch_order(seed, epoch, 100) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    # Written down, so that an upgrade of NumPy which changes the order of running experiments is seen.
    assert epoch_order(0, 0, 8) == (3, 7, 6, 2, 0, 5, 4, 1)


def test_order_is_uniform_enough() -> None:
    firsts = Counter(epoch_order(seed, 0, 4)[0] for seed in range(4000))
    assert all(850 < firsts[index] < 1150 for index in range(4)), firsts


def test_changed_data_have_another_fingerprint() -> None:
    prompts = [Prompt(index, (index, 7), {"answer": str(index)}) for index in range(5)]
    same = PromptDataset(prompts).fingerprint
    assert PromptDataset(list(prompts), dropped=3).fingerprint == same
    changed = [
        prompts[:-1],
        prompts[::-1],
        [*prompts[:-1], Prompt(4, (4, 8), {"answer": "4"})],
        [*prompts[:-1], Prompt(4, (4, 7), {"answer": "5"})],
        [*prompts[:-1], Prompt(5, (4, 7), {"answer": "4"})],
    ]
    fingerprints = {PromptDataset(other).fingerprint for other in changed}
    assert len(fingerprints) == len(changed)
    assert same not in fingerprints


def test_a_prompt_string_becomes_a_user_message_and_the_row_is_passed_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "result": 2, "level": "easy"})
    dataset = load_prompts(
        DataConfig(path=path, answer_key="result", system_prompt="Add."), small_tokenizer()
    )
    assert texts(dataset) == ["<system>Add.<user>1+1=<assistant>"]
    assert dataset[0].row == {"prompt": "1+1=", "result": 2, "level": "easy", "answer": 2}


def test_messages_keep_their_system_prompt_and_get_no_keys_they_did_not_have(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Own."},
                {"role": "user", "content": "Hi", "name": "Ada"},
            ]
        },
        {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}] * 2},
    ]
    rows[1]["messages"].pop()
    path = write(tmp_path / "a.jsonl", *rows)
    config = DataConfig(
        path=path, answer_key=None, system_prompt="Mine.", chat_template_kwargs={"thinking": True}
    )
    assert texts(load_prompts(config, small_tokenizer())) == [
        "<system>Own.<user>Hi(Ada)<assistant><think>",
        "<system>Mine.<user>A<assistant>B<user>A<assistant><think>",
    ]


def test_messages_may_be_in_the_prompt_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "A"}], "answer": 1})
    assert texts(load_prompts(DataConfig(path=path), small_tokenizer())) == ["<user>A<assistant>"]


@pytest.mark.parametrize("switched_off", [True, False])
def test_a_prompt_is_tokenised_as_it_stands_without_a_chat_template(
    tmp_path: Path, switched_off: bool
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2"})
    tokenizer = small_tokenizer() if switched_off else small_tokenizer(chat_template=None)
    config = DataConfig(path=path, apply_chat_template=not switched_off)
    assert texts(load_prompts(config, tokenizer)) == ["1+1="]


def test_long_prompts_are_dropped_by_tokens_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "é" * 5, "answer": 0},
        {"prompt": "e" * 8, "answer": 1},
        {"prompt": "e" * 11, "answer": 2},
    ]
    config = DataConfig(
        path=write(tmp_path / "a.jsonl", *rows), apply_chat_template=False, max_prompt_tokens=9
    )
    dataset = load_prompts(config, small_tokenizer())
    # Five characters of two bytes are ten tokens; eight of one byte are eight.
    assert (len(dataset), dataset.dropped, dataset[0].id) == (1, 2, 1)
    assert [prompt.id for prompt in dataset.take(0, 2, seed=0)] == [1, 1]
    assert (
        load_prompts(config.model_copy(update={"max_prompt_tokens": 10}), small_tokenizer()).dropped == 1
    )


def test_more_rows_than_are_tokenised_at_once_keep_their_ids(tmp_path: Path) -> None:
    rows = [{"prompt": str(index), "answer": index} for index in range(2500)]
    config = DataConfig(path=write(tmp_path / "a.jsonl", *rows), apply_chat_template=False)
    dataset = load_prompts(config, small_tokenizer())
    assert [prompt.row["answer"] for prompt in map(dataset.__getitem__, range(2500))] == list(
        range(2500)
    )
    assert texts(dataset) == [str(dataset[index].id) for index in range(2500)]


def test_parquet_and_folders_and_slices(tmp_path: Path) -> None:
    rows = {"prompt": ["a", "b", "c"], "answer": [1, 2, 3]}
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "train-0.parquet"))
    datasets.Dataset.from_dict({"prompt": ["d"], "answer": [4]}).to_parquet(
        str(folder / "test-0.parquet")
    )
    config = DataConfig(path=str(folder), apply_chat_template=False)
    assert texts(load_prompts(config, small_tokenizer())) == ["a", "b", "c"]
    test = {"path": str(folder), "split": "test"}
    assert {name: texts(dataset) for name, dataset in held_out(config, test=test).items()} == {
        "test": ["d"]
    }
    file = DataConfig(path=str(folder / "train-0.parquet"), split="train[1:]", apply_chat_template=False)
    assert texts(load_prompts(file, small_tokenizer())) == ["b", "c"]


def test_held_out_prompts_are_the_first_ones_and_may_be_absent(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"prompt": "t", "answer": 0})
    other = write(tmp_path / "eval.jsonl", *({"prompt": f"e{index}", "answer": 0} for index in range(5)))
    assert held_out(DataConfig(path=path)) == {}
    config = DataConfig(path=path, apply_chat_template=False)
    assert texts(held_out(config, other={"path": other, "size": 2})["other"]) == ["e0", "e1"]


def test_datasets_to_evaluate_on_may_have_columns_of_their_own(tmp_path: Path) -> None:
    config = DataConfig(
        path=write(tmp_path / "train.jsonl", {"prompt": "t", "answer": 0}), apply_chat_template=False
    )
    rows = (
        {"problem": f"p{index}", "prompt": "no", "solution": index, "answer": "no"} for index in range(3)
    )
    path = write(tmp_path / "maths.jsonl", *rows)
    maths = {"path": path, "size": 2, "prompt_key": "problem", "answer_key": "solution"}
    datasets = held_out(config, maths=maths, same={"path": config.path})
    assert texts(datasets["maths"]) == ["p0", "p1"] and texts(datasets["same"]) == ["t"]
    assert [(p.row["prompt"], p.row["answer"]) for p in datasets["maths"]] == [("p0", 0), ("p1", 1)]
    with pytest.raises(
        UserError, match=r"prompt_key = 'question' of eval.datasets is not a column: .* problem, prompt"
    ):
        held_out(config, maths=maths | {"prompt_key": "question"})


def test_an_answer_may_be_a_field_of_a_column(tmp_path: Path) -> None:
    """verl's recipes make such parquet files; a column whose name contains the dot comes first."""
    judged = [{"style": "rule", "ground_truth": "42"}, None, {"style": "rule", "ground_truth": None}]
    rows = {"prompt": ["a", "b", "c"], "reward_model": judged, "plain.answer": [1, 2, 3]}
    path = str(tmp_path / "train.parquet")
    datasets.Dataset.from_dict(rows).to_parquet(path)
    config = DataConfig(path=path, answer_key="reward_model.ground_truth", apply_chat_template=False)
    assert [prompt.row["answer"] for prompt in load_prompts(config, small_tokenizer())] == [
        "42",
        None,
        None,
    ]
    held = held_out(config, same={"path": path, "answer_key": "plain.answer"})["same"]
    assert [prompt.row["answer"] for prompt in held] == [1, 2, 3]
    for wrong in ("reward_model.truth", "reward_model.style.rule", "absent.ground_truth"):
        with pytest.raises(
            UserError, match=f"data.answer_key = '{wrong}' is not a column or a field of one"
        ):
            load_prompts(config.model_copy(update={"answer_key": wrong}), small_tokenizer())


@pytest.mark.parametrize(
    ("content", "settings", "reason"),
    [
        ("", {}, "holds no rows"),
        ('{"prompt": "a", "answer": 1}\n{"prompt', {}, "cannot be read.*JSON"),
        (
            '{"question": "a", "answer": 1}',
            {},
            "neither data.prompt_key.*only the columns question, answer",
        ),
        (
            '{"prompt": "a", "solution": 1}',
            {},
            "data.answer_key = 'answer'.*only the columns prompt, solution.*null",
        ),
        (
            '{"prompt": "a", "answer": 1}\n{"answer": 1}',
            {},
            "row 1 of .* has neither 'prompt' nor 'messages'",
        ),
        ('{"prompt": 5, "answer": 1}', {}, "row 0 .*neither a string nor a list of messages"),
        ('{"prompt": ["x"], "answer": 1}', {}, "row 0 .*neither a string nor a list of messages"),
        (
            '{"prompt": [{"role": "alien", "content": "x"}], "answer": 1}',
            {},
            "row 0 .*chat template: no role alien",
        ),
        (
            '{"prompt": [{"role": "user", "content": "x"}], "answer": 1}',
            {"apply_chat_template": False},
            "holds messages",
        ),
        (
            '{"prompt": "a", "answer": 1}',
            {"apply_chat_template": False, "system_prompt": "s"},
            "data.system_prompt",
        ),
        (
            '{"prompt": "aaaa", "answer": 1}',
            {"max_prompt_tokens": 3},
            "all 1 prompts.*data.max_prompt_tokens = 3",
        ),
        ('{"prompt": "a", "answer": 1}', {"split": "train[5:]"}, "corresponds to no data"),
    ],
)
def test_unusable_data_is_a_users_error(
    tmp_path: Path, content: str, settings: dict, reason: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=reason) as caught:
        load_prompts(DataConfig(path=str(path), **settings), small_tokenizer())
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/nowhere")
    with pytest.raises(
        UserError,
        match=r"data.jsonl: its rows are prepared in /proc/nowhere, but .*set HF_DATASETS_CACHE",
    ):
        load_rows(str(path), None, "train")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("prompt,answer\na,b\n")
    with pytest.raises(UserError, match="neither jsonl nor parquet"):
        load_prompts(DataConfig(path=str(path)), small_tokenizer())


def test_rows_of_reasoning_gym_are_made_as_the_path_says_and_judged_by_the_library() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    path = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=5&seed=7"
    rows = load_rows(path, None, "train")
    theirs = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=3, size=5, seed=7)
    assert [(row["prompt"], row["answer"]) for row in rows] == [
        (item["question"], item["answer"]) for item in theirs
    ]
    (judge,) = bind_rewards([("reasoning_gym", {})])
    for row, entry in zip(rows, theirs, strict=True):
        for text, answer in (
            (f" {row['answer']}\n", row["answer"]),
            (f"so <answer>{row['answer']}</answer>", row["answer"]),
            ("x", "x"),
        ):
            assert judge(text, {"row": dict(row)}) == theirs.score_answer(answer, entry)
    for bad in (
        "reasoning_gym:chain_sums",
        "reasoning_gym:chain_sum?sise=5",
        "reasoning_gym:chain_sum?min_terms=0",
    ):
        with pytest.raises(UserError, match="reasoning-gym makes no 'chain_sum"):
            load_rows(bad, None, "train")
