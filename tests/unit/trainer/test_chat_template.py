"""The tokens that end answers under templates of released models' kinds, and the keys that a template never reads."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert
from transformers import GenerationConfig, PreTrainedTokenizerFast

from generation.trajectory import Trajectory
from tests.support.recipes import make_config
from tests.support.small_tokenizer import small_tokenizer
from tests.support.turn_templates import (
    HARMONY,
    LLAMA3,
    MISTRAL,
    OLD_HARMONY,
    QWEN3,
    TEMPLATES,
    ChatTemplate,
)
from trainer.chat_template import EndTokens, end_tokens, unread_keys
from trainer.config.schema import DataConfig
from trainer.errors import UserError
from trainer.run.keeper import RunState
from trainer.start import settle_ends

BASE_EOS = "<|endoftext|>"


def names(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(list(ids)))


def found(template: ChatTemplate, eos: str | None = None, **data: Any) -> tuple[set[str], EndTokens]:
    """Return the tokens besides EOS that end answers, and all that is known of ends; the model has no files."""
    tokenizer = template.tokenizer(eos)
    ends = end_tokens("no/model", tokenizer, DataConfig(path="d", **data))
    assert ends.eos == (tokenizer.eos_token_id,)
    return names(tokenizer, ends.added), ends


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_end_of_a_turn_that_is_eos_needs_nothing(kind: str) -> None:
    template = TEMPLATES[kind]
    added, ends = found(template)
    assert added == {template.call_end} - {template.end, ""}
    assert len(ends.remarks) == len(added)


@pytest.mark.parametrize("kind", sorted(TEMPLATES.keys() - {"mistral"}))
def test_the_end_of_a_turn_that_is_not_eos_becomes_an_end(kind: str) -> None:
    template = TEMPLATES[kind]
    added, ends = found(template, eos=BASE_EOS)
    assert added == {template.end, template.call_end} - {""}
    assert f"answers end with {template.end} (" in ends.remarks[0] and BASE_EOS in ends.remarks[0]
    assert len(ends.remarks) == len(added)


def test_a_template_that_writes_the_eos_token_ends_with_whichever_it_is() -> None:
    assert found(MISTRAL, eos=BASE_EOS) == (set(), EndTokens(eos=(7,), of_turns=(7,)))


def test_an_end_that_the_template_writes_within_an_answer_is_not_added() -> None:
    added, ends = found(OLD_HARMONY, eos=BASE_EOS)
    assert added == {"<|call|>"}
    refused, accepted = ends.remarks
    assert refused.startswith(
        "answers do not end with <|end|> (2): the chat template ends an answer with it, and EOS is"
    )
    assert (
        "but within an answer after a thought it writes it, too; sampling.stop_token_ids names"
        in refused
    )
    assert accepted.startswith(
        "answers end with <|call|> (5), too: the chat template ends a tool call with it"
    )
    # <|end|> says nothing about an answer
    assert names(OLD_HARMONY.tokenizer(), ends.of_turns) == {"<|call|>"}


def test_a_call_that_comes_before_the_answer_keeps_its_end() -> None:
    text = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}<|im_end|>"
        "{% endfor %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    added, ends = found(ChatTemplate(text, QWEN3.marks, "", ""), eos=BASE_EOS)
    assert added == set() and "within a tool call after text it writes it, too" in ends.remarks[0]


def test_ends_of_generation_config_count_as_eos(tmp_path: Path) -> None:
    tokenizer = QWEN3.tokenizer(BASE_EOS)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, end]).save_pretrained(tmp_path)
    ends = end_tokens(str(tmp_path), tokenizer, DataConfig(path="d"))
    assert ends == EndTokens(eos=tuple(sorted([end, tokenizer.eos_token_id])), of_turns=(end,))


def test_arguments_of_the_template_decide_how_a_call_ends() -> None:
    assert found(LLAMA3, eos=BASE_EOS)[0] == {"<|eot_id|>"}
    assert found(LLAMA3, eos=BASE_EOS, chat_template_kwargs={"builtin_tools": ["x"]})[0] == {
        "<|eot_id|>",
        "<|eom_id|>",
    }


def test_prompts_without_a_template_end_with_eos_alone() -> None:
    assert found(QWEN3, eos=BASE_EOS, apply_chat_template=False)[0] == set()
    assert end_tokens("no/model", small_tokenizer(None)).ids == [2]


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # no token at all
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content | length }}<|im_end|>{% endfor %}",  # shows no answer
    ],
)
def test_a_template_that_shows_no_end_adds_none(text: str) -> None:
    assert found(ChatTemplate(text, QWEN3.marks, "", ""), eos=BASE_EOS) == (set(), EndTokens(eos=(2,)))


def test_a_template_that_always_opens_the_next_turn_ends_before_it() -> None:
    text = QWEN3.text.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    assert found(ChatTemplate(text, QWEN3.marks, "", "", QWEN3.words), eos=BASE_EOS)[0] == {"<|im_end|>"}


def test_an_end_that_is_an_ordinary_added_token_becomes_an_end() -> None:
    template = ChatTemplate(QWEN3.text, ("</s>", "<s>"), "", "", ("<|im_start|>", "<|im_end|>"))
    assert found(template)[0] == {"<|im_end|>"}


def test_several_named_templates_are_told_apart_by_tools() -> None:
    tokenizer = QWEN3.tokenizer(BASE_EOS)
    tokenizer.chat_template = {
        "default": QWEN3.text,
        "tool_use": QWEN3.text.replace("<|im_end|>", "<|im_start|>"),
    }
    tools = [{"type": "function", "function": {"name": "look"}}]
    plain, with_tools = DataConfig(path="d"), DataConfig(path="d", chat_template_kwargs={"tools": tools})
    assert names(tokenizer, end_tokens("no/model", tokenizer, plain).added) == {"<|im_end|>"}
    # It also begins turns
    assert names(tokenizer, end_tokens("no/model", tokenizer, with_tools).of_turns) == set()


def test_ends_chosen_by_hand_replace_those_of_the_template() -> None:
    tokenizer = QWEN3.tokenizer(BASE_EOS)
    data, end = DataConfig(path="d"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_tokens("no/model", tokenizer, data, []) == EndTokens(eos=(2,), of_turns=(end,))
    assert end_tokens("no/model", tokenizer, data, [9, 5, 2]) == EndTokens(
        eos=(2,), added=(5, 9), of_turns=(end,)
    )
    with pytest.raises(
        UserError, match=r"^sampling.stop_token_ids: 99999 is not one of the tokenizer's \d+ ids$"
    ):
        end_tokens("no/model", tokenizer, data, [99999])


def test_a_resumed_run_keeps_the_ends_of_its_checkpoint() -> None:
    tokenizer = QWEN3.tokenizer(BASE_EOS)
    ends = end_tokens("no/model", tokenizer)
    assert ends.resumed(ends.added, tokenizer) is ends
    before = ends.resumed([], tokenizer)
    assert before.ids == [tokenizer.eos_token_id]
    assert before.remarks == (
        "answers end with <|endoftext|> (2), as they did before the checkpoint; in a new run they would end with "
        "<|im_end|> (0) and <|endoftext|> (2) (sampling.stop_token_ids)",
    )


def test_a_run_that_resumes_goes_on_with_the_ends_that_its_checkpoint_knows() -> None:
    """A checkpoint that an older version has saved knows of none besides EOS."""
    tokenizer = QWEN3.tokenizer(BASE_EOS)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def settled(state: RunState, resumes: bool, chosen: list[int] | None = None) -> list[int]:
        config = make_config(model={"path": "no/model"}, sampling={"stop_token_ids": chosen})
        ends = settle_ends(config, tokenizer, config.data, state, resumes=resumes)
        assert ends.ids == sorted([tokenizer.eos_token_id, *state.stop_token_ids])
        return state.stop_token_ids

    new = RunState()
    assert settled(new, resumes=False) == [end]
    saved = asdict(new)
    assert settled(convert(saved, RunState), resumes=True) == [end]
    del saved["stop_token_ids"]
    assert settled(convert(saved, RunState), resumes=True) == []
    assert settled(convert(saved, RunState), resumes=True, chosen=[end, 7]) == [end, 7]


def test_an_answer_that_goes_on_after_the_end_of_a_turn_is_known() -> None:
    def passed(ids: list[int], start: int = 0) -> bool:
        trajectory = Trajectory(0, 0, [1], ids, [1] * len(ids), [-1.0] * len(ids), answer_start=start)
        return EndTokens(eos=(2,), of_turns=(0,)).are_passed_by(trajectory)

    assert passed([9, 0, 9]) and passed([0, 0])
    assert not passed([9, 9, 0]) and not passed([9]) and not passed([])
    assert not passed([9, 0, 8, 8], start=2)  # an earlier turn has ended there


def test_arguments_that_the_template_never_reads_are_named() -> None:
    def sentences(template: ChatTemplate, **kwargs: Any) -> list[str]:
        return list(unread_keys(template.tokenizer(), DataConfig(path="d", chat_template_kwargs=kwargs)))

    assert sentences(QWEN3, enable_thinking=False, tools=[]) == []
    assert sentences(HARMONY, reasoning_effort="low", bos_token="x") == [
        "data.chat_template_kwargs has bos_token, which the chat template never reads"
    ]
    assert sentences(QWEN3, enable_thinkng=False, add_generation_prompt=True) == [
        "data.chat_template_kwargs has enable_thinkng, which the chat template never reads; did you mean "
        "enable_thinking?"
    ]
    assert sentences(QWEN3, chat_template="{{ messages }}{{ kind }}", kind=1, enable_thinking=1) == [
        "data.chat_template_kwargs has enable_thinking, which the chat template never reads"
    ]
    (sentence,) = sentences(TEMPLATES["gemma3"], tools=[{"type": "function"}])
    assert sentence.startswith("the chat template never reads tools, so prompts do not describe them")
    tokenizer = QWEN3.tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": QWEN3.text}
    for tools, unread in (({}, 1), ({"tools": [{"type": "function"}]}, 0)):
        data = DataConfig(path="d", chat_template_kwargs={"enable_thinking": False, **tools})
        assert len(list(unread_keys(tokenizer, data))) == unread
