"""An engine that dies is started again in its place, and answers as if nothing had happened."""

from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from sharding.ranks import RemoteError
from tests import shared_memory
from tests.colocated import Colocated
from tests.conftest import TinyModel

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=24)


def answer(both: Colocated) -> Generation:
    """What a whole shift gives."""
    with both.manager.generation_shift(both.policy):
        assert both.manager.report.verified == "full"
        return both.complete(PROMPT, SAMPLING)


def asleep(both: Colocated, kill: Callable[[], None]) -> None:
    kill()
    both.manager.wake(both.policy)


def in_the_update(both: Colocated, kill: Callable[[], None]) -> None:
    gather = both.source.gather_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(both.source, "gather_into", lambda *given: (gather(*given), kill()))
        both.manager.wake(both.policy)


def in_a_rollout(both: Colocated, kill: Callable[[], None]) -> None:
    both.manager.wake(both.policy)
    engine = both.leader.engine
    call = engine.complete(PROMPT, SamplingSettings(max_tokens=200), seed=1, policy_version=both.policy.version)
    answering = both.leader.thread.submit(call)
    kill()
    assert type(answering.exception(60)).__name__ == "EngineDeadError"
    raise RemoteError("as Rollouts raises it on all ranks")


def falling_asleep(both: Colocated, kill: Callable[[], None]) -> None:
    both.manager.wake(both.policy)
    kill()
    both.manager.sleep()


def restart(both: Colocated) -> None:
    both.leader.engine.close()
    both.manager.restart(lambda: both.leader.start_again(120), both.policy)


def die_and_come_back(both: Colocated, dying: Callable[[Colocated, Callable[[], None]], None]) -> None:
    """With the same answer from weights that were sent whole; of the dead nothing is left."""
    both.policy.randomise(both.policy.version + 7)
    expected = answer(both)
    assert both.leader.thread.run(both.leader.engine.death(), 20, "asking") == ""
    processes = both.leader.engine._processes

    def kill(process: psutil.Process = processes[0]) -> None:
        with suppress(psutil.NoSuchProcess):  # it is called once a bucket
            process.kill()

    with pytest.raises(RemoteError):
        dying(both, kill)
    told = both.leader.thread.run(both.leader.engine.death(), 20, "asking")
    assert f"process {processes[0].pid} has ended" in told
    restart(both)
    assert not any(process.is_running() and process.status() != "zombie" for process in processes)
    assert answer(both) == expected
    assert both.manager.report.nbytes > 0
    both.policy.randomise(3)
    with both.manager.generation_shift(both.policy):
        assert both.gap(PROMPT, both.complete(PROMPT, SAMPLING), 1.0) < 1e-4


@pytest.mark.parametrize("shared", [False, True], ids=["staged", "zero-copy"])
def test_an_engine_that_is_killed_anywhere_answers_as_before_once_it_has_started_again(
    tiny_model: TinyModel, shared: bool
) -> None:
    before = shared_memory.files()
    with Colocated(tiny_model(), shared=shared) as both:
        both.manager.sleep()
        for dying in (asleep, in_a_rollout, falling_asleep, *([] if shared else [in_the_update])):
            die_and_come_back(both, dying)
    shared_memory.assert_none_left(before)
