"""Forward, loss and backward of a micro-batch never wait for the device, and compute what boolean masks would select.

Devices are torch's fake CUDA tensors, which know shapes and devices but no values, so that any operation that needs a
value on the host fails, too. Autograd refuses them without a driver; backward's operations are counted on fake CPU
tensors of the same sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from tests.support.row_advantages import advantages
from tests.support.waits import Waits
from trainer.config.algorithm import PRESETS
from trainer.config.schema import AlgorithmConfig
from trainer.learning.batching import micro_batches
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import CriticLoss, PolicyLoss
from trainer.policy import attention
from trainer.policy.module import PolicyModule, ValueModule, outputs, values
from trainer.types import MicroBatch, Sample

VOCABULARY, LENGTHS = 64, [9, 7, 7, 3, 12]
CASES: list[dict[str, Any]] = [
    *({"preset": preset} for preset in PRESETS),
    {"aggregation": "fixed_length", "ratio_level": "geometric", "tis_level": "sequence", "tis_cap": 1.2},
    {"loss": "cispo", "keep_band": [0.9, 1.1], "keep_level": "geometric"},
    {"loss": "sapo", "kl_coef": 0.3, "kl_estimator": "unbiased_k3"},
    {"loss": "reinforce", "kl_coef": 0.3, "kl_estimator": "k1", "kl_in": "reward"},
    {
        "kl_coef": 0.2,
        "kl_estimator": "k2",
        "entropy_coef": 0.1,
        "stale_threshold": 0.02,
        "dual_clip": 3.0,
    },
    {"advantage": "gae"},
]


def settings() -> PretrainedConfig:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
    )


def build(
    kind: type[PreTrainedModel] = AutoModelForCausalLM, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind.from_config(settings(), dtype=dtype)
    model.set_attn_implementation(attention.NAME)
    return model


def a_batch(packing: bool) -> MicroBatch:
    """Return a batch with everything that a step can have beside the tokens."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        mask = [int(position > 1 and (position + number) % 4 != 3) for position in range(length)]
        samples.append(Sample(ids, mask, [-1.0 * m for m in mask]))
    (batch,) = micro_batches(samples, 1000, 0, "cpu", 1, packing)
    for name in ("old_logprobs", "ref_logprobs", "old_values", "returns"):
        setattr(batch, name, torch.randn(batch.loss_mask.shape, generator=generator))
    batch.high_entropy, batch.advantages = (
        batch.loss_mask.bool(),
        advantages(batch).expand_as(batch.loss_mask),
    )
    return batch


def getitem(tensor: Tensor, index: Any) -> Tensor:
    tensors: list[Tensor | None] = []
    for item in index if isinstance(index, tuple) else (index,):
        dim = len(tensors)
        if item is Ellipsis:
            tensors += [None] * (tensor.dim() - sum(x is not None for x in index) + 1)
        elif item is None:
            tensor = tensor.unsqueeze(dim)
            tensors.append(None)
        elif isinstance(item, int):
            tensor = tensor.select(dim, item)
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice(tensor, dim, item.start, item.stop, item.step or 1)
            tensors.append(None)
        else:
            tensors.append(item)
    return torch.ops.aten.index(tensor, tensors) if any(x is not None for x in tensors) else tensor


def setitem(tensor: Tensor, index: Any, value: Any) -> None:
    part = getitem(tensor, index)
    torch.ops.aten.copy_(part, value) if isinstance(value, Tensor) else part.fill_(value)


def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    asked = [*args, kwargs.get("device"), kwargs.get("dtype")]
    asked += [kind for like in args if isinstance(like, Tensor) for kind in (like.device, like.dtype)]
    dtype = next((x for x in asked if isinstance(x, torch.dtype)), tensor.dtype)
    device = next((torch.device(x) for x in asked if isinstance(x, str | torch.device)), tensor.device)
    return torch.ops.aten._to_copy(tensor, dtype=dtype, device=device)


WITHOUT_GUARD = {
    "__getitem__": getitem,
    "__invert__": lambda tensor: tensor.bitwise_not(),
    "__setitem__": setitem,
    "contiguous": lambda tensor: torch.ops.aten.contiguous(tensor),
    "copy_": lambda tensor, other: torch.ops.aten.copy_(tensor, other),
    "to": moved,
}
"""Methods that, in Python, first switch to the tensor's device, which a CPU build of torch does not have."""


class WithoutGuard(TorchFunctionMode):
    """Calls the functions above instead. Set as methods for a while, `__getitem__` would leave a trace: every tensor
    would be a sequence to C from then on, and `torch.tensor([torch.tensor(1)])` would fail in other tests.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return WITHOUT_GUARD.get(func.__name__, func)(*args, **(kwargs or {}))


@contextmanager
def a_gpu(monkeypatch: pytest.MonkeyPatch, *modules: nn.Module) -> Iterator[Waits]:
    """Simulates an H100 with the modules on it; counts the operations that would wait for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30)
    )
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), WithoutGuard():
        for module in modules:
            module._apply(lambda t: torch.empty_like(t, device="cuda"))
        yield Waits()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packing", [True, False])
def test_forward_does_not_wait_for_the_gpu(
    packing: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyModule(build(dtype=dtype), value_head=True)
    critic, batch = ValueModule(build(AutoModelForSequenceClassification, dtype)), a_batch(packing)
    with a_gpu(monkeypatch, policy, critic) as waits:
        there = batch.to("cuda")
        with waits:
            result = outputs(policy, there, 0.7)
            worth = values(critic, there)
    assert {x.device.type for x in (result.logprobs, result.entropy, result.values, worth)} == {"cuda"}
    assert waits.operations > 100 and not waits.counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_paths_of_a_tree_do_not_wait_for_the_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the variable-length kernel takes paths that are longer than the queries."""
    policy = PolicyModule(build(dtype=dtype))
    samples = [
        Sample([1, 2, 3, 4, 5, answer, 6], [0] * 5 + [1] * 2, [0.0] * 7) for answer in range(1, 5)
    ]
    (batch,) = micro_batches(samples, 1000, 0, "cpu", 1, packing=True, shared_min=3)
    with a_gpu(monkeypatch, policy) as waits:
        there = batch.to("cuda")
        with waits:
            result = outputs(policy, there, 0.7)
    assert result.logprobs.device.type == "cuda" and result.logprobs.shape == (4, 6)
    assert waits.operations > 50 and not waits.counts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_loss_waits_for_the_gpu(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, config = a_batch(packing=True), AlgorithmConfig(**case)
    policy = PolicyModule(build(), value_head=config.advantage == "gae")
    with a_gpu(monkeypatch, policy) as waits:
        there = batch.to("cuda")
        result, minibatch = outputs(policy, there, 0.7), MiniBatch([], [there], tokens=17, sequences=5)
        with waits:
            loss, sums = PolicyLoss(config, minibatch, 20)(there, result)
            value_loss, value_sums = CriticLoss(config, minibatch)(there, there.loss_mask)
    assert {x.device.type for x in (loss, value_loss, *sums.values(), *value_sums.values())} == {"cuda"}
    assert waits.operations > 20 and not waits.counts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_has_no_operation_that_would_wait(case: dict[str, Any]) -> None:
    batch, config = a_batch(packing=True), AlgorithmConfig(**case)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy, there = PolicyModule(build(), value_head=config.advantage == "gae"), batch.to("cpu")
        result = outputs(policy, there, 0.7)
        loss, _ = PolicyLoss(config, MiniBatch([], [there], tokens=17, sequences=5), 20)(there, result)
        with Waits() as waits:
            loss.backward()  # type: ignore[no-untyped-call]
    assert policy.model.base_model.layers[0].mlp.up_proj.weight.grad is not None
    assert waits.operations > 50 and not waits.counts


def by_masks(module: PolicyModule, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy [B, T-1] with boolean masks; the trunk gets `batch`'s inputs unchanged."""
    mask, width = batch.loss_mask.bool(), batch.input_ids.shape[1] - 1
    real = torch.arange(width) < torch.tensor(batch.lengths).sub(1).clamp(min=1).unsqueeze(1)
    inputs = batch.input_ids[:, :-1]
    if batch.layout.pack is None:
        hidden = module.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state[mask]
    else:
        sizes = real.sum(dim=1, dtype=torch.int32)
        starts = nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
        positions = torch.arange(width).expand_as(inputs)[real].unsqueeze(0)
        packed = module.model.base_model(
            input_ids=inputs[real].unsqueeze(0),
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=starts,
            max_length_q=int(sizes.max()),
            sequence_lengths=sizes.tolist(),
        )
        hidden = packed.last_hidden_state[0, mask[real]]
    flat_values = module.model.get_output_embeddings()(hidden, batch.input_ids[:, 1:][mask], 0.7)
    logprobs, entropy = (torch.zeros(mask.shape).masked_scatter(mask, values) for values in flat_values)
    return logprobs, entropy


@pytest.mark.parametrize("packing", [True, False])
def test_values_and_gradients_are_bit_for_bit_those_of_boolean_masks(packing: bool) -> None:
    batch, module = a_batch(packing), PolicyModule(build())
    results = []
    for logprobs, entropy in (
        (o := outputs(module, batch, 0.7)) and (o.logprobs, o.entropy),
        by_masks(module, batch),
    ):
        gradients = torch.autograd.grad(
            (logprobs * batch.advantages + entropy).sum(), list(module.parameters())
        )
        results.append([logprobs, entropy, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
