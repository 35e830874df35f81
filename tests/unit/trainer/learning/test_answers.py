"""Every rank has the summaries of all answers that decide a step, and only the tokens that it trains on."""

import math
import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from generation.images import StoredImage
from generation.trajectory import Trajectory
from sharding.ranks import RemoteError, all_to_all_bytes, rank
from tests.support.learning_steps import as_answers, on_ranks, random_step
from tests.support.pictures import images
from tests.support.recipes import make_config
from trainer.config.schema import AlgorithmConfig, TrainConfig
from trainer.errors import UserError
from trainer.learning import rollout_metrics
from trainer.learning.answer_rows import answer_rows, text_by_author
from trainer.learning.answers import exchange_samples, gather_answers
from trainer.learning.batching import assign_to_ranks
from trainer.learning.groups import to_sample
from trainer.learning.metrics import check_first_gap, engine_gap, named_sums, over_ranks
from trainer.types import Sample


def test_every_rank_has_a_summary_of_all_trajectories() -> None:
    step = random_step(6, 3, seed=4)
    for answers in on_ranks(3, lambda: as_answers(step)):
        for answer, t in zip(
            answers, sorted(step, key=lambda t: (t.prompt_index, t.sample_index)), strict=True
        ):
            assert (answer.prompt_index, answer.sample_index, answer.reward) == (
                t.prompt_index,
                t.sample_index,
                t.reward,
            )
            assert answer.length == len(
                t.prompt_ids + t.response_ids
            ) and answer.sampled == t.loss_mask.count(1)
            assert (
                answer.runs == "".join(map(str, [0, *t.loss_mask])).count("01")
                and answer.turns == t.turns
            )
            assert answer.cut == (t.finish_reason == "length") and answer.error == t.error
            assert answer.turn_rewards == t.turn_rewards and answer.reward_parts == t.reward_parts
            assert answer.trainable() == to_sample(t).trainable
            assert answer.trainable(overlong_filter=True) == to_sample(t, overlong_filter=True).trainable
            assert answer.rank == t.prompt_index % 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_sequence_goes_only_to_the_rank_that_trains_on_it(ranks: int) -> None:
    step = random_step(5, 4, seed=6)

    def mine() -> list[tuple[int, Sample, Sample]]:
        answers = [as_answers(step), as_answers(step)[::-1]]
        shares = [assign_to_ranks([t.length for t in part], ranks) for part in answers]
        exchanged = exchange_samples(answers, shares, to_sample)
        by_order = sorted(step, key=lambda t: (t.prompt_index, t.sample_index))
        expected = [
            [order[i] for i in by_rank[rank()]]
            for order, by_rank in zip((by_order, by_order[::-1]), shares, strict=True)
        ]
        return [
            (id(t), sample, to_sample(t))
            for trajectories, samples in zip(expected, exchanged, strict=True)
            for t, sample in zip(trajectories, samples, strict=True)
        ]

    everyones = [triple for triples in on_ranks(ranks, mine) for triple in triples]
    assert set(Counter(who for who, _, _ in everyones).values()) == {2} and len(everyones) == 2 * len(
        step
    )
    for _, got, wanted in everyones:
        assert got.input_ids == wanted.input_ids and got.loss_mask == wanted.loss_mask
        assert torch.equal(torch.tensor(got.engine_logprobs), torch.tensor(wanted.engine_logprobs))


AWKWARD = [0.0, -0.0, 1e-45, -3.5, 3.5, 3.5, math.inf, -math.inf, 2.0**-126]


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_place_among_the_sorted_numbers_of_all_ranks_is_found_exactly(ranks: int) -> None:
    numbers = [
        *AWKWARD,
        *torch.randn(200, generator=torch.Generator().manual_seed(0)).tolist(),
        math.nan,
    ]
    ordered = sorted(torch.tensor(numbers[:-1]).tolist())

    def numbers_in_order() -> tuple[int, list[float]]:
        count, nth_smallest = over_ranks(torch.tensor(numbers[rank() :: ranks]))
        return count, [nth_smallest(place) for place in range(len(numbers))]

    for count, places in on_ranks(ranks, numbers_in_order):
        assert count == len(numbers) and places[:-1] == ordered and math.isnan(places[-1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_gap_equals_a_loop_over_all_tokens(ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    trainer, engine = torch.randn(200, generator=generator), torch.randn(200, generator=generator) * 0.1
    differences = [t - e for t, e in zip(trainer.tolist(), engine.tolist(), strict=True)]
    distances = sorted(map(abs, differences))
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.28)

    def gap_of_rank() -> dict[str, float]:
        mine = slice(rank(), 100, ranks), slice(100 + rank(), None, ranks)
        return engine_gap([(trainer[part], engine[part]) for part in mine], config)

    for got in on_ranks(ranks, gap_of_rank):
        assert got["gap/mean"] == pytest.approx(statistics.fmean(distances), rel=1e-12)
        assert got["gap/p95"] == distances[189] and got["gap/max"] == distances[-1]
        assert got["gap/outside_clip"] == sum(not 0.8 <= math.exp(d) <= 1.28 for d in differences) / 200


def test_the_gap_of_few_tokens() -> None:
    assert engine_gap([], AlgorithmConfig()) == {}
    assert engine_gap([(torch.empty(0), torch.empty(0))], AlgorithmConfig()) == {}
    one = engine_gap([(torch.tensor([-1.0]), torch.tensor([-1.5]))], AlgorithmConfig())
    assert one == {"gap/mean": 0.5, "gap/p95": 0.5, "gap/max": 0.5, "gap/outside_clip": 1.0}


def test_a_first_gap_beyond_the_limit_ends_the_run_with_what_to_try() -> None:
    def config(limit: float | None = 0.1, policy: str = "bfloat16", **engine: Any) -> TrainConfig:
        sections = {"sync": {"first_gap_limit": limit}, "policy": {"dtype": policy}, "engine": engine}
        return make_config(**sections)

    exact, mixed = config(policy="float32"), config(policy="float32", dtype="bfloat16")
    rounded = config(policy="float32", extra={"kv_cache_dtype": "fp8"})
    for metrics, recipe in (
        ({"gap/mean": 3.0}, config(None)),
        ({}, config()),
        ({"gap/mean": 0.002}, exact),
    ):
        check_first_gap(metrics, recipe)
    for recipe in (config(), mixed, rounded):
        check_first_gap({"gap/mean": 0.1}, recipe)
        for gap in (0.11, math.nan):
            with pytest.raises(
                UserError, match=r"nats apart.*sync.first_gap_limit = 0.1,.*to null"
            ) as caught:
                check_first_gap({"gap/mean": gap}, recipe)
            assert ("engine.dtype float32" in str(caught.value)) == (recipe is not rounded)
            assert ("engine.extra without kv_cache_dtype" in str(caught.value)) == (recipe is rounded)
    with pytest.raises(
        UserError, match=r"more than 0.002, which sync.first_gap_limit = 0.1 means in float32"
    ):
        check_first_gap({"gap/mean": 0.0021}, exact)


def test_what_to_try_for_a_gap_is_not_set_already(monkeypatch: pytest.MonkeyPatch) -> None:
    def advice(device: str, **sections: Any) -> str:
        keys = {"run": {"device": device}, "policy": {"dtype": "float32"}, **sections}
        config = make_config(**keys)
        with pytest.raises(UserError) as caught:
            check_first_gap({"gap/mean": 1.0}, config)
        return str(caught.value).partition("it was made: try ")[2].partition(", each by itself")[0]

    routes = "model.routes engine for a mixture of experts"
    assert advice("cuda") == f"batch.packing false, {routes}"
    assert advice("cpu", engine={"plain_cpu_weights": True}, batch={"packing": False}) == (
        f"engine.plain_cpu_weights false, {routes}"
    )
    assert (
        advice("cuda", policy={"dtype": "bfloat16"}, batch={"packing": False})
        == f"engine.dtype float32, {routes}"
    )
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert advice("cuda").startswith("the environment without TRITON_F32_DEFAULT, ")
    done = {"model": {"path": "m", "routes": "engine"}, "batch": {"packing": False}}
    assert advice("cpu", **done) == "another model"


def test_sums_do_not_depend_on_which_rank_has_a_number() -> None:
    numbers = (
        torch.randn(100, generator=torch.Generator().manual_seed(2))
        .double()
        .mul(1e9)
        .exp2()
        .clamp(max=1e300)
    )
    pairs = [("a" if n % 3 else "b", value) for n, value in enumerate(numbers.tolist())]
    expected = {
        name: (
            math.fsum(value for key, value in pairs if key == name),
            sum(key == name for key, _ in pairs),
        )
        for name in "ab"
    }
    for ranks in (1, 2, 3):
        assert on_ranks(ranks, lambda n=ranks: named_sums(pairs[rank() :: n])) == [expected] * ranks
    assert math.isnan(named_sums([("a", 1.0), ("a", math.inf)])["a"][0])


def test_metrics_of_a_step_are_bit_equal_on_any_number_of_ranks() -> None:
    step = random_step(7, 4, seed=3)
    for number, t in enumerate(step):
        t.reward_parts["a"] = 0.1 * number
        t.metrics |= {
            "tools/calls": 1.0 + number,
            "tools/errors": float(number % 3),
            "server/retemplated": 2.0,
        }
    (alone,) = on_ranks(1, lambda: rollout_metrics(as_answers(step)))
    assert alone["server/retemplated"] == 2.0 * sum(not t.error for t in step)
    for ranks in (2, 3):
        assert on_ranks(ranks, lambda: rollout_metrics(as_answers(step))) == [alone] * ranks


def test_rank_0_gets_all_rows_of_answers_in_order() -> None:
    step = random_step(4, 2, seed=1)
    prompts: Any = [SimpleNamespace(id=10 + i, token_ids=(i,), row={"answer": str(i)}) for i in range(4)]
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: f"prompt {ids}")
    for t in step:
        t.text = f"{t.prompt_index} {t.sample_index}"
    rows, *other_rows = on_ranks(3, lambda: answer_rows(as_answers(step)[:6], prompts, tokenizer))
    assert other_rows == [[], []]
    first = sorted(step, key=lambda t: (t.prompt_index, t.sample_index))[:6]
    assert rows == [
        {
            "prompt_id": 10 + t.prompt_index,
            "sample": t.sample_index,
            "prompt": f"prompt {t.prompt_ids}",
            "text": t.text,
            "answer": str(t.prompt_index),
            "reward": t.reward,
            "parts": t.reward_parts,
            "finish_reason": t.finish_reason,
            "tokens": len(t.response_ids),
            "weight_version": 0,
            "error": t.error,
        }
        | (
            {}
            if all(t.loss_mask)
            else {"pieces": [list(piece) for piece in text_by_author(t, tokenizer)]}
        )
        for t in first
    ]


def test_the_words_of_the_first_error_are_known_everywhere() -> None:
    step = random_step(4, 2, seed=1)
    for t in step:
        t.error = f"prompt {t.prompt_index} é\ud800" if t.prompt_index in (1, 2) else ""
    for number, answers in enumerate(on_ranks(3, lambda: as_answers(step))):
        errors = [(answer.prompt_index, answer.error) for answer in answers if answer.error]
        assert errors[0] == (1, "prompt 1 é?")
        assert all(
            words.startswith("prompt 2" if number == 2 else "an error on rank 2")
            for p, words in errors
            if p == 2
        )


def test_a_trajectory_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    step = random_step(4, 2, seed=1)
    step[0].turns = -1

    def error_message() -> str:
        try:
            as_answers(step)
        except RemoteError as error:
            return str(error)
        return ""

    assert all("rank 0: OverflowError" in words for words in on_ranks(3, error_message))


class Sent(Exception):
    """An exception in place of the exchange that would begin here."""


@pytest.mark.parametrize("ranks", [1, 64, 512])
def test_beside_its_share_a_rank_receives_32_bytes_for_each_answer(ranks: int) -> None:
    """The bytes are counted that each rank, with 16 answers, would send to every other one."""
    share, all_answers, message_sizes, tokens = 16, [], [], [0] * ranks
    for number in range(ranks):
        local_trajectories = [
            spoken(2 * number + i // 8, i % 8, 20 + (7 * i + 3 * number) % 50) for i in range(share)
        ]
        with patch(
            "trainer.learning.answers.send_to_all",
            lambda payload: message_sizes.append(len(payload)) or [payload],
        ):
            all_answers += gather_answers(local_trajectories)
    shares = [assign_to_ranks([answer.length for answer in all_answers], ranks)]
    trajectories = [answer.trajectory for answer in all_answers]

    def count(payloads: list[bytes]) -> None:
        for receiver, payload in enumerate(payloads):
            tokens[receiver] += len(payload)
        raise Sent

    for answer in all_answers:
        answer.trajectory = None
    for sender in range(ranks):
        here = slice(sender * share, (sender + 1) * share)
        for answer, trajectory in zip(all_answers[here], trajectories[here], strict=True):
            answer.trajectory = trajectory
        with (
            patch("trainer.learning.answers.all_to_all_bytes", count),
            patch("trainer.learning.answers.world_size", lambda: ranks),
        ):
            with pytest.raises(Sent):
                exchange_samples([all_answers], shares, to_sample)
        for answer in all_answers[here]:
            answer.trajectory = None
    for receiver, positions in enumerate(shares[0]):
        assert tokens[receiver] == 9 * sum(all_answers[place].length for place in positions)
    sizes = 2 * 2 * 8 * ranks  # before either exchange each says that it is ready, and how much it sends
    assert sum(message_sizes) + sizes <= 32 * len(all_answers)
    assert max(tokens) <= 9 * (share * 70 + 80)  # the share, and the longest answer


def spoken(prompt: int, sample: int, length: int) -> Trajectory:
    return Trajectory(
        prompt, sample, [3] * 10, [5] * length, [1] * length, [-1.0] * length, reward=sample / 3
    )


def test_images_are_sent_once_and_images_of_the_data_are_read_locally(
    tmp_path: Path,
) -> None:
    """No message to all ranks, or to one that does not train on them, contains images."""
    [common, repeated, late] = images((20, 10), (8, 8), (9, 5))
    (tmp_path / "common.png").write_bytes(common.data)
    stored = StoredImage(lambda: tmp_path / "common.png", common.digest, common.size)
    step = random_step(4, 2, seed=3)
    for number, t in enumerate(step):
        t.images = [(common,), (repeated, common, repeated), (), (late,)][number % 4]
        t.image_spans = tuple((3 * at, at + 1) for at in range(len(t.images)))
    sizes: list[int] = []

    def counted(payloads: list[bytes]) -> Any:
        sizes.extend(
            payload.count(common.data) + 100 * payload.count(repeated.data) for payload in payloads
        )
        return all_to_all_bytes(payloads)

    def mine() -> list[tuple[Sample, Sample]]:
        answers = as_answers(step)
        for answer in answers:
            answer.stored_images = (stored,)
        shares = assign_to_ranks([t.length for t in answers], 2)
        [exchanged] = exchange_samples([answers], [shares], to_sample)
        by_order = sorted(step, key=lambda t: (t.prompt_index, t.sample_index))
        return [
            (sample, to_sample(by_order[at]))
            for sample, at in zip(exchanged, shares[rank()], strict=True)
        ]

    with patch("trainer.learning.answers.all_to_all_bytes", counted):
        pairs = [pair for received in on_ranks(2, mine) for pair in received]
    assert len(pairs) == len(step)
    for received, expected in pairs:
        assert (received.images, received.image_spans) == (expected.images, expected.image_spans)
        assert [image.data for image in received.images] == [image.data for image in expected.images]
    assert max(size // 100 for size in sizes) == 1 and not any(size % 100 for size in sizes)
    (tmp_path / "common.png").write_bytes(late.data)
    with pytest.raises((UserError, RemoteError), match="an image of the data has changed"):
        on_ranks(2, mine)
