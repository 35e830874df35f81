"""Compare plain vLLM with plain Transformers on exported models, neither of which knows of this project.

    PYTHONPATH=generation/shims OMP_NUM_THREADS=1 python tests/support/exported_model.py FOLDER [FOLDER ...]

Prints a line for each folder: the mean and the largest difference between their log-probabilities of what vLLM samples,
in nats. Transformers computes in float32, and so does vLLM, except in bfloat16 for gated delta rules. The exit status
is 1 for a mean above 1e-5, or 0.05 in bfloat16.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

PROMPTS = [list(range(20, 50)), list(range(40, 45)), list(range(60, 160, 3))]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@torch.no_grad()
def differences(folder: Path, dtype: str) -> Tensor:
    """Return the absolute differences of all sampled tokens' log-probabilities."""
    import vllm

    engine = vllm.LLM(
        str(folder), dtype=dtype, enforce_eager=True, enable_prefix_caching=False, max_model_len=256
    )
    sampling = vllm.SamplingParams(max_tokens=24, seed=0, logprobs=0, ignore_eos=True)
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config._attn_implementation == "sdpa":  # which leaves out soft caps of attention's scores
        model.set_attn_implementation("eager")
    parts = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        output = answer.outputs[0]
        seen = [
            step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        ids = torch.tensor([[*prompt, *output.token_ids]])
        log_p = (
            model.eval()(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        parts.append((log_p.gather(1, ids[0, len(prompt) :, None])[:, 0] - torch.tensor(seen)).abs())
    return torch.cat(parts)


def main() -> int:
    """Compare the models of the folders named on the command line. Return the exit status."""
    os.environ.update(ENVIRONMENT)
    failed = 0
    for folder in map(Path, sys.argv[1:]):
        config = json.loads((folder / "config.json").read_bytes())
        narrow = bool(config.get("text_config", config).get("linear_key_head_dim"))
        gaps = differences(folder, "bfloat16" if narrow else "float32")
        print(
            f"{folder}: mean {float(gaps.mean()):.1e}, largest {float(gaps.max()):.1e} nats", flush=True
        )
        failed += float(gaps.mean()) > (0.05 if narrow else 1e-5)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
