"""Exact ids under a chat template: what the policy sampled stays as it was sampled, whatever rendering makes of it.

A chat request brings messages, not ids. Rendered again, an earlier answer may come out as other ids for the same text,
without its `<think>` block, or not at all; training on that would be training on what was never sampled.

A conversation in messages whose earlier answers keep the ids they were sampled with.

What an engine sampled for one conversation, put together into trajectories by ids alone.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from vllm import RequestOutput

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_UNSEEN = re.compile(r"[\s�]+")  # whitespace, and what stands for bytes that are no text
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")  # JSON's, in the arguments of tool calls


def replace_prefix_tokens(
    tokenizer: Any,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
    eos_token_ids: Collection[int] | None = None,
) -> list[int]:
    """The prompt of the next turn: the exact ids so far, then what the template puts behind the last answer.

    The answer's end is taken once: the one that was sampled, or the template's where the answer was cut short. What the
    template writes after an end, and every message after the answer, comes from the template.

    Args:
        model_prefix_token_ids: a prompt and the ids sampled for it. Empty: the template's ids come back as they are.
        template_prefix_token_ids: the messages up to and with the last answer as the template renders them, without a
            generation prompt.
        template_token_ids: all messages, with the generation prompt.
        eos_token_ids: ids that end an answer; by default the tokenizer's.

    Raises:
        ValueError: the messages are not those of the ids, or it cannot be told where the last answer ends.
    """
    if not model_prefix_token_ids:
        return list(template_token_ids)
    view = _View(tokenizer, _ends(tokenizer, eos_token_ids), _template_words(tokenizer))
    turns = _Turns(view, template_prefix_token_ids, template_token_ids)
    turns.check_history_of(model_prefix_token_ids)
    return turns.join(model_prefix_token_ids, turns.answer_end())


def _ends(tokenizer: Any, eos_token_ids: Collection[int] | None) -> frozenset[int]:
    ids = eos_token_ids or tokenizer.eos_token_id
    if ids is None:
        raise ValueError("the tokenizer has no EOS token, so nothing tells where an answer ends; name its ids")
    return frozenset([ids] if isinstance(ids, int) else ids)


def _template_words(tokenizer: Any) -> frozenset[str]:
    template = getattr(tokenizer, "chat_template", None)
    return frozenset(re.findall(r"\w+", template if isinstance(template, str) else ""))


@dataclass(frozen=True)
class _View:
    """What can be read from ids: segments, each up to an end, and their text."""

    tokenizer: Any
    ends: frozenset[int]
    template_words: frozenset[str]

    def segments(self, ids: Sequence[int]) -> list[list[int]]:
        """The ids between ends, in order; what follows the last end is the last of them, and may be empty."""
        parts: list[list[int]] = [[]]
        for token in ids:
            if token in self.ends:
                parts.append([])
            else:
                parts[-1].append(token)
        return parts

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def blank(self, ids: Sequence[int]) -> bool:
        return not _UNSEEN.sub("", str(self.tokenizer.decode(list(ids), skip_special_tokens=False)))

    def same(self, rendered: Sequence[int], original: Sequence[int]) -> bool:
        """Whether one is the other's text, retokenised, and perhaps without thoughts."""
        if list(rendered) == list(original):
            return True
        text, before = _squashed(self.text(rendered)), self.text(original)
        return text in (_squashed(before), _squashed(_THOUGHT.sub("", before)))

    def remains(self, rendered: Sequence[int], original: Sequence[int]) -> bool:
        """Whether one is made of the other's words, in any order, and of words that the template adds."""
        added = _words(self.text(rendered)) - _words(self.text(original))
        return not set(added) - self.template_words


def _squashed(text: str) -> str:
    return _UNSEEN.sub("", text)


def _words(text: str) -> Counter[str]:
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else " ", text)
    return Counter(re.findall(r"\w+", plain))


class _Turns:
    """The same conversation rendered up to its last answer, and to its end."""

    def __init__(self, view: _View, until_answer: Sequence[int], whole: Sequence[int]) -> None:
        self._view, self._whole = view, list(whole)
        *self._told, after = view.segments(until_answer)
        if not self._told:
            raise ValueError(
                "the chat template writes no EOS token behind answers, so the exact ids cannot be kept; its rendering "
                f"ends with {view.text(after)[-80:]!r}"
            )
        # Both begin with the header of an assistant's turn (and in templates without one, with that of any turn).
        pairs = zip(self._told[-1], view.segments(whole)[-1], strict=False)
        shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        self._header = [] if view.blank(shared) else shared

    def answer_end(self) -> int:
        """Where in the whole rendering the end of the last answer stands."""
        places = [i for i, token in enumerate(self._whole) if token in self._view.ends]
        told = self._view.segments(self._whole)[:-1]
        if told[: len(self._told)] == self._told:
            return places[len(self._told) - 1]
        # The template has left something out of earlier turns; counting ends would step over a user's turn.
        return places[self._last_answer(told)]

    def _last_answer(self, told: list[list[int]]) -> int:
        answer = self._told[-1]
        if self._header:
            found = [i for i, segment in enumerate(told) if _begins(segment, self._header)][-1:]
            fits = bool(found) and (
                self._view.same(told[found[0]], answer) or self._view.remains(told[found[0]], answer)
            )
        else:
            found = [i for i, segment in enumerate(told) if self._view.same(segment, answer)]
            fits = len(found) == 1
        if not fits:
            raise ValueError(
                "the chat template renders the last answer otherwise when messages follow it, and it cannot be told "
                f"where it ends: {self._view.text(answer)[-80:]!r}"
            )
        return found[0]

    def check_history_of(self, ids: Sequence[int]) -> None:
        """Raise ValueError unless every rendered turn is one of those in `ids`, in their order, the last ones equal.

        Turns that only `ids` has are ones that the template has dropped.
        """
        spoken = self._view.segments(ids)
        if self._view.blank(spoken[-1]):
            spoken.pop()
        pairs = iter(spoken[:-1])
        for turn in self._told[:-1]:
            if not any(self._matches(turn, segment) for segment in pairs):
                raise self._foreign(turn, "nothing of the kind")
        if not spoken or not self._matches(self._told[-1], spoken[-1]):
            raise self._foreign(self._told[-1], repr(self._view.text(spoken[-1])[-80:]) if spoken else "nothing")

    def _foreign(self, turn: list[int], instead: str) -> ValueError:
        return ValueError(
            f"the messages do not belong to the prefix ids: they say {self._view.text(turn)[-80:]!r} where the ids "
            f"have {instead}; send the ids of this conversation, or none"
        )

    def _matches(self, turn: list[int], segment: list[int]) -> bool:
        answers = bool(self._header) and _begins(turn, self._header) and _begins(segment, self._header)
        return self._view.same(turn, segment) or (answers and self._view.remains(turn, segment))

    def join(self, ids: Sequence[int], end: int) -> list[int]:
        """`ids`, closed once, and then the whole rendering from `end` on."""
        after = self._view.segments(ids)[-1]
        if not self._view.blank(after):
            return [*ids, *self._whole[end:]]
        rest = self._whole[end + 1 :]
        if not _begins(rest, after):
            raise ValueError("the prefix ids go on after their last EOS in another way than the chat template does")
        return [*ids, *rest[len(after) :]]


def _begins(ids: Sequence[int], start: Sequence[int]) -> bool:
    return list(ids[: len(start)]) == list(start)


@dataclass
class Generation:
    """One answer: the ids that were sampled for a prompt.

    Attributes:
        logprobs: the engine's log-probability (nats) of each sampled token.
        finish_reason: vLLM's "stop", "length" or "abort"; "error" where there is no answer.
        error: why there is no answer, where a failed request counts as one; otherwise empty.
        weight_version: the policy version that answered.
        text, prompt_text: answer and prompt, decoded, where prompts come as text.
        request_id, index: of vLLM's output and of its completion.
        place: prompt and sample index, which decided the seed.
        position: of its prompt in the call that asked for it.
        off_policy: how its sampling parameters differ from training's, as a sentence; empty: not at all.
        parent: the answer that its prompt continues.
        continued: whether another prompt continues it.
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

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} sampled tokens cannot have {len(self.logprobs)} log-probabilities")

    @property
    def ids(self) -> list[int]:
        """Prompt and answer: the beginning of every prompt that continues it."""
        return self.prompt_ids + self.token_ids

    @property
    def chain(self) -> list["Generation"]:
        """All answers of its conversation up to this one, in order."""
        chain = [self]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        return chain[::-1]


def generations_of(output: "RequestOutput", weight_version: int = 0) -> list[Generation]:
    """One `Generation` for each completion of an output. Raises ValueError if it lacks log-probabilities."""
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
        )
        for completion in output.outputs
    ]


def sampled_logprobs(completion: Any) -> list[float]:
    """The log-probability (nats) of each sampled token of a `CompletionOutput`, flat or not, other tokens' beside it
    or not.
    """
    token_ids, logprobs = list(completion.token_ids), completion.logprobs
    if logprobs is None or len(logprobs) != len(token_ids):
        found = "no" if logprobs is None else len(logprobs)
        raise ValueError(f"an output has {found} log-probabilities for {len(token_ids)} tokens: ask for logprobs=0")
    if token_ids and len(getattr(logprobs, "token_ids", ())) == len(token_ids):  # flat, sampled tokens only
        return list(logprobs.logprobs)
    return [position[token].logprob for position, token in zip(logprobs, token_ids, strict=True)]


class Capture:
    """The generations of one conversation, in the order they finished."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []

    def add(self, generation: Generation) -> None:
        """Note one more."""
        self.generations.append(generation)

    def trajectories(self) -> list[Trajectory]:
        """One trajectory for each generation that no other continues, in the order of their ends.

        A generation continues the longest one whose prompt and answer its own prompt begins with. The loss mask is 1 on
        sampled tokens. Where conversations part after common answers, these are in every trajectory, but masked in all
        except the first, so that the masks sum to the number of sampled tokens.
        """
        before = [self._continued(i) for i in range(len(self.generations))]
        leaves = [i for i in range(len(before)) if i not in before]
        trained: set[int] = set()
        found = []
        for leaf in leaves:
            chain = [leaf]
            while (earlier := before[chain[0]]) is not None:
                chain.insert(0, earlier)
            found.append(_joined([(self.generations[i], i not in trained) for i in chain]))
            trained.update(chain)
        return found

    def _continued(self, index: int) -> int | None:
        """The generation that this one continues. No longer than its prompt, it finished before this one began."""
        prompt = self.generations[index].prompt_ids
        lengths = {
            i: len(g.ids)
            for i, g in enumerate(self.generations[:index])
            if g.token_ids and prompt[: len(g.ids)] == g.ids
        }
        return max(lengths, key=lambda i: (lengths[i], i)) if lengths else None


def _joined(chain: Sequence[tuple[Generation, bool]]) -> Trajectory:
    """One trajectory of generations each of which continues the one before; False leaves its tokens out of the loss."""
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    start = len(chain[0][0].prompt_ids)
    for generation, counts in chain:
        between = generation.prompt_ids[start + len(ids) :]
        ids += between + generation.token_ids
        mask += [0] * len(between) + [int(counts)] * len(generation.token_ids)
        sampled = generation.logprobs if counts else [0.0] * len(generation.token_ids)
        logprobs += [0.0] * len(between) + sampled
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=chain[0][0].prompt_ids,
        response_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        weight_version=min(generation.weight_version for generation, _ in chain),
        finish_reason=chain[-1][0].finish_reason,
        turns=len(chain),
        answer_start=len(ids) - len(chain[-1][0].token_ids),
    )


Message = Mapping[str, Any]


@dataclass(frozen=True)
class KnownPrefix:
    """Exact ids of the first `messages` messages, the last of which is an answer that was recorded."""

    ids: list[int]
    messages: int


class ChatHistory:
    """Answers are recognised by the messages before them and by what they say, not by who sends them back, or how.

    `retemplated` counts the prompts whose exact ids could not be kept, because the template does not say where an
    answer ends, or because tools have changed; they are what the template makes of the messages, and so begin a
    trajectory of their own.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._ends = tokenizer, tuple(eos_token_ids)
        self._answers: dict[str, Generation] = {}
        self.retemplated = 0

    def record(self, messages: Sequence[Message], assistant_message: Message, generation: Generation) -> None:
        """Note the answer that was given to `messages`."""
        self._answers[_key([*messages, assistant_message])] = generation

    def known_prefix(self, messages: Sequence[Message]) -> KnownPrefix | None:
        """The longest part of `messages` that ends with a recorded answer."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1].get("role") == "assistant":
                generation = self._answers.get(_key(messages[:count]))
                if generation is not None:
                    return KnownPrefix(generation.ids, count)
        return None

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a prompt for the next answer: those of the recorded answers, and the template's for the rest."""
        whole = self._render(messages, tools, add_generation_prompt=True, **template_kwargs)
        known = self.known_prefix(messages)
        if known is None:
            return whole
        until = self._render(messages[: known.messages], tools, add_generation_prompt=False, **template_kwargs)
        return self.continued(known, until, whole)

    def continued(self, known: KnownPrefix, until_answer: Sequence[int], whole: Sequence[int]) -> list[int]:
        """The prompt, from the template's ids of the known messages and of all."""
        try:
            return replace_prefix_tokens(self._tokenizer, known.ids, until_answer, whole, self._ends)
        except ValueError:
            self.retemplated += 1
            return list(whole)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, **kwargs: Any) -> list[int]:
        plain = [template_message(message) for message in messages]
        text = self._tokenizer.apply_chat_template(plain, tools=tools or None, tokenize=False, **kwargs)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates want it: content as text, arguments of tool calls as objects, None left out."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = content_text(message.get("content"))
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_template_call(call) for call in calls]
    return plain


def content_text(content: Any) -> str:
    """The text of a message's content: text itself, None, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def _template_call(call: Message) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    parsed = function | {"arguments": _arguments(function.get("arguments"))}
    return dict(call) | {"function": parsed} if "function" in call else parsed


def _arguments(arguments: Any) -> Any:
    """An object where JSON says one; text that is no JSON stays what it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _key(messages: Sequence[Message]) -> str:
    """What is said and called, message by message. Names of calls, thoughts and extras are left out: clients differ."""
    said = []
    for message in messages:
        calls = [call.get("function") or call for call in message.get("tool_calls") or []]
        told = [(call.get("name"), _arguments(call.get("arguments"))) for call in calls]
        said.append((message.get("role"), content_text(message.get("content")), told))
    return json.dumps(said, sort_keys=True, default=str)
