"""NeMo RL's page on generation: its types, usage example, two configurations and two snippets, as printed.

Changed are the imports, the model (a tiny one), and the devices (CPU cores). The configuration for several GPUs names
only what differs from the one before it, so the two are merged, with the memory of a tiny model.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

import generation as generation_package
import sharding
from generation import (
    BatchedDataDict,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    VllmConfig,
    VllmGeneration,
    VllmGenerationWorker,
    verify_right_padding,
)
from generation.engine.lifecycle import EngineStateError

PRINTED = {
    GenerationConfig: {
        "backend",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "model_name",
        "stop_token_ids",
        "stop_strings",
        "pad_token_id",
    },
    GenerationDatumSpec: {"input_ids", "input_lengths", "stop_strings", "__extra__"},
    GenerationOutputSpec: {
        "output_ids",
        "generation_lengths",
        "unpadded_sequence_lengths",
        "logprobs",
        "__extra__",
    },
}

CONFIGURATION = """
# configs/generation_vllm.yaml
generation:
  backend: "vllm"
  max_new_tokens: 128
  temperature: 0.7
  top_p: 0.9
  top_k: 50
  model_name: "meta-llama/Llama-2-7b-hf"
  stop_token_ids: [2]

  vllm_cfg:
    tensor_parallel_size: 1
    gpu_memory_utilization: 0.9
    max_model_len: 2048
    load_format: "auto"
    skip_tokenizer_init: true
"""

DISTRIBUTED = """
generation:
  backend: "vllm"
  vllm_cfg:
    tensor_parallel_size: 2  # Use 2 GPUs
    gpu_memory_utilization: 0.8
    max_model_len: 4096
"""


@pytest.mark.parametrize("spec", PRINTED, ids=lambda spec: spec.__name__)
def test_printed_types_have_the_printed_keys(spec: Any) -> None:
    assert PRINTED[spec] <= set(spec.__annotations__)


def test_printed_names_can_be_imported_and_sharding_has_the_extension() -> None:
    assert {"VllmGeneration", "VllmGenerationWorker", "VllmConfig"} <= set(generation_package.__all__)
    assert sharding.VllmInternalWorkerExtension.report_device_id.__doc__
    module, _, name = sharding.WORKER_EXTENSION.rpartition(".")
    assert (module, name) == (
        sharding.VllmInternalWorkerExtension.__module__,
        "VllmInternalWorkerExtension",
    )


class Backend(GenerationInterface):
    """A backend with only the methods that the page asks for."""

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Future[None]]:
        return []

    def generate(
        self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool
    ) -> BatchedDataDict["GenerationOutputSpec"]:
        return BatchedDataDict()

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return True


def test_the_printed_abstract_methods_are_all_that_a_backend_needs() -> None:
    assert Backend().prepare_for_generation() and issubclass(VllmGeneration, GenerationInterface)
    abstract = {"init_collective", "generate", "prepare_for_generation", "finish_generation"}
    assert GenerationInterface.__abstractmethods__ == abstract


def test_the_example_of_nemo_rl_runs_as_printed(model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    # Configure VLLM generation
    vllm_config = VllmConfig(
        backend="vllm",
        max_new_tokens=128,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        model_name=str(model),
        stop_token_ids=[2],  # EOS token
        vllm_cfg={
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.9,
            "max_model_len": 2048,
        },
    )

    # Initialize generation backend
    generation = VllmGeneration(vllm_config)

    # Prepare input data (right-padded)
    input_data = BatchedDataDict(
        {
            "input_ids": torch.tensor(
                [
                    [1, 2, 3, 0, 0],  # Right-padded sequence
                    [1, 2, 3, 4, 5],  # Full sequence
                ]
            ),
            "input_lengths": torch.tensor([3, 5]),  # Actual lengths
        }
    )

    # Generate responses
    output_data = generation.generate(input_data, greedy=False)

    # Access results
    generated_text = output_data["output_ids"]
    logprobs = output_data["logprobs"]

    assert generated_text.shape == logprobs.shape == (2, 5 + output_data["generation_lengths"].max())
    assert generated_text[0, :3].tolist() == [1, 2, 3]
    assert output_data["errors"] == ["", ""]
    assert isinstance(generation.workers[0], VllmGenerationWorker)
    assert generation.shutdown() is True
    assert generation.shutdown() is True
    assert not psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=120)[1]
    with pytest.raises(EngineStateError, match="closed"):
        generation.generate(input_data)


def test_the_printed_configurations_run(model: Path) -> None:
    """An engine of two workers generates from token ids only."""
    config = yaml.safe_load(CONFIGURATION)["generation"]
    distributed = yaml.safe_load(DISTRIBUTED)["generation"]
    config |= distributed | {
        "model_name": str(model),
        "vllm_cfg": config["vllm_cfg"] | distributed["vllm_cfg"],
    }
    # Sizes of a tiny model
    config["vllm_cfg"] |= {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 256}
    prompts = BatchedDataDict(
        {"input_ids": torch.tensor([[14, 50, 77]]), "input_lengths": torch.tensor([3])}
    )
    with VllmGeneration(config) as generation:
        assert generation.device_uuids == [["cpu:0", "cpu:1"]]
        assert generation.dp_openai_server_base_urls == [None]
        output = generation.generate(prompts, greedy=False)
        assert output["errors"] == [""] and output["generation_lengths"] > 0
        with pytest.raises(
            ValueError, match="texts need the tokenizer: set vllm_cfg.skip_tokenizer_init"
        ):
            generation.generate_text(BatchedDataDict({"prompts": ["x"]}))
        stopping = BatchedDataDict({**prompts, "stop_strings": [["x"]]})
        with pytest.raises(
            ValueError, match="stop strings need the tokenizer: set vllm_cfg.skip_tokenizer_init"
        ):
            generation.generate(stopping)


def test_the_printed_check_of_padding_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    input_data = BatchedDataDict(
        {"input_ids": torch.tensor([[0, 0, 1, 2]]), "input_lengths": torch.tensor([2])}
    )

    # Verify padding is correct
    is_padded, error_msg = verify_right_padding(input_data, pad_value=0)
    if not is_padded:
        print(f"Padding error: {error_msg}")

    printed = "Padding error: tokens other than the padding 0 after the length 2 at index 0: positions [2, 3]\n"
    assert capsys.readouterr().out == printed
