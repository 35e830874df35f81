"""Which version sampled which token: said once for every token, or refused by name."""

import pytest

from generation.engine.slices import Unfinished
from generation.exact_ids import Generation, mark_versions
from generation.trajectory import Trajectory

REFUSED = [
    ([(3, 1)], "leave the first tokens out"),
    ([(3, 0), (4, 3)], "a version begins at token 3, but there are 3 tokens"),
    ([(3, 0), (4, 7)], "a version begins at token 7"),
    ([(3, 0), (3, 1)], "must ascend"),
    ([(4, 0), (3, 1)], "must ascend"),
    ([(3, 0), (4, 2), (5, 1)], "must ascend"),
]


def trajectory(**fields: object) -> Trajectory:
    tokens: dict[str, object] = {"response_ids": [7, 8, 9], "loss_mask": [1] * 3, "logprobs": [-1.0] * 3}
    return Trajectory(4, 1, [5, 6], **(tokens | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("versions", "complaint"), REFUSED)
def test_versions_that_do_not_cover_the_tokens_are_refused_with_the_place(
    versions: list[tuple[int, int]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=f"^prompt 4 sample 1: .*{complaint}"):
        trajectory(versions=versions)
    with pytest.raises(ValueError, match=f"^an answer at place \\(4, 1\\): .*{complaint}"):
        Generation([7, 8, 9], [-1.0] * 3, place=(4, 1), versions=versions)
    with pytest.raises(
        ValueError, match=f"^an unfinished answer to a prompt of 2 tokens: .*{complaint}"
    ):
        Unfinished([5, 6], 1, 10, [7, 8, 9], [-1.0] * 3, versions)


@pytest.mark.parametrize("name", ["response_ids", "loss_mask", "logprobs"])
def test_one_entry_too_few_is_refused_with_the_place(name: str) -> None:
    with pytest.raises(ValueError, match="prompt 4 sample 1: .* must be equal in number"):
        trajectory(**{name: [1, 1]})


def test_an_unfinished_answer_has_room_left_and_a_log_probability_a_token() -> None:
    with pytest.raises(ValueError, match="3 of 3 tokens: it is finished"):
        Unfinished([5, 6], 1, 3, [7, 8, 9], [-1.0] * 3, [(0, 0)])
    with pytest.raises(ValueError, match="3 tokens, but 2 log-probabilities"):
        Unfinished([5, 6], 1, 10, [7, 8, 9], [-1.0] * 2, [(0, 0)])


def test_the_newest_version_is_the_trajectory_s() -> None:
    assert trajectory(weight_version=6).versions == [(6, 0)]
    assert trajectory(versions=[(3, 0), (5, 2)]).weight_version == 5
    assert trajectory(versions=[[3, 0], [5, 2]]).versions == [(3, 0), (5, 2)]  # as they come from a file
    assert Trajectory(0, 0, [5], weight_version=2).versions == [(2, 0)]


def test_a_trajectory_has_the_versions_of_its_answers() -> None:
    """A turn at versions 3 and 4, a tool's reply, a turn at 4 and 6; answers of other conversations do not count."""
    done = Trajectory(
        0, 0, [1, 2], [7, 8, 9, 50, 51, 10, 11], [1, 1, 1, 0, 0, 1, 1], [0.0] * 7, weight_version=3
    )
    first = Generation([7, 8, 9], [0.0] * 3, prompt_ids=[1, 2], versions=[(3, 0), (4, 2)])
    second = Generation([10, 11], [0.0] * 2, prompt_ids=[*first.ids, 50, 51], versions=[(4, 0), (6, 1)])
    elsewhere = Generation([7, 7], [0.0] * 2, prompt_ids=[1, 2], versions=[(9, 0)])
    mark_versions(done, [elsewhere, first, second])
    assert done.versions == [(3, 0), (4, 2), (6, 6)]
    assert done.weight_version == 6
    mark_versions(done, [])
    assert done.versions == [(3, 0), (4, 2), (6, 6)]


def test_slices_of_one_version_are_one_segment() -> None:
    answer = Unfinished([5, 6], seed=1, budget=9)
    for version, ids in [(2, [7]), (2, [8, 9]), (3, []), (4, [10])]:
        answer.add(Generation(ids, [-1.0] * len(ids), "length", weight_version=version))
    assert (answer.token_ids, answer.versions, answer.left) == ([7, 8, 9, 10], [(2, 0), (4, 3)], 5)
    done = answer.finished("stop")
    assert (done.ids, done.weight_version, done.versions) == ([5, 6, 7, 8, 9, 10], 4, [(2, 0), (4, 3)])
