"""Messages and tools in every form that people keep, and what six kinds of chat templates are given of them."""

import copy
from typing import Any

import pytest

from generation.messages import ChatForm, chat_form, chosen_tools, clean_messages, messages_in, plain_ids
from tests.support.chat_templates import TEMPLATES
from tests.support.small_tokenizer import small_tokenizer

USER = {"role": "user", "content": "weather in Bern?"}
ARGUMENTS = {"city": "Bern", "unit": None, "days": [1, {"a": None}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {}},
    },
}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": "call00001",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    } | more


def asks(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call(arguments)]} | more


FORMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "as it should be": ([USER], [USER]),
    "arguments as JSON text": (
        [USER, asks('{"city": "Bern", "unit": null, "days": [1, {"a": null}]}')],
        [USER, asks(ARGUMENTS)],
    ),
    "empty arguments": ([USER, asks("")], [USER, asks({})]),
    "calls as JSON text": (
        [
            USER,
            {"role": "assistant", "tool_calls": '[{"name": "weather", "arguments": {"city": "Bern"}}]'},
        ],
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
                ],
            },
        ],
    ),
    "a call of the old interface": (
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "function_call": {"name": "weather", "arguments": "{}"},
            },
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}],
            },
        ],
    ),
    "absent keys as nulls": (
        [USER | {"name": None, "tool_calls": None}, asks({"city": "Bern"}, content=None)],
        [USER, asks({"city": "Bern"})],
    ),
    "roles in capitals": (
        [{"role": "System", "content": "a"}, {"role": " USER", "content": "b"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    ),
    "text in place of content": (
        [{"role": "user", "text": "a"}, {"role": "assistant", "value": "b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ),
    "a part by itself": (
        [{"role": "user", "content": {"type": "text", "text": "a", "image": None}}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ),
    "parts of other interfaces": (
        [{"role": "user", "content": ["a", {"text": "b"}, {"type": "input_text", "text": "c"}]}],
        [{"role": "user", "content": [{"type": "text", "text": text} for text in "abc"]}],
    ),
    "a number": ([{"role": "user", "content": 12}], [{"role": "user", "content": "12"}]),
    "a tool's object": (
        [{"role": "tool", "content": {"sun": None}}],
        [{"role": "tool", "content": {"sun": None}}],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_messages_in_each_form_that_is_certain_become_one_form(form: str) -> None:
    messages, cleaned = FORMS[form]
    before = copy.deepcopy(messages)
    assert clean_messages(messages) == cleaned
    assert messages == before
    assert clean_messages(clean_messages(messages)) == cleaned


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "neither a string nor a list"),
        ([{"from": "human", "value": "a"}], "neither a string nor a list"),
        (["a"], "neither a string nor a list"),
        ({"role": "user", "content": "a"}, "neither a string nor a list"),
        ([{"role": 1, "content": "a"}], r"message \(1\) whose role is int"),
        ([USER, {"role": "user", "content": None}], r"message \(2\) without content; it has only role"),
        ([{"role": "user", "body": "a"}], r"message \(1\) without content; it has only role, body"),
        ([{"role": "user", "content": []}], r"message \(1\) without content"),
        ([{"role": "assistant", "content": None}], r"message \(1\) without content"),
        (
            [{"role": "user", "content": {"parts": ["a"]}}],
            r"message \(1\) with a part without text; it has only parts",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "part without text; it has only type",
        ),
        ([{"role": "user", "content": [5]}], "a part that is int"),
        ([{"role": "user", "content": True}], "whose content is bool"),
        (
            [USER, asks("{city: Bern}")],
            r"message \(2\) with a call whose arguments are not a JSON object: {city: Bern}",
        ),
        ([USER, asks('["Bern"]')], "arguments are not a JSON object"),
        ([USER, asks(5)], "arguments are not a JSON object: 5"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}],
            "no name of a function",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": "weather()"}],
            "tool_calls are text that is not JSON",
        ),
    ],
)
def test_messages_that_are_not_certain_are_refused_by_number(messages: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        clean_messages(messages)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] + [3]",
        "[1, 2]",
        '[{"a": 1}]',
        '{"a": 1}',
        "[]",
        "[" * 10_000,
        "{x | x > 1}",
        "[{'a': 1}]",
    ],
)
def test_text_that_begins_like_json_is_still_text(text: str) -> None:
    assert messages_in(text) == text


def test_json_text_of_messages_becomes_messages_and_pythons_is_refused() -> None:
    assert messages_in(' [{"role": "user", "content": "é"}]') == [{"role": "user", "content": "é"}]
    with pytest.raises(ValueError, match="not JSON: write it with json.dumps"):
        messages_in(str([USER]))


def test_a_row_chooses_among_the_recipes_tools_or_describes_its_own() -> None:
    other = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert chosen_tools(None, [TOOL, other]) == [TOOL, other]
    assert chosen_tools([], [TOOL, other]) == []
    for value in (["add"], [other], '["add"]', [{"name": "add"}], "add" and ['{"name": "add"}']):
        assert chosen_tools(value, [TOOL, other]) == [other]
    for value in ([other], other, [other["function"]], '[{"name": "add", "parameters": {}}]'):
        assert chosen_tools(value, []) == [other]
    assert chosen_tools(None, []) == chosen_tools("", []) == []


@pytest.mark.parametrize(
    ("value", "offered", "sentence"),
    [
        (["subtract"], [TOOL], "names the tool 'subtract', but those of the recipe are weather"),
        ([{"name": "subtract"}], [TOOL], "names the tool 'subtract'"),
        (["weather"], [], "names the tool 'weather', but the recipe has none"),
        ("hammer, saw", [], "tools that are text, but not JSON: hammer, saw"),
        ([{"description": "x"}], [], "a tool without the name of a function"),
        ([7], [TOOL], "a tool without the name of a function"),
    ],
)
def test_tools_that_cannot_be_meant_are_refused(value: Any, offered: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chosen_tools(value, offered)


def expected(kind: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of the test below by hand, in the form that a kind of template documents."""
    adapted = copy.deepcopy(messages)
    for message in adapted:
        if kind == "deepseek" and "tool_calls" in message:
            message["content"] = None
            message["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern", "unit": null}'
        if message["role"] == "tool" and kind in ("qwen3", "deepseek"):
            message["content"] = '{"sun": true}'
    return adapted


@pytest.mark.parametrize("kind", TEMPLATES)
def test_each_kind_of_template_gets_what_transformers_would_render(kind: str) -> None:
    tokenizer = small_tokenizer(TEMPLATES[kind])
    written = [
        {"role": "System", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "weather "}, {"type": "text", "text": "in Bern?"}],
        },
        asks('{"city": "Bern", "unit": null}', content=None),
        {"role": "tool", "content": {"sun": True}},
        {"role": "assistant", "text": "sunny"},
        {"role": "USER", "content": "and tomorrow?"},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather in Bern?"},
        asks({"city": "Bern", "unit": None}),
        {"role": "tool", "content": {"sun": True}},
        {"role": "assistant", "content": "sunny"},
        {"role": "user", "content": "and tomorrow?"},
    ]
    tools: list[Any] | None = [TOOL]
    if kind == "gemma3":
        tools = None
        plain[1]["content"] = [
            {"type": "text", "text": "weather "},
            {"type": "text", "text": "in Bern?"},
        ]
        written, plain = ([messages[index] for index in (0, 1, 4, 5)] for messages in (written, plain))
    rendered = chat_form(tokenizer).render(clean_messages(written), tools=tools)
    theirs = tokenizer.apply_chat_template(
        expected(kind, plain), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == theirs


@pytest.mark.parametrize("kind", ["deepseek", "gemma3"])
def test_a_call_beside_an_answer_that_the_template_drops_is_refused(kind: str) -> None:
    """Gemma's leaves out all calls."""
    form = chat_form(small_tokenizer(TEMPLATES[kind]))
    with pytest.raises(
        ValueError, match="a tool call beside a text, which the chat template leaves out"
    ):
        form.render([USER, asks({}, content="I look.")])


def test_arguments_that_were_text_stay_as_written_for_a_template_of_text() -> None:
    messages = clean_messages([USER, asks('{"city":"Bern"}')])
    assert '{"city":"Bern"}' in chat_form(small_tokenizer(TEMPLATES["deepseek"])).render(messages)


def test_a_template_of_parts_alone_gets_text_as_a_part() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert chat_form(small_tokenizer(template)).render([USER]) == "<user>weather in Bern?"


def test_parts_that_are_no_text_need_a_template_of_parts() -> None:
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert "<start_of_image>what?" in chat_form(small_tokenizer(TEMPLATES["gemma3"])).render(image)
    with pytest.raises(
        ValueError, match="a part of the type 'image', but the chat template takes text only"
    ):
        chat_form(small_tokenizer(TEMPLATES["qwen3"])).render(image)


def test_other_names_of_roles_are_refused_unless_the_template_knows_them() -> None:
    turn = {"role": "model", "content": "a"}
    known = chat_form(small_tokenizer(TEMPLATES["gemma3"]))
    assert known.render([USER, turn, USER]) == known.render([USER, turn | {"role": "assistant"}, USER])
    with pytest.raises(ValueError, match="a message of the role 'human': call it 'user'"):
        chat_form(small_tokenizer(TEMPLATES["llama"])).render([{"role": "human", "content": "a"}])


def test_a_template_is_asked_once_for_each_form() -> None:
    calls = []

    def template(messages: Any, **settings: Any) -> str:
        calls.append(messages)
        return "".join(str(message["content"]) for message in messages)

    form = ChatForm(template)
    for _ in range(3):
        form.render([USER])
    assert len(calls) == 4


def test_a_text_with_a_bos_gets_no_second_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = small_tokenizer(None)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    [with_one, without, two] = plain_ids(tokenizer, ["<s>ab", "ab", "<s><s>ab"])
    assert with_one == without == [bos, *tokenizer("ab", add_special_tokens=False)["input_ids"]]
    assert two == [bos, *with_one]
    assert plain_ids(tokenizer, []) == []
