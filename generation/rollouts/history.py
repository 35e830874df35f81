"""Which answer goes on from which: what a sampler's calls have sampled, and the trajectories its result stands for.

A sampler (level 5) calls the policy several times and returns the last outputs only, or plain lists of ids. An answer
whose prompt begins with all ids of an earlier prompt and its answer belongs to the same trajectory; what lies between
the two came from tools or the user, and is masked.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from generation.exact_ids import content_text, sampled_logprobs
from generation.trajectory import Trajectory

if TYPE_CHECKING:
    from vllm import RequestOutput

Messages = list[dict[str, Any]]
Key = TypeVar("Key", str, tuple[int, ...])


@dataclass(eq=False)
class Answer:
    """One sampled answer.

    Attributes:
        logprobs: the engine's (nats), as many as `token_ids`.
        request_id, index: of the `RequestOutput` and its completion that gave it.
        position: of its prompt in the call.
        place: prompt and sample index that decided its seed.
        prompt_text: the prompt, decoded.
        off_policy: what of its sampling parameters differs from training's, as a sentence; empty: nothing.
        parent: the answer that its prompt goes on from.
        continued: whether another prompt goes on from this one.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str = ""
    finish_reason: str = "stop"
    request_id: str = ""
    index: int = 0
    position: int = 0
    place: tuple[int, int] = (0, 0)
    prompt_text: str = ""
    off_policy: str = ""
    error: str = ""
    parent: "Answer | None" = None
    continued: bool = False

    @property
    def ids(self) -> list[int]:
        """What a prompt that goes on from here begins with."""
        return self.prompt_ids + self.token_ids

    @property
    def chain(self) -> list["Answer"]:
        """All answers of its trajectory up to this one, in order."""
        return [*(self.parent.chain if self.parent else []), self]


@dataclass
class Tokens:
    """A trajectory's ids: mask 1 and a log-probability on what was sampled, 0 and 0.0 on what came between."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    answer_start: int = 0

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append an answer to a prompt. Raises ValueError where the prompt does not begin with all ids so far."""
        so_far = self.prompt_ids + self.response_ids
        if list(prompt_ids[: len(so_far)]) != so_far:
            raise ValueError(f"a prompt of {len(prompt_ids)} ids does not begin with the {len(so_far)} ids before it")
        between = list(prompt_ids[len(so_far) :])
        self.answer_start = len(self.response_ids) + len(between)
        self.response_ids += [*between, *token_ids]
        self.loss_mask += [0] * len(between) + [1] * len(token_ids)
        self.logprobs += [0.0] * len(between) + list(logprobs)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens of the response."""
        for values in (self.response_ids, self.loss_mask, self.logprobs):
            del values[length:]  # type: ignore[attr-defined]
        self.answer_start = min(self.answer_start, length)


def merge(chain: Sequence[Answer]) -> Tokens:
    """The tokens of one trajectory from its answers, in order."""
    tokens = Tokens(list(chain[0].prompt_ids))
    for answer in chain:
        tokens.add(answer.prompt_ids, answer.token_ids, answer.logprobs)
    return tokens


def convert(outputs: Sequence["RequestOutput"]) -> Tokens:
    """The tokens of one trajectory from the plain vLLM outputs of its turns, in order; tensors are made much later.

    Raises:
        ValueError: an output has no log-probabilities, or a prompt does not begin with all ids before it.
    """
    return merge([answer for output in outputs for answer in answers_of(output)[:1]])


def answers_of(output: "RequestOutput") -> list[Answer]:
    """One `Answer` for each completion of an output."""
    prompt_ids = list(output.prompt_token_ids or [])
    return [
        Answer(
            prompt_ids=prompt_ids,
            token_ids=list(completion.token_ids),
            logprobs=sampled_logprobs(completion),
            text=completion.text,
            finish_reason=completion.finish_reason or "abort",
            request_id=output.request_id,
            index=completion.index,
            prompt_text=output.prompt or "",
        )
        for completion in output.outputs
    ]


class History:
    """Every answer of one batch, to be found by what a later prompt begins with, or by what a sampler returns."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._texts: dict[int, dict[str, list[Answer]]] = {}
        self._ids: dict[int, dict[tuple[int, ...], list[Answer]]] = {}
        self._chats: dict[str, list[Answer]] = {}
        self._positions: dict[int, list[Answer]] = {}

    def add(self, answer: Answer, messages: Messages | None = None) -> None:
        """Keep an answer; `messages` are what its prompt was rendered from."""
        self.answers.append(answer)
        if answer.token_ids:
            self._positions.setdefault(answer.position, []).append(answer)
            _put(self._texts, answer.prompt_text + answer.text, answer)
            _put(self._ids, tuple(answer.ids), answer)
        if messages is not None:
            self._chats.setdefault(_key(messages), []).append(answer)

    def before_text(self, prompt: str, position: int) -> Answer | None:
        """The answer that a prompt of text goes on from: the longest whose text it begins with.

        It is most often the last one at the same position, which is looked at first. An answer can have no text, as
        when it is EOS alone; then something must follow, or the prompt is the same one asked again.
        """
        for answer in reversed(self._positions.get(position, [])):
            so_far = answer.prompt_text + answer.text
            if not answer.continued and prompt.startswith(so_far) and (answer.text or len(prompt) > len(so_far)):
                return answer
        return _longest(self._texts, prompt, position, lambda answer, length: bool(answer.text) or length < len(prompt))

    def before_ids(self, prompt: list[int], position: int) -> Answer | None:
        """The same for a prompt of ids."""
        for answer in reversed(self._positions.get(position, [])):
            if not answer.continued and prompt[: len(answer.ids)] == answer.ids:
                return answer
        return _longest(self._ids, tuple(prompt), position, lambda answer, length: True)

    def before_chat(self, messages: Messages, position: int) -> tuple[Answer, Messages] | None:
        """The answer that a conversation goes on from, and the messages after it."""
        for turn in range(len(messages) - 1, -1, -1):
            if messages[turn].get("role") == "assistant":
                same = [a for a in self._chats.get(_key(messages[:turn]), []) if echoes(messages[turn], a.text)]
                if same:
                    return _nearest(same, position), messages[turn + 1 :]
        return None

    def of_output(self, output: "RequestOutput") -> Answer | None:
        """The answer that an output with one completion gave, to judge by its request."""
        same = (output.request_id, output.outputs[0].index)
        return next((a for a in reversed(self.answers) if (a.request_id, a.index) == same), None)

    def of_ids(self, token_ids: list[int], position: int) -> tuple[Answer, int | None] | None:
        """The answer that a list of ids stands for, and where to cut its trajectory's response.

        The ids are those of a last answer (all before it counts, too), or the whole response, or its beginning.
        """
        nearby = sorted(self.answers, key=lambda a: a.position != position)
        for answer in nearby:
            if answer.token_ids == token_ids:
                return answer, None
        for answer in nearby:
            if merge(answer.chain).response_ids[: len(token_ids)] == token_ids:
                return answer, len(token_ids)
        return None


def echoes(message: Mapping[str, Any], text: str) -> bool:
    """Whether an assistant's message is what was made of a sampled text: the text, its end, or the tool calls in it."""
    content = content_text(message.get("content")).strip()
    if calls := message.get("tool_calls"):
        return content in text and all(_called(call.get("function", call), text) for call in calls)
    return text.strip().endswith(content) if content else not text.strip()


def _called(function: Mapping[str, Any], text: str) -> bool:
    """Whether a text holds the name and all arguments of a call; they tell one sample's call from another's."""
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments) in text
    values = arguments.values() if isinstance(arguments, Mapping) else [arguments]
    spelled = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return all(part in text for part in [str(function.get("name")), *spelled])


def _key(messages: Messages) -> str:
    return json.dumps(messages, sort_keys=True, default=repr)


def _put(index: dict[int, dict[Key, list[Answer]]], key: Key, answer: Answer) -> None:
    index.setdefault(len(key), {}).setdefault(key, []).append(answer)


def _longest(
    index: dict[int, dict[Key, list[Answer]]], prompt: Key, position: int, usable: Callable[[Answer, int], bool]
) -> Answer | None:
    for length in sorted((n for n in list(index) if n <= len(prompt)), reverse=True):
        same = [answer for answer in index[length].get(prompt[:length], []) if usable(answer, length)]
        if same:
            return _nearest(same, position)
    return None


def _nearest(answers: list[Answer], position: int) -> Answer:
    """Samples of one prompt can be equal: each is gone on from once, and that at the same position of its call first.

    Positions change where a sampler leaves out what is done, so they alone would not tell samples apart.
    """
    waiting = [answer for answer in answers if not answer.continued]
    same_position = [answer for answer in waiting or answers if answer.position == position]
    return (same_position or waiting or answers[-1:])[0]


def trajectory(answer: Answer, place: tuple[int, int], version: int, length: int | None = None) -> Trajectory:
    """The trajectory that ends with `answer`; `length` cuts its response.

    Where an answer had no room, its prompt was too long to be trained on, too: the trajectory ends before it.
    """
    chain = answer.chain if answer.token_ids or answer.parent is None else answer.parent.chain
    tokens = merge(chain)
    if length is not None:
        tokens.cut(length)
    aborted = answer.finish_reason not in ("stop", "length")
    return Trajectory(
        *place,
        prompt_ids=tokens.prompt_ids,
        response_ids=tokens.response_ids,
        loss_mask=tokens.loss_mask,
        logprobs=tokens.logprobs,
        weight_version=version,
        finish_reason="error" if aborted else answer.finish_reason,
        turns=len(chain),
        answer_start=tokens.answer_start,
        error=answer.error or (f"vLLM ended the request with {answer.finish_reason!r}" if aborted else ""),
    )
