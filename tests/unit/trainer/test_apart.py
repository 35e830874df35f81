"""What does not go with engines apart, which weights may have sampled what, and what is handed over."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from generation.engine.engine import Leader
from generation.engine.lifecycle import EngineStateError
from generation.engine.sampling import NotFiniteError
from generation.engine.slices import Unfinished
from generation.rollouts.carried import CarriedGroup
from generation.trajectory import Trajectory, plain
from sharding.apart.crews import TrainersApart, _Half, _line
from sharding.ranks import RemoteError, rank
from sharding.send.push import SyncSettings
from sharding.wire.channel import SyncError
from tests.unit.learning_steps import make_config, on_ranks
from trainer.apart import (
    GIVEN_UP,
    Handed,
    RolloutsApart,
    SlicesApart,
    check_version,
    hand_over,
    read_handed,
    take_over,
)
from trainer.carried import packed_groups, read_groups
from trainer.config.placement import check_placement
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.rewards.pool import RewardPool
from trainer.rollouts import StepAbandoned, Terms

RANKS = {"placement": "ranks"}


def problems(ranks: int = 4, neighbours: int = 4, **sections: dict[str, Any]) -> list[str]:
    recipe = {"model": {"path": "m"}} | sections | {"data": {"path": "d"} | sections.get("data", {})}
    return list(check_placement(TrainConfig.model_validate(recipe), ranks, neighbours))


def test_what_goes_with_engines_apart_is_accepted() -> None:
    assert not problems() and not problems(engine=RANKS) and not problems(engine=RANKS | {"ranks": 3})
    assert not problems(engine=RANKS | {"ranks": 2, "tensor_parallel_size": 2}, rollout={"lag": 1})
    assert not problems(engine=RANKS, lora={"rank": 4, "sync": "merged"}, sync={"way": "broadcast"})
    assert not problems(engine=RANKS, lora={"rank": 4}, rollout={"slice_tokens": 8, "lag": 1})
    assert not problems(engine={"placement": "ray", "replicas": 7, "tensor_parallel_size": 8})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"rollout": {"lag": 1}}, "rollout.lag"),
        ({"engine": RANKS | {"ranks": 4}}, "engine.ranks is 4"),
        ({"engine": RANKS | {"replicas": 2}}, "engine.replicas is 2"),
        ({"engine": {"placement": "ray"}, "data": {"max_images": 1}}, "images do not go to actors"),
        ({"engine": RANKS | {"tensor_parallel_size": 2}}, "engine.tensor_parallel_size"),
        ({"engine": RANKS, "sync": {"way": "zero_copy"}}, "sync.way"),
        ({"engine": RANKS, "policy": {"offload": "all"}}, "policy.offload"),
        ({"engine": RANKS, "checkpoint": {"rollouts": True}}, "checkpoint.rollouts"),
        (
            {"engine": RANKS, "rollout": {"lag": 1}, "algorithm": {"tis_cap": None}},
            "algorithm.tis_cap",
        ),
    ],
)
def test_what_does_not_go_with_engines_apart_is_named(sections: dict[str, Any], key: str) -> None:
    [problem] = problems(**sections)
    assert key in problem and len(problem) < 300


def rounds(version: int) -> list[list[Trajectory]]:
    return [[Trajectory(0, n, [1], [2], [1], [-0.5], weight_version=version) for n in range(2)], []]


def test_answers_of_another_version_than_step_and_lag_prescribe_raise_and_name_both() -> None:
    cut = [([0], 8)]
    check_version(Handed(rounds=rounds(3)), step=5, version=3, lag=1)
    check_version(Handed(rounds=rounds(2), taken=cut), step=5, version=3, lag=1)  # answers that have gone on
    for other in (Handed(rounds=rounds(4)), Handed(rounds=rounds(4), taken=cut), Handed(rounds=rounds(2))):
        with pytest.raises(EngineStateError, match=r"version [24] .* step 5, which at rollout.lag = 1 .* version 3"):
            check_version(other, step=5, version=3, lag=1)


def test_answers_that_two_ranks_have_kept_are_all_read_by_one(tmp_path: Path) -> None:
    for number in (0, 1):
        ready = msgspec.msgpack.encode({7: Handed(rounds=rounds(number))}, enc_hook=plain)
        (tmp_path / f"carried_{number}.msgpack").write_bytes(packed_groups([], ready))
    assert read_handed(tmp_path) == {7: Handed(rounds=[rounds(0)[0] + rounds(1)[0], []])}


def of_rank(number: int) -> list[list[Trajectory]]:
    """Two rounds of an engine's rank: in the second it has nothing."""
    return [[Trajectory(number, n, [1], [2], [1], [-0.5], weight_version=3) for n in range(2)], []]


@pytest.mark.parametrize(("training", "generating"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_answer_is_handed_to_one_rank_that_trains_and_its_rounds_to_all(training: int, generating: int) -> None:
    def crew() -> Any:
        if rank() < training:
            return take_over()
        cut: Any = {"taken": [([4], 9)], "present": of_rank(rank())[0][:1], "groups": [bytes([rank()])]}
        return hand_over(training, Handed(rounds=of_rank(rank()), **cut), None)

    taken = on_ranks(training + generating, crew)[:training]
    groups = sorted(group for handed in taken for group in handed.groups)
    assert groups == [bytes([number]) for number in range(training, training + generating)]
    assert sum(len(handed.present) for handed in taken) == generating
    assert all(handed.taken == [([4], 9)] for handed in taken)
    assert all(handed.word == "" and len(handed.rounds) == 2 and not handed.rounds[1] for handed in taken)
    whole = [trajectory for handed in taken for trajectory in handed.rounds[0]]
    expected = [t for number in range(training, training + generating) for t in of_rank(number)[0]]
    assert sorted(whole, key=lambda t: (t.prompt_index, t.sample_index)) == expected
    assert all(handed.rounds[0] for handed in taken[:generating]), "none has them all while another has none"


def test_a_word_of_one_engine_reaches_all_that_train_and_an_error_everybody() -> None:
    def crew(error: Exception | None) -> Any:
        alone = rank() == 3
        try:
            if rank() < 2:
                return take_over().word
            handed = Handed(GIVEN_UP) if alone else Handed(rounds=of_rank(3))
            hand_over(2, handed, error if alone else None)
        except RemoteError as failure:
            return str(failure)

    assert on_ranks(4, lambda: crew(None))[:2] == [GIVEN_UP, GIVEN_UP]
    sentence = "phase generating failed on rank 3: ValueError: broken"
    assert on_ranks(4, lambda: crew(ValueError("broken"))) == [sentence] * 4


class OrderedEngines:
    """Remembers what was ordered, in the place of `EnginesApart`."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, int, int]] = []
        self.version, self.then = 4, None

    def begin(self, kind: str, step: int, prompts: int) -> int:
        self.orders.append((kind, step, prompts))
        return self.version


def apart_rollouts(lag: int, steps: int = 9) -> tuple[RolloutsApart, OrderedEngines]:
    config = make_config(engine=RANKS, rollout={"lag": lag}, run={"steps": steps})
    engines = OrderedEngines()
    return RolloutsApart(config, engines, None, None, None, None, None), engines  # type: ignore[arg-type]


def take_step(rollouts: RolloutsApart, step: int, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step of eight prompts whose answers are no matter."""
    monkeypatch.setattr(RolloutsApart, "run", lambda self, *_: self._on_leaders(None, None, step))
    rollouts.take(lambda start, count: [], position, 8, SimpleNamespace(step=step), None)  # type: ignore[arg-type]


def test_a_step_is_ordered_from_its_own_prompts_on_and_with_a_lag_when_the_shift_before_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.apart.take_over", lambda: Handed(rounds=of_rank(0)[:1]))
    monkeypatch.setattr("trainer.apart.check_version", lambda *_: None)
    for lag in (0, 1):
        rollouts, engines = apart_rollouts(lag, steps=3)
        take_step(rollouts, 1, 0, monkeypatch)
        assert engines.orders == [("sample", 1, 0)]
        if lag:
            assert engines.then is not None
            engines.then()  # before the policy learns
            assert engines.orders[1:] == [("sample", 2, 8)]
        take_step(rollouts, 2, 8, monkeypatch)
        assert engines.orders[1:] == [("sample", 2, 8)]
        engines.then = None
        take_step(rollouts, 3, 16, monkeypatch)
        assert engines.then is None and engines.orders[2:] == [("sample", 3, 16)], "none is ordered after the last"


def test_answers_of_the_next_step_are_part_of_a_checkpoint_once_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.apart.take_over", lambda: Handed(rounds=of_rank(0)))
    rollouts, engines = apart_rollouts(1)
    assert rollouts.carried() == b""
    engines.version = 3
    rollouts._order(2, 8)
    (tmp_path / "carried_0.msgpack").write_bytes(rollouts.carried())
    assert read_handed(tmp_path) == {2: Handed(rounds=of_rank(0))}
    rollouts._on_leaders(None, None, 2)  # type: ignore[arg-type]
    assert len(engines.orders) == 1, "it is not ordered again"


def cut_step(version: int) -> Handed:
    """Of an engine whose answers are cut: a group is complete, another goes on."""
    complete = [Trajectory(0, n, [1], [2, 3], [1, 1], [-0.5, -0.6], versions=[(2, 0), (version, 1)]) for n in range(2)]
    figures = {"stale/share": 0.5, "stale/age_mean": 1.0, "stale/age_max": 2.0, "carry/slices": 3.0}
    going_on = packed_groups([CarriedGroup(6, 1, unfinished={0: Unfinished([1, 6], 8, 1)})])
    return Handed("", version, [complete], [([4], 9)], figures, complete[:1], [going_on])


@pytest.mark.parametrize("lag", [0, 1])
def test_answers_that_go_on_are_told_of_as_where_they_are_and_kept(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.apart.take_over", lambda: cut_step(3))
    config = make_config(engine=RANKS, rollout={"lag": lag, "slice_tokens": 1})
    parts: Any = config, OrderedEngines(), None, None, RewardPool(config.reward), None, None
    rollouts = SlicesApart(*parts)
    rollouts._apart.version = 3
    source: Any = lambda place, count: [Prompt(n, (1, n), {}) for n in range(place, place + count)]  # noqa: E731
    settings: Any = SimpleNamespace(step=2, policy_version=3 + lag)
    prompts, answers, position = rollouts.take(source, 8, 1, settings, Terms(1))
    assert [prompt.id for prompt in prompts] == [4] and position == 9 and len(answers) == 2
    assert [answer.old for answer in answers] == [1 + lag] * 2
    figures = {"stale/share": 0.5 + lag / 2, "stale/age_mean": 1.0 + lag, "stale/age_max": 2.0 + lag, "carry/slices": 3}
    assert rollouts.figures() == figures and len(rollouts.untrained()) == 1 - lag
    kept = rollouts
    for _ in range(2):
        (tmp_path / "carried_0.msgpack").write_bytes(kept.carried())
        assert [(group.place, group.born) for group in read_groups(tmp_path)] == [(6, 1)]
        kept = SlicesApart(*parts, start=tmp_path)  # whose first step is given up


@pytest.mark.parametrize(
    ("taken", "error", "sentence"),
    [
        (Handed(rounds=of_rank(0)), EngineStateError, "version 3 .* version 4"),
        (Handed(GIVEN_UP), StepAbandoned, "step 1 were given up"),
        (Handed("rank 1 sampled nan"), NotFiniteError, "rank 1 sampled nan"),
    ],
)
def test_what_cannot_be_learned_from_is_raised_where_it_is_fetched(
    taken: Any, error: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.apart.take_over", lambda: taken)
    rollouts, _ = apart_rollouts(0)
    rollouts._order(1, 0)
    with pytest.raises((error, RemoteError), match=sentence):
        rollouts._fetch()
    assert not rollouts._ready


def test_what_fails_on_an_engines_rank_is_told_to_rank_0_with_its_number() -> None:
    store, told = HashStore(), []

    class Engine:
        async def receive(self, *arguments: Any, version: int) -> None:
            told.append(version)
            if version == 8:
                raise ValueError("no room")

    thread = SimpleNamespace(run=lambda coroutine, *_: asyncio.run(coroutine))
    leader: Any = Leader(Engine(), thread)  # type: ignore[arg-type]
    there = TrainersApart(leader, store, 3, SyncSettings(timeout=5))
    line = _line(store, 3, outwards=True)
    line.send("sample", version=7, step=1)
    assert there.hear()["step"] == 1
    line.send("probe", probe=None)
    there.receive(7)
    assert _Half(line, 3, 5.0).result() is None
    with pytest.raises(ValueError, match="no room"):
        there.receive(8)
    with pytest.raises(SyncError, match="rank 3, which generates: ValueError: no room"):
        _Half(line, 3, 5.0).result()
    assert told == [7, 8]
