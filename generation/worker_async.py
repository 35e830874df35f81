"""One vLLM engine, as the leader of an engine group holds it: asynchronous, with an explicit life cycle."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .batch import BatchedDataDict
from .engine_state import EngineLifecycle, EngineStateError, Memory
from .interface import GenerationDatumSpec, GenerationOutputSpec
from .padded import Row, rows_of, sequence_output, stop_strings_of, texts_of
from .sampling import Completion, SamplingSettings, sample_seed, vllm_sampling_params
from .settings import EngineSettings
from .vllm_compat import request_errors, start_async_llm, stop_async_llm, unfinished_requests
from .vllm_config import VllmConfig, engine_settings, pad_token_id, sampling_settings

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["Completion", "VllmAsyncGenerationWorker"]

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
    """

    def __init__(
        self, settings: EngineSettings, sampling: SamplingSettings | None = None, pad_token_id: int = 0
    ) -> None:
        self.settings, self.sampling, self.pad_token_id = settings, sampling, pad_token_id
        self.state = EngineLifecycle()
        self.device_ids: list[str] = []
        self._engine: AsyncLLM | None = None
        self._request_numbers, self._calls = itertools.count(), itertools.count()

    @classmethod
    def from_config(cls, config: VllmConfig, device_indices: Sequence[int] = (), seed: int | None = None) -> Self:
        """A worker for what a `VllmConfig` describes, not yet started; on CPU without `device_indices`."""
        return cls(engine_settings(config, device_indices, seed), sampling_settings(config), pad_token_id(config))

    async def start(self) -> None:
        """Start the engine's processes. Run it on the loop that will serve the engine; it blocks until ready."""
        self._engine = start_async_llm(self.settings)

    async def post_init_async(self) -> None:
        """After `start`: learn the workers' devices, and take the checkpoint's weights, if they were loaded, for
        version 0.
        """
        self.device_ids = await self.report_device_id_async()
        if self.settings.load_format != "dummy":
            self.state.adopt_checkpoint(0)

    @property
    def engine(self) -> "AsyncLLM":
        """The running engine."""
        if self._engine is None:
            raise EngineStateError(f"the engine for {self.settings.model} is not running")
        return self._engine

    async def complete(
        self, prompt_ids: list[int], sampling: SamplingSettings, *, seed: int, policy_version: int
    ) -> Completion:
        """Sample one response to one prompt, token ids in and token ids out.

        Raises:
            EngineStateError: unless awake with the weights of `policy_version`.
            ValueError: the prompt leaves no room for a response, or vLLM refuses the request.
        """
        room = self.settings.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.settings.max_model_len}")
        params = vllm_sampling_params(sampling, seed, min(sampling.max_tokens, room))
        prompt = {"prompt_token_ids": prompt_ids}
        return _completion((await self.request(prompt, params, policy_version=policy_version)).outputs[0])

    async def request(
        self, prompt: dict[str, Any], params: "SamplingParams", *, policy_version: int
    ) -> "RequestOutput":
        """One request in vLLM's own terms: its prompt dictionary in, its final output out.

        Raises:
            EngineStateError: unless awake with the weights of `policy_version`.
        """
        self.state.check_can_generate(policy_version)
        return await self._final_output(prompt, params)

    async def _final_output(self, prompt: dict[str, Any], params: "SamplingParams") -> "RequestOutput":
        final = None
        async for output in self.engine.generate(prompt, params, f"hotbunk-{next(self._request_numbers)}"):
            final = output
        if final is None:
            raise RuntimeError("vLLM ended a request without an output")
        return final

    async def answer(self, row: Row, greedy: bool, call: int) -> Completion:
        """One sample of a batch. Its seed is a function of (engine seed, `call`, its place), whichever engine it is.

        A request that fails is a completion with `error` set. An engine in the wrong state, or dead, raises.
        """
        version = self.state.usable_version()
        sampling = self._sampling(row.stop, greedy)
        try:
            completion = await self.complete(
                row.token_ids, sampling, seed=self._seed(call, row.index), policy_version=version
            )
        except request_errors() as error:
            return Completion([], [], "error", f"{type(error).__name__}: {error}")
        if completion.finish_reason in ("stop", "length"):
            return completion
        return replace(completion, error=f"vLLM ended the request with {completion.finish_reason!r}")

    async def answer_text(self, prompt: str, stop: list[str], place: int, greedy: bool, call: int) -> tuple[str, str]:
        """The response to a text, and what went wrong, of which one is empty; otherwise as `answer`."""
        version = self.state.usable_version()
        params = vllm_sampling_params(self._sampling(stop, greedy), self._seed(call, place))
        params.detokenize = params.skip_special_tokens = True
        try:
            output = (await self.request({"prompt": prompt}, params, policy_version=version)).outputs[0]
        except request_errors() as error:
            return "", f"{type(error).__name__}: {error}"
        aborted = output.finish_reason not in ("stop", "length")
        return output.text, f"vLLM ended the request with {output.finish_reason!r}" if aborted else ""

    def _sampling(self, stop: list[str], greedy: bool) -> SamplingSettings:
        """This worker's settings with a sample's own stop strings beside its own."""
        if self.sampling is None:
            raise ValueError("this worker has no sampling settings: construct it with some, or with from_config")
        if (stop or self.sampling.stop) and not self._has_tokenizer:
            raise ValueError("stop strings need the tokenizer: set vllm_cfg.skip_tokenizer_init to false")
        temperature = 0.0 if greedy else self.sampling.temperature
        return replace(self.sampling, temperature=temperature, stop=[*self.sampling.stop, *stop])

    @property
    def _has_tokenizer(self) -> bool:
        return not self.settings.extra.get("skip_tokenizer_init")

    def _seed(self, call: int, place: int) -> int:
        return sample_seed(self.settings.seed, call, place, 0)

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yields (place in the batch, its output without padding) as responses are ready; nothing for an empty batch.

        Raises:
            ValueError: a batch that is not right-padded, or lacks something.
            EngineStateError: unless awake, with weights.
        """
        rows, call = rows_of(data, self.pad_token_id), next(self._calls)
        self.state.usable_version()
        async for place, completion in as_ready(self.answer(row, greedy, call) for row in rows):
            yield place, sequence_output(data, rows[place], completion, self.pad_token_id)

    async def generate_text_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yields (place in `data["prompts"]`, {"texts": [response], "errors": [""]}) as responses are ready.

        `stop_strings` in the batch hold by sample; a response ends with the one that ended it.
        """
        prompts, call = texts_of(data, self._has_tokenizer), next(self._calls)
        self.state.usable_version()
        stops = stop_strings_of(data, len(prompts))
        work = (self.answer_text(p, s, i, greedy, call) for i, (p, s) in enumerate(zip(prompts, stops, strict=True)))
        async for place, (text, error) in as_ready(work):
            yield place, BatchedDataDict({"texts": [text], "errors": [error]})

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
        """The call's result. vLLM leaves calls unanswered for ever when the engine core is killed; requests it does
        fail.
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
        """Forget every cached prefix. vLLM answers False where it could not; that is an error here (P7)."""
        if not await self._unless_dead(self.engine.reset_prefix_cache()):
            raise RuntimeError(
                "vLLM refused to reset its prefix cache: blocks are still in use, old weights live on in them"
            )

    async def init_collective_async(
        self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int
    ) -> None:
        """Join the process group that weights are broadcast in: worker k becomes its rank `train_world_size +
        rank_prefix + k`. Returns when all `world_size` ranks are there.
        """
        await self.call_workers("init_collective", rank_prefix, ip, port, world_size, train_world_size)

    async def prepare_refit_info_async(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce the weights that will be broadcast, in their order: name -> (shape, dtype)."""
        plain = {
            name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in state_dict_info.items()
        }
        await self.call_workers("prepare_refit_info", plain)

    async def update_weights_via_ipc_zmq_async(
        self, session: int = 0, timeout_s: float = 300.0, version: int | None = None
    ) -> bool:
        """Receive one update from the trainer's rank on each worker's device, which must be connected.

        Args:
            session: what the ranks number their messages with.
            timeout_s: how long (s) a worker waits for a message.
            version: of the policy these weights are; one more than the last by default.

        Returns:
            True. An update that fails raises, and leaves the engine without a version.
        """
        return await self._update(version, "update_weights_via_ipc_zmq", session, timeout_s)

    async def update_weights_from_collective_async(self, timeout_s: float = 300.0, version: int | None = None) -> bool:
        """Receive one update by broadcast, in the group of `init_collective_async`; otherwise as the one by IPC."""
        return await self._update(version, "update_weights_from_collective", timeout_s)

    async def load_weights_from_storage_async(self, path: str, version: int | None = None) -> bool:
        """Load the weights that a directory holds (`sharding.storage`); otherwise as the update by IPC."""
        return await self._update(version, "load_weights_from_storage", path)

    async def _update(self, version: int | None, method: str, *args: Any) -> bool:
        """No version from the first byte until every worker has everything, and caches of older weights are gone."""
        if running := unfinished_requests(self.engine):
            raise EngineStateError(f"cannot update weights: {running} requests would go on with other weights")
        self.state.begin_sync()
        try:
            failed = [answer for answer in await self.call_workers(method, *args) if isinstance(answer, str) and answer]
            if failed:
                raise RuntimeError(f"a weight update failed: {'; '.join(failed)}")
            await self.reset_prefix_cache_async()
        except BaseException:
            self.state.fail_sync()
            raise
        self.state.finish_sync(self.state.latest + 1 if version is None else version)
        return True

    async def sleep_async(self, level: int = 2) -> None:
        """Give memory back. Unfinished requests are aborted, caches cleared.

        Args:
            level: 2 drops weights and KV cache. 1 keeps the weights, and their version, in host memory; on CPU, where
                they are already, it frees nothing.
        """
        if level not in (1, 2):
            raise ValueError(f"an engine sleeps at level 1, which keeps the weights, or 2, not {level}")
        if not self.settings.sleep:
            return
        self.state.sleep(keeps_weights=level == 1)
        await self._unless_dead(self.engine.sleep(level=level))
        if self.settings.on_cpu and level == 2:
            await self.call_workers("hotbunk_release_memory")

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

    def shutdown(self) -> None:
        """Stop the engine's processes; safe to call twice and in any state."""
        engine, self._engine = self._engine, None
        self.state.close()
        if engine is not None:
            stop_async_llm(engine)
            del engine
            gc.collect()  # vLLM's __del__ would otherwise complain at interpreter exit

    @property
    def is_awake(self) -> bool:
        """Whether weights and KV cache are both mapped."""
        return self.state.memory is Memory.AWAKE


async def as_ready(calls: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[tuple[int, T]]:
    """Each call's place and result, as they are ready. An error, or the end of the iteration, ends the others."""

    async def placed(place: int, call: Coroutine[Any, Any, T]) -> tuple[int, T]:
        return place, await call

    tasks = [asyncio.ensure_future(placed(place, call)) for place, call in enumerate(calls)]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _completion(output: Any) -> Completion:
    """Ids and log-probabilities of one `CompletionOutput`; with one log-probability a position, flat lists line up."""
    token_ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    if len(token_ids) != len(logprobs):
        raise RuntimeError(f"vLLM gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    return Completion(token_ids, logprobs, output.finish_reason or "abort")
