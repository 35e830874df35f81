"""ChatLearn's page on its vLLM backend, from its user's side: class, pipeline and files as printed, on an engine.

These lines are changed:
- imports: from `generation` instead of `chatlearn` and `chatlearn.utils.vllm_utils`;
- the skeleton's empty methods are filled in as the page's text says, and `setup` calls `load_checkpoint`;
- `_forward_step` returns `self.execute_step(data)`: a test of its own has the printed line;
- hyper-parameters that vLLM no longer has (`max_paddings`, `swap_space`) have a test of their own;
- the model's name, and `kv_cache_memory_bytes`, since other engines share this machine.
"""
# ruff: noqa: RET504, UP006, UP035

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, List

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from generation import PromptPipeline, VLLMModule, get_model, print_rank_0
from generation.trajectory import Trajectory
from tests.engine.generation.test_samplers import assert_on_policy

FILES = {
    "rlhf.yaml": """
policy:
    model_config_file: vllm_policy_inference.yaml
    generation_batch_size: 8
""",
    "vllm_policy_inference.yaml": """
includes:
    - llama2.yaml
n: 2
ignore_eos: false
top_p: ${top_p:1.0}
top_k: -1
temperature: 1.0
use_beam_search: false
eval_temperature: 0
eval_top_k: -1
eval_top_p: 0.9
stop_token_list: <EOS>;</s>
new_token_limit: true
prompt_logprobs: 1
max_num_batched_tokens: 2048
block_size: 32
gpu_memory_utilization: 0.5
kv_cache_memory_bytes: 33554432
sliding_window: null
tokenizer: ${oc.env:SEED_003_MODEL}
""",
    "llama2.yaml": "seq_length: 64\nmax_new_tokens: 10\n",
}


class VLLMPromptPipeline(PromptPipeline):
    def __init__(self, prompts: List[str], max_prompt_length: int, tokenizer=None):

        for p in prompts:
            assert len(p) > 0, "Got empty prompt"
        assert max_prompt_length > 0, (
            "Prompt length for RLHF/OnlineDPO/GRPO trainer must be an integer greater than 0"
        )

        # tokenizer prompts of self-defined format
        # only return prompt str and prompt ids
        self.prompts = [(prompt, tokenizer.encode(prompt[:max_prompt_length])) for prompt in prompts]
        self.prompts_ids = []
        for prompt, prompt_ids in self.prompts:
            p = {"input_ids": prompt_ids, "prompt": prompt}
            self.prompts_ids.extend([copy.deepcopy(p)])
        # set tokenizer
        self.tokenizer = tokenizer


class VLLMPolicyInference(VLLMModule):
    """Policy vLLM Inference"""

    checkpoint: Any = None

    def setup(self):
        if self.checkpoint is not None:
            self.load_checkpoint(self.checkpoint)
        self.model = get_model(self.model_provider, self.model_args)
        print_rank_0("ready")

    def build_dataset(self, train_prompts, is_eval=False):
        max_prompt_length = self.model_args.get("seq_length") - self.model_args.get("max_new_tokens")
        # TODO: read from files
        prompts_dataset = VLLMPromptPipeline(train_prompts, max_prompt_length, self.tokenizer.tokenizer)

        return prompts_dataset

    def model_provider(self):
        """Build the model."""
        return super().model_provider()

    def eval_forward(self, data, iteration=0):
        return self._forward_step(data, iteration, eval_mode=True)

    def _add_request(self, data, is_eval=False):
        return self._add_request_internal(data["prompt"], data["input_ids"], is_eval=is_eval)

    def _forward_step(self, data, iteration, eval_mode):
        assert iteration >= 0
        assert isinstance(eval_mode, bool)
        return self.execute_step(data)

    def forward_step(self, data, iteration=0):
        return self._forward_step(data, iteration, eval_mode=False)

    def decode_internal(self, batched_outputs):
        return [
            {
                "request_id": output.request_id,
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "prompt_logprobs": output.prompt_logprobs,
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "cumulative_logprob": completion.cumulative_logprob,
                "logprobs": completion.logprobs,
            }
            for output in batched_outputs
            for completion in output.outputs
        ]


class AsPrinted(VLLMPolicyInference):
    """The class with `_forward_step` as the page prints it."""

    def _forward_step(self, data, iteration, eval_mode):
        assert iteration >= 0
        assert isinstance(eval_mode, bool)
        seq_group_metadata_list = data["seq_group_metadata_list"]
        blocks_to_swap_in = data["blocks_to_swap_in"]
        blocks_to_swap_out = data["blocks_to_swap_out"]
        blocks_to_copy = data["blocks_to_copy"]

        outputs = self.execute_step(
            seq_group_metadata_list, blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy
        )

        return outputs


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEED_003_MODEL", str(model))
        yield folder


@pytest.fixture(scope="module")
def policy(folder: Path, model: Path) -> Iterator[VLLMPolicyInference]:
    with VLLMPolicyInference(folder / "rlhf.yaml") as policy:
        policy.checkpoint = model
        policy.setup()
        yield policy


def test_the_pages_class_answers_in_training(policy: VLLMPolicyInference, model: Path) -> None:
    """Each prompt has two numbered answers, with plain Transformers' log-probabilities and their sum."""
    rows = policy.build_dataset(["one", "and three"])
    assert [prompt for prompt, _ in rows.prompts] == ["one", "and three"]
    answers = policy.generate([rows[i] for i in range(len(rows))])
    assert [(a["prompt"], a["index"]) for a in answers] == [
        (p, i) for p in ("one", "and three") for i in (0, 1)
    ]
    assert len({a["request_id"] for a in answers}) == 2
    trajectories = []
    for answer in answers:
        logprobs = [
            step[token].logprob
            for step, token in zip(answer["logprobs"], answer["token_ids"], strict=True)
        ]
        assert answer["cumulative_logprob"] == pytest.approx(sum(logprobs), abs=1e-4)
        assert answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
        assert 1 <= len(answer["token_ids"]) <= 10
        trajectories.append(Trajectory(0, 0, list(answer["prompt_token_ids"])))
        trajectories[-1].extend(answer["token_ids"], logprobs)
    assert_on_policy(model, trajectories)
    assert answers[0]["token_ids"] != answers[1]["token_ids"]


def test_the_pages_class_answers_in_evaluation(policy: VLLMPolicyInference, model: Path) -> None:
    """The answers are greedy, as its hyper-parameters say, and those of plain Transformers with the checkpoint."""
    (row,) = policy.build_dataset(["one"], is_eval=True)
    answers = policy.generate([row], is_eval=True)
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
    )
    ids = torch.tensor([row["input_ids"]])
    mask = torch.ones_like(ids)
    expected = network.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=10)[
        0, ids.shape[1] :
    ]
    for answer in answers:
        assert answer["token_ids"] == expected.tolist()
        # vLLM waits for a character's last byte
        assert answer["text"] == tokenizer.decode(expected).rstrip("\ufffd")


def test_an_empty_batch_gives_no_answers(policy: VLLMPolicyInference) -> None:
    assert policy.generate([]) == policy.decode_internal([]) == []


def test_the_pages_scheduler_arguments_are_refused_with_a_remedy(
    policy: VLLMPolicyInference, folder: Path
) -> None:
    printed = AsPrinted(folder / "rlhf.yaml", policy.llm)
    (row,) = printed.build_dataset(["one"])
    with pytest.raises(ValueError, match=r"return self\.execute_step\(data\) from forward_step"):
        printed.generate([row])
    for name, value in {"max_paddings": 512, "swap_space": 4, "sliding_window": 64}.items():
        with pytest.raises(ValueError, match=f"{name} is gone: "):
            VLLMPolicyInference({**policy.model_args, name: value}, policy.llm)
    with pytest.raises(
        ValueError, match="the weights of a given llm cannot be changed: .*in training, set model.path"
    ):
        AsPrinted(policy.model_args, policy.llm).load_checkpoint(folder)
