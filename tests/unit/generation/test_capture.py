"""Generations become trajectories: by ids alone, each sampled token learned once."""

from hypothesis import given
from hypothesis import strategies as st

from generation.exact_ids import Generation, History
from generation.server.conversations import ServedConversation, as_key


def generation(
    prompt: list[int], answer: list[int], version: int = 3, reason: str = "stop"
) -> Generation:
    return Generation(
        answer, [-float(token) for token in answer], reason, prompt_ids=prompt, weight_version=version
    )


def captured(*generations: Generation) -> History:
    history = History()
    for generation in generations:
        history.capture(generation)
    return history


def test_turns_are_joined_and_what_lies_between_is_masked() -> None:
    first = generation([1, 2], [10, 11])
    second = generation([*first.ids, 3, 4], [12], reason="length")
    (t,) = captured(first, second).trajectories()
    assert (t.prompt_ids, t.response_ids) == ([1, 2], [10, 11, 3, 4, 12])
    assert t.loss_mask == [1, 1, 0, 0, 1]
    assert t.logprobs == [-10.0, -11.0, 0.0, 0.0, -12.0]
    assert (t.turns, t.finish_reason, t.weight_version, t.answer_start) == (2, "length", 3, 4)


def test_a_turn_continues_the_turn_before_it_and_not_an_earlier_one() -> None:
    """A turn whose prompt begins with the ids of two turns continues the later one."""
    first = generation([1, 2], [10])
    second = generation([*first.ids, 3], [11])
    (t,) = captured(first, second, generation([*second.ids, 4], [12])).trajectories()
    assert (t.turns, t.response_ids, t.loss_mask) == (3, [10, 3, 11, 4, 12], [1, 0, 1, 0, 1])


def test_a_history_that_was_written_anew_begins_another_trajectory() -> None:
    first = generation([1, 2], [10, 11])
    other = generation([1, 2, 99], [12])
    a, b = captured(first, other).trajectories()
    assert (a.response_ids, b.response_ids, b.prompt_ids) == ([10, 11], [12], [1, 2, 99])


def test_branches_share_what_they_have_in_common_but_only_one_learns_it() -> None:
    root = generation([1], [10])
    left, right = generation([*root.ids, 2], [20]), generation([*root.ids, 3], [30])
    a, b = captured(root, left, right).trajectories()
    assert (a.response_ids, a.loss_mask) == ([10, 2, 20], [1, 0, 1])
    assert (b.response_ids, b.loss_mask, b.logprobs) == ([10, 3, 30], [0, 0, 1], [0.0, 0.0, -30.0])


def test_nothing_captured_is_no_trajectory() -> None:
    assert History().trajectories() == []


SPANS = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.lists(st.integers(0, 3), max_size=3),
        st.lists(st.integers(0, 3), min_size=1),
    ),
    min_size=1,
    max_size=8,
)


@given(SPANS)
def test_the_masks_sum_to_the_number_of_sampled_tokens(
    spans: list[tuple[int, list[int], list[int]]],
) -> None:
    """The sums agree for random trees, in which generations continue earlier ones or begin anew, and ids
    collide often.
    """
    made: list[Generation] = []
    for parent, between, answer in spans:
        prompt = [*(made[parent].ids if parent < len(made) else [1]), *between]
        made.append(generation(prompt, answer))
    trajectories = captured(*made).trajectories()
    assert sum(sum(t.loss_mask) for t in trajectories) == sum(len(g.token_ids) for g in made)
    for t in trajectories:
        assert all(bool(logprob) <= mask for logprob, mask in zip(t.logprobs, t.loss_mask, strict=True))
    everything = [t.prompt_ids + t.response_ids for t in trajectories]
    assert all(any(ids[: len(g.ids)] == g.ids for ids in everything) for g in made)


def test_empty_answers_that_a_client_leaves_out_are_put_back() -> None:
    """Omitted empty answers are restored, as openai-agents continues as a user and pydantic-ai as the system; an answer
    that is present stays the only one.
    """
    asked, empty = [{"role": "user", "content": "q"}], {"role": "assistant", "content": ""}
    conversation = ServedConversation("key", answered_empty={as_key(asked)})
    for role in ("user", "system", "developer"):
        more = {"role": role, "content": "r"}
        assert conversation.with_empty_answers([*asked, more]) == [*asked, empty, more]
    for more in (empty, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "a"}):
        assert conversation.with_empty_answers([*asked, more]) == [*asked, more]
    assert conversation.with_empty_answers(asked) == asked
