"""The rollout section of a recipe: its functions are loaded before any model, and a mistake is one sentence."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from generation.rollouts.episode import one_shot
from generation.trajectory import Trajectory
from tests.support.learning_steps import as_answers
from tests.support.recipes import make_config
from tests.support.scripted import merging_tokenizer
from tests.support.small_tokenizer import small_tokenizer
from trainer.config.checks import find_problems
from trainer.config.schema import RewardConfig, TrainConfig
from trainer.data import Prompt
from trainer.errors import UserError
from trainer.learning.answer_rows import answer_rows, failure_lines
from trainer.learning.groups import MiniBatch, make_groups, to_sample
from trainer.learning.metrics import rollout_metrics
from trainer.learning.policy_loss import PolicyLoss
from trainer.rewards import RewardPool, RewardResult
from trainer.rewards.loading import TAKEN
from trainer.rollouts.level import RolloutLevel
from trainer.rollouts.pool import Pool, RolloutError, check_failures
from trainer.types import Outputs

TOKENIZER = merging_tokenizer()
CODE = '''
from generation.trajectory import Trajectory

number = 3
def add(x: int, y: int) -> int:
    """The sum."""
    return x + y
def swallows(*rest): ...
async def own(llm, row, sampling, *, bonus=0.0): return llm.trajectory(reward=bonus)
class Loop:
    def __init__(self, bonus): self.bonus = bonus
    async def run(self, llm, row, sampling): return llm.trajectory(reward=self.bonus)
class Game:
    def reset(self, **row): return None
    def move(self, to: str) -> str: return to
class Resetless: ...
class Sampler:
    def __call__(self, llm, prompts, sampling_params): return llm.generate(prompts, sampling_params)
async def visit(base_url, api_key, model, row): return 1.0
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def config(**rollout: Any) -> TrainConfig:
    reward = {"functions": rollout.pop("functions", [{"name": "exact_match"}])}
    return make_config(rollout=rollout, reward=reward)


def plan(**rollout: Any) -> RolloutLevel:
    return RolloutLevel(config(**rollout), TOKENIZER)


def test_levels_are_chosen_by_import_string(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(code.parent)
    assert plan().function is one_shot and plan().messages([Prompt(0, (1,), {"prompt": "x"})]) is None
    for spec in (f"{code}:own", "mine:own"):
        function = plan(custom=spec, kwargs={"bonus": 2.0}).function
        assert function is not None
        handle = SimpleNamespace(trajectory=lambda **fields: Trajectory(0, 0, [1], **fields))
        assert asyncio.run(function(handle, {}, None)).reward == 2.0  # type: ignore[arg-type]
    assert plan(custom=f"{code}:Loop", kwargs={"bonus": 1.0}).function is not None
    sampler = plan(sampler=f"{code}:Sampler")
    assert sampler.function is None and sampler.sampler is not None
    assert plan(client=f"{code}:visit").function is not None
    with_tools = plan(tools=[f"{code}:add"], environment=f"{code}:Game")
    assert [s["function"]["name"] for s in with_tools.data.chat_template_kwargs["tools"]] == [
        "add",
        "move",
    ]
    assert plan(tools=[f"{code}:add"], describe_tools=False).data.chat_template_kwargs == {}
    assert plan(tools=[f"{code}:add"], tool_parser="inline").function is not None
    messages = with_tools.messages([Prompt(0, (1,), {"prompt": "x"})])
    assert messages == [[{"role": "user", "content": "x"}]]


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        ({"custom": "no.such.module:own"}, "there is no module no: install the package"),
        ({"custom": "FILE:owm"}, "did you mean own"),
        ({"custom": "FILE:number"}, "is not a rollout: write `async def rollout"),
        ({"custom": "FILE:add"}, "is not a rollout: write `async def rollout"),
        ({"custom": "FILE:Loop"}, "rollout.custom: .*bonus"),
        ({"custom": "own"}, "write pkg.mod:Name or path/file.py:Name"),
        ({"tools": ["FILE:number"]}, "rollout.tools: .* is int, not a function"),
        (
            {"tools": ["FILE:swallows"]},
            "rollout.tools: tool 'swallows' has 'rest', which cannot be passed",
        ),
        ({"tools": ["FILE:add", "FILE:add"]}, "rollout.tools: two tools are named 'add'"),
        ({"environment": "FILE:Resetless"}, "must be a class with a method reset"),
        ({"environment": "FILE:add"}, "must be a class with a method reset"),
        ({"sampler": "FILE:number"}, "rollout.sampler: .* is not a sampler"),
        ({"client": "FILE:number"}, "rollout.client: a client is a function"),
    ],
)
def test_unusable_functions_of_a_recipe_are_named(
    code: Path, rollout: dict[str, Any], reason: str
) -> None:
    named = {
        k: [s.replace("FILE", str(code)) for s in v] if k == "tools" else v.replace("FILE", str(code))
        for k, v in rollout.items()
    }
    with pytest.raises(UserError, match=reason) as caught:
        plan(**named)
    assert "\n" not in str(caught.value)


def test_a_rate_of_a_tool_that_does_not_exist_is_refused(code: Path) -> None:
    plan(tools=[f"{code}:add"], tool_rates={"add": 5})
    with pytest.raises(
        UserError, match="rollout.tool_rates: there is no tool 'sub'; the tools are: add"
    ):
        plan(tools=[f"{code}:add"], tool_rates={"sub": 5})
    with pytest.raises(UserError, match="rollout.tool_rates: there is no tool 'sub'"):
        plan(environment=f"{code}:Game", tool_rates={"move": 2, "sub": 5})


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        ({"custom": "a:b", "sampler": "c:d"}, "rollout.custom and rollout.sampler are both set"),
        ({"tools": ["a:b"], "client": "c:d"}, "rollout.client calls its tools itself"),
        ({"kwargs": {"a": 1}}, "only environment, custom, sampler or client take them"),
        (
            {"environment": "a:b", "tool_parser": "inline"},
            "works with rollout.tools only: rollout.environment",
        ),
        ({"tool_error": "oops"}, "must have {error}"),
        (
            {"tools": ["a:b"], "inline_tags": {"end": "!"}},
            "rollout.inline_tags is set, but rollout.tool_parser is not",
        ),
        (
            {"tools": ["a:b"], "tool_parser": "inline", "inline_tags": {"start": "!", "end": "!"}},
            "start and end are both '!': set two different tags",
        ),
    ],
)
def test_combinations_that_mean_nothing_are_refused(rollout: dict[str, Any], reason: str) -> None:
    (problem,) = problems("rollout.", **rollout)
    assert reason in problem
    assert problems("rollout.", environment="a:b", tools=["c:d"], kwargs={"a": 1}) == []
    # As a run's config.yaml has it, defaults and all
    written = config(tools=["c:d"]).model_dump()["rollout"]
    assert problems("rollout.", **written) == []


def test_a_reward_for_failures_is_refused_where_these_are_left_out() -> None:
    def about(**reward: Any) -> list[str]:
        sections = {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "reward": {"functions": ["exact_match"]} | reward,
        }
        return [
            p
            for p in find_problems(TrainConfig.model_validate(sections), "train")
            if p.startswith("reward.")
        ]

    (problem,) = about(error_reward=-1)
    assert problem == (
        "reward.error_reward is -1, but reward.failed is leave_out: "
        "set reward.failed to error_reward, or leave error_reward out"
    )
    assert about(error_reward=-1, failed="error_reward") == about(failed="leave_out") == []


def test_a_custom_rollout_needs_no_reward_function() -> None:
    assert problems("reward.", environment="a:b", functions=[]) == []
    assert "reward.functions is empty" in problems("reward.", functions=[])[0]


def problems(about: str, **settings: Any) -> list[str]:
    return [
        problem for problem in find_problems(config(**settings), "train") if problem.startswith(about)
    ]


def test_rewards_of_episode_and_functions_add_up_and_functions_see_the_last_answer() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer("callTOOLfinal", add_special_tokens=False)["input_ids"]
    done = Trajectory(
        0, 0, [4], ids, [1] * 4 + [0] * 4 + [1] * 5, [-1.0] * 13, answer_start=8, reward=0.5
    )
    done.reward_parts = {"environment": 0.5}

    class Scores:
        labels = ("mine",)

        async def score(self, **seen: Any) -> Any:
            assert seen["completion"] == "final" and seen["trajectory"] is done
            return RewardResult(2.0, {"mine": 2.0})

    pool = Pool(None, tokenizer, Scores(), None, plan())  # type: ignore[arg-type]
    asyncio.run(pool.score(done, Prompt(0, (4,), {})))
    assert done.reward == 2.5 and done.reward_parts == {"environment": 0.5, "mine": 2.0}
    assert done.text == "callTOOLfinal"


@pytest.mark.parametrize(
    ("rollout_reward", "result", "sentence"),
    [
        (
            0.0,
            RewardResult(-1.0, {}, "mine returned nan, which is not a finite float32", True),
            "reward: mine returned nan",
        ),
        (
            3e38,
            RewardResult(1e38, {"mine": 1e38}),
            "the episode's own reward is 4e+38, which is not a finite float32",
        ),
        (0.0, RewardResult(-1.0, {}, "mine took longer than reward.timeout_s=1"), ""),
    ],
)
def test_an_episode_whose_reward_cannot_be_learned_from_has_failed(
    rollout_reward: float, result: RewardResult, sentence: str
) -> None:
    """A reward function that fails to answer is another case: the recipe sets its reward."""

    class Scores:
        labels = ("mine",)

        async def score(self, **seen: Any) -> Any:
            return result

    done = Trajectory(0, 0, [4], [5], [1], [-1.0], reward=rollout_reward)
    pool = Pool(None, small_tokenizer(), Scores(), None, plan())  # type: ignore[arg-type]
    asyncio.run(pool.score(done, Prompt(0, (4,), {})))
    assert sentence in done.error and bool(sentence) == bool(done.error)
    assert (done.reward, done.finish_reason) == ((0.0, "error") if sentence else (-1.0, "stop"))


FAILING = """
import os, time
def checks(completion, row):
    way = row["way"]
    if way == "late": time.sleep(3600)
    if way == "raises": raise ValueError("no verdict")
    if way == "dies": os._exit(3)
    return float("nan") if way == "nan" else 1.0
"""
WAYS = {"late": "timeout", "raises": "raised", "dies": "died", "nan": "unusable", "right": ""}


@pytest.mark.parametrize("failed", ["leave_out", "error_reward"])
def test_an_answer_whose_reward_failed_is_counted_named_and_left_out_of_its_group(
    tmp_path: Path, failed: str
) -> None:
    (tmp_path / "f.py").write_text(FAILING)
    settings = {
        "functions": [f"{tmp_path}/f.py:checks"],
        "timeout_s": 2,
        "failed": failed,
        "error_reward": -1.0,
    }
    tokenizer = small_tokenizer()
    done = [Trajectory(0, n, [4], [5], [1], [-1.0], reward=0.25) for n in range(len(WAYS))]
    with RewardPool(RewardConfig.model_validate(settings)) as pool:
        pool = Pool(None, tokenizer, pool, None, plan())  # type: ignore[arg-type]

        async def judge() -> None:
            for trajectory, way in zip(done, WAYS, strict=True):
                await pool.score(trajectory, Prompt(0, (4,), {"way": way}))

        asyncio.run(judge())
    answers = as_answers(done)
    check_failures(answers, 0.0)  # which is about other failures: reward.max_error_rate bounds these
    kept = [WAYS[way] for answer, way in zip(answers, WAYS, strict=True) if not answer.error]
    assert kept == ([""] if failed == "leave_out" else ["timeout", "raised", "died", ""])
    assert [answer.reward for answer in answers] == [
        0 if a.error else -0.75 if a.misjudged else 1.25 for a in answers
    ]
    ((*group,),) = make_groups(answers)
    assert [episode[-1].sample_index for episode in group] == (
        [4] if failed == "leave_out" else [0, 1, 2, 4]
    )
    figures = rollout_metrics(answers)
    counted = {f"reward/errors/checks/{kind}": 1.0 for kind in WAYS.values() if kind}
    assert {key: figures[key] for key in figures if key.startswith("reward/errors")} == counted | {
        "reward/errors": 4.0
    }
    assert figures["rollout/failed"] == len(done) - len(kept)
    (line,) = failure_lines(answers, figures)
    assert line == (
        "rewards failed on 4 answers (checks/died 1, checks/raised 1, checks/timeout 1, checks/unusable 1), "
        f"{5 - len(kept)} of which are left out; the first: checks took longer than reward.timeout_s=2"
    )
    rows = answer_rows(answers, [Prompt(0, (4,), {})], tokenizer)
    errors = [row["error"] for row in rows]
    assert [
        "checks took longer" in errors[0],
        "no verdict" in errors[1],
        "exit code 3" in errors[2],
    ] == [True] * 3
    assert "returned nan" in errors[3] and errors[4] == ""


TASKS = """
def plain(completion, *, row): return None if "plain" in row["abstains"] else 0.5
def trl(completions, abstains, **columns): return [None if "trl" in names else 2.0 for names in abstains]
"""


def test_an_answer_from_which_all_functions_abstain_leaves_its_group(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(TASKS)
    settings = {
        "functions": [f"{tmp_path}/f.py:plain", {"name": f"{tmp_path}/f.py:trl", "weight": 0.25}],
        "workers": 1,
    }
    tokenizer = small_tokenizer()
    abstains = ["", "plain", "trl", "plain trl", "plain trl"]
    done = [Trajectory(0, sample, [4], [5], [1], [-1.0]) for sample in range(len(abstains))]
    done[4].reward_parts = {"environment": 0.0}  # a reward of its own, so nothing is missing
    with RewardPool(RewardConfig.model_validate(settings)) as rewards:
        pool = Pool(None, tokenizer, rewards, None, plan())  # type: ignore[arg-type]

        async def judge() -> None:
            for trajectory, names in zip(done, abstains, strict=True):
                await pool.score(trajectory, Prompt(0, (4,), {"abstains": names, "prompt": "?"}))

        asyncio.run(judge())
        assert rewards.take_counts() == {
            "reward/calls": 5.0,
            "reward/errors/plain": 0.0,
            "reward/errors/trl": 0.0,
        }
    answers = as_answers(done)
    check_failures(answers, 0.0)
    assert [answer.reward for answer in answers] == [0.5 + 0.5, 0.5, 0.5, 0.0, 0.0]
    ((*group,),) = make_groups(answers)
    assert [episode[-1].sample_index for episode in group] == [0, 1, 2, 4]
    figures = rollout_metrics(answers)
    rewards_of_judged = [1.0, 0.5, 0.5, 0.0]
    mean = sum(rewards_of_judged) / 4
    deviation = (sum((reward - mean) ** 2 for reward in rewards_of_judged) / 4) ** 0.5
    expected = {
        "mean": mean,
        "std": deviation,
        "errors": 0,
        "abstained": 1,
        "plain": 0.5,
        "trl": 2.0,
        "environment": 0.0,
    }
    assert {key: figures[f"reward/{key}"] for key in expected} == pytest.approx(expected)
    assert figures["rollout/failed"] == 0
    rows = answer_rows(answers, [Prompt(0, (4,), {})], tokenizer)
    assert [(row["reward"], row["error"]) for row in rows] == [
        (1.0, ""),
        (0.5, ""),
        (0.5, ""),
        (None, ""),
        (0.0, ""),
    ]
    assert list(failure_lines(answers, figures)) == []
    assert "abstained from every answer" in next(failure_lines(answers[3:4], {}))


def test_only_the_last_answer_of_an_episode_has_to_be_judged() -> None:
    first, last = (Trajectory(0, 0, [4], [5], [1], [-1.0], reward=1.0) for _ in range(2))
    first.abstained = True
    assert len(make_groups(as_answers([first, last]))) == 1
    last.abstained = True
    assert make_groups(as_answers([first, last])) == []


def test_figures_of_the_run_win_over_rewards_of_the_same_name() -> None:
    """A client or an environment may give its rewards any name."""
    parts = {"mean": -7.0, "std": 99.0, "errors": 5.0, "own": 3.0}
    figures = rollout_metrics(
        as_answers([Trajectory(0, n, [1], reward=1.0, reward_parts=parts) for n in range(4)])
    )
    assert [figures[f"reward/{name}"] for name in parts] == [1.0, 0.0, 0.0, 3.0]
    plain = rollout_metrics(as_answers([Trajectory(0, 0, [1])]))
    assert {key.partition("/")[2] for key in plain if key.startswith("reward/")} == set(TAKEN)


def test_failed_episodes_are_counted_once_whatever_they_sampled() -> None:
    def pieces(sample: int, count: int, error: str = "") -> list[Trajectory]:
        return [Trajectory(0, sample, [1], error=error) for _ in range(count)]

    many_of_one = [*pieces(0, 5, "ValueError: x"), *pieces(1, 1), *pieces(2, 1), *pieces(3, 1)]
    check_failures(as_answers(many_of_one), 0.25)
    assert rollout_metrics(as_answers(many_of_one))["rollout/failed"] == 1
    with pytest.raises(RolloutError, match="1 of 4 episodes failed"):
        check_failures(as_answers(many_of_one), 0.2)


def test_too_many_failed_episodes_end_the_run_with_the_first_error() -> None:
    failed = [Trajectory(0, i, [1], error=f"KeyError: {i}" if i < 2 else "") for i in range(10)]
    check_failures(as_answers(failed), 0.2)
    with pytest.raises(
        RolloutError, match=r"2 of 10 episodes failed, more than rollout.max_error_rate=0.1 .* 0"
    ):
        check_failures(as_answers(failed), 0.1)
    # An episode of many trajectories, one or all of which failed, is one that failed.
    failed += [Trajectory(0, 1, [1], error="") for _ in range(5)] + [
        Trajectory(0, 0, [1], error="again")
    ] * 5
    check_failures(as_answers(failed), 0.2)
    with pytest.raises(RolloutError, match=r"2 of 10 episodes failed"):
        check_failures(as_answers(failed), 0.19)


def test_figures_count_what_the_policy_sampled_and_what_tools_did() -> None:
    def done(sample: int, **metrics: float) -> Trajectory:
        return Trajectory(
            0, sample, [1], [7, 8, 9], [1, 0, 1], [-1.0, 0.0, -1.0], turns=2, metrics=dict(metrics)
        )

    figures = rollout_metrics(
        as_answers(
            [done(0, **{"tools/calls": 3.0, "tools/errors": 1.0}), done(1, **{"tools/calls": 1.0})]
        )
    )
    assert figures["rollout_tokens"] == 4 and figures["length/mean"] == 2 and figures["turns/mean"] == 2
    assert figures["tools/calls"] == 4 and figures["tools/failure_rate"] == 0.25
    assert "tools/calls" not in rollout_metrics(as_answers([done(0)]))


def test_tool_tokens_have_no_part_in_loss_kl_or_gradient() -> None:
    """Other log-probabilities of the trainer at tool tokens change nothing."""
    import torch

    from trainer.config.schema import AlgorithmConfig
    from trainer.learning.batching import micro_batches

    done = Trajectory(0, 0, [1, 2], [7, 8, 9, 10], [1, 0, 0, 1], [-1.0, 0.0, 0.0, -2.0])
    (batch,) = micro_batches([to_sample(done)], 100, 0, "cpu", count=1)
    batch.advantages = torch.full_like(batch.loss_mask, 0.7)
    step = MiniBatch([[[done]]], [batch], tokens=2, sequences=1)
    masked = batch.loss_mask == 0
    losses = []
    for seed in (0, 1):
        noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(seed))
        logprobs = torch.where(masked, -5 + noise, batch.engine_logprobs + 0.1).requires_grad_()
        batch.ref_logprobs = torch.where(masked, noise, batch.engine_logprobs)
        loss, sums = PolicyLoss(AlgorithmConfig(kl_coef=0.1), step, 4)(
            batch, Outputs(logprobs, torch.zeros_like(logprobs))
        )
        loss.backward()
        assert logprobs.grad is not None
        assert torch.all(logprobs.grad[masked] == 0) and torch.all(logprobs.grad[~masked] != 0)
        losses.append((loss.item(), sums["kl"].item(), sums["tokens"].item()))
    assert losses[0] == losses[1] and losses[0][2] == 2
