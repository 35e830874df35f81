"""Whole runs with real torchrun ranks, real engines and real signals. They are slow, so each test checks much."""

import gzip
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, TinyModel
from tests.support.forked import PYTHON
from tests.support.killed_run import REWARD, disturbed, draw, survived, unequal
from tests.support.real_run import Run, differences, write_recipe
from tests.support.rows import read_rows
from trainer.run import checkpoint
from trainer.run.screen import WIDTH


@pytest.fixture(scope="module")
def recipe(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return write_recipe(
        folder,
        tiny_model(),
        run={"steps": 6},
        checkpoint={"every": 2},
        eval={"every": 3},
        reward={"functions": [{"name": REWARD}]},
    )


@pytest.fixture(scope="module")
def side_by_side(recipe: Path) -> tuple[Run, Run]:
    """Two runs at the same time, which are only watched.

    One makes six steps on two ranks, with three evaluations; the other makes two steps with one engine for both ranks.
    """
    one_engine = ["--engine.tensor_parallel_size=2", "--run.steps=2", "--eval.every=0"]
    imports = recipe.parent / "imports"
    # first: it may wait for its server's imports
    one = Run(recipe, *one_engine, name="one-engine", preloaded=True)
    undisturbed = Run(recipe, "--run.profile", "[2, 3]", name="whole", imports=imports)
    undisturbed.watch_listening()
    for run in (undisturbed, one):
        assert run.wait() == 0, run.output()
    for run in (undisturbed, one):
        run.assert_gone()
    return undisturbed, one


@pytest.fixture(scope="module")
def undisturbed(side_by_side: tuple[Run, Run]) -> Run:
    """Return the undisturbed run of six steps."""
    return side_by_side[0]


@pytest.fixture(scope="module")
def overdue(recipe: Path) -> Run:
    """Return a run with an evaluation after each step, until an engine is stopped in the third step or later."""
    often = ["--eval.every=1", "--eval.samples=3", "--eval.temperature=1", "--eval.k=[1, 3]"]
    run = Run(
        recipe, *often, "--run.steps=100000", "--run.step_deadline_s=20", name="overdue", preloaded=True
    )
    try:
        run.wait_for_steps(3)
        run.engines()[0].send_signal(signal.SIGSTOP)
        assert run.wait(300) == 124, run.output()
        run.assert_gone()
    finally:
        run.kill_everything()
    return run


def test_a_run_writes_the_record_it_promises(undisturbed: Run) -> None:
    rows = undisturbed.rows()
    assert [row["train/step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert max(row["gap/max"] for row in rows[1:]) <= 1e-4
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["syncs_verified"] == 9  # six steps and three evaluations
    assert summary["max_logprob_gap"] == max(row["gap/max"] for row in rows[1:])
    assert summary["eval_reward_before"] == rows[0]["eval/reward"]
    assert summary["eval_reward_after"] == rows[6]["eval/reward"]
    assert all(row["throughput/update_tokens_per_s_per_device"] > 0 for row in rows[1:])
    assert not any("throughput/mfu" in row for row in rows)  # the CPU's peak is unknown
    trace = gzip.decompress((undisturbed.folder / "profile" / "steps_2_3.json.gz").read_bytes())
    recorded = {event["name"] for event in json.loads(trace)["traceEvents"]}
    assert recorded >= {"step 2", "step 3", "rollout", "update"} and not recorded & {"step 1", "step 4"}
    for name in ("config.yaml", "completions.jsonl", "model/model.safetensors", "model/tokenizer.json"):
        assert (undisturbed.folder / name).stat().st_size > 0


def test_an_undisturbed_run_prints_only_hotbunks_own_lines(side_by_side: tuple[Run, Run]) -> None:
    """The run has no profiler, which would print. It reports that its reward function leaves processes."""
    expected = re.compile(
        r"· |[╭│╰]|\s*\d/2 |\s*step +reward|\[hotbunk\] rank \d is gone; ended what it left behind: "
    )
    above, strange = "", []
    for line in side_by_side[1].output().splitlines():
        goes_on = above.startswith("· ") and len(above) > WIDTH - 40  # a line that was wrapped
        if line and not expected.match(line) and not goes_on:
            strange.append(line)
        above = line
    assert strange == []
    assert "forkse" not in side_by_side[1].output()  # the forkserver ends with the engines


def test_a_run_with_text_alone_imports_nothing_for_images(recipe: Path, undisturbed: Run) -> None:
    assert undisturbed.rows() and not (recipe.parent / "imports").exists()


def test_a_run_listens_on_loopback_alone(undisturbed: Run) -> None:
    assert list(undisturbed.listened) == ["start-up", "steps", "with a checkpoint"]
    for moment, addresses in undisturbed.listened.items():
        assert set().union(*addresses.values()) <= {"127.0.0.1", "::1"}, moment
        # The launcher, two ranks, two engines; and a process that holds its parent's socket between fork and exec.
        assert len(addresses) >= 5, moment
    assert "is open to the network" not in undisturbed.output()


def test_a_run_asked_to_end_resumes_and_equals_the_undisturbed_one(
    recipe: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is asked to end while a rollout hangs and the policy is offloaded: it gives up the step, and saves.

    Its checkpoint is damaged afterwards, so that the next start resumes from the one before. A rank of that start is
    killed, and the supervisor restarts the run.
    """
    monkeypatch.setenv("RESTARTS", "2")
    hanging = f"{ROOT}/tests/support/hanging_rollout.py:hangs_in_step_4"
    settings = ["--rollout.custom", hanging, "--policy.offload", "all", "--checkpoint.grace_s", "30"]
    asked = Run(recipe, *settings, name="broken", preloaded=True)
    asked.wait_for(lambda: "3/6 " in asked.output(), "step 3")
    asked.left_behind()
    asked.ranks()[1].send_signal(signal.SIGTERM)
    assert asked.wait() == 128 + signal.SIGTERM
    assert "[hotbunk] the run was interrupted by SIGTERM, exit code 143" in asked.output()
    assert asked.output().endswith("[hotbunk] not started again: the run was asked to end\n")
    assert (
        f"to resume from {asked.folder}/checkpoints/step_3, give the same command again"
        in asked.output()
    )
    assert re.search(
        rf"to try the model of step_3: \S*hotbunk generate {asked.folder}\n", asked.output()
    )
    asked.assert_gone()
    assert "rank 1: interrupted by SIGTERM" in asked.output()
    assert asked.rows()[-1]["memory/offloaded_gib"] > 0
    assert "asked to end: saved at step 3" in asked.output()  # no finished step is repeated
    assert (
        checkpoint.latest_complete(asked.folder / "checkpoints")
        == asked.folder / "checkpoints" / "step_3"
    )
    shards = asked.folder / "checkpoints" / "step_3" / "__1_0.distcp"
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    shards.write_bytes(content)
    resumed = Run(recipe, name="broken", preloaded=True)
    # This takes seconds
    resumed.wait_for(lambda: "starting 2 engine(s)" in resumed.output(), "start of the engines")
    resumed.ranks()[1].send_signal(signal.SIGKILL)
    assert resumed.wait() == 0, resumed.output()
    resumed.assert_gone()
    assert "rank 1: was ended by SIGKILL" in resumed.output()
    assert "exit code 137: starting again in 2 s, 1 restart left after that" in resumed.output()
    assert (
        "step_3 is damaged: __1_0.distcp is not what was written (SHA-256); skipped" in resumed.output()
    )
    assert "step_2, the newest sound checkpoint" in resumed.output()
    assert unequal(undisturbed, resumed) == []


PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = LLM(sys.argv[1], dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 25, enforce_eager=True)
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    print("ANSWERS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def test_a_zero_copy_run_learns_and_is_resumed_by_a_staged_one(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The dtype is bfloat16, in which master weights and weights differ; zero copy takes one rank. vLLM measures the KV cache."""
    recipe = write_recipe(
        tmp_path,
        tiny_model(),
        run={"steps": 3},
        policy={"dtype": "bfloat16"},
        engine={"plain_cpu_weights": True, "kv_cache_gib": None, "gpu_memory_utilization": 0.15},
        checkpoint={"every": 3},
        eval={"every": 3},
    )
    shared = Run(recipe, ranks=1, name="run", preloaded=True)
    assert shared.wait() == 0, shared.output()
    shared.assert_gone()
    assert (
        "sync.way is zero_copy, since one rank and its engine keep weights in the same layout"
        in shared.output()
    )
    copying = Run(
        recipe, "--sync.way", "staged", "--run.steps", "5", ranks=1, name="run", preloaded=True
    )
    assert copying.wait() == 0, copying.output()
    assert "as in the run's earlier sessions" not in shared.output()
    assert "for each worker of an engine, as in the run's earlier sessions" in copying.output()
    rows = copying.rows()
    assert [row["train/step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["sync/verified"] for row in rows] == [1, 2, 3, 5, 6, 8]
    assert all(row["gap/mean"] < 0.02 for row in rows[1:]) and all(
        row["grad_norm"] > 0 for row in rows[1:]
    )
    assert rows[3]["eval/reward"] != rows[0]["eval/reward"]


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "sync": "merged"}])
def test_a_run_by_pull_equals_a_staged_one_bit_for_bit(
    tiny_model: TinyModel, tmp_path: Path, lora: dict[str, object]
) -> None:
    """Weights are cast to bfloat16 on the way; the runs have an evaluation, a checkpoint and, in one case, adapters."""
    recipe = write_recipe(
        tmp_path,
        tiny_model(),
        run={"steps": 3},
        policy={"dtype": "bfloat16"},
        engine={"plain_cpu_weights": True},
        checkpoint={"every": 2},
        eval={"every": 3},
        lora=lora,
    )
    runs = [Run(recipe, "--sync.way", way, name=way, preloaded=True) for way in ("auto", "staged")]
    for run in runs:
        assert run.wait() == 0, run.output()
    assert "sync.way is pull, since the engine can read all shards here" in runs[0].output()
    for run in runs:
        run.assert_gone()
    first, second = runs
    assert first.comparable_rows() == second.comparable_rows() and len(first.rows()) == 4
    assert [row["sync/verified"] for row in first.rows()] == [
        row["sync/verified"] for row in second.rows()
    ]
    assert answers(first) == answers(second)
    exports = [(run.folder / "model" / "model.safetensors").read_bytes() for run in (first, second)]
    assert exports[0] == exports[1]


def test_plain_transformers_and_plain_vllm_answer_alike_with_the_export(undisturbed: Run) -> None:
    from transformers import AutoModelForCausalLM

    folder = undisturbed.folder / "model"
    prompts = [[14, 50, 77], [20, 21, 22, 23], [99, 98, 97, 120, 121]]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    expected = []
    for ids in prompts:
        answer = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=-1
        )
        expected.append(answer[0, len(ids) :].tolist())
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [*PYTHON, "-c", PLAIN_VLLM, str(folder), json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert answers, done.stderr[-3000:]
    assert json.loads(answers[0].removeprefix("ANSWERS ")) == expected


def test_two_runs_at_the_same_time_both_finish(side_by_side: tuple[Run, Run]) -> None:
    assert [json.loads((run.folder / "summary.json").read_text())["steps"] for run in side_by_side] == [
        6,
        2,
    ]


def test_a_tensor_parallel_engine_samples_what_single_engines_sample(
    side_by_side: tuple[Run, Run],
) -> None:
    """One scheduler serves the group, so ranks cannot diverge, and answers do not depend on how a model is sharded."""
    undisturbed, run = side_by_side
    assert [row["sync/verified"] for row in run.rows()] == [1, 2]
    assert max(row["gap/max"] for row in run.rows()) <= 1e-4
    assert answers(run) == answers(undisturbed)


def answers(run: Run) -> list[str]:
    """Return the answers of the first step."""
    rows = read_rows(run.folder / "completions.jsonl")
    return [row["text"] for row in rows if row["train/step"] == 1]


def test_evaluation_changes_nothing_in_training(overdue: Run, undisturbed: Run) -> None:
    rows = overdue.comparable_rows()[:3]
    assert [row["eval/pass@1"] <= row["eval/pass@3"] for row in rows] == [True] * 3
    lines = differences(undisturbed.comparable_rows()[1:3], rows[1:])
    assert [line for line in lines if " eval/" not in line and " sync/verified:" not in line] == []


def test_a_run_disturbed_at_random_equals_the_undisturbed_one_bit_for_bit(
    recipe: Path, undisturbed: Run
) -> None:
    """A reward worker, an engine and a guardian are killed, a rank is stopped for a while, a start is interrupted.

    The engine's weights are packed: with plain ones MKL's last bit depends on how many requests happen to be decoded
    together. tests/support/killed_run.py does more of this.
    """
    broken = disturbed(
        recipe, draw(kills=4, stops=1, seed=483), ranks=2, seed=0, name="disturbed", preloaded=True
    )
    assert broken.failures == []
    assert unequal(undisturbed, broken.run) == []
    outputs = [log.read_text() for log in recipe.parent.glob("disturbed-*.log")]
    assert (
        sum(
            "has ended: starting again, 2 of engine.restarts left in this hour" in output
            for output in outputs
        )
        == 1
    )


def test_a_supervised_run_survives_the_death_of_an_engine_and_of_the_launcher(
    recipe: Path, undisturbed: Run
) -> None:
    """`tests/support/killed_run.py --alone` kills forty times."""
    kills = [(2, "engine", "rollout", 0.05), (4, "launcher", "update", 0.0)]
    assert survived(recipe, kills, undisturbed, ranks=2, name="alone", preloaded=True) == []


def test_a_step_over_its_deadline_names_ranks_phases_and_stacks(overdue: Run) -> None:
    assert "exceeded a deadline, phase " in overdue.summary()[1]
    assert "exceeded a deadline" in overdue.output()
    for rank in (0, 1):
        assert f"rank {rank}: phase " in overdue.output()
    # The main thread of a rank was waiting there
    assert "generation/engine/thread.py" in overdue.output()
