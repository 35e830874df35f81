"""One vLLM engine, as the leader of an engine group holds it: asynchronous, with an explicit life cycle."""

import asyncio
import gc
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from generation.compat.nemo.batch import (
    BatchedDataDict,
    GenerationDatumSpec,
    GenerationOutputSpec,
    Row,
    rows_of,
    sequence_output,
    stop_strings_of,
    text_output,
    texts_of,
)
from generation.compat.nemo.config import VllmConfig, engine_settings, pad_token_id, sampling_settings
from generation.engine.lifecycle import EngineLifecycle, EngineStateError
from generation.engine.sampling import SamplingSettings, response_budget, sample_seed, vllm_sampling_params
from generation.engine.settings import EngineSettings
from generation.engine.thread import as_ready
from generation.engine.vllm_compat import (
    adapter_request,
    request_errors,
    start_async_llm,
    stop_async_llm,
    unfinished_requests,
    worker_memory,
)
from generation.exact_ids import Generation, generations_of, sampled_logprobs

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from generation.server import OpenAIServer

T = TypeVar("T")

ALIVE_SECONDS = 0.25
"""How often a call that waits looks whether the engine is still there."""


class VllmAsyncGenerationWorker:
    """An `AsyncLLM` that refuses to do what its state does not allow.

    All coroutines must run on one event loop, the one the engine was started on (`EngineThread`).

    Attributes:
        sampling: how `generate_async` and `generate_text_async` draw; everything else is told with each call.
        pad_token_id: what rows of batches are padded with.
        device_ids: the device of each worker, known after `post_init_async`.
        adapter: number of the LoRA adapter that requests are answered with; the one who sent it sets it.
        server: the OpenAI-compatible server that `post_init_async` started, if it was asked to.
        not_finite: the first log-probability of a sampled token that is not finite, since somebody set this to None.
    """

    def __init__(
        self,
        settings: EngineSettings,
        sampling: SamplingSettings | None = None,
        pad_token_id: int = 0,
        expose_http_server: bool = False,
    ) -> None:
        self.settings, self.sampling, self.pad_token_id = settings, sampling, pad_token_id
        self.state = EngineLifecycle()
        self.device_ids: list[str] = []
        self.adapter: int | None = None
        self.server: OpenAIServer | None = None
        self.not_finite: float | None = None
        self._expose_http_server = expose_http_server
        self._engine: AsyncLLM | None = None
        self._worker_memory: set[Path] = set()
        self._request_numbers, self._calls = itertools.count(), itertools.count()

    @classmethod
    def from_config(cls, config: VllmConfig, device_indices: Sequence[int] = (), seed: int | None = None) -> Self:
        """A worker for what a `VllmConfig` describes, not yet started; on CPU without `device_indices`."""
        settings, sampling = engine_settings(config, device_indices, seed), sampling_settings(config)
        serve = config["vllm_cfg"].get("expose_http_server", False)
        return cls(settings, sampling, pad_token_id(config), serve)

    async def start(self) -> None:
        """Start the engine's processes. Run it on the loop that will serve the engine; it blocks until ready."""
        self._engine = start_async_llm(self.settings)
        if self.settings.on_cpu and self.settings.tensor_parallel_size > 1:
            self._worker_memory = worker_memory()

    async def post_init_async(self) -> None:
        """After `start`: learn the workers' devices, take the checkpoint's weights, if they were loaded, for version 0,
        and start the server, if there is to be one.
        """
        self.device_ids = await self.report_device_id_async()
        if self.settings.load_format != "dummy":
            self.state.adopt_checkpoint(0)
        if self._expose_http_server:
            from generation.server import OpenAIServer, ServerSettings

            self.server = await OpenAIServer.start(self, ServerSettings(sampling=self.sampling))

    async def report_dp_openai_server_base_url(self) -> str | None:
        """Where the OpenAI-compatible server answers, such as `http://127.0.0.1:4711/v1`; None without one."""
        return None if self.server is None else self.server.base_url

    @property
    def engine(self) -> "AsyncLLM":
        """The running engine."""
        if self._engine is None:
            raise EngineStateError(f"the engine for {self.settings.model} is not running")
        return self._engine

    async def complete(
        self, prompt_ids: list[int], sampling: SamplingSettings, *, seed: int, policy_version: int
    ) -> Generation:
        """Sample one response to one prompt, token ids in and token ids out.

        Raises:
            EngineStateError: unless awake with the weights of `policy_version`.
            ValueError: the prompt leaves no room for a response, or vLLM refuses the request.
        """
        budget = response_budget(len(prompt_ids), sampling.max_tokens, self.settings.max_model_len)
        if budget == 0:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.settings.max_model_len}")
        params = vllm_sampling_params(sampling, seed, budget)
        prompt = {"prompt_token_ids": prompt_ids}
        return generations_of(await self.request(prompt, params, policy_version=policy_version), policy_version)[0]

    async def request(
        self, prompt: dict[str, Any], params: "SamplingParams", *, policy_version: int
    ) -> "RequestOutput":
        """One request in vLLM's own terms: its prompt dictionary in, its final output out.

        Raises:
            EngineStateError: unless awake with the weights of `policy_version`.
        """
        self.state.check_can_generate(policy_version)
        return await self._final_output(prompt, params)

    async def submit(
        self, prompt: dict[str, Any], params: "SamplingParams", request_id: str, **options: Any
    ) -> AsyncGenerator["RequestOutput", None]:
        """vLLM's own `generate`, with the policy's adapter where there is one; every request goes through here."""
        options["lora_request"] = options.get("lora_request") or adapter_request(self.adapter)
        async with aclosing(self.engine.generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                if self.not_finite is None:
                    self.not_finite = first_not_finite(output)
                yield output

    async def _final_output(self, prompt: dict[str, Any], params: "SamplingParams") -> "RequestOutput":
        final = None
        async for output in self.submit(prompt, params, f"hotbunk-{next(self._request_numbers)}"):
            final = output
        if final is None:
            raise RuntimeError("vLLM ended a request without an output")
        return final

    async def answer(self, row: Row, greedy: bool, call: int) -> Generation:
        """One sample of a batch. Its seed is a function of (engine seed, `call`, its place), whichever engine it is.

        A request that fails is a completion with `error` set. An engine in the wrong state, or dead, raises.
        """
        version = self.state.usable_version()
        sampling, seed = self._sampling(row.stop, greedy), sample_seed(self.settings.seed, call, row.index, 0)
        try:
            completion = await self.complete(row.token_ids, sampling, seed=seed, policy_version=version)
        except request_errors() as error:
            return Generation([], [], "error", f"{type(error).__name__}: {error}")
        if completion.finish_reason in ("stop", "length"):
            return completion
        return Generation([], [], "error", f"vLLM ended the request with {completion.finish_reason!r}")

    async def answer_text(self, prompt: str, stop: list[str], place: int, greedy: bool, call: int) -> tuple[str, str]:
        """The response to a text, and what went wrong, of which one is empty; otherwise as `answer`."""
        tokenizer = self.engine.get_tokenizer()
        # vLLM's own texts lack a character that is incomplete at an answer's end (vllm/v1/engine/detokenizer.py).
        completion = await self.answer(Row(place, tokenizer.encode(prompt), stop), greedy, call)
        return tokenizer.decode(completion.token_ids, skip_special_tokens=True), completion.error

    def _sampling(self, stop: list[str], greedy: bool) -> SamplingSettings:
        """This worker's settings with a sample's own stop strings beside its own."""
        if self.sampling is None:
            raise ValueError("this worker has no sampling settings: construct it with some, or with from_config")
        if (stop or self.sampling.stop) and not self.has_tokenizer:
            raise ValueError("stop strings need the tokenizer: set vllm_cfg.skip_tokenizer_init to false")
        temperature = 0.0 if greedy else self.sampling.temperature
        return replace(self.sampling, temperature=temperature, stop=[*self.sampling.stop, *stop])

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts and stop strings can be used."""
        return not self.settings.extra.get("skip_tokenizer_init")

    def next_call(self) -> int:
        """A number for one call with a batch, from which its samples' seeds are made."""
        return next(self._calls)

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yields (place in the batch, its output without padding) as responses are ready; nothing for an empty batch.

        Raises:
            ValueError: a batch that is not right-padded, or lacks something.
            EngineStateError: unless awake, with weights.
        """
        rows, call = rows_of(data, self.pad_token_id), self.next_call()
        self.state.usable_version()
        async with aclosing(as_ready(self.answer(row, greedy, call) for row in rows)) as answers:
            async for place, completion in answers:
                yield place, sequence_output(data, rows[place], completion, self.pad_token_id)

    async def generate_text_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yields (place in `data["prompts"]`, {"texts": [response], "errors": [""]}) as responses are ready.

        `stop_strings` in the batch hold by sample; a response ends with the one that ended it.
        """
        prompts, call = texts_of(data, self.has_tokenizer), self.next_call()
        self.state.usable_version()
        stops = stop_strings_of(data, len(prompts))
        work = (self.answer_text(p, s, i, greedy, call) for i, (p, s) in enumerate(zip(prompts, stops, strict=True)))
        async with aclosing(as_ready(work)) as answers:
            async for place, answer in answers:
                yield place, text_output([answer])

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability (nats, temperature 1) of each of `token_ids[1:]` given those before it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        final = await self._final_output({"prompt_token_ids": token_ids}, params)
        if final.prompt_logprobs is None:
            raise RuntimeError("vLLM gave no prompt log-probabilities")
        return [
            position[token].logprob for position, token in zip(final.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]

    async def call_workers(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of the worker extension on every worker of the group; results in worker order, plain types
        only.
        """
        return await self._unless_dead(self.engine.collective_rpc(method, timeout=timeout, args=args))

    async def _unless_dead(self, call: Awaitable[T]) -> T:
        """The call's result. vLLM never answers a call that waits when the engine core is killed
        (vllm/v1/engine/core_client.py, _call_utility_async); requests do fail.
        """
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait({task}, timeout=ALIVE_SECONDS))[0]:
            if self.engine.errored:
                task.cancel()
                raise self.engine.dead_error
        return task.result()

    async def report_device_id_async(self) -> list[str]:
        """The device each worker runs on, in worker order: a UUID on CUDA, `cpu:<rank>` on CPU."""
        return await self.call_workers("report_device_id")

    async def reset_prefix_cache_async(self) -> None:
        """Forget every cached prefix, which vLLM does not do by itself after an update
        (https://github.com/vllm-project/vllm/pull/46125). It answers False where it could not; that is an error here.
        """
        if not await self._unless_dead(self.engine.reset_prefix_cache()):
            raise RuntimeError(
                "vLLM refused to reset its prefix cache: blocks are still in use, old weights live on in them"
            )

    async def init_collective_async(
        self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int, timeout_s: float = 300.0
    ) -> None:
        """Join the process group that weights are broadcast in: worker k becomes its rank `train_world_size +
        rank_prefix + k`. Returns when all `world_size` ranks are there.
        """
        await self._ask("init_collective", rank_prefix, ip, port, world_size, train_world_size, timeout_s)

    async def prepare_refit_info_async(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce what every update brings from now on: name -> (shape, dtype); an empty one takes it back."""
        announced = state_dict_info.items()
        plain = {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in announced}
        await self._ask("prepare_refit_info", plain)

    async def update_weights_via_ipc_zmq_async(
        self, session: int = 0, timeout_s: float = 300.0, version: int | None = None
    ) -> bool:
        """Receive one update from the trainer's rank on each worker's device, which must be connected.

        Args:
            session: what the ranks number their messages with.
            timeout_s: how long (s) a worker waits for a message.
            version: of the policy these weights are; what the sender says, or else one more than the last, by default.

        Returns:
            True. An update that fails raises, and leaves the engine without a version.
        """
        return await self._update(version, "update_weights_via_ipc_zmq", session, timeout_s)

    async def update_weights_from_collective_async(self, timeout_s: float = 300.0, version: int | None = None) -> bool:
        """Receive one update by broadcast, in the group of `init_collective_async`; otherwise as the one by IPC."""
        return await self._update(version, "update_weights_from_collective", timeout_s)

    async def load_weights_from_storage_async(
        self, path: str, timeout_s: float = 300.0, version: int | None = None
    ) -> bool:
        """Load the latest complete update in a folder (`sharding.apart.storage`); otherwise as the update by IPC."""
        return await self._update(version, "load_weights_from_storage", path, timeout_s)

    async def _update(self, version: int | None, method: str, *args: Any) -> bool:
        """No version from the first byte until every worker has everything, and caches of older weights are gone."""
        if running := unfinished_requests(self.engine):
            raise EngineStateError(f"cannot update weights: {running} requests would go on with other weights")
        self.state.begin_sync()
        try:
            sent = max(answer.get("version", -1) for answer in await self._ask(method, *args))
            await self.reset_prefix_cache_async()
        except BaseException:
            self.state.fail_sync()
            raise
        following = sent if sent >= 0 else self.state.latest + 1
        self.state.finish_sync(following if version is None else version)
        return True

    async def _ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the workers that answers with an outcome, and raise what went wrong on any of them."""
        answers = await self.call_workers(method, *args)
        if errors := [answer["error"] for answer in answers if answer["error"]]:
            raise RuntimeError("; ".join(errors))
        return answers

    async def sleep_async(self, level: int = 2) -> None:
        """Give memory back. Unfinished requests are aborted, caches cleared.

        Args:
            level: 2 drops weights and KV cache. 1 keeps the weights, and their version, in host memory, which on CPU
                they are in already; weights that are shared stay where they are.
        """
        if level not in (1, 2):
            raise ValueError(f"an engine sleeps at level 1, which keeps the weights, or 2, not {level}")
        if level == 2 and self.settings.shared_weights:
            raise ValueError("an engine whose weights are the trainer's cannot drop them: let it sleep at level 1")
        if not self.settings.sleep:
            return
        self.state.sleep(keeps_weights=level == 1)
        await self._unless_dead(self.engine.sleep(level=level))
        if self.settings.on_cpu:
            await self.call_workers("hotbunk_release_memory", level == 2)

    async def wake_up_async(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take memory back: first `["weights"]`, and when a sync has filled them, `["kv_cache"]`."""
        if unknown := sorted(set(tags) - {"weights", "kv_cache"}):
            raise ValueError(f"there is no memory called {', '.join(unknown)} to wake: it is weights and kv_cache")
        if not self.settings.sleep:
            return
        for tag in tags:
            {"weights": self.state.wake_weights, "kv_cache": self.state.wake_kv_cache}[tag]()
            await self._unless_dead(self.engine.wake_up([tag]))

    async def memory_bytes(self) -> int:
        """Memory the workers hold now, summed: resident bytes on CPU, bytes in use on the device on CUDA."""
        return sum(await self.call_workers("hotbunk_memory_bytes"))

    async def shutdown(self) -> bool:
        """Stop the server, if there is one, and the engine's processes. True: what fails raises."""
        server, self.server = self.server, None
        if server is not None:
            await server.stop()
        self.close()
        return True

    def close(self) -> None:
        """Stop the engine's processes, from whatever thread; safe to call twice and in any state."""
        engine, self._engine = self._engine, None
        self.state.close()
        if engine is not None:
            stop_async_llm(engine)
            del engine
            gc.collect()  # AsyncLLM.__del__ (vllm/v1/engine/async_llm.py) would otherwise complain at interpreter exit
        for memory in self._worker_memory:
            memory.unlink(missing_ok=True)  # its workers may have been killed


def first_not_finite(output: "RequestOutput") -> float | None:
    """The first log-probability of a sampled token that is NaN or infinite, if there is one."""
    for completion in output.outputs:
        if completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids):
            for logprob in sampled_logprobs(completion):
                if not math.isfinite(logprob):
                    return logprob
    return None
