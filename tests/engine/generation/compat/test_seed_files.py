"""Usage of three pages as files: modules without a guard, which just end.

Changed are the imports, the models' names, and the sizes. The pieces of verl's thread are parts of a
recipe, and no program.
"""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TinyModel
from tests.support.killed_programs import kill

NEMO_RL = """
from generation import VllmGeneration, VllmConfig
from generation import BatchedDataDict
import torch

# Configure VLLM generation
vllm_config = VllmConfig(
    backend="vllm",
    max_new_tokens=128,
    temperature=0.7,
    top_p=0.9,
    top_k=50,
    model_name=MODEL,
    stop_token_ids=[2],  # EOS token
    vllm_cfg={
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 256,
    }
)

# Initialize generation backend
generation = VllmGeneration(vllm_config)

# Prepare input data (right-padded)
input_data = BatchedDataDict({
    "input_ids": torch.tensor([
        [1, 2, 3, 0, 0],  # Right-padded sequence
        [1, 2, 3, 4, 5]   # Full sequence
    ]),
    "input_lengths": torch.tensor([3, 5])
})

# Generate responses
output_data = generation.generate(input_data, greedy=False)

# Access results
generated_text = output_data["output_ids"]
logprobs = output_data["logprobs"]
print(generated_text.shape == logprobs.shape)
"""
TORCHRL = """
from generation import AsyncVLLM
from vllm import SamplingParams

# Simple usage - single GPU, single replica
service = AsyncVLLM.from_pretrained(MODEL, kv_cache_memory_bytes=32 << 20, verbose=False, compile=False)

# Generate text
sampling_params = SamplingParams(temperature=0.7, max_tokens=100)
result = service.generate("Hello, world!", sampling_params)
print(isinstance(result.outputs[0].text, str))
"""
NEMO_RL_ASYNC = """
import asyncio
from types import SimpleNamespace

import torch
from generation import BatchedDataDict, VllmAsyncGenerationWorker, VllmConfig, replace_prefix_tokens

config = VllmConfig(backend="vllm", model_name=MODEL, max_new_tokens=8, temperature=1.0)
config["vllm_cfg"] = {"max_model_len": 64}
data = BatchedDataDict({"input_ids": torch.tensor([[1, 2, 3]]), "input_lengths": torch.tensor([3])})

# Turn 1
prefill_T1 = [11, 12, 13, 40, 41]
model_prefix_token_ids = prefill_T1 + [220, 17, 2]
# Turn 2
template_prefix_token_ids = [11, 12, 13, 40, 41, 1001, 2]
template_token_ids = [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41]
tokenizer = SimpleNamespace(eos_token_id=2)


async def use():
    worker = VllmAsyncGenerationWorker(config, bundle_indices=None, fraction_of_gpus=1.0, seed=None)
    await worker.post_init_async()
    outputs = [output async for _, output in worker.generate_async(data, greedy=False)]
    return outputs[0]["errors"] == [""]


spliced = replace_prefix_tokens(tokenizer, model_prefix_token_ids, template_prefix_token_ids, template_token_ids)
print(asyncio.run(use()) and spliced == [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41])
"""
PAGES = {"nemo rl": NEMO_RL, "nemo rl, async": NEMO_RL_ASYNC, "torchrl": TORCHRL}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_a_page_is_a_program_that_ends_without_a_word(
    text: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    script = tmp_path / "page.py"
    model = str(tiny_model())
    script.write_text(text.replace("MODEL", repr(model)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    program = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert program.returncode == 0, program.stderr
    assert program.stdout.splitlines() == ["True"]
    assert not re.search("Traceback|Error|Exception|resource_tracker|hotbunk", program.stderr), (
        program.stderr
    )
    left = [
        path
        for path in tmp_path.rglob("*")
        if stat.S_ISSOCK(path.lstat().st_mode) or "hotbunk-" in path.name
    ]
    assert left == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "event"), [("service", "used"), ("accelerate", "engine"), ("training", "ready")]
)
def test_nothing_is_left_of_a_program_that_is_killed(
    kind: str, event: str, tiny_model: TinyModel
) -> None:
    assert kill(kind, tiny_model(), event, 0.5, gone_seconds=60.0) == []
