"""Hostile HTTP requests: drawn by Hypothesis from a server's own schema and from outside it, and listed attacks."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

from hypothesis import strategies as st

from tests.support.bad_requests import CHAT, COMPLETIONS, GOOD, USER, alternatives

ANSWER_SECONDS = 60.0
"""A request that takes longer counts as hanging."""

NUMBERS: list[Any] = [
    0,
    1,
    -1,
    2,
    15,
    16,
    17,
    20,
    21,
    127,
    128,
    129,
    511,
    512,
    513,
    16384,
    2**31,
    2**63 - 1,
    2**63,
]
NUMBERS += [
    2**64,
    2**70,
    -(2**63) - 1,
    10**400,
    1.0,
    1.5,
    129.0,
    16000.0,
    -0.0,
    1e22,
    1e300,
    -1e300,
    1e-300,
]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
TEXTS = [
    "",
    " ",
    "1",
    "129",
    "1e3",
    "0x10",
    "true",
    "null",
    "nan",
    "a\x00b",
    "\u202eabc",
    "\ufeff",
    "\uffff",
]
TEXTS += [
    "e\u0301" * 9,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\ufdfa" * 50,
    "\ud800",
    "\r\nx: y",
    "x" * 5000,
]
TEXTS += ["{{ 1/0 }}", "../../etc/passwd"]
WRONG = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from([None, True, False, [], {}, [[]], [None], [{}], {"": ""}, [[[[]]]]]),
    st.lists(st.sampled_from([*NUMBERS, *TEXTS, None, []]), max_size=4),
    st.dictionaries(st.sampled_from(TEXTS), st.sampled_from(NUMBERS), max_size=3),
    st.integers(2, 2000).map(lambda count: [1] * count),
)
HEADERS: dict[str, list[bytes]] = {
    "content-type": [
        b"",
        b"text/plain",
        b"application/json; charset=utf-16",
        b"\xff",
        b"application/x-ndjson",
    ],
    "accept": [b"", b"image/png", b"*/*;q=nan"],
    "authorization": [
        b"",
        b"Bearer",
        b"Bearer \xff\xfe",
        b"Basic x",
        b"Bearer " + b"x" * 5000,
        b"bearer secret",
    ],
    "x-hotbunk-trajectory": [b"", b"a", b"\xff", b"k" * 5000],
    "host": [
        b"evil.example",
        b"127.0.0.1.evil.example:80",
        b"[::1]:80",
        b"LOCALHOST",
        b"",
        b"\xff",
        b"[",
        b":::",
    ],
    "x-request-id": [b"", b"\xff" * 99, b"../..", b"0"],
    "x-data-parallel-rank": [b"1e300", b"-1", b"99999999999999999999", b"0"],
    "x-session-id": [b"", b"\xff"],
    "x-priority": [b"1e9", b"-5"],
    "expect": [b"100-continue", b"a miracle"],
    "upgrade": [b"websocket", b"h2c"],
    "range": [b"bytes=0-0"],
}
METHODS = [
    "GET",
    "HEAD",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "post",
    "A" * 200,
    "P\x00",
    "\xe9",
]
PATHS = [
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/chat/completions/",
    "/v1//completions",
    "/V1/completions",
    "/v1/models?n=5",
]
PATHS += [
    "/v1/completions?n=5",
    "/v1/completions#x",
    "/%76%31/completions",
    "/v1/completions%00",
    "/../v1/models",
]
PATHS += [
    "/trajectories/",
    "/trajectories/x/v1/completions",
    "/trajectories//health",
    "/\xff",
    "/%ff%fe",
    "*",
]
PATHS += ["http://127.0.0.1/v1/completions", "/" + "a" * 5000, "/docs"]


@dataclass(frozen=True)
class Hostile:
    """One request as it goes over the wire; `headers` replace the usual ones of the same name."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, bytes] = field(default_factory=dict)


def from_schema(schema: dict[str, Any]) -> st.SearchStrategy[Hostile]:
    """Requests in which some fields have values that the schema allows, however odd."""

    @st.composite
    def draw_request(draw: st.DrawFn) -> Hostile:
        path = draw(st.sampled_from(list(GOOD)))
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        properties = draw(st.sampled_from(alternatives(schema, content))).get("properties", {})
        names = draw(st.lists(st.sampled_from(sorted(properties)), max_size=4, unique=True))
        changes = {name: draw(_fitting(schema, properties[name], 3)) for name in names}
        return Hostile(path, json.dumps(GOOD[path] | changes).encode())

    return draw_request()


def _fitting(schema: dict[str, Any], part: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    """Return values that this part of the schema allows, nested at most `depth` levels deep."""
    forms = [_fitting_form(schema, form, depth) for form in alternatives(schema, part)]
    return st.one_of(forms)


def _fitting_form(schema: dict[str, Any], form: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    if "const" in form or "enum" in form:
        return st.sampled_from(form.get("enum", [form.get("const")]))
    kind = form.get("type", "object" if "properties" in form else None)
    low, high = form.get("minimum", -(2**70)), form.get("maximum", 2**70)
    numbers = [value for value in [*NUMBERS, low, high] if low <= value <= high]
    if kind == "integer":
        return st.sampled_from([value for value in numbers if isinstance(value, int)])
    if kind == "array":
        items = form.get("items") or {}
        return st.lists(_fitting(schema, items, depth - 1), max_size=3) if depth else st.just([])
    if kind == "object":
        wanted = form.get("properties", {})
        if not wanted:
            return st.dictionaries(st.sampled_from(TEXTS), WRONG, max_size=3)
        needed = {
            name: _fitting(schema, wanted[name], depth - 1) for name in form.get("required", []) if depth
        }
        rest = {
            name: _fitting(schema, wanted[name], depth - 1)
            for name in wanted
            if depth > 1 and name not in needed
        }
        return st.fixed_dictionaries(needed, optional=rest)
    simple = {"number": numbers, "string": TEXTS, "boolean": [True, False], "null": [None]}
    return st.sampled_from(simple[kind]) if kind in simple else WRONG


def outside(schema: dict[str, Any]) -> st.SearchStrategy[Hostile]:
    """Requests that break the schema by field, body, header, method or path."""
    good = st.sampled_from(list(GOOD))

    @st.composite
    def by_field(draw: st.DrawFn) -> Hostile:
        path = draw(good)
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        names = sorted(
            {name for form in alternatives(schema, content) for name in form.get("properties", {})}
        )
        changed = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        return Hostile(path, json.dumps(GOOD[path] | {name: draw(WRONG) for name in changed}).encode())

    @st.composite
    def by_bytes(draw: st.DrawFn) -> Hostile:
        path = draw(good)
        body = json.dumps(GOOD[path]).encode()
        depth, opening = (
            draw(st.sampled_from([60, 900, 5000, 100_000])),
            draw(st.sampled_from([b"[", b'{"a":'])),
        )
        deep = opening * depth + b"1" + (b"]" if opening == b"[" else b"}") * depth
        name = draw(
            st.sampled_from(
                [b"messages", b"prompt", b"tools", b"chat_template_kwargs", b"structured_outputs"]
            )
        )
        cut = draw(st.integers(0, len(body)))
        written = [deep, body[:-1] + b', "%s": %s}' % (name, deep), body[:cut], body[cut:], body + body]
        return Hostile(path, draw(st.one_of(st.sampled_from(written), st.binary(max_size=200))))

    @st.composite
    def by_head(draw: st.DrawFn) -> Hostile:
        path = draw(good)
        names = draw(st.lists(st.sampled_from(sorted(HEADERS)), max_size=3, unique=True))
        headers = {name: draw(st.sampled_from(HEADERS[name])) for name in names}
        method = draw(st.sampled_from(["POST", "POST", *METHODS]))
        where = draw(st.sampled_from([path, path, *PATHS, "/v1/models", "/health", "/version"]))
        return Hostile(where, json.dumps(GOOD[path]).encode(), method, headers)

    return st.one_of(by_field(), by_field(), by_bytes(), by_head())


def listed_cases() -> Iterator[Hostile]:
    """Yield attacks that have harmed such servers: large numbers of other types, long lists, grammars, other hosts."""
    for path in (CHAT, COMPLETIONS):
        changes: list[dict[str, Any]] = [
            {"n": n} for n in (129, 129.0, "129", "1000", 5000, "5000", 16000.0, 10**9)
        ]
        changes += [{"n": n} for n in (2**70, True, None, [129], {"n": 1}, "1e3", -1, 0)]
        for tokens in ("1000000", 1e22, True, None, [5], 2**70, "17", 17.0):
            changes += [{"max_tokens": tokens}, {"max_completion_tokens": tokens}]
        for name in (
            "best_of",
            "logprobs",
            "top_logprobs",
            "prompt_logprobs",
            "min_tokens",
            "stream_interval",
        ):
            changes += [{name: value} for value in (10**6, "1000000", 1e6, -1, True)]
        for grammar in ("root ::= root root", "root ::= a\na ::= root", "root ::= root"):
            changes += [
                {"structured_outputs": {"grammar": grammar}, "stream": stream}
                for stream in (False, True)
            ]
        many: dict[str, Any] = {
            "stop": ["x"] * 5000,
            "bad_words": ["x"] * 9999,
            "stop_token_ids": [20] * 200_000,
        }
        many |= {
            "allowed_token_ids": [20] * 200_000,
            "logit_bias": {f"{20:0{i + 2}}": 1 for i in range(999)},
        }
        changes += [{name: value} for name, value in many.items()]
        yield from (Hostile(path, json.dumps(GOOD[path] | change).encode()) for change in changes)
        yield Hostile(path, json.dumps(GOOD[path]).encode(), headers={"host": b"evil.example:8000"})
    for change in ({"messages": [7] * 100_000}, {"messages": USER * 100_000}, {"tools": [{}] * 100_000}):
        yield Hostile(CHAT, json.dumps(GOOD[CHAT] | change).encode())
    for prompt in (
        ["hi"] * 1025,
        ["hi"] * 2000,
        [[20]] * 1025,
        [-1] * 100_000,
        [[-1] * 100_000],
        ["hi"] * 200,
    ):
        yield Hostile(COMPLETIONS, json.dumps(GOOD[COMPLETIONS] | {"prompt": prompt, "n": 8}).encode())


def send(address: tuple[str, int], request: Hostile, key: str) -> tuple[int, str, float]:
    """Send a request over a connection of its own; return the answer's status, its text, and the seconds it took."""
    headers = {
        "host": b"127.0.0.1",
        "content-type": b"application/json",
        "authorization": f"Bearer {key}".encode(),
    }
    headers |= {
        "connection": b"close",
        "content-length": str(len(request.body)).encode(),
    } | request.headers
    lines = [f"{request.method} {request.path} HTTP/1.1".encode("utf-8", "surrogatepass")]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    began = time.monotonic()
    with socket.create_connection(address, ANSWER_SECONDS) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + request.body)
        answer = HTTPResponse(connection, method=request.method)
        answer.begin()
        text = answer.read().decode()
    return answer.status, text, time.monotonic() - began


def complaint(request: Hostile, status: int, text: str) -> str:
    """Describe what is wrong with an answer; empty if nothing is."""
    if status >= 500 or "Traceback" in text:
        return f"{status} {text[:300]}"
    if status < 400 or request.method == "HEAD":
        return ""
    try:
        answer = json.loads(text)
        text = answer["error"]["message"] if "error" in answer else answer["detail"]
    except ValueError:
        pass  # the HTTP parser's own refusal is plain text
    return (
        "" if text and "\n" not in text and len(text) < 300 else f"{status}, no sentence: {text[:600]!r}"
    )
