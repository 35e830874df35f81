"""Exact ids under a chat template: what the policy sampled stays as it was sampled, whatever rendering makes of it.

A chat request brings messages, not ids. Rendered again, an earlier answer may come out as other ids for the same text,
without its `<think>` block, or not at all; training on that would be training on what was never sampled.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

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
