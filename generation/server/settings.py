"""The settings of a server."""

import ipaddress
from dataclasses import dataclass

from generation.engine.sampling import SamplingSettings


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        model_name: the name by which clients call the model.
        host: the address to listen on; beyond loopback only if asked.
        port: 0 takes a free one.
        api_key: the bearer token that clients have to send; a key of an open trajectory will do, too. None lets
            everybody in who reaches the address.
        header_keys: whether a request may open a trajectory of its own, under the key in `x-hotbunk-trajectory`.
        sampling: the training configuration. Requests that would be sampled otherwise are refused; None takes all.
        eos_token_ids: ids that end an answer; by default the tokenizer's.
        keep_exact_ids: whether prompts keep the ids of earlier answers; False leaves them to the chat template.
        tool_parser: vLLM's name for the form of tool calls in the model's answers; None offers no tools.
        reasoning_parser: vLLM's name for the form of thoughts, which are then told apart from the answer.
        max_conversations: how many trajectories are captured at a time; those that requests open by header count apart
            from those that the program opens, and cannot take their room.
        max_choices: largest `n` of a request.
        max_answers: how many answers a request may have over all its prompts.
        max_body_bytes: largest request.
        body_timeout_s: how long a client may take to send its request's body.
    """

    model_name: str = "policy"
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    header_keys: bool = False
    sampling: SamplingSettings | None = None
    eos_token_ids: tuple[int, ...] = ()
    keep_exact_ids: bool = True
    tool_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    max_conversations: int = 4096
    max_choices: int = 128
    max_answers: int = 1024
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0


def is_loopback(host: str) -> bool:
    """True if a name or address means this machine to every program: `localhost`, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
