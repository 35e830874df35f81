"""NeMo RL's asynchronous worker as its API page prints it: each signature is called with the page's own arguments.

Changed are the imports, the model (a tiny one), and the devices (a bundle of one CPU core). `_replace_prefix_tokens` is
called `replace_prefix_tokens` here. The page's `_create_engine` and `_setup_vllm_*` are internal, and have no
counterpart.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generation import (
    BatchedDataDict,
    Engine,
    VllmAsyncGenerationWorker,
    VllmConfig,
    replace_prefix_tokens,
)
from generation.engine.lifecycle import Memory
from generation.engine.thread import EngineThread
from sharding import WORKER_EXTENSION, CollectiveSender, ShardingManager, SyncSettings
from tests.conftest import TinyModel
from tests.engine.generation.compat.test_interface import responses, source_of
from tests.support.colocated import HfPolicy

PARAMETERS: dict[str, dict[str, Any]] = {
    "__init__": {"config": ..., "bundle_indices": None, "fraction_of_gpus": 1.0, "seed": None},
    "post_init_async": {},
    "report_dp_openai_server_base_url": {},
    "init_collective_async": dict.fromkeys(
        ("rank_prefix", "ip", "port", "world_size", "train_world_size"), ...
    ),
    "generate_async": {"data": ..., "greedy": False},
    "generate_text_async": {"data": ..., "greedy": False},
    "report_device_id_async": {},
    "prepare_refit_info_async": {"state_dict_info": ...},
    "update_weights_via_ipc_zmq_async": {},
    "update_weights_from_collective_async": {},
    "reset_prefix_cache_async": {},
    "sleep_async": {},
    "wake_up_async": {},
    "shutdown": {},
}
"""Method -> its printed arguments in order, with their defaults; `...` for an argument without one."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_have_the_printed_order_and_more_are_optional(name: str) -> None:
    printed = PARAMETERS[name]
    taken = list(inspect.signature(getattr(VllmAsyncGenerationWorker, name)).parameters.values())[1:]
    defaults = {p.name: ... if p.default is inspect.Parameter.empty else p.default for p in taken}
    assert list(defaults.items())[: len(printed)] == list(printed.items())
    assert ... not in list(defaults.values())[len(printed) :]


def test_the_example_of_two_turns_keeps_the_models_own_tokens() -> None:
    words = {1001: " 4", 220: " ", 17: "4", 2: ""}
    decode = lambda ids, **_: "".join(words.get(token, f"<{token}>") for token in ids)  # noqa: E731
    tokenizer = SimpleNamespace(eos_token_id=2, decode=decode)
    prefill_t1 = [11, 12, 13, 40, 41]
    model_output = [220, 17, 2]  # decodes to " 4" and EOS
    model_prefix_token_ids = prefill_t1 + model_output
    template_prefix_token_ids = [11, 12, 13, 40, 41, 1001, 2]  # 1001 decodes to " 4"
    template_token_ids = [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41]
    for given in (tokenizer, SimpleNamespace(eos_token_id=2)):
        # the example says no more of its tokenizer
        output = replace_prefix_tokens(
            given, model_prefix_token_ids, template_prefix_token_ids, template_token_ids
        )
        assert output == [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41]


def test_every_method_of_the_page_runs_on_one_worker(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model()
    config = VllmConfig(
        backend="vllm",
        max_new_tokens=8,
        temperature=0.7,
        model_name=str(model),
        colocated={"enabled": True},
        vllm_cfg={"max_model_len": 64, "expose_http_server": True},
        vllm_kwargs={"worker_extension_cls": WORKER_EXTENSION},
    )
    worker = VllmAsyncGenerationWorker(config, bundle_indices=[0], fraction_of_gpus=1.0, seed=3)
    assert isinstance(worker, Engine)
    thread = EngineThread()
    try:
        with ThreadPoolExecutor(1) as trainer:
            thread.run(every_method(worker, HfPolicy(model), tmp_path, trainer), 280, "a test")
    finally:
        worker.close()
        thread.close()


async def every_method(
    worker: VllmAsyncGenerationWorker, policy: HfPolicy, folder: Path, trainer: ThreadPoolExecutor
) -> None:
    """Call every method; the trainer's ends run in a thread, as in a program of their own."""

    async def meanwhile(send: Any, *calls: Any) -> list[Any]:
        running = [asyncio.run_coroutine_threadsafe(call, loop) for call in calls]
        await loop.run_in_executor(trainer, send, running)
        return [await asyncio.wrap_future(call) for call in running]

    loop = asyncio.get_running_loop()
    await worker.post_init_async()
    url = await worker.report_dp_openai_server_base_url()
    assert url is not None and url.startswith("http://127.0.0.1:")
    assert await worker.report_device_id_async() == ["cpu:0"]
    data = BatchedDataDict(
        {"input_ids": torch.tensor([[14, 50, 0], [14, 50, 77]]), "input_lengths": torch.tensor([2, 3])}
    )
    sampled = await all_of(worker.generate_async(data, greedy=False))
    assert sorted(sampled) == [0, 1] and all(len(responses(output)[0]) for output in sampled.values())
    texts = await all_of(worker.generate_text_async(BatchedDataDict({"prompts": ["1+1="]}), greedy=True))
    assert texts[0]["errors"] == [""]

    await worker.reset_prefix_cache_async()
    await worker.wake_up_async(tags=["weights"])  # no effect on an engine that is awake
    await worker.wake_up_async(tags=None)
    await worker.sleep_async()
    await worker.sleep_async()  # no effect on an engine that is asleep
    assert worker.state.memory is Memory.ASLEEP
    await worker.wake_up_async(tags=["weights"])
    assert worker.state.memory is Memory.WEIGHTS

    source, cpu, settings = source_of(policy), torch.device("cpu"), SyncSettings("full", timeout=60)
    pieces = [piece for parameter in source.parameters() for piece in parameter.pieces]
    await worker.prepare_refit_info_async({p.name: (p.shape, getattr(torch, p.dtype)) for p in pieces})
    policy.randomise(seed=1)
    sender = await loop.run_in_executor(trainer, CollectiveSender, source, cpu, settings, 1)
    join = worker.init_collective_async(
        0, sender.ip, sender.port, sender.world_size, sender.train_world_size
    )
    await meanwhile(sender.connect, join)
    update = worker.update_weights_from_collective_async()
    assert await meanwhile(lambda calls: sender.send(1, calls), update) == [True]
    await worker.wake_up_async()
    await assert_samples_of(policy, worker, data)

    await worker.sleep_async()
    await worker.wake_up_async(tags=["weights"])
    policy.randomise(seed=2)
    manager = ShardingManager(source, cpu, settings, folder)
    await meanwhile(manager.connect, worker.connect_ipc_async(*manager.endpoints()))
    assert await meanwhile(
        lambda calls: manager.send(2, calls), worker.update_weights_via_ipc_zmq_async()
    ) == [True]
    await worker.wake_up_async()
    await assert_samples_of(policy, worker, data)
    sender.close()
    manager.close()
    assert await worker.shutdown() is True


async def all_of(outputs: AsyncIterator[tuple[int, Any]]) -> dict[int, Any]:
    return {place: output async for place, output in outputs}


async def assert_samples_of(
    policy: HfPolicy, worker: VllmAsyncGenerationWorker, data: BatchedDataDict
) -> None:
    """Greedy log-probabilities are those of plain Transformers."""
    for place, output in (await all_of(worker.generate_async(data, greedy=True))).items():
        length, ids = int(data["input_lengths"][place]), output["output_ids"][0].tolist()
        expected = torch.tensor(policy.logprobs(ids)[length - 1 :])
        assert output["logprobs"][0, length:].allclose(expected, atol=1e-4)
