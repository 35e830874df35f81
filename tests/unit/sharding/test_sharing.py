"""The weights that an engine can share with the trainer, and their places in its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generation.engine.vllm_compat import engine_arguments
from sharding.transports.zero_copy import memory_of
from sharding.wire.channel import SyncError
from sharding.wire.manifest import Piece, SourceParameter
from sharding.wire.staging import open_memory
from sharding.worker.extension import SharedWeights, contiguous_runs
from sharding.worker.loader import WeightLoader
from sharding.worker.recording import Recording
from tests.support.in_process import SmallModel, Worker, small_weights
from trainer import engines
from trainer.config.schema import TrainConfig

CPU = torch.device("cpu")


def loaded(model: SmallModel, names: list[str]) -> WeightLoader:
    """Return a loader that has recorded an update of these weights."""
    worker = Worker.of(model)
    loader = WeightLoader(model, worker.vllm_config)  # type: ignore[arg-type]
    weights = {name: weight for name, weight in small_weights(1).items() if name in names}
    loader.begin({name: [list(w.shape), "float32"] for name, w in weights.items()})
    loader.load(list(weights.items()))
    for name in [n for n, _ in model.named_parameters() if n not in {"rows", *names}]:
        delattr(model, name)  # what nobody sends would be an error
    loader.finish()
    return loader


def source_parameter(name: str, *pieces: tuple[str, tuple[int, ...], int]) -> SourceParameter:
    """Return a parameter of float32 pieces, each with name, shape, and offset in bytes."""
    parts = tuple(Piece(n, "float32", shape, offset) for n, shape, offset in pieces)
    return SourceParameter(name, sum(4 * torch.Size(p.shape).numel() for p in parts), parts)


def opened(shared: SharedWeights, parameters: list[SourceParameter]) -> dict[str, Tensor]:
    """Return the parameters' memory, as the trainer sees it."""
    storages = open_memory(shared.handle, CPU)
    return {parameter.name: memory_of(parameter, shared.places, storages) for parameter in parameters}


@pytest.fixture
def shared() -> tuple[SmallModel, SharedWeights, dict[str, Tensor]]:
    model = SmallModel()
    loader = loaded(model, ["a", "b", "columns", "norm"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, SharedWeights(model, loader.recording, CPU), before


def test_weights_that_the_trainer_writes_are_in_the_model_and_no_others_change(
    shared: tuple[SmallModel, SharedWeights, dict[str, Tensor]],
) -> None:
    model, weights, before = shared
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), (
        "moved as they were"
    )
    parameters = [
        source_parameter(n, (n, tuple(w.shape), 0)) for n, w in small_weights(1).items() if n != "scaled"
    ]
    memory = opened(weights, parameters)
    for name, weight in small_weights(1).items():
        if name != "scaled":
            assert torch.equal(memory[name].view(weight.shape), weight), name
    memory["b"][:] = -7
    assert torch.equal(model.rows[:12], before["rows"][:12]) and (model.rows[12:] == -7).all()
    assert torch.equal(model.columns, before["columns"])
    with torch.no_grad():
        model.columns += 1
    assert torch.equal(memory["columns"].view(5, 8), before["columns"] + 1), "and the other way round"


def test_a_fused_parameter_is_found_where_its_parts_are_neighbours(
    shared: tuple[SmallModel, SharedWeights, dict[str, Tensor]],
) -> None:
    """A weight that Transformers keeps fused, as vLLM does, is shared as one."""
    model, weights, _ = shared
    fused = source_parameter("ab", ("a", (12, 6), 0), ("b", (8, 6), 12 * 6 * 4))
    memory = opened(weights, [fused])
    assert torch.equal(memory["ab"].view(20, 6), model.rows)
    turned = source_parameter("ba", ("b", (8, 6), 0), ("a", (12, 6), 8 * 6 * 4))
    with pytest.raises(SyncError, match="keeps the parts of ba apart.*set sync.way to staged"):
        opened(weights, [turned])


def test_weights_that_are_computed_or_cut_are_refused_by_name() -> None:
    model = SmallModel()
    loader = loaded(model, ["a", "b", "columns", "norm", "scaled"])
    with pytest.raises(SyncError, match="SmallModel does not keep scaled as sent and in one piece"):
        contiguous_runs(model, loader.recording)
    cut = SmallModel(rank=1, ranks=2)
    loader = loaded(cut, ["a", "b", "columns", "norm"])
    with pytest.raises(SyncError, match="does not keep a, b, columns as sent"):
        contiguous_runs(cut, loader.recording)
    with pytest.raises(SyncError, match="re-processes its weights"):
        contiguous_runs(model, None)


class Pieces(nn.Module):
    """Queries, keys and values in one weight, which the loader copies one by one, to where `order` says."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 6))
        self.order = order

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            for place, piece in zip(self.order, weight.chunk(3), strict=True):
                self.qkv.data.chunk(3)[place].copy_(piece)


@pytest.mark.parametrize(("order", "held"), [((0, 1, 2), True), ((0, 2, 1), False)])
def test_a_weight_that_is_copied_in_pieces_is_shared_where_they_end_up_as_sent(
    order: tuple[int, ...], held: bool
) -> None:
    """Weights of image encoders are one tensor on the hub and parts of a fused projection in vLLM."""
    model, weight = Pieces(*order), torch.randn(12, 6)
    loader = WeightLoader(model, Worker.of(SmallModel()).vllm_config)  # type: ignore[arg-type]
    loader.begin({"qkv": [[12, 6], "float32"]})
    loader.load([("qkv", weight)])
    loader.finish()
    if not held:
        with pytest.raises(SyncError, match="does not keep qkv as sent"):
            contiguous_runs(model, loader.recording)
        return
    run = contiguous_runs(model, loader.recording)["qkv"]
    assert torch.equal(run.view(12, 6), weight)
    run.fill_(3)
    assert (model.qkv == 3).all()


def test_later_updates_know_the_memory_that_the_model_was_moved_to() -> None:
    """A later update with weights, as after a failed one, is replayed into the shared memory."""
    model = SmallModel()
    loader = loaded(model, ["a", "b", "columns", "norm"])
    assert loader.recording is not None
    SharedWeights(model, loader.recording, CPU)
    new_weights = {name: weight for name, weight in small_weights(2).items() if name != "scaled"}
    again = WeightLoader(model, Worker.of(model).vllm_config, recording=loader.recording)  # type: ignore[arg-type]
    again.begin({name: [list(w.shape), "float32"] for name, w in new_weights.items()})
    assert again.recording is loader.recording
    again.load(list(new_weights.items()))
    again.finish()
    assert torch.equal(model.rows, torch.cat([new_weights["a"], new_weights["b"]]))
    assert torch.equal(model.columns, new_weights["columns"]) and torch.equal(
        model.norm, new_weights["norm"]
    )


def test_on_cuda_weights_come_from_memory_that_has_an_ipc_handle_and_only_they(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own worker allocates weights outside its sleeping pool, for which there is a stand-in here."""
    from vllm.v1.worker.gpu_worker import Worker

    from sharding.worker.sharing_worker import SharingWorker

    monkeypatch.setattr(
        Worker, "_maybe_get_memory_pool_context", lambda worker, tag: f"the pool for {tag}"
    )
    worker = SharingWorker.__new__(SharingWorker)
    with worker._maybe_get_memory_pool_context("weights") as pool:
        assert pool is None
    assert worker._maybe_get_memory_pool_context("kv_cache") == "the pool for kv_cache"
    recipe: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "sync": {"way": "zero_copy"},
    }
    monkeypatch.setattr(engines, "resolve_folder", lambda path: path)
    on_cpu, on_cuda = (
        engines.engine_settings(TrainConfig.model_validate(recipe), on_cuda) for on_cuda in (False, True)
    )
    assert on_cpu.shared_weights
    assert engine_arguments(on_cpu)["worker_cls"] == "generation.engine.cpu_worker.CPUWorker"
    assert (
        engine_arguments(on_cuda)["worker_cls"] == f"{SharingWorker.__module__}.{SharingWorker.__name__}"
    )


class Decaying(SmallModel):
    """A model that keeps -exp(A_log) of a weight A_log, as vLLM's state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(4))

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        weights = list(weights)
        for name, weight in weights:
            if name == "A_log":
                self.A.data.copy_(weight)
                self.A.data.copy_(-torch.exp(self.A.float()))
        super().load_weights([pair for pair in weights if pair[0] != "A_log"])


def updated(
    model: Decaying, sent: dict[str, Tensor], recording: Recording | None = None
) -> WeightLoader:
    """Return the loader of an update that sends these weights."""
    loader = WeightLoader(model, Worker.of(model).vllm_config, recording=recording)  # type: ignore[arg-type]
    loader.begin({name: [list(weight.shape), "float32"] for name, weight in sent.items()})
    loader.load(list(sent.items()))
    loader.finish()
    return loader


def decaying_weights(seed: int) -> dict[str, Tensor]:
    return small_weights(seed) | {"A_log": torch.randn(4, generator=torch.Generator().manual_seed(seed))}


def test_a_weight_that_its_loader_changes_goes_through_the_loader_at_every_sync() -> None:
    model, recording = Decaying(), None
    for seed in range(3):
        loader = updated(model, decaying_weights(seed), recording)
        recording = loader.recording
        assert torch.equal(model.A, -torch.exp(decaying_weights(seed)["A_log"])), seed
        assert (
            recording is not None and "A_log" in recording.unreplayable and recording.replayable("norm")
        )


def test_a_weight_that_its_loader_changes_is_compared_after_the_same_change() -> None:
    model, sent = Decaying(), decaying_weights(0)
    loader = updated(model, sent)
    held = model.A.detach().clone()
    assert loader.compare(list(sent.items())) == []
    assert torch.equal(model.A, held)
    assert loader.compare(
        list((sent | {"A_log": sent["A_log"] + 1e-6, "norm": sent["norm"] + 1}).items())
    ) == [
        "A_log",
        "norm",
    ]
    with torch.no_grad():
        model.A.copy_(sent["A_log"])  # as a record would that had seen only the first copy
    assert loader.compare(list(sent.items())) == ["A_log"]
    assert torch.equal(model.A, sent["A_log"]), "what the model held is put back"


def test_a_weight_that_its_loader_changes_is_sent_beside_the_shared_ones() -> None:
    model, sent = Decaying(), {n: w for n, w in decaying_weights(0).items() if n != "scaled"}
    del model.scaled  # which is computed, and so refused
    recording = updated(model, sent).recording
    assert recording is not None
    shared = SharedWeights(model, recording, CPU)
    assert shared.places.keys() == sent.keys() - {"A_log"}
    new = decaying_weights(1)["A_log"]
    for weights in ({"A_log": new}, {}):
        loader = WeightLoader(model, Worker.of(model).vllm_config, recording=recording)  # type: ignore[arg-type]
        loader.begin({name: [list(weight.shape), "float32"] for name, weight in sent.items()})
        loader.load(list(weights.items()))
        loader.take_in_place()
        if weights:
            loader.finish()
            assert torch.equal(model.A, -torch.exp(new)) and loader.compare([("A_log", new)]) == []
            continue
        with pytest.raises(SyncError, match="announced but never sent: A_log; .*never sent.*: A"):
            loader.finish()
