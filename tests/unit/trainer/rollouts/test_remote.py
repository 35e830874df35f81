"""Engines on ranks of their own: settings that exclude them, versions of sampling weights, and rounds handed over."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from generation.engine.engine import Leader
from generation.engine.lifecycle import EngineStateError
from generation.engine.sampling import NotFiniteError
from generation.engine.slices import Unfinished
from generation.rollouts.episodes import CarriedGroup
from generation.trajectory import Trajectory
from sharding.ranks import RemoteError, rank
from sharding.remote.orders import PendingCall, Trainers, _line
from sharding.report import SyncSettings
from sharding.wire.channel import SyncError
from tests.support.learning_steps import on_ranks
from tests.support.recipes import make_config
from trainer.config.placement import check_placement
from trainer.config.sync_ways import check_way
from trainer.data import Prompt, PromptDataset
from trainer.rollouts.pool import StepAbandoned
from trainer.rollouts.remote import RemoteSource, receive_rounds, send_rounds
from trainer.rollouts.round import GIVEN_UP, Order, Round, check_version, packed, read_groups, read_ready

RANKS = {"placement": "ranks"}


def problems(ranks: int = 4, neighbours: int = 4, **sections: dict[str, Any]) -> list[str]:
    config = make_config(**sections)
    return [*check_placement(config, ranks, neighbours), *check_way(config, ranks, environ={})]


def test_settings_that_go_with_engines_apart_are_accepted() -> None:
    assert not problems() and not problems(engine=RANKS) and not problems(engine=RANKS | {"ranks": 3})
    assert not problems(engine=RANKS | {"ranks": 2, "tensor_parallel_size": 2}, rollout={"lag": 1})
    assert not problems(engine=RANKS, lora={"rank": 4, "sync": "merged"})
    assert not problems(engine=RANKS, lora={"rank": 4}, rollout={"slice_tokens": 8, "lag": 1})
    assert not problems(
        engine=RANKS, checkpoint={"rollouts": True}, model={"path": "m", "routes": "engine"}
    )
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
        (
            {"engine": RANKS, "rollout": {"lag": 1}, "algorithm": {"tis_cap": None}},
            "algorithm.tis_cap",
        ),
    ],
)
def test_settings_that_exclude_engines_apart_are_named(sections: dict[str, Any], key: str) -> None:
    [problem] = problems(**sections)
    assert key in problem and len(problem) < 300


def of_rank(number: int, version: int = 3, step: int = 1) -> list[Round]:
    """Return two rounds of an engine's rank, of which the second is empty."""
    sampled = [Trajectory(number, n, [1], [2], [1], [-0.5], weight_version=version) for n in range(2)]
    states = {number: f"state {number}"}
    return [
        Round(step, version, trajectories=sampled, places=[4, 5], position=8),
        Round(step, version, position=8, random_states=states),
    ]


def test_answers_of_another_version_than_step_and_lag_prescribe_raise_and_name_both() -> None:
    check_version(of_rank(0, 3, step=5), version=3, lag=1, cut=False)
    check_version(of_rank(0, 2, step=5), version=3, lag=1, cut=True)  # answers that have gone on
    for other, cut in ((4, False), (4, True), (2, False)):
        with pytest.raises(
            EngineStateError, match=r"version [24] .* step 5, which at rollout.lag = 1 .* version 3"
        ):
            check_version(of_rank(0, other, step=5), version=3, lag=1, cut=cut)


def test_answers_that_two_ranks_have_kept_are_all_read_by_one(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"carried_{number}.msgpack").write_bytes(packed([Round(), *of_rank(number, step=7)]))
    [(step, (first, second))] = read_ready(tmp_path).items()
    assert step == 7 and first.trajectories == of_rank(0)[0].trajectories + of_rank(1)[0].trajectories
    assert second.trajectories == [] and second.random_states == {0: "state 0", 1: "state 1"}


@pytest.mark.parametrize(("training", "generating"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_answer_is_handed_to_one_rank_that_trains_and_its_rounds_to_all(
    training: int, generating: int
) -> None:
    def crew() -> Any:
        if rank() < training:
            return receive_rounds()
        first, second = of_rank(rank())
        second.untrained = first.trajectories[:1]
        second.groups = [CarriedGroup(rank(), 1)]
        return send_rounds(training, [first, second], None)

    taken = on_ranks(training + generating, crew)[:training]
    groups = sorted(group.place for _, second in taken for group in second.groups)
    assert groups == [*range(training, training + generating)]
    assert sum(len(second.untrained) for _, second in taken) == generating
    assert all(
        first.places == [4, 5] and second.position == 8 and not second.trajectories
        for first, second in taken
    )
    states = {number: f"state {number}" for number in range(training, training + generating)}
    assert all(second.random_states == states for _, second in taken)
    together = [trajectory for first, _ in taken for trajectory in first.trajectories]
    expected = [
        t for number in range(training, training + generating) for t in of_rank(number)[0].trajectories
    ]
    assert sorted(together, key=lambda t: (t.prompt_index, t.sample_index)) == expected
    assert all(first.trajectories for first, _ in taken[:generating]), (
        "none has them all while another has none"
    )


def test_a_message_of_one_engine_reaches_all_trainers_and_an_error_everybody() -> None:
    def crew(error: Exception | None) -> Any:
        alone = rank() == 3
        try:
            if rank() < 2:
                return receive_rounds()[0].word
            send_rounds(2, [Round(1, word=GIVEN_UP)] if alone else of_rank(3), error if alone else None)
        except RemoteError as failure:
            return str(failure)

    assert on_ranks(4, lambda: crew(None))[:2] == [GIVEN_UP, GIVEN_UP]
    sentence = "phase generating failed on rank 3: ValueError: broken"
    assert on_ranks(4, lambda: crew(ValueError("broken"))) == [sentence] * 4


PROMPTS = PromptDataset([Prompt(i, (i,), {}) for i in range(30)])


class OrderedEngines:
    """Records orders, in place of `RemoteEngines`."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, int, int]] = []
        self.states: list[dict[int, str]] = []
        self.version, self.then = 3, None

    def begin(self, kind: str, step: int, prompts: int, random_states: dict[int, str]) -> int:
        self.orders.append((kind, step, prompts))
        self.states.append(random_states)
        return self.version


def remote_source(
    lag: int, steps: int = 9, start: Path | None = None, **rollout: Any
) -> tuple[RemoteSource, OrderedEngines]:
    config = make_config(engine=RANKS, rollout={"lag": lag} | rollout, run={"steps": steps})
    engines = OrderedEngines()
    return RemoteSource(config, engines, PROMPTS, start=start), engines  # type: ignore[arg-type]


def test_a_step_is_ordered_from_its_prompts_on_and_with_a_lag_one_shift_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for lag in (0, 1):
        source, engines = remote_source(lag, steps=3)
        for step in (1, 2, 3):
            rounds = [Round(version=3, position=8 * step)]
            monkeypatch.setattr("trainer.rollouts.remote.receive_rounds", lambda rounds=rounds: rounds)
            source.produce(Order(step, 3, 8 * (step - 1)))
            expected = [("sample", number + 1, 8 * number) for number in range(step)]
            assert engines.orders == expected
            assert (engines.then is not None) == (lag == 1 and step < 3), (
                "none is ordered after the last"
            )
            if engines.then is not None:
                engines.then()  # before the policy learns
                assert engines.orders == [*expected, ("sample", step + 1, 8 * step)]
                engines.then = None


def test_answers_of_the_next_step_are_part_of_a_checkpoint_once_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rollouts.remote.receive_rounds", lambda: of_rank(0, step=2))
    source, engines = remote_source(1)
    assert source.carried() == b""
    source._order(Order(2, 3, 8))
    (tmp_path / "carried_0.msgpack").write_bytes(source.carried())
    assert read_ready(tmp_path) == {2: of_rank(0, step=2)}
    assert source.produce(Order(2, 4, 8)).rounds == of_rank(0, step=2)
    assert len(engines.orders) == 1, "it is not ordered again"


@pytest.mark.parametrize("lag", [0, 1])
def test_random_states_of_generating_ranks_come_back_in_the_first_order(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rollouts.remote.receive_rounds", lambda: of_rank(1, step=2))
    source, engines = remote_source(lag)
    source.produce(Order(2, 3, 0))
    source.evaluate(Order(-3, 3, 0))
    assert engines.states == [{}, {}]
    (tmp_path / "carried_0.msgpack").write_bytes(source.carried())
    again, engines = remote_source(lag, start=tmp_path)
    again.evaluate(Order(-3, 3, 8))
    again.produce(Order(3, 4, 8))
    again.produce(Order(4, 5, 16))
    assert engines.states == [{}, {1: "state 1"}, {}]


def test_a_step_that_is_replayed_leaves_the_engines_as_if_they_had_sampled_it() -> None:
    source, engines = remote_source(1)
    source.replayed(Order(2, 3, 0), of_rank(1, step=2), ahead=False)
    assert engines.then is None
    source.replayed(Order(3, 3, 0), of_rank(1, step=3), ahead=True)
    assert engines.then is not None
    engines.then()
    assert engines.orders == [("sample", 4, 8)] and engines.states == [{1: "state 1"}]


def cut_step(version: int) -> list[Round]:
    """Return the round of an engine whose answers are cut: one group is complete, another goes on."""
    complete = [
        Trajectory(0, n, [1], [2, 3], [1, 1], [-0.5, -0.6], versions=[(2, 0), (version, 1)])
        for n in range(2)
    ]
    figures = {"stale/share": 0.5, "stale/age_mean": 1.0, "stale/age_max": 2.0, "carry/slices": 3.0}
    going_on = [CarriedGroup(6, 1, unfinished={0: Unfinished([1, 6], 8, 1)})]
    cut_round = Round(
        2, version, trajectories=complete, places=[4], position=9, figures=figures, groups=going_on
    )
    cut_round.untrained = complete[:1]
    return [cut_round]


@pytest.mark.parametrize("lag", [0, 1])
def test_unfinished_answers_are_reported_by_their_place_and_kept(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rollouts.remote.receive_rounds", lambda: cut_step(3))
    source, _ = remote_source(lag, slice_tokens=1)
    batch = source.produce(Order(2, 3 + lag, 8))
    [taken] = batch.rounds
    assert taken.places == [4] and batch.position == 9
    assert [answer.old for answer in batch.answers] == [1 + lag] * 2
    figures = {
        "stale/share": 0.5 + lag / 2,
        "stale/age_mean": 1.0 + lag,
        "stale/age_max": 2.0 + lag,
        "carry/slices": 3,
    }
    assert taken.figures == figures and len(source.untrained()) == 1 - lag
    for _ in range(2):
        (tmp_path / "carried_0.msgpack").write_bytes(source.carried())
        assert [(group.place, group.born) for group in read_groups(tmp_path)] == [(6, 1)]
        source, _ = remote_source(lag, start=tmp_path, slice_tokens=1)  # whose first step is given up


@pytest.mark.parametrize(
    ("taken", "error", "sentence"),
    [
        (of_rank(0, 2), EngineStateError, "version 2 .* version 3"),
        ([Round(1, word=GIVEN_UP)], StepAbandoned, "step 1 were given up"),
        ([Round(1, word="rank 1 sampled nan")], NotFiniteError, "rank 1 sampled nan"),
    ],
)
def test_failed_rounds_raise_where_they_are_fetched(
    taken: Any, error: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rollouts.remote.receive_rounds", lambda: taken)
    source, _ = remote_source(0)
    with pytest.raises((error, RemoteError), match=sentence):
        source.produce(Order(1, 3, 0))
    assert not source._ready


def test_rank_0_learns_of_errors_on_an_engines_rank_with_its_number() -> None:
    store, calls = HashStore(), []

    class Engine:
        async def ask_workers(self, method: str, prefix: int, *place: Any) -> None:
            calls.append((method, *place[:3]))

        async def receive(self, *arguments: Any, version: int) -> None:
            calls.append(version)
            if version == 8:
                raise ValueError("no room")

    thread = SimpleNamespace(run=lambda coroutine, *_: asyncio.run(coroutine))
    leader: Any = Leader(Engine(), thread)  # type: ignore[arg-type]
    there = Trainers(leader, store, 3, SyncSettings(timeout=5))
    line = _line(store, 3, outwards=True)
    line.send("sample", version=7, step=1)
    assert there.hear()["step"] == 1
    line.send("group", address=["here", 9, 2])
    line.send("probe", probe=None)
    there.receive(7)
    assert line.receive(5, "members")["joined"]
    for _ in ("joining", "receiving"):
        assert PendingCall(line, 3, 5.0).result() is None
    with pytest.raises(ValueError, match="no room"):
        there.receive(8)
    assert not line.receive(5, "members")["joined"]
    with pytest.raises(SyncError, match="rank 3, which generates: ValueError: no room"):
        PendingCall(line, 3, 5.0).result()
    assert calls == [("init_collective", "here", 9, 2), 7, 8]
