"""TorchRL's AsyncVLLM as its own documentation uses it: the examples of its docstrings, one after another.

Changed are the imports, the models' names (one tiny model stands for all), and counts: `num_devices` and
`tensor_parallel_size` 2 are 1, `num_replicas` 3 and that of `launch` are 2 and 1. Services are shut down. Besides:

- `make_async_vllm_engine("Qwen/Qwen2.5-3B")` passes `model_name=`: its arguments are keyword-only in TorchRL, too.
- `sampling_params` of that example is defined in another one.
- The futures of `init_weight_update_group` are awaited with `result`: the service is rank 0 itself.
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams

from generation import AsyncVLLM, LoadBalancer, make_async_vllm_engine
from tests.conftest import TinyModel
from tests.support.colocated import HfPolicy


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model with room for the 4,096 tokens of an example."""
    folder = Path(shutil.copytree(tiny_model(), tmp_path_factory.mktemp("long") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return str(folder)


@pytest.fixture(scope="module")
def two_replicas(model: str) -> Iterator[AsyncVLLM]:
    # Advanced usage - multi-GPU tensor parallel with multiple replicas
    service = AsyncVLLM.from_pretrained(
        model,
        num_devices=1,  # Use 2 GPUs for tensor parallelism
        num_replicas=2,  # Create 2 replicas for higher throughput
        max_model_len=4096,
    )
    yield service
    service.shutdown()


class Lines(logging.Handler):
    """A handler that keeps vLLM's log messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_simple_usage_shows_throughput(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.1")  # instead of ten seconds
    seen, logger = Lines(), logging.getLogger("vllm")
    # Simple usage - single GPU, single replica
    service = AsyncVLLM.from_pretrained(model)
    logger.addHandler(seen)
    try:
        # Generate text
        sampling_params = SamplingParams(temperature=0.7, max_tokens=100)
        result = service.generate("Hello, world!", sampling_params)
        print(result.outputs[0].text)
        assert isinstance(result.outputs[0].text, str)
        result = service.generate("Hello, world!", SamplingParams(max_tokens=50))
        assert 1 <= len(result.outputs[0].token_ids) <= 50
        deadline = time.monotonic() + 60
        while not any("Avg generation throughput" in line for line in seen.lines):
            assert time.monotonic() < deadline, seen.lines
            service.generate("Hello, world!", SamplingParams(max_tokens=50, ignore_eos=True))
        # No handler hides the line
        assert all(handler.level <= logging.INFO for handler in logger.handlers)
    finally:
        logger.removeHandler(seen)
        service.shutdown()


def test_engine_args_can_be_given_directly(model: str) -> None:
    # Alternative: using AsyncEngineArgs directly for advanced configuration
    engine_args = AsyncEngineArgs(model=model, tensor_parallel_size=1)
    service = AsyncVLLM.launch(engine_args, num_replicas=1)
    try:
        assert service.get_tp_size() == service.engine_args.tensor_parallel_size == 1
        assert service.generate(["a", "b"], SamplingParams(max_tokens=2))[1].finished
    finally:
        service.shutdown()


def test_an_engine_with_fp32_output_generates(model: str) -> None:
    # Create with FP32 output enabled
    service = make_async_vllm_engine(model_name=model, enable_fp32_output=True)
    try:
        sampling_params = SamplingParams(temperature=0.7, max_tokens=100)
        # Generate text
        result = service.generate("Hello, world!", sampling_params)
        assert result.finished
    finally:
        service.shutdown()


def test_the_load_balancer_examples_run(two_replicas: AsyncVLLM) -> None:
    service = two_replicas
    # Use smart defaults (prefix-aware -> requests)
    lb = service.create_load_balancer()
    selected_actor_index = lb.select_actor(prompt="Hello world")
    assert selected_actor_index == lb.select_actor(prompt="Hello world") and selected_actor_index in (
        0,
        1,
    )
    # Simple single strategy
    lb = service.create_load_balancer("requests")
    selected_actor_index = lb.select_actor()
    assert selected_actor_index in (0, 1)
    # Custom strategy hierarchy
    lb = service.create_load_balancer(
        ["prefix-aware", "kv-cache", "round-robin"],
        prefix_length=16,
        overload_threshold=2.0,
    )
    selected_actor_index = lb.select_actor(prompt="Hello world")
    assert service.generate(
        "Hello world", SamplingParams(max_tokens=2), actor_index=selected_actor_index
    ).finished

    # Simple strategy
    lb = LoadBalancer(service, "requests")
    actor_idx = lb.select_actor()
    # Strategy hierarchy: try prefix-aware first, fall back to requests, then round-robin
    lb = LoadBalancer(service, ["prefix-aware", "requests", "round-robin"])
    actor_idx = lb.select_actor(prompt="Hello world")  # Uses prefix routing
    actor_idx = lb.select_actor()  # Falls back to requests (no prompt)
    # Custom configuration
    lb = LoadBalancer(
        service,
        ["prefix-aware", "kv-cache"],
        prefix_length=16,
        overload_threshold=2.0,
    )
    assert actor_idx in (0, 1) and lb.select_actor("Hello world") in (0, 1)
    assert lb.get_stats()["num_actors"] == 2
    service.create_load_balancer()


def test_requests_of_all_forms_are_answered_and_counted(two_replicas: AsyncVLLM) -> None:
    service, sampling_params = two_replicas, SamplingParams(max_tokens=4)
    results = service.generate(["Hello", "world"], sampling_params)
    assert [result.prompt for result in results] == ["Hello", "world"]
    assert service.generate(prompt_token_ids=[1, 2], sampling_params=sampling_params).finished
    assert len(service.generate(prompt_token_ids=[[1, 2], [3]], sampling_params=sampling_params)) == 2
    index = service.get_random_actor_index()
    assert service.generate(
        "Hello", sampling_params, actor_index=index, timeout_seconds=60.0, use_tqdm=True
    ).finished
    assert service.get_num_unfinished_requests() == [0, 0]
    assert service.get_cache_usage(actor_index=0) == 0.0
    assert service.collective_rpc("check_nccl_group_ready", timeout=60) == [[False], [False]]


def test_weights_are_updated_by_the_methods_of_rlvllmengine(two_replicas: AsyncVLLM, model: str) -> None:
    """`RLvLLMEngine`'s methods are called in the order in which its updater calls them."""
    service, trainer = two_replicas, HfPolicy(model, dtype=torch.bfloat16)
    trainer.randomise(1)
    assert service.get_tp_size() == 1
    master_address, master_port = service.get_master_address(), service.get_master_port()
    metadata = service.get_model_metadata()
    assert metadata == {
        name: (weight.dtype, weight.shape) for name, weight in trainer.model.named_parameters()
    }
    refs = service.init_weight_update_group(master_address, master_port)
    for ref in refs:
        ref.result(60)
    service.update_weights(iter(trainer.model.state_dict().items()))
    greedy = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    prompt = list(range(40, 60))
    expected = trainer.model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    for index in range(2):
        [completion] = service.generate(prompt, greedy, actor_index=index).outputs
        [token] = completion.token_ids
        assert abs(completion.logprobs[0][token].logprob - expected[token].item()) < 0.05
        assert expected[token] > expected.max() - 0.05
