"""The policy with the interface of `vllm.LLM`, for samplers (level 5): blocking `generate` and
`chat`.

The sampler runs on a separate thread, while the engine's event loop serves all requests of a call
at once. The sampler gets vLLM's own outputs. Each output is recorded, so that the sampler's results
can be recognised at the end.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from generation.engine.image_inputs import ImageCountError
from generation.engine.logits import check_request
from generation.engine.sampling import response_budget, sample_seed, vllm_sampling_params
from generation.engine.thread import waited_for
from generation.engine.vllm_compat import request_errors
from generation.exact_ids import History, generations_of
from generation.images import ImageRules
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.sampler_prompts import PromptReader, PromptText, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput, SamplingParams

    from generation.engine.engine import Engine

    _Work = Coroutine[Any, Any, list[RequestOutput]]

# The parameters that change the sampling distribution; answers that are trained on need training's
# values.
_DISTRIBUTION = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ),
    *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"),
)


class SamplerLLM:
    """The policy as a `vllm.LLM` for one batch. Its methods block: do not call them on the engine's
    event loop.

    Attributes: sampling_params: the parameters for calls without any; training's, or evaluation's
        during an evaluation. history: all answers so far. fatal: the engine's own error, if there
        was one; it ends the rollout even if the sampler catches it.
    """

    def __init__(
        self,
        engine: "Engine",
        tokenizer: "PreTrainedTokenizerBase",
        settings: RolloutSettings,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[PromptText] = (),
        timeout: float = 3600.0,
        rules: ImageRules | None = None,
    ) -> None:
        """Make an LLM for `batch` on an engine that runs on `loop`. A call may take `timeout`
        seconds. `rules`: how images are treated; None: prompts have no images.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.history = History()
        self.fatal: Exception | None = None
        self._prompts = PromptReader(tokenizer, settings, batch, self.history, rules)
        self.sampling_params = vllm_sampling_params(settings.sampling, seed=None)
        self.sampling_params.detokenize = self.sampling_params.skip_special_tokens = True
        self._training = self.sampling_params
        self._loop = loop
        self._timeout = timeout
        self._calls: Counter[tuple[int, int]] = Counter()
        self._running: set[Future[Any]] = set()
        self._closed = False
        self._numbers = itertools.count()

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the model's tokenizer."""
        return self.tokenizer

    def generate(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> "list[RequestOutput]":
        """Return one output for each prompt, in order, as `vllm.LLM.generate` does.

        A prompt that leaves no room, or that vLLM refuses, gets an output without tokens, whose
        finish reason is "length" or "error", so that the outputs of other prompts are not lost.

        Args: prompts: a text, a list of ids, a dictionary with `prompt_token_ids` or `prompt`, or a
            list of these. The dictionary's `multi_modal_data` may have all images of a prompt, as
            `image`. A text has one of the model's placeholders for each image; ids have as many as
            the image takes. sampling_params: vLLM's, or a list with one for each prompt, or None
            for `self.sampling_params`. options: `prompt_token_ids` instead of prompts; `use_tqdm`
            is accepted and ignored.
        """
        return self._wait(self._generate(prompts, sampling_params, options))

    async def generate_async(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> "list[RequestOutput]":
        """Do the same as `generate`, for samplers that are coroutines."""
        return await asyncio.wrap_future(self._submit(self._generate(prompts, sampling_params, options)))

    def chat(self, messages: Any, sampling_params: Any = None, **options: Any) -> "list[RequestOutput]":
        """Return one output for each conversation, in order, as `vllm.LLM.chat` does.

        Args: messages: one conversation, or a list of them. An earlier answer that a conversation
            continues keeps the ids that were sampled; the assistant's message may have its text,
            the end of its text, or its tool calls. Parts of messages may be images, as in rows.
            sampling_params: as for `generate`. options: `tools` (OpenAI schemas),
            `chat_template_kwargs`; `use_tqdm` is accepted and ignored.
        """
        options = _options(options, "tools", "chat_template_kwargs")
        kwargs = options.get("chat_template_kwargs") or {}
        requests = self._prompts.chat_requests(messages, options.get("tools"), kwargs)
        return self._wait(self._run(requests, self._params(sampling_params, len(requests))))

    @contextmanager
    def update_sampling_params(self, **changes: Any) -> "Iterator[SamplingParams]":
        """Change fields of `sampling_params` for the length of a block. Raises ValueError for an
        unknown field.
        """
        check_request(changes)
        before = self.sampling_params
        if unknown := sorted(name for name in changes if not hasattr(before, name)):
            raise ValueError(
                f"update_sampling_params: vLLM's SamplingParams has no {', '.join(unknown)}"
            )
        self.sampling_params = before.clone()
        for name, value in changes.items():
            setattr(self.sampling_params, name, value)
        try:
            yield self.sampling_params
        finally:
            self.sampling_params = before

    def close(self) -> None:
        """End the calls that still wait, and refuse further calls, so that a sampler that was given
        up ends.
        """
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
            raise RuntimeError("this rollout has ended, so its llm samples no more")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _wait(self, work: "_Work") -> "list[RequestOutput]":
        return waited_for(self._submit(work), self._timeout, "a call of the sampler")

    def _params(self, params_of_call: Any, count: int) -> "list[SamplingParams]":
        """Return copies that request the final output only, with log-probabilities and text, as
        trajectories need.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if isinstance(params_of_call, Sequence) and not isinstance(params_of_call, str):
            listed = list(params_of_call)
        else:
            listed = [params_of_call] * count
        if len(listed) != count:
            raise ValueError(
                f"{count} prompts have {len(listed)} sampling_params: give one for all, or one for each"
            )
        copies = list[SamplingParams]()
        for params in listed:
            if isinstance(params, Mapping):
                check_request(params)
                params = SamplingParams(**params)
            copies.append((params or self.sampling_params).clone())
            copies[-1].logprobs = copies[-1].logprobs or 0
            copies[-1].detokenize = True
            copies[-1].output_kind = RequestOutputKind.FINAL_ONLY
        return copies

    async def _run(
        self, requests: list[Request], params: "list[SamplingParams]"
    ) -> "list[RequestOutput]":
        return list(await asyncio.gather(*map(self._one, requests, params)))

    async def _one(self, request: Request, params: "SamplingParams") -> "RequestOutput":
        """Sample one request, record its answers in the history, and return its output.

        The seed depends on prompt, sample and the number of the call only.
        """
        settings = self.settings
        call = self._calls[request.place]
        self._calls[request.place] += 1
        longest = params.max_tokens or self.engine.settings.max_model_len
        params.max_tokens = response_budget(
            len(request.input.ids), longest, self.engine.settings.max_model_len
        )
        if params.seed is None and params.temperature > 0:
            params.seed = sample_seed(settings.seed, settings.step, *request.place, call)
        output, error = await self._sample(request, params)
        output.prompt = output.prompt or str(request.text)
        for generation in generations_of(output, settings.policy_version):
            generation.position = request.position
            generation.place = request.place
            generation.parent = request.parent
            generation.off_policy = off_policy(params, self._training)
            generation.error = error
            generation.images = request.input.images
            generation.image_spans = request.input.spans
            self.history.add(generation, request.messages)
        return output

    async def _sample(self, request: Request, params: "SamplingParams") -> "tuple[RequestOutput, str]":
        """Return the engine's output, or an output without tokens and the reason for it."""
        if params.max_tokens == 0:
            count = len(request.input.ids)
            limit = self.engine.settings.max_model_len
            problem = "" if request.parent else f"a prompt of {count} tokens leaves no room in {limit}"
            return self._without_tokens(request, "length"), problem
        try:
            prompt = await self.engine.prompt(request.input)
            return await self.engine.request(
                prompt, params, policy_version=self.settings.policy_version
            ), ""
        except ImageCountError as error:
            # The model's files are to blame, so every other prompt would fail, too
            self.fatal = error
            raise
        except request_errors() as error:
            return self._without_tokens(request, "error"), f"{type(error).__name__}: {error}"
        except Exception as error:
            self.fatal = error
            raise

    def _without_tokens(self, request: Request, reason: str) -> "RequestOutput":
        from vllm.outputs import CompletionOutput, RequestOutput

        name = f"{reason}-{next(self._numbers)}"
        none = CompletionOutput(0, "", [], cumulative_logprob=0.0, logprobs=[], finish_reason=reason)
        return RequestOutput(name, request.text, request.input.ids, None, [none], finished=True)


def off_policy(params: "SamplingParams", training: "SamplingParams") -> str:
    """Return how `params` differ from training's distribution, as "temperature is 0.5 instead of
    1.0"; "" if not.
    """

    def value(of: "SamplingParams", name: str) -> Any:
        setting = getattr(of, name)
        return max(setting, 0) if name == "top_k" else setting or 0

    different = [name for name in _DISTRIBUTION if value(params, name) != value(training, name)]
    return ", ".join(
        f"{name} is {getattr(params, name)} instead of {getattr(training, name)}" for name in different
    )


def _options(options: dict[str, Any], *allowed: str) -> dict[str, Any]:
    """Check and return the options of a call. Raises ValueError naming one that is not
    supported.
    """
    check_request(options)
    if unknown := sorted(set(options) - {"use_tqdm", *allowed}):
        raise ValueError(f"llm.generate and llm.chat take no {', '.join(unknown)} here")
    return options
