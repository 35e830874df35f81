"""Servers on a test engine, and the official client's requests to them."""

import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState
from transformers import AutoTokenizer

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.rollouts.client import Client, ClientRollout
from generation.rollouts.client_process import ClientCommand, ClientProcesses
from generation.rollouts.episode import PolicyLLM, RolloutSettings
from generation.server import OpenAIServer, ServerSettings
from generation.trajectory import Trajectory
from tests.support.bad_requests import Request
from trainer.engines import start_server

SAMPLING = SamplingSettings(max_tokens=16, temperature=0.8, top_p=0.95, stop_token_ids=[2])
QUESTION = [{"role": "user", "content": "2+2?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "add"}}
TOOL = {"type": "function", **ADD["function"]}
STRICT = {**ADD, "function": {**ADD["function"], "strict": True}}

# A request's arguments, and the status and the error message with which they are refused.
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    (
        {"temperature": 0.5},
        400,
        "temperature is 0.5, but the policy is trained on samples drawn with 0.8",
    ),
    ({"top_p": 1.0}, 400, "top_p is 1.0, but"),
    ({"extra_body": {"top_k": 5}}, 400, "top_k is 5, but"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty is 0.5, but"),
    ({"logit_bias": {"20": 1}}, 400, "logit_bias is {20: 1.0}, but"),
    (
        {"response_format": {"type": "json_object"}},
        400,
        "response_format is {'type': 'json_object'}: it forces the",
    ),
    (
        {"extra_body": {"structured_outputs": {"choice": ["4"]}}},
        400,
        "structured_outputs is StructuredOutputsParams(",
    ),
    (
        {"tools": [ADD], "tool_choice": "required"},
        400,
        "tool_choice is 'required': it forces the answer's form, but",
    ),
    (
        {"tools": [ADD], "tool_choice": FORCED},
        400,
        "tool_choice is {'function': {'name': 'add'}, 'type': 'function'}",
    ),
    ({"max_tokens": 17}, 400, "max_tokens is 17, but answers are trained up to 16 tokens"),
    ({"extra_body": {"use_beam_search": True}}, 400, "use_beam_search is set"),
    ({"n": 1000}, 400, "n is 1000, but must be at most 128"),
    ({"model": "gpt-5"}, 404, "gpt-5"),
    (
        {"messages": [{"role": "user", "content": "x" * 504}]},
        400,
        "the prompt fills the context and leaves no room",
    ),
    ({"messages": [{"role": "user", "content": "x" * 900}]}, 400, "512"),
]


def serving(leader: Leader, **settings: Any) -> Iterator[OpenAIServer]:
    """Start a server on the engine, yield it, and stop it."""
    server = leader.thread.run(
        OpenAIServer.start(leader.engine, ServerSettings(**settings)), 60, "starting a server"
    )
    yield server
    leader.thread.run(server.stop(), 20, "stopping a server")


def client(server: OpenAIServer, key: str = "none") -> openai.OpenAI:
    """Return the official client of a server, without retries."""
    return openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=60)


def root(server: OpenAIServer) -> str:
    """Return the server's URL without the path of the API."""
    return server.base_url.removesuffix("/v1")


def taken(server: OpenAIServer, leader: Leader, key: str) -> list[Trajectory]:
    """End the capture of a key, and return its trajectories."""

    async def take() -> list[Trajectory]:
        return server.take(key)

    return leader.thread.run(take(), 10, "taking a trajectory")


def opened(server: OpenAIServer, leader: Leader, **options: Any) -> str:
    """Open a trajectory on the server, and return its key."""

    async def open_() -> str:
        return server.open(**options)

    return leader.thread.run(open_(), 10, "opening a trajectory")


def streamed(api: openai.OpenAI, request: dict[str, Any]) -> Any:
    """Return the message that a stream adds up to, by the client library's own accumulation."""
    state = ChatCompletionStreamState()
    for chunk in api.chat.completions.create(**request, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0].message


def carried(answer: Any) -> tuple[list[int], list[int], list[float]]:
    """Return the ids and log-probabilities that accompany an answer."""
    extra = answer.model_extra
    return extra["prompt_token_ids"], extra["generation_token_ids"], extra["generation_log_probs"]


def episode(
    leader: Leader, folder: Path, run: Client | ClientCommand, timeout_s: float = 60.0, **row: Any
) -> list[Trajectory]:
    """Run one episode of level 6, with the client's function or command."""
    if isinstance(run, ClientCommand):
        pool = ClientProcesses(run)
        function = ClientRollout(pool.run, start_server, timeout_s, pool.aclose)
    else:
        function = ClientRollout(run, start_server, timeout_s)
    settings = RolloutSettings(2, SAMPLING, policy_version=0, seed=1, step=2)
    llm = PolicyLLM(leader.engine, AutoTokenizer.from_pretrained(folder), settings, 3, 1, [5])

    async def go() -> list[Trajectory]:
        try:
            row.update(question="2+2?", prompt=QUESTION, answer="4")
            return await function(llm, row, SAMPLING)
        finally:
            await function.aclose()

    return leader.thread.run(go(), 90, "an episode")


async def ask_twice(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Return a client that asks its question and a second one, and returns a reward."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
        messages: list[Any] = [{"role": "user", "content": row["question"]}]
        answer = (await api.chat.completions.create(model=model, messages=messages)).choices[0].message
        messages += [answer, {"role": "user", "content": "sure?"}]
        await api.chat.completions.create(model=model, messages=messages)
    return 0.5


def ask_once(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """A blocking client, which gets a thread of its own."""
    openai.OpenAI(base_url=base_url, api_key=api_key).completions.create(
        model=model, prompt=row["question"]
    )


async def nothing(*_: Any) -> None:
    return None


async def explodes(*_: Any) -> None:
    raise ZeroDivisionError("mine")


async def quits(*_: Any) -> None:
    raise SystemExit(3)


async def sleeps(*_: Any) -> None:
    await asyncio.sleep(60)


async def hostile(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Return a well-behaved client, or one that misbehaves as `row["kind"]` says; `row["late"]` is an event to wait for."""
    if row["kind"] == "hangs":
        await asyncio.Event().wait()
    if row["kind"] == "exits":
        sys.exit(3)
    if row["kind"] == "answers late":
        await asyncio.to_thread(row["late"].wait)
    if row["kind"] == "floods":
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=60) as http:
            good = [
                http.post(f"{base_url}/completions", json={"model": model, "prompt": "hi"})
                for _ in range(40)
            ]
            bad = [http.post(f"{base_url}/completions", content=b"[" * (1 << 20)) for _ in range(10)]
            await asyncio.gather(*good, *bad)
        raise ValueError("flooded")
    reward = await ask_twice(base_url, api_key, model, row)
    return math.nan if row["kind"] == "returns NaN" else reward


async def keeps_quiet_about_its_key(
    base_url: str, api_key: str, model: str, row: dict[str, Any]
) -> float:
    """Return a client that uses a wrong key after its first answer, and ignores the refusal."""
    await asyncio.to_thread(ask_once, base_url, api_key, model, row)
    with contextlib.suppress(openai.AuthenticationError):
        await asyncio.to_thread(ask_once, base_url, "another", model, row)
    return 1.0


def loses_its_key(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """A client that sends a wrong key."""
    ask_once(base_url, "none", model, row)


async def no_number(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> Any:
    """Return a client whose reward is not a number."""
    await asyncio.to_thread(ask_once, base_url, api_key, model, row)
    return "good"


def send_all(
    server: OpenAIServer, requests: list[Request], headers: dict[str, str]
) -> list[tuple[Request, httpx.Response]]:
    """Send all requests, and return each with its response."""
    with httpx.Client(base_url=root(server), timeout=60) as http:
        return [
            (r, http.request(r.method, r.path, content=r.body, headers=r.headers | headers))
            for r in requests
        ]
