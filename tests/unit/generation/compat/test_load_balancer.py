"""Where requests go: expected choices, and defects of TorchRL's that are not ours."""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from generation.compat.load_balancer import EngineLoad, LoadBalancer, routing_key


class LoadedEngine:
    """An engine with a fixed load, which counts how often it was asked."""

    def __init__(self, pending: int = 0, usage: float | None = 0.0) -> None:
        self.pending, self.usage, self.asked = pending, usage, 0

    def get_num_unfinished_requests(self) -> int:
        self.asked += 1
        return self.pending

    def get_cache_usage(self) -> float | None:
        return self.usage


class Broken:
    def get_num_unfinished_requests(self) -> int:
        raise OSError("no counters today")

    get_cache_usage = get_num_unfinished_requests


class Service:
    """The attributes of an AsyncVLLM that the balancer uses."""

    def __init__(self, *pending: int) -> None:
        self.actors = [LoadedEngine(count, 0.5) for count in pending]

    def get_num_unfinished_requests(self) -> list[int]:
        return [engine.pending for engine in self.actors]

    def get_cache_usage(self) -> list[float | None]:
        return [engine.usage for engine in self.actors]


def engines(*pending: int) -> list[LoadedEngine]:
    return [LoadedEngine(count) for count in pending]


def chosen(balancer: LoadBalancer, prompt: Any = None, times: int = 40) -> set[int]:
    return {balancer.select_actor(prompt) for _ in range(times)}


def at(balancer: LoadBalancer, index: int) -> str:
    """Return a prompt whose prefix belongs to engine `index`."""
    quiet = LoadBalancer(engines(*[0] * len(balancer.actors)))
    return next(text for text in map(str, range(1000)) if quiet.select_actor(text) == index)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((LoadedEngine(),),), "actors must be either an AsyncVLLM instance or a list of actors"),
        ((7,), "actors must be either an AsyncVLLM instance or a list of actors"),
        (([],), "No actors provided"),
        ((SimpleNamespace(actors=[]),), "No actors provided"),
        (
            (engines(0), "fastest"),
            "Invalid strategy 'fastest'. Must be one of {'kv-cache', 'prefix-aware', ",
        ),
        ((engines(0), ["requests", "x"]), "Invalid strategy 'x'"),
        ((engines(0), []), "At least one strategy must be provided"),
        ((engines(0), None, 0), "prefix_length must be at least 1"),
        ((engines(0), None, 8, 0.0), "overload_threshold above 0"),
    ],
)
def test_invalid_arguments_of_the_load_balancer_are_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        LoadBalancer(*arguments)
    assert message in str(caught.value)


def test_defaults_and_a_single_strategy() -> None:
    balancer = LoadBalancer(Service(0, 0))
    assert balancer.strategies == ["prefix-aware", "requests"]
    assert balancer.strategy == "prefix-aware"
    assert LoadBalancer(engines(0), "kv-cache").strategies == ["kv-cache"]


def test_strategies_are_tried_in_order(caplog: pytest.LogCaptureFixture) -> None:
    listed = [Broken(), Broken(), Broken()]
    balancer = LoadBalancer(listed, ["requests", "kv-cache", "round-robin"])
    assert [balancer.select_actor() for _ in range(4)] == [0, 1, 2, 0]
    assert (
        "Strategy 'requests' failed with error: no counters today. Trying next strategy..."
        in caplog.text
    )
    with pytest.raises(ValueError, match="No actors available for selection"):
        listed.clear()
        balancer.select_actor()


def test_the_last_strategy_is_random_and_repeatable(caplog: pytest.LogCaptureFixture) -> None:
    def draws(seed: int) -> list[int]:
        balancer = LoadBalancer([Broken()] * 4, ["prefix-aware", "requests"], seed=seed)
        return [balancer.select_actor() for _ in range(30)]

    assert draws(1) == draws(1) != draws(2)
    assert set(draws(1)) == {0, 1, 2, 3}
    assert (
        "All strategies ['prefix-aware', 'requests'] failed. Falling back to random selection."
        in caplog.text
    )


def test_prefix_aware_needs_a_prompt() -> None:
    assert chosen(LoadBalancer(engines(3, 0, 3))) == {1}


@pytest.mark.parametrize(
    ("pending", "expected"), [((3, 1, 2), {1}), ((5, 2, 2), {1, 2}), ((0, 0, 0), {0, 1, 2})]
)
def test_the_engine_with_fewest_requests_is_chosen(pending: tuple[int, ...], expected: set[int]) -> None:
    assert chosen(LoadBalancer(engines(*pending), "requests")) == expected
    assert chosen(LoadBalancer(Service(*pending), "requests")) == expected


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        ((0.1, 0.1 + 5e-7), {0, 1}),
        ((0.1, 0.1 + 2e-6), {0}),
        ((0.9, 0.2, 0.5), {1}),
        ((0.0, 0.0), {0, 1}),
    ],
)
def test_the_engine_with_the_least_kv_cache_in_use_is_chosen(
    usages: tuple[float, ...], expected: set[int]
) -> None:
    assert chosen(LoadBalancer([LoadedEngine(0, usage) for usage in usages], "kv-cache")) == expected


def test_equal_kv_cache_is_decided_by_requests() -> None:
    assert chosen(
        LoadBalancer([LoadedEngine(4, 0.5), LoadedEngine(1, 0.5), LoadedEngine(0, 0.9)], "kv-cache")
    ) == {1}


def test_unknown_kv_cache_use_is_no_number(caplog: pytest.LogCaptureFixture) -> None:
    """Without a figure for the KV cache the next strategy decides; TorchRL's balancer invents a figure."""
    balancer = LoadBalancer([LoadedEngine(2, 0.1), LoadedEngine(0, None)], ["kv-cache", "requests"])
    assert chosen(balancer) == {1}
    assert "engine 1 has not reported its KV-cache use" in caplog.text


def test_the_prefix_decides_and_what_follows_does_not() -> None:
    balancer = LoadBalancer(engines(*[0] * 16), prefix_length=3)
    assert balancer.select_actor([5, 6, 7, 8]) == balancer.select_actor([5, 6, 7, 9, 10])
    assert balancer.select_actor("solve this now: 2+2") == balancer.select_actor("solve  this\nnow: 3+3")
    spread = Counter(balancer.select_actor([i, i + 1, i + 2]) for i in range(1600))
    assert set(spread) == set(range(16))
    assert max(spread.values()) < 160  # 100 each, give or take


def test_the_same_engine_in_every_process() -> None:
    program = (
        "from generation.compat.load_balancer import LoadBalancer\n"
        "class E:\n"
        "    def get_num_unfinished_requests(self): return 0\n"
        "b = LoadBalancer([E() for _ in range(64)])\n"
        "print([b.select_actor(p) for p in ('What is 2+2?', [1, 2, 3], 'naïve', (7,))])\n"
    )
    balancer = LoadBalancer(engines(*[0] * 64))
    here = str([balancer.select_actor(p) for p in ("What is 2+2?", [1, 2, 3], "naïve", (7,))])
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert run.stdout.strip() == here
    assert here == "[18, 45, 15, 62]"


@pytest.mark.parametrize(
    "prompt", ["", "  \n", [], {}, {"prompt_embeds": 1}, 3.5, [1, "a"], {"prompt": " "}]
)
def test_a_prompt_without_a_routing_key_is_left_to_the_next_strategy(prompt: Any) -> None:
    assert chosen(LoadBalancer(engines(1, 1, 0)), prompt) == {2}
    with pytest.raises(ValueError):
        routing_key(prompt, 8)


def test_all_forms_of_one_prompt_go_the_same_way() -> None:
    ids = [17, 4, 99, 3]
    forms: list[Any] = [
        ids,
        tuple(ids),
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "prompt": "ids take precedence"},
        SimpleNamespace(prompt_token_ids=ids),
    ]
    assert len({routing_key(form, 8) for form in forms}) == 1
    assert (
        routing_key("a text", 8)
        == routing_key({"prompt": "a text"}, 8)
        == routing_key(SimpleNamespace(prompt="a text"), 8)
    )
    assert routing_key([5], 8) != routing_key("5", 8)


def test_sessions_stay_together() -> None:
    balancer = LoadBalancer(engines(*[0] * 8))
    assert len({balancer.select_actor([i] * 9, {"session_id": "a"}) for i in range(30)}) == 1
    assert (
        len({balancer.select_actor([i] * 9, {"session_id": 7, "user": object()}) for i in range(30)})
        == 1
    )
    assert balancer.select_actor("x", {"user": "me"}) == balancer.select_actor("x")


def test_round_robin_survives_an_engine_that_leaves() -> None:
    listed = engines(9, 0, 0)
    balancer = LoadBalancer(listed, "round-robin")
    assert [balancer.select_actor() for _ in range(5)] == [0, 1, 2, 0, 1]
    assert balancer.get_stats()["round_robin_index"] == 2
    listed.pop()
    assert [balancer.select_actor() for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("pending", "overloaded"),
    [((3, 1), False), ((4, 1), True), ((15, 5, 10), False), ((16, 5, 10), True), ((6, 0, 0), True)],
)
def test_an_overloaded_engine_loses_its_prefix(pending: tuple[int, ...], overloaded: bool) -> None:
    balancer = LoadBalancer(engines(*pending))
    assert (0 not in chosen(balancer, at(balancer, 0))) == overloaded


@pytest.mark.parametrize("pending", [(1, 0), (3, 0), (2, 0, 0, 0)])
def test_a_few_requests_are_not_an_overload(pending: tuple[int, ...]) -> None:
    balancer = LoadBalancer(engines(*pending))
    assert chosen(balancer, at(balancer, 0)) == {0}
    strict = LoadBalancer(engines(*pending), overload_floor=0)
    assert 0 not in chosen(strict, at(strict, 0))


def test_unreadable_counts_are_no_overload() -> None:
    balancer = LoadBalancer([Broken(), Broken()])
    assert chosen(balancer, at(balancer, 1)) == {1}


def test_statistics_have_the_promised_keys() -> None:
    keys = {
        "strategies",
        "primary_strategy",
        "num_actors",
        "prefix_length",
        "overload_threshold",
        "round_robin_index",
        "actor_stats",
    }
    stats = LoadBalancer([LoadedEngine(3, 0.25), LoadedEngine(0, None)]).get_stats()
    assert set(stats) == keys
    assert stats["actor_stats"] == [
        {"actor_index": 0, "pending_requests": 3, "cache_usage": 0.25},
        {"actor_index": 1, "pending_requests": 0, "cache_usage": None},
    ]
    gone = LoadBalancer([LoadedEngine()])
    gone.actors.clear()
    assert gone.get_stats()["actor_stats"] == [] and "error" not in gone.get_stats()
    broken = LoadBalancer([Broken()]).get_stats()
    assert set(broken) == keys | {"error"}
    assert broken["error"] == "no counters today"
    assert broken["actor_stats"] == []
    assert LoadBalancer(Service(1, 2)).get_stats()["actor_stats"][1]["pending_requests"] == 2


def test_an_engine_is_asked_once_a_choice() -> None:
    """A choice reads each engine's load once, from attributes of objects in this process and never over a
    connection.
    """
    listed = engines(9, 0, 0, 0)
    balancer = LoadBalancer(listed)
    balancer.select_actor(at(balancer, 0))
    assert [engine.asked for engine in listed] == [1] * 4


@pytest.mark.parametrize("strategy", [None, "requests"])
def test_a_burst_is_routed_by_the_requests_just_submitted(strategy: str | None) -> None:
    """No engine gets more than its overload permits when 64 requests with one prompt arrive before any of them
    finishes.
    """
    loads = [EngineLoad() for _ in range(4)]
    balancer = LoadBalancer(loads, strategy)
    for _ in range(64):
        loads[balancer.select_actor("the same few words")].submitted()
    counts = [load.get_num_unfinished_requests() for load in loads]
    assert sum(counts) == 64
    assert max(counts) <= (25 if strategy is None else 16)


def test_eight_threads_lose_no_count() -> None:
    loads = [EngineLoad() for _ in range(5)]
    balancer = LoadBalancer(loads, ["round-robin"])

    def work(_: int) -> list[int]:
        seen = []
        for _ in range(100):
            seen.append(balancer.select_actor())
            loads[seen[-1]].submitted()
            loads[seen[-1]].finished()
            loads[seen[-1]].submitted()
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = [index for part in pool.map(work, range(8)) for index in part]
    assert Counter(seen) == dict.fromkeys(range(5), 160)
    assert [load.get_num_unfinished_requests() for load in loads] == [160] * 5
