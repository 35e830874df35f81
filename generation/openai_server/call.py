"""One HTTP request on its way through vLLM's handlers, and what is known about it on both sides of them."""

from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..capture import Generation
from ..chat_history import KnownPrefix
from ..prefix_tokens import replace_prefix_tokens
from ..sampling import SamplingSettings
from .conversations import Conversation

STUMBLES = (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What vLLM raises over requests that its own checks have missed."""


class Refused(ValueError):
    """A request is answered with `status` and one sentence. A ValueError: vLLM blames the client for those."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass
class ExactIds:
    """Ids that the prompt has to begin with.

    Attributes:
        known: them, and the messages they stand for.
        until_answer: those messages as the chat template renders them.
        given: the client gave the ids, so the messages may belong to others.
    """

    known: KnownPrefix
    until_answer: list[int]
    given: bool

    def prompt(self, tokenizer: Any, whole: list[int], eos_token_ids: Collection[int]) -> list[int]:
        """The prompt that the chat template renders as `whole`, with these ids. Refused where they do not belong."""
        try:
            return replace_prefix_tokens(tokenizer, self.known.ids, self.until_answer, whole, eos_token_ids)
        except ValueError as error:
            raise Refused(400, str(error)) from error


@dataclass
class Call:
    """One request for generation.

    Attributes:
        opens: the key of a trajectory that is to be opened with the first answer.
        open_ended: the client leaves the answer's length to the context.
        taken: the engine has begun to answer, so vLLM finds nothing wrong with the request.
        refused: why it cannot be answered, found out after vLLM took it over.
        generations: what was sampled, by the choice's index in the response.
    """

    sampling: SamplingSettings | None
    conversation: Conversation | None = None
    opens: str = ""
    exact: ExactIds | None = None
    open_ended: bool = False
    taken: bool = False
    refused: Refused | None = None
    choices: int = 0
    generations: dict[int, Generation] = field(default_factory=dict)

    def refuse(self, status: int, sentence: str) -> Refused:
        """To be raised; the client is told this, whatever vLLM makes of the exception."""
        self.refused = Refused(status, sentence)
        return self.refused


CURRENT: ContextVar[Call | None] = ContextVar("hotbunk_call", default=None)
"""The call that the running task serves."""
