"""Checks of adapters under FSDP2 and each ZeRO stage against PEFT in one process, for test_lora_ranks.py."""

from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sharding.ranks import is_main, rank
from tests.support import policy_checks as checks
from tests.support.gathering import sent
from tests.support.rank_checks import Checks
from tests.support.row_advantages import advantage
from trainer.build import adapter_source, weight_source
from trainer.config.lora_start import adapter_keys
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.policy import Policy, make_policy
from trainer.policy.lora import BaseOfPolicy, peft_config, peft_name, save_adapter, start_value
from trainer.policy.optimizer import decay_groups
from trainer.run import checkpoint

BACKENDS = ("fsdp", "zero 1", "zero 2", "zero 3")
LORA = LoraConfig(rank=3, alpha=12, seed=5)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE, DECAY = 1e-3, 0.1


def lora_policy(
    source: Path, backend: str, targets: Any = "all-linear", lora: LoraConfig = LORA
) -> Policy:
    """Return a policy with adapters under this backend."""
    zero = {"backend": "deepspeed", "zero_stage": int(backend[-1])} if backend != "fsdp" else {}
    settings = PolicyConfig(dtype="float32", lr=RATE, weight_decay=DECAY, max_grad_norm=1e9, **zero)  # type: ignore[arg-type]
    return make_policy(
        ModelConfig(path=str(source)),
        settings,
        checks.CPU,
        10,
        lora.model_copy(update={"target_modules": targets}),
    )


class Reference:
    """PEFT's own model under torch's AdamW, with a loss that loops over sequences."""

    def __init__(self, source: Path) -> None:
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.model = peft.get_peft_model(plain, peft_config(LORA, TARGETS)).train()
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        for name, factor in self.trained.items():
            factor.data.copy_(
                start_value(name.removeprefix("base_model.model."), factor.shape, LORA.seed)
            )
        groups = decay_groups(list(self.trained.values()), DECAY)
        self.optimizer = torch.optim.AdamW(
            groups, lr=RATE, betas=PolicyConfig().betas, eps=PolicyConfig().eps
        )

    def step(self) -> None:
        """Make one optimizer step on all samples."""
        samples = checks.make_samples()
        loss = torch.zeros(())
        for sample in samples:
            logprobs, entropy = checks.plain_logprobs(self.model, sample)
            mask = torch.tensor(sample.loss_mask[1:], dtype=torch.float32)
            loss = loss + ((-advantage(sample.input_ids) * logprobs - 0.1 * entropy) * mask).sum()
        self.optimizer.zero_grad()
        (loss / sum(sum(s.loss_mask[1:]) for s in samples)).backward()
        self.optimizer.step()

    def factors(self) -> dict[str, Tensor]:
        """Return the adapters' factors, under PEFT's names in files."""
        return {name.replace(".default.", "."): factor.data for name, factor in self.trained.items()}


def step(policy: Policy) -> None:
    """Make one update on all samples."""
    batches = checks.own_batches(checks.make_samples(), 60)
    policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)


def held(policy: Policy) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, under PEFT's names in files."""
    return {
        peft_name(name): tensor.full_tensor() for name, tensor in policy.state_dict()["model"].items()
    }


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Tensors have the same names, and are equal to 1e-5."""
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, wanted[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_steps(folder: Path, backend: str, kind: str = "qwen2", tied: bool = True) -> None:
    """Two steps give PEFT's factors, and the engine is sent what PEFT merges; the base's scores never change."""
    source = checks.model_folder(folder, kind, tied)
    policy, reference = lora_policy(source, backend), Reference(source)
    batches = checks.own_batches(checks.make_samples(), 60)
    before = policy.score(batches, 1.0)
    for _ in range(2):
        step(policy)
        reference.step()
        for now, then in zip(BaseOfPolicy(policy).score(batches, 1.0), before, strict=True):
            torch.testing.assert_close(now.logprobs, then.logprobs, atol=1e-6, rtol=1e-6)
    assert_close(held(policy), reference.factors())
    merged = dict(reference.model.merge_and_unload().named_parameters())
    assert_close(
        sent(weight_source(policy, torch.float32)), {name: p.detach() for name, p in merged.items()}
    )


def check_files(folder: Path, backend: str) -> None:
    """Two steps with a checkpoint for another backend between them; plain PEFT and Transformers open the exports."""
    source, target = checks.model_folder(folder), folder / f"lora_{backend}"
    first, reference = lora_policy(source, backend), Reference(source)
    step(first)
    second = lora_policy(source, "zero 3" if backend == "fsdp" else "fsdp")
    checkpoint.load(checkpoint.save(target, 1, {"policy": first}, {}), {"policy": second})
    step(second)
    reference.step()
    reference.step()
    assert second.version == 2
    assert_close(held(second), reference.factors())
    second.save_pretrained(target / "model")
    save_adapter(second.model, LORA, str(source), target / "adapter")
    if is_main():
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(plain, target / "adapter")
        assert_close(
            {n: p.data for n, p in peft.get_peft_model_state_dict(adapted).items()}, reference.factors()
        )
        merged = AutoModelForCausalLM.from_pretrained(target / "model", dtype=torch.float32)
        assert_close(
            dict(merged.named_parameters()), dict(adapted.merge_and_unload().named_parameters())
        )


def peft_adapter(source: Path, folder: Path, **settings: Any) -> peft.PeftModel:
    """PEFT's own model with a random adapter, which is saved to `folder` as PEFT does it."""
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = {"r": 5, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | settings
    model = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(3)
    for name, factor in model.named_parameters():
        if ".lora_" in name:
            factor.data.copy_(torch.randn(factor.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


def check_start(folder: Path, backend: str) -> None:
    """A run that goes on from PEFT's adapter has its factors, computes what PEFT does, and sends that to engines."""
    source, adapter = checks.model_folder(folder), folder / f"start_{backend}_{rank()}"
    reference = peft_adapter(source, adapter, use_rslora=backend == "zero 2")
    keys = {"start": str(adapter)} | adapter_keys(str(adapter))
    targets = keys.pop("target_modules")
    policy = lora_policy(source, backend, targets, LoraConfig(**keys))
    stored = load_file(adapter / "adapter_model.safetensors")
    factors_here = held(policy)
    assert factors_here.keys() == stored.keys()
    assert all(torch.equal(factors_here[name], tensor) for name, tensor in stored.items())
    assert all(
        torch.equal(tensor, stored[name])
        for name, tensor in sent(adapter_source(policy, torch.float32)).items()
    )
    samples = checks.own_samples(checks.make_samples())
    batches = checks.own_batches(checks.make_samples(), 60)
    with torch.no_grad():
        for batch, outputs in zip(batches, policy.score(batches, checks.TEMPERATURE), strict=True):
            for row, index in enumerate(batch.rows):
                mask = torch.tensor(samples[index].loss_mask[1:])
                expected = checks.plain_logprobs(reference, samples[index])[0] * mask
                scored = outputs.logprobs[row, : len(mask)]
                torch.testing.assert_close(scored, expected, atol=1e-6, rtol=1e-6)
    step(policy)
    save_adapter(policy.model, LoraConfig(**keys), str(source), folder / f"again_{backend}")
    again = LoraConfig(
        start=str(folder / f"again_{backend}"), **adapter_keys(str(folder / f"again_{backend}"))
    )
    assert_close(held(lora_policy(source, backend, again.target_modules, again)), held(policy))
    merged = dict(reference.merge_and_unload().named_parameters())
    fresh = lora_policy(source, backend, targets, LoraConfig(**keys))
    assert_close(
        sent(weight_source(fresh, torch.float32)), {name: p.detach() for name, p in merged.items()}
    )


def starts(folder: Path) -> Checks:
    """Return the checks of a start from an adapter on any number of ranks."""
    return {b: lambda b=b: check_start(folder, b) for b in ("fsdp", "zero 2", "zero 3")}


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    run: Checks = {f"steps {b}": lambda b=b: check_steps(folder, b) for b in BACKENDS}
    run["steps untied"] = lambda: check_steps(folder, "fsdp", "llama", False)
    return run | {f"files {b}": lambda b=b: check_files(folder, b) for b in ("fsdp", "zero 2")}
