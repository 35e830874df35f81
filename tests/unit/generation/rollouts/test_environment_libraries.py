"""Environments of libraries, real ones, played by a scripted policy; each is skipped where its library is not there."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from generation.rollouts.agent import environment_class, environment_rollout, environment_tools
from generation.trajectory import Trajectory
from tests.unit.generation.rollouts.test_environments import TOKENIZER, agent, say
from tests.unit.scripted import ScriptedEngine, run

ASKED = [[{"role": "user", "content": "Play."}]]


def play(
    cls: type, answers: list[str], row: dict[str, Any] | None = None, turns: int = 16, **kwargs: Any
) -> tuple[Trajectory, str]:
    """The trajectory of an episode with these answers, and all of its text."""
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
    moves = [act(action="jump"), *(act(action=each) for each in WAY), act(action=0), "done"]
    trajectory, text = play(Gym, moves, {"seed": 3}, **LAKE, render_mode="ansi")
    assert trajectory.reward == 1.0 and trajectory.turn_rewards == [0.0] * 6 + [1.0, 0.0, 0.0]
    assert "SFFF\nFHFH\nFFFH\nHFFG" in text and "It is over already." in text
    assert "'jump' is not an action; there are: left, down, right, up" in text
    assert trajectory.metrics["tools/errors"] == 1


def test_gymnasium_with_answers_as_actions() -> None:
    """Numbers for what has names, lists for a box; observations as JSON."""
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    from generation.rollouts.environments.gymnasium import GymText

    assert environment_tools(GymText) == {}
    numbers = {"down": 1, "right": 2}
    moves = ["no idea", *(f"I take [{numbers[each]}]" for each in WAY)]
    trajectory, text = play(GymText, moves, {"seed": 3}, **LAKE)
    assert trajectory.reward == 1.0 and trajectory.finish_reason == "stop" and trajectory.turns == 7
    assert "<|start|>user\n'no idea' is not an action" in text and "<|start|>user\n14<|end|>" in text
    trajectory, text = play(GymText, ["[9]", "[0.5]"], {"seed": 3}, turns=2, id="Pendulum-v1")
    assert trajectory.finish_reason == "max_turns" and "there are: Box(-2.0, 2.0, (1,), float32)" in text


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
        "def last(read):\n    return '[%s]' % max(c for c in read.split('Available Moves:')[-1] if c.isdigit())\n"
    )
    opposed = {"id": "TicTacToe-v0", "players": 2, "opponent": f"{other}:last"}
    trajectory, text = play(TextArena, ["[0]", "[1]", "[2]"], {"seed": 1}, **opposed)
    assert trajectory.reward == 1.0 and "[8]" in text
    with pytest.raises(ValueError, match="`opponent` is for the players"):
        TextArena("TicTacToe-v0", players=2)


@pytest.fixture
def counting_server() -> Any:
    """An OpenEnv server whose environment adds up what it is told; each session has a sum of its own."""
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    uvicorn = pytest.importorskip("uvicorn")
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Told(Action):
        message: str

    class Sum(Observation):
        text: str = ""

    class Adding(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, **_: Any) -> Sum:
            self.total = seed or 0
            return Sum(text=f"{self.total} so far", done=False, reward=0.0)

        def step(self, action: Told, **_: Any) -> Sum:
            self.total += int(action.message)
            return Sum(text=f"{self.total} so far", done=self.total >= 10, reward=float(action.message) / 10)

        @property
        def state(self) -> State:
            return State()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    app = create_fastapi_app(Adding, Told, Sum, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


def test_openenv_by_tools_and_by_text(counting_server: str) -> None:
    from generation.rollouts.environments.openenv import OpenEnv, OpenEnvText

    moves = [act(action={"message": "3"}), act(action={"message": "4"}), "done"]
    trajectory, text = play(OpenEnv, moves, {"seed": 1}, url=counting_server)
    assert trajectory.reward == pytest.approx(0.7) and "4 so far" in text and "8 so far" in text
    trajectory, text = play(OpenEnvText, ["3", "8"], url=counting_server)
    assert trajectory.reward == pytest.approx(1.1) and trajectory.finish_reason == "stop" and "3 so far" in text
