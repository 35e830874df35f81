"""Right padding: what passes, what does not, and that the vectorised check says what a loop over rows says."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generation.compat.nemo.batch import BatchedDataDict, verify_right_padding


def batch(ids: list[list[int]], lengths: list[int]) -> BatchedDataDict:
    return BatchedDataDict({"input_ids": torch.tensor(ids), "input_lengths": torch.tensor(lengths)})


@pytest.mark.parametrize(
    ("ids", "lengths", "pad"),
    [
        ([[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]], [3, 5], 0),
        ([[1, 0, 0, 0]], [3], 0),  # the padding's id inside the prompt is nobody's business
        ([[7, 7, 7]], [0], 7),
        ([[1, 9, 9]], [1], 9),
    ],
)
def test_right_padded_batches_pass(ids: list[list[int]], lengths: list[int], pad: int) -> None:
    assert verify_right_padding(batch(ids, lengths), pad) == (True, None)


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([[1, 2, 0]], [4], "length 4 at index 0 exceeds the tensor's width 3"),
        ([[1, 2, 0]], [-1], "length -1 at index 0 is negative"),
        ([[1, 2], [0, 0]], [2, -3], "length -3 at index 1 is negative"),
        ([[0, 0, 1, 2]], [2], "after the length 2 at index 0: positions [2, 3]"),
        ([[1, 0, 0], [1, 5, 6]], [1, 1], "after the length 1 at index 1: positions [1, 2]"),
        ([[1, 2]], [1, 2], "input_ids has 1 rows, input_lengths has 2 entries"),
    ],
)
def test_padding_errors_are_returned_or_raised(
    ids: list[list[int]], lengths: list[int], message: str
) -> None:
    ok, error = verify_right_padding(batch(ids, lengths), pad_value=0, raise_error=False)
    assert not ok
    assert message in str(error)
    with pytest.raises(ValueError, match=re.escape(message)):
        verify_right_padding(batch(ids, lengths), 0, raise_error=True)


def test_the_idiom_of_nemo_rl_reaches_its_message() -> None:
    """NeMo RL's `is_padded, error_msg = verify_right_padding(...)` returns its message; it used to raise first."""
    is_padded, error_msg = verify_right_padding(batch([[0, 1]], [1]), pad_value=0)
    assert is_padded is False
    assert "positions [1]" in str(error_msg)


def test_outputs_are_checked_by_their_unpadded_lengths() -> None:
    output = BatchedDataDict(
        {"output_ids": torch.tensor([[1, 2, 0]]), "unpadded_sequence_lengths": torch.tensor([2])}
    )
    assert verify_right_padding(output) == (True, None)
    output["unpadded_sequence_lengths"] = torch.tensor([1])
    assert not verify_right_padding(output)[0]
    del output["unpadded_sequence_lengths"]
    output["generation_lengths"] = torch.tensor([1])
    error = verify_right_padding(output)[1]
    assert error is not None
    assert error.endswith("the keys are output_ids, generation_lengths")  # names only, not whole tensors


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_ids", torch.tensor([1, 2, 3])),
        ("input_ids", torch.ones(1, 3)),
        ("input_ids", [[1, 2, 3]]),
        ("input_lengths", torch.tensor([[3]])),
        ("input_lengths", torch.tensor([3.0])),
    ],
)
def test_shapes_and_types_are_named(key: str, value: object) -> None:
    data = batch([[1, 2, 3]], [3])
    data[key] = value
    assert str(verify_right_padding(data)[1]).startswith(f"{key} must be a tensor of integers with")


def test_a_missing_batch_or_pad_value_is_an_error_in_both_modes() -> None:
    with pytest.raises(TypeError, match="must be a BatchedDataDict, not dict"):
        verify_right_padding({"input_ids": torch.ones(1, 1)}, raise_error=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pad_value"):
        verify_right_padding(batch([[1]], [1]), None, raise_error=False)  # type: ignore[arg-type]


def test_empty_batches_pass() -> None:
    empty = BatchedDataDict(
        {"input_ids": torch.zeros(0, 0, dtype=torch.long), "input_lengths": torch.zeros(0).long()}
    )
    assert verify_right_padding(empty) == (True, None)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(-2, 6)), min_size=1
    )
)
def test_the_whole_batch_at_once_says_what_a_loop_says(rows: list[tuple[list[int], int]]) -> None:
    def good(ids: list[int], length: int) -> bool:
        return 0 <= length <= len(ids) and all(token == 1 for token in ids[length:])

    data = batch([ids for ids, _ in rows], [length for _, length in rows])
    ok, error = verify_right_padding(data, pad_value=1)
    bad = [i for i, row in enumerate(rows) if not good(*row)]
    assert ok == (not bad)
    assert ok or f"at index {bad[0]}" in str(error)
