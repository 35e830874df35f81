"""One vLLM engine with the asynchronous methods of NeMo RL's vLLM workers. Its batches are padded
on the right.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from generation.compat.nemo import batch
from generation.compat.nemo.batch import Prompts, Responses, Row, Texts
from generation.compat.nemo.config import VllmConfig, counted_gpus, engine_settings, sampling_settings
from generation.engine.engine import Engine
from generation.engine.lifecycle import Memory
from generation.engine.sampling import SamplingSettings, sample_seed
from generation.engine.thread import as_ready
from generation.engine.vllm_compat import request_errors
from generation.exact_ids import Generation
from generation.server import OpenAIServer, ServerSettings


class VllmAsyncGenerationWorker(Engine):
    """An `Engine` with NeMo RL's methods, which generate for batches and receive weight updates."""

    def __init__(
        self,
        config: VllmConfig,
        bundle_indices: Sequence[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """Prepare a worker; `post_init_async` starts its engine. Raises ValueError naming a wrong
        key of the configuration.

        Args: config: the configuration of the engine and of sampling. bundle_indices: the devices
            of all workers of the engine; see `engine_settings`. fraction_of_gpus: with
            `vllm_cfg.backend` ray, the share of a GPU that Ray counts; otherwise 1.0. seed:
            replaces the configuration's seed.
        """
        super().__init__(engine_settings(config, bundle_indices, seed))
        counted_gpus(config, fraction_of_gpus)
        self.sampling, self.pad_token_id = sampling_settings(config), batch.pad_token_id(config)
        self.device_ids: list[str] = []  # the device of each worker, after `post_init_async`
        # Started by `post_init_async`, if the configuration has one
        self.server: OpenAIServer | None = None
        self._expose_http_server = config["vllm_cfg"].get("expose_http_server", False)
        self._calls = itertools.count()  # numbers the calls of `generate…`, for seeds

    async def post_init_async(self) -> None:
        """Start the engine, unless it runs. Then store the workers' devices in `device_ids`, call
        the weights version 0 if they came from the checkpoint, and start the server if the
        configuration has one.
        """
        if self.is_closed:
            await self.start()
        self.device_ids = await self.report_device_id_async()
        if self.settings.load_format != "dummy":
            self.state.adopt_checkpoint(0)
        if self._expose_http_server:
            self.server = await OpenAIServer.start(self, ServerSettings(sampling=self.sampling))

    async def report_dp_openai_server_base_url(self) -> str | None:
        """Return the base URL of the OpenAI-compatible server, `http://127.0.0.1:4711/v1`; None
        without a server.
        """
        return None if self.server is None else self.server.base_url

    async def answer(self, row: Row, greedy: bool, call: int) -> Generation:
        """Generate the answer to one row of a batch. Its seed depends on the engine's seed, on the
        number of the `call`, and on the row's index.

        Returns a completion with `error` set where the request fails. Raises where the engine is
        dead or in the wrong state.
        """
        version = self.state.usable_version()
        sampling = self._sampling(row.stop, greedy)
        seed = sample_seed(self.settings.seed, call, row.index, 0)
        try:
            completion = await self.complete(row.token_ids, sampling, seed=seed, policy_version=version)
        except request_errors() as error:
            return Generation([], [], "error", f"{type(error).__name__}: {error}")
        if completion.finish_reason in ("stop", "length"):
            return completion
        return Generation([], [], "error", f"vLLM ended the request with {completion.finish_reason!r}")

    async def answer_text(self, row: Row, greedy: bool, call: int) -> tuple[str, str]:
        """Generate the answer to `row.text` as `answer` does. Return its text and the error; one of
        both is empty.
        """
        tokenizer = self.llm.get_tokenizer()
        # vLLM leaves out a character that is incomplete at the end of an answer
        # (vllm/v1/engine/detokenizer.py).
        completion = await self.answer(replace(row, token_ids=tokenizer.encode(row.text)), greedy, call)
        return tokenizer.decode(completion.token_ids, skip_special_tokens=True), completion.error

    def _sampling(self, stop: list[str], greedy: bool) -> SamplingSettings:
        """Return this worker's sampling settings, with the stop strings of one row added."""
        if (stop or self.sampling.stop) and self.settings.extra.get("skip_tokenizer_init"):
            raise ValueError(
                "stop strings need the tokenizer: set vllm_cfg.skip_tokenizer_init to false"
            )
        temperature = 0.0 if greedy else self.sampling.temperature
        return replace(self.sampling, temperature=temperature, stop=[*self.sampling.stop, *stop])

    async def generate_async(
        self, data: Prompts, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Responses]]:
        """Yield (index in the batch, output without padding) in the order in which answers end;
        yield nothing for an empty batch.

        Raises ValueError for a batch that is not right-padded or lacks a key, and EngineStateError
        where the engine is asleep or has no weights.
        """
        rows = batch.rows_of(data, self.pad_token_id)
        call = next(self._calls)
        self.state.usable_version()
        async with aclosing(as_ready(self.answer(row, greedy, call) for row in rows)) as answers:
            async for index, completion in answers:
                yield index, batch.sequence_output(data, rows[index], completion, self.pad_token_id)

    async def generate_text_async(
        self, data: Texts, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Texts]]:
        """Yield (index in `data["prompts"]`, {"texts": [response], "errors": [""]}) in the order in
        which answers end.

        `stop_strings` of the batch hold a list for each prompt. A response includes the stop string
        that ended it.
        """
        rows = batch.text_rows(data, not self.settings.extra.get("skip_tokenizer_init"))
        call = next(self._calls)
        self.state.usable_version()
        async with aclosing(as_ready(self.answer_text(row, greedy, call) for row in rows)) as answers:
            async for index, answer in answers:
                yield index, batch.text_output([answer])

    async def report_device_id_async(self) -> list[str]:
        """Return the device of each worker, in worker order: a UUID on CUDA, `cpu:<rank>` on CPU.
        Workers without an extension cannot report it, so theirs is derived from the settings.
        """
        if self.settings.worker_extension is not None:
            return await self.call_workers("report_device_id")
        if self.settings.on_cpu:
            return [f"cpu:{rank}" for rank in range(self.settings.tensor_parallel_size)]
        import torch

        return [
            str(torch.cuda.get_device_properties(index).uuid) for index in self.settings.device_indices
        ]

    reset_prefix_cache_async = Engine.reset_prefix_cache

    async def sleep_async(self, level: int = 2) -> None:
        """Release memory, unless the engine is asleep already; see `Engine.sleep`."""
        if self.state.memory is not Memory.ASLEEP:
            await self.sleep(level)

    async def wake_up_async(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory with these `tags` ("weights", "kv_cache"), by default all, unless it
        is allocated already.
        """
        held = {Memory.AWAKE: {"weights", "kv_cache"}, Memory.WEIGHTS: {"weights"}}.get(
            self.state.memory, set()
        )
        wanted = ("weights", "kv_cache") if tags is None else tags
        await self.wake([tag for tag in wanted if tag not in held])

    async def init_collective_async(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        timeout_s: float = 300.0,
    ) -> None:
        """Join the group in which weights are broadcast, and wait until all `world_size` ranks have
        joined. Worker k becomes rank `train_world_size + rank_prefix + k`.
        """
        await self.ask_workers(
            "init_collective", rank_prefix, ip, port, world_size, train_world_size, timeout_s
        )

    async def prepare_refit_info_async(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce the weights that every later update has: name -> (shape, dtype). An empty
        mapping withdraws the announcement.
        """
        announced = state_dict_info.items()
        plain = {
            name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in announced
        }
        await self.ask_workers("prepare_refit_info", plain)

    async def connect_ipc_async(self, endpoints: Mapping[str, Sequence[str]]) -> None:
        """Connect each worker to the trainer's rank on its device. `endpoints` is device ->
        (address, secret).
        """
        await self.call_workers("hotbunk_connect", dict(endpoints))

    async def update_weights_via_ipc_zmq_async(
        self, session: int | None = None, timeout_s: float = 300.0, version: int | None = None
    ) -> bool:
        """Receive one update on each worker from the trainer's rank on its device, to which it must
        be connected.

        `session` is the number in the ranks' messages, by default that of the next
        `ShardingManager.send`. A worker waits `timeout_s` seconds for a message. `version` is as in
        `Engine.receive`. Returns True; an update that fails raises, and leaves the engine without a
        version.
        """
        return bool(
            await self.receive("update_weights_via_ipc_zmq", session, timeout_s, version=version)
        )

    async def update_weights_from_collective_async(
        self, timeout_s: float = 300.0, version: int | None = None
    ) -> bool:
        """Receive one update by broadcast, in the group of `init_collective_async`. Arguments and
        errors are those of `update_weights_via_ipc_zmq_async`.
        """
        return bool(await self.receive("update_weights_from_collective", timeout_s, version=version))

    async def load_weights_from_storage_async(
        self, path: str, timeout_s: float = 300.0, version: int | None = None, num_threads: int = 1
    ) -> bool:
        """Load the latest complete update in a folder that `sharding.remote.storage` has written.
        Arguments and errors are those of `update_weights_via_ipc_zmq_async`. Each worker reads
        `num_threads` buckets at a time.
        """
        return bool(
            await self.receive(
                "load_weights_from_storage", path, num_threads, timeout_s, version=version
            )
        )

    async def shutdown(self) -> bool:
        """Stop the server, if there is one, and the engine's processes. Return True; a failure
        raises.
        """
        server = self.server
        self.server = None
        if server is not None:
            await server.stop()
        # On another thread, since stopping waits for a task of this event loop.
        await asyncio.to_thread(self.close)
        return True
