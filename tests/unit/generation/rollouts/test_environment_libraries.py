"""Environments of libraries, real ones, played by a scripted policy; each is skipped where its library is not there."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from generation.rollouts.agent import environment_class, environment_rollout, environment_tools
from generation.trajectory import Trajectory
from tests.support.polling import wait_until
from tests.support.scripted import ScriptedEngine, run
from tests.unit.generation.rollouts.test_environments import TOKENIZER, agent, say

ASKED = [[{"role": "user", "content": "Play."}]]


def play(
    cls: type, answers: list[str], row: dict[str, Any] | None = None, turns: int = 16, **kwargs: Any
) -> tuple[Trajectory, str]:
    """Return the trajectory of an episode with these answers, and all of its text."""
    left = [say(answer) for answer in answers]
    function = environment_rollout(environment_class(cls, kwargs), kwargs, agent(turns=turns))
    engine = ScriptedEngine(lambda ids, seed: left.pop(0))
    (trajectory,) = run(engine, function, [[5]], TOKENIZER, messages=ASKED, rows=[row or {}])
    assert trajectory.error == "" and not left
    return trajectory, str(TOKENIZER.decode(trajectory.prompt_ids + trajectory.response_ids))


def act(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': arguments})}</tool_call>"


LAKE = {"id": "FrozenLake-v1", "is_slippery": False, "actions": ["left", "down", "right", "up"]}
WAY = ["down", "down", "right", "right", "down", "right"]


def test_gymnasium_with_actions_as_tools() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    from generation.rollouts.environments.gymnasium import Gym

    assert list(environment_tools(Gym)) == ["act"]
    moves = [act(action="jump"), *(act(action=direction) for direction in WAY), act(action=0), "done"]
    trajectory, text = play(Gym, moves, {"seed": 3}, **LAKE, render_mode="ansi")
    assert trajectory.reward == 1.0 and trajectory.turn_rewards == [0.0] * 6 + [1.0, 0.0, 0.0]
    assert "SFFF\nFHFH\nFFFH\nHFFG" in text and "It is over already." in text
    assert "'jump' is not an action; there are: left, down, right, up" in text
    assert trajectory.metrics["tools/errors"] == 1


def test_gymnasium_with_answers_as_actions() -> None:
    """Answer are read as numbers for named actions and as lists for a box; observations are written as JSON."""
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    from generation.rollouts.environments.gymnasium import GymText

    assert environment_tools(GymText) == {}
    numbers = {"down": 1, "right": 2}
    moves = ["no idea", *(f"I take [{numbers[direction]}]" for direction in WAY)]
    trajectory, text = play(GymText, moves, {"seed": 3}, **LAKE)
    assert trajectory.reward == 1.0 and trajectory.finish_reason == "stop" and trajectory.turns == 7
    assert "<|start|>user\n'no idea' is not an action" in text and "<|start|>user\n14<|end|>" in text
    trajectory, text = play(GymText, ["[9]", "[0.5]"], {"seed": 3}, turns=2, id="Pendulum-v1")
    assert trajectory.finish_reason == "max_turns" and "there are: Box(-2.0, 2.0, (1,), float32)" in text
    moves = ["[" * 985 + ",", "[1e999]", f"[{'9' * 400}, 1]"]
    trajectory, text = play(GymText, moves, {"seed": 3}, turns=3, **LAKE)
    assert trajectory.turns == 3 and text.count("<|start|>user") == 3


@pytest.fixture
def walk() -> Iterator[list[str]]:
    """Yield `Walk-v0`: a half for each step, three of which are all there are; what it notes of its end."""
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    import numpy as np

    ended: list[str] = []

    class Walk(gymnasium.Env):
        def __init__(self, plane: bool = False) -> None:
            spaces = gymnasium.spaces
            self.action_space = spaces.Box(-1, 1, (2,)) if plane else spaces.Discrete(2, start=1)
            self.observation_space = spaces.Dict(
                {"at": spaces.Box(-9, 9, (1,)), "noise": spaces.Discrete(1000)}
            )

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed)
            self.at, self.steps = float((options or {}).get("at", 0)), 0
            return self._seen(), {}

        def step(self, action: Any) -> Any:
            self.at, self.steps = self.at + float(np.sum(action)), self.steps + 1
            return self._seen(), 0.5, False, self.steps == 3, {}

        def close(self) -> None:
            ended.append("closed")

        def _seen(self) -> dict[str, Any]:
            return {"at": np.asarray([self.at]), "noise": self.np_random.integers(1000)}

    gymnasium.register("Walk-v0", Walk, disable_env_checker=True)
    yield ended
    del gymnasium.registry["Walk-v0"]


def test_gymnasium_with_numbered_actions_options_and_a_limit_of_steps(walk: list[str]) -> None:
    """Rewards of the calls of one turn add up, action numbers may begin elsewhere than at 0, and NumPy is written as
    JSON.
    """
    import gymnasium

    from generation.rollouts.environments.gymnasium import Gym, GymText

    noise = gymnasium.utils.seeding.np_random(7)[0].integers(1000)
    row = {"seed": 7, "options": {"at": 5}}
    moves = [act(action="second") + act(action="first"), act(action=2), act(action=1), "done"]
    trajectory, text = play(Gym, moves, row, id="Walk-v0", actions=["first", "second"])
    assert f'{{"at": [5.0], "noise": {noise}}}' in text and trajectory.turn_rewards == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    assert all(f'{{"at": [{at}.0], ' in text for at in (7, 8, 10)) and '"at": [11' not in text
    assert "It is over already." in text and walk == ["closed"]
    answers = ["not [-0.5, -0.5] but [0.5, 0.25]", "[9, 9]", "[0, 0]"]
    trajectory, text = play(GymText, answers, turns=3, id="Walk-v0", plane=True)
    assert (
        '{"at": [0.75], ' in text and "[9, 9] is not an action; there are: Box(-1.0, 1.0, (2,)" in text
    )
    assert trajectory.turn_rewards == [0.5, 0.0, 0.5] and len(walk) == 2


def test_textarena_alone_and_against_an_opponent(tmp_path: Path) -> None:
    textarena = pytest.importorskip("textarena", reason="textarena is not installed")
    from generation.rollouts.environments.textarena import TextArena

    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=1)
    number = next(n for n in range(1, 21) if game.step(action=f"[{n}]")[0] and game.close()[0][0] == 1)
    guesses = [f"perhaps [{number - 1 or 20}]", f"[{number}]"]
    trajectory, text = play(TextArena, guesses, {"seed": 1}, id="GuessTheNumber-v0")
    assert trajectory.reward == 1.0 and trajectory.turns == 2 and "The target number is" in text
    assert text.count("You are playing Guess The Number") == 1  # the history is the conversation
    assert play(TextArena, guesses[:1], {"seed": 1}, turns=1, id="GuessTheNumber-v0")[0].reward == 0.0
    other = tmp_path / "other.py"
    other.write_text(
        "def last(read):\n    assert read.count('You are Player 1') == 1\n"
        "    return '[%s]' % max(c for c in read.split('Available Moves:')[-1] if c.isdigit())\n"
    )
    opposed = {"id": "TicTacToe-v0", "players": 2, "opponent": f"{other}:last"}
    trajectory, text = play(TextArena, ["[0]", "[1]", "[2]"], {"seed": 1}, **opposed)
    assert trajectory.reward == 1.0 and "[8]" in text
    with pytest.raises(ValueError, match="set `opponent` if, and only if"):
        TextArena("TicTacToe-v0", players=2)


@contextmanager
def serving(environment: type) -> Iterator[str]:
    """Yield the address of an OpenEnv server."""
    from ecosystem.openenv_server import server as make_server

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server = make_server(environment, port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def test_openenv_by_tools_and_by_text() -> None:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    from ecosystem.openenv_server import Adding

    from generation.rollouts.environments.openenv import OpenEnv, OpenEnvText

    with serving(Adding) as url:
        moves = [act(action={"message": "3"}), act(action={"message": "4"}), "done"]
        trajectory, text = play(OpenEnv, moves, {"seed": 1}, url=url)
        assert trajectory.reward == pytest.approx(0.7) and "4 so far" in text and "8 so far" in text
        assert trajectory.turn_rewards == pytest.approx([0.3, 0.4, 0.0])
        moves = [act(action={"message": "12"}), act(action={"message": "4"}), "done"]
        trajectory, text = play(OpenEnv, moves, url=url)
        assert trajectory.reward == pytest.approx(1.2) and "12 so far\nIt is over." in text
        assert "It is over already." in text
        trajectory, text = play(OpenEnvText, ["3", "8"], url=url)
        assert (
            trajectory.reward == pytest.approx(1.1)
            and trajectory.finish_reason == "stop"
            and "3 so far" in text
        )


def test_an_observation_of_openenv_is_its_only_text_or_else_json() -> None:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    from generation.rollouts.environments import openenv

    observations = [{"text": "né"}, {"text": "né", "count": 1}, {"count": 1}, ["a"]]
    assert list(map(openenv._text, observations)) == [
        "né",
        '{"text": "né", "count": 1}',
        '{"count": 1}',
        '["a"]',
    ]


def together(function: Any, answers: dict[str, list[str]]) -> dict[str, Trajectory]:
    """Return the trajectories of concurrent episodes, by the word in their prompt."""
    left = {word: [say(answer) for answer in texts] for word, texts in answers.items()}

    def next_answer(ids: list[int], seed: int) -> list[int]:
        (word,) = (word for word in left if f"Play {word}." in TOKENIZER.decode(ids))
        return left[word].pop(0)

    asked = [[{"role": "user", "content": f"Play {word}."}] for word in answers]
    prompts, rows = [[5]] * len(asked), [{"seed": 1}] * len(asked)
    done = run(ScriptedEngine(next_answer), function, prompts, TOKENIZER, messages=asked, rows=rows)
    return dict(zip(answers, sorted(done, key=lambda t: t.prompt_index), strict=True))


def test_a_hostile_openenv_server_costs_its_episode_only() -> None:
    """A server that hangs, fails or closes fails one episode; a late answer is not taken for that of the next
    action.
    """
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    from ecosystem.openenv_server import Adding, Message, Sum

    from generation.rollouts.environments.openenv import OpenEnv, OpenEnvText

    class Hostile(Adding):
        def step(self, action: Message, **more: Any) -> Sum:
            if action.message == "late":
                time.sleep(6.0)
            if action.message == "fail":
                raise OSError("no more")
            return super().step(action, **more)

    def tell(*messages: str) -> list[str]:
        return [*(act(action={"message": message}) for message in messages), "done"]

    answers = {"late": tell("late", "5"), "fail": tell("fail", "5"), "well": tell("3", "4")}
    with serving(Hostile) as url:
        done = together(environment_rollout(OpenEnv, {"url": url}, agent(timeout_s=4.0)), answers)
        texts = {word: TOKENIZER.decode(trajectory.response_ids) for word, trajectory in done.items()}
        assert "took longer than 4 s" in texts["late"] and "this session is lost" in texts["late"]
        assert "so far" not in texts["late"] and done["late"].reward == 0.0
        assert "no more" in texts["fail"] and "6 so far" in texts["fail"]
        assert "8 so far" in texts["well"] and done["well"].reward == pytest.approx(0.7)
        answers = {"late": ["late"], "well": ["3", "8"]}
        done = together(environment_rollout(OpenEnvText, {"url": url}, agent(timeout_s=4.0)), answers)
        assert "took longer than 4 s" in done["late"].error and done["well"].reward == pytest.approx(1.1)
    (gone,) = together(environment_rollout(OpenEnv, {"url": url}, agent()), {"gone": []}).values()
    assert "Failed to connect" in gone.error


def test_rewards_that_are_not_finite_cost_their_episode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward of NaN fails its episode: JSON has no NaN, but Python's parser accepts it."""
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    from ecosystem.openenv_server import Adding
    from openenv.core.generic_client import GenericEnvClient

    from generation.rollouts.environments.openenv import OpenEnv

    heard = GenericEnvClient._parse_result

    def odd(self: Any, payload: dict[str, Any]) -> Any:
        reward = float("nan") if payload["observation"] == {"text": "2 so far"} else payload["reward"]
        return heard(self, payload | {"reward": reward})

    monkeypatch.setattr(GenericEnvClient, "_parse_result", odd)
    answers = {
        "odd": [act(action={"message": "1"}), "done"],
        "well": [act(action={"message": "3"}), "done"],
    }
    with serving(Adding) as url:
        done = together(environment_rollout(OpenEnv, {"url": url}, agent()), answers)
    assert (
        "OpenEnv.turn_reward returned, in turn 1, nan, which is not a finite float32"
        in done["odd"].error
    )
    assert done["well"].error == "" and done["well"].reward == pytest.approx(0.3)


def test_a_hostile_textarena_game_costs_its_episode_only() -> None:
    textarena = pytest.importorskip("textarena", reason="textarena is not installed")
    from textarena.envs.registration import ENV_REGISTRY, register

    from generation.rollouts.environments.textarena import TextArena

    class Hostile(textarena.Env):
        def reset(self, num_players: int, seed: int | None = None) -> None:
            self.state = textarena.State(num_players, seed=seed)
            self.state.standard_resets(player_prompt_function=lambda **_: "Go.")

        def step(self, action: str) -> tuple[bool, dict[str, Any]]:
            if action == "hang":
                time.sleep(6.0)
            if action == "fail":
                raise OSError("no more")
            self.state.rewards = {0: float("nan") if action == "odd" else 1.0}
            self.state.done = True
            return True, {}

    register("Hostile-v0-raw", Hostile)
    try:
        function = environment_rollout(TextArena, {"id": "Hostile-v0"}, agent(timeout_s=4.0))
        done = together(function, {word: [word] for word in ("hang", "fail", "odd", "well")})
    finally:
        del ENV_REGISTRY["Hostile-v0-raw"]
    assert "took longer than 4 s" in done["hang"].error and done["fail"].error == "OSError: no more"
    assert done["odd"].error.endswith("get_reward returned nan, which is not a finite float32")
    assert done["well"].error == "" and done["well"].reward == 1.0
