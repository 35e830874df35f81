"""Malformed HTTP requests: made from a server's own OpenAPI schema, or written by hand."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
)
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": USER, "max_tokens": 2},
    COMPLETIONS: {"model": "policy", "prompt": "hi", "max_tokens": 2},
    RESPONSES: {"model": "policy", "input": "hi", "max_output_tokens": 2},
    MESSAGES: {"model": "policy", "messages": USER, "max_tokens": 2},
    TOKENIZE: {"model": "policy", "prompt": "hi"},
    DETOKENIZE: {"model": "policy", "tokens": [20, 21]},
}
# No value that a lenient parser would convert, as many convert "1" to a number.
WRONG = ["no such value", {"unexpected": {"value": []}}, [[[]]], 1.5, -3]
KINDS = {str: "string", dict: "object", list: "array", float: "number", int: "integer"}


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


def request(path: str, **changes: Any) -> Request:
    """Return a correct request with some of its fields replaced; a field whose new value is `...` is left out."""
    body = {name: value for name, value in (GOOD[path] | changes).items() if value is not ...}
    return Request(path, json.dumps(body).encode())


def from_schema(schema: dict[str, Any]) -> Iterator[Request]:
    """Yield requests with a value of a wrong type in each field, and requests without each required field."""
    for path in GOOD:
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for form in alternatives(schema, content):
            chat = path != MESSAGES and "messages" in form.get("required", [])
            base = {"prompt": ..., "messages": USER} if chat else {}
            for name, field_schema in form.get("properties", {}).items():
                kinds = _kinds(schema, field_schema)
                for value in WRONG:
                    if kinds and not _fits(value, kinds):
                        yield request(path, **(base | {name: value}))
            for name in form.get("required", []):
                if not any(
                    name not in other.get("required", []) for other in alternatives(schema, content)
                ):
                    yield request(path, **{name: ...})


def alternatives(schema: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the forms that a part of a schema allows, with references resolved."""
    if "$ref" in part:
        target = schema
        for step in part["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return alternatives(schema, target)
    several = part.get("anyOf") or part.get("oneOf") or []
    return [form for option in several for form in alternatives(schema, option)] if several else [part]


def _kinds(schema: dict[str, Any], part: dict[str, Any]) -> set[str]:
    """Return the JSON types that a field may have; empty where it may be anything."""
    forms = alternatives(schema, part)
    kinds = {form.get("type", "object" if "properties" in form else "") for form in forms}
    return set() if "" in kinds else kinds


def _fits(value: Any, kinds: set[str]) -> bool:
    kind = KINDS[type(value)]
    return (
        kind in kinds
        or (kind == "integer" and "number" in kinds)
        or (kind != "string" and "boolean" in kinds)
    )


def by_hand() -> Iterator[Request]:
    """Yield requests that are wrong in ways a schema does not express."""
    for path in GOOD:
        for body in (
            b"",
            b"null",
            b"[]",
            b"7",
            b'"text"',
            b"{",
            b'{"model": "policy"',
            b"\xff\xfe{}",
            b"[" * 100_000,
        ):
            yield Request(path, body)
        yield Request(path, b'{"model": "policy", "messages": [], "prompt": "\\ud800", "tokens": []}')
        yield Request(path, json.dumps({**GOOD[path], "extra": 0}).replace("0", "1" * 5000).encode())
        yield Request(
            path, b"model=policy", headers={"content-type": "application/x-www-form-urlencoded"}
        )
        yield request(path, model="nobody")
        yield request(path, model=7)
        yield Request(path, b"", "GET")
        yield Request(path, b"", "DELETE")
    for path in (
        "/",
        "/v1",
        "/v1/nothing",
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/invocations",
        "/v1/embeddings",
    ):
        yield Request(path, b"{}")
    for path in (
        "/v1/load_lora_adapter",
        "/scale_elastic_ep",
        "/pause",
        "/v1/responses/resp_1",
        "/metrics",
        "//health",
        "/%00",
    ):
        yield Request(path, b"{}")
    yield from _chats()
    yield from _completions()
    for path in (CHAT, COMPLETIONS):
        yield from _sampling(path)
    for tokens in ("x", [-1], [10**12], ["a"], [1.5], None, {"a": 1}, [[1]], [2**63]):
        yield request(DETOKENIZE, tokens=tokens)
    for messages in ("x", [], [{"role": "user"}], [7], [{"content": "x"}], {"role": "user"}):
        yield request(
            TOKENIZE,
            prompt=...,
            messages=messages,
            continue_final_message=True,
            add_generation_prompt=True,
        )


def _chats() -> Iterator[Request]:
    bad: list[Any] = [
        "x",
        [],
        [[]],
        [7],
        [None],
        {"role": "user"},
        [{"role": "user", "content": 7}],
        [{"content": "x"}],
    ]
    bad += [
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}],
            }
        ]
    ]
    bad += [
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
            }
        ]
    ]
    bad += [[{"role": "user", "content": [{"type": "no such type", "text": "x"}]}]]
    bad += [[{"role": "user", "content": "x" * 5000}]]
    bad += [[*USER, {"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}]]
    bad += [[*USER, {"role": "assistant", "content": "x", "tool_calls": "call"}]]
    for messages in bad:
        yield request(CHAT, messages=messages)
    for ids in ("x", [-1], [10**9], ["a"], [1.5], [True], {"a": 1}, [[1]], 7, [2**63]):
        yield request(CHAT, required_prefix_token_ids=ids)
        carrying = [
            *USER,
            {"role": "assistant", "content": "x", "prompt_token_ids": ids, "generation_token_ids": [7]},
            *USER,
        ]
        yield request(CHAT, messages=carrying)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for tools in (
        "x",
        [7],
        [{}],
        [{"type": "function"}],
        [{"type": "function", "function": {}}],
        {"a": 1},
    ):
        yield request(CHAT, tools=tools)
    for choice in (
        "x",
        7,
        {"type": "function"},
        {"type": "function", "function": {"name": "other"}},
        [],
    ):
        yield request(CHAT, tools=[tool], tool_choice=choice)
    yield request(CHAT, tool_choice="required")
    yield request(CHAT, continue_final_message=True)
    yield request(CHAT, chat_template="{{ messages.__class__ }}")
    yield request(
        CHAT, chat_template_kwargs={"messages": 7, "chat_template": "{{ 1 / 0 }}", "tokenize": "yes"}
    )
    yield request(CHAT, stream_options={"include_usage": True})
    yield request(
        CHAT,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}},
    )
    yield request(CHAT, response_format={"type": "no such format"})
    yield request(CHAT, top_logprobs=3)


def _completions() -> Iterator[Request]:
    bad: list[Any] = [
        7,
        {},
        [[]],
        [[-1]],
        [[10**9]],
        [["a"]],
        [1.5],
        [None],
        "x" * 5000,
        [2**63],
        [[2**64]],
    ]
    for prompt in bad:
        yield request(COMPLETIONS, prompt=prompt)
    yield request(COMPLETIONS, prompt=..., prompt_embeds="AAAA")
    yield request(COMPLETIONS, prompt=...)
    yield request(COMPLETIONS, logprobs=10**6)
    yield request(COMPLETIONS, stream_options={"include_usage": True})


def _sampling(path: str) -> Iterator[Request]:
    wrong: dict[str, list[Any]] = {
        "temperature": [-1, "hot", float("nan"), float("inf"), [], 10**400],
        "top_p": [0, 1.5, -1, float("nan")],
        "top_k": [-7, 1.5],
        "min_p": [-1, 2],
        "n": [0, -1, 10**9, 1.5, "x"],
        "max_tokens": [0, -5, "x", 1.5, 2**63],
        "min_tokens": [-1, 10**9],
        "seed": [2**70, "x", 1.5],
        "presence_penalty": [9, -9, "x"],
        "frequency_penalty": [9, "x"],
        "repetition_penalty": [0, -1],
        "logit_bias": [{"x": 1}, {"999999": 1}, {"-1": 1}, {"20": "x"}, 7],
        "allowed_token_ids": [[-1], [10**9], ["x"], []],
        "bad_words": [7, [7], [""]],
        "stop": [7, [7], [""]],
        "stop_token_ids": [7, ["x"], [2**70]],
        "priority": ["x"],
        "prompt_logprobs": [-7, 10**6],
        "truncate_prompt_tokens": [-7, 10**9],
        "structured_outputs": [
            {"regex": "["},
            {"json": {"type": 7}},
            {"regex": "a", "json": {}},
            {"choice": []},
            7,
        ],
        "vllm_xargs": [7, {"a": {"b": 1}}],
    }
    for name, values in wrong.items():
        for value in values:
            yield request(path, **{name: value})
