"""The engine's routes on their way to the rank that trains on them."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from generation.trajectory import Trajectory
from sharding.ranks import all_to_all_bytes, rank, send_to_all
from tests.support.learning_steps import as_answers, on_ranks
from trainer.learning.answers import exchange_samples, gather_answers
from trainer.learning.batching import assign_to_ranks
from trainer.learning.groups import to_sample
from trainer.learning.routes import checked_routes
from trainer.types import RouteFormat, Sample

FORMAT = RouteFormat(layers=(1, 3), experts=6, top_k=2)
WIDE = RouteFormat(layers=(0,), experts=300, top_k=3)


def answered(
    format: RouteFormat, prompt: int = 4, mask: tuple[int, ...] = (1, 1, 0, 1), seed: int = 0
) -> Trajectory:
    """Return a trajectory with routes of all layers up to the last with experts, as engines give them: dense ones are
    zeros.
    """
    generator = np.random.default_rng(seed)
    made = Trajectory(2, 5, list(range(prompt)), list(range(len(mask))), list(mask), [0.0] * len(mask))
    rows = prompt + len(mask) - 1
    made.routes = np.zeros(
        (rows, format.layers[-1] + 1, format.top_k), np.uint8 if format.experts <= 256 else np.uint16
    )
    for token in range(rows):
        for layer in format.layers:
            made.routes[token, layer] = generator.choice(format.experts, format.top_k, replace=False)
    return made


@pytest.mark.parametrize("format", [FORMAT, WIDE])
def test_routes_of_the_layers_with_experts_arrive_with_the_sample(format: RouteFormat) -> None:
    step = [
        answered(format, prompt, mask, seed)
        for seed, (prompt, mask) in enumerate([(4, (1, 1, 0, 1)), (1, (1,)), (7, (1, 1))])
    ]
    samples = exchange_samples(
        [gather_answers(step)], [[[0, 1, 2]]], lambda t: to_sample(t, routes=format), format
    )
    for sample, trajectory in zip(samples[0], step, strict=True):
        assert (
            sample.routes is not None
            and trajectory.routes is not None
            and sample.routes.dtype == format.dtype
        )
        expected = trajectory.routes[:, list(format.layers)].tolist()
        assert sample.routes.tolist() == expected and len(expected) == len(sample.input_ids) - 1
        assert sample.input_ids == trajectory.prompt_ids + trajectory.response_ids


def test_a_rank_receives_routes_only_of_its_own_samples() -> None:
    step = [answered(FORMAT, 2 + seed, (1,) * (1 + seed % 3), seed) for seed in range(9)]
    for prompt, made in enumerate(step):
        made.prompt_index, made.sample_index = prompt, 0
    bare = [replace(made, routes=None) for made in step]
    shares = assign_to_ranks([len(made.prompt_ids + made.response_ids) for made in step], 3)
    message_sizes: list[int] = []
    handed: dict[int, int] = {}

    def telling(message: bytes) -> list[bytes]:
        message_sizes.append(len(message))
        return send_to_all(message)

    def handing(outgoing: list[bytes]) -> list[bytes]:
        came = all_to_all_bytes(outgoing)
        handed[rank()] = sum(map(len, came))
        return came

    def trained(step: list[Trajectory], format: RouteFormat | None) -> list[Sample]:
        return exchange_samples(
            [as_answers(step)], [shares], lambda t: to_sample(t, routes=format), format
        )[0]

    where = "trainer.learning.answers"
    with patch(f"{where}.send_to_all", telling), patch(f"{where}.all_to_all_bytes", handing):
        on_ranks(3, lambda: trained(bare, None))
        without, bytes_without = sorted(message_sizes), dict(handed)
        message_sizes.clear()
        samples = on_ranks(3, lambda: trained(step, FORMAT))
    assert sorted(message_sizes) == without
    for number, share in enumerate(shares):
        expected = [step[place].routes for place in share]
        rows = [routes[:, list(FORMAT.layers)].tolist() for routes in expected if routes is not None]
        assert [
            sample.routes.tolist() for sample in samples[number] if sample.routes is not None
        ] == rows
        count = sum(map(len, rows))
        assert handed[number] - bytes_without[number] == count * len(FORMAT.layers) * FORMAT.top_k > 0


def test_a_single_token_has_no_row_of_routes() -> None:
    alone = Trajectory(0, 0, [], [7], [1], [0.0])
    alone.routes = np.zeros((0, 4, 2), np.uint8)
    [[sample]] = exchange_samples(
        [gather_answers([alone])], [[[0]]], lambda t: to_sample(t, routes=FORMAT), FORMAT
    )
    assert sample.routes is not None and sample.routes.shape == (0, 2, 2)


def test_tool_tokens_after_the_last_answer_need_no_routes() -> None:
    trajectory = answered(FORMAT, mask=(1, 1, 0, 0, 0))
    assert trajectory.routes is not None
    trajectory.routes = trajectory.routes[:5]  # up to the token before the last that was sampled
    rows = checked_routes(trajectory, FORMAT)
    assert rows.shape == (8, 2, 2) and rows[:5].tolist() == trajectory.routes[:, [1, 3]].tolist()
    assert rows[5:].tolist() == [[[0, 1], [0, 1]]] * 3


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("none", "the engine gave no routes"),
        ("short", "gave 6 rows of routes for 7 tokens"),
        ("shape", r"routes are \[7, 4, 1\]"),
        ("layers", r"routes are \[7, 3, 2\], which does not fit layers up to 3"),
        ("outside", "send token 3 in layer 3 to an expert that is not among 6"),
        ("twice", "send token 2 in layer 1 to one expert twice"),
        ("layer without rows", "send token 0 in layer 3 to one expert twice"),
    ],
)
def test_an_invalid_route_is_one_sentence_about_sample_and_layer(fault: str, complaint: str) -> None:
    bad = answered(FORMAT)
    assert bad.routes is not None
    match fault:
        case "none":
            bad.routes = None
        case "short":
            bad.routes = bad.routes[:-1]
        case "shape":
            bad.routes = bad.routes[..., :1]
        case "layers":
            bad.routes = bad.routes[:, :3]
        case "outside":
            bad.routes[3, 3, 1] = 6
        case "twice":
            bad.routes[2, 1] = 5
        case "layer without rows":
            bad.routes[:, 3] = 0
    with pytest.raises(ValueError, match=f"prompt 2 sample 5: .*{complaint}") as caught:
        to_sample(bad, routes=FORMAT)
    assert len(str(caught.value)) < 300


def test_summaries_of_answers_have_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    message_sizes: list[int] = []
    monkeypatch.setattr(
        "trainer.learning.answers.send_to_all",
        lambda payload: [message_sizes.append(len(payload)) or payload],
    )
    with_routes, without = answered(FORMAT), answered(FORMAT)
    without.routes = None
    gather_answers([with_routes])
    gather_answers([without])
    assert message_sizes[0] == message_sizes[1]


def test_routes_take_a_byte_for_each_expert_of_a_token_up_to_256() -> None:
    assert (FORMAT.dtype, FORMAT.row_bytes) == (torch.uint8, 4)
    assert (WIDE.dtype, WIDE.row_bytes) == (torch.uint16, 6)
    assert RouteFormat((0,), 256, 8).row_bytes == 8
