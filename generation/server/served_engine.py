"""The engine as vLLM's handlers see it: requests are checked, prompts begin with exact ids, and
answers are captured.

This module also holds whatever depends on parts of vLLM's HTTP server that are private or change
between releases; it was checked with vLLM 0.32.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from generation.engine.engine import Engine, Stream
from generation.engine.image_inputs import ImageCountError
from generation.engine.lifecycle import EngineStateError
from generation.engine.logits import REQUESTED
from generation.engine.sampling import SamplingSettings, response_budget, vllm_sampling_params
from generation.engine.slices import Turnstile, Unfinished
from generation.engine.thread import as_ready
from generation.engine.vllm_compat import request_errors
from generation.engine.vllm_differences import server_arguments, unknown_to_vllm
from generation.exact_ids import Generation
from generation.images import PromptInput
from generation.server.bodies import Limits, check_unforced, exact_prompt, fill_sampling, short
from generation.server.conversations import (
    CURRENT,
    VLLM_ERRORS,
    Conversations,
    Refused,
    ServedCall,
    ServerSettings,
)
from generation.server.dialects import as_chat
from generation.server.image_messages import continued, serve_images

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.outputs import CompletionOutput

_log = logging.getLogger(__name__)
# Requests may set these as they like: they decide how many answers there are, how long they are,
# and which figures come with them. None changes the probability of a token.
_UNCHECKED = {
    *(
        "n",
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "output_text_buffer_length",
    ),
    *(
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
    ),
    *(
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
    ),
    *("stream_interval", "skip_clone", "skip_reading_prefix_cache", "routed_experts_prompt_start"),
    *("truncate_prompt_tokens", "repetition_detection"),
}


class ServedEngine:
    """vLLM's engine with another `generate`; every other attribute is that of the engine."""

    def __init__(
        self, worker: Engine, settings: ServerSettings, limits: Limits, conversations: Conversations
    ) -> None:
        self._worker = worker
        self._tokenizer = worker.llm.get_tokenizer()
        self._settings = settings
        self._limits = limits
        self._conversations = conversations
        if settings.image_rules is not None:
            serve_images(worker.llm.renderer, settings.image_rules)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker.llm, name)

    async def check(self, request: Any, handler: Any) -> None:
        """Check a request that vLLM has parsed, and fill in the sampling settings that it leaves
        open, before `handler` works on it.
        """
        if (call := CURRENT.get()) is None:
            return
        with _noting_refusal(call):
            if call.find_exact is not None and (chat := as_chat(request, handler)) is not None:
                call.messages, call.exact = chat["messages"], await call.find_exact(chat)
            if call.sampling is not None:
                check_unforced(request)
            if type(request).__name__ == "AnthropicMessagesRequest":
                if call.sampling is not None:
                    # Anthropic's clients must name a length, so it is cut, not refused
                    request.max_tokens = min(request.max_tokens, call.sampling.max_tokens)
                return  # the chat that vLLM makes of this request is checked, too
            self._limits.check(request)
            if call.sampling is not None:
                fill_sampling(request, call.sampling)
            elif not request.ignore_eos:
                chosen = getattr(request, "stop_token_ids", None) or []
                request.stop_token_ids = [*chosen, *self._settings.eos_token_ids]
            call.unknown = unknown_to_vllm(request, ("min_p", "stop_token_ids"))

    def generate(
        self, prompt: Any, sampling_params: "SamplingParams", request_id: str, **options: Any
    ) -> Stream:
        """Return a stream of outputs, as vLLM's engine does. Raises Refused at once, before the
        stream begins.
        """
        call = CURRENT.get()
        if call is None:
            return self._worker.submit(prompt, sampling_params, request_id, **options)
        with _noting_refusal(call):
            version = check_ready(self._worker, call)
            exact = self._exact_prompt(call, prompt)
            params = self._params(call, sampling_params, len(exact.ids))
        first = call.choices
        call.choices = call.choices + params.n
        sampled = _Sampled(exact, version, params)
        turnstile = call.conversation.turnstile if call.conversation is not None else None
        if turnstile is None:
            outputs = self._uncut(sampled, prompt, request_id, **options)
        else:
            outputs = self._in_slices(turnstile, sampled, prompt.get("prompt"), **options)
        return self._captured(call, outputs, sampled, first)

    async def _uncut(
        self, sampled: "_Sampled", prompt: Mapping[str, Any], name: str, **options: Any
    ) -> Stream:
        """Yield the outputs of a request whose answers are not cut into slices."""
        completed = {**prompt, **await self._worker.prompt(sampled.prompt)}
        async with aclosing(self._worker.submit(completed, sampled.params, name, **options)) as outputs:
            async for output in outputs:
                yield output

    async def _in_slices(
        self, turnstile: Turnstile, sampled: "_Sampled", text: str | None, **options: Any
    ) -> Stream:
        """Yield one output, also to a streaming client, when all of the request's choices are
        complete.
        """
        from vllm.sampling_params import RequestOutputKind

        params = sampled.params
        prompt = sampled.prompt
        slice_params = params.clone()
        slice_params.n = 1
        slice_params.output_kind = RequestOutputKind.FINAL_ONLY

        async def choice(index: int) -> "tuple[RequestOutput, CompletionOutput]":
            # vLLM's seeds with n > 1
            answer = Unfinished(prompt.ids, (params.seed or 0) + index, params.max_tokens)
            outputs = await self._worker.request_in_slices(
                answer, slice_params, turnstile, prompt, **options
            )
            sampled.versions[index] = answer.versions
            return outputs[0], joined_slices(outputs, slice_params, self._tokenizer, index)

        async with aclosing(as_ready(map(choice, range(params.n)))) as ready:
            done = dict([pair async for pair in ready])
        output = done[0][0]
        output.prompt = text
        output.outputs = [done[index][1] for index in sorted(done)]
        output.finished = True
        yield output

    async def _captured(
        self, call: ServedCall, outputs: Stream, sampled: "_Sampled", first: int
    ) -> Stream:
        """Yield the outputs as they arrive, and capture the generation of each choice that is
        finished.
        """
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    call.taken = True
                    call.open_in(self._conversations)
                    for choice in output.outputs:
                        if (generation := sampled.add(choice)) is not None:
                            call.generations[first + choice.index] = generation
                            if call.conversation is not None:
                                call.conversation.history.capture(generation)
                    yield output
            except Refused as refused:
                raise client_error(call, refused) from refused
            except ImageCountError as error:
                # The model's files are to blame, so every other request would fail, too
                if call.conversation is not None:
                    call.conversation.fatal = error
                raise client_error(call, Refused(500, str(error))) from error
            except request_errors() as error:
                if call.taken or (
                    error.__cause__ is not None and not isinstance(error.__cause__, VLLM_ERRORS)
                ):
                    raise
                sentence = str(error) or f"vLLM cannot take the request: {error.__cause__!r}"
                raise client_error(call, Refused(400, sentence)) from error

    def _exact_prompt(self, call: ServedCall, prompt: Any) -> PromptInput:
        """Return the prompt with exact ids, and its images."""
        if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
            raise Refused(400, "a prompt must be text or token ids: embeddings cannot be trained on")
        ids = list(prompt["prompt_token_ids"])
        exact = call.exact
        if exact is not None and exact.answer is not None and call.conversation is not None:
            ids = call.conversation.history.continued(exact, ids)
        elif exact is not None:
            ids = exact_prompt(exact, self._tokenizer, ids, self._settings.eos_token_ids)
        if (expanded := call.expanded) is None or self._settings.image_rules is None:
            return PromptInput(ids)
        if prompt["prompt_token_ids"] != expanded.ids:
            raise Refused(400, "truncate_prompt_tokens may cut an image in two: leave it out")
        return expanded if exact is None else continued(expanded, exact, ids, self._settings.image_rules)

    def _params(
        self, call: ServedCall, params: "SamplingParams", prompt_length: int
    ) -> "SamplingParams":
        """Return the request's parameters with a length that fits in the context, and with
        log-probabilities.
        """
        length = self._worker.settings.max_model_len
        trained = length if call.sampling is None else call.sampling.max_tokens
        wanted = min(trained, length if params.max_tokens is None else params.max_tokens)
        budget = response_budget(prompt_length, wanted, length)
        if budget == 0:
            raise Refused(
                400, f"a prompt of {prompt_length} tokens leaves no room in a context length of {length}"
            )
        params = params.clone()
        if call.unknown:
            params = replace(params, **call.unknown)
        params.max_tokens = budget
        if params.logprobs is None:
            params.logprobs = 0
        if call.sampling is not None:
            if params.structured_outputs is not None:  # made by vLLM: `check` has refused the client's
                params.structured_outputs = None
                if call.count("strict_ignored"):
                    _log.warning(
                        "strict tools and parallel_tool_calls: false are not enforced in training, "
                        "since the policy learns from answers whose form it has chosen itself; "
                        "further such requests are only counted"
                    )
            _check_sampling(params, call.sampling)
        if call.processors is not None:
            params.extra_args = (params.extra_args or {}) | {REQUESTED: call.processors}
        if call.conversation is not None:
            seed = call.conversation.next_seed()  # counts the request in any case
            if params.seed is None and call.sampling and call.sampling.temperature:
                params.seed = seed
        return params


@contextmanager
def _noting_refusal(call: ServedCall) -> Iterator[None]:
    """Note in the call why its request is refused, so that the client gets the reason whatever vLLM
    raises.
    """
    try:
        yield
    except Refused as refused:
        call.refused = refused
        raise


def check_ready(worker: Engine, call: ServedCall) -> int | None:
    """Return the version of the weights that will answer; None where the request waits for a
    version at a gate.

    Raises Refused with status 503 while there is no version, or another one than the conversation
    needs.
    """
    try:
        if worker.llm.errored:
            raise EngineStateError("the engine has died")
        if call.conversation is not None and call.conversation.turnstile is not None:
            return None
        version = worker.state.usable_version()
        if call.conversation is not None and call.conversation.policy_version is not None:
            worker.state.check_can_generate(call.conversation.policy_version)
        return version
    except EngineStateError as error:
        raise Refused(503, f"{error}; try again later") from error


def _check_sampling(params: "SamplingParams", trained: SamplingSettings) -> None:
    expected = vllm_sampling_params(trained, None)
    for name in set(params.__struct_fields__) - _UNCHECKED:
        asked = getattr(params, name) or None
        trained_value = getattr(expected, name) or None
        if name == "top_k":
            # 0 and -1 both truncate nothing.
            asked = None if asked == -1 else asked
            trained_value = None if trained_value == -1 else trained_value
        if name.startswith("_") or asked == trained_value:
            continue
        trained_with = f"the policy is trained on samples drawn with {short(trained_value)}"
        raise Refused(400, f"{name} is {short(asked)}, but {trained_with}: leave it out")


@dataclass
class _Sampled:
    """One prompt's answers so far: ids and log-probabilities by choice. Where answers grow slice by
    slice, `version` is None, and `versions` has the versions of each choice.
    """

    prompt: PromptInput
    version: int | None
    params: "SamplingParams"
    versions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def add(self, choice: "CompletionOutput") -> Generation | None:
        """Note a choice's tokens. Return its generation once it is finished. Raises Refused where
        it ended early.
        """
        from vllm.sampling_params import RequestOutputKind

        ids = list(choice.token_ids)
        logprobs = [
            position[token].logprob for position, token in zip(choice.logprobs or [], ids, strict=True)
        ]
        if self.params.output_kind is RequestOutputKind.DELTA:
            ids = self.ids.get(choice.index, []) + ids
            logprobs = self.logprobs.get(choice.index, []) + logprobs
        self.ids[choice.index] = ids
        self.logprobs[choice.index] = logprobs
        if choice.finish_reason is None:
            return None
        if choice.finish_reason == "abort":
            raise Refused(
                503, "the engine was put to sleep before the answer was finished; try again later"
            )
        if choice.finish_reason == "error" and self.params.structured_outputs is not None:
            # No text fits a grammar such as `root ::= root root`; vLLM would answer with status
            # 500.
            raise Refused(
                400, "no token fits the grammar of structured_outputs or response_format: correct it"
            )
        versions = [(self.version, 0)] if self.version is not None else self.versions[choice.index]
        return Generation(
            ids,
            logprobs,
            choice.finish_reason,
            prompt_ids=self.prompt.ids,
            versions=versions,
            routes=choice.routed_experts,
            images=self.prompt.images,
            image_spans=self.prompt.spans,
        )


def joined_slices(
    outputs: "Sequence[RequestOutput]", params: "SamplingParams", tokenizer: Any, index: int
) -> "CompletionOutput":
    """Return an answer's slices as one completion, with the text that vLLM gives an answer that is
    not cut.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    parts = [output.outputs[0] for output in outputs]
    joined = parts[-1]
    logprobs = parts[0].logprobs
    for part in parts[1:]:
        logprobs.extend(part.logprobs)
    if params.detokenize and len(parts) > 1:
        ids = outputs[0].prompt_token_ids
        request = SimpleNamespace(
            request_id="", sampling_params=params, prompt_token_ids=ids, prompt_embeds=None
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        for part in parts:
            detokenizer.update(list(part.token_ids), part.finish_reason == "stop")
        joined.text = detokenizer.get_next_output_text(finished=True, delta=False)
    joined.index = index
    joined.logprobs = logprobs
    joined.weight_versions = None
    joined.token_ids = [token for part in parts for token in part.token_ids]
    joined.cumulative_logprob = sum(part.cumulative_logprob for part in parts)
    return joined


def client_error(call: ServedCall, refused: Refused) -> Exception:
    """Note a refusal in the call. Return the one kind of error that vLLM's handlers pass on to the
    client, also in a stream, without logging a traceback.
    """
    from vllm.exceptions import GenerationError

    call.refused, error = refused, GenerationError(str(refused))
    error.status_code = HTTPStatus(refused.status)
    return error


@contextmanager
def _root_logging_kept() -> Iterator[None]:
    """Restore the levels of the root logger and its handlers at the end. Importing a part of vLLM's
    server changes them for the whole process, and vLLM restores only handlers
    (vllm/entrypoints/serve/sagemaker/api_router.py).
    """
    loggers: list[logging.Logger | logging.Handler] = [logging.root, *logging.root.handlers]
    levels = [(logger, logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


async def build_openai_app(engine: ServedEngine, settings: ServerSettings) -> Any:
    """Build vLLM's own OpenAI-compatible FastAPI application on an engine that is already running.

    Each request for answers that vLLM has parsed goes through `ServedEngine.check` before its
    handler works on it. Raises ValueError where vLLM has no parser of a name in the settings.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    name = settings.model_name
    # Clients see the former, too, as the model's root
    words = ["--model", name, "--served-model-name", name]
    if settings.tool_parser is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.reasoning_parser is not None:
        words += ["--reasoning-parser", settings.reasoning_parser]
    with _root_logging_kept():
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        command_line = server_arguments()
        arguments = command_line.make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        try:
            command_line.validate_parsed_serve_args(arguments)
            tasks = await engine.get_supported_tasks()
            app = build_app(arguments, tasks, engine.model_config)
            await init_app_state(engine, app.state, arguments, tasks)
        except (KeyError, TypeError) as error:
            raise ValueError(f"vLLM's server does not start with these settings: {error}") from error
    for logger in list(logging.root.manager.loggerDict):
        if logger.startswith(_LOGGERS):
            logging.getLogger(logger).addFilter(_one_line)
    for name, methods in _ANSWERING.items():
        if (handler := getattr(app.state, name, None)) is not None:
            for method in methods:
                setattr(handler, method, _checked_first(engine, handler, getattr(handler, method)))
    return app


_ANSWERING = {
    "openai_serving_chat": ["create_chat_completion"],
    "openai_serving_completion": ["create_completion"],
    "openai_serving_responses": ["create_responses"],
    "anthropic_serving_messages": ["create_messages", "create_chat_completion"],
}
"""The names of handlers in the application's state, and of their methods that take requests for
answers.
"""


_LOGGERS = ("vllm.parser", "vllm.tool_parsers", "vllm.reasoning", "vllm.entrypoints.anthropic")


def _one_line(record: logging.LogRecord) -> bool:
    """Filter vLLM's log: the traceback for an answer that a parser cannot read becomes one line,
    and is counted.
    """
    call = CURRENT.get()
    if call is None or not record.exc_info:
        return True
    if call.refused is not None:  # the client gets the refusal
        return False
    first = not call.unread and call.count("unread_calls")
    call.unread = True
    error = record.exc_info[1]
    record.exc_info = None
    record.args = ()
    record.msg = (
        f"an answer's tool calls cannot be read ({error}); further such answers count in "
        "server/unread_calls"
    )
    return first


def _checked_first(engine: ServedEngine, handler: Any, handle: Callable[..., Any]) -> Callable[..., Any]:
    async def checked(request: Any, *arguments: Any, **named: Any) -> Any:
        await engine.check(request, handler)
        return await handle(request, *arguments, **named)

    return checked
