"""Exact token ids: sampled ids are never encoded again, and a prompt begins with all ids that it
continues.

This module alone decides which answer continues which conversation. Prompts come as ids, as text or
as chat messages. If text is encoded again, or messages are rendered again, an earlier answer may
get different ids, lose its `<think>` block, or be left out; training on the result would be
training on tokens that were never sampled.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from generation.images import Image, Spans
from generation.messages import chat_form, clean_messages
from generation.trajectory import Trajectory, checked_versions, merged_versions

if TYPE_CHECKING:
    import numpy as np
    from vllm import RequestOutput

Message = Mapping[str, Any]

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
# In comparisons: whitespace, and the character for bytes that are not text
_IGNORED = re.compile(r"[\s�]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")  # a JSON escape, in the arguments of tool calls
_ANSWER = "<the answer>"  # in `STAND_IN`
STAND_IN = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
"""A conversation to render before further messages, where only the template's text after its answer
is wanted.
"""


@dataclass
class Generation:
    """One answer: the ids that were sampled for a prompt.

    Attributes: logprobs: the engine's log-probability (nats) of each sampled token. finish_reason:
        vLLM's "stop", "length" or "abort"; "error" where there is no answer. error: why the request
        failed, where a failed request counts as an answer; otherwise empty. weight_version: the
        policy version that answered; the newest one, if there were several. versions: as in
        `Trajectory`, counted from the first sampled token. text, prompt_text: the decoded answer
        and prompt, if prompts come as text. request_id, index: the id of vLLM's output, and the
        index of its completion. place: (prompt index, sample index), which determine the seed.
        position: the position of its prompt in the call that asked for it. off_policy: how its
        sampling parameters differ from those of training, as a sentence; empty if they do not.
        parent: the answer that its prompt continues; None if there is none. continued: whether
        another prompt continues it. routes: the experts of each token of prompt and answer except
        the last, [tokens - 1, layers, experts of a token], if the engine reports them. They are
        those of the forward pass that computed the keys and values from which the last token was
        sampled. images, image_spans: the images of its prompt, as in `Trajectory`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str = "stop"
    error: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    weight_version: int = 0
    text: str = ""
    prompt_text: str = ""
    request_id: str = field(default="", compare=False)
    index: int = field(default=0, compare=False)
    place: tuple[int, int] = (0, 0)
    position: int = 0
    off_policy: str = ""
    parent: "Generation | None" = field(default=None, repr=False, compare=False)
    continued: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    routes: "np.ndarray | None" = field(default=None, repr=False, compare=False)
    images: tuple[Image, ...] = field(default=(), repr=False)
    image_spans: Spans = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.token_ids)} sampled tokens cannot have {len(self.logprobs)} "
                "log-probabilities"
            )
        name = f"an answer at place {self.place}"
        self.versions = checked_versions(
            self.versions or [(self.weight_version, 0)], len(self.token_ids), name
        )
        self.weight_version = self.versions[-1][0]

    @property
    def ids(self) -> list[int]:
        """The ids of prompt and answer, which are a prefix of every prompt that continues this
        answer.
        """
        return self.prompt_ids + self.token_ids

    @property
    def chain(self) -> list["Generation"]:
        """All answers of the conversation up to this one, in order."""
        chain = [self]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        return chain[::-1]


def generations_of(output: "RequestOutput", weight_version: int = 0) -> list[Generation]:
    """Return one `Generation` for each completion of an output. Raises ValueError if
    log-probabilities are missing.
    """
    return [
        Generation(
            list(completion.token_ids),
            sampled_logprobs(completion),
            completion.finish_reason or "abort",
            prompt_ids=list(output.prompt_token_ids or []),
            weight_version=weight_version,
            text=completion.text,
            prompt_text=output.prompt or "",
            request_id=output.request_id,
            index=completion.index,
            routes=completion.routed_experts,
        )
        for completion in output.outputs
    ]


def sampled_logprobs(completion: Any) -> list[float]:
    """Return the log-probabilities (nats) of a `CompletionOutput`'s sampled tokens, from vLLM's
    flat or nested form.
    """
    token_ids = list(completion.token_ids)
    logprobs = completion.logprobs
    if logprobs is None or len(logprobs) != len(token_ids):
        count = "no" if logprobs is None else len(logprobs)
        raise ValueError(
            f"an output has {count} log-probabilities for {len(token_ids)} tokens: ask for logprobs=0"
        )
    if token_ids and len(getattr(logprobs, "token_ids", ())) == len(token_ids):
        # flat, sampled tokens only
        return list(logprobs.logprobs)
    return [position[token].logprob for position, token in zip(logprobs, token_ids, strict=True)]


def first_not_finite(output: "RequestOutput") -> float | None:
    """Return the first log-probability of a sampled token that is NaN or infinite; None if all are
    finite.
    """
    complete = (
        c for c in output.outputs if c.logprobs is not None and len(c.logprobs) == len(c.token_ids)
    )
    return next(
        (logprob for c in complete for logprob in sampled_logprobs(c) if not math.isfinite(logprob)),
        None,
    )


def joined(chain: Sequence[Generation], masked: Collection[int] = ()) -> Trajectory:
    """Join answers, each of which continues the one before, into one trajectory.

    Mask and log-probability are 0 on the ids between answers, and on answers whose `id()` is in
    `masked`. Raises ValueError where a prompt does not begin with all ids before it.
    """
    trajectory = Trajectory(
        *chain[0].place,
        prompt_ids=list(chain[0].prompt_ids),
        weight_version=chain[-1].weight_version,
        finish_reason=chain[-1].finish_reason,
        turns=len(chain),
        images=chain[-1].images,
        image_spans=chain[-1].image_spans,
    )
    for generation in chain:
        prompt = generation.prompt_ids
        so_far = trajectory.prompt_ids + trajectory.response_ids
        if prompt[: len(so_far)] != so_far:
            raise ValueError(
                f"a prompt of {len(prompt)} ids does not begin with the {len(so_far)} ids before it"
            )
        trajectory.extend(prompt[len(so_far) :])
        trajectory.answer_start = len(trajectory.response_ids)
        trajectory.extend(
            generation.token_ids, None if id(generation) in masked else generation.logprobs
        )
        trajectory.routes = generation.routes
    mark_versions(trajectory, chain)
    return trajectory


def mark_versions(trajectory: Trajectory, answers: Iterable[Generation]) -> None:
    """Set the versions of a trajectory's tokens, from those of `answers` that are a part of it.

    Tokens that were not sampled get the version of the answer before them, or, before the first
    answer, of that one.
    """
    ids = trajectory.prompt_ids + trajectory.response_ids
    prompt = len(trajectory.prompt_ids)
    versions = list[tuple[int, int]]()
    covered = prompt
    for answer in sorted(answers, key=lambda answer: len(answer.prompt_ids)):
        begin = len(answer.prompt_ids)
        end = len(answer.prompt_ids) + len(answer.token_ids)
        if covered <= begin < end and ids[:end] == answer.ids:
            versions += [(version, begin - prompt + start) for version, start in answer.versions]
            covered = end
    if merged := merged_versions(versions):
        merged[0] = (merged[0][0], 0)
        name = f"prompt {trajectory.prompt_index} sample {trajectory.sample_index}"
        trajectory.versions = checked_versions(merged, len(trajectory.response_ids), name)
        trajectory.weight_version = merged[-1][0]


class History:
    """The answers so far, and the search for the one that a prompt continues."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        # The generations by text, and by ids of prompt and answer.
        self._by_prompt: dict[str | tuple[int, ...], list[Generation]] = {}
        self._lengths: set[int] = set()  # of the keys of `_by_prompt`
        self._by_chat: dict[str, list[tuple[Generation, Any]]] = {}
        self._by_position: dict[int, list[Generation]] = {}

    def add(self, generation: Generation, messages: Sequence[Message] | None = None) -> None:
        """Keep an answer; `messages` are the ones from which its prompt was rendered."""
        self.generations.append(generation)
        if generation.token_ids:
            self._by_position.setdefault(generation.position, []).append(generation)
            for key in (generation.prompt_text + generation.text, tuple(generation.ids)):
                self._by_prompt.setdefault(key, []).append(generation)
                self._lengths.add(len(key))
        if messages is not None:
            self._by_chat.setdefault(_chat_key(messages), []).append((generation, None))

    def capture(self, generation: Generation) -> None:
        """Keep an answer, and link it to the longest earlier answer whose ids are a prefix of its
        prompt, if any.
        """
        if (parent := self.before(generation.prompt_ids)) is not None:
            generation.parent = parent
            parent.continued = True
        self.add(generation)

    def record(
        self, messages: Sequence[Message], assistant_message: Message, generation: Generation
    ) -> None:
        """Note the message that a client was given as the answer to `messages`."""
        self._by_chat.setdefault(_chat_key(messages), []).append(
            (generation, _identity(assistant_message))
        )

    def before(self, prompt: str | Sequence[int], position: int | None = None) -> Generation | None:
        """Return the answer that a prompt continues, the longest whose prompt and answer are a
        prefix of it; else None.

        An answer may have no text, for example if it is EOS alone; a text prompt then continues it
        only if it is longer than the answer's prompt, since it would otherwise be the same prompt
        again. The latest answer at the same `position` of its call is tried first, since a prompt
        most often continues that one.
        """
        key = prompt if isinstance(prompt, str) else tuple(prompt)

        def fits(generation: Generation) -> bool:
            if isinstance(key, tuple):
                return key[: len(generation.ids)] == tuple(generation.ids)
            so_far = generation.prompt_text + generation.text
            return key.startswith(so_far) and (bool(generation.text) or len(key) > len(so_far))

        same_position = [] if position is None else self._by_position.get(position, [])
        for generation in reversed(same_position):
            if not generation.continued and fits(generation):
                return generation
        lengths = [length for length in list(self._lengths) if length <= len(key)]
        for length in sorted(lengths, reverse=True):
            recorded = self._by_prompt.get(key[:length], [])
            if equal := [generation for generation in recorded if fits(generation)]:
                return _nearest(equal, position)
        return None

    def known_prefix(
        self, messages: Sequence[Message], position: int | None = None
    ) -> "KnownPrefix | None":
        """Return the longest prefix of `messages` that ends with a recorded answer; None if no
        answer was recorded.

        `position` is as in `before`.
        """
        for count in range(len(messages), 0, -1):
            if (message := messages[count - 1]).get("role") == "assistant":
                answers = self._by_chat.get(_chat_key(messages[: count - 1]), [])
                key = _identity(message)
                equal = []
                for generation, noted in answers:
                    same = echoes(message, generation.text) if noted is None else noted == key
                    if same:
                        equal.append(generation)
                if equal:
                    answer = _nearest(equal, position)
                    return KnownPrefix(answer.ids, count, answer)
        return None

    def trajectories(self) -> list[Trajectory]:
        """Return one trajectory for each answer that no other continues, in the order in which
        these were added.

        Where conversations branch after common answers, all their trajectories contain these
        answers, but all except the first mask them, so that the masks sum to the number of sampled
        tokens.
        """
        # `id()` of the answers that a trajectory contains already
        trajectories = []
        included = set[int]()
        for last in self.generations:
            if not last.continued:
                trajectories.append(joined(last.chain, included))
                included.update(map(id, last.chain))
        return trajectories


def _nearest(answers: list[Generation], position: int | None) -> Generation:
    """Return the one of several equal answers that a prompt at `position` continues.

    Samples of one prompt can be equal. Each is continued once, and preferably at the same position
    of its call. Positions alone would not tell samples apart: they change where a sampler leaves
    out finished conversations.
    """
    waiting = [answer for answer in answers if not answer.continued]
    same_position = [answer for answer in waiting or answers if answer.position == position]
    return (same_position or waiting or answers[-1:])[0]


def _identity(message: Message) -> Any:
    """Return what identifies a message: its role, text, calls and images.

    Ids of calls, thoughts and further fields are left out, since clients differ in them.
    """
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    called = [[call.get("name"), parsed_arguments(call.get("arguments"))] for call in calls]
    content = message.get("content")
    images = []
    if content is not None and not isinstance(content, str):
        images = [part for part in content if _is_image(part)]
    digests = [
        hashlib.sha256(json.dumps(part, sort_keys=True, default=repr).encode()).hexdigest()
        for part in images
    ]
    return [message.get("role"), content_text(content), called, *digests]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and ("image_url" in part or part.get("type") == "image")


def _chat_key(messages: Sequence[Message]) -> str:
    return json.dumps([_identity(message) for message in messages], sort_keys=True, default=str)


def echoes(message: Message, text: str) -> bool:
    """Return True if an assistant's message was made from a sampled text: its text, its end, or its
    tool calls.
    """
    content = content_text(message.get("content")).strip()
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    for function in calls:  # name and arguments distinguish one sample's call from another's
        arguments = parsed_arguments(function.get("arguments") or {})
        values = arguments.values() if isinstance(arguments, Mapping) else [arguments]
        spelled = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if not all(part in text for part in [str(function.get("name")), *spelled]):
            return False
    if calls:
        return content in text
    return text.strip().endswith(content) if content else not text.strip()


@dataclass(frozen=True)
class KnownPrefix:
    """Exact ids of the first `messages` messages of a conversation, the last of which is an answer.

    Attributes:
        answer: the recorded answer; None if a client has sent the ids.
        rendered: the chat template's ids of the same messages, without a generation prompt.
    """

    ids: list[int]
    messages: int
    answer: Generation | None = field(default=None, compare=False)
    rendered: list[int] = field(default_factory=list, compare=False)


class ChatHistory(History):
    """A history of conversations in messages. An answer is recognised by the messages before it and
    by its content, whichever client sends it back, and in whichever form.

    `retemplated` counts the prompts whose exact ids could not be kept, because the template does
    not show where an answer ends, or because tools have changed. They get the template's ids, and
    so begin a trajectory of their own.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._ends = tuple(eos_token_ids)
        self.retemplated = 0

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Return the ids of the next prompt: exact ids up to the last recorded answer, then the
        template's.
        """

        def render(part: Sequence[Message], **kwargs: Any) -> list[int]:
            text = chat_form(self._tokenizer).render(
                clean_messages(list(part)), tools=tools or None, **kwargs
            )
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

        rendered_ids = render(messages, add_generation_prompt=True, **template_kwargs)
        prefix = self.known_prefix(messages)
        if prefix is None:
            return rendered_ids
        rendered = render(messages[: prefix.messages], add_generation_prompt=False, **template_kwargs)
        return self.continued(replace(prefix, rendered=rendered), rendered_ids)

    def continued(self, prefix: KnownPrefix, rendered: Sequence[int]) -> list[int]:
        """Return the prompt that the template renders as `rendered`, with the exact ids of `prefix`
        where possible.
        """
        try:
            return replace_prefix_tokens(
                self._tokenizer, prefix.ids, prefix.rendered, rendered, self._ends
            )
        except ValueError:
            self.retemplated += 1
            return list(rendered)


def content_text(content: Any) -> str:
    """Return the text of a message's content, which is text, None, a list of parts, or a tool's
    JSON value.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        return json.dumps(content, sort_keys=True, default=repr)
    texts = []
    for part in content:
        if isinstance(part, Mapping):
            texts.append(part.get("text") or "")
        else:
            texts.append(str(part))
    return "".join(texts)


def parsed_arguments(arguments: Any) -> Any:
    """Return a call's arguments as an object; text that is not JSON stays as it is."""
    if isinstance(arguments, str):
        with suppress(ValueError):
            return json.loads(arguments)
    return arguments


def encode_following(
    tokenizer: Any, messages: Sequence[Message], template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Return the ids that a chat template writes after any answer: its end, the messages, and the
    next answer's header.

    They do not depend on the conversation before, so that `STAND_IN` is rendered in its place.
    """
    rendered = chat_form(tokenizer).render(
        [*STAND_IN, *clean_messages(list(messages))], **template_kwargs
    )
    return list(tokenizer(following(rendered), add_special_tokens=False)["input_ids"])


def following(rendered: str) -> str:
    """Return the text after the answer in a chat template's rendering of `STAND_IN` and further
    messages.

    Raises ValueError if the template does not render the answer unchanged.
    """
    _, answer, text = rendered.partition(_ANSWER)
    if not answer:
        raise ValueError(
            "the chat template does not render an assistant's answer unchanged, so no turn can follow it"
        )
    return text


def without_second_end(last_id: int, added: list[int], ends: Collection[int | None]) -> list[int]:
    """Return the template's ids `added` after `last_id`, without the answer's end if `last_id`
    already ends it.
    """
    return added[1:] if added and added[0] in ends and last_id in ends else added


def replace_prefix_tokens(
    tokenizer: Any,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
    eos_token_ids: Collection[int] | None = None,
) -> list[int]:
    """Return the prompt of the next turn: the exact ids so far, then the template's ids after the
    last answer.

    The answer ends once, with the sampled end or, if the answer was cut short, with the template's.
    Everything after the end comes from the template.

    Args: tokenizer: has `eos_token_id`, and `decode`, by which messages and ids are compared;
        without it they are not. model_prefix_token_ids: a prompt and the ids sampled for it. If
        empty, the template's ids are returned. template_prefix_token_ids: the template's ids of the
        messages up to and including the last answer, without a generation prompt.
        template_token_ids: the template's ids of all messages, with the generation prompt.
        eos_token_ids: ids that end an answer; by default the tokenizer's.

    Raises ValueError where the messages do not belong to the ids, or the end of the last answer
    cannot be found.
    """
    if not model_prefix_token_ids:
        return list(template_token_ids)
    ends = eos_token_ids or tokenizer.eos_token_id
    if ends is None:
        raise ValueError(
            "the tokenizer has no EOS token, so the end of an answer is not known: pass eos_token_ids"
        )
    ends = frozenset([ends] if isinstance(ends, int) else ends)
    turns = _Turns(tokenizer, ends, template_prefix_token_ids, template_token_ids)
    turns.check_history_of(model_prefix_token_ids)
    return turns.join(model_prefix_token_ids)


class _Turns:
    """Two renderings of one conversation: up to its last answer, and to its end.

    Segments are the ids between two EOS tokens; the last segment follows the last EOS token, and
    may be empty.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: frozenset[int],
        until_answer: Sequence[int],
        rendered_ids: Sequence[int],
    ) -> None:
        self._decode = getattr(tokenizer, "decode", None)
        self._ends = ends
        self._all_ids = list(rendered_ids)
        template = getattr(tokenizer, "chat_template", None)
        self._template_words = set(re.findall(r"\w+", template if isinstance(template, str) else ""))
        *self._rendered, after = self._segments(until_answer)
        if not self._rendered:
            reason = (
                "the chat template writes no EOS token after answers, so the exact ids cannot be kept"
            )
            raise ValueError(f"{reason}; its rendering ends with {self._text(after)[-80:]!r}")
        # The last answer and the generation prompt begin with the header of an assistant's turn, or
        # of any turn in templates that mark no assistant.
        pairs = zip(self._rendered[-1], self._segments(rendered_ids)[-1], strict=False)
        shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        self._header = [] if self._blank(shared) else shared

    def check_history_of(self, ids: Sequence[int]) -> None:
        """Raise ValueError unless all rendered turns are turns of `ids`, in the same order, and the
        last turns match.

        `ids` may have more turns, which the template has dropped.
        """
        turns = self._segments(ids)
        if self._blank(turns[-1]):
            turns.pop()
        earlier = iter(turns[:-1])
        for rendered in self._rendered[:-1]:
            if not any(self._matches(rendered, turn) for turn in earlier):
                raise self._mismatch(rendered, "no such turn")
        if not turns or not self._matches(self._rendered[-1], turns[-1]):
            raise self._mismatch(
                self._rendered[-1], repr(self._text(turns[-1])[-80:]) if turns else "nothing"
            )

    def join(self, ids: Sequence[int]) -> list[int]:
        """Return `ids`, with the last answer's end once, followed by the rendering of everything
        after that answer.
        """
        end = self._answer_end()
        after = self._segments(ids)[-1]
        if not self._blank(after):
            return [*ids, *self._all_ids[end:]]
        rest = self._all_ids[end + 1 :]
        if not _starts_with(rest, after):
            raise ValueError(
                "after their last EOS the prefix ids differ from what the chat template writes"
            )
        return [*ids, *rest[len(after) :]]

    def _answer_end(self) -> int:
        """Return the index of the last answer's end in the full rendering."""
        indices = [i for i, token in enumerate(self._all_ids) if token in self._ends]
        turns = self._segments(self._all_ids)[:-1]
        answer = self._rendered[-1]
        if turns[: len(self._rendered)] == self._rendered:
            return indices[len(self._rendered) - 1]
        # The template has left something out of earlier turns: the n-th end may be that of a
        # different turn.
        if self._header:
            ends = [i for i, segment in enumerate(turns) if _starts_with(segment, self._header)][-1:]
            ends = [
                i for i in ends if self._same(turns[i], answer) or self._is_remainder(turns[i], answer)
            ]
        else:
            ends = [i for i, segment in enumerate(turns) if self._same(segment, answer)]
        if len(ends) != 1:
            reason = "the chat template renders the last answer differently when messages follow it"
            raise ValueError(f"{reason}, so that its end cannot be found: {self._text(answer)[-80:]!r}")
        return indices[ends[0]]

    def _segments(self, ids: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for token in ids:
            if token in self._ends:
                parts.append([])
            else:
                parts[-1].append(token)
        return parts

    def _text(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the decoded ids; "" where they cannot be decoded, so that any two texts are the
        same.
        """
        if self._decode is None:
            return ""
        return str(self._decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _blank(self, ids: Sequence[int]) -> bool:
        if self._decode is None:
            return not ids
        return not _IGNORED.sub("", self._text(ids, skip_special_tokens=False))

    def _same(self, rendered: Sequence[int], original: Sequence[int]) -> bool:
        """Return True if both have the same text, perhaps in different tokens or without
        thoughts.
        """
        if list(rendered) == list(original):
            return True
        text = _IGNORED.sub("", self._text(rendered))
        before = self._text(original)
        return text in (_IGNORED.sub("", before), _IGNORED.sub("", _THOUGHT.sub("", before)))

    def _is_remainder(self, rendered: Sequence[int], original: Sequence[int]) -> bool:
        """Return True if a template may have made `rendered` from `original` by leaving out or
        reordering parts.

        Then all its words are words of `original` or of the template. Or `original` begins with its
        text, since a stop string may cut a word.
        """
        if _IGNORED.sub("", self._text(original)).startswith(_IGNORED.sub("", self._text(rendered))):
            return True
        return (
            not set(_words(self._text(rendered)) - _words(self._text(original))) - self._template_words
        )

    def _matches(self, rendered: list[int], original: list[int]) -> bool:
        answers = (
            bool(self._header)
            and _starts_with(rendered, self._header)
            and _starts_with(original, self._header)
        )
        return self._same(rendered, original) or (answers and self._is_remainder(rendered, original))

    def _mismatch(self, rendered: list[int], instead: str) -> ValueError:
        difference = f"they say {self._text(rendered)[-80:]!r} where the ids have {instead}"
        remedy = "send the ids of this conversation, or none"
        return ValueError(f"the messages do not belong to the prefix ids: {difference}; {remedy}")


def _words(text: str) -> Counter[str]:
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else " ", text)
    return Counter(re.findall(r"\w+", plain))


def _starts_with(ids: Sequence[int], start: Sequence[int]) -> bool:
    return list(ids[: len(start)]) == list(start)
