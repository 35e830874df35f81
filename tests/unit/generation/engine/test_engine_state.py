"""The transitions that each state of an engine permits, tested without an engine."""

import itertools

import pytest

from generation.engine.lifecycle import EngineLifecycle, EngineStateError, Memory

ACTIONS = {
    "sleep": lambda state: state.sleep(keeps_weights=False),
    "wake_weights": lambda state: state.wake_weights(),
    "wake_kv_cache": lambda state: state.wake_kv_cache(),
    "begin_sync": lambda state: state.begin_sync(),
}
# The only ways through: (state before, action) -> state after.
ALLOWED = {
    (Memory.AWAKE, "sleep"): Memory.ASLEEP,
    (Memory.WEIGHTS, "sleep"): Memory.ASLEEP,
    (Memory.ASLEEP, "wake_weights"): Memory.WEIGHTS,
    (Memory.WEIGHTS, "wake_kv_cache"): Memory.AWAKE,
    (Memory.AWAKE, "begin_sync"): Memory.AWAKE,
    (Memory.WEIGHTS, "begin_sync"): Memory.WEIGHTS,
}


@pytest.mark.parametrize(("memory", "action"), list(itertools.product(Memory, ACTIONS)))
def test_calls_in_any_wrong_order_raise(memory: Memory, action: str) -> None:
    state = EngineLifecycle()
    state.memory = memory
    if (memory, action) in ALLOWED:
        ACTIONS[action](state)
        assert state.memory is ALLOWED[memory, action]
    else:
        with pytest.raises(EngineStateError, match=memory.value):
            ACTIONS[action](state)
        assert state.memory is memory


def test_only_a_complete_sync_gives_an_engine_a_version_and_all_else_removes_it() -> None:
    state = EngineLifecycle()
    with pytest.raises(EngineStateError, match="no version"):
        state.check_can_generate(0)  # loaded from disk, never synced
    state.begin_sync()
    with pytest.raises(EngineStateError, match="not being updated"):
        state.check_can_generate(0)
    state.finish_sync(4)
    state.check_can_generate(4)
    with pytest.raises(EngineStateError, match="version 4, the policy is at version 5"):
        state.check_can_generate(5)
    state.sleep(keeps_weights=False)
    state.wake_weights()
    state.wake_kv_cache()
    with pytest.raises(EngineStateError, match="dropped or never sent"):
        state.check_can_generate(4)
    state.begin_sync()
    state.fail_sync()
    with pytest.raises(EngineStateError):
        state.check_can_generate(4)
    with pytest.raises(EngineStateError, match="never began"):
        state.finish_sync(5)
    state.close()
    with pytest.raises(EngineStateError, match="closed"):
        state.begin_sync()


def test_the_usable_version_is_that_of_whole_weights_in_an_engine_that_is_awake() -> None:
    state = EngineLifecycle()
    with pytest.raises(EngineStateError, match="weights of no version"):
        state.usable_version()
    state.adopt_checkpoint(4)
    assert state.usable_version() == state.latest == 4
    state.begin_sync()
    with pytest.raises(EngineStateError, match="being updated"):
        state.usable_version()
    state.fail_sync()
    assert (state.version, state.latest) == (None, 4)  # what a next version would follow
    with pytest.raises(EngineStateError, match="weights of no version"):
        state.usable_version()
    state.begin_sync()
    state.finish_sync(5)
    state.sleep(keeps_weights=True)
    with pytest.raises(EngineStateError, match="asleep"):
        state.usable_version()
    state.wake_weights()
    state.wake_kv_cache()
    assert state.usable_version() == state.latest == 5
