"""The computations of a rank and a worker on a GPU, with fake tensors: no operation mixes devices, and none waits for
the device except those that are listed.

Fake tensors have shapes, dtypes and devices, which every operation checks, and no values. Only torch's build for CUDA
knows enough of the device for that. Its autograd wants a driver for backward, which
tests/distributed/trainer/test_waits.py runs on the CPU, with the hooks of FSDP2 and ZeRO.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForSequenceClassification

from sharding.send.buckets import BucketPlan, gather
from sharding.send.source import FsdpWeightSource
from sharding.wire.digests import sum_up
from sharding.wire.low_rank import Factors
from sharding.wire.staging import STAMP_BYTES
from sharding.worker import loader
from sharding.worker.loader import WeightLoader
from tests.support import policy_checks as checks
from tests.support.in_process import SmallModel, small_weights
from tests.support.waits import Waits
from trainer.config.schema import AlgorithmConfig, LoraConfig, ModelConfig
from trainer.learning.batching import micro_batches
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import CriticLoss, PolicyLoss
from trainer.policy import hf_format, in_place, logprobs, offload
from trainer.policy.lora import add_adapters
from trainer.policy.module import PolicyModule, ValueModule, outputs, values
from trainer.types import MicroBatch

CUDA = torch.device("cuda", 0)
RANKS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checks.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the questions to the device itself, which are not operations."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=80 << 30)
    )


@pytest.fixture
def ranks() -> Iterator[None]:
    """Yield a process group of which only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def on_device(value: Any, mode: FakeTensorMode, device: torch.device = CUDA) -> Any:
    """Return a tensor, or a dataclass with its tensors, as fakes on the device."""
    if isinstance(value, Tensor):
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: on_device(getattr(value, field.name), mode)
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changed)
    return value


def module_on_device(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                inner._parameters[name] = nn.Parameter(
                    on_device(parameter.detach(), mode), parameter.requires_grad
                )
        for name, buffer in inner._buffers.items():
            inner._buffers[name] = on_device(buffer, mode)
    return module


def one_batch(packing: bool) -> MicroBatch:
    """Return a real micro-batch with everything that a loss may want."""
    [batch] = micro_batches(checks.make_samples(), 1000, 0, "cpu", count=1, packing=packing)
    tables = ("old_logprobs", "ref_logprobs", "old_values", "returns")
    return dataclasses.replace(
        batch,
        high_entropy=batch.loss_mask > 0,
        **{name: torch.zeros_like(batch.loss_mask) for name in tables},
    )


def meta_model(folder: Path, **settings: Any) -> Any:
    return hf_format.build_meta_model(
        folder, ModelConfig(path=str(folder)), torch.bfloat16, torch.device("cpu"), **settings
    )


CONFIGS = {
    "grpo": {
        "kl_coef": 0.1,
        "kl_in": "loss",
        "tis_cap": 2.0,
        "keep_band": (0.5, 2.0),
        "entropy_coef": 0.01,
    },
    "gspo": {"stale_threshold": 0.1},
    "cispo": {"high_entropy_share": 0.5},
}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("qwen2", "grpo"),
        ("gemma3", "gspo"),
        ("adapters", "cispo"),
        ("float32 head", "grpo"),
        ("value head", "grpo"),
    ],
)
def test_a_policy_s_forward_pass_and_loss_wait_for_nothing(
    folder: Path, kind: str, preset: str, packing: bool
) -> None:
    model = meta_model(checks.model_folder(folder, "gemma3" if kind == "gemma3" else "qwen2"))
    if kind == "adapters":
        add_adapters(
            model, LoraConfig(rank=4, target_modules=["q_proj", "down_proj"]), torch.float32, "meta"
        )
    policy = PolicyModule(
        model, fp32_head=kind == "float32 head", value_head=kind == "value head"
    ).train()
    mode, real = FakeTensorMode(), one_batch(packing)
    policy, batch = module_on_device(policy, mode), on_device(real, mode)
    config = AlgorithmConfig(preset=preset, **CONFIGS[preset])
    loss_fn = PolicyLoss(config, MiniBatch([], [], 100, 9), 32)
    with mode, Waits() as waits:
        loss, sums = loss_fn(batch, outputs(policy, batch, 0.7))
    assert {figure.device for figure in [loss, *sums.values()]} == {CUDA}
    assert not waits.counts


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_critic_s_forward_pass_and_loss_wait_for_nothing(folder: Path, packing: bool) -> None:

    model = meta_model(
        checks.model_folder(folder), kind=AutoModelForSequenceClassification, num_labels=1
    )
    mode, real = FakeTensorMode(), one_batch(packing)
    critic, batch = module_on_device(ValueModule(model), mode), on_device(real, mode)
    with mode, Waits() as waits:
        loss, sums = CriticLoss(AlgorithmConfig(), MiniBatch([], [], 100, 9))(
            batch, values(critic, batch)
        )
    assert {figure.device for figure in [loss, *sums.values()]} == {CUDA}
    assert not waits.counts


@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "float32"])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_head_s_gradients_are_added_up_without_waiting(wide: bool, entropy: bool) -> None:
    """Three chunks; what reads bfloat16 and adds in float32 exists on CUDA alone."""
    mode = FakeTensorMode()
    hidden, weight, bias = (torch.empty(s, dtype=torch.bfloat16) for s in ((600, 32), (257, 32), (257,)))
    per_token = torch.empty(600)
    real = hidden, weight, bias, torch.zeros(600, dtype=torch.int64), per_token, per_token
    saved = [on_device(tensor, mode) for tensor in real]
    settings = (0.7, (256, 257), wide, logprobs.UNCHANGED, logprobs._as_it_is)
    context = SimpleNamespace(saved_tensors=saved, needs_input_grad=(True,) * 5, settings=settings)
    with mode, torch.no_grad(), Waits() as waits:
        gradients = logprobs._TargetLogprobs.backward(context, saved[4], saved[5] if entropy else None)
    assert [(g.device, g.dtype, g.shape) for g in gradients[:3]] == [
        (CUDA, t.dtype, t.shape) for t in saved[:3]
    ]
    assert not waits.counts


class FakeDevice:
    """Makes fake tensors usable where addresses count, and answers what the host asks for with a made-up value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = FakeTensorMode()
        self._starts: dict[int, int] = {}
        monkeypatch.setattr(
            torch.Tensor,
            "data_ptr",
            lambda t: self._start(t.untyped_storage()) + t.storage_offset() * t.itemsize,
        )
        monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: self._start(storage))
        monkeypatch.setattr(torch, "equal", lambda first, second: first.device == second.device)

    def _start(self, storage: torch.UntypedStorage) -> int:
        return self._starts.setdefault(storage._cdata, (1 + len(self._starts)) << 40)

    def fake(self, value: Any, device: torch.device = CUDA) -> Any:
        return on_device(value, self.mode, device)


def cut_parameters(mode: FakeTensorMode) -> list[tuple[str, Tensor]]:
    """Return three float32 parameters, sent in bfloat16: one whole on each rank, one cut by FSDP2, one by ZeRO-3."""
    replicated, rows, stretch = (on_device(torch.empty(n, 6), mode) for n in (50, 300, 10))
    # A mesh of GPUs would look for them
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    shape = torch.Size((2395, 6))
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(shape, (6, 1), torch.float32))
    cut = DTensor(rows, spec, requires_grad=False)
    zero = on_device(torch.empty(0), mode)
    zero.ds_tensor, zero.ds_shape, zero.ds_process_group = (
        stretch.view(-1),
        torch.Size((79, 6)),
        dist.group.WORLD,
    )
    return [("whole", replicated), ("cut", cut), ("ZeRO", zero)]


def test_weights_are_gathered_without_waiting(ranks: None) -> None:
    mode = FakeTensorMode()
    source = FsdpWeightSource(cut_parameters(mode), torch.bfloat16)
    plan = BucketPlan(source.parameters(), 8192, unsplit=())  # some come in parts
    assert any(not slot.whole for bucket in plan.buckets for slot in bucket.slots)
    with mode, Waits() as waits:
        for number, bucket in enumerate(plan.buckets):
            buffer = torch.empty(bucket.nbytes + STAMP_BYTES, dtype=torch.uint8, device=CUDA)
            gather(source, bucket, buffer, number)
    assert not waits.counts


def test_a_worker_records_replays_and_digests_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch)
    model = module_on_device(SmallModel(dtype=torch.bfloat16), device.mode)
    real = {name: weight.bfloat16() for name, weight in small_weights(0).items()}
    weights = {name: device.fake(weight) for name, weight in real.items()}
    manifest = {name: [list(weight.shape), "bfloat16"] for name, weight in real.items()}
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    monkeypatch.setattr(loader, "set_current_vllm_config", lambda _: nullcontext())

    first = WeightLoader(model, config)
    first.begin(manifest)
    first.load(list(weights.items()))
    first.finish()
    assert first.recording is not None and set(first.recording.unreplayable) == {"scaled"}

    second = WeightLoader(model, config, recording=first.recording)
    with Waits() as waits:
        second.begin(manifest)
        second.load([(name, weights[name]) for name in ("columns", "norm", "scaled")])
        second.load_parts([("a", 0, weights["a"].view(-1)[:50]), ("a", 50, weights["a"].view(-1)[50:])])
        second.load([("b", weights["b"])])
        second.finish()
    assert not waits.counts

    flat = {name: weight.float().view(-1) for name, weight in real.items()}
    shards = {name: device.fake(values) for name, values in flat.items()}
    neighbour = device.fake(flat["a"], torch.device("cuda", 1))  # another rank's, on its own device
    third = WeightLoader(model, config, recording=first.recording)
    with Waits() as waits:
        third.begin(manifest)
        pulled = [(name, 0, shards[name]) for name in ("b", "columns", "norm")]
        third.pull([("a", 0, shards["a"][:50]), ("a", 50, neighbour[50:]), *pulled], {})
        third.load([("scaled", weights["scaled"])])
        third.finish()
    assert not waits.counts

    factors = Factors(device.fake(torch.zeros(2, 6)), device.fake(torch.zeros(12, 2)), 0.5)
    fourth = WeightLoader(model, config, recording=first.recording)
    with Waits() as waits:
        fourth.begin(manifest)
        fourth.pull([("a", 0, shards["a"][:50]), ("a", 50, neighbour[50:])], {"a": lambda: factors})
    assert not waits.counts

    with Waits() as waits:
        for targets in ([model.rows.data], [model.columns.data, model.norm.data]):
            # of whole words, and not
            sum_up(targets, torch.bfloat16)
    assert not waits.counts


def test_weights_in_place_take_gradients_and_are_published_without_waiting(folder: Path) -> None:
    mode = FakeTensorMode()
    model = meta_model(checks.model_folder(folder))
    policy: Any = in_place.InPlacePolicy.__new__(in_place.InPlacePolicy)
    policy.model = module_on_device(model, mode)
    policy.module = PolicyModule(policy.model)
    weights = dict(in_place.parameter_names(policy.model))
    with mode, torch.no_grad(), Waits() as waits:
        policy.masters = {
            name: nn.Parameter(weight.detach().float()) for name, weight in weights.items()
        }
        memory = {
            name: torch.empty(weight.numel(), dtype=weight.dtype, device=CUDA)
            for name, weight in weights.items()
        }
        policy.compute_in(memory)
        for name, weight in weights.items():
            for _ in range(2):
                weight.grad = torch.empty_like(weight)
                in_place._accumulate(policy.masters[name], weight)
        policy._publish()
    assert {master.grad.device for master in policy.masters.values()} == {CUDA}
    assert all(
        memory[name].untyped_storage()._cdata == w.untyped_storage()._cdata
        for name, w in weights.items()
    )
    assert not waits.counts


def test_memory_is_put_away_and_brought_back_with_one_wait_each(monkeypatch: pytest.MonkeyPatch) -> None:
    device, waited = FakeDevice(monkeypatch), []
    tensors = [
        device.fake(torch.empty(n, dtype=dtype))
        for n, dtype in ((300, torch.float32), (7, torch.bfloat16))
    ]
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(
        torch.cuda,
        "cudart",
        lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=len),
    )
    monkeypatch.setattr(torch.UntypedStorage, "device", CUDA)  # of fakes it would be meta
    keys = [tensor.untyped_storage()._cdata for tensor in tensors]
    away = offload.Offload(lambda: tensors)
    with device.mode, Waits() as waits:
        assert away.release() == 1214
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
        away.restore()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [1200, 14]
    assert [tensor.untyped_storage()._cdata for tensor in tensors] == keys
    assert waited == [CUDA, CUDA]
    assert not waits.counts
