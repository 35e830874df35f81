"""Exact ids under chat templates: `replace_prefix_tokens`, and conversations in messages that use it."""

from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from generation.exact_ids import ChatHistory, Generation, KnownPrefix, replace_prefix_tokens
from trainer.commands.tiny_model import EOS, make_tokenizer

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Keeps thoughts in the answers after the last question only.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + OPENING
)
# Shows the last three messages only.
SHORT = CHAT.replace("in messages", "in messages[-3:]") + OPENING
# One end for a question and its answer, none for a question alone.
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
QUESTIONS_END = CHAT.replace("<|im_end|>", "{% if m.role == 'user' %}<|im_end|>{% endif %}") + OPENING
SIGNED = CHAT.replace("<|im_end|>", "<|im_end|>(signed)") + OPENING
NO_ENDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


def rendered(tokenizer: Any, template: str, messages: list[dict[str, Any]], opening: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=opening
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def talk(*texts: str) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def spliced(
    tokenizer: Any, template: str, ids: list[int], messages: list[dict[str, Any]], **kwargs: Any
) -> list[int]:
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    until = rendered(tokenizer, template, messages[: last + 1], False)
    return replace_prefix_tokens(
        tokenizer, ids, until, rendered(tokenizer, template, messages, True), **kwargs
    )


class Words:
    """The tokenizer of NeMo RL's example: 1001, and 220 with 17, are the same text."""

    eos_token_id = 2
    chat_template = None
    texts: ClassVar = {
        17: "4",
        220: " ",
        1001: " 4",
        2: "</s>",
        26951: " Sk",
        3834: "inny",
        94224: " Skinny",
        99: "no",
        198: "\n",
    }

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.texts.get(i, f"<{i}>") for i in ids if not (skip_special_tokens and i == 2))


def test_examples_of_nemo_rl_replace_prefix_tokens() -> None:
    model, until = [11, 12, 13, 40, 41, 220, 17, 2], [11, 12, 13, 40, 41, 1001, 2]
    conversation_ids = [*until, 21, 22, 40, 41]
    assert replace_prefix_tokens(Words(), model, until, conversation_ids) == [*model, 21, 22, 40, 41]
    # Cut short
    assert replace_prefix_tokens(Words(), model[:-1], until, conversation_ids) == [
        *model,
        21,
        22,
        40,
        41,
    ]
    assert replace_prefix_tokens(Words(), [], until, conversation_ids) == conversation_ids
    with pytest.raises(
        ValueError, match=r"do not belong to the prefix ids: they say .*<41> 4' .* have .*<41>no'"
    ):
        replace_prefix_tokens(Words(), [11, 12, 13, 40, 41, 99, 2], until, conversation_ids)
    # A prefix of a user's words, where no answer has been given yet.
    until, conversation_ids = [5, 94224, 2, 198], [5, 94224, 2, 198, 6, 7, 198]
    expected = [5, 26951, 3834, 2, 198, 6, 7, 198]
    assert replace_prefix_tokens(Words(), [5, 26951, 3834], until, conversation_ids) == expected
    # v0.4 raised IndexError where all messages are shorter than the prefix.
    with pytest.raises(ValueError, match="its end cannot be found"):
        replace_prefix_tokens(Words(), [11, 12, 2], [11, 12, 2], [11])


def test_prefixes_are_not_replaced_without_an_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    class Endless(Words):
        eos_token_id = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="has no EOS token"):
        replace_prefix_tokens(Endless(), [1], [1], [1])
    with pytest.raises(ValueError, match="writes no EOS token after answers"):
        spliced(tokenizer, NO_ENDS, [20, 21], talk("a", "b", "c"))
    # The last end is a question's: what follows it must not be taken for what follows the answer.
    ids = [*rendered(tokenizer, QUESTIONS_END, talk("a"), True), *tokenizer("b")["input_ids"]]
    for message in ("c", "a"):
        with pytest.raises(ValueError, match="do not belong"):
            spliced(tokenizer, QUESTIONS_END, ids, talk("a", "b", message))
    history = ChatHistory(tokenizer)
    until, conversation_ids = (
        rendered(tokenizer, QUESTIONS_END, talk(*texts), len(texts) == 3) for texts in ("ab", "abc")
    )
    assert history.continued(KnownPrefix(ids, 2, rendered=until), conversation_ids) == conversation_ids
    assert history.retemplated == 1


def test_text_after_the_end_of_an_answer_is_the_templates(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = rendered(tokenizer, SIGNED, talk("q0"), True)
    ids = [*prompt, *tokenizer("so")["input_ids"], tokenizer.eos_token_id]
    result = spliced(tokenizer, SIGNED, ids, talk("q0", "so", "q1"))
    assert result == rendered(tokenizer, SIGNED, talk("q0", "so", "q1"), True)
    assert result[: len(ids)] == ids
    assert tokenizer.decode(result[len(ids) :]).startswith(
        "(signed)\n<|im_start|>user\nq1<|im_end|>(signed)"
    )


@pytest.mark.parametrize("template", [CHAT + OPENING, FORGETFUL, INSTRUCT, SHORT])
def test_thoughts_and_turns_that_a_template_drops_stay(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """In four turns, each prompt begins with the whole turn before it, and ends with everything that followed its
    answer.
    """
    messages, ids = talk("q0"), rendered(tokenizer, template, talk("q0"), True)
    for turn in range(1, 4):
        answer = f"<think>hm {turn}</think>so {turn}"
        ids = [*ids, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        messages = [*messages, {"role": "assistant", "content": answer}, *talk(f"q{turn}")]
        prompt = spliced(tokenizer, template, ids, messages)
        assert prompt[: len(ids)] == ids
        assert tokenizer.decode(prompt).count(f"q{turn}") == 1
        fresh = rendered(tokenizer, template, talk(f"q{turn}"), True)
        tail = prompt[len(ids) :]
        assert tail in (fresh, [*tokenizer("\n")["input_ids"], *fresh])
        ids = prompt
    assert [tokenizer.decode(ids).count(f"q{turn}") for turn in range(4)] == [1, 1, 1, 1]


def test_counting_ends_would_lose_a_users_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    """A tool's reply and a question follow the answer although the template has dropped two turns before it."""
    template = CHAT.replace("in messages", "in messages[-4:]") + OPENING
    messages = [*talk("q0", "a0", "q1", "a1"), {"role": "tool", "content": "42"}, *talk("q2")]
    # Sampled up to the end, not the newline
    ids = rendered(tokenizer, CHAT, talk("q0", "a0", "q1", "a1"), False)[:-1]
    until = rendered(tokenizer, template, messages[:4], False)
    conversation_ids = rendered(tokenizer, template, messages, True)
    ends = [i for i, token in enumerate(conversation_ids) if token == tokenizer.eos_token_id]
    assert until.count(tokenizer.eos_token_id) == len(
        ends
    )  # so the fourth end of the conversation is the last question's
    prompt = replace_prefix_tokens(tokenizer, ids, until, conversation_ids)
    expected = (
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompt[len(ids) :]) == expected


@pytest.mark.parametrize("template", [CHAT + OPENING, FORGETFUL, INSTRUCT])
@pytest.mark.parametrize(
    "texts",
    [
        ("another question", "one two", "next"),
        ("q0", "one three", "next"),
        ("q0", "one two three", "next"),
        ("q0", "one two", "q1", "an answer more", "next"),
    ],
)
def test_messages_of_another_conversation_are_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, texts: tuple[str, ...]
) -> None:
    prompt = rendered(tokenizer, template, talk("q0"), True)
    ids = [*prompt, *tokenizer("one two")["input_ids"], tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="the messages do not belong to the prefix ids: they say '"):
        spliced(tokenizer, template, ids, talk(*texts))
    assert spliced(tokenizer, template, ids, talk("q0", "one  two", "next"))[: len(ids)] == ids


def test_any_of_several_end_tokens_ends_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    """The policy's EOS, which differs from the template's, stays in the ids."""
    prompt, pad = rendered(tokenizer, CHAT + OPENING, talk("q0"), True), tokenizer.pad_token_id
    ids = [*prompt, *tokenizer("so")["input_ids"], pad]
    result = spliced(
        tokenizer,
        CHAT + OPENING,
        ids,
        talk("q0", "so", "q1"),
        eos_token_ids=[tokenizer.eos_token_id, pad],
    )
    assert result[: len(ids)] == ids
    assert (
        tokenizer.decode(result[len(ids) :])
        == "\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_ids_of_a_tool_call_in_other_spelling_are_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whitespace, key order and escapes of a call's JSON are the template's when it is rendered; the ids are kept."""
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "é"}}, "type": "function", "id": "x"}
    messages: list[dict[str, Any]] = [
        *talk("q0"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    messages.append({"role": "tool", "content": "2", "tool_call_id": "x"})
    prompt = rendered(tokenizer, tokenizer.chat_template, talk("q0"), True)
    answer = '<tool_call>\n{"arguments": {"b":"\\u00e9","a":1}, "name":"add"}\n</tool_call>'
    ids = [*prompt, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    result = spliced(tokenizer, tokenizer.chat_template, ids, messages)
    assert result[: len(ids)] == ids
    assert tokenizer.decode(result[len(ids) :]).startswith("\n<|im_start|>tool\n<tool_response>2")
    other = {"function": {"name": "add", "arguments": {"a": 7, "b": "é"}}}
    messages[1] = {"role": "assistant", "content": "", "tool_calls": [other]}
    with pytest.raises(ValueError, match="do not belong"):
        spliced(tokenizer, tokenizer.chat_template, ids, messages)


# Bytes that are no text, marks, ids that the tokenizer lacks
SAMPLED = st.lists(st.integers(3, 290), max_size=12)


@settings(max_examples=30, deadline=None)
@given(turns=st.lists(st.tuples(SAMPLED, st.booleans(), st.text(max_size=8)), min_size=1, max_size=5))
def test_turn_k1_begins_with_turn_k_whatever_was_sampled(
    turns: list[tuple[list[int], bool, str]],
) -> None:
    """Turn of a ChatHistory with random ids, some answers cut short, and random texts of tools begin with those
    before.
    """
    tokenizer = TOKENIZER
    history = ChatHistory(tokenizer)
    messages: list[dict[str, Any]] = talk("start")
    for sampled, ends, reply in turns:
        prompt = history.prompt_ids(messages)
        token_ids = [*sampled, *([tokenizer.eos_token_id] if ends else [])]
        generation = Generation(
            token_ids, [-1.0] * len(token_ids), "stop" if ends else "length", prompt_ids=prompt
        )
        answer = {"role": "assistant", "content": tokenizer.decode(token_ids, skip_special_tokens=True)}
        history.record(messages, answer, generation)
        messages = [*messages, answer, {"role": "tool", "content": reply}]
        following = history.prompt_ids(messages)
        assert following[: len(generation.ids)] == generation.ids
        added = tokenizer.decode(following[len(generation.ids) :])
        assert added.removeprefix(EOS).startswith("\n<|im_start|>tool\n<tool_response>")
        assert (added.startswith(EOS)) is not ends
    assert history.retemplated == 0


def test_a_conversation_is_rendered_twice_a_turn_at_any_length(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    class Counting:
        calls = 0
        eos_token_id, chat_template = tokenizer.eos_token_id, tokenizer.chat_template

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer.apply_chat_template(*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            return tokenizer(*args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            return tokenizer.decode(*args, **kwargs)

    history, messages, calls = ChatHistory(Counting()), talk("q"), []
    for turn in range(8):
        before = Counting.calls
        prompt = history.prompt_ids(messages)
        calls.append(Counting.calls - before)
        token_ids = [*tokenizer(f"a{turn}")["input_ids"], tokenizer.eos_token_id]
        answer = {"role": "assistant", "content": f"a{turn}"}
        history.record(
            messages, answer, Generation(token_ids, [0.0] * len(token_ids), prompt_ids=prompt)
        )
        messages = [*messages, answer, *talk("q")]
    assert len(set(calls[1:])) == 1


def test_answers_are_recognised_however_a_client_writes_them(tokenizer: PreTrainedTokenizerFast) -> None:
    history, question = ChatHistory(tokenizer), talk("q0")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": 2}'}}
    generation = Generation([20, 2], [0.0, 0.0], prompt_ids=history.prompt_ids(question))
    history.record(question, {"role": "assistant", "content": None, "tool_calls": [call]}, generation)
    again = call | {"function": {"name": "f", "arguments": '{"y":2,"x":1}'}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "q0"}]}]
    for answer in (
        {"content": "", "tool_calls": [again], "refusal": None},
        {"tool_calls": [call], "reasoning": "r"},
    ):
        prefix = history.known_prefix(
            [*parts, {"role": "assistant", **answer}, {"role": "tool", "content": "3"}]
        )
        assert prefix == KnownPrefix(generation.ids, 2)
    assert history.known_prefix([*parts, {"role": "assistant", "content": "else"}]) is None
    assert history.known_prefix([*talk("q1"), {"role": "assistant", "tool_calls": [call]}]) is None


def test_conversations_are_templated_again_where_ids_cannot_be_kept(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    endless = make_tokenizer()
    endless.chat_template = NO_ENDS
    history = ChatHistory(endless)
    generation = Generation([20, 2], [0.0, 0.0], prompt_ids=history.prompt_ids(talk("q")))
    history.record(talk("q"), {"role": "assistant", "content": "a"}, generation)
    assert history.prompt_ids(talk("q", "a", "r")) == rendered(
        endless, NO_ENDS, talk("q", "a", "r"), True
    )
    assert history.retemplated == 1


@pytest.mark.parametrize("answer_text", ["on", "one t"])
def test_an_answer_that_a_stop_string_has_cut_within_a_word_is_kept(
    answer_text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The client has the text before the stop string, the ids have all that was sampled."""
    ids = [*rendered(tokenizer, CHAT + OPENING, talk("q"), True), *tokenizer("one two")["input_ids"]]
    after = "<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    conversation_ids = [*ids, *tokenizer(after, add_special_tokens=False)["input_ids"]]
    assert spliced(tokenizer, CHAT + OPENING, ids, talk("q", answer_text, "r")) == conversation_ids
    with pytest.raises(ValueError, match="do not belong to the prefix ids"):
        spliced(tokenizer, CHAT + OPENING, ids, talk("q", f"n{answer_text}", "r"))
