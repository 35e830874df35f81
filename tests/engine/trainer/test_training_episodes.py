"""Episodes of tools, environments and functions from `hotbunk.Training`, and what it learns from them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from generation.rollouts.episode import PolicyLLM
from generation.trajectory import Trajectory
from hotbunk import Datum, Training, UserError
from tests.support.training_checks import assert_equal, gradients_of, make, plain_logprobs, plain_model

ENGINE = {"max_model_len": 512, "kv_cache_gib": 0.125}
STOPS = [token for token in range(270) if token % 4]  # so that few answers are cut
ROWS = [
    {"prompt": "one", "bonus": 1.0},
    {"prompt": "two", "bonus": 2.0},
    {"prompt": "three", "bonus": 3.0},
]


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "apart"])
def training(request: pytest.FixtureRequest, model: Path) -> Iterator[Training]:
    batch = {"tokens_per_micro_batch": 256, "share_prefixes": request.param, "shared_tokens_min": 1}
    rollout = {"max_turns": 3, "max_error_rate": 1.0}
    with make(
        model,
        engine=ENGINE,
        batch=batch,
        rollout=rollout,
        sampling={"max_tokens": 5, "stop_token_ids": STOPS},
    ) as training:
        yield training


class Echo:
    """An environment that says back, and pays its row's bonus for each of two turns."""

    def reset(self, bonus: float) -> None:
        self.bonus = bonus
        self.turns = 0

    def respond(self, answer: str) -> str | None:
        self.turns += 1
        return "again" if self.turns < 2 else None

    def get_reward(self) -> float:
        return self.bonus * self.turns


async def tree(llm: PolicyLLM, row: dict[str, Any], sampling: Any) -> list[Trajectory]:
    """A turn with two branches after it, each of which a message opens."""
    if row["bonus"] == 3.0 and llm.sample_index:
        raise ValueError("no tree today")
    root = llm.conversation()
    await root.sample(sampling)
    parts = [root.trajectory(reward=row["bonus"])]
    for number in range(2):
        branch = llm.conversation(root.ids)
        branch.add([{"role": "user", "content": f"way {number}"}])
        await branch.sample(sampling)
        parts.append(branch.trajectory(group="branch", reward=float(number)))
    return parts


def flat(groups: list[list[Trajectory]]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group]


def assert_engines_logprobs(training: Training, trajectories: list[Trajectory]) -> None:
    for score, trajectory in zip(training.logprobs(trajectories), trajectories, strict=True):
        mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
        got = score[-len(mask) :][mask]
        torch.testing.assert_close(got, torch.tensor(trajectory.logprobs)[mask], rtol=0, atol=1e-5)


def test_environments_and_single_answers_give_trajectories_that_are_data(training: Training) -> None:
    groups = training.episodes(ROWS, 2, environment=Echo)
    assert [[t.sample_index for t in group] for group in groups] == [[0, 1]] * 3
    assert [[t.reward for t in group] for group in groups] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
    for trajectory in flat(groups):
        assert trajectory.turns == 2 and 0 in trajectory.loss_mask
        assert trajectory.weight_version == training.version and not trajectory.error
        assert "again" in trajectory.text
    assert_engines_logprobs(training, flat(groups))
    template = training.tokenizer.apply_chat_template
    alone = training.episodes(ROWS, max_tokens=3)
    for row, [trajectory] in zip(ROWS, alone, strict=True):
        text = template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        assert trajectory.prompt_ids == training.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (
            trajectory.loss_mask == [1] * len(trajectory.response_ids) and len(trajectory.loss_mask) <= 3
        )
    figures = training.forward_backward(flat(alone), "ppo", advantages=[1.0, -1.0, 0.5])
    assert figures["gap_max"] < 1e-5
    training.optim_step(1e-3)
    assert_engines_logprobs(training, flat(training.episodes(ROWS)))


def test_tools_are_described_and_run(training: Training) -> None:
    def double(number: int) -> int:
        """Return twice the number.

        Args:
            number: any
        """
        return 2 * number

    groups = training.episodes(ROWS, tools=[double])
    assert all(
        "Return twice the number" in training.tokenizer.decode(t.prompt_ids) for t in flat(groups)
    )
    assert all(t.turns == 1 and not t.error for t in flat(groups))


def test_a_tree_of_turns_counts_once(training: Training, model: Path) -> None:
    training.load(training.save(model.parent / "tree"))
    groups = training.episodes(ROWS, 2, custom=tree)
    failed = [t for t in flat(groups) if t.error]
    assert [(t.prompt_index, t.sample_index, t.error) for t in failed] == [
        (2, 1, "ValueError: no tree today")
    ]
    with pytest.raises(UserError, match=r"datum 15 is of an episode that failed \(ValueError: no tree"):
        training.forward_backward(flat(groups), advantages=[1.0] * 16)
    sound = [t for t in flat(groups) if not t.error]
    assert_engines_logprobs(training, sound)
    advantages = [0.5 + number % 4 for number in range(len(sound))]
    figures = training.forward_backward(sound, "reinforce", advantages=advantages)
    # Each token that was sampled once, as the child of the ids before it
    training.export(model.parent / "tree/model")
    plain = plain_model(model.parent / "tree/model")
    total = torch.zeros(())
    count = 0
    for trajectory, advantage in zip(sound, advantages, strict=True):
        score = plain_logprobs(plain, Datum.of(trajectory))
        for place, one in enumerate(trajectory.loss_mask, len(trajectory.prompt_ids) - 1):
            if one:
                total = total - advantage * score[place]
                count += 1
    total.backward()
    assert figures["tokens"] == count == sum(sum(t.loss_mask) for t in sound)
    requests = {tuple(t.prompt_ids + t.response_ids) for t in sound}
    assert len(requests) == len(sound) == 15
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-5)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_equal(gradients_of(training), wanted, 1e-4)
    training._drop()


def test_a_call_repeated_after_a_load_gives_the_same_episodes(
    training: Training, tmp_path: Path
) -> None:
    training.save(tmp_path)
    first = flat(training.episodes(ROWS, 2, custom=tree))
    other = flat(training.episodes(ROWS, 2, custom=tree))
    training.load(tmp_path)
    assert flat(training.episodes(ROWS, 2, custom=tree)) == first != other


async def not_a_row(llm: PolicyLLM, row: dict[str, Any], sampling: Any) -> Trajectory:
    return Trajectory(0, 0, [5])


@pytest.mark.parametrize(
    ("rows", "keys", "sentence"),
    [
        ("text", {}, "rows is 'text': give a list of rows, each a dictionary"),
        (["text"], {}, "row 0 is 'text': give a dictionary"),
        ([{"prompt": "a"}, {"question": "b"}], {}, "row 1 has neither 'prompt' nor 'messages'"),
        ([{"prompt": "a " * 600}], {}, "prompt 0 has .* tokens: give at least one, and at most 511"),
        (ROWS, {"n": 0}, "n and max_tokens are .0, 5.: give whole numbers above 0"),
        (ROWS, {"custom": 7}, "rollout.custom: 7 is not a rollout"),
        (ROWS, {"custom": "nowhere:tree"}, "rollout.custom: "),
        (ROWS, {"environment": dict}, "rollout.environment: "),
        (ROWS, {"tools": [7]}, "rollout.tools: 7 is int, not a function"),
    ],
)
def test_bad_arguments_end_in_a_sentence(
    training: Training, rows: Any, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        training.episodes(rows, **keys)


def test_advantages_belong_to_trajectories(training: Training) -> None:
    [[trajectory]] = training.episodes(ROWS[:1])
    with pytest.raises(
        UserError, match="there are 2 advantages of 1 trajectories: give one number for each"
    ):
        training.forward_backward([trajectory], "ppo", advantages=[1.0, 2.0])
    with pytest.raises(UserError, match="advantages are those of trajectories: give a Datum its own"):
        training.forward_backward([Datum([5], [6])], "ppo", advantages=[1.0])
    with pytest.raises(UserError, match="datum 0 has no advantages, which this loss needs"):
        training.forward_backward([trajectory], "ppo")
