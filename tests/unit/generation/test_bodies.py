"""A mistake in a request's body is reported as one sentence about the field, however many types vLLM has tried."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from generation.server.bodies import AnswerSender, sentence_of
from generation.server.conversations import ServedCall, StoredResponses
from generation.server.dialects import RESPONSES

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": 7}, "input: Input should be a valid string"),
    ({"input": [7]}, "input.0: Input should be a valid dictionary"),
    (
        {"input": [{"role": "nobody", "content": "x"}]},
        "input.0.role: Input should be 'user', 'assistant', 'system' or",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input.0.content.0.text: Field required",
    ),
    ({"input": [{"type": "function_call", "name": "add"}]}, "input.0.arguments: Field required"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name: Field required"),
    ({"input": "x", "temperature": "hot"}, "temperature: Input should be a valid number"),
    ({}, "input: Field required"),
]


@pytest.mark.parametrize(("body", "sentence"), WRONG)
def test_the_error_told_is_that_of_the_type_that_the_value_comes_closest_to(
    body: dict, sentence: str
) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    body = {"model": "policy", **body}
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    assert sentence_of(errors, body).startswith(sentence)


@pytest.mark.parametrize("end", ["response.completed", "response.incomplete"])
def test_a_streamed_response_is_stored_whatever_a_release_calls_its_end(end: str) -> None:
    """From vLLM 0.33 on, an answer that was cut at its length ends as incomplete."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stored = StoredResponses()
    call = ServedCall(sampling=None, taken=True, items=[{"role": "user", "content": "2+2?"}])
    sender = AnswerSender(Request({"type": "http", "path": RESPONSES}), send, call, stored, "earlier")
    answer = {
        "id": "resp_1",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "4"}]}],
    }
    event = f"event: {end}\ndata: {json.dumps({'type': end, 'response': answer})}\n\n".encode()

    async def run() -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await sender.send({"type": "http.response.start", "status": 200, "headers": headers})
        await sender.send({"type": "http.response.body", "body": event, "more_body": False})

    asyncio.run(run())
    last = json.loads(sent[-1]["body"].partition(b"data: ")[2])["response"]
    assert (last["previous_response_id"], last["store"]) == ("earlier", True)
    assert json.loads(stored["resp_1"]) == [*call.items, *answer["output"]]
