"""The tokens of a transcript that are learned: those of the assistant, its end included, and no others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.recipes import make_config
from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.sft import cross_entropy
from trainer.sft_rows import load_transcripts
from trainer.types import Outputs, Sample

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}</s>{% endfor %}"


def load(
    tmp_path: Path, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **data: Any
) -> list[tuple[str, str]]:
    """Return, for each sample, its whole text and the text of the tokens that are learned."""
    file = tmp_path / "rows.jsonl"
    write_rows(file, rows)
    config = make_config(
        model={"path": "x"},
        data={"path": str(file)} | data,
        sft={"completion_key": "completion", "max_tokens": 8},
    )
    samples = load_transcripts(config, tokenizer).samples
    learned = [[i for i, m in zip(s.input_ids, s.loss_mask, strict=True) if m] for s in samples]
    return [
        (tokenizer.decode(s.input_ids), tokenizer.decode(ids))
        for s, ids in zip(samples, learned, strict=True)
    ]


def test_prompt_and_completion_with_a_template(tmp_path: Path) -> None:
    got = load(
        tmp_path, [{"prompt": "1+1=", "completion": "2"}], small_tokenizer(CHAT), system_prompt="add"
    )
    assert got == [("<system>add</s>\n<user>1+1=</s>\n<assistant>2</s>", "2</s>")]


def test_prompt_and_completion_without_a_template(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}]
    for tokenizer, data in [
        (small_tokenizer(None), {}),
        (small_tokenizer(CHAT), {"apply_chat_template": False}),
    ]:
        assert load(tmp_path, rows, tokenizer, **data) == [("1+1=2</s>", "2</s>")]


def test_a_template_without_an_end_gets_one(tmp_path: Path) -> None:
    got = load(tmp_path, [{"prompt": "a", "completion": "b"}], small_tokenizer())
    assert got == [("<user>a<assistant>b</s>", "b</s>")]


def test_a_warm_start_trains_on_every_assistant_turn_and_nothing_else(tmp_path: Path) -> None:
    """Learned tokens are chosen by position: the user's text is not learned even where it equals the assistant's."""
    turns = [("user", "x"), ("assistant", "x"), ("user", "y"), ("assistant", "z"), ("user", "thanks")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    got = load(tmp_path, rows, small_tokenizer(CHAT))
    assert got == [("<user>x</s>\n<assistant>x</s>\n<user>y</s>\n<assistant>z</s>", "x</s>z</s>")]


def test_prompts_have_the_ids_they_have_in_a_rollout(tmp_path: Path) -> None:
    """No token spans the border between prompt and completion."""
    tokenizer = small_tokenizer(CHAT)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "ab", "completion": "cd"}))
    config = make_config(
        model={"path": "x"}, data={"path": str(file)}, sft={"completion_key": "completion"}
    )
    (sample,) = load_transcripts(config, tokenizer).samples
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, return_dict=False
    )
    assert sample.input_ids[: len(prompt)] == prompt
    assert sample.loss_mask == [0] * len(prompt) + [1] * (len(sample.input_ids) - len(prompt))


def test_long_rows_are_dropped_by_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c" * n} for n in (3, 60)]
    assert len(load(tmp_path, rows, small_tokenizer(None), max_prompt_tokens=4)) == 1


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (
            [{"prompt": "a", "completion": "b"}, {"completion": "b"}],
            CHAT,
            "row 1 .* has neither 'prompt' nor 'messages'",
        ),
        ([{"prompt": "a"}], CHAT, "row 0 .* no completion in 'completion'"),
        ([{"messages": [{"role": "user", "content": "a"}]}], None, "need a chat template"),
        (
            [{"messages": [{"role": "user", "content": "a"}]}],
            CHAT,
            "every row .* has over .* tokens or no assistant turn",
        ),
        (
            [{"prompt": "a", "completion": "b" * 2000}],
            CHAT,
            "every row .* has over .* tokens or no assistant turn",
        ),
        (
            [
                {
                    "messages": [
                        {"role": r, "content": "long"}
                        for r in ("user", "assistant", "user", "assistant")
                    ]
                }
            ],
            FORGETFUL,
            "changes the text before",
        ),
    ],
)
def test_bad_rows_are_one_sentence(
    tmp_path: Path, rows: list[dict[str, Any]], template: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, rows, small_tokenizer(template))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_masked_values_that_are_not_finite_are_not_learned(value: float) -> None:
    (batch,) = micro_batches([Sample([5, 6, 7, 8], [0, 1, 0, 1], [0.0] * 4)], 10, 0, "cpu", count=1)
    logprobs = torch.tensor([[-1.0, value, -3.0]], requires_grad=True)
    loss, _ = cross_entropy(2)(batch, Outputs(logprobs, torch.zeros(1, 3)))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == 2.0 and gradient.tolist() == [[-0.5, 0.0, -0.5]]
