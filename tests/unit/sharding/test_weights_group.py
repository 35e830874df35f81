"""Joining the group that weights are broadcast in, with a backend that connects in its first call, as NCCL does."""

import threading
import time
from typing import Any

import pytest
import torch

from sharding.wire import group
from sharding.wire.group import BroadcastGroup, GroupError, GroupStore, connect_store, listen

HOST = "127.0.0.1"


class ConnectsInItsFirstCall:
    """A backend that waits for its members in `broadcast` itself, for seconds that no deadline of this process ends."""

    def __init__(self, members: threading.Barrier) -> None:
        self.members = members
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> "ConnectsInItsFirstCall":
        try:
            self.members.wait(5)
        except threading.BrokenBarrierError:
            raise RuntimeError("lost") from None
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def board() -> GroupStore:
    return GroupStore(listen(HOST, 0, 30), "here")


def joined(board: GroupStore, backend: ConnectsInItsFirstCall, timeout: float) -> BroadcastGroup:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_gloo", lambda *_: backend)
        return BroadcastGroup(board, 0, 2, torch.device("cpu"), HOST, timeout)


def test_a_member_that_never_connects_ends_the_joining_at_its_deadline(board: GroupStore) -> None:
    backend = ConnectsInItsFirstCall(threading.Barrier(2))
    with pytest.raises(GroupError, match=r"no connection of all members within 0 s"):
        joined(board, backend, 0.2)
    assert backend.aborted.wait(120)


def test_an_alarm_ends_the_joining_of_a_member_that_waits_for_another(board: GroupStore) -> None:
    board.abort("the other end is gone")
    with pytest.raises(GroupError, match="the other end is gone"):
        joined(board, ConnectsInItsFirstCall(threading.Barrier(2)), 60)


def test_members_that_connect_late_join_and_an_error_in_connecting_is_passed_on(
    board: GroupStore,
) -> None:
    together = threading.Barrier(2)
    late = threading.Thread(target=lambda: (time.sleep(0.3), together.wait(120)))
    late.start()
    joined(board, ConnectsInItsFirstCall(together), 60).close()
    late.join()
    together.abort()
    with pytest.raises(GroupError, match="a broadcast could not start: lost"):
        joined(board, ConnectsInItsFirstCall(together), 60)


def test_two_real_members_join_through_gloo(board: GroupStore) -> None:
    port = board._store.port
    made: list[BroadcastGroup] = []
    other = threading.Thread(
        target=lambda: made.append(
            BroadcastGroup(
                GroupStore(connect_store(HOST, port, 30), "there"), 1, 2, torch.device("cpu"), HOST, 30
            )
        )
    )
    other.start()
    made.append(BroadcastGroup(board, 0, 2, torch.device("cpu"), HOST, 30))
    other.join(30)
    assert len(made) == 2
    for member in made:
        member.close()
