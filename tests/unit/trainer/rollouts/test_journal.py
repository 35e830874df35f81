"""Answer stay on disk until a checkpoint contains their effect; and the choice of those that are sampled again."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from generation.trajectory import Trajectory
from tests.support.learning_steps import on_ranks
from tests.unit.trainer.rollouts.test_carried import Checks, Crew, config
from trainer.config.answer_age import check_slices
from trainer.config.schema import TrainConfig
from trainer.rollouts.journal import Journal
from trainer.rollouts.round import Order, Round

Steps = list[dict[tuple[int, int], Trajectory]]


def recipe(folder: Path, **sections: Any) -> TrainConfig:
    sections["checkpoint"] = {"rollouts": True} | sections.get("checkpoint", {})
    base = config(None, **sections)
    return base.model_copy(
        update={"run": base.run.model_copy(update={"output_dir": folder, "name": "run"})}
    )


class Session(Crew):
    """One start of a run, from step 0, whose rollouts also draw from the global generator."""

    def __init__(self, run_config: TrainConfig, store: HashStore | None = None) -> None:
        super().__init__(run_config)
        self.pool._store = store or HashStore()
        self.produce = Journal(self.source, run_config, {"data": "rows"}).produce

    def steps(self, count: int) -> Steps:
        results = []
        for _ in range(count):
            results.append(self.do().trajectories)
        return results


def run(run_config: TrainConfig, steps: int, ranks: int = 1) -> tuple[Steps, int]:
    """Return the steps of a session, of all ranks together, and the number of answers sampled for them."""
    store = HashStore()

    def one() -> tuple[Steps, int]:
        session, sampled = Session(run_config, store), [0]
        complete = session.engine.complete

        async def counted(*args: Any, **named: Any) -> Any:
            sampled[0] += 1
            return await complete(*args, **named)

        session.engine.complete = counted  # type: ignore[method-assign]
        try:
            return session.steps(steps), sampled[0]
        finally:
            session.close()

    results = on_ranks(ranks, one) if ranks > 1 else [one()]
    return [together([rank_steps for rank_steps, _ in results], index) for index in range(steps)], sum(
        n for _, n in results
    )


def together(rank_steps: list[Steps], index: int) -> dict[tuple[int, int], Trajectory]:
    """Return all ranks' trajectories of a step."""
    return {place: trajectory for steps in rank_steps for place, trajectory in steps[index].items()}


def files(run_config: TrainConfig) -> set[int]:
    """Return the steps that have a file in the journal."""
    return {int(file.name.partition(".")[0]) for file in (run_config.run.folder / "answers").iterdir()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_sampled_before_a_run_died_are_learned_from_when_it_resumes(
    tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, total = run(recipe(tmp_path / "straight"), 5, ranks)
    run_config = recipe(tmp_path / "broken")
    first, sampled = run(run_config, 3, ranks)
    assert sampled == total * 3 // 5 and files(run_config) == {1, 2, 3}
    again, sampled = run(run_config, 5, ranks)
    assert sampled == total * 2 // 5 and again == straight and first == straight[:3]
    assert "reused the kept answers of 3 steps; sampling continues in step 4" in capsys.readouterr().err


def other_key(run_config: TrainConfig) -> TrainConfig:
    return run_config.model_copy(update={"policy": run_config.policy.model_copy(update={"lr": 1.0})})


def torn(run_config: TrainConfig) -> TrainConfig:
    [file] = (run_config.run.folder / "answers").glob("2.rank_0")
    file.write_bytes(file.read_bytes()[:-5])
    return run_config


def of_another_rank(run_config: TrainConfig) -> TrainConfig:
    [file] = (run_config.run.folder / "answers").glob("2.rank_1")
    file.unlink()
    return run_config


def not_resumed(run_config: TrainConfig) -> TrainConfig:
    return run_config.model_copy(
        update={"checkpoint": run_config.checkpoint.model_copy(update={"resume": "none"})}
    )


@pytest.mark.parametrize(
    ("change", "reused"), [(other_key, 0), (torn, 1), (of_another_rank, 1), (not_resumed, 0)]
)
def test_steps_are_sampled_from_the_first_missing_journal_file_on(
    tmp_path: Path, change: Callable[[TrainConfig], TrainConfig], reused: int
) -> None:
    straight, total = run(recipe(tmp_path / "straight"), 4, ranks=2)
    run_config = recipe(tmp_path / "broken")
    run(run_config, 3, ranks=2)
    again, sampled = run(change(run_config), 4, ranks=2)
    assert again == straight and sampled == total * (4 - reused) // 4


def test_answers_that_a_checkpoint_contains_are_deleted(tmp_path: Path) -> None:
    run_config = recipe(tmp_path)
    session = Session(run_config)
    session.steps(3)
    saved = run_config.run.folder / "checkpoints" / "step_2"
    saved.mkdir(parents=True)
    (saved / "COMPLETE").touch()
    session.steps(1)
    session.close()
    assert files(run_config) == {3, 4}


def test_random_generators_have_the_states_they_had_after_the_answers(tmp_path: Path) -> None:
    """Tools and rewards in the rank's process may have drawn from them."""
    run_config = recipe(tmp_path)
    session = Session(run_config)
    score = session.pool.score
    session.pool.score = lambda *args: (random.random(), score(*args))[1]  # type: ignore[method-assign]
    session.steps(2)
    expected = random.random()
    session.close()
    again = Session(run_config)
    again.steps(2)
    again.close()
    assert random.random() == expected


def test_answers_that_are_cut_cannot_be_kept() -> None:
    [problem] = check_slices(config(8, checkpoint={"rollouts": True}))
    assert "checkpoint.rollouts keeps answers of whole steps" in problem


def test_answers_whose_reward_failed_are_kept_as_failed(tmp_path: Path) -> None:
    def fates(session: Session) -> list[dict[tuple[int, int], tuple[str, str]]]:
        session.pool._rewards = Checks()  # type: ignore[assignment]
        steps = session.steps(3)
        session.close()
        return [{place: (t.error, t.reward_error) for place, t in step.items()} for step in steps]

    run_config = recipe(tmp_path, rollout={"max_error_rate": 0.0})
    first, again = fates(Session(run_config)), fates(Session(run_config))
    assert first == again and any(error for step in again for error, _ in step.values())


class Recorded:
    """A source of empty rounds that records its calls, and which rounds were replayed in its place.

    A step's batch is no more than its rounds here.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def produce(self, order: Order) -> SimpleNamespace:
        self.calls.append(("produced", order.step))
        states = {5: f"{order.step}"}
        sampled = Round(order.step, order.version, position=order.position + 8, random_states=states)
        return SimpleNamespace(rounds=[sampled])

    def replayed(self, order: Order, rounds: list[Round], ahead: bool) -> SimpleNamespace:
        assert rounds[-1].random_states[5] == f"{rounds[-1].step}" and order.step == rounds[-1].step
        self.calls.append(("replayed, then ahead" if ahead else "replayed", rounds[-1].step))
        return SimpleNamespace(rounds=rounds)


def test_a_source_hears_which_steps_were_replayed_and_if_the_next_is_sampled(tmp_path: Path) -> None:
    """With remote engines the next step may have to be ordered ahead, and the engines' ranks go on from its states."""
    for steps, calls in (
        (3, [("produced", 1), ("produced", 2), ("produced", 3)]),
        (4, [("replayed", 1), ("replayed", 2), ("replayed, then ahead", 3), ("produced", 4)]),
    ):
        source: Any = Recorded()
        journal = Journal(source, recipe(tmp_path), {"data": "rows"})
        for step in range(1, steps + 1):
            [sampled_round] = journal.produce(Order(step, step - 1, 8 * (step - 1))).rounds
            assert sampled_round.step == step and sampled_round.position == 8 * step
        assert source.calls == calls
    source = Recorded()
    [sampled_round] = Journal(source, recipe(tmp_path), {"data": "rows"}).produce(Order(2, 7, 8)).rounds
    assert source.calls == [("produced", 2)] and sampled_round.version == 7, "other weights sample anew"
