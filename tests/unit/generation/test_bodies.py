"""A mistake in a request's body is reported as one sentence about the field, however many types vLLM has tried."""

from typing import Any

import pytest
from pydantic import ValidationError

from generation.server.bodies import sentence_of

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
