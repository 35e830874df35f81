"""Rows at random: each is shown as a slow reference shows it, or refused by its number."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.rows import write_rows
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.schema import DataConfig
from trainer.data import prompt_rows
from trainer.errors import UserError

ROWS = 2000
BATCH = 100  # rows of a file
TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}|{{ m.name or '' }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endfor %}{% if add_generation_prompt %}[assistant|{% endif %}"
)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8) | st.sampled_from(
    ["42", '"a"', "{}", "[]"]
)
names = st.sampled_from(["look", "add", "wéiß"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(texts, values, max_size=3)
arguments = objects | objects.map(json.dumps) | st.sampled_from([None, "", "{", "[1]", "no"])
functions = st.fixed_dictionaries({"name": names, "arguments": arguments})
calls = functions | functions.map(
    lambda function: {"type": "function", "function": function, "id": None}
)
parts = st.one_of(
    texts,
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"text": texts}),
    st.sampled_from(
        [{"type": "text", "text": None}, {"type": "image", "image": "a.png"}, {"type": "video"}, 5, None]
    ),
)
contents = st.one_of(
    texts, st.lists(parts, max_size=3), st.none(), st.integers(-9, 9), st.booleans(), objects
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "User", "ASSISTANT", " system "])
messages = st.fixed_dictionaries(
    {"role": roles},
    optional={
        "content": contents,
        "text": texts,
        "name": st.none() | names,
        "tool_calls": st.none()
        | st.lists(calls, max_size=2)
        | st.lists(calls, max_size=2).map(json.dumps),
    },
)
chats = st.lists(messages, min_size=1, max_size=4)
# Where a whole column has texts and lists, `datasets` reads a text that is JSON itself, such as "42", as its value.
questions = texts.filter(lambda text: not _is_json(text))
prompts = st.one_of(questions, chats, chats, chats, chats.map(json.dumps), st.sampled_from(["[", "{x}"]))
schemas = names.map(lambda name: {"type": "function", "function": {"name": name}})
tools = st.none() | st.lists(schemas, max_size=2) | st.lists(schemas, max_size=2).map(json.dumps)
rows = st.fixed_dictionaries({"prompt": prompts, "tools": tools})


class Refused(Exception):
    """The reference does not know for certain what a row means."""


def reference(row: dict[str, Any]) -> str:
    """Return the text of a row's prompt, made without a template. Raises Refused."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        try:
            read = json.loads(prompt)
        except ValueError:
            read = None
        is_chat = (
            isinstance(read, list) and read and all(isinstance(m, dict) and "role" in m for m in read)
        )
        prompt = read if is_chat else prompt
    if not prompt:
        raise Refused
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    told = row["tools"]
    told = json.loads(told) if isinstance(told, str) else told or []
    text = "".join(f"({tool['function']['name']})" for tool in told)
    last, seen = "", set()
    for message in chat:
        last = message["role"].strip().lower()
        seen.add(last)
        text += turn(last, message)
    if seen == {"system"} or last == "assistant":
        raise Refused
    return text + "[assistant|"


def turn(role: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        content = message.get("text")
    called = message.get("tool_calls") or []
    called = json.loads(called) if isinstance(called, str) else called
    written = ""
    for call in called:
        function = call.get("function", call)
        values = function["arguments"]
        if isinstance(values, str) and values:
            try:
                values = json.loads(values)
            except ValueError:
                raise Refused from None
        if not isinstance(values or {}, dict):
            raise Refused
        written += f"|{function['name']}{json.dumps(values or {}, ensure_ascii=False)}"
    if content is None or (content == [] and role != "tool"):
        if not called:
            raise Refused
        content = ""
    return f"[{role}|{message.get('name') or ''}|{shown(role, content)}{written}]"


def shown(role: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and any(
        isinstance(p, dict) and p.get("type") in ("image", "video") for p in content
    ):
        raise Refused  # also among values that are not parts: the recipe takes no images
    if role == "tool":
        typed = [content] if isinstance(content, dict) else content
        if not isinstance(typed, list) or not all(
            isinstance(p, dict) and isinstance(p.get("type"), str) for p in typed
        ):
            return json.dumps(content, ensure_ascii=False)
    if isinstance(content, bool):
        raise Refused
    if isinstance(content, int):
        return str(content)
    joined = ""
    for part in [content] if isinstance(content, dict) else content:
        if isinstance(part, str):
            joined += part
        elif (
            isinstance(part, dict)
            and part.get("type") in ("text", None)
            and isinstance(part.get("text"), str)
        ):
            joined += part["text"]
        else:
            raise Refused
    return joined


@settings(
    max_examples=ROWS // BATCH,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
@given(data=st.lists(rows, min_size=BATCH, max_size=BATCH))
def test_rows_at_random_are_shown_as_by_a_reference_or_refused_by_number(
    tmp_path_factory: pytest.TempPathFactory, data: list[dict[str, Any]]
) -> None:
    tokenizer = small_tokenizer(TEMPLATE)
    good, bad = [], []
    for row in data:
        try:
            good.append((row, reference(row)))
        except Refused:
            bad.append(row)
    folder = tmp_path_factory.mktemp("rows")
    if good:
        assert texts_of(folder / "good.jsonl", [row for row, _ in good], tokenizer) == [
            text for _, text in good
        ]
    if bad:  # all rows before the refused one are as good as before
        file = folder / "bad.jsonl"
        with pytest.raises(UserError, match=f"row {len(good)} of {file} ") as caught:
            texts_of(file, [*(row for row, _ in good), bad[0]], tokenizer)
        assert "\n" not in str(caught.value)
    for row in bad[1:]:
        refusal = refusal_of(row, tokenizer)
        assert "row 0 of " in refusal, row


def texts_of(file: Path, data: list[dict[str, Any]], tokenizer: Any) -> list[str]:
    write_rows(file, data)
    config = DataConfig(path=str(file), answer_key=None, max_prompt_tokens=10**6)
    shown_rows = list(prompt_rows(config, tokenizer))
    for row in shown_rows:
        assert list(row.token_ids) == tokenizer(row.text, add_special_tokens=False)["input_ids"]
    return [row.text for row in shown_rows]


def refusal_of(row: dict[str, Any], tokenizer: Any) -> str:
    """Return the sentence by which a row is refused; otherwise the row's text as the model would see it."""
    try:
        return "".join(shown_row.text for shown_row in rendered_in_memory(row, tokenizer))
    except UserError as error:
        return str(error)


def rendered_in_memory(row: dict[str, Any], tokenizer: Any) -> Any:
    """Yield a row without a file, whose reading takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        columns = {name: datasets.Json() for name in row}
        made = datasets.Dataset.from_list([row], features=datasets.Features(columns))
        patch.setattr("trainer.data.prompts.load_rows", lambda *_, **__: made)
        yield from prompt_rows(DataConfig(path="memory", answer_key=None), tokenizer)
