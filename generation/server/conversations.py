"""A server's settings, the conversations that it captures, by the keys that clients send, and their requests."""

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from generation.engine.sampling import SamplingSettings, sample_seed
from generation.engine.slices import Turnstile
from generation.exact_ids import ChatHistory, Generation, KnownPrefix
from generation.images import Image, ImageRules, PromptInput
from generation.trajectory import Trajectory


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
        max_body_bytes: largest request; with images as much more as those of a trajectory take in base64, twice.
        body_timeout_s: how long a client may take to send its request's body.
        image_rules: how images in chats are treated; None: there are none.
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
    image_rules: ImageRules | None = None


STUMBLES = (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError)
"""The errors that vLLM raises over requests that its own checks have missed."""


FIGURES = {
    "retemplated": "prompts that were rendered anew because exact ids could not be kept",
    "strict_ignored": "requests in training whose strict tools, or calls one at a time, were not enforced",
    "lost_keys": "requests refused because a trajectory's client had lost its key",
    "unread_calls": "answers with tool calls that vLLM's parser could not read",
}
"""The counters of a conversation, and of a server in total, with their meaning."""


def as_key(turns: list[Any]) -> str:
    """The messages of a chat, or the items of a response, in a form that can be looked up."""
    return json.dumps(turns, sort_keys=True)


class Refused(ValueError):
    """The refusal of a request with an HTTP status and one sentence. A ValueError: vLLM blames the client for it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class TooManyConversations(Refused):
    """The refusal of a trajectory because as many are open as the server keeps."""


KEPT_BYTES = 32 << 20
"""The bytes of earlier responses that are kept for requests that continue them."""


class StoredResponses(OrderedDict[str, bytes]):
    """All items of a response and before it, as JSON by the response's id; the oldest give way beyond `KEPT_BYTES`."""

    def keep(self, name: str, items: list[dict[str, Any]]) -> None:
        """Keep a response's items, its own output included."""
        self[name] = json.dumps(items).encode()
        while sum(map(len, self.values())) > KEPT_BYTES:
            self.popitem(last=False)

    def whole_input(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Take `previous_response_id` out of a request, and put all items before the request into its input.

        vLLM's own store keeps everything for ever, for everybody, and leaves tool calls out
        (vllm/entrypoints/openai/responses/utils.py, construct_input_messages). Refused where the id is not known, or
        the request asks for more of such a store.
        """
        for name in ("background", "conversation"):
            if body.get(name):
                raise Refused(400, f"{name} is set, but this server keeps only responses: use previous_response_id")
        new_input, previous = body.get("input"), body.pop("previous_response_id", None)
        items = [{"role": "user", "content": new_input}] if isinstance(new_input, str) else new_input
        if not isinstance(items, list):
            return []  # vLLM will say
        if previous is not None:
            if not isinstance(previous, str) or previous not in self:
                where = "a trajectory keeps its own until it ends"
                raise Refused(404, f"previous_response_id {str(previous)[:80]!r} is not known here: {where}")
            items = json.loads(self[previous]) + items
            body["input"] = items
        return items


@dataclass
class ServedConversation:
    """A conversation that the server captures under one key.

    Attributes:
        key: the key that its client has to send.
        by_request: a request has opened it, not the program.
        sampling: how its requests have to be sampled; None leaves that to the client.
        seed: the seed of its requests derives from it; None leaves that to the client.
        policy_version: the only version its requests may be answered by; None takes any.
        turnstile: its requests are answered slice by slice, by the version of each; None: in one.
        counts: its counters, by the names of `FIGURES`.
        responses: those that further ones may continue.
        silent: turns, as JSON, that were answered by nothing: neither text nor calls.
        row_images: those that the client was given with its row.
        fatal: the error of a request after which no other would fare better.
    """

    key: str
    history: ChatHistory = field(init=False)
    by_request: bool = False
    sampling: SamplingSettings | None = None
    seed: int | None = None
    policy_version: int | None = None
    turnstile: Turnstile | None = None
    requests: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    responses: StoredResponses = field(default_factory=StoredResponses)
    silent: set[str] = field(default_factory=set)
    row_images: tuple[Image, ...] = ()
    fatal: Exception | None = None

    @property
    def place(self) -> str:
        """The conversation's name in addresses, which does not give away its key."""
        return hashlib.blake2b(self.key.encode(), digest_size=16).hexdigest()

    def with_silence(self, turns: list[Any]) -> list[Any]:
        """The turns with the empty answers that the client has left out of them, as openai-agents and pydantic-ai do:
        what was sampled for these, if only its end, is in the ids all the same.
        """
        restored: list[Any] = []
        for turn in turns:
            asks = isinstance(turn, dict) and turn.get("role") in ("user", "system", "developer")
            if self.silent and asks and as_key(restored) in self.silent:
                restored.append({"role": "assistant", "content": ""})
            restored.append(turn)
        return restored

    def next_seed(self) -> int | None:
        """The next request's seed, a function of the conversation's and of how many requests came before."""
        self.requests += 1
        return None if self.seed is None else sample_seed(self.seed, 0, 0, 0, self.requests)


class Conversations(dict[str, ServedConversation]):
    """The open conversations by key, each until it is taken: at most `limit` of the program's, and as many that
    requests opened. `places` holds them by their own; `counts` are of all requests, see `FIGURES`;
    `responses` those that belong to none.
    """

    def __init__(self, tokenizer: Any, settings: ServerSettings) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._ends = settings.eos_token_ids
        self._limit = settings.max_conversations
        self.places: dict[str, ServedConversation] = {}
        self.counts: Counter[str] = Counter()
        self.responses = StoredResponses()

    def check_room(self, by_request: bool) -> None:
        """Raise TooManyConversations unless one more can be opened."""
        if sum(conversation.by_request == by_request for conversation in self.values()) >= self._limit:
            raise TooManyConversations(429, f"{self._limit} trajectories are being captured and none of them is taken")

    def open(self, new: ServedConversation) -> ServedConversation:
        """Begin to capture the answers of a conversation. Raises ValueError where its key is open already,
        TooManyConversations where the server keeps no more.
        """
        if new.key in self:
            raise ValueError(f"trajectory {new.key!r} is being captured already; take it first, or choose another key")
        self.check_room(new.by_request)
        new.history = ChatHistory(self._tokenizer, self._ends)
        self[new.key] = self.places[new.place] = new
        return new

    def take(self, key: str) -> list[Trajectory]:
        """The trajectories captured under `key`, which is then forgotten; the first has its `FIGURES` as "server/…".
        Raises KeyError if it is not open.
        """
        taken = self.pop(key)
        del self.places[taken.place]
        taken.counts["retemplated"] = taken.history.retemplated
        self.counts["retemplated"] += taken.history.retemplated
        trajectories = taken.history.trajectories()
        for trajectory in trajectories[:1]:
            trajectory.metrics |= {f"server/{name}": float(taken.counts[name]) for name in FIGURES}
        return trajectories


@dataclass
class ServedCall:
    """One request on its way through vLLM's handlers, for both sides of them.

    Attributes:
        opens: the key of a trajectory that is to be opened with the first answer.
        exact: the ids that the prompt has to begin with, if any.
        open_ended: the client leaves the answer's length to the context.
        taken: the engine has begun to answer, so vLLM finds nothing wrong with the request.
        refused: why it cannot be answered, found out after vLLM took it over.
        totals: what is counted of all calls; see `FIGURES`.
        messages: those of a chat, in whichever dialect it came.
        items: the same of a response, in its own; None where it is not to be kept.
        turns: the messages or items as they came, with empty answers that the client has left out.
        find_exact: the ids that a chat's prompt has to begin with, if any.
        unread: vLLM could not read the tool calls in its answer.
        generations: the answers, by the choice's index in the response.
        processors: those of the engine's logits processors that it names; None: it says nothing of them.
        expanded: its messages as vLLM has rendered them, where there are images among them.
    """

    sampling: SamplingSettings | None
    conversation: ServedConversation | None = None
    opens: str = ""
    exact: KnownPrefix | None = None
    open_ended: bool = False
    taken: bool = False
    refused: Refused | None = None
    choices: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    messages: list[Any] | None = None
    items: list[dict[str, Any]] | None = None
    processors: list[str] | None = None
    turns: list[Any] | None = None
    find_exact: Callable[[dict[str, Any]], Awaitable[KnownPrefix | None]] | None = None
    unread: bool = False
    generations: dict[int, Generation] = field(default_factory=dict)
    expanded: PromptInput | None = None

    def open_in(self, conversations: Conversations) -> None:
        """Open the trajectory that it asks for, unless another request with its key was faster."""
        if self.opens and self.conversation is None:
            new = ServedConversation(self.opens, by_request=True, sampling=self.sampling)
            self.conversation = conversations.get(self.opens) or conversations.open(new)

    def admit(self, images: tuple[Image, ...], rules: ImageRules) -> tuple[Image, ...]:
        """Its images, those that the row or the conversation has had before as the same objects. Raises ValueError, a
        sentence about the request, where all of them together are too large.
        """
        if (conversation := self.conversation) is None:
            rules.check_bytes(images, ())
            return images
        before = (image for answer in conversation.history.generations for image in answer.images)
        earlier = {image.digest: image for image in (*conversation.row_images, *before)}
        rules.check_bytes((*earlier.values(), *images), {image.digest for image in conversation.row_images})
        return tuple(earlier.get(image.digest, image) for image in images)

    def count(self, name: str) -> bool:
        """Count one of `FIGURES`, here and in the conversation; whether it is the server's first."""
        self.totals[name] += 1
        if self.conversation is not None:
            self.conversation.counts[name] += 1
        return self.totals[name] == 1


CURRENT: ContextVar[ServedCall | None] = ContextVar("hotbunk_call", default=None)
"""The call that the running task serves."""
