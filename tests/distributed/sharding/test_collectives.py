"""Compare exchanges between real ranks with what plain Python computes."""

import math
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding import ranks
from sharding.ranks import (
    RemoteError,
    agree,
    agreed,
    all_reduce_max,
    all_reduce_sum,
    all_to_all_bytes,
    exchange,
    join_over_gloo,
    send_to_all,
    sum_counts,
)
from tests.support.launch import leave, run_ranks
from trainer import distributed
from trainer.run import watchdog
from trainer.run.watchdog import EXIT_CODE, Watchdog

RANKS = 3


def test_exchanges_equal_what_plain_python_computes_and_execute_nothing(tmp_path: Path) -> None:
    run_ranks(exchanges, RANKS, arguments=[str(tmp_path / "made by a pickle")])
    assert not any(tmp_path.iterdir())


def test_ranks_whose_group_is_for_gpus_alone_are_joined_over_gloo() -> None:
    run_ranks(joined_over_gloo, 2)


def joined_over_gloo() -> None:
    """Accelerate's group has NCCL alone; this one has another backend, but for GPUs alone as well."""
    dist.init_process_group("cuda:gloo")
    number = dist.get_rank()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        exchange(number)
    join_over_gloo()
    assert exchange(number) == [0, 1]
    payloads = [bytes([number, other]) for other in range(2)]
    assert all_to_all_bytes(payloads) == [bytes([other, number]) for other in range(2)]
    agree(None, "joining")


class MakesAFolder:
    """An object whose pickle makes a folder wherever it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def exchanges(path: str) -> None:
    """Call every collective of `sharding.ranks`, and one whose pickle must be refused."""
    distributed.init_process_group(30, device="cpu")
    rank = ranks.rank()
    assert ranks.world_size() == RANKS and ranks.is_main() == (rank == 0)

    payloads = [b"", bytes(range(256)) * 1000, b"x"]
    assert exchange(payloads[rank]) == payloads
    assert exchange((rank, None)) == [[who, None] for who in range(RANKS)]
    between = [[f"{a} to {b}, ".encode() * (a * b) for b in range(RANKS)] for a in range(RANKS)]
    assert all_to_all_bytes(between[rank]) == [row[rank] for row in between]
    assert send_to_all(payloads[rank]) == payloads and send_to_all(b"") == [b""] * RANKS
    assert sum_counts(torch.tensor([rank, 1 << 40])).tolist() == [sum(range(RANKS)), RANKS << 40]

    def values(who: int) -> dict[str, float]:
        return {"thirds": 1 / (3 + who), "large": 1e17 * (-1) ** who, "count": float(who)}

    rows = [values(who) for who in range(RANKS)]
    # The order of keys differs between ranks: names decide, not positions.
    reduced = dict(sorted(values(rank).items(), reverse=rank == 1))
    assert all_reduce_sum(reduced) == {key: sum(row[key] for row in rows) for key in rows[0]}
    assert all_reduce_max(reduced) == {key: max(row[key] for row in rows) for key in rows[0]}
    assert math.isnan(all_reduce_max({"x": math.nan if rank == 1 else 1.0})["x"])
    assert math.isnan(all_reduce_sum({"x": math.nan if rank == 1 else 1.0})["x"])
    with pytest.raises(RuntimeError, match=r"ranks 0 and 2 reduce different values.*\['b'\]"):
        all_reduce_sum({"a": 1.0} | ({"b": 1.0} if rank == 2 else {}))

    distributed.store().clone().set(f"hello/{rank}", str(rank))  # type: ignore[attr-defined]
    assert [distributed.store().get(f"hello/{who}") for who in range(RANKS)] == [b"0", b"1", b"2"]

    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)  # plain torch.distributed works in this group
    assert tensor.item() == 3.0
    with pytest.raises(
        pickle.UnpicklingError, match=r"posix\.mkdir is not among the classes that ranks exchange"
    ):
        dist.all_gather_object([None] * RANKS, MakesAFolder(f"{path} {rank}"))
    distributed.destroy_process_group()
    assert ranks.rank() == 0 and ranks.world_size() == 1


def test_an_error_on_some_ranks_is_raised_on_all_and_names_them() -> None:
    run_ranks(disagreement, RANKS)


def disagreement() -> None:
    """Raise on some ranks, and check that all ranks raise an error that names those."""
    distributed.init_process_group(30, device="cpu")
    rank = ranks.rank()
    agree(None, "quiet")
    error = ValueError(f"naïve {rank}") if rank > 0 else None
    with pytest.raises(RemoteError) as caught:
        agree(error, "rollout")
    message = "phase rollout failed on rank 1: ValueError: naïve 1; rank 2: ValueError: naïve 2"
    assert str(caught.value) == message and caught.value.__cause__ is error
    with (
        pytest.raises(RemoteError, match="phase update failed on rank 0: KeyError: 'gone'"),
        agreed("update"),
    ):
        if rank == 0:
            raise KeyError("gone")
    with agreed("still in step"):  # no rank is one collective behind
        assert all_reduce_sum({"one": 1.0}) == {"one": RANKS}
    with pytest.raises(RemoteError, match="rank 2: RuntimeError: long long") as caught:
        agree(RuntimeError("long " * 100_000) if rank == 2 else None, "end")
    assert len(str(caught.value)) < 10_000
    with pytest.raises(RemoteError, match=r"rank 1: ValueError: half a pair: \?$"):
        agree(ValueError("half a pair: \ud83d") if rank == 1 else None, "names")
    distributed.destroy_process_group()


def test_a_rank_that_died_is_noticed_by_all_at_the_next_agreement(tmp_path: Path) -> None:
    ranks, dead = 5, 3  # rank 3 exchanges with ranks 4 and 0 only; the others hear of it from those
    run_ranks(death, ranks, arguments=[str(tmp_path), str(ranks), str(dead)], lost=(dead,))
    for rank in {*range(ranks)} - {dead}:
        for phase, message in zip(
            ("reward", "update"), (tmp_path / str(rank)).read_text().split("\n"), strict=True
        ):
            expected = rf"rank {rank} lost contact with rank {dead}, whose process \d+ has ended, at the end of phase {phase}"
            assert re.match(expected, message), message


def death(folder: str, ranks_there: str, dead: str) -> None:
    """End one rank; the others write the errors of their next two agreements."""
    distributed.init_process_group(60, device="cpu")
    agree(None, "start")
    if ranks.rank() == int(dead):
        os._exit(0)
    messages = []
    for phase in ("reward", "update"):  # a broken group stays broken
        with pytest.raises(RemoteError) as caught:
            agree(None, phase)
        messages.append(str(caught.value).replace("\n", " "))
    (Path(folder) / f"{ranks.rank()}.tmp").write_text("\n".join(messages))
    (Path(folder) / f"{ranks.rank()}.tmp").rename(Path(folder) / str(ranks.rank()))
    while len(list(Path(folder).glob("?"))) < int(ranks_there) - 1:
        # errors would name a survivor that has left, too
        time.sleep(0.01)
    leave()


def test_a_phase_past_its_deadline_ends_all_ranks_with_phases_and_stacks() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(hang, RANKS)
    output = str(caught.value)
    assert "rank 1 exceeded a deadline, phase rollout for 2." in output
    assert "  rank 0: step > collective for" in output and "  rank 1: step > rollout for" in output
    assert "  rank 2: step > collective for" in output
    for rank, where in (
        (0, "waits_in_a_collective"),
        (1, "hangs_in_python"),
        (2, "waits_in_a_collective"),
    ):
        stacks = "\n".join(line for line in output.splitlines() if line.startswith(f"rank {rank} | "))
        assert where in stacks, rank
    assert f"terminated with exit code {EXIT_CODE}" in output
    assert "left without hearing" not in output


def hang() -> None:
    distributed.init_process_group(60, device="cpu")
    dog = Watchdog(distributed.store(), ranks.rank(), ranks.world_size())
    with dog.phase("step", 50):
        if ranks.rank() == 1:
            with dog.phase("rollout", 2):
                hangs_in_python()
        with dog.phase("collective", 50):
            waits_in_a_collective()


def hangs_in_python() -> None:
    import threading

    threading.Event().wait()


def waits_in_a_collective() -> None:
    dist.barrier()


def test_a_rank_that_vanishes_is_noticed_though_nobody_waits_for_it() -> None:
    """Simulates a node that loses power: no launcher reports it, and no connection breaks."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(vanishes, RANKS)
    output = str(caught.value)
    assert "rank 1 has heard nothing of rank 2 for 1 s; phases of all ranks:" in output
    for rank in (0, 1):
        assert f"rank {rank}: phase rollout for" in output
    assert f"terminated with exit code {EXIT_CODE}" in output


def vanishes() -> None:
    watchdog._POLL_SECONDS, watchdog._BEAT_SECONDS, watchdog._SILENT_SECONDS = 0.05, 0.1, 1.0
    distributed.init_process_group(60, device="cpu")
    with (
        Watchdog(distributed.store(), ranks.rank(), ranks.world_size()) as dog,
        dog.phase("rollout", 60),
    ):
        while not dog._heard:
            time.sleep(0.05)
        agree(None, "start")
        if ranks.rank() == 2:
            os._exit(0)
        hangs_in_python()


def test_ranks_that_lost_the_store_end_by_themselves() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(store_dies, 2)
    assert "rank 1: lost the store that the ranks share" in str(caught.value)


def store_dies() -> None:
    """End rank 0, which holds the store, as with launchers that keep no store of their own."""
    distributed.init_process_group(60, device="cpu")
    rank = ranks.rank()
    local = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = int(ranks.all_reduce_max({"port": local.port if local else 0})["port"])
    store = local or dist.TCPStore("127.0.0.1", port, is_master=False)
    dog = Watchdog(store, rank, 2)
    with dog.phase("rollout", 60):
        agree(None, "start")
        if rank == 0:
            os._exit(0)
        hangs_in_python()
