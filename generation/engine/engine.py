"""An asynchronous vLLM engine with an explicit life cycle, held by the leader of an engine
group.
"""

import asyncio
import atexit
import gc
import itertools
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil

from generation import guardian
from generation.engine import vllm_compat
from generation.engine.image_inputs import EngineImages
from generation.engine.lifecycle import EngineLifecycle, EngineStateError
from generation.engine.logits import with_exact_names
from generation.engine.sampling import SamplingSettings, response_budget, vllm_sampling_params
from generation.engine.settings import EngineSettings
from generation.engine.slices import Turnstile, Unfinished
from generation.engine.thread import EngineThread
from generation.exact_ids import Generation, first_not_finite, generations_of
from generation.images import Image, PromptInput, Spans
from generation.undoing import undone_by

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
Stream = AsyncGenerator["RequestOutput", None]
"""The outputs of one request, as vLLM produces them."""

_ANSWER_SECONDS = 5.0  # time within which living workers answer, and the processes of a dead engine end
_running: "weakref.WeakSet[Engine]" = weakref.WeakSet()
"""The engines of this process that have processes."""
os.register_at_fork(after_in_child=_running.clear)


class WorkerError(RuntimeError):
    """A method of the worker extension reported errors instead of a result; the text names each
    worker.
    """


@dataclass
class EngineUpdate:
    """A weight update in progress, after which the engine holds the policy of `version`."""

    version: int


class Engine:
    """An `AsyncLLM` that refuses calls which its state does not allow.

    All coroutines must run on one event loop, the one the engine was started on (`EngineThread`).

    Attributes: state: which memory the engine holds, and the version of its weights. adapter:
        number of the LoRA adapter that answers requests, sent by the latest update; None: no
        adapter. not_finite: the first NaN or infinite log-probability of a sampled token since this
        was last set to None. preemptions: how often so far vLLM has freed an answer's KV cache for
        lack of room and computed it again; counted only with `settings.keyed_noise`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.state = EngineLifecycle()
        self.adapter: int | None = None
        self.not_finite: float | None = None
        self.preemptions = 0
        self._folder: Path | None = None
        self._llm: AsyncLLM | None = None
        self._images: EngineImages | None = None
        self._worker_memory: set[Path] = set()
        self._processes: list[psutil.Process] = []
        self._request_numbers = itertools.count()

    async def start(self, stat_loggers: list[Any] | None = None) -> None:
        """Start the engine's processes, on the event loop that will serve them; blocks until they
        are ready.

        It may be called again after `close`. `stat_loggers` are passed to vLLM.
        """
        self.state = EngineLifecycle()
        self.adapter = None
        self._images = None
        if self.settings.keyed_noise:
            stat_loggers = [*(stat_loggers or ()), vllm_compat.step_logger(self._note_step)]
        if self._folder is None:
            self._folder, lock = guardian.private_folder("engine")
            weakref.finalize(self, _delete, self._folder, lock, os.getpid())
        # Again, since the last one that was registered is called first at the end of this process:
        # before multiprocessing's, which terminates the core, which vLLM would report as its death.
        atexit.unregister(_close_running)
        atexit.register(_close_running)
        _running.add(self)
        self._llm = vllm_compat.start_async_llm(self.settings, self._folder, stat_loggers)
        self._processes = vllm_compat.engine_processes(self._llm)
        if self.settings.on_cpu and self.settings.tensor_parallel_size > 1:
            self._worker_memory = vllm_compat.worker_memory()
        if self.settings.keyed_noise:
            await self.ask_workers("hotbunk_key_noise")
        if self.settings.routes and self.settings.on_cpu:
            await self.ask_workers("hotbunk_record_routes")

    def _note_step(self, _: Any, iteration: Any) -> None:
        self.preemptions += 0 if iteration is None else iteration.num_preempted_reqs

    @property
    def llm(self) -> "AsyncLLM":
        """The running vLLM engine."""
        if self._llm is None:
            raise EngineStateError(f"the engine for {self.settings.model} is not running")
        return self._llm

    @property
    def folder(self) -> Path:
        """The private folder (mode 0700) for sockets, from the first `start` on.

        It is deleted when this object is collected, or when the process has ended, however it ends.
        """
        if self._folder is None:
            raise EngineStateError(
                f"the engine for {self.settings.model} was not started, and has no folder yet"
            )
        return self._folder

    @property
    def caches_prefixes(self) -> bool:
        """False if the running engine computes every prompt whole, as it does on CPU for recurrent
        layers.
        """
        return self._llm is None or bool(self._llm.vllm_config.cache_config.enable_prefix_caching)

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        policy_version: int,
        turnstile: Turnstile | None = None,
        unfinished: Unfinished | None = None,
        images: Sequence[Image] = (),
        image_spans: Spans = (),
        on_ids: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """Sample one response to one prompt: token ids in, token ids out.

        With a `turnstile`, the response grows slice by slice, each sampled with the version for
        which the gate was opened, and continues `unfinished`, if given, with the seed and budget of
        that answer. Without a turnstile, `on_ids` is called with all ids of the response so far
        whenever there are more. `images` and `image_spans` are as in `Trajectory`.

        Raises EngineStateError unless the engine is awake with the weights of `policy_version`, and
        ValueError where the prompt leaves no room for a response or vLLM refuses the request.
        """
        budget = response_budget(len(prompt_ids), sampling.max_tokens, self.settings.max_model_len)
        if budget == 0:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.settings.max_model_len}"
            )
        inputs = PromptInput(prompt_ids, tuple(images), image_spans)
        params = vllm_sampling_params(sampling, seed, budget)
        if turnstile is not None:
            answer = (
                replace(unfinished, opening=0) if unfinished else Unfinished(prompt_ids, seed, budget)
            )
            if answer.prompt_ids != prompt_ids:
                raise ValueError(
                    f"an unfinished answer continues its own prompt, not another of {len(prompt_ids)} "
                    "ids"
                )
            outputs = await self.request_in_slices(answer, params, turnstile, inputs)
            last = outputs[-1].outputs[0]
            generation = answer.finished(last.finish_reason or "abort")
            generation.routes = last.routed_experts  # the last slice's prompt held all tokens before it
            return generation
        prompt = await self.prompt(inputs)
        if on_ids is not None:
            params.output_kind = type(params.output_kind).CUMULATIVE
        output = await self.request(prompt, params, policy_version=policy_version, on_ids=on_ids)
        return generations_of(output, policy_version)[0]

    async def prompt(self, inputs: PromptInput) -> dict[str, Any]:
        """Make the prompt dictionary that vLLM takes, from ids and the images in their places among
        them.

        Raises ValueError where there are too many images, and ImageCountError, which is a
        ValueError.
        """
        if not inputs.images:
            return {"prompt_token_ids": inputs.ids}
        if (count := len(inputs.images)) > self.settings.images:
            raise ValueError(
                f"a request has {count} images, but this engine takes at most {self.settings.images}"
            )
        if self._images is None:
            self._images = EngineImages(self.llm.renderer)
        return await self._images.prompt(inputs)

    async def request(
        self,
        prompt: dict[str, Any],
        params: "SamplingParams",
        *,
        policy_version: int,
        on_ids: Callable[[list[int]], None] | None = None,
        **options: Any,
    ) -> "RequestOutput":
        """Run one request in vLLM's own terms: take its prompt dictionary, return its final output.

        `on_ids` is called for each output, with the ids of its first completion;
        `params.output_kind` says which outputs there are. `options` go to `AsyncLLM.generate`.
        Raises EngineStateError unless the engine is awake with the weights of `policy_version`.
        """
        self.state.check_can_generate(policy_version)
        final = None
        async for output in self.submit(
            prompt, params, f"hotbunk-{next(self._request_numbers)}", **options
        ):
            final = output
            if on_ids is not None:
                on_ids(list(output.outputs[0].token_ids))
        if final is None:
            raise RuntimeError("vLLM ended a request without an output")
        return final

    async def request_in_slices(
        self,
        answer: Unfinished,
        params: "SamplingParams",
        turnstile: Turnstile,
        inputs: PromptInput,
        **options: Any,
    ) -> list["RequestOutput"]:
        """Extend `answer` until it is finished, by one request per slice, and return the requests'
        outputs.

        `inputs` are the answer's prompt and images. Raises ValueError where `params` ask to search
        the text, for stop strings or repetitions: a request sees only its own slice.
        """
        if params.stop or params.repetition_detection is not None:
            raise ValueError(
                "stop strings and repetitions can lie across two slices: use stop_token_ids, or no "
                "slices"
            )
        outputs: list[RequestOutput] = []
        while not outputs or (outputs[-1].outputs[0].finish_reason == "length" and answer.left):
            async with turnstile.slice(answer) as (version, tokens):
                slice_params = params.clone()
                slice_params.seed = None if params.seed is None else answer.seed
                slice_params.max_tokens = tokens
                prompt = await self.prompt(replace(inputs, ids=answer.prompt_ids + answer.token_ids))
                outputs.append(
                    await self.request(prompt, slice_params, policy_version=version, **options)
                )
            answer.add(generations_of(outputs[-1], version)[0])
        return outputs

    async def submit(
        self, prompt: dict[str, Any], params: "SamplingParams", request_id: str, **options: Any
    ) -> Stream:
        """Yield the outputs of vLLM's `generate`, with the policy's adapter if there is one; serves
        every request.

        Raises ValueError where `params.extra_args` name a logits processor that the engine does not
        have.
        """
        params = with_exact_names(params, self.settings.extra)
        options["lora_request"] = options.get("lora_request") or vllm_compat.adapter_request(
            self.adapter
        )
        async with aclosing(self.llm.generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                if self.not_finite is None:
                    self.not_finite = first_not_finite(output)
                if self.settings.routes and self.settings.on_cpu:
                    await self._add_routes(output, request_id, params.n)
                yield output

    async def _add_routes(self, output: "RequestOutput", request_id: str, count: int) -> None:
        """Set `routed_experts` of finished completions, since vLLM does not on CPU; `count` is the
        request's `n`.
        """
        import numpy as np

        for completion in (c for c in output.outputs if c.finish_reason is not None):
            # vllm/v1/engine/parallel_sampling.py, get_child_info
            name = request_id if count == 1 else f"{completion.index}_{request_id}"
            [taken, *_] = await self.ask_workers("hotbunk_take_routes", name)
            layers, top_k, dtype = taken["format"]
            rows = np.frombuffer(taken["routes"], dtype).reshape(-1, layers, top_k)
            length = len(output.prompt_token_ids or []) + len(completion.token_ids)
            # The engine may have computed more than it returns
            completion.routed_experts = rows[: length - 1]

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability (nats, temperature 1) of each of `token_ids[1:]`, given the
        tokens before it.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=kind
        )
        logprobs = None
        name = f"hotbunk-{next(self._request_numbers)}"
        async for output in self.submit({"prompt_token_ids": token_ids}, params, name):
            logprobs = output.prompt_logprobs
        if logprobs is None:
            raise RuntimeError("vLLM has returned no log-probabilities of the prompt")
        return [
            position[token].logprob for position, token in zip(logprobs[1:], token_ids[1:], strict=True)
        ]

    async def prompt_logprobs_of_all(self, token_ids: list[int]) -> list[list[float]]:
        """Return what `prompt_logprobs` returns, as one list per replica (one engine is its only
        replica).
        """
        return [await self.prompt_logprobs(token_ids)]

    async def call_workers(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker of the group and return the results, of plain types, in
        worker order.
        """
        return await self._unless_dead(
            self.llm.collective_rpc(method, timeout=timeout, args=args, kwargs=kwargs)
        )

    async def ask_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension on every worker, and return the outcomes, one
        dictionary per worker.

        Raises WorkerError, with the workers' texts, if the `error` of an outcome is not None.
        """
        outcomes = await self.call_workers(method, *args)
        if errors := [outcome["error"] for outcome in outcomes if outcome["error"]]:
            raise WorkerError("; ".join(errors))
        return outcomes

    async def _unless_dead(self, call: Awaitable[T]) -> T:
        """Return the call's result, or raise vLLM's error if the engine dies while the call waits.

        When the core is killed, vLLM fails its requests, but never answers other calls
        (vllm/v1/engine/core_client.py, _call_utility_async).
        """
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait({task}, timeout=0.25))[0]:
            if self.llm.errored:
                task.cancel()
                raise self.llm.dead_error
        return task.result()

    async def death(self) -> str:
        """Return how the engine has died, in words; "" if all workers answer, or nothing shows that
        it is dead.
        """
        with suppress(Exception):  # vLLM has several errors for it
            await asyncio.wait_for(self.call_workers("report_device_id"), _ANSWER_SECONDS)
            return ""
        if self._llm is None:
            return "it was not started"
        if ended := next((process for process in self._processes if not _is_alive(process)), None):
            return f"its process {ended.pid} has ended"
        return "vLLM reports it as dead" if self._llm.errored else ""

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, which vLLM does not do by itself after an update
        (https://github.com/vllm-project/vllm/pull/46125). Raises RuntimeError where vLLM refuses.
        """
        if not await self._unless_dead(self.llm.reset_prefix_cache()):
            reason = "blocks that were computed with old weights are still in use"
            raise RuntimeError(f"vLLM refused to reset its prefix cache: {reason}")

    @asynccontextmanager
    async def update(self, version: int | None = None) -> AsyncIterator[EngineUpdate]:
        """Return a context inside which the weights of `version`, by default one more than the
        latest, are sent.

        From the beginning of the block the engine holds no version. When the block ends well,
        caches of older weights are dropped and the engine holds `EngineUpdate.version`; when it
        raises, the engine holds no version until a complete update. Raises EngineStateError where
        requests are running, or the weights' memory is not mapped.
        """
        if running := self.llm.get_num_unfinished_requests():
            # Includes those that the scheduler has yet to see
            raise EngineStateError(
                f"cannot update weights: {running} requests would continue with other weights"
            )
        self.state.begin_sync()
        update = EngineUpdate(self.state.latest + 1 if version is None else version)
        with undone_by(self.state.fail_sync):
            yield update
            await self.reset_prefix_cache()
            if self.settings.images:
                # their features are cached by digest, which an update does not change
                await self._unless_dead(self.llm.reset_encoder_cache())
        self.state.finish_sync(update.version)

    async def receive(self, method: str, *args: Any, version: int | None = None) -> list[dict[str, Any]]:
        """Update the weights by a method of the worker extension, and return the workers' outcomes.

        Either every worker has received all weights, or the engine holds no version; a folder that
        cannot be loaded is refused before that. `version` is by default the sender's, or one more
        than the latest where the sender gives none. Raises WorkerError as `ask_workers` does.
        """
        if method == "load_weights_from_storage":
            await self.ask_workers("hotbunk_check_storage", args[0])
        async with self.update(version) as update:
            outcomes = await self.ask_workers(method, *args)
            sent = max(outcome.get("version", -1) for outcome in outcomes)
            if version is None and sent >= 0:
                update.version = sent
        self.adapter = next((outcome.get("adapter") for outcome in outcomes), None)
        return outcomes

    async def sleep(self, level: int = 2) -> None:
        """Give memory back. Unfinished requests are aborted, and caches are cleared.

        Level 2 drops weights and KV cache. Level 1 drops the KV cache, and keeps the weights, and
        their version, in host memory, where they already are on CPU; weights that are shared with
        the trainer stay where they are. The call does nothing unless `settings.sleep` is set.
        """
        if level not in (1, 2):
            raise ValueError(
                f"an engine sleeps at level 1, which keeps the weights, or at level 2, not at {level}"
            )
        if level == 2 and self.settings.shared_weights:
            raise ValueError(
                "an engine that shares the trainer's weights cannot drop them: let it sleep at level 1"
            )
        if not self.settings.sleep:
            return
        self.state.sleep(keeps_weights=level == 1)
        await self._unless_dead(self.llm.sleep(level=level))
        if self.settings.on_cpu:
            await self.call_workers("hotbunk_release_memory", level == 2)

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take memory back: first `["weights"]`, and after an update has filled them,
        `["kv_cache"]`.
        """
        if unknown := sorted(set(tags) - {"weights", "kv_cache"}):
            raise ValueError(
                f"there is no memory called {', '.join(unknown)} to wake: name weights or kv_cache"
            )
        if not self.settings.sleep:
            return
        for tag in tags:
            {"weights": self.state.wake_weights, "kv_cache": self.state.wake_kv_cache}[tag]()
            await self._unless_dead(self.llm.wake_up([tag]))

    @property
    def is_closed(self) -> bool:
        """True if the engine has no processes: before `start`, and after `close`."""
        return self._llm is None

    async def memory_bytes(self) -> int:
        """Return the bytes that all workers hold now: resident memory on CPU, memory in use on the
        device on CUDA.
        """
        return sum(await self.call_workers("hotbunk_memory_bytes"))

    def close(self) -> None:
        """Stop the engine's processes, from any thread; safe to call twice and in any state."""
        llm = self._llm
        self._llm = None
        self.state.close()
        if llm is not None:
            vllm_compat.stop_async_llm(llm)
            del llm
            gc.collect()  # vLLM's __del__ would otherwise complain at interpreter exit
        left = psutil.wait_procs(self._processes, _ANSWER_SECONDS)[1]
        for process in left:  # workers whose core was killed
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, _ANSWER_SECONDS)
        self._processes = []
        for memory in self._worker_memory:
            memory.unlink(missing_ok=True)  # workers that were killed have left it behind
        self._worker_memory = set()
        _running.discard(self)


def _close_running() -> None:
    """Close the engines that nobody has closed before the end of this process."""
    for engine in list(_running):
        engine.close()


def _delete(folder: Path, lock: int, owner: int) -> None:
    """Delete the private folder, but not in a fork of the process `owner`."""
    if os.getpid() == owner:
        guardian.remove(folder)
        os.close(lock)


@dataclass
class Leader:
    """An engine and the thread of its event loop, held by the first rank of an engine group."""

    engine: Engine
    thread: EngineThread

    @classmethod
    def start(cls, engine: Engine, timeout: float) -> Self:
        """Start an engine on a thread of its own. A start that fails leaves nothing behind. Raises
        ValueError where vLLM rejects the settings, TimeoutError after `timeout` seconds.
        """
        leader = cls(engine, EngineThread())
        with undone_by(leader.close):
            leader.thread.run(
                engine.start(), timeout, f"starting the engine for {engine.settings.model}"
            )
        return leader

    def start_again(self, timeout: float) -> None:
        """Start the engine again, on the same thread, after `engine.close()`; raises as `start`
        does.
        """
        with undone_by(self.engine.close):
            self.thread.run(
                self.engine.start(),
                timeout,
                f"starting the engine for {self.engine.settings.model} again",
            )

    def close(self) -> None:
        """Stop the engine's processes and its thread; safe to call twice."""
        self.engine.close()
        self.thread.close()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
