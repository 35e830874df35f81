"""Real ranks save FSDP2 shards of a vocabulary of prime size, and more or fewer ranks load them."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sharding.ranks import RemoteError, exchange, is_main, rank, world_size
from tests.support.launch import run_ranks
from tests.support.recipes import make_config
from trainer import distributed
from trainer.config.schema import CheckpointConfig
from trainer.errors import UserError
from trainer.run import checkpoint
from trainer.run.keeper import CheckpointWriter, RunState, find_checkpoint

VOCABULARY = 257


class ShardedPolicy:
    """An embedding of odd size and a layer, sharded by FSDP2, with Adam's moments."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 6), torch.nn.Linear(6, 5))
        mesh = dist.init_device_mesh("cpu", (world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.learn()

    def learn(self) -> float:
        """Make an optimizer step on the same data on all ranks."""
        self.optimizer.zero_grad()
        loss = self.model(torch.arange(VOCABULARY)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's and the optimizer's tensors, not copied."""
        live = {f"model.{name}": value.detach() for name, value in self.model.named_parameters()}
        for index, state in enumerate(self.optimizer.state.values()):
            live |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        return live

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in self.tensors().items():
            value.copy_(state[name])

    def full(self) -> dict[str, torch.Tensor]:
        """Copy of the whole tensors on every rank."""
        tensors = self.tensors().items()
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in tensors
        }


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 3)])
def test_a_checkpoint_of_some_ranks_loads_on_others(tmp_path: Path, savers: int, loaders: int) -> None:
    run_ranks(saves, savers, arguments=[str(tmp_path)])
    run_ranks(loads, loaders, arguments=[str(tmp_path)])


def saves(folder: str) -> None:
    """Save, load into another policy, and train while a checkpoint is written."""
    distributed.init_process_group(60, device="cpu")
    policy = ShardedPolicy(seed=1)
    random.seed(rank())
    path = checkpoint.save(Path(folder) / "checkpoints", 4, {"policy": policy}, {"counter": 7})
    drawn = random.random()
    full = policy.full()
    if is_main():
        torch.save(full, Path(folder) / "expected.pt")
    (Path(folder) / f"loss_{rank()}.json").write_text(json.dumps(policy.learn()))

    other = ShardedPolicy(seed=2)
    assert checkpoint.load(path, {"policy": other})["counter"] == 7
    assert random.random() == drawn  # every rank has a state of its own
    assert all(torch.equal(value, full[name]) for name, value in other.full().items())
    trains_while_saving(Path(folder) / "background", other)
    distributed.destroy_process_group()


def trains_while_saving(folder: Path, policy: ShardedPolicy) -> None:
    """The writer's thread and the training exchange at the same time, and do not mix their messages."""
    writer = CheckpointWriter(folder, CheckpointConfig(), 60)
    moment = policy.full()
    writer.save(1, {"policy": policy}, {}, {})
    losses = [policy.learn() for _ in range(30)]
    assert losses[-1] < losses[0]
    writer.wait()
    checkpoint.load(folder / "step_1", {"policy": policy})
    assert all(torch.equal(value, moment[name]) for name, value in policy.full().items())


def loads(folder: str) -> None:
    """Load on another number of ranks, and make the next step."""
    distributed.init_process_group(60, device="cpu")
    policy = ShardedPolicy(seed=3)
    random.seed(11)
    before = random.getstate()
    path = checkpoint.latest_complete(Path(folder) / "checkpoints")
    assert path is not None
    extra = checkpoint.load(path, {"policy": policy})
    assert extra["step"] == 4 and extra["world_size"] != world_size()
    assert random.getstate() == before  # a state of another number of ranks is not restored
    expected = torch.load(Path(folder) / "expected.pt")
    full = policy.full()
    assert full.keys() == expected.keys() and len(full) == 12
    assert all(torch.equal(value, expected[name]) for name, value in full.items())
    torch.testing.assert_close(policy.learn(), json.loads((Path(folder) / "loss_0.json").read_text()))
    distributed.destroy_process_group()


def test_all_ranks_skip_a_checkpoint_that_one_of_them_finds_damaged(tmp_path: Path) -> None:
    run_ranks(one_finds_damage, 2, arguments=[str(tmp_path)])


def one_finds_damage(folder: str) -> None:
    """Damages each file of the newest checkpoint in turn, and checks that all ranks resume from the one before."""
    distributed.init_process_group(60, device="cpu")
    config, identity = make_config(run={"output_dir": folder, "name": "run"}), {"data": "rows"}
    place, policy = config.run.folder / "checkpoints", ShardedPolicy(seed=1)
    saved = {}
    for step in (1, 2, 3):
        checkpoint.save(place, step, {"policy": policy}, {"state": {"step": step}, "identity": identity})
        saved[step] = policy.full()
        policy.learn()
    assert find_checkpoint(config, identity) == (place / "step_3", RunState(step=3))
    messages = []
    for name in sorted(path.name for path in (place / "step_3").iterdir() if path.name != "COMPLETE"):
        content = (place / "step_3" / name).read_bytes()
        dist.barrier()
        if is_main():
            (place / "step_3" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        dist.barrier()
        with pytest.raises(checkpoint.Damaged) as damage:
            checkpoint.verify(place / "step_3")
        messages.append(str(damage.value))
        path, state = find_checkpoint(config, identity)
        assert path == place / "step_2" and state == RunState(step=2)
        dist.barrier()
        if is_main():
            (place / "step_3" / name).write_bytes(content)
        dist.barrier()
    assert exchange(messages) == [messages, messages] and len(messages) == 6
    assert all(
        f"step_3 is damaged: {name}.distcp is not what" in s
        for name, s in zip(["__0_0", "__1_0"], messages[1:3], strict=True)
    )
    checkpoint.load(place / "step_2", {"policy": policy})
    assert all(torch.equal(value, saved[2][name]) for name, value in policy.full().items())

    if not is_main():
        (place / "step_2" / "__1_0.distcp").unlink()  # only rank 1 reads it, and both ranks report it
    with pytest.raises(UserError, match=r"step_2 cannot be loaded: __1_0.distcp: No such file"):
        checkpoint.load(place / "step_2", {"policy": policy})
    distributed.destroy_process_group()


def test_a_rank_that_cannot_write_fails_the_save_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run_ranks(one_cannot_write, 2, arguments=[str(tmp_path)])


def one_cannot_write(folder: str) -> None:
    """Fill the disk of rank 1, and save in the foreground and in the background."""
    distributed.init_process_group(60, device="cpu")
    policy, place = ShardedPolicy(seed=1), Path(folder)
    checkpoint.save(place, 1, {"policy": policy}, {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if rank() == 1:
        checkpoint.write_whole = full
    with pytest.raises(
        RemoteError, match=r"phase checkpoint \(write\) failed on rank 1: OSError: .*No space left"
    ):
        checkpoint.save(place, 2, {"policy": policy}, {})
    writer = CheckpointWriter(place, CheckpointConfig(), 60)
    writer.save(2, {"policy": policy}, {}, {})  # the writer raises later, on all ranks
    with pytest.raises(
        RemoteError, match=r"phase checkpoint \(write\) failed on rank 1: OSError: .*No space left"
    ):
        writer.wait()
    assert checkpoint.latest_complete(place) == place / "step_1"
    dist.barrier()
    checkpoint.remove_unfinished(place)
    checkpoint.prune(place, 1)
    dist.barrier()
    assert [path.name for path in place.iterdir()] == ["step_1"]
    distributed.destroy_process_group()
