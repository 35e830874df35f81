"""The prompts that a sampler gets, and the requests to vLLM that its calls become.

A sampler is code of the user's that answers all prompts of a batch (level 5 in docs/rollouts.md).
It may pass prompts in all forms that vLLM accepts. Where a prompt continues an earlier answer, only
the new text is encoded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from generation.exact_ids import STAND_IN, Generation, History, following, without_second_end
from generation.image_marks import split_images
from generation.images import Image, ImageRules, PromptInput, Spans, StoredImage, subject
from generation.messages import chat_form, clean_messages, plain_ids
from generation.rollouts.episode import RolloutSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


class PromptText(str):
    """An entry of a sampler's `prompts`: the prompt's text, with its token ids and its row of the
    dataset as attributes.

    Attributes: token_ids: the prompt's ids, with the chat template applied. prompt_index,
        sample_index: the numbers of the prompt and of the sample; a prompt occurs in the batch once
        for each of its samples. messages: the messages that the prompt was rendered from, or None.
        row: the dataset's row. metrics: numbers about the trajectory by name, which the sampler may
        fill in. decoded: the answer's text for reports and rewards, which the sampler may set;
        None: the decoded ids. images, image_spans: as in `Trajectory`; the messages contain the
        images, too.
    """

    token_ids: list[int]
    prompt_index: int
    sample_index: int
    messages: Messages | None
    row: Mapping[str, Any]
    metrics: dict[str, float]
    decoded: str | None
    images: tuple[Image, ...]
    image_spans: Spans

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        prompt_index: int = 0,
        sample_index: int = 0,
        messages: Messages | None = None,
        row: Mapping[str, Any] | None = None,
        images: tuple[Image, ...] = (),
        image_spans: Spans = (),
    ) -> "PromptText":
        self = super().__new__(cls, text)
        self.token_ids = list(token_ids)
        self.row = row or {}
        self.images = images
        self.image_spans = image_spans
        self.messages = (
            _with_images(split_images(messages, images)[0], images) if messages and images else messages
        )
        self.prompt_index = prompt_index
        self.sample_index = sample_index
        self.metrics = {}
        self.decoded = None
        return self

    @property
    def place(self) -> tuple[int, int]:
        """The indices of prompt and sample."""
        return self.prompt_index, self.sample_index


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    group_size: int,
    messages: Sequence[Messages | None] | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    images: Sequence[tuple[Sequence[StoredImage], Spans]] | None = None,
) -> list[PromptText]:
    """Return a sampler's prompts: those at `indices` among `prompts` (ids), each `group_size`
    times. Raises ValueError where an image's file is gone.
    """
    batch = list[PromptText]()
    for i in indices:
        text = tokenizer.decode(list(prompts[i]))
        (stored, spans) = images[i] if images else ((), ())
        read = tuple(image.read() for image in stored)
        row = rows[i] if rows else None
        chat = messages[i] if messages else None
        batch += [
            PromptText(text, prompts[i], i, sample, chat, row, read, spans)
            for sample in range(group_size)
        ]
    return batch


def _with_images(messages: Messages, images: Iterable[Image]) -> Messages:
    """Return copies of the messages, in which `images` fill the empty image parts that
    `split_images` leaves.
    """
    rest = iter(images)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return part | {"image": next(rest)} if part["type"] == "image" else part

    copies = [dict(message) for message in messages]
    for message in copies:
        parts = message.get("content")
        if isinstance(parts, list):
            message["content"] = [filled(part) for part in parts]
    return copies


@dataclass
class Request:
    """One prompt of a sampler's call, encoded for the engine. `place`, `position` and `parent` are
    as in `exact_ids.Generation`.
    """

    input: PromptInput
    text: str
    position: int
    place: tuple[int, int]
    parent: Generation | None = None
    messages: Messages | None = None

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.continued = True


@dataclass(frozen=True)
class PromptReader:
    """Turns the prompts of a sampler's call into requests: finds the earlier answers that they
    continue, and encodes the text after these.

    `rules`: how images are treated; None: prompts have no images.
    """

    tokenizer: "PreTrainedTokenizerBase"
    settings: RolloutSettings
    batch: Sequence[PromptText]
    history: History
    rules: ImageRules | None = None

    def requests(self, prompts: Any) -> list[Request]:
        """Return the requests for one or several prompts: texts, lists of ids, or dictionaries with
        `prompt_token_ids` or `prompt`, and `multi_modal_data`.
        """
        one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed = [prompts] if one else list(prompts)
        return [self._request(prompt, i, self._place(i, len(listed))) for i, prompt in enumerate(listed)]

    def chat_requests(
        self, messages: Any, tools: Any, template_kwargs: Mapping[str, Any]
    ) -> list[Request]:
        """Return the requests for one or several conversations. Raises ValueError without any."""
        if not messages:
            raise ValueError("llm.chat needs messages: a conversation, or a list of them")
        chats = [messages] if isinstance(messages[0], Mapping) else messages
        kwargs = (
            {"add_generation_prompt": True} | self.settings.chat_template_kwargs | dict(template_kwargs)
        )
        requests = []
        for i, chat in enumerate(chats):
            copies = [dict(message) for message in chat]
            requests.append(self._chat_request(copies, i, self._place(i, len(chats)), tools, kwargs))
        return requests

    def _request(self, prompt: Any, position: int, place: tuple[int, int]) -> Request:
        """Return the request for a prompt in any form. If the prompt continues an answer, the
        request begins with the ids of that answer and of its prompt.
        """
        sources: Any = []
        if isinstance(prompt, Mapping):
            sources = (prompt.get("multi_modal_data") or {}).get("image") or []
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        images = self._read(sources if isinstance(sources, list | tuple) else [sources])
        if isinstance(prompt, PromptText):
            return self._checked(
                Request(self._appended(_input_of(prompt), "", images), prompt, position, prompt.place)
            )
        if not isinstance(prompt, str):
            prompt = [int(token) for token in prompt]
        parent = self.history.before(prompt, position)
        place = parent.place if parent else place
        if not isinstance(prompt, str):
            prompt_input = self._input_with(prompt, parent, images)
            return self._checked(
                Request(prompt_input, self.tokenizer.decode(prompt), position, place, parent)
            )
        if parent:
            prompt_input = self._appended(
                _input_of(parent), prompt[len(parent.prompt_text + parent.text) :], images, parent
            )
        elif start := max((p for p in self.batch if prompt.startswith(p)), key=len, default=None):
            prompt_input = self._appended(_input_of(start), prompt[len(start) :], images)
        else:
            prompt_input = self._appended(PromptInput([]), prompt, images, special=True)
        return self._checked(Request(prompt_input, prompt, position, place, parent))

    def _chat_request(
        self,
        messages: Messages,
        position: int,
        place: tuple[int, int],
        tools: Any,
        kwargs: dict[str, Any],
    ) -> Request:
        """Return the request for a conversation. Only the messages after the last known answer are
        rendered.
        """
        images: tuple[Image, ...] = ()
        plain = messages
        if self.rules is not None:
            plain, sources = split_images(messages)
            images = self._read(sources)
            messages = _with_images(plain, images)
        if (prefix := self.history.known_prefix(messages, position)) and (parent := prefix.answer):
            text = following(self._rendered([*STAND_IN, *plain[prefix.messages :]], **kwargs))
            prompt_input = self._appended(_input_of(parent), text, images, parent)
            text = self.tokenizer.decode(prompt_input.ids)
            return self._checked(Request(prompt_input, text, position, parent.place, parent, messages))
        # A conversation that equals one of the batch's prompts gets that prompt's ids.
        same = []
        if tools is None:
            same = [prompt for prompt in self.batch if prompt.messages == messages]
        if same:
            prompt_of_batch = next((prompt for prompt in same if prompt.place == place), same[0])
            return Request(
                _input_of(prompt_of_batch), prompt_of_batch, position, place, messages=messages
            )
        text = self._rendered(plain, tools=tools, **kwargs)
        return self._checked(
            Request(
                self._appended(PromptInput([]), text, images), text, position, place, messages=messages
            )
        )

    def _rendered(self, messages: Messages, **kwargs: Any) -> str:
        form = chat_form(self.tokenizer) if self.rules is None else self.rules.processor.form
        with subject("a prompt"):
            return form.render(clean_messages(messages), **kwargs)

    def _read(self, sources: Sequence[Any]) -> tuple[Image, ...]:
        if sources and self.rules is None:
            raise ValueError("a prompt has images, but the run has none: set data.max_images")
        with subject("a prompt"):
            return self.rules.read(sources) if self.rules is not None else ()

    def _appended(
        self,
        start: PromptInput,
        text: str,
        images: tuple[Image, ...],
        parent: Generation | None = None,
        special: bool = False,
    ) -> PromptInput:
        """Return `start` with text appended. If `start` ends with the answer `parent`, and both
        this answer's end and the text's beginning are tokens that end a turn, the text's is left
        out.

        `images` are empty, or those of `start` and then one for each placeholder in the text. With
        `special`, the tokenizer adds its special tokens.
        """
        spans: Spans = ()
        if later := _images_after(start, images):
            assert self.rules is not None
            with subject("a prompt"):
                added, spans = self.rules.processor.expand(text, later, special=special)
        elif special:
            [added] = plain_ids(self.tokenizer, [text])
        else:
            added = list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        ends = {self.tokenizer.eos_token_id, *self.settings.sampling.stop_token_ids}
        kept = added if parent is None else without_second_end(parent.ids[-1], added, ends)
        cut = len(added) - len(kept)
        return start.followed_by(kept, later, tuple((begin - cut, length) for begin, length in spans))

    def _input_with(
        self, ids: list[int], parent: Generation | None, images: tuple[Image, ...]
    ) -> PromptInput:
        """Return the input for ids in which each image already has one placeholder for each of its
        features.
        """
        if self.rules is None:
            return PromptInput(ids)
        begins = (p for p in self.batch if ids[: len(p.token_ids)] == p.token_ids)
        origin = parent or next(begins, None)
        start = _input_of(origin) if origin is not None else PromptInput([])
        added = ids[len(start.ids) :]
        later = _images_after(start, images)
        with subject("a prompt"):
            return start.followed_by(added, later, self.rules.processor.spans(added, later))

    def _checked(self, request: Request) -> Request:
        """Return the request unchanged. Raises ValueError if its images, apart from those of the
        dataset's row, are too large together.
        """
        if self.rules is not None:
            prompt_images = (
                image
                for prompt in self.batch
                if prompt.place == request.place
                for image in prompt.images
            )
            with subject("a prompt"):
                self.rules.check_bytes(request.input.images, {image.digest for image in prompt_images})
        return request

    def _place(self, position: int, width: int) -> tuple[int, int]:
        """Return the indices (prompt, sample) that seed the sampling of a prompt that is not from
        the batch.

        They are those of the batch's prompt at the same position, if the call has as many prompts
        as the batch; else (-1 - position, 0).
        """
        return self.batch[position].place if width == len(self.batch) else (-1 - position, 0)


def _input_of(origin: PromptText | Generation) -> PromptInput:
    ids = origin.token_ids if isinstance(origin, PromptText) else origin.ids
    return PromptInput(ids, origin.images, origin.image_spans)


def _images_after(start: PromptInput, images: tuple[Image, ...]) -> tuple[Image, ...]:
    """Return the images that follow those of `start`. Raises ValueError if `images` does not begin
    with the images of `start`.
    """
    if images and images[: len(start.images)] != start.images:
        raise ValueError("a prompt's images must begin with those of the prompt that it continues")
    return images[len(start.images) :]
