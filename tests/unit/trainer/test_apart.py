"""What does not go with engines apart, and which weights may have sampled what."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from generation.engine.lifecycle import EngineStateError
from generation.trajectory import Trajectory, plain
from trainer.apart import check_version, read_rounds
from trainer.config.apart import check_apart
from trainer.config.schema import TrainConfig


def problems(ranks: int = 4, neighbours: int = 4, **sections: dict[str, Any]) -> list[str]:
    recipe = {"model": {"path": "m"}, "data": {"path": "d"}} | sections
    return list(check_apart(TrainConfig.model_validate(recipe), ranks, neighbours))


def test_what_goes_with_engines_apart_is_accepted() -> None:
    assert not problems() and not problems(engine={"apart": 1}) and not problems(engine={"apart": 3})
    assert not problems(engine={"apart": 2, "tensor_parallel_size": 2}, rollout={"lag": 1})
    assert not problems(engine={"apart": 1}, lora={"rank": 4, "sync": "merged"}, sync={"way": "broadcast"})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"rollout": {"lag": 1}}, "rollout.lag"),
        ({"engine": {"apart": 4}}, "engine.apart is 4"),
        ({"engine": {"apart": 1, "tensor_parallel_size": 2}}, "engine.tensor_parallel_size"),
        ({"engine": {"apart": 1}, "sync": {"way": "zero_copy"}}, "sync.way"),
        ({"engine": {"apart": 1}, "policy": {"offload": "all"}}, "policy.offload"),
        ({"engine": {"apart": 1}, "policy": {"backend": "deepspeed"}}, "policy.backend"),
        ({"engine": {"apart": 1}, "lora": {"rank": 4}}, "lora.sync"),
        ({"engine": {"apart": 1}, "rollout": {"slice_tokens": 8}}, "rollout.slice_tokens"),
        ({"engine": {"apart": 1}, "checkpoint": {"rollouts": True}}, "checkpoint.rollouts"),
        ({"engine": {"apart": 1}, "rollout": {"lag": 1}, "algorithm": {"tis_cap": None}}, "algorithm.tis_cap"),
    ],
)
def test_what_does_not_go_with_engines_apart_is_named(sections: dict[str, Any], key: str) -> None:
    [problem] = problems(**sections)
    assert key in problem and len(problem) < 300


def rounds(version: int) -> list[list[Trajectory]]:
    return [[Trajectory(0, n, [1], [2], [1], [-0.5], weight_version=version) for n in range(2)], []]


def test_answers_of_another_version_than_step_and_lag_prescribe_raise_and_name_both() -> None:
    check_version(rounds(3), step=5, version=3, lag=1)
    with pytest.raises(EngineStateError, match=r"version 4 .* step 5, which at rollout.lag = 1 .* version 3"):
        check_version(rounds(4), step=5, version=3, lag=1)


def test_answers_that_two_ranks_have_kept_are_all_read_by_one(tmp_path: Path) -> None:
    for rank in (0, 1):
        packed = msgspec.msgpack.encode({7: rounds(rank)}, enc_hook=plain)
        (tmp_path / f"carried_{rank}.msgpack").write_bytes(packed)
    assert read_rounds(tmp_path) == {7: [rounds(0)[0] + rounds(1)[0], []]}
