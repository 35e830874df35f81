"""A sampler's prompts: as it gets them, and as it hands them back, in the many forms that vLLM takes.

Texts and messages are taken, but what the policy sampled stays the ids that it sampled: of a prompt that goes on from
an earlier answer only the rest is encoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..chat_history import template_message
from .conversation import encode_following, without_second_end
from .history import Answer, History, Messages
from .llm import RolloutSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptText(str):
    """A prompt's text, which knows the ids it stands for: what a sampler's `prompts` consist of.

    Attributes:
        token_ids: the prompt, chat template applied.
        prompt_index, sample_index: which trajectory begins with it; each prompt occurs once for every sample.
        messages: what it was rendered from, or None.
        row: the dataset's row.
        metrics: figures of this trajectory, by name, to be filled in by the sampler.
    """

    token_ids: list[int]
    prompt_index: int
    sample_index: int
    messages: Messages | None
    row: Mapping[str, Any]
    metrics: dict[str, float]

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        prompt_index: int = 0,
        sample_index: int = 0,
        messages: Messages | None = None,
        row: Mapping[str, Any] | None = None,
    ) -> "PromptText":
        self = super().__new__(cls, text)
        self.token_ids, self.messages, self.row = list(token_ids), messages, row or {}
        self.prompt_index, self.sample_index, self.metrics = prompt_index, sample_index, {}
        return self

    @property
    def place(self) -> tuple[int, int]:
        """Prompt and sample index."""
        return self.prompt_index, self.sample_index


@dataclass
class Request:
    """One prompt of a call, ready for the engine."""

    token_ids: list[int]
    text: str
    position: int
    place: tuple[int, int]
    parent: Answer | None = None
    messages: Messages | None = None

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.continued = True


class Prompts:
    """Turns a call's prompts into requests: finds the answers that they go on from, and encodes what is new."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        settings: RolloutSettings,
        batch: Sequence[PromptText],
        history: History,
    ) -> None:
        self._tokenizer, self._settings, self._batch, self._history = tokenizer, settings, list(batch), history

    def requests(self, prompts: Any) -> list[Request]:
        """Of one or several prompts: texts, ids, or dictionaries with `prompt_token_ids` or `prompt`."""
        given = _listed(prompts)
        return [
            self._request(prompt, position, self._place(position, len(given))) for position, prompt in enumerate(given)
        ]

    def chat_requests(self, messages: Any, tools: Any, template_kwargs: Mapping[str, Any]) -> list[Request]:
        """Of one or several conversations."""
        if not messages:
            raise ValueError("llm.chat needs messages: a conversation, or a list of them")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        kwargs = {"add_generation_prompt": True} | self._settings.chat_template_kwargs | dict(template_kwargs)
        return [
            self._chat_request(
                [dict(m) for m in one], position, self._place(position, len(conversations)), tools, kwargs
            )
            for position, one in enumerate(conversations)
        ]

    def _request(self, prompt: Any, position: int, place: tuple[int, int]) -> Request:
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, PromptText):
            return Request(prompt.token_ids, prompt, position, prompt.place)
        if isinstance(prompt, str):
            return self._text_request(prompt, position, place)
        ids = [int(token) for token in prompt]
        parent = self._history.before_ids(ids, position)
        return Request(ids, self._tokenizer.decode(ids), position, parent.place if parent else place, parent)

    def _text_request(self, prompt: str, position: int, place: tuple[int, int]) -> Request:
        if parent := self._history.before_text(prompt, position):
            rest = prompt[len(parent.prompt_text + parent.text) :]
            return Request(self._after(parent, self._encode(rest)), prompt, position, parent.place, parent)
        if start := max((p for p in self._batch if prompt.startswith(p)), key=len, default=None):
            return Request(start.token_ids + self._encode(prompt[len(start) :]), prompt, position, place)
        return Request(self._tokenizer(prompt)["input_ids"], prompt, position, place)

    def _chat_request(
        self, messages: Messages, position: int, place: tuple[int, int], tools: Any, kwargs: dict[str, Any]
    ) -> Request:
        if found := self._history.before_chat(messages, position):
            parent, following = found
            ids = self._after(
                parent, encode_following(self._tokenizer, [template_message(m) for m in following], kwargs)
            )
            return Request(ids, self._tokenizer.decode(ids), position, parent.place, parent, messages)
        if tools is None and (same := self._rendered(messages, place)) is not None:
            return Request(same.token_ids, same, position, place, messages=messages)
        plain = [template_message(message) for message in messages]
        text = str(self._tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, **kwargs))
        return Request(self._encode(text), text, position, place, messages=messages)

    def _after(self, parent: Answer, added: list[int]) -> list[int]:
        ends = {self._tokenizer.eos_token_id, *self._settings.sampling.stop_token_ids}
        return parent.ids + without_second_end(parent.ids[-1], added, ends)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    def _rendered(self, messages: Messages, place: tuple[int, int]) -> PromptText | None:
        """The batch's own prompt, where a conversation is no more than that."""
        same = [prompt for prompt in self._batch if prompt.messages == messages]
        return next((prompt for prompt in same if prompt.place == place), same[0] if same else None)

    def _place(self, position: int, width: int) -> tuple[int, int]:
        """What decides the seed of a prompt that is not one of the batch's: the trajectory at its position."""
        return self._batch[position].place if width == len(self._batch) else (-1 - position, 0)


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    group_size: int,
    messages: Sequence[list[dict[str, Any]] | None] | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> list[PromptText]:
    """A sampler's prompts: those at `indices` among `prompts` (ids), each once for every sample of its group."""
    return [
        PromptText(
            text, prompts[i], i, sample, messages[i] if messages is not None else None, rows[i] if rows else None
        )
        for i in indices
        for text in [tokenizer.decode(list(prompts[i]))]
        for sample in range(group_size)
    ]


def _listed(prompts: Any) -> list[Any]:
    """A list of prompts from any form of one or several: ids in a list are one prompt, lists of ids are several."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)
