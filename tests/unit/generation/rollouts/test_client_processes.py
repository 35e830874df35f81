"""Agents in processes of their own: a good one is served, a hostile one costs its episode and nothing else."""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from generation.rollouts import client_process
from generation.rollouts.client import Scored
from generation.rollouts.client_process import ClientCommand, ClientError, ClientProcesses
from tests.conftest import ROOT
from tests.support.polling import wait_until

AGENT = """
import json, os, socket, subprocess, sys, time
from hotbunk_client import serve

async def agent(base_url, api_key, model, row, **kwargs):
    kind, connection = row["kind"], os.environ["HOTBUNK_MESSAGES"]
    if kind == "hangs":
        time.sleep(600)
    if kind == "answers late":
        time.sleep(4)
    if kind in ("starts another", "leaves another", "starts a session"):
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)", row["mark"]]
        subprocess.Popen(sleeper, start_new_session=kind == "starts a session")
        if kind == "leaves another":
            os._exit(7)
        time.sleep(600)
    if kind == "floods a line":
        while True:
            os.write(int(connection), b"x" * 65536)
    if kind == "floods lines":
        while True:
            os.write(int(connection), b'{"id": "0", "reward": 1}\\n' * 1000)
    if kind == "prints":
        print("y" * 200_000)
    if kind == "exits":
        print("no more of this", flush=True)
        os._exit(7)
    if kind == "raises":
        raise ZeroDivisionError("mine")
    if kind == "nests":
        os.write(int(connection), b"[" * 100_000 + b"\\n")
        time.sleep(600)
    if kind == "nan":
        return float("nan")
    if kind == "environment":
        return {name: 1.0 for name in os.environ}, {"pid": os.getpid()}
    if kind == "says more":
        os.write(int(connection), b'{"id": "0", "reward": 5}\\n')
    return {"a": 1.0, "b": row["value"]}, {"base_url": base_url + api_key + model, "kwargs": kwargs, "pid": os.getpid()}

serve(agent)
"""


@pytest.fixture
def settings(tmp_path: Path) -> ClientCommand:
    shutil.copy(ROOT / "generation" / "rollouts" / "elsewhere" / "hotbunk_client.py", tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    command = [sys.executable, str(tmp_path / "agent.py")]
    return ClientCommand(command, 1, {"MINE": "1"}, {"looks": 2}, tmp_path / "clients.log")


def use(settings: ClientCommand, work: Callable[[ClientProcesses], Awaitable[Any]]) -> Any:
    """Return the result of `work` with a pool, which is closed afterwards and must leave no process."""

    async def within() -> Any:
        pool = ClientProcesses(settings)
        try:
            async with asyncio.timeout(300):
                return await work(pool)
        finally:
            await pool.aclose()

    result = asyncio.run(within())
    wait_until(lambda: not processes_of(settings.command[1]), 30)
    return result


def processes_of(word: str) -> list[psutil.Process]:
    matches = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            matches += [process] if word in process.cmdline() else []
    return matches


def ask(pool: ClientProcesses, kind: str = "good", **row: Any) -> Awaitable[Scored]:
    return pool.run("http://localhost/", "key", "policy", {"kind": kind, "value": 0.5, **row})


def test_a_process_serves_one_episode_after_the_other(settings: ClientCommand) -> None:
    async def work(pool: ClientProcesses) -> list[Scored]:
        return [await ask(pool, value=float(value)) for value in range(3)]

    answers = use(settings, work)
    assert [answer.reward for answer in answers] == [{"a": 1.0, "b": float(value)} for value in range(3)]
    assert [answer.metrics["base_url"] for answer in answers] == ["http://localhost/keypolicy"] * 3
    assert answers[0].metrics["kwargs"] == {"looks": 2}
    assert len({answer.metrics["pid"] for answer in answers}) == 1


def test_the_environment_of_a_client_process_has_only_the_variables_it_needs(
    settings: ClientCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "RANK", "MASTER_ADDR", "WANDB_API_KEY", "HOTBUNK_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    names = set(use(settings, lambda pool: ask(pool, "environment")).reward)
    assert names - {"PATH", "HOME", "LANG", "LC_CTYPE", "NO_PROXY", "no_proxy"} == {
        "CUDA_VISIBLE_DEVICES",
        "HOTBUNK_MESSAGES",
        "MINE",
    }


def test_at_most_one_episode_a_worker_runs_at_a_time(settings: ClientCommand) -> None:
    several = ClientCommand(settings.command, 3)

    async def work(pool: ClientProcesses) -> list[Scored]:
        return list(await asyncio.gather(*(ask(pool) for _ in range(9))))

    assert len({answer.metrics["pid"] for answer in use(several, work)}) == 3


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("floods a line", "sent a line of more than"),
        ("floods lines", "answered with another id than that of its question"),
        ("exits", "ended with exit code 7 before it answered; it last printed: no more of this"),
        ("leaves another", "ended with exit code 7 before it answered"),
        ("nests", "sent a line that is not JSON"),
        ("raises", "the client reports an error: ZeroDivisionError: mine"),
        ("hangs", ""),
        ("answers late", ""),
        ("starts another", ""),
        ("starts a session", ""),
    ],
)
def test_a_hostile_client_costs_its_episode_only(
    settings: ClientCommand, monkeypatch: pytest.MonkeyPatch, kind: str, sentence: str
) -> None:
    """The episodes before and after a hostile one, on the only worker, get their own answers."""
    monkeypatch.setattr(client_process, "LONGEST_LINE", 1 << 20)
    mark = f"mark {os.getpid()} {time.monotonic_ns()}"

    async def work(pool: ClientProcesses) -> None:
        assert (await ask(pool, value=1.0)).reward["b"] == 1.0
        if sentence:
            with pytest.raises(ClientError, match=sentence):
                await ask(pool, kind, mark=mark)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    await ask(pool, kind, mark=mark)
        assert (await ask(pool, value=2.0)).reward["b"] == 2.0

    use(settings, work)
    wait_until(lambda: not processes_of(mark), 30)


def test_an_answer_to_nothing_is_not_taken_for_the_next_episodes(settings: ClientCommand) -> None:
    async def work(pool: ClientProcesses) -> None:
        with pytest.raises(ClientError, match="answered with another id than that of its question"):
            await ask(pool, "says more")
        assert (await ask(pool, value=3.0)).reward["b"] == 3.0

    use(settings, work)


def test_output_goes_to_a_log_that_does_not_fill_the_disk(
    settings: ClientCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_process, "LONGEST_LOG", 100_000)

    async def work(pool: ClientProcesses) -> None:
        await ask(pool, "prints")
        await ask(pool, "prints")

    use(settings, work)
    assert settings.log is not None
    wait_until(lambda: settings.log is not None and settings.log.stat().st_size == 100_000, 30)


def test_a_command_that_cannot_serve_is_reported(tmp_path: Path) -> None:
    for command, sentence in (
        (
            [sys.executable, "-c", "raise SystemExit('who am I?')"],
            "ended with exit code 1 before .*: who am I?",
        ),
        ([str(tmp_path / "absent")], "absent cannot be started: No such file"),
    ):
        with pytest.raises(ClientError, match=sentence):
            use(ClientCommand(command), ask)
