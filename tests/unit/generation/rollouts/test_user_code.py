"""User code may raise anything at every level: its episode fails with a name, and nothing else fails."""

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from generation.engine.sampling import SamplingSettings
from generation.engine.thread import EngineThread
from generation.rollouts import user_code
from generation.rollouts.agent import environment_rollout, tool_rollout
from generation.rollouts.client import Client, ClientRollout
from generation.rollouts.episode import PolicyLLM, RolloutSettings
from generation.rollouts.episodes import EpisodeSetup, rollout
from generation.rollouts.sampler import sample_batch
from generation.rollouts.sampler_prompts import prompt_batch
from generation.rollouts.user_code import UserCodeError, call_user, contained, described
from generation.trajectory import Trajectory
from tests.support.learning_steps import as_answers
from tests.support.scripted import ScriptedEngine, handle, merging_tokenizer, run, spelled
from tests.unit.generation.rollouts.test_environments import Shop, agent
from trainer.learning.metrics import rollout_metrics
from trainer.rollouts.pool import RolloutError, check_failures

TOKENIZER = merging_tokenizer()


class NotAnException(BaseException):
    """An exception that is not an `Exception`."""


class Unreadable(NotAnException):
    def __str__(self) -> str:
        raise SystemExit(7)


RAISED: list[tuple[BaseException, str]] = [
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (asyncio.CancelledError("a leaked scope"), "CancelledError: a leaked scope"),
    (GeneratorExit("odd"), "GeneratorExit: odd"),
    (NotAnException("mine"), "NotAnException: mine"),
    (BaseExceptionGroup("several", [SystemExit(1)]), "BaseExceptionGroup: several (1 sub-exception)"),
    (Unreadable(), "Unreadable, whose message cannot be read"),
    (ValueError("plain \ud800"), "ValueError: plain ?"),
]


async def answer(llm: PolicyLLM) -> Trajectory:
    completion = await llm.sample(llm.prompt_ids, llm.settings.sampling)
    count = len(completion.token_ids)
    return llm.trajectory(
        response_ids=completion.token_ids,
        loss_mask=[1] * count,
        logprobs=completion.logprobs,
        reward=1.0,
    )


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda ids, seed: spelled(TOKENIZER, "ok"))


def episodes_of(function: Any) -> list[Trajectory]:
    """Run eight episodes on a thread like the engine's, and check that the thread still works afterwards."""
    thread = EngineThread()

    async def score(trajectory: Trajectory) -> None:
        await asyncio.sleep(0)

    settings = RolloutSettings(1, SamplingSettings(9), 0, 0, 0)
    claim = partial(next, iter(range(8)), None)
    work = rollout(engine(), [[5]] * 8, settings, claim, score, EpisodeSetup(function, TOKENIZER))  # type: ignore[arg-type]
    trajectories = thread.run(work, 300, "a rollout")
    thread.run(asyncio.sleep(0), 10, "another task")
    thread.close()
    return sorted(trajectories, key=lambda t: t.prompt_index)


@pytest.mark.parametrize(("error", "named"), RAISED, ids=[name.split(":")[0] for _, name in RAISED])
def test_an_episode_fails_with_the_name_of_any_exception_of_a_custom_rollout(
    error: BaseException, named: str
) -> None:
    async def raising_rollout(
        llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> Trajectory:
        done = await answer(llm)
        if llm.prompt_index in (2, 5):
            raise error
        return done

    trajectories = episodes_of(raising_rollout)
    assert [(t.prompt_index, t.error) for t in trajectories] == [
        (i, named if i in (2, 5) else "") for i in range(8)
    ]
    with pytest.raises(RolloutError, match="2 of 8 episodes failed"):
        check_failures(as_answers(trajectories), 0.1)


def test_episodes_that_cancel_themselves_are_counted() -> None:
    """Episodes cancelled by themselves are counted as failed, as with a library that cancels its caller's task; a task
    group reports nothing.
    """

    async def leaks(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        done = await answer(llm)
        if llm.prompt_index % 4 == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return done

    trajectories = episodes_of(leaks)
    assert [bool(t.error) for t in trajectories] == [i % 4 == 1 for i in range(8)]
    assert trajectories[1].error.startswith("CancelledError")


def test_an_episode_whose_own_task_is_cancelled_is_not_lost() -> None:
    """An episode can find and cancel the task of another one, which then counts as failed."""

    async def cancels_another(
        llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> Trajectory:
        if llm.prompt_index == 7:
            (other,) = (t for t in asyncio.all_tasks() if _waits_in_episode(t, 3))
            other.cancel()
        elif llm.prompt_index == 3:
            await asyncio.sleep(3600)
        return await answer(llm)

    trajectories = episodes_of(cancels_another)
    assert [(t.prompt_index, bool(t.error)) for t in trajectories] == [(i, i == 3) for i in range(8)]
    assert "cancelled by other code" in trajectories[3].error


def _waits_in_episode(task: "asyncio.Task[Any]", number: int) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    llm = frame.f_locals.get("llm") if frame is not None and frame.f_code.co_name == "run_one" else None
    return llm is not None and llm.prompt_index == number


def test_a_task_that_user_code_left_behind_does_not_end_the_engines_thread() -> None:
    async def leaves_one_behind(
        llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> Trajectory:
        async def later() -> None:
            raise SystemExit(4)

        if llm.prompt_index == 0:
            llm.left = asyncio.ensure_future(later())  # type: ignore[attr-defined]
            asyncio.get_running_loop().call_soon(_interrupt)
        await asyncio.sleep(0.01)
        return await answer(llm)

    assert [t.error for t in episodes_of(leaves_one_behind)] == [""] * 8


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_rollout_that_is_given_up_cancels_its_episodes_whatever_they_make_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Episodes may end at once, tidy up first, or ignore the cancellation; those that ignore it are abandoned."""
    monkeypatch.setattr(user_code, "ENDING_SECONDS", 0.3)
    ended: list[int] = []
    begun, stop = threading.Semaphore(0), threading.Event()

    async def stubborn(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        begun.release()
        while not stop.is_set():
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                ended.append(llm.prompt_index)
                if llm.prompt_index == 1:
                    await asyncio.sleep(0.01)
                    ended.append(101)
                if llm.prompt_index < 2:
                    raise
        return await answer(llm)

    thread = EngineThread()

    async def score(trajectory: Trajectory) -> None: ...

    settings = RolloutSettings(1, SamplingSettings(9), 0, 0, 0)
    claim = partial(next, iter(range(3)), None)
    work = rollout(engine(), [[5]] * 3, settings, claim, score, EpisodeSetup(stubborn, TOKENIZER))  # type: ignore[arg-type]
    running: Future[Any] = Future()

    async def cancelled() -> str:
        task = asyncio.ensure_future(work)
        running.set_result(task)
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "not cancelled"

    outcome = thread.submit(cancelled())
    for _ in range(3):
        assert begun.acquire(timeout=120)
    thread.loop.call_soon_threadsafe(running.result(20).cancel)
    assert outcome.result(20) == "cancelled"
    assert sorted(ended) == [0, 1, 2, 101]
    stop.set()
    thread.close()


@pytest.mark.parametrize(
    ("error", "named"), RAISED[:5], ids=[name.split(":")[0] for _, name in RAISED[:5]]
)
@pytest.mark.parametrize("plain", [True, False])
def test_tools_and_environments_may_raise_anything(
    error: BaseException, named: str, plain: bool
) -> None:
    def breaks() -> None:
        raise error

    async def breaks_later() -> None:
        raise error

    tool = breaks if plain else breaks_later
    script = [f'<tool_call>{{"name": "{tool.__name__}"}}</tool_call>', "ok"]
    scripted = ScriptedEngine(lambda ids, seed: spelled(TOKENIZER, script.pop(0)))
    (done,) = run(scripted, tool_rollout(agent(tool)), [[5]], TOKENIZER)
    assert f"Error: {named}" in TOKENIZER.decode(done.response_ids)
    assert (done.error, done.metrics["tools/errors/exception"]) == ("", 1.0)

    for method in ("reset", "turn_reward", "get_reward", "close", "__init__"):

        def raising(self: Any, *_: Any, **__: Any) -> None:
            raise error

        async def raising_later(self: Any, *_: Any, **__: Any) -> None:
            raise error

        chosen = raising if plain or method == "__init__" else raising_later
        broken = type("Broken", (Shop,), {method: chosen})
        function = environment_rollout(broken, {"price": 1.0}, agent())
        (failed,) = run(engine(), function, [[5]], TOKENIZER, rows=[{"customer": "Ann"}])
        assert failed.error == named, method


def test_a_sampler_may_raise_anything_and_all_its_episodes_have_failed() -> None:
    batch = prompt_batch([[5], [6]], [0, 1], TOKENIZER, 2)
    settings = RolloutSettings(2, SamplingSettings(9), 0, 0, 0)
    for error, named in [*RAISED, (TimeoutError("its own"), "TimeoutError: its own")]:

        def broken(llm: Any, prompts: Any, sampling_params: Any, error: BaseException = error) -> Any:
            raise error

        async def broken_later(
            llm: Any, prompts: Any, sampling_params: Any, error: BaseException = error
        ) -> Any:
            raise error

        for sampler in (broken, broken_later):
            seen: list[Trajectory] = []

            async def score(trajectory: Trajectory, seen: list[Trajectory] = seen) -> None:
                seen.append(trajectory)

            thread = EngineThread()
            work = sample_batch(engine(), TOKENIZER, sampler, batch, settings, score, 300)  # type: ignore[arg-type]
            trajectories = thread.run(work, 300, "a rollout")
            thread.close()
            assert trajectories == seen and [(t.prompt_index, t.sample_index) for t in trajectories] == [
                (0, 0),
                (0, 1),
                (1, 0),
                (1, 1),
            ]
            assert {t.error for t in trajectories} == {f"the sampler raised {named}"}


class Captured:
    """The part of the server that a client's rollout uses."""

    def open(self, **_: Any) -> str:
        return "key"

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:0/{key}/v1"

    def lost_keys(self, key: str) -> int:
        return 0

    def fatal(self, key: str) -> None:
        return None

    def take(self, key: str) -> list[Trajectory]:
        return [Trajectory(0, 0, [5], [6], [1], [-0.5]), Trajectory(0, 0, [5], [7], [1], [-0.5])]

    async def stop(self) -> None: ...


async def capturing(engine: Any, **_: Any) -> Captured:
    return Captured()


def client_episode(client: Client, timeout_s: float = 30.0) -> list[Trajectory]:
    """Run one episode of a client that appears to have talked to the policy, and another one on the same threads."""

    async def good(*_: Any) -> float:
        return 0.5

    thread = EngineThread()
    function = ClientRollout(lambda *a: client(*a) if a[3]["bad"] else good(), capturing, timeout_s)
    alive = engine()
    alive.llm = type("Alive", (), {"errored": False})  # type: ignore[attr-defined]

    async def score(trajectory: Trajectory) -> None: ...

    settings = RolloutSettings(1, SamplingSettings(9), 0, 0, 0)
    rows = [{"bad": True}, {"bad": False}]
    episodes = EpisodeSetup(function, TOKENIZER, rows)
    claim = partial(next, iter(range(2)), None)
    try:
        trajectories = thread.run(
            rollout(alive, [[5]] * 2, settings, claim, score, episodes), 60, "a rollout"
        )  # type: ignore[arg-type]
    finally:
        thread.run(function.aclose(), 30, "closing")
        thread.close()
    assert [(t.error, t.reward) for t in trajectories if t.prompt_index == 1] == [("", 0.5)] * 2
    return [t for t in trajectories if t.prompt_index == 0]


@pytest.mark.parametrize(("error", "named"), RAISED, ids=[name.split(":")[0] for _, name in RAISED])
def test_clients_may_raise_anything(error: BaseException, named: str) -> None:
    def broken(*_: Any) -> float:
        raise error

    async def broken_later(*_: Any) -> float:
        raise error

    for client in (broken, broken_later):
        assert [t.error for t in client_episode(client)] == [named]  # type: ignore[arg-type]


def test_a_client_that_stops_iteration_is_not_waited_for() -> None:
    def stops(*_: Any) -> float:
        raise StopIteration("no more")

    assert [t.error for t in client_episode(stops)] == ["RuntimeError: StopIteration: no more"]


def test_a_client_that_hangs_costs_its_episode_only() -> None:
    async def hangs(*_: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    def blocks(*_: Any) -> float:
        threading.Event().wait(600)
        return 1.0

    for client in (hangs, blocks):
        assert [t.error for t in client_episode(client, 2.0)] == [
            "TimeoutError: the client did not finish within 2 s"
        ]


@pytest.mark.parametrize("parked_s", [0.0, 1e6])
def test_the_time_for_which_an_answer_is_parked_is_not_the_client_s(parked_s: float) -> None:
    async def slow(*_: Any) -> float:
        await asyncio.sleep(0.3)
        return 0.5

    async def episode() -> list[Trajectory]:
        function = ClientRollout(slow, capturing, timeout_s=0.1)
        alive = engine()
        alive.llm = SimpleNamespace(errored=False)  # type: ignore[attr-defined]
        llm = handle(alive, TOKENIZER, turnstile=SimpleNamespace(parked_s=parked_s))
        try:
            return await function(llm, {}, SamplingSettings(9))  # type: ignore[return-value]
        finally:
            await function.aclose()

    if parked_s:
        assert [t.reward for t in asyncio.run(episode())] == [0.5] * 2
    else:
        with pytest.raises(TimeoutError, match="the client did not finish within 0.1 s"):
            asyncio.run(episode())


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39, 10**400, "1.0", [1.0]])
def test_rewards_that_cannot_be_learned_from_fail_their_episode(reward: Any) -> None:
    what = f"{type(reward).__name__}, which is not a number"
    if isinstance(reward, float | int):
        what = f"{'inf' if reward == 10**400 else reward}, which is not a finite float32"

    async def gives(*_: Any) -> Any:
        return reward

    assert [t.error for t in client_episode(gives)] == [f"ValueError: the client returned {what}"]

    class Graded(Shop):
        def get_reward(self) -> Any:
            return reward

    class ByName(Shop):
        def get_reward(self) -> Any:
            return {"polite": 1.0, "paid": reward}

    class ByTurn(Shop):
        def turn_reward(self) -> Any:
            return reward

    for environment, sentence in (
        (Graded, f"Graded.get_reward returned {what}"),
        (ByName, f"ByName.get_reward returned as 'paid' {what}"),
        (ByTurn, f"ByTurn.turn_reward returned, in turn 1, {what}"),
    ):
        function = environment_rollout(environment, {"price": 1.0}, agent())
        (failed,) = run(engine(), function, [[5]], TOKENIZER, rows=[{"customer": "Ann"}])
        assert failed.error == f"ValueError: {sentence}"

    async def custom(
        llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> list[Trajectory]:
        first, second, third = await answer(llm), await answer(llm), await answer(llm)
        if llm.prompt_index == 0:
            first.reward = reward
        if llm.prompt_index == 1:
            second.turn_rewards = [0.0, reward]
        if llm.prompt_index == 2:
            third.reward_parts = {"style": reward}
        return [first, second, third]

    custom.__qualname__ = "custom"
    trajectories = episodes_of(custom)
    assert [t.error for t in trajectories if t.prompt_index < 3] == [
        f"ValueError: custom: the reward is {what}",
        f"ValueError: custom: the reward of turn 2 is {what}",
        f"ValueError: custom: reward_parts['style'] is {what}",
    ]
    assert [t.error for t in trajectories if t.prompt_index > 2] == [""] * 15
    with pytest.raises(RolloutError, match="3 of 8 episodes failed"):
        check_failures(as_answers(trajectories), 0.1)


@pytest.mark.parametrize("where", ["reward_parts", "metrics"])
def test_a_name_that_cannot_be_written_fails_its_episode_alone(where: str) -> None:
    """A client may give its reward such a name, which would keep the whole step from being sent between ranks or
    written.
    """

    async def custom(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        done = await answer(llm)
        getattr(done, where)["client/\ud800" if llm.prompt_index == 3 else "client/fine"] = 1.0
        return done

    custom.__qualname__ = "custom"
    trajectories = episodes_of(custom)
    sentence = r"ValueError: custom: the name 'client/\ud800' is not valid Unicode"
    assert [t.error for t in trajectories] == [
        sentence if t.prompt_index == 3 else "" for t in trajectories
    ]
    assert rollout_metrics(as_answers(trajectories))["rollout/failed"] == 1


def test_the_largest_float32_is_a_reward() -> None:
    async def custom(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        done = await answer(llm)
        done.reward = (-1) ** llm.prompt_index * 3.4028234e38
        return done

    assert [t.error for t in episodes_of(custom)] == [""] * 8


def test_user_code_is_contained_and_its_own_time_outs_are_told_from_ours() -> None:
    async def forever() -> None:
        await asyncio.sleep(3600)

    async def own_timeout() -> None:
        raise TimeoutError("its own")

    with pytest.raises(user_code.UserTimeout, match=r"took longer than 0\.05 s"):
        asyncio.run(contained(forever(), 0.05))
    with pytest.raises(TimeoutError, match="its own") as caught:
        asyncio.run(contained(own_timeout(), 5))
    assert not isinstance(caught.value, user_code.UserTimeout)
    with pytest.raises(UserCodeError, match="SystemExit: 1"):
        asyncio.run(call_user(lambda: exit(1), 5))
    assert len(described(ValueError("x" * 10**6))) == 1000


def test_an_episode_of_which_one_conversation_has_no_reward_has_failed_as_a_whole() -> None:
    async def two(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> list[Trajectory]:
        return [await answer(llm), await answer(llm)]

    async def score(trajectory: Trajectory) -> None:
        if trajectory.prompt_index == 1 and llm_calls.pop() == 1:
            trajectory.error = "reward: f returned nan"

    llm_calls = [0, 1]
    claim = partial(next, iter(range(2)), None)
    settings = RolloutSettings(1, SamplingSettings(9), 0, 0, 0)
    work = rollout(engine(), [[5]] * 2, settings, claim, score, EpisodeSetup(two, TOKENIZER))  # type: ignore[arg-type]
    trajectories = asyncio.run(work)
    assert (
        sorted((t.prompt_index, t.error) for t in trajectories)
        == [(0, "")] * 2 + [(1, "reward: f returned nan")] * 2
    )
