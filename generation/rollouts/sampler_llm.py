"""The policy with the interface of `vllm.LLM`, for samplers (level 5): `generate` and `chat`, blocking.

The sampler runs on a thread of its own while the engine's loop serves its calls, all requests of a call at once. It
gets vLLM's own outputs; each is remembered, so that the sampler's results are recognised in the end. Prompts come in
the many forms that vLLM takes; of a prompt that continues an earlier answer only the rest is encoded.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from generation.engine.logits import check_request
from generation.engine.sampling import response_budget, sample_seed, vllm_sampling_params
from generation.engine.vllm_compat import request_errors
from generation.exact_ids import (
    Generation,
    History,
    encode_following,
    generations_of,
    template_message,
    without_second_end,
)
from generation.rollouts.episode import RolloutSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput, SamplingParams

    from generation.engine.engine import Engine

    _Work = Coroutine[Any, Any, list[RequestOutput]]

Messages = list[dict[str, Any]]

# The parameters that change the distribution; an answer that is trained on must have training's values.
_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"),
)


class PromptText(str):
    """A prompt's text, which knows the ids it stands for: an entry of a sampler's `prompts`.

    Attributes:
        token_ids: the prompt, chat template applied.
        prompt_index, sample_index: the trajectory that begins with it; each prompt occurs once for every sample.
        messages: those it was rendered from, or None.
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


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    group_size: int,
    messages: Sequence[Messages | None] | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> list[PromptText]:
    """A sampler's prompts: those at `indices` among `prompts` (ids), each once for every sample of its group."""
    return [
        PromptText(text, prompts[i], i, sample, messages[i] if messages else None, rows[i] if rows else None)
        for i in indices
        for text in [tokenizer.decode(list(prompts[i]))]
        for sample in range(group_size)
    ]


@dataclass
class Request:
    """One prompt of a call, ready for the engine; `place`, `position` and `parent` as in `Generation`."""

    token_ids: list[int]
    text: str
    position: int
    place: tuple[int, int]
    parent: Generation | None = None
    messages: Messages | None = None

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.continued = True


class Prompts:
    """Turns a call's prompts into requests: finds the answers that they continue, and encodes the new text."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        settings: RolloutSettings,
        batch: Sequence[PromptText],
        history: History,
    ) -> None:
        self._tokenizer, self._settings, self._batch, self._history = tokenizer, settings, list(batch), history

    def requests(self, prompts: Any) -> list[Request]:
        """Of a prompt or several: texts, lists of ids, or dictionaries with `prompt_token_ids` or `prompt`."""
        one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        given = [prompts] if one else list(prompts)
        return [self._request(prompt, i, self._place(i, len(given))) for i, prompt in enumerate(given)]

    def chat_requests(self, messages: Any, tools: Any, template_kwargs: Mapping[str, Any]) -> list[Request]:
        """Of one or several conversations."""
        if not messages:
            raise ValueError("llm.chat needs messages: a conversation, or a list of them")
        chats = [messages] if isinstance(messages[0], Mapping) else messages
        kwargs = {"add_generation_prompt": True} | self._settings.chat_template_kwargs | dict(template_kwargs)
        return [
            self._chat_request([dict(m) for m in chat], i, self._place(i, len(chats)), tools, kwargs)
            for i, chat in enumerate(chats)
        ]

    def _request(self, prompt: Any, position: int, place: tuple[int, int]) -> Request:
        """Of a prompt in any form. One that continues an answer has its ids, and its place."""
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, PromptText):
            return Request(prompt.token_ids, prompt, position, prompt.place)
        if not isinstance(prompt, str):
            prompt = [int(token) for token in prompt]
        parent = self._history.before(prompt, position)
        place = parent.place if parent else place
        if not isinstance(prompt, str):
            return Request(prompt, self._tokenizer.decode(prompt), position, place, parent)
        if parent:
            ids = self._after(parent, self._encode(prompt[len(parent.prompt_text + parent.text) :]))
        elif start := max((p for p in self._batch if prompt.startswith(p)), key=len, default=None):
            ids = start.token_ids + self._encode(prompt[len(start) :])
        else:
            ids = self._tokenizer(prompt)["input_ids"]
        return Request(ids, prompt, position, place, parent)

    def _chat_request(
        self, messages: Messages, position: int, place: tuple[int, int], tools: Any, kwargs: dict[str, Any]
    ) -> Request:
        """Of a conversation; only the messages after the last known answer are rendered."""
        plain = [template_message(message) for message in messages]
        if (known := self._history.known_prefix(messages, position)) and (parent := known.answer):
            ids = self._after(parent, encode_following(self._tokenizer, plain[known.messages :], kwargs))
            return Request(ids, self._tokenizer.decode(ids), position, parent.place, parent, messages)
        # A conversation that is no more than one of the batch's own prompts has that prompt's ids.
        same = [] if tools is not None else [prompt for prompt in self._batch if prompt.messages == messages]
        if same:
            own = next((prompt for prompt in same if prompt.place == place), same[0])
            return Request(own.token_ids, own, position, place, messages=messages)
        text = str(self._tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, **kwargs))
        return Request(self._encode(text), text, position, place, messages=messages)

    def _after(self, parent: Generation, added: list[int]) -> list[int]:
        ends = {self._tokenizer.eos_token_id, *self._settings.sampling.stop_token_ids}
        return parent.ids + without_second_end(parent.ids[-1], added, ends)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _place(self, position: int, width: int) -> tuple[int, int]:
        """The place that decides the seed of a prompt that is not one of the batch's: the batch's at its position."""
        return self._batch[position].place if width == len(self._batch) else (-1 - position, 0)


class SamplerLLM:
    """One batch's view of the policy, as a `vllm.LLM`. Its methods block: do not call them on the engine's own loop.

    Attributes:
        sampling_params: used where a call gives none; training's, or evaluation's during an evaluation.
        history: every answer so far.
        fatal: the error of the engine itself, if there was one: it ends the rollout whatever the sampler makes of it.
    """

    def __init__(
        self,
        engine: "Engine",
        tokenizer: "PreTrainedTokenizerBase",
        settings: RolloutSettings,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[PromptText] = (),
        timeout: float = 3600.0,
    ) -> None:
        """`loop` is the one the engine runs on; `timeout` (seconds) is the longest a call may take."""
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.history = History()
        self.fatal: Exception | None = None
        self._prompts = Prompts(tokenizer, settings, batch, self.history)
        self.sampling_params = vllm_sampling_params(settings.sampling, seed=None)
        self.sampling_params.detokenize = self.sampling_params.skip_special_tokens = True
        self._training = self.sampling_params
        self._loop, self._timeout = loop, timeout
        self._calls: Counter[tuple[int, int]] = Counter()
        self._running: set[Future[Any]] = set()
        self._closed = False
        self._numbers = itertools.count()

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self.tokenizer

    def generate(self, prompts: Any = None, sampling_params: Any = None, **options: Any) -> "list[RequestOutput]":
        """As `vllm.LLM.generate`: one output for each prompt, in order.

        A prompt that leaves no room, or that vLLM refuses, gives an output without tokens, whose finish reason is
        "length" or "error": one bad prompt does not lose the others.

        Args:
            prompts: a text, a list of ids, a dictionary with `prompt_token_ids` or `prompt`, or a list of such.
            sampling_params: vLLM's, or a list with one for each prompt, or None for `self.sampling_params`.
            options: `prompt_token_ids` instead of prompts; `use_tqdm` is accepted, there is no bar.
        """
        return self._wait(self._generate(prompts, sampling_params, options))

    async def generate_async(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> "list[RequestOutput]":
        """`generate` for samplers that are coroutines."""
        return await asyncio.wrap_future(self._submit(self._generate(prompts, sampling_params, options)))

    def chat(self, messages: Any, sampling_params: Any = None, **options: Any) -> "list[RequestOutput]":
        """As `vllm.LLM.chat`: one output for each conversation, in order.

        Args:
            messages: one conversation, or a list of them. An earlier answer that it continues is kept as it was
                sampled; the assistant's message may hold its text, the end of it, or the tool calls in it.
            sampling_params: as for `generate`.
            options: `tools` (OpenAI schemas), `chat_template_kwargs`; `use_tqdm` is accepted.
        """
        options = _options(options, "tools", "chat_template_kwargs", "chat_template_content_format")
        kwargs = options.get("chat_template_kwargs") or {}
        requests = self._prompts.chat_requests(messages, options.get("tools"), kwargs)
        return self._wait(self._run(requests, self._params(sampling_params, len(requests))))

    @contextmanager
    def update_sampling_params(self, **changes: Any) -> "Iterator[SamplingParams]":
        """Other values in `sampling_params` for the length of a block. Raises ValueError where it has no such field."""
        check_request(changes)
        before = self.sampling_params
        if unknown := sorted(name for name in changes if not hasattr(before, name)):
            raise ValueError(f"update_sampling_params: vLLM's SamplingParams has no {', '.join(unknown)}")
        self.sampling_params = before.clone()
        for name, value in changes.items():
            setattr(self.sampling_params, name, value)
        try:
            yield self.sampling_params
        finally:
            self.sampling_params = before

    def close(self) -> None:
        """End the calls that still wait, and refuse further ones: a sampler that was given up ends at its next call."""
        self._closed = True
        for future in list(self._running):
            future.cancel()

    def _generate(self, prompts: Any, sampling_params: Any, options: dict[str, Any]) -> "_Work":
        ids = _options(options, "prompt_token_ids").get("prompt_token_ids")
        if (prompts is None) == (ids is None):
            raise ValueError("llm.generate needs either prompts or prompt_token_ids")
        requests = self._prompts.requests(prompts if ids is None else ids)
        return self._run(requests, self._params(sampling_params, len(requests)))

    def _submit(self, work: "_Work") -> "Future[list[RequestOutput]]":
        if self._closed:
            work.close()
            raise RuntimeError("this rollout is over: its llm samples nothing any more")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _wait(self, work: "_Work") -> "list[RequestOutput]":
        future = self._submit(work)
        try:
            return future.result(self._timeout)
        except TimeoutError as error:
            future.cancel()
            raise TimeoutError(f"a call of the sampler did not finish within {self._timeout:.0f} s") from error

    def _params(self, given: Any, count: int) -> "list[SamplingParams]":
        """Copies that ask for what a trajectory needs: the final output only, with log-probabilities and text."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
        if len(listed) != count:
            raise ValueError(f"{count} prompts have {len(listed)} sampling_params: give one for all, or one for each")
        own = list[SamplingParams]()
        for params in listed:
            if isinstance(params, Mapping):
                check_request(params)
                params = SamplingParams(**params)
            own.append((params or self.sampling_params).clone())
            own[-1].logprobs, own[-1].detokenize = own[-1].logprobs or 0, True
            own[-1].output_kind = RequestOutputKind.FINAL_ONLY
        return own

    async def _run(self, requests: list[Request], params: "list[SamplingParams]") -> "list[RequestOutput]":
        return list(await asyncio.gather(*map(self._one, requests, params)))

    async def _one(self, request: Request, params: "SamplingParams") -> "RequestOutput":
        """The output of one request, remembered in the history; its seed depends on its place alone."""
        settings, call = self.settings, self._calls[request.place]
        self._calls[request.place] += 1
        longest = params.max_tokens or self.engine.settings.max_model_len
        params.max_tokens = response_budget(len(request.token_ids), longest, self.engine.settings.max_model_len)
        if params.seed is None and params.temperature > 0:
            params.seed = sample_seed(settings.seed, settings.step, *request.place, call)
        output, error = await self._sample(request, params)
        output.prompt = output.prompt or str(request.text)
        for generation in generations_of(output, settings.policy_version):
            generation.position, generation.place, generation.parent = request.position, request.place, request.parent
            generation.off_policy, generation.error = off_policy(params, self._training), error
            self.history.add(generation, request.messages)
        return output

    async def _sample(self, request: Request, params: "SamplingParams") -> "tuple[RequestOutput, str]":
        """The engine's output, or one without tokens and the reason for it."""
        if params.max_tokens == 0:
            count, limit = len(request.token_ids), self.engine.settings.max_model_len
            problem = "" if request.parent else f"a prompt of {count} tokens leaves no room in {limit}"
            return self._without_tokens(request, "length"), problem
        prompt = {"prompt_token_ids": request.token_ids}
        try:
            return await self.engine.request(prompt, params, policy_version=self.settings.policy_version), ""
        except request_errors() as error:
            return self._without_tokens(request, "error"), f"{type(error).__name__}: {error}"
        except Exception as error:
            self.fatal = error
            raise

    def _without_tokens(self, request: Request, reason: str) -> "RequestOutput":
        from vllm.outputs import CompletionOutput, RequestOutput

        name = f"{reason}-{next(self._numbers)}"
        none = CompletionOutput(0, "", [], cumulative_logprob=0.0, logprobs=[], finish_reason=reason)
        return RequestOutput(name, request.text, request.token_ids, None, [none], finished=True)


def off_policy(params: "SamplingParams", training: "SamplingParams") -> str:
    """The difference of the distribution of `params` from training's, as "temperature is 0.5 instead of 1.0"; or ""."""

    def value(of: "SamplingParams", name: str) -> Any:
        found = getattr(of, name)
        return max(found, 0) if name == "top_k" else found or 0

    different = [name for name in _DISTRIBUTION if value(params, name) != value(training, name)]
    return ", ".join(f"{name} is {getattr(params, name)} instead of {getattr(training, name)}" for name in different)


def _options(options: dict[str, Any], *known: str) -> dict[str, Any]:
    """The options of a call, checked. Raises ValueError naming one that has no meaning here."""
    check_request(options)
    if unknown := sorted(set(options) - {"use_tqdm", *known}):
        raise ValueError(f"llm.generate and llm.chat take no {', '.join(unknown)} here")
    return options
