#!/usr/bin/env python3
"""Compare the updates of race.py's two sides: the same scripted answers, in TRL's trainer and in Hotbunk's loss.

    PYTHONPATH=. .venv/bin/python scripts/bench/race_updates.py

TRL's side is its own `GRPOTrainer.train`, whose generation and rewards are replaced. Hotbunk's side is the learner's
loss in plain torch with AdamW, which its policies equal (tests/distributed/trainer/test_policy.py). Prints the
distance of the weights as a share of how far they have moved, and the ratio of the gradients' norms.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from race_trl import GRPOTrainer, grpo_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.algorithms.advantages import group_relative
from trainer.commands.tiny_model import make_tiny_model
from trainer.config.algorithm import AlgorithmConfig
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import PolicyLoss
from trainer.policy.packing import make_layout
from trainer.types import MicroBatch, Outputs

STEPS, PROMPTS, GROUP, LONGEST = 6, 4, 8, 24
LR, BETAS, EPS, CLIP = 5e-5, (0.9, 0.99), 1e-8, 0.2  # of the race
SETTINGS = {
    "lr": LR,
    "betas": BETAS,
    "eps": EPS,
    "clip": CLIP,
    "group": GROUP,
    "max_tokens": LONGEST,
}
NORM = 10.0  # larger than any gradient here, as the race's 1.0 is there


@dataclass
class Rollout:
    """A step's scripted answers: prompts of equal length [N, P], completions, and rewards [N]."""

    prompts: Tensor
    completions: list[list[int]]
    rewards: Tensor


def script() -> list[Rollout]:
    """Draw the answers of all steps."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for _ in range(STEPS):
        prompts = torch.randint(5, 280, (PROMPTS, 6), generator=generator).repeat_interleave(
            GROUP, dim=0
        )
        lengths = torch.randint(4, LONGEST, (len(prompts),), generator=generator).tolist()
        completions = [
            torch.randint(5, 280, (length,), generator=generator).tolist() for length in lengths
        ]
        rewards = torch.randint(0, 2, (len(prompts),), generator=generator).float()
        rollouts.append(Rollout(prompts, completions, rewards))
    return rollouts


class Scripted(GRPOTrainer):
    """TRL's trainer, with answers and rewards of a script."""

    rollouts: list[Rollout]

    def _generate(self, prompts: list[Any]) -> Any:
        rollout = self.rollouts[self.state.global_step]
        texts = [""] * len(prompts)
        return rollout.prompts.tolist(), rollout.completions, None, texts, None, {}, None, None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.rollouts[self.state.global_step].rewards.unsqueeze(1)


def by_trl(model: Path, folder: Path, rollouts: list[Rollout]) -> tuple[dict[str, Tensor], list[float]]:
    """Train with TRL's trainer. Return the weights, and the norm of each step's gradient."""
    arguments = grpo_config(
        SETTINGS,
        output_dir=str(folder),
        max_steps=STEPS,
        save_strategy="no",
        max_grad_norm=NORM,
        per_device_train_batch_size=PROMPTS * GROUP,
    )
    trainer = Scripted(
        model=str(model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": str(row)} for row in range(PROMPTS * STEPS)]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.rollouts = rollouts
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}, norms


def by_hotbunk(model: nn.Module, rollouts: list[Rollout]) -> list[float]:
    """Train `model` with the learner's loss. Return the norm of each step's gradient."""
    config = AlgorithmConfig(preset="grpo", kl_coef=0.0, clip_low=CLIP, clip_high=CLIP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    norms = []
    for rollout in rollouts:
        batch = micro_batch(rollout)
        logprobs = sampled_logprobs(model, batch.input_ids)
        batch.engine_logprobs = batch.old_logprobs = logprobs.detach()
        tokens = int(batch.loss_mask.sum())
        loss = PolicyLoss(config, MiniBatch([], [batch], tokens, len(batch.rows)), LONGEST)
        loss(batch, Outputs(logprobs, torch.zeros_like(logprobs)))[0].backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def micro_batch(rollout: Rollout) -> MicroBatch:
    """Lay a step's sequences out, padded on the right; log-probabilities are zeros."""
    sequences = [
        torch.cat([prompt, torch.tensor(completion)])
        for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True)
    ]
    lengths = [len(sequence) for sequence in sequences]
    input_ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    targets = torch.arange(1, input_ids.shape[1])
    past_prompt = targets >= rollout.prompts.shape[1]
    mask = (past_prompt & (targets < torch.tensor(lengths).unsqueeze(1))).float()
    grouped = group_relative(rollout.rewards.view(PROMPTS, GROUP)).view(-1, 1)
    zeros = torch.zeros_like(mask)
    layout = make_layout(mask, lengths)
    rows = list(range(len(lengths)))
    return MicroBatch(
        input_ids, mask, zeros, grouped.expand_as(mask), lengths, layout, rows, zeros, None
    )


def sampled_logprobs(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Return the log-probability of each token after the first [N, T - 1]."""
    logits = model(input_ids=input_ids).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(2, input_ids[:, 1:].unsqueeze(2)).squeeze(2)


def main() -> None:
    """Train both ways, and print how the updates compare."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_tiny_model(path, architecture="qwen3")
        start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        before = {name: weight.detach().clone() for name, weight in start.named_parameters()}
        rollouts = script()
        theirs, their_norms = by_trl(path, Path(folder) / "trl", rollouts)
        our_norms = by_hotbunk(start.train(), rollouts)
    ours = dict(start.named_parameters())
    with torch.no_grad():
        distance = sum(float((ours[name] - theirs[name]).square().sum()) for name in before) ** 0.5
        moved = sum(float((ours[name] - before[name]).square().sum()) for name in before) ** 0.5
    ratios = [mine / other for mine, other in zip(our_norms, their_norms, strict=True)]
    print(f"weights: {distance / moved:.2e} of their movement apart after {STEPS} updates")
    expected = (GROUP / (GROUP - 1)) ** 0.5
    print(
        f"norms: {min(ratios):.5f} to {max(ratios):.5f} times TRL's, where sqrt({GROUP}/{GROUP - 1}) is {expected:.5f}"
    )


if __name__ == "__main__":
    main()
