"""One vLLM engine, as the leader of an engine group holds it: asynchronous, with an explicit life cycle."""

import asyncio
import gc
import itertools
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .engine_state import EngineLifecycle, EngineStateError, Memory
from .sampling import SamplingSettings, vllm_sampling_params
from .settings import EngineSettings
from .vllm_compat import start_async_llm, stop_async_llm

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

ALIVE_SECONDS = 0.25
"""How often a call that waits looks whether the engine is still there."""


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request: ids and their log-probabilities (nats), equally many."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class VllmAsyncGenerationWorker:
    """An `AsyncLLM` that refuses to do what its state does not allow.

    All coroutines must run on one event loop, the one the engine was started on (`EngineThread`).
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.state = EngineLifecycle()
        self._engine: AsyncLLM | None = None
        self._request_numbers = itertools.count()

    async def start(self) -> None:
        """Start the engine's processes. Run it on the loop that will serve the engine; it blocks until ready."""
        self._engine = start_async_llm(self.settings)

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

    async def sleep_async(self) -> None:
        """Give the memory of weights and KV cache back (level 2). Unfinished requests are aborted, caches cleared."""
        if not self.settings.sleep:
            return
        self.state.sleep(keeps_weights=False)
        await self._unless_dead(self.engine.sleep(level=2))
        if self.settings.on_cpu:
            await self.call_workers("hotbunk_release_memory")

    async def wake_up_async(self, tags: list[str]) -> None:
        """Take memory back: first `["weights"]`, and when a sync has filled them, `["kv_cache"]`."""
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


def _completion(output: Any) -> Completion:
    """Ids and log-probabilities of one `CompletionOutput`; with one log-probability a position, flat lists line up."""
    token_ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    if len(token_ids) != len(logprobs):
        raise RuntimeError(f"vLLM gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    return Completion(token_ids, logprobs, output.finish_reason or "abort")
