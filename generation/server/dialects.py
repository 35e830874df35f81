"""Converts OpenAI's Responses and Anthropic's Messages to chats, so that exact ids are kept in them
as well.

The parts that read vLLM's request classes were checked with vLLM 0.32.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from generation.server.conversations import VLLM_ERRORS, Refused

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
Item = dict[str, Any]


def as_chat(request: Any, handler: Any) -> dict[str, Any] | None:
    """Return the chat that vLLM's handler will make of a parsed request; None for a request of
    another kind.

    Raises Refused where the request asks for tools that the server would have to run.
    """
    kind = type(request).__name__
    if kind == "ResponsesRequest":
        for tool in request.tools:
            if tool.type not in ("function", "custom", "namespace"):
                raise Refused(
                    400, f"a tool is of type {tool.type!r}, but this server runs no tools: use functions"
                )
    elif kind != "AnthropicMessagesRequest":
        return None
    request = request.model_copy(deep=True)  # the conversion changes the request
    try:
        if kind == "ResponsesRequest":
            chat = _chat_of_response(request)
        else:
            chat = _chat_of_message(request, handler)
    except VLLM_ERRORS:
        return None  # vLLM will report the mistake
    plain: dict[str, Any] = json.loads(json.dumps(chat, default=list))
    for message in plain["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
                part["type"] = "text"
            elif isinstance(part, dict) and part.get("type") == "input_image":
                part |= {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return {name: value for name, value in plain.items() if value is not None}


def _chat_of_response(request: Any) -> dict[str, Any]:
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    kwargs = dict(request.build_chat_params(None, "auto").chat_template_kwargs)
    continues = kwargs.pop("continue_final_message", False)
    del kwargs["add_generation_prompt"]
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    chat = {"model": request.model, "messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    return chat | ({"continue_final_message": True} if continues else {})


def _chat_of_message(request: Any, handler: Any) -> dict[str, Any]:
    chat = handler.to_chat_completion_request(request, merge_inline_system=handler._merge_inline_system)
    tools = [tool.model_dump() for tool in chat.tools or []] or None
    template = {
        "chat_template_kwargs": chat.chat_template_kwargs,
        "reasoning_effort": chat.reasoning_effort,
    }
    return {"model": request.model, "messages": chat.messages, "tools": tools, **template}


def message_in(path: str, answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a complete answer as the chat message that the client will send back; None where the
    answer is empty.
    """
    parts: Sequence[Item] = answer["output" if path == RESPONSES else "content"]
    content = ""
    calls = list[Item]()
    for part in parts:
        if part["type"] == "message":
            content += "".join(piece.get("text") or "" for piece in part["content"])
        elif part["type"] == "text":
            content += part["text"]
        elif part["type"] in ("function_call", "tool_use"):
            arguments = part.get("arguments") or json.dumps(part.get("input") or {})
            calls.append({"function": {"name": part["name"], "arguments": arguments}})
    return {"role": "assistant", "content": content, "tool_calls": calls} if content or calls else None


def add_event(blocks: list[Item], event: Mapping[str, Any]) -> None:
    """Add one event of a streamed Anthropic message to the content blocks of that message."""
    if event["type"] == "content_block_start":
        blocks.append({**event["content_block"], "arguments": ""})
    elif event["type"] == "content_block_delta" and blocks:
        delta = event["delta"]
        blocks[-1]["arguments"] += delta.get("partial_json") or ""
        blocks[-1]["text"] = (blocks[-1].get("text") or "") + (delta.get("text") or "")
