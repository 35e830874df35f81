"""Rewards: the values of the built-in ones, refusals at start, and bad rewards, which fail only their own answer."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from generation.trajectory import Trajectory
from tests.conftest import ROOT
from tests.support.polling import wait_until
from trainer.config.schema import RewardConfig, RewardFunction
from trainer.errors import UserError
from trainer.rewards import RewardError, RewardPool, RewardResult, bind_rewards
from trainer.rewards.functions import FormatRegex, exact_match, math_verify, numeric_match
from trainer.rewards.loading import OFFERED

LOOP = asyncio.Runner()  # a pool is used on one event loop
ROGUE = textwrap.dedent('''
    import asyncio, os, signal, subprocess, sys, threading, time

    class Odd(BaseException):
        def __str__(self): raise SystemExit(1)

    def rogue(completion, *, row, finish_reason="", factor=1.0):
        """Does what the completion says."""
        if completion == "raise": raise ValueError("I will not " + "x" * 10_000)
        if completion == "raise odd": raise type("Local", (Exception,), {})("not picklable")
        if completion == "pow": return float(9 ** 9 ** 9 ** 9)
        if completion == "sleep": time.sleep(3600)
        if completion == "children": subprocess.Popen(["sleep", f"100{os.getppid()}"]); os.fork(); time.sleep(3600)
        if completion == "exit": os._exit(3)
        if completion == "exit 0": os._exit(0)
        if completion == "sys.exit": sys.exit(0)
        if completion == "interrupt": raise KeyboardInterrupt
        if completion == "cancelled": raise asyncio.CancelledError("a leaked scope")
        if completion == "own exception": raise Odd
        if completion.startswith("once "):
            path = completion.removeprefix("once ")
            if os.path.exists(path): return 0.25
            with open(path + ".new", "w") as file: file.write(str(os.getpid()))
            os.rename(path + ".new", path)
            time.sleep(3600)
        if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if completion == "print": print("y" * 10_000_000, flush=True); os.write(2, b"z" * 1_000_000)
        if completion == "recurse": return rogue.__call__(completion, row=row)
        if completion == "torch": return float("torch" in sys.modules)
        if completion == "pid": return float(os.getpid())
        if completion == "die later":
            threading.Timer(0.3, os._exit, (5,)).start()
        odd = {"nan": float("nan"), "inf": float("inf"), "large": 1e39, "larger": 10**400}
        odd |= {"none": None, "text": "1.0", "true": True}
        return odd.get(completion, factor)
''')
BAD = {
    "raise": "raised ValueError: I will not",
    "raise odd": "raised Local: not picklable",
    "pow": "took longer than",
    "sleep": "took longer than",
    "exit": "ended its process with exit code 3, as when it was asked before",
    "exit 0": "ended its process with exit code 0, as when it was asked before",
    "children": "took longer than",
    "sys.exit": "raised SystemExit",
    "interrupt": "raised KeyboardInterrupt",
    "cancelled": "raised CancelledError: a leaked scope",
    "own exception": "raised Odd: a message that cannot be read",
    "kill": "ended its process with exit code -9, as when it was asked before",
    "recurse": "raised RecursionError",
}
UNUSABLE = {
    "nan": "returned nan, which is not a finite float32",
    "inf": "returned inf, which is not a finite float32",
    "large": "returned 1e+39, which is not a finite float32",
    "larger": "returned inf, which is not a finite float32",
    "text": "returned str, which is not a number",
}


def children() -> list[psutil.Process]:
    """Return this process's descendants that a pool has started, watchers and workers."""
    workers = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            workers += [child] * ("--multiprocessing-fork" in child.cmdline())
    return workers


def grandchildren() -> list[psutil.Process]:
    """List processes that a reward function started and nobody ended, by their argument: parents may be gone."""
    mark = f"100{os.getpid()}"
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if mark in (process.info["cmdline"] or [])
    ]


@pytest.fixture(scope="module")
def rogue(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "rogue.py"
    path.write_text(ROGUE)
    return f"{path}:rogue"


@pytest.fixture(scope="module")
def pool(rogue: str) -> Iterator[RewardPool]:
    before = {child.pid for child in children()}
    functions = [
        RewardFunction(name=rogue, weight=2.0, kwargs={"factor": 0.5}),
        RewardFunction(name="exact_match"),
    ]
    instead: dict[str, Any] = {"failed": "error_reward", "error_reward": -1.0}
    with RewardPool(RewardConfig(functions=functions, timeout_s=1, workers=2, **instead)) as pool:
        yield pool
    assert {child.pid for child in children()} <= before, "the pool left processes behind"


def score(pool: RewardPool, *completions: str, row: dict | None = None) -> list[RewardResult]:
    async def all_of_them() -> list[RewardResult]:
        data_row = {"answer": "true"} if row is None else row
        calls = (
            pool.score(prompt="p", completion=text, row=data_row, finish_reason="stop")
            for text in completions
        )
        return await asyncio.wait_for(asyncio.gather(*calls), 60)

    return LOOP.run(all_of_them())


def test_good_rewards_are_weighted_and_summed(pool: RewardPool) -> None:
    right, wrong = score(pool, "true", "anything")
    assert (right.reward, right.parts, right.error) == (3.0, {"rogue": 1.0, "exact_match": 1.0}, "")
    assert (wrong.reward, wrong.parts) == (1.0, {"rogue": 0.5, "exact_match": 0.0})


def test_a_bad_reward_fails_only_its_own_answer(pool: RewardPool) -> None:
    pool.take_counts()
    before = len(psutil.Process().children())
    all_bad = BAD | UNUSABLE
    completions = [text for bad in all_bad for text in (bad, "good")]
    for text, result in zip(completions, score(pool, *completions), strict=True):
        if text == "good":
            assert (result.reward, result.error) == (1.0, ""), (
                f"a good answer paid for a bad one: {result}"
            )
        else:
            assert all_bad[text] in result.error, (text, result)
            assert (result.reward, len(result.error) < 500) == (-1.0, True)
            assert result.parts == {"exact_match": 0.0}
            assert result.unusable == (text in UNUSABLE)
    assert pool.take_counts() == {
        "reward/calls": 2.0 * len(all_bad),
        "reward/errors/rogue": float(len(all_bad)),
        "reward/errors/exact_match": 0.0,
    }
    assert pool.take_counts()["reward/calls"] == 0.0
    assert len(psutil.Process().children()) == before
    assert not grandchildren(), "what a reward function started outlives it"


def test_by_default_an_answer_whose_call_failed_leaves_its_group_by_name_and_kind(rogue: str) -> None:
    kinds = {
        "raise": "raised",
        "sleep": "timeout",
        "exit": "died",
        "kill": "died",
        "nan": "unusable",
        "good": "",
    }
    results = {}
    for failed in ("leave_out", "error_reward"):
        settings: dict[str, Any] = {"failed": failed, "error_reward": -1.0, "timeout_s": 1}
        with RewardPool(RewardConfig(functions=[RewardFunction(name=rogue)], **settings)) as pool:
            results[failed] = dict(zip(kinds, score(pool, *kinds), strict=True))
    for text, kind in kinds.items():
        for result in (results["leave_out"][text], results["error_reward"][text]):
            assert result.failures == ({"rogue": kind} if kind else {})
        assert results["leave_out"][text].unusable == bool(kind)
        assert results["error_reward"][text].unusable == (kind == "unusable")
    assert RewardConfig().failed == "leave_out"


HOSTILE = textwrap.dedent("""
    import json, os, sys, time

    def everywhere(body):
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                if os.readlink(f"/proc/self/fd/{number}").startswith(("socket:", "pipe:")): os.write(number, body)
            except OSError: pass

    def hostile(completion):
        way, _, number = completion.partition(" ")
        if way == "exits" and os.fork() == 0: time.sleep(0.05); sys.exit()
        if way == "returns" and os.fork() == 0: time.sleep(0.05); return -1.0
        if way == "raises" and os.fork() == 0: time.sleep(0.05); raise ValueError
        if way == "list": everywhere(b'\\0\\0\\0\\x15[1000000.0, "", true]')
        if way == "dict": everywhere(b'\\0\\0\\0\\x08{"a": 1}')
        if way == "text": everywhere(b'[1, "1000000.0", "", ""]')
        if way == "nothing": everywhere(b"\\0\\0\\0\\5hello")
        if way == "half": everywhere((4096).to_bytes(4, "big") + b"x"); time.sleep(3600)
        if way == "child":  # which knows everything, and is not the worker
            frame = sys._getframe()
            while "connection" not in frame.f_locals or "number" not in frame.f_locals: frame = frame.f_back
            if os.fork() == 0:
                try: frame.f_locals["connection"].send(json.dumps([frame.f_locals["number"], 1e6, "", ""]).encode())
                finally: os._exit(0)
            os.wait()
        return float(number)
""")


def test_processes_and_bytes_of_a_reward_function_answer_for_no_call(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    functions = [RewardFunction(name=f"{tmp_path}/hostile.py:hostile")]
    ways = ("exits", "returns", "raises", "list", "dict", "text", "nothing", "child")
    texts = [f"{way} {number}" for number, way in enumerate(ways * 3)]
    with RewardPool(RewardConfig(functions=functions, workers=2, timeout_s=30)) as pool:
        results = score(pool, *texts)
    assert [
        (text, result.reward, result.error) for text, result in zip(texts, results, strict=True)
    ] == [(text, float(number), "") for number, text in enumerate(texts)]


def test_half_a_message_is_waited_for_no_longer_than_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    functions = [RewardFunction(name=f"{tmp_path}/hostile.py:hostile")]
    with RewardPool(RewardConfig(functions=functions, workers=1, timeout_s=1)) as pool:
        late, good = score(pool, "half 1", "none 2")
    assert (late.failures, good.reward) == ({"hostile": "timeout"}, 2.0)


def test_processes_that_a_reward_function_started_end_with_its_worker(tmp_path: Path) -> None:
    """They end when a call is late and when the pool closes, although they have their own session and no parent."""
    (tmp_path / "starts.py").write_text(
        "import subprocess, time\n"
        "def starts(completion):\n"
        "    subprocess.run(['sh', '-c', f'setsid sleep {completion} & echo $!'])\n"
        "    time.sleep(3600 if completion.endswith('1') else 0)\n"
        "    return 1.0\n"
    )
    config = RewardConfig(
        functions=[RewardFunction(name=f"{tmp_path}/starts.py:starts")], workers=1, timeout_s=2
    )
    marks = [f"1{os.getpid()}{last}" for last in (1, 2)]

    def started() -> list[str]:
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [mark for mark in marks if ["sleep", mark] in commands]

    with RewardPool(config) as pool:
        assert score(pool, marks[0])[0].failures == {"starts": "timeout"}
        assert started() == []
        assert score(pool, marks[1])[0].reward == 1.0
        # setsid becomes sleep when the machine has time for it
        wait_until(lambda: started() == marks[1:])
    assert started() == []


def test_a_question_of_megabytes_is_asked_and_too_long_an_extract_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "class Long:\n"
        "    def __call__(self, completion, *, row): return float(len(completion) + len(row['text']))\n"
        "    def extract(self, completion): return completion\n"
        "def odd(completion): raise ValueError(chr(0xd800))\n"
    )
    functions = [RewardFunction(name=f"{tmp_path}/long.py:{name}") for name in ("Long", "odd")]
    with RewardPool(RewardConfig(functions=functions, workers=1, timeout_s=60)) as pool:
        (result,) = score(pool, "x" * 3_000_000, row={"text": "y" * 2_000_000})
        assert result.parts == {"Long": 5_000_000.0}
        assert result.error.encode() and "raised ValueError: ?" in result.error  # it can be written
        assert LOOP.run(pool.extract("z" * 100_000)) == "z" * 100_000
        assert LOOP.run(pool.extract("z" * 200_000)) is None
        assert "extracted a text of" in pool._first_errors["Long"]


def test_ten_megabytes_of_output_disturb_nobody(
    pool: RewardPool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert score(pool, "print")[0].error == ""
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_dies_between_answers_is_replaced(rogue: str) -> None:
    with RewardPool(
        RewardConfig(functions=[RewardFunction(name=rogue)], timeout_s=5, workers=1)
    ) as lonely:
        (dying,) = score(lonely, "pid")
        score(lonely, "die later")
        psutil.Process(int(dying.reward)).wait(timeout=120)
        (alive,) = score(lonely, "pid")
        assert alive.error == ""
        assert alive.reward != dying.reward


def test_a_call_whose_process_is_killed_from_outside_is_made_once_more(
    rogue: str, tmp_path: Path
) -> None:
    """The answer is the same when the process is killed during the call or while it loads."""
    with RewardPool(
        RewardConfig(functions=[RewardFunction(name=rogue)], timeout_s=60, workers=1)
    ) as lonely:
        psutil.Process(lonely._workers[0]._process.pid).kill()
        assert score(lonely, "good") == [RewardResult(1.0, {"rogue": 1.0})]
        marker = tmp_path / "pid"

        async def killed() -> RewardResult:
            call = lonely.score(prompt="", completion=f"once {marker}", row={}, finish_reason="stop")
            task = asyncio.ensure_future(call)
            while not marker.exists():  # noqa: ASYNC110  (another process makes it)
                await asyncio.sleep(0.02)
            os.kill(int(marker.read_text()), signal.SIGKILL)
            return await asyncio.wait_for(task, 60)

        assert LOOP.run(killed()) == RewardResult(0.25, {"rogue": 0.25})
        assert lonely.take_counts() == {"reward/calls": 2.0, "reward/errors/rogue": 0.0}


def test_functions_that_return_none_abstain_and_count_as_calls_without_errors(rogue: str) -> None:
    with RewardPool(RewardConfig(functions=[RewardFunction(name=rogue)], workers=1)) as alone:
        assert score(alone, "none", "good") == [
            RewardResult(0.0, {}, abstained=True),
            RewardResult(1.0, {"rogue": 1.0}),
        ]
        assert alone.take_counts() == {"reward/calls": 2.0, "reward/errors/rogue": 0.0}
    functions = [RewardFunction(name=rogue, weight=2.0), RewardFunction(name="exact_match", weight=0.5)]
    with RewardPool(RewardConfig(functions=functions, workers=1)) as several:
        assert score(several, "none") == [RewardResult(0.0, {"exact_match": 0.0})]
        (failed,) = score(several, "none", row={"answer": None})
    assert (failed.unusable, failed.abstained, failed.failures) == (
        True,
        False,
        {"exact_match": "raised"},
    )


def test_a_sum_that_is_too_large_cannot_be_a_reward(rogue: str) -> None:
    """Each term is finite: 1e35 times its weight, and two of 3e38 together."""
    large, product = 3e38, RewardFunction(name=rogue, weight=1e5, kwargs={"factor": 1e35})
    twice = [RewardFunction(name=rogue, kwargs={"factor": large})] * 2
    for functions, sentence in (
        ([product], f"rogue times its weight is {1e5 * 1e35}"),
        (twice, "the sum of all is 6e+38"),
    ):
        with RewardPool(RewardConfig(functions=functions, workers=1)) as pool:
            (result,) = score(pool, "good")
        assert (result.reward, result.unusable) == (0.0, True)
        assert result.error == f"{sentence}, which is not a finite float32"


def test_a_row_that_cannot_be_sent_is_counted(pool: RewardPool) -> None:
    (result,) = score(pool, "good", row={"answer": lambda: 0})
    assert result.reward == -1.0
    assert "cannot be given this row" in result.error


def test_functions_that_load_only_in_the_trainer_are_named(tmp_path: Path) -> None:
    path = tmp_path / "shy.py"
    path.write_text(
        "import multiprocessing\nassert multiprocessing.parent_process() is None\ndef shy(completion): return 1.0\n"
    )
    with RewardPool(RewardConfig(functions=[RewardFunction(name=f"{path}:shy")], workers=1)) as pool:
        results = score(pool, "good", "good")
    assert all("could not be loaded by its process" in result.error for result in results), results
    assert all("AssertionError" in result.error for result in results), results


def test_the_run_ends_only_past_the_error_rate(rogue: str) -> None:
    pool = RewardPool(
        RewardConfig(functions=[RewardFunction(name=rogue)], max_error_rate=0.1, timeout_s=5, workers=1)
    )
    counts = {"reward/calls": 100.0, "reward/errors/rogue": 10.0}
    pool.check_error_rate(counts)
    pool.check_error_rate({"reward/calls": 0.0, "reward/errors/rogue": 0.0})
    with pytest.raises(RewardError, match=r"'rogue' failed in 11 of 100 calls \(11%\).*on another rank"):
        pool.check_error_rate(counts | {"reward/errors/rogue": 11.0})
    with pool:
        score(pool, "nan", "raise")
    with pytest.raises(RewardError, match=r"'rogue' failed in 2 of 2 .*first error: it returned nan"):
        pool.check_error_rate(pool.take_counts())


def test_workers_do_not_load_torch_and_stay(pool: RewardPool) -> None:
    torch, *pids = score(pool, "torch", *["pid"] * 20)
    assert torch.parts["rogue"] == 0.0, "a reward worker imported torch"
    assert {result.parts["rogue"] for result in pids} <= {float(child.pid) for child in children()}


def test_workers_ignore_ctrl_c(pool: RewardPool) -> None:
    before = {child.pid for child in children()}
    for pid in before:
        os.kill(pid, signal.SIGINT)
    assert score(pool, "good")[0].error == ""
    assert {child.pid for child in children()} == before


def test_workers_die_with_their_parent(rogue: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, sys
        from trainer.config.schema import RewardConfig, RewardFunction
        from trainer.rewards import RewardPool
        async def main(pool):
            one = lambda text: pool.score(prompt="", completion=text, row={}, finish_reason="stop")
            print(*[int((await one("pid")).reward) for _ in range(9)], flush=True)
            await one("pow")
        if __name__ == "__main__":
            config = RewardConfig(functions=[RewardFunction(name=sys.argv[1])], timeout_s=100, workers=2)
            with RewardPool(config) as pool:
                asyncio.run(main(pool))
    """)
    )
    command = [sys.executable, str(script), rogue]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in set(parent.stdout.readline().split())]
        descendants = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(workers) == 2
    assert not psutil.wait_procs(descendants, timeout=120)[1]


@pytest.mark.parametrize(
    ("function", "completion", "answer", "reward"),
    [
        (exact_match, " 42\n", 42, 1.0),
        (exact_match, "42", "42 ", 1.0),
        (exact_match, "42.", "42", 0.0),
        (exact_match, "", "x", 0.0),
        (numeric_match, "so it is 1,234.50 in all", "1234.5", 1.0),
        (numeric_match, "12 apples, no, 13", 13, 1.0),
        (numeric_match, "13, no, 12", 13, 0.0),
        (numeric_match, "-5", "5", 0.0),
        (numeric_match, "the answer is 72.", "48/2 = <<48/2=24>>24\n#### 72", 1.0),
        (numeric_match, "nothing", 3, 0.0),
        (numeric_match, "1e3", 1000, 1.0),
        (numeric_match, ".5", 0.5, 1.0),
        (math_verify, r"Thus \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (math_verify, r"$1+x^2$", "x^2+1", 1.0),
        (math_verify, r"\boxed{43}", "42", 0.0),
        (math_verify, "no idea", "42", 0.0),
        (math_verify, r"\boxed{42}", r"$42$", 1.0),
    ],
)
def test_texts_numbers_and_expressions_are_compared(
    function: Callable[..., float], completion: str, answer: object, reward: float
) -> None:
    assert function(completion, answer=answer) == reward


def test_format_regex_matches_the_whole_completion() -> None:
    reward = FormatRegex(pattern=r"<think>.*</think>\d+")
    assert reward("<think>a\nb</think>7") == 1.0
    assert reward("<think>a</think>7 ") == reward("x<think>a</think>7") == 0.0


@pytest.mark.parametrize("function", [exact_match, numeric_match, math_verify])
def test_a_missing_answer_is_an_error_and_not_a_reward_of_zero(function) -> None:
    with pytest.raises(ValueError, match="no answer"):
        function("1", answer=None)


SIGNATURES = """
def bare(completion): return 1.0
def asks(completion, answer, finish_reason, **rest): return 1.0
def swallows(*args, **rest): return 1.0
def needs(completion, *, colour): return 1.0
def nothing(): return 1.0
def only_keywords(*, completion): return 1.0
def two(completion, other, /): return 1.0
async def later(completion): return 1.0
async def tools_used(completion, *, trajectory): return trajectory.metrics["tools/calls"]
number = 3
class Counting:
    def __init__(self, start): self.start = start
    def __call__(self, completion, *, row): return self.start
"""


@pytest.fixture
def signatures(tmp_path: Path) -> Path:
    path = tmp_path / "signatures.py"
    path.write_text(SIGNATURES)
    return path


@pytest.mark.parametrize(
    ("name", "kwargs", "keywords"),
    [
        ("bare", {}, set()),
        ("asks", {"more": 1}, set(OFFERED)),
        ("swallows", {}, set(OFFERED)),
        ("needs", {"colour": "red"}, set()),
        ("later", {}, set()),
        ("tools_used", {}, {"trajectory"}),
        ("Counting", {"start": 1.0}, {"row"}),
    ],
)
def test_signatures_that_fit_are_accepted(
    signatures: Path, name: str, kwargs: dict, keywords: set
) -> None:
    (reward,) = bind_rewards([(f"{signatures}:{name}", kwargs)])
    assert reward.keywords == keywords
    assert reward.label == name
    seen = Trajectory(0, 0, [1], metrics={"tools/calls": 1.0})
    offered = {
        "prompt": "p",
        "row": {},
        "answer": None,
        "finish_reason": "stop",
        "images": (),
        "trajectory": seen,
    }
    assert reward("text", offered | {"opened": ""}) == 1.0


def test_rewards_may_be_async_and_see_the_trajectory(signatures: Path) -> None:
    """Async functions run in the pool's own process, and get the trajectory only if they ask for it."""
    functions = [RewardFunction(name=f"{signatures}:{name}") for name in ("later", "tools_used")]
    seen = Trajectory(0, 0, [1], metrics={"tools/calls": 3.0})
    with RewardPool(RewardConfig(functions=functions, workers=1)) as pool:
        score = pool.score(prompt="", completion="", row={}, finish_reason="stop", trajectory=seen)
        result = LOOP.run(score)
    assert result == RewardResult(4.0, {"later": 1.0, "tools_used": 3.0})


TRL = """
def shares(prompts, completions, solution, completion_ids, factor=1.0, **columns):
    assert columns["level"] == ["hard"] and completion_ids == [[7, 8]] and len(prompts) == 1
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [factor * (text == answer) for text, answer in zip(texts, solution)]
async def later(completions): return [0.5 for _ in completions]
def not_for_this(completions, log_metric, environments=None): log_metric("n", 1); return [None]
def two(completions): return [1.0, 2.0]
def of_environments(completions, environments): return [e.score for e in environments]
"""


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]])
def test_functions_with_the_signature_of_trl_are_called_with_lists_of_one(
    tmp_path: Path, prompt: object
) -> None:
    file = tmp_path / "of_trl.py"
    file.write_text(TRL)
    specs = [(f"{file}:shares", {"factor": 0.5}), (f"{file}:later", {}), (f"{file}:not_for_this", {})]
    row = {"prompt": prompt, "solution": "2", "level": "hard", "answer": None}
    seen = Trajectory(0, 0, [1], [6, 7, 8], [0, 1, 1], [0.0] * 3, answer_start=1)
    offered = {
        "prompt": "rendered",
        "row": row,
        "answer": None,
        "finish_reason": "stop",
        "trajectory": seen,
    }
    bound = bind_rewards(specs)
    assert [reward("2", offered) for reward in bound] == [0.5, 0.5, None]
    assert [reward("3", offered) for reward in bound] == [0.0, 0.5, None]
    assert ["trajectory" in reward.keywords for reward in bound] == [True, False, False]
    with pytest.raises(ValueError, match="2 rewards for one completion"):
        bind_rewards([(f"{file}:two", {})])[0]("2", offered)
    for name, kwargs in (("of_environments", {}), ("later", {"colour": 1})):
        with pytest.raises(UserError, match="get_reward|takes no argument 'colour'"):
            bind_rewards([(f"{file}:{name}", kwargs)])


def test_rewards_that_trl_ships_give_here_what_they_give_there() -> None:
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    (bound,) = bind_rewards([("trl.rewards:think_format_reward", {})])
    row = {"prompt": [{"role": "user", "content": "?"}]}
    for text in ("<think>so</think>\nyes", "yes"):
        theirs = rewards.think_format_reward(completions=[[{"role": "assistant", "content": text}]])
        assert bound(text, {"prompt": "?", "row": row, "opened": ""}) == theirs[0]


def test_a_name_alone_is_a_reward_function() -> None:
    config = RewardConfig.model_validate(
        {"functions": ["exact_match", {"name": "numeric_match", "weight": 0.5}]}
    )
    assert config.functions == [
        RewardFunction(name="exact_match"),
        RewardFunction(name="numeric_match", weight=0.5),
    ]


@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        ("needs", {}, "asks for 'colour'"),
        ("bare", {"colour": 1}, "takes no argument 'colour'"),
        ("asks", {"row": 1}, "may not set 'row'"),
        ("nothing", {}, "must take the completion"),
        ("only_keywords", {}, "must take the completion"),
        ("two", {}, "asks for 'other'"),
        ("number", {}, "int, not a function"),
        ("Counting", {}, "cannot be set up"),
        ("Countin", {}, "did you mean Counting"),
    ],
)
def test_signatures_that_do_not_fit_are_named(
    signatures: Path, name: str, kwargs: dict, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        bind_rewards([(f"{signatures}:{name}", kwargs)])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["f", "f", "f_2"], ["f", "f_2", "f_2_2"]),
        (["f", "f_2", "f"], ["f", "f_2", "f_3"]),
        (["f_2", "f", "f", "f"], ["f_2", "f", "f_3", "f_4"]),
    ],
)
def test_labels_are_numbered_until_they_are_free(
    tmp_path: Path, names: list[str], labels: list[str]
) -> None:
    for number, name in enumerate(names):
        (tmp_path / f"m{number}.py").write_text(f"def {name}(completion): return {10.0**number}\n")
    functions = [
        RewardFunction(name=f"{tmp_path}/m{number}.py:{name}") for number, name in enumerate(names)
    ]
    with RewardPool(RewardConfig(functions=functions, workers=1, timeout_s=60)) as pool:
        assert pool.labels == labels
        assert score(pool, "any")[0].reward == sum(10.0**number for number in range(len(names)))


@pytest.mark.parametrize("name", ["mean", "std", "errors"])
def test_a_function_that_would_replace_a_figure_of_the_run_is_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "r.py").write_text(f"def {name}(completion): return 1.0\n")
    with pytest.raises(
        UserError, match=rf"r.py:{name}' would replace the run's own figure reward/{name}: rename"
    ):
        bind_rewards([(f"{tmp_path}/r.py:{name}", {})])


def test_a_function_used_twice_has_two_labels() -> None:
    specs = [("format_regex", {"pattern": "a"}), ("exact_match", {}), ("format_regex", {"pattern": "b"})]
    assert [reward.label for reward in bind_rewards(specs)] == [
        "format_regex",
        "exact_match",
        "format_regex_2",
    ]
