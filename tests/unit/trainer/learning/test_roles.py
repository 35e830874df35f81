"""Trajectories that bring a group and a reward of their own, as the roles of an episode do, are compared within it."""

import asyncio
from collections import Counter
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest
import torch

from generation.importing import load
from generation.rollouts.episode import custom_rollout
from generation.trajectory import Trajectory, check_rewards
from tests.conftest import ROOT
from tests.support.learning_steps import as_answers, make_batcher, on_ranks, random_trajectory
from tests.support.recipes import make_config
from tests.support.scripted import END, ScriptedEngine, merging_tokenizer, run
from trainer.data import Prompt
from trainer.learning.credit import assign_credit
from trainer.learning.groups import make_groups, prepare, split
from trainer.learning.metrics import rollout_metrics
from trainer.rewards.reward_pool import RewardResult
from trainer.rollouts.pool import Pool

NAMES = ["proposer", "solver/7", "solver/8", "", "solver/7", ""]
OWN = """
seen = []

def middle(rewards):
    seen.append(rewards.clone())
    return rewards - rewards.median()
"""


def step_of_roles(failed: bool = True) -> list[Trajectory]:
    """Three prompts with four episodes of six trajectories, two of which belong to their episode; one has failed."""
    generator = torch.Generator().manual_seed(11)
    step = []
    for prompt in range(3):
        for sample in range(4):
            for name in NAMES:
                step.append(random_trajectory(prompt, sample, generator))
                step[-1].group = name
    if failed:
        step[7].error = "failed"
    return step


def advantages_of(step: list[Trajectory], algorithm: dict[str, Any]) -> list[tuple[int, list[float]]]:
    """Return the place of each trained sequence in the step, and the advantages of its trainable tokens."""
    config = make_config(algorithm=algorithm)
    minibatches = prepare(split(make_groups(as_answers(step)), 2), config, make_batcher(config))
    assign_credit(minibatches, config, {})
    places = {tuple(t.prompt_ids + t.response_ids): place for place, t in enumerate(step)}
    found = []
    for batch in (batch for minibatch in minibatches for batch in minibatch.batches):
        rows = zip(
            batch.input_ids.tolist(), batch.lengths, batch.advantages, batch.loss_mask, strict=True
        )
        for ids, length, values, mask in list(rows)[: len(batch.rows)]:
            found.append((places[tuple(ids[:length])], values[mask.bool()].tolist()))
    return found


def compared(step: list[Trajectory]) -> dict[tuple[int, str], list[list[int]]]:
    """Return the places of those that are compared: of single trajectories, or of what an episode has without a name."""
    failed = {(t.prompt_index, t.sample_index) for t in step if t.error}
    groups: dict[tuple[int, str], list[list[int]]] = {}
    rests: dict[tuple[int, int], list[int]] = {}
    for place, t in enumerate(step):
        episode = (t.prompt_index, t.sample_index)
        if episode in failed:
            continue
        members = groups.setdefault((t.prompt_index, t.group), [])
        if t.group:
            members.append([place])
        elif episode in rests:
            rests[episode].append(place)
        else:
            rests[episode] = [place]
            members.append(rests[episode])
    return groups


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_role_is_compared_with_itself_and_each_token_is_trained_once(ranks: int) -> None:
    step = step_of_roles()
    parts = on_ranks(ranks, lambda: advantages_of(step, {"advantage": "leave_one_out"}))
    found = [pair for part in parts for pair in part]
    groups = compared(step)
    assert Counter(place for place, _ in found) == Counter(
        place for members in groups.values() for member in members for place in member
    )
    expected = {}
    for members in groups.values():
        rewards = [step[member[-1]].reward for member in members]
        for member, reward in zip(members, rewards, strict=True):
            baseline = (sum(rewards) - reward) / (len(rewards) - 1)
            expected |= dict.fromkeys(member, reward - baseline)
    assert len({len(members) for members in groups.values()}) > 1
    for place, values in found:
        assert len(values) == sum(step[place].loss_mask)
        assert values == pytest.approx([expected[place]] * len(values), abs=1e-5)


def test_an_advantage_of_ones_own_sees_the_rewards_of_a_role(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    step = step_of_roles(failed=False)
    found = dict(advantages_of(step, {"advantage": f"{file}:middle"}))
    seen = load(f"{file}:middle").__globals__["seen"]
    groups = compared(step)
    rewards = [[step[m[-1]].reward for m in members] for members in groups.values()]
    for got, wanted in zip(sorted(tensor[0].tolist() for tensor in seen), sorted(rewards), strict=True):
        assert got == pytest.approx(wanted)
    assert {tuple(tensor.shape) for tensor in seen} == {(1, 4), (1, 8)}
    for members, values in zip(groups.values(), rewards, strict=True):
        middle = sorted(values)[(len(values) - 1) // 2]
        for member, reward in zip(members, values, strict=True):
            for place in member:
                assert found[place] == pytest.approx([reward - middle] * len(found[place]), abs=1e-6)


def test_figures_go_by_role() -> None:
    step = step_of_roles()
    figures = rollout_metrics(as_answers(step))
    failed = {(t.prompt_index, t.sample_index) for t in step if t.error}
    for role in ("proposer", "solver"):
        sound = [t for t in step if (t.prompt_index, t.sample_index) not in failed]
        mine = [t for t in sound if t.group.startswith(role)]
        rewards = [t.reward for t in mine]
        assert figures[f"role/{role}/reward"] == pytest.approx(mean(rewards))
        assert figures[f"role/{role}/reward_std"] == pytest.approx(pstdev(rewards))
        assert figures[f"role/{role}/length"] == pytest.approx(mean(sum(t.loss_mask) for t in mine))
        assert figures[f"role/{role}/trajectories"] == len(mine)
    assert len([name for name in figures if name.startswith("role/")]) == 8


def test_a_trajectory_with_a_group_is_judged_even_if_all_functions_abstain() -> None:
    class Abstaining:
        labels = ("mine",)

        async def score(self, **_: Any) -> Any:
            return RewardResult(0.0, {}, abstained=True)

    pool = Pool(None, merging_tokenizer(), Abstaining(), None, None)  # type: ignore[arg-type]
    for group in ("", "solver"):
        done = Trajectory(0, 0, [4], [5], [1], [-1.0], group=group)
        asyncio.run(pool.score(done, Prompt(0, (4,), {})))
        assert done.abstained == (not group)
        assert len(make_groups(as_answers([done]))) == bool(group)


def test_a_group_that_is_no_text_fails_its_episode() -> None:
    with pytest.raises(ValueError, match="mine: the group is 7: give a name"):
        check_rewards(Trajectory(0, 0, [1], group=7), "mine")  # type: ignore[arg-type]


def test_the_example_proposes_and_solves() -> None:
    """Proposals are 12, 34, 12 and a word; 05+12 has one right answer in four, and 05+34 none."""
    tokenizer = merging_tokenizer()
    proposals = iter(["12", "34", "12", "no"])
    solutions = iter(["710", "17", "711", "71", *["93"] * 8])

    def answer(prompt: list[int], _: int) -> list[int]:
        text = tokenizer.decode(prompt)
        reply = next(proposals if "?" in text else solutions)
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], END]

    function = custom_rollout(
        load(f"{ROOT}/scripts/examples/proposer_and_solver.py:propose_and_solve"), {}
    )
    engine = ScriptedEngine(answer)
    done = run(engine, function, [[5, 6]], tokenizer, group=4, rows=[{"prompt": "05+12="}])
    counts = Counter((t.group, t.reward) for t in done)
    assert counts == {
        ("proposer", 0.75): 1,
        ("proposer", 1.0): 2,
        ("proposer", 0.0): 1,
        ("solver/12", 1.0): 1,
        ("solver/12", 0.0): 7,
        ("solver/34", 0.0): 4,
    }
    assert len({*engine.seeds}) == len(engine.seeds) == 16
    sizes = [len(group) for group in make_groups(as_answers(done))]
    assert sorted(sizes) == [4, 4, 8]
