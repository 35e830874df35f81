"""The OpenAI-compatible server on a real engine: the official client, exact ids, refusals, and malformed requests."""

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from generation.engine.engine import Leader
from generation.exact_ids import ChatHistory, Generation
from generation.rollouts.client import ClientRollout, LostKey
from generation.rollouts.client_process import ClientCommand
from generation.rollouts.environments import verifiers
from generation.rollouts.episode import PolicyLLM, RolloutSettings
from generation.rollouts.user_code import UserCodeError
from generation.server import OpenAIServer, ServerSettings, TooManyConversations, connections
from generation.server.dialects import add_event, as_chat, message_in
from tests.conftest import ROOT
from tests.support.bad_requests import GOOD, by_hand, from_schema
from tests.support.colocated import HfPolicy, start_engine, stop
from tests.support.hostile_requests import Hostile, complaint, listed_cases, outside, send
from tests.support.hostile_requests import from_schema as from_schema_hostile
from tests.support.openai_clients import (
    ADD,
    FORCED,
    QUESTION,
    REFUSED,
    SAMPLING,
    STRICT,
    TOOL,
    ask_once,
    ask_twice,
    carried,
    client,
    episode,
    explodes,
    hostile,
    keeps_quiet_about_its_key,
    loses_its_key,
    no_number,
    nothing,
    opened,
    quits,
    root,
    send_all,
    serving,
    sleeps,
    streamed,
    taken,
)
from trainer.engines import start_server


@pytest.fixture(scope="module")
def leader(tiny_qwen2: Path) -> Iterator[Leader]:
    """Yield an engine at version 0, which all servers of this file serve."""
    leader = start_engine(tiny_qwen2, max_model_len=512)
    leader.engine.state.adopt_checkpoint(0)
    yield leader
    stop(leader)


@pytest.fixture(scope="module")
def server(leader: Leader) -> Iterator[OpenAIServer]:
    """Yield a server with the trainer's sampling settings, which needs no key."""
    yield from serving(leader, sampling=SAMPLING, eos_token_ids=(2,), header_keys=True)


@pytest.fixture(scope="module")
def strict(leader: Leader) -> Iterator[OpenAIServer]:
    """Yield a server with a key, low limits and short time-outs."""
    limits = {"max_conversations": 3, "max_body_bytes": 8192, "body_timeout_s": 1.5}
    yield from serving(leader, api_key="secret", header_keys=True, **limits)


@pytest.fixture(scope="module")
def free(leader: Leader) -> Iterator[OpenAIServer]:
    """Yield a server as `hotbunk serve` starts it, with a key; it keeps no exact ids, so chat templates render all turns."""
    yield from serving(leader, api_key="secret", keep_exact_ids=False)


def test_the_server_lists_its_paths_and_listens_on_loopback(
    leader: Leader, server: OpenAIServer, free: OpenAIServer, tiny_qwen2: Path
) -> None:
    # vLLM's server would silence this logger
    assert logging.getLogger("generation").isEnabledFor(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    with httpx.Client(base_url=root(server), timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert [(model["id"], model["root"]) for model in http.get("/v1/models").json()["data"]] == [
            ("policy", "policy")
        ]
        tokens = http.post("/tokenize", json={"messages": QUESTION}).json()["tokens"]
        rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
        assert tokens == tokenizer(rendered)["input_ids"]  # as plain Transformers does
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == rendered
        assert set(http.get("/openapi.json").json()["paths"]) >= {
            "/v1/chat/completions",
            "/v1/completions",
        }
        for hidden in ("/v1/embeddings", "/v1/responses/resp_1"):
            refused = http.get(hidden)
            assert refused.status_code == 404
            assert (
                f"there is no {hidden} on this server, which has /v1/chat"
                in refused.json()["error"]["message"]
            )
    assert client(server).models.retrieve("policy").id == "policy"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'gpt-5' on this server, which has policy"
    ):
        client(server).models.retrieve("gpt-5")
    assert server.base_url.startswith("http://127.0.0.1:")
    assert server.base_url != free.base_url
    port = int(root(server).rpartition(":")[2])
    with pytest.raises(
        ValueError, match=f"cannot listen on 127.0.0.1 port {port}: .*; port 0 takes a free one"
    ):
        asyncio.run(OpenAIServer.start(None, ServerSettings(port=port)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="server does not start with these settings: .*no such parser"):
        next(serving(leader, tool_parser="no such parser"))
    addresses = {
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.laddr.port == port and c.status == "LISTEN"
    }
    assert addresses == {"127.0.0.1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", ["messages as they came", "role and content only"])
def test_an_unmodified_client_is_captured_exactly(
    server: OpenAIServer, leader: Leader, tiny_qwen2: Path, stream: bool, echo: str
) -> None:
    """The official client talks for four turns under one key.

    Every prompt begins with all ids before it, whatever was sampled, and the one trajectory has the log-probabilities
    that plain Transformers computes.
    """
    key = opened(server, leader, seed=7, policy_version=0)
    messages: list[Any] = list(QUESTION)
    ids: list[int] = []
    sampled = 0
    for turn in range(4):
        request = {
            "model": "policy",
            "messages": messages,
            "max_tokens": 12 if turn else 16,
            "tools": [ADD],
        }
        if stream:
            answer = streamed(client(server, key), request)
        else:
            answer = client(server, key).chat.completions.create(**request).choices[0].message
        message = answer.model_dump(exclude_none=True)
        if echo == "role and content only":
            message = {"role": "assistant", "content": message.get("content", "")}
        messages = [*messages, message, {"role": "tool", "content": f"é{turn}", "tool_call_id": "1"}]
        if not stream:
            prompt, generated, logprobs = carried(answer)
            assert prompt[: len(ids)] == ids
            assert len(generated) == len(logprobs)
            ids = prompt + generated
            sampled += len(generated)
    (t,) = taken(server, leader, key)
    assert (t.turns, t.weight_version, t.metrics["server/retemplated"]) == (4, 0, 0.0)
    assert stream or (t.prompt_ids + t.response_ids == ids and sum(t.loss_mask) == sampled)
    plain = HfPolicy(tiny_qwen2).logprobs(t.prompt_ids + t.response_ids, SAMPLING.temperature)[
        len(t.prompt_ids) - 1 :
    ]
    pairs = [(a, b) for a, b, mask in zip(plain, t.logprobs, t.loss_mask, strict=True) if mask]
    assert min(b - a for a, b in pairs) > -1e-4  # top_p makes the tokens that it keeps a little likelier
    assert max(b - a for a, b in pairs) < 0.06


def by_chat(server: OpenAIServer, key: str, stream: bool) -> None:
    """Ask QUESTIONS by the chat interface."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        request = {"model": "policy", "messages": messages}
        if stream:
            answer = streamed(client(server, key), request)
        else:
            answer = client(server, key).chat.completions.create(**request).choices[0].message
        messages.append({"role": "assistant", "content": answer.content or ""})


def by_responses(server: OpenAIServer, key: str, stream: bool, keep: bool = True) -> None:
    """Ask QUESTIONS by Responses; with `keep` the server remembers what was said, else the client resends it."""
    api, previous, items = client(server, key).responses, openai.omit, list[Any]()
    for question in QUESTIONS:
        items = [
            *([] if keep else items),
            {"role": "user", "content": [{"type": "input_text", "text": question}]},
        ]
        request: Any = {"model": "policy", "instructions": "be brief", "store": keep}
        request |= {"input": question if keep else items, "previous_response_id": previous}
        if stream:
            with api.stream(**request) as events:
                *_, last = events  # of a type that depends on vLLM's release where the answer was cut
            answer: Any = last.response
        else:
            answer = api.create(**request)
        if keep:
            assert answer.previous_response_id == (previous or None)
            previous = answer.id
        items += [item.model_dump(exclude_none=True, exclude={"parsed"}) for item in answer.output]


def by_messages(server: OpenAIServer, key: str, stream: bool) -> None:
    """Ask QUESTIONS by Anthropic's Messages."""
    messages: list[Any] = []
    with httpx.Client(base_url=server.base_url, headers={"x-api-key": key}, timeout=60) as http:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            body = {
                "model": "policy",
                "system": "be brief",
                "messages": messages,
                "max_tokens": 4096,
                "stream": stream,
            }
            answer = http.post("/messages", json=body)  # clients of this interface must send max_tokens
            assert answer.status_code == 200, answer.text
            if stream:
                events = [
                    json.loads(line[6:])
                    for line in answer.text.splitlines()
                    if line.startswith("data: {")
                ]
                text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
                content = [{"type": "text", "text": text}]
            else:
                content = answer.json()["content"]
            messages.append({"role": "assistant", "content": content})


QUESTIONS = ["2+2?", "sure?", "really?"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_captured_alike_by_every_interface(
    server: OpenAIServer, leader: Leader, stream: bool
) -> None:
    """Responses and Messages give the ids of the same chat, exact over all turns, with equal seeds."""
    ways = [by_chat, by_responses, functools.partial(by_responses, keep=False), by_messages]
    conversations = []
    for way in ways:
        key = opened(server, leader, seed=11, policy_version=0)
        way(server, key, stream)
        conversations.append(taken(server, leader, key))
    for conversation in conversations:
        assert [(t.turns, t.metrics["server/retemplated"]) for t in conversation] == [(3, 0.0)]
        assert conversation[0].response_ids == conversations[0][0].response_ids
        assert conversation[0].loss_mask == conversations[0][0].loss_mask


@pytest.mark.parametrize("way", ["chat", "responses", "responses by id"])
def test_an_empty_answer_that_the_client_omits_stays_in_the_ids(
    server: OpenAIServer, leader: Leader, tiny_qwen2: Path, way: str
) -> None:
    """Every token ends an answer here and its text is left out, so all answers are empty.

    openai-agents then sends only the questions.
    """
    vocabulary = range(json.loads((tiny_qwen2 / "config.json").read_text())["vocab_size"])
    silent = replace(SAMPLING, stop_token_ids=list(vocabulary))
    key = opened(server, leader, sampling=silent, seed=1, policy_version=0)
    api, previous, asked = client(server, key), openai.omit, list[Any]()
    for question in QUESTIONS:
        asked = [*([] if "id" in way else asked), {"role": "user", "content": question}]
        if way == "chat":
            assert (
                not api.chat.completions.create(model="policy", messages=asked)
                .choices[0]
                .message.content
            )
        else:
            answer = api.responses.create(model="policy", input=asked, previous_response_id=previous)
            assert answer.output_text == ""
            previous = answer.id if "id" in way else previous
    (one,) = taken(server, leader, key)
    assert (one.turns, sum(one.loss_mask), one.metrics["server/retemplated"]) == (3, 3, 0.0)


CALL = {"name": "add", "arguments": {"a": 4}}


def test_calls_of_tools_stay_in_one_trajectory_of_responses(leader: Leader) -> None:
    """The template spells a call differently than it was sampled, and the client does not repeat it."""
    for server in serving(leader):
        key = opened(server, leader)
        api = client(server, key)
        previous, sent = openai.omit, "2+2?"
        wanted = {"structured_outputs": {"choice": [f"<tool_call>{json.dumps(CALL)}  </tool_call>"]}}
        for _ in range(2):
            answer: Any = api.responses.create(
                model="policy",
                input=sent,
                tools=[TOOL],
                previous_response_id=previous,
                extra_body=wanted,
            )
            (call,) = answer.output
            previous = answer.id
            sent: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
            assert {"name": call.name, "arguments": json.loads(call.arguments)} == CALL
        (one,) = taken(server, leader, key)
        assert (one.turns, one.metrics["server/retemplated"]) == (2, 0.0)
        with pytest.raises(
            openai.NotFoundError, match="is not known: responses are stored with their trajectory"
        ):
            api.responses.create(model="policy", input="?", previous_response_id=answer.id)


def test_calls_in_messages_are_recognised_when_they_come_back(leader: Leader) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    use = {"type": "tool_use", "id": "1", "name": "add", "input": CALL["arguments"]}
    blocks: list[dict[str, Any]] = []
    pieces = [{"partial_json": '{"a"'}, {"partial_json": ": 4}"}]
    for event in (
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "so"}},
        {"type": "content_block_start", "content_block": use | {"input": {}}},
        *({"type": "content_block_delta", "delta": piece} for piece in pieces),
    ):
        add_event(blocks, event)
    handler = AnthropicServingMessages.__new__(AnthropicServingMessages)
    handler._merge_inline_system = False
    content_blocks = [{"type": "text", "text": "so"}, use]
    messages = [*QUESTION, {"role": "assistant", "content": content_blocks}, *QUESTION]
    chat = as_chat(AnthropicMessagesRequest(model="policy", max_tokens=1, messages=messages), handler)
    for content in (content_blocks, blocks):
        history = ChatHistory(None)
        message = message_in("/v1/messages", {"content": content})
        history.record(QUESTION, message, Generation([1], [0.0], prompt_ids=[2]))
        prefix = history.known_prefix(chat["messages"])
        assert prefix is not None and (prefix.ids, prefix.messages) == ([2, 1], 2)


AGENT = """
import json, time, urllib.request
from hotbunk_client import serve

def agent(base_url, api_key, model, row):
    messages = list(row["prompt"])
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    for _ in range(2):
        body = json.dumps({"model": model, "messages": messages}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "sure?"}]
    if row["kind"] == "hangs":
        time.sleep(600)
    return ({"right": float(row["kind"]), "short": 0.5}, {"looks": 2})

serve(agent)
"""


def test_level_6_an_agent_may_run_in_a_python_of_its_own(
    leader: Leader, tiny_qwen2: Path, tmp_path: Path
) -> None:
    """The agent has only the standard library; a failure costs its episode, and leaves no process."""
    shutil.copy(ROOT / "generation" / "rollouts" / "elsewhere" / "hotbunk_client.py", tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    command = ClientCommand(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = ['{tmp_path}']; import agent"]
    )
    (done,) = episode(leader, tiny_qwen2, command, kind="0.25")
    assert (done.turns, done.metrics["client/looks"], done.metrics["server/retemplated"]) == (
        2,
        2.0,
        0.0,
    )
    assert (done.reward, done.reward_parts) == (0.75, {"right": 0.25, "short": 0.5})
    with pytest.raises(
        ValueError, match="the client returned as 'right' nan, which is not a finite float32"
    ):
        episode(leader, tiny_qwen2, command, kind="nan")
    with pytest.raises(TimeoutError, match="the client did not finish within 3 s"):
        episode(leader, tiny_qwen2, command, 3.0, kind="hangs")
    assert not [
        process for process in psutil.Process().children() if str(tmp_path) in str(process.cmdline())
    ]


REFUSED_ELSEWHERE: list[tuple[str, dict[str, Any], str]] = [
    (
        "/responses",
        {"temperature": 0.5},
        "temperature is 0.5, but the policy is trained on samples drawn with 0.8",
    ),
    ("/responses", {"frequency_penalty": 0.5}, "frequency_penalty is 0.5, but"),
    (
        "/responses",
        {"max_output_tokens": 17},
        "max_output_tokens is 17, but answers are trained up to 16 tokens",
    ),
    (
        "/responses",
        {"text": {"format": {"type": "json_object"}}},
        "text.format is {'type': 'json_object'}: it forces",
    ),
    (
        "/responses",
        {"tools": [TOOL], "tool_choice": "required"},
        "tool_choice is 'required': it forces the answer's",
    ),
    (
        "/responses",
        {"tools": [{"type": "web_search"}]},
        "a tool is of type 'web_search', but this server runs no tools",
    ),
    (
        "/responses",
        {"background": True},
        "background is set, but this server stores only responses: use previous_",
    ),
    ("/messages", {"temperature": 0.5}, "temperature is 0.5, but"),
    (
        "/messages",
        {"tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "any"}},
        "tool_choice is {",
    ),
]


@pytest.mark.parametrize(("path", "changes", "sentence"), REFUSED_ELSEWHERE)
def test_refusals_by_other_interfaces_use_their_names_of_settings(
    server: OpenAIServer, path: str, changes: dict[str, Any], sentence: str
) -> None:
    for stream in (False, True):
        body = {"model": "policy", "input": "2+2?", "messages": QUESTION, "stream": stream} | changes
        body |= {"max_tokens": 16} if path == "/messages" else {}
        refused = httpx.post(f"{server.base_url}{path}", json=body, timeout=60)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["message"].startswith(sentence)


def test_metrics_need_the_servers_own_key(free: OpenAIServer, leader: Leader) -> None:
    """Metrics cover all trajectories, and a trajectory's key opens only its own."""
    key = opened(free, leader)
    client(free, key).completions.create(model="policy", prompt="?", max_tokens=1)
    for bearer, status in (("secret", 200), (key, 401), ("no", 401)):
        answer = httpx.get(f"{root(free)}/metrics", headers={"authorization": f"Bearer {bearer}"})
        assert answer.status_code == status
        assert status == 401 or "\nhotbunk_trajectories 1.0\nhotbunk_weight_version 0.0\n" in _figures(
            answer.text
        )
    assert (
        'hotbunk_requests_total{path="/v1/completions",status="200"}'
        in httpx.get(f"{root(free)}/metrics", headers={"authorization": "Bearer secret"}).text
    )
    taken(free, leader, key)


def _figures(text: str) -> str:
    """Return the lines of Prometheus metrics without comments."""
    return "\n" + "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"


def test_tools_that_change_begin_another_trajectory(server: OpenAIServer, leader: Leader) -> None:
    """The ids so far do not contain the tools, so continuing them would hide the tools from the policy."""
    key = opened(server, leader)
    message = (
        client(server, key).chat.completions.create(model="policy", messages=QUESTION).choices[0].message
    )
    messages: list[Any] = [*QUESTION, message.model_dump(exclude_none=True), *QUESTION]
    answer = client(server, key).chat.completions.create(model="policy", messages=messages, tools=[ADD])
    tokens = httpx.post(f"{root(server)}/tokenize", json={"messages": messages, "tools": [ADD]})
    assert tokens.status_code == 400  # a request for certain ids is refused
    assert "do not belong to the prefix ids" in tokens.text
    first, second = taken(server, leader, key)
    assert second.prompt_ids == carried(answer.choices[0].message)[0]
    assert (first.turns, second.turns, first.metrics["server/retemplated"]) == (1, 1, 1.0)


def test_concurrent_conversations_do_not_mix(server: OpenAIServer, leader: Leader) -> None:
    """Twelve conversations have two turns each, and equal seeds give equal answers."""

    async def talk(key: str, word: str) -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=0) as api:
            messages: list[Any] = [{"role": "user", "content": word}]
            for _ in range(2):
                answer = await api.chat.completions.create(
                    model="policy", messages=messages, extra_headers={"x-hotbunk-trajectory": key}
                )
                message = {"role": "assistant", "content": answer.choices[0].message.content or ""}
                messages += [message, {"role": "user", "content": word}]

    async def everybody(keys: list[str]) -> None:
        await asyncio.gather(*(talk(key, f"word {i % 6}") for i, key in enumerate(keys)))

    keys = [opened(server, leader, seed=i % 6) for i in range(12)]
    asyncio.run(everybody(keys))
    captured = [taken(server, leader, key) for key in keys]
    assert [len(parts) for parts in captured] == [1] * 12
    assert all(parts[0].turns == 2 for parts in captured)
    assert [parts[0].response_ids for parts in captured[:6]] == [
        parts[0].response_ids for parts in captured[6:]
    ]
    assert len({tuple(parts[0].response_ids) for parts in captured}) == 6
    asyncio.run(everybody(["a key of one's own"]))  # the header alone opens a trajectory
    assert taken(server, leader, "a key of one's own")[0].turns == 2


def test_streams_and_completions_carry_the_sampled_ids(server: OpenAIServer, leader: Leader) -> None:
    chunks = list(
        client(server).chat.completions.create(model="policy", messages=QUESTION, stream=True, seed=3)
    )
    prompt, generated, logprobs = carried(
        next(c for c in chunks if c.choices[0].finish_reason).choices[0].delta
    )
    message = (
        client(server)
        .chat.completions.create(model="policy", messages=QUESTION, seed=3)
        .choices[0]
        .message
    )
    assert carried(message) == (prompt, generated, logprobs)
    assert (message.content or "") == "".join(c.choices[0].delta.content or "" for c in chunks)
    answer = client(server).completions.create(
        model="policy", prompt=[[20, 21], [22]], n=2, max_tokens=5
    )
    assert [carried(choice)[0] for choice in answer.choices] == [[20, 21], [20, 21], [22], [22]]
    assert all(len(carried(choice)[1]) == len(carried(choice)[2]) <= 5 for choice in answer.choices)


def test_tool_calls_are_captured_and_recognised(free: OpenAIServer, leader: Leader) -> None:
    """Call are forced, streamed or not; the template spells a call differently than it was sampled."""
    for stream in (False, True):
        key = opened(free, leader)
        messages: list[Any] = list(QUESTION)
        for _ in range(2):
            request = {"model": "policy", "messages": messages, "tools": [ADD], "tool_choice": FORCED}
            if stream:
                answer = streamed(client(free, key), request)
            else:
                answer = client(free, key).chat.completions.create(**request).choices[0].message
            (call,) = answer.tool_calls or []
            assert call.function.name == "add"
            sent_call = {
                "id": call.id,
                "type": "function",
                "function": {"name": "add", "arguments": call.function.arguments},
            }
            messages += [{"role": "assistant", "content": None, "tool_calls": [sent_call]}]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"}]
        trajectories = taken(free, leader, key)
        assert sum(t.turns for t in trajectories) == 2


def test_a_required_prefix_is_kept_over_http(
    server: OpenAIServer, free: OpenAIServer, tiny_qwen2: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    first = tokenizer(
        tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    )["input_ids"]
    # An id that no text encodes to
    prefix = [*first, *tokenizer("it's")["input_ids"], tokenizer.bos_token_id, 2]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "it's"},
        {"role": "user", "content": "sure?"},
    ]
    asked = {"model": "policy", "messages": messages, "required_prefix_token_ids": prefix}
    with httpx.Client(base_url=root(server), timeout=60) as http:
        tokens = http.post("/tokenize", json=asked).json()
        assert tokens["tokens"][: len(prefix)] == prefix and tokens["count"] == len(tokens["tokens"])
        tail = tokenizer.decode(tokens["tokens"][len(prefix) :])
        assert tail == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
        answer = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert answer["prompt_token_ids"] == tokens["tokens"]
        plain = http.post("/tokenize", json=asked | {"required_prefix_token_ids": []}).json()["tokens"]
        assert plain[: len(prefix)] != prefix  # an empty prefix has no effect
        foreign = asked | {"messages": [{"role": "user", "content": "3+3?"}, *messages[1:]]}
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = http.post(path, json=foreign)
            assert refused.status_code == 400
            assert "do not belong to the prefix ids: they say" in refused.json()["error"]["message"]
    with httpx.Client(
        base_url=root(free), headers={"authorization": "Bearer secret"}, timeout=60
    ) as http:
        refused = http.post("/v1/chat/completions", json=asked)
        assert (refused.status_code, "does not keep exact ids" in refused.text) == (400, True)
        carrying = [
            *QUESTION,
            {"role": "assistant", "content": "it's", "prompt_token_ids": first},
            *QUESTION,
        ]
        body = {"model": "policy", "messages": carrying, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    REFUSED,
)
def test_sampling_that_is_not_trained_on_is_refused(
    server: OpenAIServer, changes: dict[str, Any], status: int, sentence: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            client(server).chat.completions.create(
                **({"model": "policy", "messages": QUESTION, "stream": stream} | changes)
            )
        assert caught.value.status_code == status
        assert sentence in str(caught.value)


def test_strict_tools_are_accepted_in_training_but_not_enforced(
    leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    """Several frameworks send them by default. Answers are sampled freely; a metric and one warning say so."""
    from vllm.tool_parsers import utils as tool_parsers

    for server in serving(leader, sampling=SAMPLING, eos_token_ids=(2,)):
        key = opened(server, leader)

        def answer(tool: Any, server: OpenAIServer = server, key: str = key, **asked: Any) -> Any:
            return streamed(
                client(server, key), {"model": "policy", "messages": QUESTION, "tools": [tool], **asked}
            )

        free, alone = answer(ADD, seed=5), answer(ADD, seed=5, parallel_tool_calls=False)
        for strict in (STRICT, STRICT):
            answer(strict)
        assert (alone.content, alone.tool_calls) == (free.content, free.tool_calls)
        one, same, *rest = taken(server, leader, key)
        assert same.response_ids == one.response_ids
        # Of `parallel_tool_calls: false`, too, vLLM makes a grammar, but not in 0.31.
        one_call_alone = "parallel_tool_calls" in inspect.getsource(tool_parsers)
        assert [t.metrics.get("server/strict_ignored") for t in (one, same, *rest)] == [
            2 + one_call_alone,
            None,
            None,
            None,
        ]
    warnings = [
        record.message for record in caplog.records if "are not enforced in training" in record.message
    ]
    assert len(warnings) == 1 and len(warnings[0]) < 300


def test_unreadable_tool_calls_are_logged_in_a_line_and_counted(
    free: OpenAIServer, leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the parser's tracebacks would fill the screen of a policy that has not learned to call tools."""
    key = opened(free, leader)
    broken = {"structured_outputs": {"choice": ["<tool_call>{"]}}
    for _ in range(2):
        answer = client(free, key).chat.completions.create(
            model="policy", messages=QUESTION, tools=[ADD], extra_body=broken
        )
        assert answer.choices[0].message.content == "<tool_call>{"
    assert [t.metrics.get("server/unread_calls") for t in taken(free, leader, key)] == [2.0, None]
    warnings = [record for record in caplog.records if "parser" in record.name]
    assert [(record.exc_info, record.message[:37]) for record in warnings] == [
        (None, "an answer's tool calls cannot be read")
    ]


def test_only_the_servers_key_and_open_trajectories_keys_are_accepted(
    free: OpenAIServer, leader: Leader
) -> None:
    trajectory_key = opened(free, leader)
    for key, served in (("secret", True), ("wrong", False), (trajectory_key, True)):
        if served:
            assert client(free, key).models.list().data
        else:
            with pytest.raises(
                openai.AuthenticationError, match="API key is missing, or is not this server's"
            ):
                client(free, key).models.list()
    assert httpx.get(f"{root(free)}/health").status_code == 200
    assert taken(free, leader, trajectory_key) == []
    with pytest.raises(openai.AuthenticationError):
        client(free, trajectory_key).models.list()
    with pytest.raises(KeyError):
        taken(free, leader, trajectory_key)


def test_a_sleeping_engine_or_an_update_is_answered_with_503(
    server: OpenAIServer, leader: Leader
) -> None:
    engine, thread = leader.engine, leader.thread

    def refusal(**changes: Any) -> str:
        with pytest.raises(openai.InternalServerError) as caught:
            client(server).chat.completions.create(
                **({"model": "policy", "messages": QUESTION} | changes)
            )
        assert caught.value.status_code == 503
        return str(caught.value)

    engine.state.begin_sync()
    assert "being updated" in refusal()
    engine.state.finish_sync(1)
    key = opened(server, leader, policy_version=0)
    with pytest.raises(
        openai.InternalServerError, match="holds weights of version 1, the policy is at version 0"
    ):
        client(server, key).chat.completions.create(model="policy", messages=QUESTION)
    assert taken(server, leader, key) == []
    engine.state.version = 0
    thread.run(engine.sleep(level=1), 30, "sleeping")
    assert "asleep" in refusal() and "asleep" in refusal(stream=True)
    assert httpx.get(f"{root(server)}/health").status_code == 200
    thread.run(engine.wake(), 30, "waking")
    assert client(server).chat.completions.create(model="policy", messages=QUESTION).choices[0].message


def test_an_answer_cut_off_by_sleep_is_an_error_and_not_captured(
    free: OpenAIServer, leader: Leader
) -> None:
    key = opened(free, leader)
    endless = {"ignore_eos": True, "min_tokens": 400}
    chunks = client(free, key).chat.completions.create(
        model="policy", messages=QUESTION, stream=True, extra_body=endless
    )
    next(chunks)
    leader.thread.run(leader.engine.sleep(level=1), 30, "sleeping")
    with pytest.raises(openai.APIError, match="put to sleep before the answer was finished"):
        list(chunks)
    leader.thread.run(leader.engine.wake(), 30, "waking")
    assert taken(free, leader, key) == []


def test_a_stopped_server_leaves_no_socket(leader: Leader) -> None:
    servers = serving(leader)
    server = next(servers)
    # An idle keep-alive connection does not keep the server from stopping.
    with httpx.Client(base_url=root(server), timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert next(servers, None) is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{root(server)}/health")


def test_level_6_any_client_is_a_rollout(leader: Leader, tiny_qwen2: Path) -> None:
    (t,) = episode(leader, tiny_qwen2, ask_twice)
    assert (t.prompt_index, t.sample_index, t.turns, t.reward, t.weight_version) == (3, 1, 2, 0.5, 0)
    # The seed decides the answer
    assert episode(leader, tiny_qwen2, ask_twice)[0].response_ids == t.response_ids
    (t,) = episode(leader, tiny_qwen2, ask_once)
    assert (t.turns, t.reward) == (1, 0.0)


def test_level_6_a_clients_failure_is_raised_by_its_episode(leader: Leader, tiny_qwen2: Path) -> None:
    for run, error, sentence in (
        (nothing, ValueError, "must use base_url and api_key"),
        (explodes, ZeroDivisionError, "mine"),
        (sleeps, TimeoutError, "did not finish within 0.3 s"),
        (no_number, ValueError, "the client returned str, which is not a number"),
        (quits, UserCodeError, "SystemExit: 3"),
    ):
        with pytest.raises(error, match=sentence):
            episode(leader, tiny_qwen2, run, timeout_s=0.3 if run is sleeps else 60)


def test_level_6_a_hostile_client_fails_only_its_own_episode(leader: Leader, tiny_qwen2: Path) -> None:
    """Good clients beside hostile ones of all kinds get the tokens that they get without them, and so do later ones."""
    errors = {
        "hangs": (TimeoutError, "the client did not finish within 1 s"),
        "answers late": (TimeoutError, "the client did not finish within 1 s"),
        "exits": (UserCodeError, "SystemExit: 3"),
        "floods": (ValueError, "flooded"),
        "returns NaN": (ValueError, "the client returned nan, which is not a finite float32"),
    }
    tokenizer, late = AutoTokenizer.from_pretrained(tiny_qwen2), threading.Event()
    settings = RolloutSettings(2, SAMPLING, policy_version=0, seed=1, step=2)

    async def episodes(*kinds: str) -> list[Any]:
        """Results by place: good clients' answers, hostile ones' errors, and the answers of a later good client."""
        patient, hurried = (
            ClientRollout(hostile, start_server, 60.0),
            ClientRollout(hostile, start_server, 1.0),
        )

        async def one(place: int, kind: str) -> Any:
            llm = PolicyLLM(leader.engine, tokenizer, settings, place, 0, [5])
            function = hurried if kind in ("hangs", "answers late") else patient
            (done,) = await function(llm, {"question": "2+2?", "kind": kind, "late": late}, SAMPLING)
            return done.response_ids, done.reward

        try:
            results = list(
                await asyncio.gather(*map(one, range(len(kinds)), kinds), return_exceptions=True)
            )
            late.set()
            return [*results, await one(len(kinds), "good")]
        finally:
            await patient.aclose()
            await hurried.aclose()

    kinds = ["good", *errors, "good"]
    results = leader.thread.run(episodes(*kinds), 120, "hostile episodes")
    alone = leader.thread.run(episodes(*["good"] * len(kinds)), 120, "good episodes")
    for place, kind in enumerate([*kinds, "good"]):
        if kind == "good":
            assert results[place] == alone[place]
        else:
            assert isinstance(results[place], errors[kind][0]) and errors[kind][1] in str(
                results[place]
            ), kind


SUMS = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


def test_level_6_runs_an_environment_of_verifiers_in_its_own_python(
    leader: Leader, tiny_qwen2: Path
) -> None:
    """The real package, installed by scripts/try_ecosystem.sh, provides tasks, rewards and metrics."""
    python = ROOT / "runs" / "ecosystem" / "verifiers" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"verifiers is not installed in {python}: run scripts/try_ecosystem.sh")
    env = {"PYTHONPATH": str(ROOT / "scripts" / "ecosystem")}
    # For uv's package index
    env |= {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
    args = {"taskset": {"size": 3}, "agent": SUMS}
    settings = {
        "environment": "hotbunk_sums",
        "args": args,
        "python": str(python),
        "workers": 1,
        "env": env,
    }
    rows = verifiers.rows(settings | {"tasks": 100})
    assert [(row["prompt"], row["answer"]) for row in rows] == [
        (f"What is {n}+3?", str(n + 3)) for n in range(3)
    ]
    (done,) = episode(leader, tiny_qwen2, verifiers.command(settings), 300.0, **rows[1])
    assert set(done.reward_parts) == {"right", "even"} and done.reward == sum(done.reward_parts.values())
    assert done.metrics["client/length"] == len(done.text or "") or done.finish_reason != "stop"


def statuses(base_url: str, headers: list[dict[str, str]], path: str = "/completions") -> list[int]:
    """Send a correct request with each of these headers, and return the statuses."""
    body = {"model": "policy", "prompt": "hi", "max_tokens": 2}
    return [
        httpx.post(f"{base_url}{path}", json=body, headers=header, timeout=60).status_code
        for header in headers
    ]


def test_in_training_only_keys_of_open_trajectories_are_answered(
    leader: Leader, tiny_qwen2: Path
) -> None:
    """Requests without such a key during an episode are refused and not counted, and do not change the episode."""
    by_kind: dict[str, list[int]] = {}
    bearers = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic wrong"},
    ]

    def visited(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
        open_url = f"http://{httpx.URL(base_url).netloc.decode()}/v1"
        ask_once(open_url, api_key, model, row)
        bearer = {"authorization": f"Bearer {api_key}"}
        by_kind["strangers"] = statuses(open_url, [*bearers, {"x-hotbunk-trajectory": "mine"}])
        by_kind["elsewhere"] = statuses(f"{open_url[:-3]}/trajectories/{'0' * 32}/v1", [bearer, {}])
        by_kind["by header"] = statuses(
            base_url, [bearer | {"x-hotbunk-trajectory": key} for key in ("mine", api_key)]
        )
        ask_once(base_url, api_key, model, row)
        by_kind["health"] = [httpx.get(f"{open_url[:-3]}/health").status_code]
        return 1.0

    trajectories = episode(leader, tiny_qwen2, visited)
    assert by_kind == {
        "strangers": [401] * 5,
        "elsewhere": [404] * 2,
        "by header": [400] * 2,
        "health": [200],
    }
    assert sum(t.turns for t in trajectories) == 2


def test_a_client_that_loses_its_key_fails_its_episode(leader: Leader, tiny_qwen2: Path) -> None:
    with pytest.raises(
        LostKey, match="the client lost its key: 1 of its requests came without the api_key"
    ):
        episode(leader, tiny_qwen2, keeps_quiet_about_its_key)
    with pytest.raises(
        openai.AuthenticationError, match="the key of this trajectory was lost: send the api_key"
    ):
        episode(leader, tiny_qwen2, loses_its_key)


def test_no_request_takes_the_room_of_other_trajectories(strict: OpenAIServer, leader: Leader) -> None:
    """Bad requests open no trajectory. Good ones open three, which is the limit; the program may open three more."""
    bearer = {"authorization": "Bearer secret"}
    bodies = [b"", b"{", b"[]", b"{}", b'{"prompt": 7}', b'{"model": "policy", "prompt": "x", "n": 0}']
    bodies += [b'{"model": "policy", "prompt": "x", "logprobs": 1000000}']  # only the engine refuses it
    with httpx.Client(headers=bearer) as http:
        for i, body in enumerate(bodies):
            key = {"x-hotbunk-trajectory": f"bad {i}", "content-type": "application/json"}
            assert (
                http.post(f"{strict.base_url}/completions", content=body, headers=key).status_code == 400
            )
    assert statuses(strict.base_url, [{"x-hotbunk-trajectory": "a"}]) == [401]
    assert statuses(strict.base_url, [bearer | {"x-hotbunk-trajectory": key} for key in "aabcd"]) == [
        200
    ] * 4 + [429]
    keys = [opened(strict, leader) for _ in range(3)]
    with pytest.raises(TooManyConversations, match="3 trajectories are open, which is the limit"):
        opened(strict, leader)
    both = {"authorization": f"Bearer {keys[0]}", "x-hotbunk-trajectory": "e"}
    guessed = {"authorization": "Bearer a"}  # the key of a header, which anybody may guess
    assert statuses(strict.base_url, [both, guessed, guessed | {"x-hotbunk-trajectory": "a"}]) == [
        403,
        401,
        401,
    ]
    assert [sum(t.turns for t in taken(strict, leader, key)) for key in "abc"] == [2, 1, 1]
    assert [taken(strict, leader, key) for key in keys] == [[]] * 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bounds_hold_for_numbers_of_every_json_type(
    server: OpenAIServer, free: OpenAIServer, path: str
) -> None:
    """vLLM's parser converts "129" and 129.0 to 129, which a check before the parser would not see."""

    def answer_to(server: OpenAIServer, **changes: Any) -> tuple[int, str]:
        request = {"model": "policy", "prompt": "hi", "messages": QUESTION, "max_tokens": 2} | changes
        request.pop("prompt" if "chat" in path else "messages")
        key = {"authorization": "Bearer secret"}
        response = httpx.post(f"{root(server)}{path}", json=request, headers=key, timeout=60)
        return response.status_code, response.json().get("error", {}).get("message", "")

    for n in (129, 129.0, "129", "1000", 5000, "5000", 16000.0):
        assert answer_to(free, n=n) == (400, f"n is {int(n)}, but must be at most 128")
    for n in (True, "2", 2.0):
        assert answer_to(free, n=n)[0] == 200
    for name in ("max_tokens", *(["max_completion_tokens"] if "chat" in path else [])):
        for tokens in (17, "17", 17.0, 2**40):
            sentence = f"{name} is {int(tokens)}, but answers are trained up to 16 tokens"
            assert answer_to(server, **{name: tokens}) == (400, sentence)
        assert answer_to(server, **{name: "16"})[0] == 200
    assert answer_to(server, use_beam_search="yes")[1].startswith("use_beam_search is set")
    assert answer_to(server, use_beam_search="no", temperature="0.8", top_p=None)[0] == 200
    assert answer_to(server, temperature="0.7")[1].startswith("temperature is 0.7, but")
    for number in (2**64, "18446744073709551616"):
        assert (
            answer_to(free, stream_interval=number)[1]
            == "stream_interval is 18446744073709551616, which does not fit in 64 bits"
        )
    assert answer_to(free, best_of=3)[1].startswith("best_of is 3, but")
    assert answer_to(free, bad_words=["x"] * 5000) == (
        400,
        "bad_words has 5000 entries, but may have at most 4096",
    )
    if path == "/v1/completions":
        sentence = "9 prompts with n 114 ask for more than 1024 answers: split them up"
        assert answer_to(free, prompt=["hi"] * 9, n="114") == (400, sentence)


def test_a_grammar_that_no_token_fits_is_the_clients_error(free: OpenAIServer) -> None:
    api = client(free, "secret")
    extra = {"structured_outputs": {"grammar": "root ::= root root"}}
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError,
            match="no token fits the grammar of structured_outputs or response_format",
        ):
            api.chat.completions.create(
                model="policy", messages=QUESTION, stream=stream, extra_body=extra
            )
        with pytest.raises(
            openai.BadRequestError,
            match="no token fits the grammar of structured_outputs or response_format",
        ):
            api.completions.create(model="policy", prompt="hi", stream=stream, extra_body=extra)


@pytest.mark.parametrize("depth", [500, 900])
def test_a_request_nested_too_deeply_for_vllm_is_refused(server: OpenAIServer, depth: int) -> None:
    """Python's JSON parser accepts this depth."""
    turn = f'{{"role": "user", "content": "1", "x": {"[" * depth}{"]" * depth}}}'
    for path, name in (
        ("/chat/completions", "messages"),
        ("/messages", "messages"),
        ("/responses", "input"),
    ):
        body = f'{{"model": "policy", "max_tokens": 1, "{name}": [{turn}]}}'
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.base_url}{path}", content=body, headers=headers, timeout=60)
        assert (
            answer.status_code == 200
            or answer.json()["error"]["message"] == "the request is nested too deeply"
        )


def test_requests_with_a_foreign_host_are_refused_on_loopback(server: OpenAIServer) -> None:
    port = httpx.URL(server.base_url).port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.e.com",
        "10.0.0.1",
    ):
        answer = httpx.get(f"{root(server)}/v1/models", headers={"host": host})
        assert (answer.status_code, "listens on loopback" in answer.text) == (403, True)
    for host in ("127.0.0.1", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "127.0.0.2:8000"):
        assert httpx.get(f"{root(server)}/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"content-length: 1152921504606846976", b"{", 413),
        (b"content-length: 8193", b"", 413),
        (b"transfer-encoding: chunked", b"4000\r\n" + b" " * 0x4000 + b"\r\n", 413),
        (b"content-length: 8192", b"{", 408),
        (b"transfer-encoding: chunked", b"1\r\n{\r\n", 408),
    ],
)
def test_a_body_is_limited_in_size_and_time(
    strict: OpenAIServer, head: bytes, body: bytes, status: int
) -> None:
    """The connection ends with the answer: the server does not wait for the rest."""
    address = ("127.0.0.1", httpx.URL(strict.base_url).port or 0)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address, timeout=120)) for _ in GOOD]
        for connection, path in zip(connections, GOOD, strict=True):
            start = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
            connection.sendall(
                start.encode() + b"content-type: application/json\r\n%s\r\n\r\n%s" % (head, body)
            )
        for connection in connections:
            answer = b"".join(iter(functools.partial(connection.recv, 65536), b""))
            assert answer.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in answer.lower()
            assert (
                b"larger than 8,192 bytes" if status == 413 else b"not complete after 1.5 s"
            ) in answer


HEAD = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


def until_closed(connection: socket.socket) -> bytes:
    """Receive until the connection is closed."""
    return b"".join(iter(functools.partial(connection.recv, 65536), b""))


def connected(server: OpenAIServer, *parts: bytes) -> socket.socket:
    """Open a connection, and send these parts."""
    connection = socket.create_connection(
        ("127.0.0.1", httpx.URL(server.base_url).port or 0), timeout=60
    )
    for part in parts:
        connection.sendall(part)
    return connection


def answered(connection: socket.socket) -> bool:
    """Read an answer to its end, and tell whether it lists the models."""
    data = b""
    while not data.endswith(b"]}]}"):
        data += connection.recv(65536)
    return data.startswith(b"HTTP/1.1 200")


def test_missing_headers_time_out_only_their_own_connection(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers of a second request time out as well, and headers that come byte by byte.

    Idle connections between two requests, and slow bodies or answers, are not closed.
    """
    monkeypatch.setattr(connections, "HEADER_SECONDS", 1.0)
    asked = {"model": "policy", "prompt": "hi", "max_tokens": 300, "stream": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    begin = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    begin += b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    for server in serving(leader):
        uploading, streaming = connected(server, begin, body[:9]), connected(server, begin, body)
        idle, second = connected(server, HEAD, b"\r\n"), connected(server, HEAD, b"\r\n")
        assert answered(idle) and answered(second) and streaming.recv(12) == b"HTTP/1.1 200"
        second.sendall(HEAD)
        silent, half, dripping = connected(server), connected(server, HEAD), connected(server, HEAD)
        dripping.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            while True:
                dripping.sendall(b"x: y\r\n")
                with contextlib.suppress(TimeoutError):
                    if dripping.recv(1) == b"":
                        break
        assert [until_closed(connection) for connection in (silent, half, second)] == [b""] * 3
        idle.sendall(HEAD + b"\r\n")
        uploading.sendall(body[9:])
        assert answered(idle)
        assert all(b"data: [DONE]" in until_closed(connection) for connection in (uploading, streaming))
        for connection in (uploading, streaming, idle, second, silent, half, dripping):
            connection.close()


def test_connections_beyond_the_limit_are_told_to_try_again_later(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 2)
    for server in serving(leader):
        held = [connected(server) for _ in range(2)]
        with connected(server) as third:
            answer = until_closed(third)
        assert (
            answer.startswith(b"HTTP/1.1 503")
            and b"retry-after: 1" in answer
            and b"try again later" in answer
        )
        for connection in held:
            connection.close()
        assert client(server).models.retrieve("policy").id == "policy"


def test_hostile_requests_are_answered_with_one_sentence(
    server: OpenAIServer, free: OpenAIServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """HOTBUNK_HOSTILE_REQUESTS of them (150 by default) are drawn from a fixed seed; half of them fit the schema."""
    count = int(os.environ.get("HOTBUNK_HOSTILE_REQUESTS", "150"))
    before = (
        client(server)
        .chat.completions.create(model="policy", messages=QUESTION, seed=1)
        .choices[0]
        .message
    )
    schema = httpx.get(f"{root(server)}/openapi.json").json()
    tally: Counter[str] = Counter()

    def ask(target: OpenAIServer, request: Hostile) -> None:
        status, text, seconds = send(
            ("127.0.0.1", httpx.URL(target.base_url).port or 0), request, "secret"
        )
        tally[f"{status // 100}xx"] += 1
        tally["longest, ms"] = max(tally["longest, ms"], round(1000 * seconds))
        assert not complaint(request, status, text), (complaint(request, status, text), request)

    quick = settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )

    def ask_drawn(requests: st.SearchStrategy[Hostile], examples: int) -> None:
        @settings(quick, max_examples=examples)
        @given(requests, st.sampled_from([server, free]))
        def run(request: Hostile, target: OpenAIServer) -> None:
            tally["drawn"] += 1
            ask(target, request)

        run()

    ask_drawn(from_schema_hostile(schema), (count + 1) // 2)
    ask_drawn(outside(schema), count // 2)
    for request in listed_cases():
        for target in (server, free):
            ask(target, request)
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out, output.err[-3000:]
    after = (
        client(server)
        .chat.completions.create(model="policy", messages=QUESTION, seed=1)
        .choices[0]
        .message
    )
    assert carried(after) == carried(before)
    print(dict(tally))


def test_malformed_requests_are_4xx_and_the_engine_survives(
    server: OpenAIServer, free: OpenAIServer
) -> None:
    """Requests from the schema go to the server that passes all on to vLLM, those written by hand also to the other."""
    before = (
        client(server)
        .chat.completions.create(model="policy", messages=QUESTION, seed=1)
        .choices[0]
        .message
    )
    schema = httpx.get(f"{root(server)}/openapi.json").json()
    made, written = list(from_schema(schema)), list(by_hand())
    assert len(made) > 150 and len(written) > 150
    answers = send_all(free, [*made, *written], {"authorization": "Bearer secret"}) + send_all(
        server, written, {}
    )
    wrong = [(r, a.status_code, a.text[:200]) for r, a in answers if not 400 <= a.status_code < 500]
    assert wrong == []
    assert all(a.json()["error"]["message"] for r, a in answers if r.method == "POST")
    after = (
        client(server)
        .chat.completions.create(model="policy", messages=QUESTION, seed=1)
        .choices[0]
        .message
    )
    assert carried(after) == carried(before)
