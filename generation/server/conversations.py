"""The settings of a server, the conversations that it captures under clients' keys, and the
requests in them.
"""

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

    Attributes: model_name: the name by which clients call the model. host: the address to listen
        on. port: the port to listen on; 0 takes a free one. api_key: the bearer token that clients
        have to send; the key of an open trajectory is accepted, too. None lets in everybody who
        reaches the address. header_keys: whether a request may open a trajectory, under the key in
        its header `x-hotbunk-trajectory`. sampling: the training configuration; requests that would
        be sampled otherwise are refused. None accepts all. eos_token_ids: ids that end an answer;
        by default the tokenizer's. keep_exact_ids: whether prompts keep the ids of earlier answers;
        False leaves them to the chat template. tool_parser: vLLM's name for the form of tool calls
        in the model's answers; None offers no tools. reasoning_parser: vLLM's name for the form of
        thoughts, which are then separated from the answer. max_conversations: the most trajectories
        that are captured at a time. Those that requests open by header are counted separately, so
        that they cannot take the room of those that the program opens. max_choices: the largest `n`
        of a request. max_answers: the most answers to a request, over all its prompts.
        max_body_bytes: the largest body of a request. With images, three times the bytes that a
        trajectory's images may have are added, which is room for them twice in base64.
        body_timeout_s: seconds that a client may take to send its request's body. image_rules: how
        images in chats are treated; None: chats have no images.
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


VLLM_ERRORS = (
    AttributeError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
"""The errors that vLLM raises for malformed requests that pass its own checks."""


COUNTERS = {
    "retemplated": "prompts that were rendered again because exact ids could not be kept",
    "strict_ignored": (
        "requests in training whose strict tools, or calls one at a time, were not enforced"
    ),
    "lost_keys": "requests refused because a trajectory's client had lost its key",
    "unread_calls": "answers with tool calls that vLLM's parser could not read",
}
"""The counters of a conversation, and of a server in total, with their meaning."""


def as_key(turns: list[Any]) -> str:
    """Return the messages of a chat, or the items of a response, as text that can be looked up."""
    return json.dumps(turns, sort_keys=True)


class Refused(ValueError):
    """Refuses a request with an HTTP status and one sentence. vLLM answers a ValueError as the
    client's mistake.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class TooManyConversations(Refused):
    """Refuses to open a trajectory because the server has reached its limit of open ones."""


KEPT_BYTES = 32 << 20
"""The most bytes of earlier responses that are stored for requests that continue them."""


class StoredResponses(OrderedDict[str, bytes]):
    """Stores the items up to each response, as JSON by its id. Beyond `KEPT_BYTES` the oldest are
    dropped.
    """

    def keep(self, name: str, items: list[dict[str, Any]]) -> None:
        """Store a response's items, its own output included."""
        self[name] = json.dumps(items).encode()
        while sum(map(len, self.values())) > KEPT_BYTES:
            self.popitem(last=False)

    def full_input(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Replace `previous_response_id` in a request by all items before the request. Return the
        full input.

        vLLM's own store keeps every response for ever, for every client, and leaves tool calls out
        (vllm/entrypoints/openai/responses/utils.py, construct_input_messages). Raises Refused where
        the id is unknown, or the request needs another kind of store.
        """
        for name in ("background", "conversation"):
            if body.get(name):
                raise Refused(
                    400,
                    f"{name} is set, but this server stores only responses: use previous_response_id",
                )
        new_input = body.get("input")
        previous = body.pop("previous_response_id", None)
        items = [{"role": "user", "content": new_input}] if isinstance(new_input, str) else new_input
        if not isinstance(items, list):
            return []  # vLLM will report the mistake
        if previous is not None:
            if not isinstance(previous, str) or previous not in self:
                where = "responses are stored with their trajectory, until it ends"
                raise Refused(404, f"previous_response_id {str(previous)[:80]!r} is not known: {where}")
            items = json.loads(self[previous]) + items
            body["input"] = items
        return items


@dataclass
class ServedConversation:
    """A conversation that the server captures under one key.

    Attributes: key: the key that the client has to send. history: the answers captured so far.
        by_request: True where a request has opened the conversation, not the program. sampling: how
        requests have to be sampled; None leaves that to the client. seed: the seed from which the
        requests' seeds derive; None leaves them to the client. policy_version: the only version of
        the weights that may answer; None allows any. turnstile: makes answers grow slice by slice,
        each slice by the current version; None: answers are not cut. requests: the number of
        requests so far. counts: the conversation's counters, by the names of `COUNTERS`. responses:
        the responses that later requests may continue. answered_empty: the turns, as JSON, whose
        answer had neither text nor calls. row_images: the images that the client was given with its
        row. fatal: the error of a request that every other request would meet, too.
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
    answered_empty: set[str] = field(default_factory=set)
    row_images: tuple[Image, ...] = ()
    fatal: Exception | None = None

    @property
    def slug(self) -> str:
        """The conversation's name in addresses, which does not reveal the key."""
        return hashlib.blake2b(self.key.encode(), digest_size=16).hexdigest()

    def with_empty_answers(self, turns: list[Any]) -> list[Any]:
        """Return the turns with the empty answers that the client has left out, as openai-agents
        and pydantic-ai do.

        The exact ids of the conversation contain an empty answer, too: at least the token that
        ended it.
        """
        restored: list[Any] = []
        for turn in turns:
            asks = isinstance(turn, dict) and turn.get("role") in ("user", "system", "developer")
            if self.answered_empty and asks and as_key(restored) in self.answered_empty:
                restored.append({"role": "assistant", "content": ""})
            restored.append(turn)
        return restored

    def next_seed(self) -> int | None:
        """Return the next request's seed, which depends on the conversation's seed and the number
        of requests.
        """
        self.requests += 1
        return None if self.seed is None else sample_seed(self.seed, 0, 0, 0, self.requests)


class Conversations(dict[str, ServedConversation]):
    """The open conversations by key; each stays open until it is taken.

    At most `max_conversations` are open that the program has opened, and as many that requests have
    opened.

    Attributes:
        places: the open conversations by the name that they have in addresses.
        counts: the counters of all requests, by the names of `COUNTERS`.
        responses: the stored responses to requests without a conversation.
    """

    def __init__(self, tokenizer: Any, settings: ServerSettings) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._ends = settings.eos_token_ids
        self._limit = settings.max_conversations
        self.by_slug: dict[str, ServedConversation] = {}
        self.counts: Counter[str] = Counter()
        self.responses = StoredResponses()

    def check_room(self, by_request: bool) -> None:
        """Raise TooManyConversations unless one more conversation can be opened."""
        if sum(conversation.by_request == by_request for conversation in self.values()) >= self._limit:
            raise TooManyConversations(
                429, f"{self._limit} trajectories are open, which is the limit: take one first"
            )

    def open(self, new: ServedConversation) -> ServedConversation:
        """Start to capture the answers of a conversation. Raises ValueError where its key is open
        already, TooManyConversations where the limit is reached.
        """
        if new.key in self:
            raise ValueError(
                f"trajectory {new.key!r} is being captured already; take it first, or choose another key"
            )
        self.check_room(new.by_request)
        new.history = ChatHistory(self._tokenizer, self._ends)
        self[new.key] = self.by_slug[new.slug] = new
        return new

    def take(self, key: str) -> list[Trajectory]:
        """Return the trajectories captured under `key`, and forget the key. Raises KeyError if it
        is not open.

        The first trajectory has the conversation's counters among its metrics, as "server/…".
        """
        taken = self.pop(key)
        del self.by_slug[taken.slug]
        taken.counts["retemplated"] = taken.history.retemplated
        self.counts["retemplated"] += taken.history.retemplated
        trajectories = taken.history.trajectories()
        for trajectory in trajectories[:1]:
            trajectory.metrics |= {f"server/{name}": float(taken.counts[name]) for name in COUNTERS}
        return trajectories


@dataclass
class ServedCall:
    """The state of one request, shared by the gate before vLLM's handlers and the engine behind
    them.

    Attributes: sampling: how the answer has to be sampled; None leaves that to the client.
        conversation: the conversation that the answers belong to, if any. opens: the key of a
        trajectory that is to be opened with the first answer. exact: the ids that the prompt has to
        begin with, if any. open_ended: True where the client leaves the answer's length to the
        context. taken: True once the engine has begun to answer, so that vLLM has found nothing
        wrong with the request. refused: why the request cannot be answered, if that was found out
        behind vLLM's handlers. choices: the number of choices that the engine was asked for so far.
        totals: the server's counters over all requests, by the names of `COUNTERS`. messages: the
        chat's messages, whichever dialect the request came in. items: the items of a Responses
        request; None where the response is not to be stored. processors: the names of the engine's
        logits processors to apply; None where the request names none. turns: the messages or items
        with the empty answers that the client has left out. find_exact: returns the ids that a
        chat's prompt has to begin with, if any. unread: True where vLLM could not read the tool
        calls in an answer. generations: the answers, by the choice's index in the response.
        expanded: the prompt as it was rendered with its images, if it has any. unknown: settings of
        the request that this release of vLLM does not make sampling parameters of.
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
    unknown: dict[str, Any] = field(default_factory=dict)

    def open_in(self, conversations: Conversations) -> None:
        """Open the trajectory that the request asks for, unless another request has opened it
        meanwhile.
        """
        if self.opens and self.conversation is None:
            new = ServedConversation(self.opens, by_request=True, sampling=self.sampling)
            self.conversation = conversations.get(self.opens) or conversations.open(new)

    def admit(self, images: tuple[Image, ...], rules: ImageRules) -> tuple[Image, ...]:
        """Return the request's images, as the same objects where the row or the conversation has
        had them before.

        Raises ValueError where all images together are too large; its text lacks the subject, the
        request.
        """
        if (conversation := self.conversation) is None:
            rules.check_bytes(images, ())
            return images
        before = (image for answer in conversation.history.generations for image in answer.images)
        earlier = {image.digest: image for image in (*conversation.row_images, *before)}
        rules.check_bytes(
            (*earlier.values(), *images), {image.digest for image in conversation.row_images}
        )
        return tuple(earlier.get(image.digest, image) for image in images)

    def count(self, name: str) -> bool:
        """Count one of `COUNTERS`, for the server and the conversation. Return True where it is the
        server's first.
        """
        self.totals[name] += 1
        if self.conversation is not None:
            self.conversation.counts[name] += 1
        return self.totals[name] == 1


CURRENT: ContextVar[ServedCall | None] = ContextVar("hotbunk_call", default=None)
"""The call that the running task serves."""
