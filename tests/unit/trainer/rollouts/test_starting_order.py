"""Prompts whose last answers were longest begin first, and are answered as in any other order."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.thread import EngineThread
from generation.rollouts.episode import RolloutSettings, one_shot
from tests.support.scripted import ScriptedEngine
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.learning.answers import Answer
from trainer.rollouts.pool import Pool, Terms
from trainer.rollouts.step_batch import longest_answers
from trainer.run import checkpoint
from trainer.run.keeper import RunState, find_checkpoint

GROUP = 3
PROMPTS = [Prompt(100 + index, (5, index), {}) for index in range(6)]


def answered(lengths: dict[int, int] | None, place: int = 0) -> tuple[list[Answer], list[int]]:
    """Return the answers to a step of prompts from `place` on, and the prompts' ids in the order in which
    they began.
    """

    def drawn(prompt_ids: list[int], seed: int) -> list[int]:
        dice = random.Random(f"{prompt_ids}/{seed}")
        return [dice.randrange(100) for _ in range(dice.randrange(1, 30))]

    engine, thread = ScriptedEngine(drawn, max_num_seqs=1), EngineThread()
    engine.not_finite = None  # type: ignore[attr-defined]
    claims: list[str] = []
    store = SimpleNamespace(
        add=lambda key, count: claims.append(key) or len(claims), check=lambda keys: False
    )
    rewards = SimpleNamespace(labels=[], take_counts=dict, check_error_rate=lambda counts: None)
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    level = SimpleNamespace(function=one_shot, messages=lambda prompts: None, image_rules=None)
    pool = Pool(Leader(engine, thread), tokenizer, rewards, store, level)  # type: ignore[arg-type]
    settings = RolloutSettings(GROUP, SamplingSettings(1000), 0, seed=1, step=2)
    try:
        prompts = PROMPTS[place : place + 4]
        answers = pool.run(prompts, settings, Terms(60, lengths=lengths))
        if lengths is not None:
            lengths |= longest_answers(answers, prompts)
    finally:
        thread.close()
    return answers, [100 + ids[1] for ids in engine.prompts[::GROUP]]


def trajectories_of(answers: list[Answer]) -> list[object]:
    return [answer.trajectory for answer in answers]


def test_the_longest_begin_first_and_the_answers_stay_the_same() -> None:
    plain, in_order = answered(None)
    assert in_order == [100, 101, 102, 103]
    lengths = {100: 5, 101: 9, 103: 7}  # of 102 nothing is known yet
    sorted_answers, order = answered(lengths)
    assert order == [102, 101, 103, 100]
    assert trajectories_of(sorted_answers) == trajectories_of(plain)
    # Of each prompt the longest of its group is remembered, and decides from then on.
    longest = {
        prompt.id: max(
            len(a.trajectory.response_ids) for a in plain if a.trajectory and a.prompt_index == index
        )
        for index, prompt in enumerate(PROMPTS[:4])
    }
    assert lengths == longest
    again, order = answered(lengths)
    assert order == sorted(longest, key=lambda prompt: -longest[prompt]) and trajectories_of(
        again
    ) == trajectories_of(plain)


def test_episodes_that_failed_say_nothing_of_their_length() -> None:
    answers, _ = answered(None)
    sampled = [answer.sampled for answer in answers if answer.prompt_index == 1]
    for answer in answers:
        answer.error = "broken" * (answer.prompt_index == 0 or answer.sampled == max(sampled))
    longest = longest_answers(answers, PROMPTS)
    assert 100 not in longest and longest[101] == max(s for s in sampled if s != max(sampled))


@pytest.mark.parametrize("data", ["rows", "others"])
def test_a_checkpoint_keeps_the_lengths_of_its_data(tmp_path: Path, data: str) -> None:
    sections = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "run": {"output_dir": str(tmp_path), "name": "run"},
    }
    anyway = {"checkpoint": {"resume_anyway": ["data"]}}
    config = TrainConfig.model_validate(sections | anyway)
    state = RunState(step=1, prompts=4, lengths={3: 17, 12: 5})
    extra = {"state": json.loads(json.dumps(vars(state))), "identity": {"data": "rows"}}
    checkpoint.save(config.run.folder / "checkpoints", 1, {}, extra)
    _, resumed = find_checkpoint(config, {"data": data})
    assert resumed == (state if data == "rows" else RunState(step=1))
