"""An engine that dies is restarted in its place, and answers as if nothing had happened."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore
from transformers import AutoTokenizer

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from generation.rollouts.agent import Agent, environment_rollout
from generation.rollouts.episodes import RolloutSettings
from generation.rollouts.tools import ToolCall, ToolLimits, ToolRunner
from sharding.ranks import RemoteError
from tests.conftest import TinyModel
from tests.support import shared_memory
from tests.support.colocated import Colocated
from trainer.config.schema import RewardConfig
from trainer.data import Prompt
from trainer.rewards.reward_pool import RewardPool
from trainer.rollouts.pool import Pool, Terms

PROMPT = [14, 50, 77, 120, 9]
SAMPLING = SamplingSettings(max_tokens=24)


def answer(both: Colocated) -> Generation:
    """Run a complete generation shift, and sample an answer in it."""
    with both.manager.generation_shift(both.policy):
        assert both.manager.report.verified == "full"
        return both.complete(PROMPT, SAMPLING)


def asleep(both: Colocated, kill: Callable[[], None]) -> None:
    """Kill the engine while it sleeps."""
    kill()
    both.manager.wake(both.policy)


def in_the_update(both: Colocated, kill: Callable[[], None]) -> None:
    """Kill the engine during an update."""
    gather = both.source.gather_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(both.source, "gather_into", lambda *arguments: (gather(*arguments), kill()))
        both.manager.wake(both.policy)


def in_a_rollout(both: Colocated, kill: Callable[[], None]) -> None:
    """Kill the engine while it answers."""
    both.manager.wake(both.policy)
    engine = both.leader.engine
    call = engine.complete(
        PROMPT, SamplingSettings(max_tokens=200), seed=1, policy_version=both.policy.version
    )
    answering = both.leader.thread.submit(call)
    kill()
    assert type(answering.exception(60)).__name__ == "EngineDeadError"
    raise RemoteError("raised on all ranks, as by Pool")


def falling_asleep(both: Colocated, kill: Callable[[], None]) -> None:
    """Kill the engine as it goes to sleep."""
    both.manager.wake(both.policy)
    kill()
    both.manager.sleep()


def restart(both: Colocated) -> None:
    both.leader.engine.close()
    both.manager.restart(lambda: both.leader.start_again(120), both.policy)


def die_and_come_back(both: Colocated, dying: Callable[[Colocated, Callable[[], None]], None]) -> str:
    """Return a restarted engine gives the same answer from weights sent whole, and nothing is left of the dead one.

    Returns what the engine said of its death.
    """
    both.policy.randomise(both.policy.version + 7)
    expected = answer(both)
    assert both.leader.thread.run(both.leader.engine.death(), 20, "asking") == ""
    processes = both.leader.engine._processes

    def kill(process: psutil.Process = processes[0]) -> None:
        with suppress(psutil.NoSuchProcess):  # called once a bucket
            process.kill()

    with pytest.raises(RemoteError):
        dying(both, kill)
    reason = both.leader.thread.run(both.leader.engine.death(), 20, "asking")
    assert f"process {processes[0].pid} has ended" in reason
    restart(both)
    assert not any(process.is_running() and process.status() != "zombie" for process in processes)
    assert answer(both) == expected
    assert both.manager.report.nbytes > 0
    both.policy.randomise(3)
    with both.manager.generation_shift(both.policy):
        assert both.gap(PROMPT, both.complete(PROMPT, SAMPLING), 1.0) < 1e-4
    return reason


@pytest.fixture(scope="module", params=[False, True], ids=["staged", "zero-copy"])
def both(tiny_model: TinyModel, request: pytest.FixtureRequest) -> Iterator[Colocated]:
    before = shared_memory.files()
    with Colocated(tiny_model(), shared=request.param) as both:
        both.manager.sleep()
        yield both
    shared_memory.assert_none_left(before)


def test_an_engine_killed_at_any_time_answers_as_before_once_restarted(
    both: Colocated, request: pytest.FixtureRequest
) -> None:
    ways = [asleep, in_a_rollout, falling_asleep]
    if "zero-copy" not in request.node.name:
        ways.append(in_the_update)
    deaths = [die_and_come_back(both, dying) for dying in ways]
    assert len({*deaths}) == len(ways)  # each of another process


class Desks:
    """Environments whose tool returns when all `count` trajectories have called it.

    If `kill` is set, it is called at that moment, and the tool then returns in every second environment only.
    """

    def __init__(self, count: int) -> None:
        self.count, self.kill = count, None
        self.inside, self.opened, self.closed = 0, 0, 0
        desks = self

        class Desk:
            """The environment of one trajectory."""

            def reset(self) -> None:
                desks.opened += 1
                self.number = desks.opened

            async def look(self) -> str:
                """Looks at the desk."""
                desks.inside += 1
                if desks.inside == desks.count:
                    if desks.kill:
                        desks.kill()
                    desks.all_in.set()
                await desks.all_in.wait()
                if desks.kill and self.number % 2:
                    await asyncio.Event().wait()
                return "42"

            def close(self) -> None:
                desks.closed += 1

        self.environment = Desk

    def rolled_out(self, pool: Pool, prompts: list[Prompt], settings: RolloutSettings) -> dict[Any, Any]:
        """Run a rollout; return what each trajectory sampled, by prompt and sample."""
        self.inside, self.opened, self.closed, self.all_in = 0, 0, 0, asyncio.Event()
        answers = pool.run(prompts, settings, Terms(60))
        assert len(answers) == self.opened == self.closed == self.count
        ended = {(a.prompt_index, a.sample_index): a.trajectory for a in answers}
        assert len(ended) == self.count and all(
            t and not t.error and t.turns == 2 for t in ended.values()
        )
        return {
            place: (t.response_ids, t.loss_mask, t.metrics["tools/calls"])
            for place, t in ended.items()
            if t
        }


@pytest.mark.parametrize("both", [False], indirect=True, ids=["staged"])
def test_no_trajectory_in_a_tool_is_lost_or_doubled_when_its_engine_dies(
    both: Colocated,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(both.leader.engine.settings.model)
    desks, rewards = Desks(64), RewardPool(RewardConfig(functions=[]))
    agent = Agent(
        ToolRunner(ToolLimits(max_concurrency=64), tokenizer), lambda _: [ToolCall("look", {})], 2
    )
    function = environment_rollout(desks.environment, {}, agent)
    level: Any = SimpleNamespace(function=function, image_rules=None, messages=lambda prompts: None)
    pool = Pool(both.leader, tokenizer, rewards, HashStore(), level)
    prompts = [Prompt(n, (*PROMPT, n), {}) for n in range(16)]
    # An answer without an end would call no tool
    ends = [*range(0, both.policy.model.config.vocab_size, 2)]
    settings = RolloutSettings(
        4, SamplingSettings(40, stop_token_ids=ends), both.policy.version, seed=1, step=1
    )
    with both.manager.generation_shift(both.policy):
        expected = desks.rolled_out(pool, prompts, settings)
    both.manager.wake(both.policy)
    desks.kill = both.leader.engine._processes[0].kill
    with pytest.raises(RemoteError, match="EngineDeadError"):
        desks.rolled_out(pool, prompts, settings)
    assert desks.inside == desks.opened == desks.closed == 64
    desks.kill = None
    restart(both)
    pool.take_back(step=1)
    with both.manager.generation_shift(both.policy):
        assert desks.rolled_out(pool, prompts, settings) == expected
