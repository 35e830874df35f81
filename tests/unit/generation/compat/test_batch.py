"""Batches as dictionaries: joined, cut and reordered without losing or mixing samples; rows and outputs,
configurations, and what a backend is.
"""

import asyncio
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from generation.compat.nemo import config as config_module
from generation.compat.nemo.async_worker import VllmAsyncGenerationWorker
from generation.compat.nemo.batch import (
    BatchedDataDict,
    GenerationInterface,
    pad_token_id,
    padded_output,
    rows_of,
    sequence_output,
)
from generation.compat.nemo.config import (
    VllmConfig,
    check_config,
    configure_generation_config,
    counted_gpus,
    engine_settings,
    sampling_settings,
)
from generation.compat.nemo.generation import VllmGeneration, collected
from generation.engine.lifecycle import EngineStateError
from generation.engine.settings import EngineSettings
from generation.engine.thread import as_ready
from generation.exact_ids import Generation
from sharding import WORKER_EXTENSION


def numbered(size: int) -> BatchedDataDict:
    """Return a batch whose sample i has the value i everywhere."""
    return BatchedDataDict(
        {
            "flat": torch.arange(size),
            "wide": torch.arange(size)[:, None].expand(size, 3),
            "names": list(range(size)),
        }
    )


def samples(batch: BatchedDataDict) -> list[int]:
    assert batch["flat"].tolist() == batch["wide"][:, 1].tolist() == batch["names"]
    return batch["names"]


def test_from_batches_pads_on_the_right_with_each_keys_own_value() -> None:
    a = BatchedDataDict(
        {"ids": torch.tensor([[1, 2]]), "mask": torch.ones(1, 2), "names": ["a"], "n": torch.tensor([5])}
    )
    b = BatchedDataDict(
        {
            "ids": torch.tensor([[3], [4]]),
            "mask": torch.ones(2, 1),
            "names": ["b", "c"],
            "n": torch.zeros(2),
        }
    )
    joined = BatchedDataDict.from_batches([a, b], {"ids": 9})
    assert joined["ids"].tolist() == [[1, 2], [3, 9], [4, 9]]
    assert joined["mask"].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert joined["names"] == ["a", "b", "c"]
    assert joined.size == 3
    cube = BatchedDataDict.from_batches(
        [{"x": torch.ones(1, 2, 2)}, {"x": torch.ones(1, 1, 2)}], {"x": 7}
    )
    assert cube["x"].tolist() == [[[1, 1], [1, 1]], [[1, 1], [7, 7]]]


def test_from_batches_of_nothing_and_with_a_key_missing() -> None:
    assert BatchedDataDict.from_batches([]) == {}
    assert samples(BatchedDataDict.from_batches([BatchedDataDict(), numbered(2)])) == [0, 1]
    with pytest.raises(KeyError, match=r"key 'b' is missing from non-empty batches \[0\]"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": [1], "b": [2]}])


@given(st.integers(0, 12), st.integers(1, 5))
def test_uneven_shards_are_the_batch_cut_up(size: int, shards: int) -> None:
    parts = [
        samples(part) for part in numbered(size).shard_by_batch_size(shards, allow_uneven_shards=True)
    ]
    assert len(parts) == shards
    assert [sample for part in parts for sample in part] == list(range(size))
    assert all(len(part) <= -(-size // shards) for part in parts)


def test_a_batch_is_sharded_by_batch_size() -> None:
    assert [len(p["names"]) for p in numbered(5).shard_by_batch_size(4, allow_uneven_shards=True)] == [
        2,
        2,
        1,
        0,
    ]
    parts = numbered(8).shard_by_batch_size(2, batch_size=4)
    assert [samples(part) for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for size, batch_size in (5, None), (8, 3), (6, 3):
        with pytest.raises(ValueError, match="cannot be cut into 2 equal shards"):
            numbered(size).shard_by_batch_size(2, batch_size)
    with pytest.raises(ValueError, match="leave batch_size out"):
        numbered(4).shard_by_batch_size(2, 2, allow_uneven_shards=True)


@given(st.permutations(range(6)))
def test_reorder_undoes_a_selection(order: list[int]) -> None:
    chosen = numbered(6).select_indices(order)
    assert samples(chosen) == order
    assert samples(chosen.reorder_data(order)) == list(range(6))


def test_parts_of_a_batch_are_the_rows_asked_for() -> None:
    batch = numbered(6)
    assert samples(batch.slice(1, 3)) == [1, 2]
    assert samples(batch.chunk(2, 3)) == [4, 5]
    assert samples(batch.get_batch(1, 2)) == [2, 3]
    assert [samples(part) for part in batch.make_microbatch_iterator(3)] == [[0, 1, 2], [3, 4, 5]]
    assert samples(batch.repeat_interleave(2).slice(0, 4)) == [0, 0, 1, 1]
    assert batch.truncate_tensors(1, 2)["wide"].shape == (6, 2)
    assert samples(batch) == list(range(6))  # as it was
    for wrong in (
        lambda: batch.slice(4, 7),
        lambda: batch.select_indices([6]),
        lambda: batch.get_batch(3, 2),
    ):
        with pytest.raises(IndexError):
            wrong()
    for wrong in (
        lambda: batch.chunk(0, 4),
        lambda: batch.make_microbatch_iterator(4),
        lambda: batch.reorder_data([0] * 6),
        lambda: BatchedDataDict({"a": [1], "b": [1, 2]}).size,
    ):
        with pytest.raises(ValueError):
            wrong()


@pytest.mark.parametrize("extra", [None, 7, {"a": 1, "b": 2, "c": 3}])
def test_additional_data_of_a_batch_is_not_looked_at(extra: Any) -> None:
    batch = BatchedDataDict(
        input_ids=torch.tensor([[5, 6], [7, 0]]), input_lengths=torch.tensor([2, 1]), __extra__=extra
    )
    assert [row.token_ids for row in rows_of(batch, 0)] == [[5, 6], [7]]
    assert batch.size == 2 and batch.slice(1, 2)["__extra__"] is extra
    assert set(BatchedDataDict.from_batches([batch, batch])) == {"input_ids", "input_lengths"}
    # Nor is any other entry, when generating
    assert len(rows_of(BatchedDataDict(batch.data | {"idx": [4]}), 0)) == 2


def test_repeated_samples_are_copies() -> None:
    batch = BatchedDataDict({"log": [[]]}).repeat_interleave(2)
    batch["log"][0].append("said")
    assert batch["log"] == [["said"], []]


def test_rows_of_a_batch_and_back() -> None:
    data = BatchedDataDict(
        {
            "input_ids": torch.tensor([[5, 6, 0, 0], [7, 0, 8, 9]], dtype=torch.int32),
            "input_lengths": torch.tensor([2, 4]),
            "stop_strings": [["!"], None],
        }
    )
    rows = rows_of(data, 0)
    assert [(r.index, r.token_ids, r.stop) for r in rows] == [(0, [5, 6], ["!"]), (1, [7, 0, 8, 9], [])]
    answers = [Generation([1, 2, 0], [-1.0, -2.0, -3.0], "length"), Generation([], [], "error", "why")]
    output = padded_output(data, answers, 0)
    assert output["output_ids"].dtype == torch.int32
    assert output["output_ids"].tolist() == [[5, 6, 1, 2, 0, 0, 0], [7, 0, 8, 9, 0, 0, 0]]
    assert output["logprobs"].tolist() == [[0, 0, -1, -2, -3, 0, 0], [0] * 7]
    assert output["generation_lengths"].tolist() == [3, 0]
    assert output["unpadded_sequence_lengths"].tolist() == [5, 4]
    assert output["truncated"].tolist() == [True, False]
    assert output["errors"] == ["", "why"]
    alone = sequence_output(data, rows[0], answers[0], 0)
    assert alone["output_ids"].tolist() == [[5, 6, 1, 2, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "needs input_ids"),
        ({"input_lengths": torch.tensor([1, 3])}, r"at index 0: positions \[1\]"),
        ({"stop_strings": ["a", "b"]}, "list of strings, or None, for each of the 2 samples"),
    ],
)
def test_batches_that_cannot_be_generated_from(change: dict, message: str) -> None:
    data = {
        "input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]),
        "input_lengths": torch.tensor([2, 3]),
    } | change
    with pytest.raises(ValueError, match=message):
        rows_of(BatchedDataDict({k: v for k, v in data.items() if v is not None}), 0)


CONFIG = VllmConfig(
    backend="vllm",
    max_new_tokens=8,
    temperature=0.7,
    top_p=0.9,
    top_k=None,
    model_name="nobody/nothing",
    stop_token_ids=None,
    vllm_cfg={
        "max_model_len": 32,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 20,
    },
    vllm_kwargs={"worker_extension_cls": WORKER_EXTENSION},
)


def test_a_configuration_becomes_settings() -> None:
    config: VllmConfig = {
        **CONFIG,
        "stop_strings": ["x"],
        "vllm_kwargs": {"block_size": 16, "worker_extension_cls": WORKER_EXTENSION},
        "colocated": {"enabled": True},
    }  # type: ignore[typeddict-item]
    sampling, engine = sampling_settings(config), engine_settings(config, seed=7)
    assert (sampling.max_tokens, sampling.top_k, sampling.stop, sampling.stop_token_ids) == (
        8,
        -1,
        ["x"],
        [],
    )
    assert (engine.model, engine.load_format, engine.seed, engine.sleep) == (
        "nobody/nothing",
        "dummy",
        7,
        True,
    )
    assert engine.extra == {"skip_tokenizer_init": True, "block_size": 16}
    assert pad_token_id(config) == 0
    assert pad_token_id({**config, "_pad_token_id": 5}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "other"}, "generation.backend is 'other'"),
        ({"top_k": 0}, "generation.top_k is 0"),
        ({"top_p": 0.0}, "generation.top_p is 0.0"),
        ({"temperature": -1}, "generation.temperature"),
        (
            {"model_name": None},
            "generation.model_name is None: it must be a folder or a name of the Hugging Face hub",
        ),
        ({"max_new_tokens": 0}, "generation.max_new_tokens"),
        ({"stop_strings": "abc"}, "stop_strings is 'abc': it must be a list of strings"),
        ({"max_new_token": 5}, "generation has no key max_new_token"),
        ({"vllm_cfg": {}}, "generation.vllm_cfg lacks max_model_len"),
        (
            {"vllm_cfg": {"max_model_len": 8, "tensor_parallel": 2}},
            "vllm_cfg has no key tensor_parallel",
        ),
        (
            {"vllm_cfg": {"max_model_len": 8, "pipeline_parallel_size": 2}},
            "pipeline_parallel_size is 2: it must be 1",
        ),
        ({"vllm_cfg": {"max_model_len": 8, "expert_parallel_size": 3}}, "expert_parallel_size"),
        ({"vllm_cfg": {"max_model_len": 8, "precision": "half"}}, "it must be float32 or bfloat16"),
        ({"vllm_cfg": {"max_model_len": 8, "gpu_memory_utilization": 9}}, "gpu_memory_utilization"),
        (
            {"vllm_cfg": {"max_model_len": 8, "backend": "mp"}},
            "vllm_cfg.backend is 'mp': it must be local or ray",
        ),
        ({"colocated": {"enable": True}}, "generation.colocated has no key enable"),
        (
            {"colocated": {"enabled": False, "resources": {"num_nodes": 2}}},
            "num_replicas says how many engines",
        ),
        (
            {"vllm_kwargs": {}},
            r"load_format is 'dummy': .*worker_extension_cls sharding\.WORKER_EXTENSION",
        ),
    ],
)
def test_an_impossible_configuration_is_one_sentence(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config({**CONFIG, **change})


def test_the_tokenizer_decides_what_was_left_open() -> None:
    tokenizer = SimpleNamespace(pad_token_id=3, eos_token_id=2)
    plain = VllmConfig({**CONFIG, "vllm_cfg": {"max_model_len": 32}})
    trained, evaluated = (
        configure_generation_config(plain, tokenizer, is_eval) for is_eval in (False, True)
    )
    assert (trained["pad_token_id"], trained["stop_token_ids"]) == (3, [2])
    assert trained["vllm_cfg"] == {
        "max_model_len": 32,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    assert evaluated["vllm_cfg"] == {
        "max_model_len": 32,
        "load_format": "auto",
        "skip_tokenizer_init": False,
    }
    stopping = configure_generation_config(
        {**plain, "stop_strings": ["x"], "stop_token_ids": [9]}, tokenizer
    )
    assert stopping["vllm_cfg"]["skip_tokenizer_init"] is False
    assert stopping["stop_token_ids"] == [9]
    assert plain["vllm_cfg"] == {"max_model_len": 32}


def test_required_keys_are_named() -> None:
    with pytest.raises(ValueError, match="generation lacks max_new_tokens, model_name"):
        check_config({"backend": "vllm", "temperature": 1.0, "vllm_cfg": {"max_model_len": 8}})


def test_on_cpu_the_cache_holds_the_longest_sequences_and_no_more(tiny_qwen2: Path) -> None:
    model = AutoConfig.from_pretrained(tiny_qwen2)
    engine = {"max_model_len": 100, "max_num_seqs": 3}
    size = engine_settings({**CONFIG, "model_name": str(tiny_qwen2), "vllm_cfg": engine}).kv_cache_bytes
    keys_and_values = 2 * model.num_hidden_layers * model.num_key_value_heads * model.hidden_size
    sequences = (size or 0) / (keys_and_values / model.num_attention_heads * 4 * 100)
    assert 3 <= sequences < 4
    with pytest.raises(ValueError, match="'nobody/nothing': there is no such model here"):
        engine_settings({**CONFIG, "vllm_cfg": engine})


def test_bundles_are_devices_or_cores_of_the_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    two = VllmConfig({**CONFIG, "vllm_cfg": CONFIG["vllm_cfg"] | {"tensor_parallel_size": 2}})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    for bundle, cores in (None, (4, 5)), ([2, 3], (6, 7)):
        settings = VllmAsyncGenerationWorker(two, bundle).settings
        assert (settings.cpu_cores, settings.device_indices, settings.dtype) == (cores, (), "float32")
    monkeypatch.setattr(config_module, "device_count", lambda: 4)
    for bundle, devices in (None, (0, 1)), ([2, 3], (2, 3)):
        settings = VllmAsyncGenerationWorker(two, bundle, seed=3).settings
        assert (settings.device_indices, settings.dtype, settings.seed) == (devices, "bfloat16", 3)
    for bundle, complaint in (
        ([3], "needs 2 of them"),
        ([3, 4], r"\[3, 4\]: the devices here are 0 to 3"),
    ):
        with pytest.raises(ValueError, match=complaint):
            VllmAsyncGenerationWorker(two, bundle)


def test_shares_of_a_gpu_are_for_ray_to_count() -> None:
    def on_ray(size: int) -> VllmConfig:
        engine = CONFIG["vllm_cfg"] | {"backend": "ray", "tensor_parallel_size": size}
        return VllmConfig({**CONFIG, "vllm_cfg": engine})  # type: ignore[typeddict-item]

    assert (
        counted_gpus(CONFIG, 1.0) == 1
        and counted_gpus(on_ray(1), 0.5) == 0.5
        and counted_gpus(on_ray(2), 1.0) == 2
    )
    with pytest.raises(
        ValueError, match="0.5, but only Ray counts shares .*vllm_cfg.gpu_memory_utilization"
    ):
        VllmAsyncGenerationWorker(CONFIG, fraction_of_gpus=0.5)
    for size, share in (1, 0.0), (1, 1.5), (2, 0.5):
        with pytest.raises(ValueError, match=f"fraction_of_gpus is {share}: it must be"):
            VllmAsyncGenerationWorker(on_ray(size), fraction_of_gpus=share)


def test_a_worker_is_made_of_a_configuration_only() -> None:
    with pytest.raises(
        TypeError, match="config must be a VllmConfig, which is a dictionary, not EngineSettings"
    ):
        VllmAsyncGenerationWorker(EngineSettings("model", 64))  # type: ignore[arg-type]


@pytest.mark.parametrize(("world", "trainers"), [(3, None), (5, 2), (4, 1), (2, None), (2, 0)])
def test_a_world_without_the_trainers_ranks_is_the_engines(world: int, trainers: int | None) -> None:
    generation = VllmGeneration.__new__(VllmGeneration)
    generation.config, joined = CONFIG, list[Any]()
    worker = SimpleNamespace(submit=lambda *call: joined.append(call))
    generation.workers = [worker, worker]  # type: ignore[list-item]
    if world - 2 == (trainers or world - 2) > 0:
        generation.init_collective("ip", 1, world, trainers)  # type: ignore[arg-type]
        assert joined == [
            ("init_collective_async", number, "ip", 1, world, world - 2) for number in range(2)
        ]
    else:
        with pytest.raises(
            ValueError, match=f"a world of {world} .* 2 engines of 1 workers: it must be 2 more"
        ):
            generation.init_collective("ip", 1, world, trainers)


def test_a_samples_stop_strings_stand_beside_the_configurations() -> None:
    engine = CONFIG["vllm_cfg"] | {"skip_tokenizer_init": False}
    config = VllmConfig({**CONFIG, "stop_strings": ["a"], "vllm_cfg": engine})
    worker = VllmAsyncGenerationWorker(config)
    assert worker._sampling(["b"], greedy=False) == replace(sampling_settings(config), stop=["a", "b"])
    assert worker._sampling([], greedy=True) == replace(sampling_settings(config), temperature=0.0)


def test_generation_without_a_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = VllmAsyncGenerationWorker(CONFIG)

    async def devices() -> list[str]:
        return ["cpu:0", "cpu:1"]

    async def start() -> None:
        pass

    monkeypatch.setattr(worker, "start", start)
    monkeypatch.setattr(worker, "report_device_id_async", devices)
    asyncio.run(worker.post_init_async())
    assert worker.device_ids == ["cpu:0", "cpu:1"]
    with pytest.raises(EngineStateError, match="weights of no version"):
        worker.state.usable_version()


class Smallest(GenerationInterface):
    """A backend with the four methods that NeMo RL asks for."""

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Future[None]]:
        return []

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        return padded_output(data, [Generation([], [], "stop")] * data.size, 0)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True


def test_four_methods_make_a_backend_and_the_others_say_what_it_cannot() -> None:
    backend = Smallest()
    assert backend.shutdown() is True
    for call in (
        lambda: backend.prepare_refit_info({}),
        backend.update_weights_via_ipc_zmq,
        backend.update_weights_from_collective,
    ):
        with pytest.raises(NotImplementedError, match="Smallest takes no weights"):
            call()
    with pytest.raises(TypeError, match="abstract"):
        GenerationInterface()  # type: ignore[abstract]


async def late(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


async def listened(seconds: list[float], timeout: float | None = None) -> list[tuple[int, float]]:
    return [result async for result in as_ready(map(late, seconds), timeout)]


def test_results_in_order_of_readiness_and_never_after_the_deadline() -> None:
    assert asyncio.run(listened([0.2, 0.0])) == [(1, 0.0), (0, 0.2)]
    assert asyncio.run(listened([])) == []
    with pytest.raises(TimeoutError, match="1 of 2 requests did not finish within 0 s"):
        asyncio.run(listened([0.0, 60.0], timeout=0.3))


def test_the_first_failure_or_the_deadline_ends_the_others() -> None:
    done, failed, waiting = Future[int](), Future[int](), Future[int]()
    done.set_result(1)
    assert collected([done, done], 1) == [1, 1]
    with pytest.raises(TimeoutError, match="1 of 2 requests did not finish within 0 s"):
        collected([done, waiting], 0.05)
    assert waiting.cancelled()
    waiting = Future[int]()
    failed.set_exception(ZeroDivisionError("first"))
    with pytest.raises(ZeroDivisionError, match="first"):
        collected([done, waiting, failed], 60)
    assert waiting.cancelled()
