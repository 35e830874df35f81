"""DPO as a function of log-probabilities, with a snapshot as its reference, against TRL's trainer."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hotbunk import Datum
from tests.support.training_checks import assert_equal, gradients_of, make, plain_model

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
    # 10 s for what is not used here
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

PAIRS = [([5, 6, 7], [8, 9], [10, 11, 12]), ([13, 14], [15], [16, 17]), ([18], [19, 20, 21], [22])]
BETA = 0.3
FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")


def trl_loss(model: Any, reference: Any) -> Tensor:
    """Return the loss of TRL's trainer, made without its constructor, for the pairs in one batch."""
    rows = [(p, c) for p, c, _ in PAIRS] + [(p, r) for p, _, r in PAIRS]
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    completion = torch.zeros_like(ids)
    for number, (prompt, answer) in enumerate(rows):
        size = len(prompt) + len(answer)
        ids[number, :size] = torch.tensor(prompt + answer)
        attention[number, :size] = 1
        completion[number, len(prompt) : size] = 1
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer = SimpleNamespace(
        model=model,
        ref_model=reference,
        accelerator=accelerator,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=BETA,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    loss: Tensor = DPOTrainer._compute_loss(trainer, model, inputs, False)
    return loss


def sums(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.tensor(d.weights) @ p for d, p in zip(data, logprobs, strict=True)])


def test_dpo_with_a_frozen_snapshot_equals_trl(tiny_qwen3: Path) -> None:
    model = plain_model(tiny_qwen3)
    reference = plain_model(tiny_qwen3)
    add_fused_lm_head(model, outputs=FIELDS)
    add_fused_lm_head(reference, outputs=FIELDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2, weight_decay=0.0)
    data = []
    for prompt, chosen, rejected in PAIRS:
        data += [Datum.answer(prompt, chosen), Datum.answer(prompt, rejected)]
    with make(tiny_qwen3) as training:
        start = training.snapshot()
        frozen = sums(data, training.logprobs(data, weights=start))

        def dpo(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> Tensor:
            ratios = sums(data, logprobs) - frozen
            return -torch.nn.functional.logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()

        for _ in range(3):
            loss = trl_loss(model, reference)
            loss.backward()
            figures = training.forward_backward(data, dpo)
            assert figures["loss"] == pytest.approx(loss.item(), abs=1e-6)
            gradients = gradients_of(training)
            expected = {name: p.grad for name, p in model.named_parameters() if name in gradients}
            assert_equal(
                gradients, expected, 1e-5 * max(g.abs().max().item() for g in gradients.values())
            )
            optimizer.step()
            optimizer.zero_grad()
            training.optim_step(
                1e-3, betas=(0.9, 0.999), eps=1e-2, weight_decay=0.0, max_grad_norm=math.inf
            )
        assert loss.item() != pytest.approx(torch.tensor(2.0).log().item(), abs=1e-3)
        again = sums(data, training.logprobs(data, weights=start))
        assert torch.equal(again, frozen) and not torch.equal(again, sums(data, training.logprobs(data)))
